// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute on the GPU: each token is the sum of its rows.
//
// Blocks: (parts of a row, tokens). A thread owns kVectors accesses of up to 16 bytes of one token; it loads them from up to eight rows
// before the first addition, and adds in the order of the rows, so that a sum has one order whatever the schedule. Many tokens: two
// accesses per thread and half as many threads per row; few tokens: rows are cut into small blocks, so that every multiprocessor has
// work. Bytes moved: (N + T) * H elements, and 4 * T * K of maps and weights each.
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
constexpr int kSmallThreads = 128;
constexpr int64_t kFewVectors = int64_t{1} << 18;  // up to so many accesses in all, small blocks spread better

// A token's only row.
__device__ int64_t only_row(const pmo_unpermute_params& p, const int32_t* listed, RowBatch batch) {
  for (int64_t from = kRowBatch; batch.usable == 0; from += kRowBatch) batch = RowBatch(p, listed, from);
  int64_t row = -1;
#pragma unroll
  for (int i = 0; i < kRowBatch; ++i) row = batch.rows[i] >= 0 ? batch.rows[i] : row;
  return row;
}

template <int kWidth, typename Element>
__device__ void copy_row(const pmo_unpermute_params& p, int64_t row, Element* out, int64_t first, int accesses) {
  using Access = Vector<kWidth * sizeof(Element)>;
  const auto* source = reinterpret_cast<const Access*>(static_cast<const Element*>(p.rows) + row * p.rows_row_stride);
  for (int u = 0; u < accesses; ++u) {
    const int64_t vector = first + u * static_cast<int64_t>(blockDim.x);
    if (vector < p.hidden / kWidth) reinterpret_cast<Access*>(out)[vector] = source[vector];
  }
}

template <typename Rows, int kWidth, int kVectors, bool kWeighted>
__global__ void __launch_bounds__(kMaxThreads) sum_rows(const __grid_constant__ pmo_unpermute_params p) {
  using Element = typename Rows::Element;
  using Access = Vector<kWidth * sizeof(Element)>;
  const Element* rows = static_cast<const Element*>(p.rows);
  const int64_t vectors = p.hidden / kWidth;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x * kVectors + threadIdx.x;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    const int32_t* listed = p.token_rows + token * p.max_rows_per_token;
    Element* out = static_cast<Element*>(p.out) + token * p.hidden;
    RowBatch batch(p, listed, 0);
    const int count = count_to_two(p, listed, batch);
    if (count == 1 && (!kWeighted || p.copy_single_row != 0)) {
      copy_row<kWidth>(p, only_row(p, listed, batch), out, first, kVectors);
      continue;
    }
    Lanes<Rows, kWidth> sums[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[u].values[j] = count == 0 ? 0.0f : -0.0f;
    }
    for (int64_t from = 0;;) {
      float weights[kRowBatch];
      if (kWeighted) {
#pragma unroll
        for (int i = 0; i < kRowBatch; ++i) {
          const int64_t place = batch.rows[i] < 0 ? -1 : weight_place(p, batch.rows[i]);
          weights[i] = place < 0 ? 0.0f : __ldg(p.weights + place);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int64_t vector = first + u * static_cast<int64_t>(blockDim.x);
        if (vector >= vectors) break;
        Access accesses[kRowBatch];
#pragma unroll
        for (int i = 0; i < kRowBatch; ++i) {
          if (batch.rows[i] < 0) continue;
          accesses[i] = reinterpret_cast<const Access*>(rows + batch.rows[i] * p.rows_row_stride)[vector];
        }
#pragma unroll
        for (int i = 0; i < kRowBatch; ++i) {
          if (batch.rows[i] < 0) continue;
          Lanes<Rows, kWidth> lanes;
          lanes.set(accesses[i]);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            float& sum = sums[u].values[j];
            sum = kWeighted ? __fmaf_rn(lanes.values[j], weights[i], sum) : __fadd_rn(sum, lanes.values[j]);
          }
        }
      }
      from += kRowBatch;
      if (batch.ended) break;
      batch = RowBatch(p, listed, from);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int64_t vector = first + u * static_cast<int64_t>(blockDim.x);
      if (vector < vectors) sums[u].store(out, vector);
    }
  }
}

template <typename Rows, int kWidth, int kVectors>
int launch(const pmo_unpermute_params& p, int threads, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kWidth;
  const dim3 grid(grid_for(vectors, int64_t{threads} * kVectors), static_cast<unsigned>(std::min<int64_t>(p.num_tokens, 65535)));
  if (p.weights == nullptr) {
    sum_rows<Rows, kWidth, kVectors, false><<<grid, threads, 0, stream>>>(p);
  } else {
    sum_rows<Rows, kWidth, kVectors, true><<<grid, threads, 0, stream>>>(p);
  }
  PMO_CUDA_LAUNCHED("sum_rows");
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
                       const int64_t vectors = p.hidden / kWidth;
                       if (p.num_tokens * vectors <= kFewVectors) return launch<decltype(rows), kWidth, 1>(p, kSmallThreads, stream);
                       const int64_t half = ((vectors + 1) / 2 + kWarpSize - 1) / kWarpSize * kWarpSize;
                       return launch<decltype(rows), kWidth, 2>(p, static_cast<int>(std::min<int64_t>(half, kMaxThreads)), stream);
                     }
                   });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_unpermute_cuda(const pmo_unpermute_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::unpermute);
}
