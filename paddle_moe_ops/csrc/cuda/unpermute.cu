// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute on the GPU: each token is the sum of its rows.
//
// A thread owns one access of up to 16 bytes of a token, loads it from eight rows before the first addition, and adds in the order of the
// rows, so that a sum has one order whatever the schedule. Usually a warp takes a part of one token. Where many tokens have few rows each,
// blocks are (parts of a row, tiles of tokens), and a block lists the rows of its tokens in shared memory, so that loads of several
// tokens are in flight. Bytes moved: (N + T) * H elements, and 4 * T * K of maps and weights each.
#include <algorithm>

#include "common/checks.h"
#include "cuda/launch.cuh"
#include "cuda/token_rows.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp_rows.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMinBlocks = 4;  // per multiprocessor, which bounds the registers
constexpr int kWarpThreads = 128;
constexpr int64_t kFewAccesses = int64_t{1} << 20;  // of all tokens
constexpr int64_t kFewRows = 4;                     // per token

template <typename Rows, int kWidth, bool kWeighted>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) sum_rows_by_tiles(const __grid_constant__ pmo_unpermute_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  __shared__ RowList list;
  const int64_t vectors = p.hidden / kWidth;
  const int64_t vector = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const Element* rows = static_cast<const Element*>(p.rows) + vector * kWidth;
  Element* out = static_cast<Element*>(p.out) + vector * kWidth;
  for (int64_t first = int64_t{blockIdx.y} * kTileTokens; first < p.num_tokens; first += int64_t{gridDim.y} * kTileTokens) {
    const int count = static_cast<int>(min(int64_t{kTileTokens}, p.num_tokens - first));
    Lanes<Rows, kWidth> sum;
    sum.fill(-0.0f);
    bool empty = true;
    int done = 0, together = count;  // tokens of the tile
    for (int64_t segment = 0; done < count;) {
      list.fill(p, first + done, together, segment);
      if (list.more != 0 && together > 1) {
        together = 1;
        continue;
      }
      if (vector < vectors) {
        for (int window = 0; window < list.size; window += kWindow) {
          Access accesses[kWindow];
#pragma unroll
          for (int i = 0; i < kWindow; ++i) {
            const int32_t row = window + i < list.size ? list.rows[window + i].row : -1;
            if (row >= 0) accesses[i] = *reinterpret_cast<const Access*>(rows + row * p.rows_row_stride);
          }
#pragma unroll
          for (int i = 0; i < kWindow; ++i) {
            if (window + i >= list.size) break;
            const ListedRow listed = list.rows[window + i];
            const bool copy = listed.only && (!kWeighted || p.copy_single_row != 0);
            if (listed.row >= 0 && !copy) {
              Lanes<Rows, kWidth> lanes;
              lanes.set(accesses[i]);
              sum.template add<kWeighted>(lanes, listed.weight);
              empty = false;
            }
            Element* target = out + (first + done + listed.token) * p.hidden;
            if (copy) *reinterpret_cast<Access*>(target) = accesses[i];
            if (!listed.last) continue;
            if (empty) sum.fill(0.0f);
            if (!copy) sum.store(target, 0);
            sum.fill(-0.0f);
            empty = true;
          }
        }
      }
      segment = list.more != 0 ? segment + kWarpSize : 0;
      if (list.more == 0) done += together;
    }
  }
}

// A warp takes 32 accesses of one token. Its rows are over the lanes; the weights, two more loads one after the other, arrive with the data.
template <typename Rows, int kWidth, bool kWeighted>
__global__ void __launch_bounds__(kWarpThreads) sum_rows_by_warps(const __grid_constant__ pmo_unpermute_params p, int parts) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int64_t warp = int64_t{blockIdx.x} * (kWarpThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t token = warp / parts;
  if (token >= p.num_tokens) return;
  const int64_t vector = (warp - token * parts) * kWarpSize + threadIdx.x % kWarpSize;
  const bool inside = vector < p.hidden / kWidth;
  const Element* rows = static_cast<const Element*>(p.rows) + vector * kWidth;
  Element* out = static_cast<Element*>(p.out) + token * p.hidden + vector * kWidth;
  WarpRows listed(p, token, 0);
  const bool only = (!kWeighted || p.copy_single_row != 0) && has_one_row(p, token, listed);
  Lanes<Rows, kWidth> sum;
  sum.fill(-0.0f);
  bool empty = true;
  for (int64_t segment = 0;;) {
    for (unsigned left = listed.used; left != 0;) {
      Access accesses[kWindow];
      unsigned loading = left;
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        const int lane = WarpRows::take(&loading);
        const int64_t row = __shfl_sync(kAllLanes, listed.row, lane & (kWarpSize - 1));
        if (lane >= 0 && inside) accesses[i] = *reinterpret_cast<const Access*>(rows + row * p.rows_row_stride);
      }
      float own_weight = 0.0f;
      if (kWeighted && listed.is_used()) {
        const int64_t place = weight_place(p, listed.row);
        if (place >= 0) own_weight = __ldg(p.weights + place);
      }
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        const int lane = WarpRows::take(&left);
        if (lane < 0) break;
        const float weight = kWeighted ? __shfl_sync(kAllLanes, own_weight, lane) : 0.0f;
        if (only && inside) *reinterpret_cast<Access*>(out) = accesses[i];
        Lanes<Rows, kWidth> lanes;
        lanes.set(accesses[i]);
        sum.template add<kWeighted>(lanes, weight);
        empty = false;
      }
    }
    if (listed.ended) break;
    segment += kWarpSize;
    listed = WarpRows(p, token, segment);
  }
  if (empty) sum.fill(0.0f);
  if (inside && !only) sum.store(out, 0);
}

template <typename Rows, int kWidth>
int launch(const pmo_unpermute_params& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  if (p.num_tokens * vectors <= kFewAccesses || p.num_rows >= kFewRows * p.num_tokens) {
    const int64_t warps_per_token = (vectors + kWarpSize - 1) / kWarpSize;
    const unsigned blocks = grid_for(p.num_tokens * warps_per_token, kWarpThreads / kWarpSize, INT32_MAX);
    if (p.weights == nullptr) {
      sum_rows_by_warps<Rows, kWidth, false><<<blocks, kWarpThreads, 0, stream>>>(p, static_cast<int>(warps_per_token));
    } else {
      sum_rows_by_warps<Rows, kWidth, true><<<blocks, kWarpThreads, 0, stream>>>(p, static_cast<int>(warps_per_token));
    }
    PMO_CUDA_LAUNCHED("sum_rows_by_warps");
    return PMO_OK;
  }
  const int64_t parts = (vectors + kMaxThreads - 1) / kMaxThreads;
  const int threads = static_cast<int>(((vectors + parts - 1) / parts + kWarpSize - 1) / kWarpSize * kWarpSize);
  const dim3 grid(grid_for(vectors, threads), grid_for(p.num_tokens, kTileTokens, 65535));
  if (p.weights == nullptr) {
    sum_rows_by_tiles<Rows, kWidth, false><<<grid, threads, 0, stream>>>(p);
  } else {
    sum_rows_by_tiles<Rows, kWidth, true><<<grid, threads, 0, stream>>>(p);
  }
  PMO_CUDA_LAUNCHED("sum_rows_by_tiles");
  return PMO_OK;
}

int unpermute(const pmo_unpermute_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute(p)) return status;
  if (p.num_tokens * p.hidden == 0) return PMO_OK;
  const int64_t itemsize = dtype_size(p.dtype);
  const uintptr_t stride = p.num_rows > 1 ? static_cast<uintptr_t>(p.rows_row_stride * itemsize) : 0;
  return with_rows(p.dtype, {address(p.rows), address(p.out), static_cast<uintptr_t>(p.hidden * itemsize), stride},
                   [&](auto rows, auto width) -> int {
                     constexpr int kWidth = decltype(width)::value;
                     if constexpr (kWidth == 0) {
                       return fail(PMO_INVALID_ARGUMENT, "rows and out must be aligned to their element size");
                     } else {
                       return launch<decltype(rows), kWidth>(p, stream);
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_cuda(const pmo_unpermute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute);
}
