// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The gradient of unpermute on the GPU: d_rows, d_weights, or both in one pass.
//
// Without d_weights a warp takes 32 accesses of up to 16 bytes of one token and writes them, weighted, to each of its rows. With
// d_weights a block takes tokens one after another and lists the rows of several in shared memory. A thread loads an access of d_out
// once, and those of up to eight rows before it uses the first; it writes the weighted gradient to each row and keeps eight partial
// dot products, which one fixed tree adds up over the warp and then over the block. The rows without a token, whose gradient is zero,
// are shared out over all warps. Bytes moved: d_rows (T + N) * H elements, d_weights N * H more (or (T + N) * H alone).
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
constexpr int kMinBlocks = 3;  // per multiprocessor, which bounds the registers
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kScatterThreads = 256;
constexpr int64_t kLongRow = 512;         // accesses per row from which a thread takes four of them, else two
constexpr int64_t kManyTokens = 4096;     // from here on a block lists several tokens at a time
constexpr int64_t kPaddingBlocks = 1024;  // to share the rows without a token when there are few tokens

// Rows without a token become zero: every warp of the grid looks at some rows.
template <int kBytes>
__device__ void zero_unused(const pmo_unpermute_backward_params& p, int64_t row_bytes) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t row = int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x; row < p.num_rows; row += step) {
    if (p.row_to_token[row] >= 0) continue;
    auto* target = reinterpret_cast<Vector<kBytes>*>(static_cast<char*>(p.d_rows) + row * row_bytes);
    for (int64_t i = lane; i < row_bytes / kBytes; i += kWarpSize) target[i] = Vector<kBytes>{};
  }
}

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
  zero_unused<kWidth * sizeof(Element)>(p, p.hidden * static_cast<int64_t>(sizeof(Element)));
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
          const float weight = window[i].weight;
          Lanes<Rows, kWidth> product;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) product.values[j] = __fmul_rn(gradient.values[j], weight);
          product.store(d_row, vector);
        }
      }
      if (copy) continue;
      Lanes<Rows, kWidth> lanes;
      lanes.set(accesses[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dots[i] = __fmaf_rn(gradient.values[j], lanes.values[j], dots[i]);
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
    int done = 0, together = count;  // tokens of the tile
    for (int64_t segment = 0; done < count;) {
      list.fill(p, first + done, together, segment);
      if (list.more != 0 && together > 1) {
        together = 1;
        continue;
      }
      for (int begin = 0; begin < list.size;) {
        const ListedRow& listed = list.rows[begin];
        int end = begin + 1;  // of the window: the token's rows, as many as fit
        while (end < list.size && end - begin < kWindow && list.rows[end].token == listed.token) ++end;
        const bool copy = p.weights == nullptr || (p.copy_single_row != 0 && listed.only);
        if (listed.row >= 0) window_backward<Rows, kWidth>(p, &listed, end - begin, first + done + listed.token, copy);
        begin = end;
      }
      segment = list.more != 0 ? segment + kWarpSize : 0;
      if (list.more == 0) done += together;
    }
  }
  if (p.d_rows == nullptr) return;
  zero_unused<kWidth * sizeof(typename Rows::Element)>(p, p.hidden * static_cast<int64_t>(sizeof(typename Rows::Element)));
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
  const int64_t per_thread = vectors >= kLongRow ? 4 : 2;
  const int64_t wanted = ((vectors + per_thread - 1) / per_thread + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int threads = static_cast<int>(std::min<int64_t>(wanted, kMaxThreads));
  const int tile = p.num_tokens < kManyTokens ? 1 : kTileTokens / 2;
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
