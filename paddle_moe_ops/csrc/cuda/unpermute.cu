// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute and its gradient on the GPU.
//
// A block per token: each thread owns every kThreads-th group of up to 16 bytes of columns and goes through the token's rows in order,
// so a sum has one order whatever the schedule. The dot products of the gradient are added up per thread over its columns, then by one
// fixed tree over the block. Bytes moved: unpermute (N + T) * H elements; the gradient (T + N) * H for d_rows and N * H more for
// d_weights.
#include <initializer_list>
#include <type_traits>

#include "common/checks.h"
#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"
#include "pmo/permute.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Position of a row's weight, or -1.
template <typename Params>
__device__ int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : p.weight_index[row];
  return place >= 0 && place < p.num_weights ? place : -1;
}

// The next usable row of a token from `*i` on, or -1; advances `*i` behind it.
template <typename Params>
__device__ int64_t next_row(const Params& p, const int32_t* listed, int64_t* i) {
  while (*i < p.max_rows_per_token) {
    const int64_t row = listed[(*i)++];
    if (row == -1) return -1;
    if (row >= 0 && row < p.num_rows) return row;
  }
  return -1;
}

// Number of usable rows, counted up to 2.
template <typename Params>
__device__ int count_to_two(const Params& p, const int32_t* listed) {
  int64_t i = 0;
  int count = 0;
  while (count < 2 && next_row(p, listed, &i) >= 0) ++count;
  return count;
}

template <typename Rows, int kWidth>
__global__ void sum_rows(pmo_unpermute_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const Element* rows = static_cast<const Element*>(p.rows);
  const int64_t vectors = p.hidden / kWidth;
  for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    const int32_t* listed = p.token_rows + token * p.max_rows_per_token;
    Element* out = static_cast<Element*>(p.out) + token * p.hidden;
    const int count = count_to_two(p, listed);
    const bool copy = count == 1 && (p.weights == nullptr || p.copy_single_row != 0);
    for (int64_t vector = threadIdx.x; vector < vectors; vector += kThreads) {
      int64_t i = 0;
      if (copy) {
        const int64_t row = next_row(p, listed, &i);
        reinterpret_cast<Access*>(out)[vector] = reinterpret_cast<const Access*>(rows + row * p.rows_row_stride)[vector];
        continue;
      }
      Lanes<Rows, kWidth> sum;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum.values[j] = count == 0 ? 0.0f : -0.0f;
      for (int64_t row = next_row(p, listed, &i); row >= 0; row = next_row(p, listed, &i)) {
        Lanes<Rows, kWidth> lanes;
        lanes.load(rows + row * p.rows_row_stride, vector);
        if (p.weights == nullptr) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum.values[j] = __fadd_rn(sum.values[j], lanes.values[j]);
        } else {
          const int64_t place = weight_place(p, row);
          const float weight = place < 0 ? 0.0f : p.weights[place];
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum.values[j] = __fmaf_rn(lanes.values[j], weight, sum.values[j]);
        }
      }
      sum.store(out, vector);
    }
  }
}

// The sum of the threads' values, by one tree; valid in thread 0. Ends with all threads past their use of the scratch.
__device__ float block_sum(float value) {
  __shared__ float scratch[kThreads];
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (int width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) scratch[threadIdx.x] = __fadd_rn(scratch[threadIdx.x], scratch[threadIdx.x + width]);
    __syncthreads();
  }
  const float sum = scratch[0];
  __syncthreads();
  return sum;
}

template <typename Rows, int kWidth>
__global__ void sum_rows_backward(pmo_unpermute_backward_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const int64_t vectors = p.hidden / kWidth;
  for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    const int32_t* listed = p.token_rows + token * p.max_rows_per_token;
    const Element* d_out = static_cast<const Element*>(p.d_out) + token * p.d_out_row_stride;
    const bool copy = p.weights == nullptr || (p.copy_single_row != 0 && count_to_two(p, listed) == 1);
    int64_t i = 0;
    for (int64_t row = next_row(p, listed, &i); row >= 0; row = next_row(p, listed, &i)) {
      const int64_t place = copy ? -1 : weight_place(p, row);
      const float weight = place < 0 ? 0.0f : p.weights[place];
      const bool want_dot = p.d_weights != nullptr && place >= 0;
      Element* d_row = p.d_rows == nullptr ? nullptr : static_cast<Element*>(p.d_rows) + row * p.hidden;
      float dot = 0.0f;
      for (int64_t vector = threadIdx.x; vector < vectors; vector += kThreads) {
        if (copy) {
          if (d_row != nullptr) reinterpret_cast<Access*>(d_row)[vector] = reinterpret_cast<const Access*>(d_out)[vector];
          continue;
        }
        Lanes<Rows, kWidth> gradient;
        gradient.load(d_out, vector);
        if (want_dot) {
          Lanes<Rows, kWidth> lanes;
          lanes.load(static_cast<const Element*>(p.rows) + row * p.rows_row_stride, vector);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) dot = __fmaf_rn(gradient.values[j], lanes.values[j], dot);
        }
        if (d_row == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) gradient.values[j] = __fmul_rn(gradient.values[j], weight);
        gradient.store(d_row, vector);
      }
      if (want_dot) {
        dot = block_sum(dot);
        if (threadIdx.x == 0) p.d_weights[place] = dot;
      }
    }
  }
}

template <int kBytes>
__global__ void zero_unused_rows(char* d_rows, int64_t row_bytes, int64_t num_rows, const int32_t* row_to_token) {
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    if (row_to_token[row] >= 0) continue;
    auto* target = reinterpret_cast<Vector<kBytes>*>(d_rows + row * row_bytes);
    for (int64_t i = threadIdx.x; i < row_bytes / kBytes; i += kThreads) target[i] = Vector<kBytes>{};
  }
}

// Element-aligned rows are a promise of the caller that a GPU cannot do without.
constexpr char kAligned[] = "aligned to its element size";

int unpermute(const pmo_unpermute_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute(p)) return status;
  if (p.num_tokens * p.hidden == 0) return PMO_OK;
  const int64_t itemsize = dtype_size(p.dtype);
  const uintptr_t stride = p.num_rows > 1 ? static_cast<uintptr_t>(p.rows_row_stride * itemsize) : 0;
  return with_rows(p.dtype, {address(p.rows), address(p.out), static_cast<uintptr_t>(p.hidden * itemsize), stride},
                   [&](auto rows, auto width) -> int {
                     if constexpr (decltype(width)::value == 0) {
                       return fail(PMO_INVALID_ARGUMENT, std::string("rows and out must be ") + kAligned);
                     } else {
                       sum_rows<decltype(rows), decltype(width)::value><<<grid_for(p.num_tokens, 1), kThreads, 0, stream>>>(p);
                       PMO_CUDA_LAUNCHED("sum_rows");
                       return PMO_OK;
                     }
                   });
}

int zero_unused(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype);
  if (p.d_rows == nullptr || row_bytes == 0 || p.num_rows == 0) return PMO_OK;
  return with_width(widest_access({address(p.d_rows), static_cast<uintptr_t>(row_bytes)}), [&](auto bytes) -> int {
    zero_unused_rows<decltype(bytes)::value>
        <<<grid_for(p.num_rows, 1), kThreads, 0, stream>>>(static_cast<char*>(p.d_rows), row_bytes, p.num_rows, p.row_to_token);
    PMO_CUDA_LAUNCHED("zero_unused_rows");
    return PMO_OK;
  });
}

int unpermute_backward(const pmo_unpermute_backward_params& p, cudaStream_t stream) {
  if (const int status = check_unpermute_backward(p)) return status;
  if (const int status = zero_unused(p, stream)) return status;
  if (p.d_weights != nullptr && p.num_weights > 0) {
    PMO_CUDA(cudaMemsetAsync(p.d_weights, 0, p.num_weights * sizeof(float), stream));
  }
  if (p.num_tokens * p.hidden == 0 || p.num_rows == 0 || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;
  const int64_t itemsize = dtype_size(p.dtype);
  const bool reads_rows = p.d_weights != nullptr;
  const uintptr_t stride = p.num_tokens > 1 ? static_cast<uintptr_t>(p.d_out_row_stride * itemsize) : 0;
  const uintptr_t rows_stride = reads_rows && p.num_rows > 1 ? static_cast<uintptr_t>(p.rows_row_stride * itemsize) : 0;
  return with_rows(p.dtype,
                   {address(p.d_out), address(p.d_rows), reads_rows ? address(p.rows) : 0,
                    static_cast<uintptr_t>(p.hidden * itemsize), stride, rows_stride},
                   [&](auto rows, auto width) -> int {
                     if constexpr (decltype(width)::value == 0) {
                       return fail(PMO_INVALID_ARGUMENT, std::string("d_out, rows and d_rows must be ") + kAligned);
                     } else {
                       sum_rows_backward<decltype(rows), decltype(width)::value>
                           <<<grid_for(p.num_tokens, 1), kThreads, 0, stream>>>(p);
                       PMO_CUDA_LAUNCHED("sum_rows_backward");
                       return PMO_OK;
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_cuda(const pmo_unpermute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute);
}

extern "C" int pmo_unpermute_backward_cuda(const pmo_unpermute_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute_backward);
}
