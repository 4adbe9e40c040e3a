// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute: out[t] = sum over the rows r of token t of weights[r] * rows[r], in float32 with fma, rounded once.
//
//   rows [N, H]; token_rows [T, max_rows_per_token], the first -1 ends a token; out [T, H]
//
// A thread owns one access of up to 16 bytes of a token. It loads that access from a batch of rows before the first addition and
// adds in the order of the rows, so a sum has one order for any schedule. A plain sum multiplies by 1, which rounds like the
// addition. Weights, two dependent loads, arrive with the rows' data, or in tiles with the rows' numbers.
//
// * sum_rows_by_warps: a warp owns 32 accesses of one token; a CTA has up to seven warps of a token, or four warps of two or four tokens.
//   The batch has about as many rows as a token has on average: a larger one takes registers and lowers occupancy.
// * sum_window: the same without loops, for tokens whose entries fit one batch.
// * sum_rows_by_tiles, for many tokens with few rows each: CTAs are (part of a row, tile of tokens). A CTA first lists the rows of
//   its tokens in shared memory (tile_list.cuh), so that loads of several tokens are in flight.
//
// Memory-bound: (N + T) H elements, and 4 T K bytes of maps and of weights.
#include <algorithm>

#include "common/checks.h"
#include "common/dtypes.h"
#include "cuda/moe/tile_list.cuh"
#include "cuda/moe/warp_rows.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxWarps = 7;  // of a CTA whose warps own parts of tokens
constexpr int kMinBlocks = 5;
static_assert(kMinBlocks * kMaxWarps * kWarpSize <= kMultiprocessorThreads, "an SM holds the CTAs");
constexpr int64_t kMaxGridY = 65535;
constexpr int kMaxTileThreads = 256;
constexpr int64_t kMaxAccessesForWarps = int64_t{1} << 20;  // of all tokens
constexpr int64_t kMinRowsPerTokenForWarps = 4;             // per token

// CTA (x, y): part x of the rows of tile y of tokens. The launch bounds keep three of the largest CTAs on an SM, or four with
// weights. H200, T 153962, H 2048, 1.4 rows per token: with weights 375 us with four and 388 with three; without 374 and 366.
template <typename Rows, int kWidth, bool kWeighted>
__global__ void __launch_bounds__(kMaxTileThreads, kWeighted ? 4 : 3)
    sum_rows_by_tiles(const __grid_constant__ pmo_unpermute_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  constexpr int kWindow = 8;
  __shared__ TileList list;
  wait_for_previous_kernel();
  const bool copies_single = !kWeighted || p.copy_single_row != 0;
  const int64_t vectors = p.hidden / kWidth;
  const int64_t vector = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const Element* rows = static_cast<const Element*>(p.rows) + vector * kWidth;
  Element* out = static_cast<Element*>(p.out) + vector * kWidth;
  for (int64_t first = int64_t{blockIdx.y} * kTileTokens; first < p.num_tokens; first += int64_t{gridDim.y} * kTileTokens) {
    const int count = static_cast<int>(min(int64_t{kTileTokens}, p.num_tokens - first));
    Elements<Rows, kWidth> sum;
    sum.fill(-0.0f);
    bool empty = true;
    int done = 0, together = count;  // tokens of the tile
    for (int64_t segment = 0; done < count;) {
      list.fill(p, first + done, together, segment);
      if (list.more != 0 && together > 1) {
        together = 1;
        continue;
      }
      for (int window = 0; window < list.size; window += kWindow) {
        Access accesses[kWindow];
#pragma unroll
        for (int i = 0; i < kWindow; ++i) {
          const int32_t row = vector < vectors && window + i < list.size ? list.rows[window + i].row : -1;
          if (row >= 0) accesses[i] = *reinterpret_cast<const Access*>(rows + row * p.rows_row_stride);
        }
        if (kWeighted && window == 0) list.load_weights(p);
        if (vector >= vectors) continue;
#pragma unroll
        for (int i = 0; i < kWindow; ++i) {
          if (window + i >= list.size) break;
          const ListedRow listed = list.rows[window + i];
          const bool copy = listed.only && copies_single;
          if (listed.row >= 0 && !copy) {
            Elements<Rows, kWidth> loaded;
            loaded.set(accesses[i]);
            sum.add(loaded, kWeighted ? list.weights[window + i] : 1.0f);
            empty = false;
          }
          Element* target = out + (first + done + listed.token) * p.out_row_stride;
          if (copy) *reinterpret_cast<Access*>(target) = accesses[i];
          if (!listed.last) continue;
          if (empty) sum.fill(0.0f);
          if (!copy) sum.store(target, 0);
          sum.fill(-0.0f);
          empty = true;
        }
      }
      segment = list.more != 0 ? segment + kWarpSize : 0;
      if (list.more == 0) done += together;
    }
  }
}

// CTA (x, y, z): part x of the rows of a few tokens, so that no division precedes the loads. A row number fits 32 bits. The
// launch bounds leave 56 registers. With the 66 that a window of eight takes otherwise: 124.9 instead of 122.7 us (H200, T 4096,
// H 7168, eight rows per token, bfloat16).
template <typename Rows, int kWidth, int kWindow>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    sum_rows_by_warps(const __grid_constant__ pmo_unpermute_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  wait_for_previous_kernel();
  const int64_t token = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  if (token >= p.num_tokens) return;
  const int64_t vector = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool inside = vector < p.hidden / kWidth;
  const char* rows = static_cast<const char*>(p.rows) + vector * sizeof(Access);
  WarpRows listed(p, token, 0);
  const bool only = (p.weights == nullptr || p.copy_single_row != 0) && has_one_row(p, token, listed);
  Elements<Rows, kWidth> sum;
  sum.fill(-0.0f);
  const auto stride = static_cast<uint64_t>(p.rows_row_stride) * sizeof(Element);
  int64_t last = -1;  // last row that was added
  for (int64_t segment = 0;;) {
    // A missing row adds 0 * -1 = -0, which changes nothing: no branches.
    float own_weight = -1.0f;
#pragma unroll 1
    for (int begin = 0; begin < kWarpSize && listed.used >> begin != 0; begin += kWindow) {
      Access accesses[kWindow];
      const unsigned here = inside ? listed.used >> begin : 0;
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        const auto row = static_cast<uint32_t>(__shfl_sync(kAllLanes, listed.row, begin + i));
        accesses[i] = Access{};
        if ((here >> i & 1) != 0) accesses[i] = *reinterpret_cast<const Access*>(rows + row * stride);
      }
      if (begin == 0 && listed.is_used()) own_weight = weight_of(p, listed.row);
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        Elements<Rows, kWidth> loaded;
        loaded.set(accesses[i]);
        const float weight = __shfl_sync(kAllLanes, own_weight, begin + i);
        sum.add(loaded, kWarpSize % kWindow == 0 || begin + i < kWarpSize ? weight : -1.0f);
      }
    }
    if (listed.used != 0) last = __shfl_sync(kAllLanes, listed.row, kWarpSize - 1 - __clz(listed.used));
    if (listed.ended) break;
    segment += kWarpSize;
    listed = WarpRows(p, token, segment);
  }
  if (!inside) return;
  Element* out = static_cast<Element*>(p.out) + token * p.out_row_stride + vector * kWidth;
  if (only) {
    *reinterpret_cast<Access*>(out) = *reinterpret_cast<const Access*>(rows + last * stride);
    return;
  }
  if (last < 0) sum.fill(0.0f);
  sum.store(out, 0);
}

// 16 bytes, or zeros. In PTX, so that all loads of a window are issued before the first one is used.
__device__ Vector<16> load_or_zeros(const void* source, bool is_there) {
  Vector<16> loaded;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(loaded.x), "=&r"(loaded.y), "=&r"(loaded.z), "=&r"(loaded.w)
      : "l"(__cvta_generic_to_global(source)), "r"(static_cast<unsigned>(is_there)));
  return loaded;
}

// The same for tokens with at most kWindow entries and a row stride below 4 GB: no loops and few instructions, since a launch
// fetches its code from memory.
template <typename Rows, int kWidth, int kWindow>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    sum_window(const __grid_constant__ pmo_unpermute_params p, uint32_t entries, uint32_t stride) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  static_assert(kWindow <= kWarpSize, "a lane for each entry");
  const int64_t token = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const bool is_token = token < p.num_tokens;
  const uint32_t lane = threadIdx.x % kWarpSize, vector = blockIdx.x * blockDim.x + threadIdx.x;
  const int32_t row = is_token && lane < entries ? __ldg(p.token_rows + token * entries + lane) : -1;
  const unsigned ends = __ballot_sync(kAllLanes, row == -1);
  const unsigned used = __ballot_sync(kAllLanes, row >= 0 && row < p.num_rows) & ((ends & -ends) - 1);
  const bool inside = vector < static_cast<uint32_t>(p.hidden / kWidth);
  const char* rows = static_cast<const char*>(p.rows) + vector * sizeof(Access);
  const unsigned here = inside ? used : 0;
  wait_for_previous_kernel();  // the launch may overlap with the one that makes `rows`, but not with that of the maps
  if (!is_token) return;
  Access accesses[kWindow];
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    const auto of_entry = static_cast<uint32_t>(__shfl_sync(kAllLanes, row, i));
    accesses[i] = load_or_zeros(rows + uint64_t{of_entry} * stride, (here >> i & 1) != 0);
  }
  // A missing row adds 0 * -1 = -0, which changes nothing: no branches.
  const float own_weight = (used >> lane & 1) != 0 ? weight_of(p, row) : -1.0f;
  Elements<Rows, kWidth> sum;
  sum.fill(-0.0f);
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    Elements<Rows, kWidth> loaded;
    loaded.set(accesses[i]);
    sum.add(loaded, __shfl_sync(kAllLanes, own_weight, i));
  }
  const auto last = static_cast<uint32_t>(__shfl_sync(kAllLanes, row, used == 0 ? 0 : kWarpSize - 1 - __clz(used)));
  if (!inside) return;
  Element* out = static_cast<Element*>(p.out) + token * p.out_row_stride + vector * kWidth;
  if (__popc(used) == 1 && (p.weights == nullptr || p.copy_single_row != 0)) {
    *reinterpret_cast<Access*>(out) = *reinterpret_cast<const Access*>(rows + uint64_t{last} * stride);
    return;
  }
  if (used == 0) sum.fill(0.0f);
  sum.store(out, 0);
}

template <typename Rows, int kWidth, int kWindow>
int launch_warps(const pmo_unpermute_params& p, cudaStream_t stream) {
  const int64_t parts = divide_up(p.hidden / kWidth, kWarpSize);
  int warps = static_cast<int>(std::min<int64_t>(parts, 4));  // or another number that divides the parts
  for (const int other : {5, 7, 6, 3}) {
    if (parts % warps != 0 && parts % other == 0) warps = other;
  }
  const dim3 block(static_cast<unsigned>(warps * kWarpSize), warps > 2 ? 1 : 4 / static_cast<unsigned>(warps));
  const int64_t groups = divide_up(p.num_tokens, block.y), layers = divide_up(groups, kMaxGridY);
  const dim3 grid(grid_for(parts, warps, INT32_MAX), static_cast<unsigned>(divide_up(groups, layers)),
                  static_cast<unsigned>(layers));
  const int64_t stride = p.rows_row_stride * static_cast<int64_t>(sizeof(typename Rows::Element));
  if constexpr (kWidth * sizeof(typename Rows::Element) == 16) {
    if (p.max_rows_per_token <= kWindow && stride <= UINT32_MAX && p.hidden <= INT32_MAX) {
      const auto entries = static_cast<uint32_t>(p.max_rows_per_token);
      return launch("sum_window", sum_window<Rows, kWidth, kWindow>, {grid, block, 0, false, p.overlaps != 0}, stream, p, entries,
                    static_cast<uint32_t>(stride));
    }
  }
  return launch("sum_rows_by_warps", sum_rows_by_warps<Rows, kWidth, kWindow>, {grid, block, 0, false, p.overlaps != 0}, stream,
                p);
}

template <typename Rows, int kWidth>
int launch_sum(const pmo_unpermute_params& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  if (p.num_tokens * vectors <= kMaxAccessesForWarps || p.num_rows >= kMinRowsPerTokenForWarps * p.num_tokens) {
    if constexpr (kWidth * sizeof(typename Rows::Element) == 16) {
      const int64_t rows = std::min(divide_up(p.num_rows, p.num_tokens), p.max_rows_per_token);
      if (rows > 6) return launch_warps<Rows, kWidth, 8>(p, stream);
      if (rows > 4) return launch_warps<Rows, kWidth, 6>(p, stream);
    }
    return launch_warps<Rows, kWidth, 4>(p, stream);
  }
  const int64_t parts = divide_up(vectors, kMaxTileThreads);
  const auto threads = static_cast<unsigned>(round_up(divide_up(vectors, parts), kWarpSize));
  const dim3 grid(grid_for(vectors, threads), grid_for(p.num_tokens, kTileTokens, kMaxGridY));
  const auto kernel = p.weights == nullptr ? sum_rows_by_tiles<Rows, kWidth, false> : sum_rows_by_tiles<Rows, kWidth, true>;
  return launch("sum_rows_by_tiles", kernel, {grid, threads, 0, false, p.overlaps != 0}, stream, p);
}

int unpermute(const pmo_unpermute_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute(p)) return status;
  if (p.num_tokens * p.hidden == 0) return PMO_OK;
  const int64_t itemsize = dtype_size(p.dtype);
  const auto bytes = [&](int64_t elements) { return static_cast<uintptr_t>(elements * itemsize); };
  const uintptr_t stride = p.num_rows > 1 ? bytes(p.rows_row_stride) : 0,
                  out_stride = p.num_tokens > 1 ? bytes(p.out_row_stride) : 0;
  return with_rows(p.dtype, {address(p.rows), address(p.out), bytes(p.hidden), stride, out_stride},
                   [&](auto rows, auto width) -> int {
                     constexpr int kWidth = decltype(width)::value;
                     if constexpr (kWidth == 0) {
                       return fail(PMO_INVALID_ARGUMENT, "rows and out must be aligned to their element size");
                     } else {
                       return launch_sum<decltype(rows), kWidth>(p, stream);
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_cuda(const pmo_unpermute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute);
}
