// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The gradient of unpermute on the GPU: d_rows, d_weights, or both in one pass.
//
// A block per token: a thread loads an access of up to 16 bytes of d_out once, and those of up to eight rows before it uses the first; it
// writes the weighted gradient to each row and keeps eight partial dot products, which one fixed tree adds up over the warp and then over
// the block. The blocks also share the rows without a token, whose gradient is zero. Bytes moved: d_rows (T + N) * H elements, d_weights
// N * H more (or (T + N) * H alone).
#include <algorithm>

#include "common/checks.h"
#include "cuda/launch.cuh"
#include "cuda/token_rows.cuh"
#include "cuda/vectors.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int64_t kLongRow = 512;          // accesses per row from which a thread takes four of them, else two
constexpr int64_t kPaddingBlocks = 1024;   // to share the rows without a token when there are few tokens

// Rows [begin, end) without a token become zero; a warp per row.
template <int kBytes>
__device__ void zero_unused(const pmo_unpermute_backward_params& p, int64_t row_bytes, int64_t begin, int64_t end) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  for (int64_t row = begin + threadIdx.x / kWarpSize; row < end; row += warps) {
    if (p.row_to_token[row] >= 0) continue;
    auto* target = reinterpret_cast<Vector<kBytes>*>(static_cast<char*>(p.d_rows) + row * row_bytes);
    for (int64_t i = lane; i < row_bytes / kBytes; i += kWarpSize) target[i] = Vector<kBytes>{};
  }
}

// Adds up the threads' partial sums of a batch and writes them; every thread of the block takes part.
__device__ void write_dots(const pmo_unpermute_backward_params& p, const RowBatch& batch, float (&dots)[kRowBatch]) {
  __shared__ float partial[kRowBatch][kMaxWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < kRowBatch; ++i) {
    for (int step = kWarpSize / 2; step > 0; step /= 2) dots[i] = __fadd_rn(dots[i], __shfl_down_sync(kAllLanes, dots[i], step));
    if (lane == 0) partial[i][warp] = dots[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowBatch; ++i) {
    if (threadIdx.x != i || batch.rows[i] < 0) continue;
    const int64_t place = weight_place(p, batch.rows[i]);
    float sum = partial[i][0];
    for (int other = 1; other < warps; ++other) sum = __fadd_rn(sum, partial[i][other]);
    if (place >= 0) p.d_weights[place] = sum;
  }
  __syncthreads();
}

template <typename Rows, int kWidth, bool kDot>
__global__ void __launch_bounds__(kMaxThreads) sum_rows_backward(const __grid_constant__ pmo_unpermute_backward_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int64_t vectors = p.hidden / kWidth;
  const Element* rows = static_cast<const Element*>(p.rows);
  Element* d_rows = static_cast<Element*>(p.d_rows);
  for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    const int32_t* listed = p.token_rows + token * p.max_rows_per_token;
    const Element* d_out = static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride;
    RowBatch batch(p, listed, 0);
    const bool copy = p.weights == nullptr || (p.copy_single_row != 0 && count_to_two(p, listed, batch) == 1);
    for (int64_t from = 0;;) {
      float weights[kRowBatch], dots[kRowBatch];
#pragma unroll
      for (int i = 0; i < kRowBatch; ++i) {
        const int64_t place = copy || batch.rows[i] < 0 ? -1 : weight_place(p, batch.rows[i]);
        weights[i] = place < 0 ? 0.0f : __ldg(p.weights + place);
        dots[i] = 0.0f;
      }
      for (int64_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
        const Access given = reinterpret_cast<const Access*>(d_out)[vector];
        Access accesses[kRowBatch];
        if (kDot && !copy) {
#pragma unroll
          for (int i = 0; i < kRowBatch; ++i) {
            if (batch.rows[i] >= 0) accesses[i] = reinterpret_cast<const Access*>(rows + batch.rows[i] * p.rows_row_stride)[vector];
          }
        }
        Lanes<Rows, kWidth> gradient;
        gradient.set(given);
#pragma unroll
        for (int i = 0; i < kRowBatch; ++i) {
          if (batch.rows[i] < 0) continue;
          if (d_rows != nullptr) {
            Element* d_row = d_rows + batch.rows[i] * p.hidden;
            if (copy) {
              reinterpret_cast<Access*>(d_row)[vector] = given;
            } else {
              Lanes<Rows, kWidth> product;
#pragma unroll
              for (int j = 0; j < kWidth; ++j) product.values[j] = __fmul_rn(gradient.values[j], weights[i]);
              product.store(d_row, vector);
            }
          }
          if (!kDot || copy) continue;
          Lanes<Rows, kWidth> lanes;
          lanes.set(accesses[i]);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) dots[i] = __fmaf_rn(gradient.values[j], lanes.values[j], dots[i]);
        }
      }
      if (kDot && !copy) write_dots(p, batch, dots);
      from += kRowBatch;
      if (batch.ended) break;
      batch = RowBatch(p, listed, from);
    }
  }
  if (d_rows == nullptr) return;
  const int64_t each = (p.num_rows + gridDim.x - 1) / gridDim.x;
  const int64_t begin = each * blockIdx.x;
  zero_unused<kWidth * sizeof(Element)>(p, p.hidden * static_cast<int64_t>(sizeof(Element)), begin, min(p.num_rows, begin + each));
}

template <typename Rows, int kWidth>
int launch(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  const int64_t per_thread = vectors >= kLongRow ? 4 : 2;
  const int64_t wanted = ((vectors + per_thread - 1) / per_thread + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int threads = static_cast<int>(std::min<int64_t>(wanted, kMaxThreads));
  const int64_t padding_blocks = p.d_rows == nullptr ? 0 : std::min(p.num_rows, kPaddingBlocks);
  const unsigned blocks = grid_for(std::max(p.num_tokens, padding_blocks), 1);
  if (p.d_weights != nullptr) {
    sum_rows_backward<Rows, kWidth, true><<<blocks, threads, 0, stream>>>(p);
  } else {
    sum_rows_backward<Rows, kWidth, false><<<blocks, threads, 0, stream>>>(p);
  }
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
