// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The gradient of unpermute on the GPU: d_rows, d_weights, or both in one pass.
//
// Without d_weights a warp takes 32 accesses of up to 16 bytes of one token and writes them, weighted, to each of its rows
// (scatter_rows). With d_weights a block takes tokens one after another and lists the rows of several in shared memory
// (sum_rows_backward). A thread loads an access of d_out once, and those of up to eight rows before it uses the first; it writes the
// weighted gradient to each row and keeps eight partial dot products, which one fixed tree adds up over the warp and then over the block.
// Many tokens with few rows each get a warp of their own instead, with a tree of its own (token_backward): there the block's sums cost as
// much as the bytes. H200, T=153962, H=2048 bfloat16, 1.4 rows per token: 595 us, not 752. The rows without a token, whose gradient is
// zero, are shared out over all warps. Bytes moved: d_rows (T + N) * H elements, d_weights N * H more (or (T + N) * H alone).
#include <algorithm>

#include "common/checks.h"
#include "cuda/launch.cuh"
#include "cuda/padding.cuh"
#include "cuda/token_rows.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp_rows.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMinBlocks = 3;  // per multiprocessor, which bounds the registers
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kScatterThreads = 256;
constexpr int kWarpThreads = 128;
constexpr int kHeld = 8;                  // accesses of d_out that a lane holds while its warp goes through the token's rows
constexpr int64_t kFewRows = 4;           // per token
constexpr int64_t kManyTokens = 4096;     // from here on a warp takes a whole token
constexpr int64_t kLongRow = 512;         // accesses per row from which a thread takes four of them, else two
constexpr int64_t kWantedTiles = 4096;    // a block lists several tokens at a time if there are still so many blocks
constexpr int64_t kPaddingBlocks = 1024;  // to share the rows without a token when there are few tokens

// The weight of the lane's row, and where it stands (-1: nowhere, the weight is 0).
struct LaneWeight {
  float weight = 0.0f;
  int32_t place = -1;

  __device__ LaneWeight(const pmo_unpermute_backward_params& p, const WarpRows& listed, bool copy) {
    if (copy || !listed.is_used()) return;
    place = static_cast<int32_t>(weight_place(p, listed.row));
    if (place >= 0) weight = __ldg(p.weights + place);
  }
};

__device__ bool copies(const pmo_unpermute_backward_params& p, int64_t token, const WarpRows& first) {
  return p.weights == nullptr || (p.copy_single_row != 0 && has_one_row(p, token, first));
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kScatterThreads)
    scatter_rows(const __grid_constant__ pmo_unpermute_backward_params p, int parts) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int64_t vectors = p.hidden / kWidth;
  const int64_t warp = int64_t{blockIdx.x} * (kScatterThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t token = warp / parts;
  if (token < p.num_tokens) {
    const int64_t vector = (warp - token * parts) * kWarpSize + threadIdx.x % kWarpSize;
    const bool inside = vector < vectors;
    Access given = {};
    if (inside)
      given = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride)[vector];
    WarpRows listed(p, token, 0);
    const bool copy = copies(p, token, listed);
    Lanes<Rows, kWidth> gradient;
    gradient.set(given);
    for (int64_t segment = 0;;) {
      const LaneWeight own(p, listed, copy);
      for (unsigned left = listed.used; left != 0;) {
        const int lane = WarpRows::take(&left);
        Element* d_row = static_cast<Element*>(p.d_rows) + __shfl_sync(kAllLanes, listed.row, lane) * p.hidden;
        const float weight = __shfl_sync(kAllLanes, own.weight, lane);
        if (!inside) continue;
        if (copy) {
          reinterpret_cast<Access*>(d_row)[vector] = given;
        } else {
          gradient.scaled(weight).store(d_row, vector);
        }
      }
      if (listed.ended) break;
      segment += kWarpSize;
      listed = WarpRows(p, token, segment);
    }
  }
  zero_padding_rows<kWidth * sizeof(Element)>(p.d_rows, p.hidden * sizeof(Element), p.row_to_token, p.num_rows);
}

// Adds up the threads' partial sums of a window and writes them; every thread of the block takes part.
__device__ void write_dots(const pmo_unpermute_backward_params& p, const ListedRow* window, int size, float (&dots)[kWindow]) {
  __shared__ float partial[kWindow][kMaxWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    for (int step = kWarpSize / 2; step > 0; step /= 2) dots[i] = __fadd_rn(dots[i], __shfl_down_sync(kAllLanes, dots[i], step));
    if (lane == 0) partial[i][warp] = dots[i];
  }
  __syncthreads();
  if (threadIdx.x < size && window[threadIdx.x].place >= 0) {
    float sum = partial[threadIdx.x][0];
    for (int other = 1; other < warps; ++other) sum = __fadd_rn(sum, partial[threadIdx.x][other]);
    p.d_weights[window[threadIdx.x].place] = sum;
  }
  __syncthreads();
}

// The gradients of a window's rows, all of one token.
template <typename Rows, int kWidth>
__device__ void window_backward(const pmo_unpermute_backward_params& p, const ListedRow* window, int size, int64_t token,
                                bool copy) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int64_t vectors = p.hidden / kWidth;
  const auto* d_out = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride);
  const Element* rows = static_cast<const Element*>(p.rows);
  Element* d_rows = static_cast<Element*>(p.d_rows);
  float dots[kWindow] = {};
  for (int64_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
    const Access given = d_out[vector];
    Access accesses[kWindow];
    if (!copy) {
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        if (i < size) accesses[i] = reinterpret_cast<const Access*>(rows + window[i].row * p.rows_row_stride)[vector];
      }
    }
    Lanes<Rows, kWidth> gradient;
    gradient.set(given);
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      if (i >= size) break;
      if (d_rows != nullptr) {
        Element* d_row = d_rows + window[i].row * p.hidden;
        if (copy) {
          reinterpret_cast<Access*>(d_row)[vector] = given;
        } else {
          gradient.scaled(window[i].weight).store(d_row, vector);
        }
      }
      if (copy) continue;
      Lanes<Rows, kWidth> lanes;
      lanes.set(accesses[i]);
      dots[i] = gradient.dot(lanes, dots[i]);
    }
  }
  if (!copy) write_dots(p, window, size, dots);
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    sum_rows_backward(const __grid_constant__ pmo_unpermute_backward_params p, int tile) {
  __shared__ RowList list;
  for (int64_t first = int64_t{blockIdx.x} * tile; first < p.num_tokens; first += int64_t{gridDim.x} * tile) {
    const int count = static_cast<int>(min(int64_t{tile}, p.num_tokens - first));
    walk_tile(p, &list, first, count, [&](int64_t token) {
      for (int begin = 0; begin < list.size;) {
        const ListedRow& listed = list.rows[begin];
        int end = begin + 1;  // of the window: the token's rows, as many as fit
        while (end < list.size && end - begin < kWindow && list.rows[end].token == listed.token) ++end;
        const bool copy = p.weights == nullptr || (p.copy_single_row != 0 && listed.only);
        if (listed.row >= 0) window_backward<Rows, kWidth>(p, &listed, end - begin, token + listed.token, copy);
        begin = end;
      }
    });
  }
  if (p.d_rows == nullptr) return;
  constexpr int kElement = sizeof(typename Rows::Element);
  zero_padding_rows<kWidth * kElement>(p.d_rows, p.hidden * kElement, p.row_to_token, p.num_rows);
}

// Both gradients, a warp per token: it holds a part of d_out's row in registers while it goes through the token's rows. A lane keeps the
// dot product of its row, to which the warp adds part by part.
template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kWarpThreads) token_backward(const __grid_constant__ pmo_unpermute_backward_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t vectors = p.hidden / kWidth;
  const int64_t token = int64_t{blockIdx.x} * (kWarpThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (token < p.num_tokens) {
    const auto* d_out = reinterpret_cast<const Access*>(static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride);
    WarpRows listed(p, token, 0);
    const bool copy = copies(p, token, listed);
    for (int64_t segment = 0;;) {
      const LaneWeight own(p, listed, copy);
      float own_dot = 0.0f;
#pragma unroll 1
      for (int64_t base = 0; base < vectors; base += kHeld * kWarpSize) {
        const int64_t first = base + lane;
        Access given[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (first + i * kWarpSize < vectors) given[i] = d_out[first + i * kWarpSize];
        }
#pragma unroll 1
        for (unsigned left = listed.used; left != 0;) {
          const int holder = WarpRows::take(&left);
          const int64_t row = __shfl_sync(kAllLanes, listed.row, holder);
          const float weight = __shfl_sync(kAllLanes, own.weight, holder);
          const auto* source = reinterpret_cast<const Access*>(static_cast<const Element*>(p.rows) + row * p.rows_row_stride);
          auto* target = reinterpret_cast<Access*>(static_cast<Element*>(p.d_rows) + row * p.hidden);
          Access accesses[kHeld];
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            if (!copy && first + i * kWarpSize < vectors) accesses[i] = source[first + i * kWarpSize];
          }
          float dot = 0.0f;
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            if (first + i * kWarpSize >= vectors) break;
            if (copy) {
              if (p.d_rows != nullptr) target[first + i * kWarpSize] = given[i];
              continue;
            }
            Lanes<Rows, kWidth> gradient, lanes;
            gradient.set(given[i]);
            lanes.set(accesses[i]);
            if (p.d_rows != nullptr) gradient.scaled(weight).store(target, first + i * kWarpSize);
            dot = gradient.dot(lanes, dot);
          }
          for (int step = kWarpSize / 2; step > 0; step /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(kAllLanes, dot, step));
          if (lane == holder) own_dot = __fadd_rn(own_dot, dot);
        }
      }
      if (own.place >= 0) p.d_weights[own.place] = own_dot;
      if (listed.ended) break;
      segment += kWarpSize;
      listed = WarpRows(p, token, segment);
    }
  }
  if (p.d_rows == nullptr) return;
  zero_padding_rows<kWidth * sizeof(Element)>(p.d_rows, p.hidden * sizeof(Element), p.row_to_token, p.num_rows);
}

template <typename Rows, int kWidth>
int launch(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  const int64_t padding_blocks = p.d_rows == nullptr ? 0 : std::min(p.num_rows, kPaddingBlocks);
  if (std::max(p.num_tokens, padding_blocks) == 0) return PMO_OK;
  if (p.d_weights == nullptr) {
    const int64_t parts = (vectors + kWarpSize - 1) / kWarpSize;
    const int64_t blocks = (p.num_tokens * parts + kScatterThreads / kWarpSize - 1) / (kScatterThreads / kWarpSize);
    scatter_rows<Rows, kWidth>
        <<<grid_for(std::max(blocks, padding_blocks), 1, INT32_MAX), kScatterThreads, 0, stream>>>(p, static_cast<int>(parts));
    PMO_CUDA_LAUNCHED("scatter_rows");
    return PMO_OK;
  }
  if (p.num_tokens >= kManyTokens && p.num_rows < kFewRows * p.num_tokens) {
    const int64_t blocks = (p.num_tokens * kWarpSize + kWarpThreads - 1) / kWarpThreads;
    token_backward<Rows, kWidth><<<grid_for(std::max(blocks, padding_blocks), 1, INT32_MAX), kWarpThreads, 0, stream>>>(p);
    PMO_CUDA_LAUNCHED("token_backward");
    return PMO_OK;
  }
  const int64_t per_thread = vectors >= kLongRow ? 4 : 2;
  const int64_t wanted = ((vectors + per_thread - 1) / per_thread + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int threads = static_cast<int>(std::min<int64_t>(wanted, kMaxThreads));
  const int tile = static_cast<int>(std::min<int64_t>(kTileTokens / 2, std::max<int64_t>(1, p.num_tokens / kWantedTiles)));
  const unsigned blocks = grid_for(std::max((p.num_tokens + tile - 1) / tile, padding_blocks), 1);
  sum_rows_backward<Rows, kWidth><<<blocks, threads, 0, stream>>>(p, tile);
  PMO_CUDA_LAUNCHED("sum_rows_backward");
  return PMO_OK;
}

int unpermute_backward(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute_backward(p)) return status;
  if (p.d_weights != nullptr && p.num_weights > 0) {
    PMO_CUDA(cudaMemsetAsync(p.d_weights, 0, p.num_weights * sizeof(float), stream));
  }
  if (p.hidden == 0 || p.num_rows == 0 || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;
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
                       return launch<decltype(rows), decltype(width)::value>(p, stream);
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_backward_cuda(const pmo_unpermute_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute_backward);
}
