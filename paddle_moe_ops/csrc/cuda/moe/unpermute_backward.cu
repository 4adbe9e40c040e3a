// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Gradient of unpermute: d_rows[r] = w_r * d_out[t] and d_weights[index(r)] = dot(d_out[t], rows[r]), either or both in one pass.
//
// * scatter_rows, without d_weights: a warp loads 32 accesses of up to 16 bytes of one token of d_out and writes them, weighted,
//   to each of its rows.
// * row_backward, with d_weights: a CTA per entry of the map. It reads a row and its token's row of d_out, which the L2 holds for
//   the token's other rows, and writes the weighted gradient along with the dot product.
// * token_backward, with d_weights, for many tokens with few rows each: a warp per token, since CTAs per entry would mostly find
//   none.
//
// The loads of a row's weight, two dependent ones, overlap the loads of the row's data. The first CTAs of the grid zero the rows
// without a token.
//
// Dot products have 256 lanes for any number of threads: access a of a row belongs to lane a % 256, a lane adds its products in
// order, and lanes are summed by halves, lane l + 128 onto lane l and so on. A thread with several lanes has a sum for each, so
// the bits are those of 256 threads.
//
// Memory-bound: d_rows (T + N) H elements, d_weights N H more (or (T + N) H alone).
#include <algorithm>

#include "common/checks.h"
#include "common/dtypes.h"
#include "cuda/moe/padding.cuh"
#include "cuda/moe/warp_rows.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kScatterThreads = 256;
constexpr int kWarpThreads = 64;
constexpr int kDotLanes = 256;
constexpr int kLanesPerThread = kDotLanes / kWarpSize;  // dot-product lanes per lane of a warp
constexpr int64_t kMaxRowsPerTokenForWarps = 4;         // rows per token; below it a token may have a warp
constexpr int64_t kMinTokensForWarps = 4096;            // tokens; from here on a token may have a warp
constexpr int64_t kMinRowsFor128Threads = 512;          // rows; from here on a row has 128 threads, not 256
constexpr int64_t kMinRowsFor64Threads = 16384;         // rows; from here on 64
constexpr int64_t kMinDotsFor64Threads = 2048;          // the same without d_rows

// Weight of a row and its index in weights; -1: none, the weight is 0.
struct RowWeight {
  float weight = 0.0f;
  int32_t place = -1;

  // Two dependent loads.
  __device__ void load(const pmo_unpermute_backward_params& p, int64_t row) {
    place = static_cast<int32_t>(weight_place(p, row));
    if (place >= 0 && p.d_rows != nullptr) weight = __ldg(p.weights + place);
  }

  // The same for the lane's row.
  __device__ void load(const pmo_unpermute_backward_params& p, const WarpRows& listed, bool copy) {
    if (!copy && listed.is_used()) load(p, listed.row);
  }
};

__device__ bool copies(const pmo_unpermute_backward_params& p, int64_t token, const WarpRows& first) {
  return p.weights == nullptr || (p.copy_single_row != 0 && has_one_row(p, token, first));
}

// True if d_weights is indexed by row; elements of rows without a token are then zeroed with the rows.
__host__ __device__ bool has_weights_by_row(const pmo_unpermute_backward_params& p) {
  return p.d_weights != nullptr && p.weight_index == nullptr;
}

// Zeroes the rows without a token, by the first `blocks` CTAs of the grid.
template <typename Rows, int kWidth>
__device__ void zero_padding_rows(const pmo_unpermute_backward_params& p, unsigned blocks) {
  const bool by_row = has_weights_by_row(p);
  constexpr int kElement = sizeof(typename Rows::Element);
  const int64_t bytes = p.hidden * kElement;
  PaddingRows(p.row_to_token, p.num_rows, blocks).each([&](int64_t row) {
    if (by_row && row < p.num_weights && threadIdx.x % kWarpSize == 0) p.d_weights[row] = 0.0f;
    if (p.d_rows != nullptr) zero_row<kWidth * kElement>(static_cast<char*>(p.d_rows) + row * bytes, bytes);
  });
}

// A lane moves kAccesses accesses of its token.
template <typename Rows, int kWidth, int kAccesses>
__global__ void __launch_bounds__(kScatterThreads)
    scatter_rows(const __grid_constant__ pmo_unpermute_backward_params p, unsigned padding, int parts) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  if (blockIdx.x < padding) return zero_padding_rows<Rows, kWidth>(p, padding);
  const int64_t vectors = p.hidden / kWidth;
  const WarpShare share(parts, padding);
  const int64_t token = share.item;
  if (token >= p.num_tokens) return;
  const int64_t vector = int64_t{share.part} * kAccesses * kWarpSize + threadIdx.x % kWarpSize;
  const auto* d_out = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride);
  Access given[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    if (vector + i * kWarpSize < vectors) given[i] = d_out[vector + i * kWarpSize];
  }
  WarpRows listed(p, token, 0);
  const bool copy = copies(p, token, listed);
  for (int64_t segment = 0;;) {
    RowWeight own;
    own.load(p, listed, copy);
    for (unsigned left = listed.used; left != 0;) {
      const int lane = WarpRows::pop_lane(&left);
      Element* d_row = static_cast<Element*>(p.d_rows) + __shfl_sync(kAllLanes, listed.row, lane) * p.hidden;
      const float weight = __shfl_sync(kAllLanes, own.weight, lane);
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const int64_t here = vector + i * kWarpSize;
        if (here >= vectors) break;
        if (copy) {
          reinterpret_cast<Access*>(d_row)[here] = given[i];
        } else {
          Elements<Rows, kWidth> gradient;
          gradient.set(given[i]);
          gradient.scaled(weight).store(d_row, here);
        }
      }
    }
    if (listed.ended) break;
    segment += kWarpSize;
    listed = WarpRows(p, token, segment);
  }
}

// One access of a row: stores its part of d_rows, returns `dot` plus its part of the dot product.
template <typename Rows, int kWidth, typename Access>
__device__ float access_backward(const Access& given, const Access& of_row, float weight, bool copy, Access* target, float dot) {
  if (copy) {
    if (target != nullptr) *target = given;
    return dot;
  }
  Elements<Rows, kWidth> gradient, loaded;
  gradient.set(given);
  loaded.set(of_row);
  if (target != nullptr) gradient.scaled(weight).store(target, 0);
  return gradient.dot(loaded, dot);
}

template <int kCount>
__device__ float sum_by_halves(float (&values)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] = __fadd_rn(values[i], values[i + half]);
  }
  return values[0];
}

// Row of a token's entry, or -1; by all lanes of a warp.
__device__ int32_t row_of_entry(const pmo_unpermute_backward_params& p, int64_t token, int entry) {
  int begin = 0;
  for (; begin + kWarpSize <= entry; begin += kWarpSize) {
    if (WarpRows(p, token, begin).ended) return -1;
  }
  const WarpRows listed(p, token, begin);
  const int32_t row = __shfl_sync(kAllLanes, listed.row, entry - begin);
  return (listed.used >> (entry - begin) & 1) != 0 ? row : -1;
}

// Zeroes the gradients of a token's weights that belong to none of its rows; by a warp.
__device__ void zero_slots_without_row(const pmo_unpermute_backward_params& p, int64_t token, unsigned slots) {
  const WarpRows listed(p, token, 0);
  const int64_t first = token * slots;
  const int64_t slot = !copies(p, token, listed) && listed.is_used() ? weight_place(p, listed.row) - first : -1;
  const unsigned taken = __reduce_or_sync(kAllLanes, slot >= 0 && slot < slots ? 1u << slot : 0u);
  const unsigned lane = threadIdx.x % kWarpSize;
  if (lane < slots && (taken >> lane & 1) == 0) p.d_weights[first + lane] = 0.0f;
}

// Both gradients, a CTA per entry of the map. A thread has kSums of the dot product's lanes; with one, a CTA has 256 threads or
// as many as the row has accesses. A thread loads kBatch accesses of d_out and of the row at a time: with many rows, fewer
// registers and higher occupancy are faster. `slots` is the number of a token's weights if the CTA of its first entry zeroes
// those without a row, else 0. The first `padding` CTAs zero the rows without a token.
template <typename Rows, int kWidth, int kSums, int kBatch>
__global__ void __launch_bounds__(kDotLanes / kSums)
    row_backward(const __grid_constant__ pmo_unpermute_backward_params p, unsigned padding, unsigned entries, unsigned slots) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  constexpr int kWarps = kDotLanes / kSums / kWarpSize;
  constexpr int kUnrolled = 4;
  __shared__ float partial[kWarps * kWarpSize];
  if (blockIdx.x < padding) return zero_padding_rows<Rows, kWidth>(p, padding);
  const unsigned block = blockIdx.x - padding, token = block / entries, entry = block - token * entries;
  const int32_t row = token < p.num_tokens ? row_of_entry(p, token, entry) : -1;
  if (row >= 0) {
    const bool copy = copies(p, token, WarpRows(p, token, 0));
    RowWeight own;  // loaded after the loads of the data are issued
    const int64_t vectors = p.hidden / kWidth, step = blockDim.x;
    const auto* d_out = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride);
    const auto* source = reinterpret_cast<const Access*>(static_cast<const Element*>(p.rows) + row * p.rows_row_stride);
    auto* target = p.d_rows == nullptr ? nullptr : reinterpret_cast<Access*>(static_cast<Element*>(p.d_rows) + row * p.hidden);
    float sums[kSums] = {};
#pragma unroll 1
    for (int64_t base = threadIdx.x; base < vectors; base += kUnrolled * step) {
#pragma unroll
      for (int part = 0; part < kUnrolled; part += kBatch) {
        const int64_t first = base + part * step;
        Access given[kBatch], accesses[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * step >= vectors) break;
          given[i] = d_out[first + i * step];
          if (!copy) accesses[i] = source[first + i * step];
        }
        if (part == 0 && base == threadIdx.x && !copy) own.load(p, row);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int64_t vector = first + i * step;
          if (vector >= vectors) break;
          float& sum = sums[(part + i) % kSums];
          sum = access_backward<Rows, kWidth>(given[i], accesses[i], own.weight, copy,
                                              target == nullptr ? nullptr : target + vector, sum);
        }
      }
    }
    partial[threadIdx.x] = sum_by_halves(sums);
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      float of_warps[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) of_warps[i] = i * kWarpSize < blockDim.x ? partial[i * kWarpSize + threadIdx.x] : 0.0f;
      const float dot = sum_over_warp_by_halves(sum_by_halves(of_warps));
      if (threadIdx.x == 0 && own.place >= 0) p.d_weights[own.place] = dot;
    }
  }
  if (slots != 0 && entry == 0 && token < p.num_tokens && threadIdx.x < kWarpSize) zero_slots_without_row(p, token, slots);
}

// Both gradients, a warp per token, row by row. A lane has eight of the dot product's lanes and loads kBatch of their accesses
// together. If these are all accesses of d_out, they stay in registers from row to row.
template <typename Rows, int kWidth, int kBatch>
__global__ void __launch_bounds__(kWarpThreads)
    token_backward(const __grid_constant__ pmo_unpermute_backward_params p, unsigned padding) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  if (blockIdx.x < padding) return zero_padding_rows<Rows, kWidth>(p, padding);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t vectors = p.hidden / kWidth;
  const int64_t token = int64_t{blockIdx.x - padding} * (kWarpThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (token < p.num_tokens) {
    const auto* d_out = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride);
    WarpRows listed(p, token, 0);
    const bool copy = copies(p, token, listed);
    Access given[kBatch];
    int64_t held_from = -1;
    for (int64_t segment = 0;;) {
      RowWeight own;  // loaded after the loads of the first row's data are issued
      bool is_loaded = false;
#pragma unroll 1
      for (unsigned left = listed.used; left != 0;) {
        const int holder = WarpRows::pop_lane(&left);
        const int64_t row = __shfl_sync(kAllLanes, listed.row, holder);
        const auto* source = reinterpret_cast<const Access*>(static_cast<const Element*>(p.rows) + row * p.rows_row_stride);
        auto* target = reinterpret_cast<Access*>(static_cast<Element*>(p.d_rows) + row * p.hidden);
        float sums[kLanesPerThread] = {};
#pragma unroll 1
        for (int64_t base = 0; base < vectors; base += kDotLanes) {
#pragma unroll
          for (int part = 0; part < kLanesPerThread; part += kBatch) {
            const int64_t first = base + part * kWarpSize + lane;
            Access accesses[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              if (!copy && first + i * kWarpSize < vectors) accesses[i] = source[first + i * kWarpSize];
            }
            if (kBatch < kLanesPerThread || base != held_from) {
#pragma unroll
              for (int i = 0; i < kBatch; ++i) {
                if (first + i * kWarpSize < vectors) given[i] = d_out[first + i * kWarpSize];
              }
              held_from = base;
            }
            if (!is_loaded) own.load(p, listed, copy);
            is_loaded = true;
            const float weight = __shfl_sync(kAllLanes, own.weight, holder);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              if (first + i * kWarpSize >= vectors) break;
              Access* const at = p.d_rows == nullptr ? nullptr : target + first + i * kWarpSize;
              sums[part + i] = access_backward<Rows, kWidth>(given[i], accesses[i], weight, copy, at, sums[part + i]);
            }
          }
        }
        const float dot = sum_over_warp_by_halves(sum_by_halves(sums));
        if (lane == holder && own.place >= 0) p.d_weights[own.place] = dot;
      }
      if (listed.ended) break;
      segment += kWarpSize;
      listed = WarpRows(p, token, segment);
    }
  }
}

Grid grid_of(int64_t blocks, int64_t threads) { return {grid_for(blocks, 1, kMaxBlocksOfGrid), static_cast<unsigned>(threads)}; }

// Params of tokens [first, first + count).
pmo_unpermute_backward_params of_tokens(const pmo_unpermute_backward_params& p, int64_t first, int64_t count) {
  pmo_unpermute_backward_params some = p;
  some.d_out = static_cast<const char*>(p.d_out) + first * p.d_out_row_stride * dtype_size(p.dtype);
  some.token_rows = p.token_rows + first * p.max_rows_per_token;
  some.num_tokens = count;
  return some;
}

bool has_many_tokens(const pmo_unpermute_backward_params& p) {
  return p.num_tokens >= kMinTokensForWarps && p.num_rows < kMaxRowsPerTokenForWarps * p.num_tokens;
}

bool has_blocks_for_rows(const pmo_unpermute_backward_params& p) {
  return !has_many_tokens(p) && p.num_tokens * p.max_rows_per_token <= kMaxBlocksOfGrid - kMaxPaddingBlocks;
}

// Number of a token's weights if row_backward zeroes the gradients of those without a row, else 0.
unsigned slots_to_zero(const pmo_unpermute_backward_params& p) {
  if (p.d_weights == nullptr || p.weight_index == nullptr || p.num_tokens == 0 || !has_blocks_for_rows(p)) return 0;
  const int64_t slots = p.num_weights / p.num_tokens, entries = p.max_rows_per_token;
  const bool fits = slots * p.num_tokens == p.num_weights && slots <= kWarpSize && entries >= 1 && entries <= kWarpSize;
  return fits ? static_cast<unsigned>(slots) : 0;
}

// True if the kernels write all of d_weights. Otherwise a memset precedes them; for few tokens it takes a tenth of the time.
bool kernels_write_all_weights(const pmo_unpermute_backward_params& p) {
  const bool by_row = has_weights_by_row(p) && p.num_tokens > 0 && p.num_weights <= p.num_rows && p.copy_single_row == 0;
  return by_row || slots_to_zero(p) != 0;
}

// Launches row_backward with up to kDotLanes / kSums threads per row.
template <typename Rows, int kWidth, int kSums, int kBatch>
int launch_rows(const pmo_unpermute_backward_params& p, bool has_padding, cudaStream_t stream) {
  const unsigned entries = static_cast<unsigned>(std::max<int64_t>(p.max_rows_per_token, 1));  // 0: only padding
  const int64_t threads = std::min<int64_t>(round_up(p.hidden / kWidth, kWarpSize), kDotLanes / kSums);
  const unsigned padding = has_padding ? padding_blocks(p.num_rows, threads) : 0;
  const Grid grid = grid_of(padding + p.num_tokens * p.max_rows_per_token, threads);
  return launch("row_backward", row_backward<Rows, kWidth, kSums, kBatch>, grid, stream, p, padding, entries, slots_to_zero(p));
}

template <typename Rows, int kWidth>
int launch_gradients(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  const bool has_padding = p.d_rows != nullptr || has_weights_by_row(p);
  const auto padding_of = [&](int64_t threads) { return has_padding ? padding_blocks(p.num_rows, threads) : 0; };
  const int64_t row_blocks = p.num_tokens * p.max_rows_per_token;
  if (row_blocks == 0 && !has_padding) return PMO_OK;
  const bool many_tokens = has_many_tokens(p);
  if (p.d_weights == nullptr) {
    constexpr int64_t kWarps = kScatterThreads / kWarpSize;
    // With few rows per token a warp mostly waits for row numbers and weights, so it moves more of the row.
    const auto kernel = many_tokens ? scatter_rows<Rows, kWidth, 2> : scatter_rows<Rows, kWidth, 1>;
    const int64_t parts = divide_up(vectors, many_tokens ? 2 * kWarpSize : kWarpSize);
    const unsigned padding = padding_of(kScatterThreads);
    const auto run = [&](int64_t first, int64_t count) {
      const unsigned others = first == 0 ? padding : 0;
      const Grid grid = grid_of(others + divide_up(count * parts, kWarps), kScatterThreads);
      return launch("scatter_rows", kernel, grid, stream, of_tokens(p, first, count), others, static_cast<int>(parts));
    };
    return in_grids(p.num_tokens, parts, kWarps, run, padding);
  }
  if (!has_blocks_for_rows(p)) {
    const unsigned padding = padding_of(kWarpThreads);
    const Grid grid = grid_of(padding + divide_up(p.num_tokens * kWarpSize, kWarpThreads), kWarpThreads);
    const auto kernel =
        p.d_rows == nullptr ? token_backward<Rows, kWidth, kLanesPerThread / 2> : token_backward<Rows, kWidth, kLanesPerThread>;
    return launch("token_backward", kernel, grid, stream, p, padding);
  }
  if (p.d_rows == nullptr && row_blocks >= kMinDotsFor64Threads) return launch_rows<Rows, kWidth, 4, 4>(p, has_padding, stream);
  if (row_blocks >= kMinRowsFor64Threads) return launch_rows<Rows, kWidth, 4, 2>(p, has_padding, stream);
  if (row_blocks >= kMinRowsFor128Threads) return launch_rows<Rows, kWidth, 2, 4>(p, has_padding, stream);
  return launch_rows<Rows, kWidth, 1, 4>(p, has_padding, stream);
}

int unpermute_backward(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute_backward(p)) return status;
  const bool has_work = p.hidden != 0 && p.num_rows != 0;
  if (p.d_weights != nullptr && p.num_weights > 0 && (!has_work || !kernels_write_all_weights(p))) {
    PMO_CUDA(cudaMemsetAsync(p.d_weights, 0, p.num_weights * sizeof(float), stream));
  }
  if (!has_work || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;
  const int64_t itemsize = dtype_size(p.dtype);
  const bool reads_rows = p.d_weights != nullptr;
  const uintptr_t stride = p.num_tokens > 1 ? static_cast<uintptr_t>(p.d_out_row_stride * itemsize) : 0;
  const uintptr_t rows_stride = reads_rows && p.num_rows > 1 ? static_cast<uintptr_t>(p.rows_row_stride * itemsize) : 0;
  return with_rows(p.dtype,
                   {address(p.d_out), address(p.d_rows), reads_rows ? address(p.rows) : 0,
                    static_cast<uintptr_t>(p.hidden * itemsize), stride, rows_stride},
                   [&](auto rows, auto width) -> int {
                     if constexpr (decltype(width)::value == 0) {
                       return fail(PMO_INVALID_ARGUMENT, "d_out, rows and d_rows must be aligned to their element size");
                     } else {
                       return launch_gradients<decltype(rows), decltype(width)::value>(p, stream);
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_backward_cuda(const pmo_unpermute_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute_backward);
}
