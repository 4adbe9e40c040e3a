// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows without a token become zero.
#pragma once

#include <cstdint>

#include "common/padding.h"
#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace pmo {
namespace cuda {

// The rows without a token, divided among all warps of the grid, or the first `warps` of every block; blocks have one dimension. A lane
// starts with the load for its first row: made before anything that waits, it costs no trip to memory.
struct PaddingRows {
  const int32_t* row_to_token;
  int64_t num_rows;
  int warps;
  int32_t first_token;  // of the lane's first row

  __device__ PaddingRows(const int32_t* row_to_token, int64_t num_rows, int warps = static_cast<int>(blockDim.x) / kWarpSize)
      : row_to_token(row_to_token), num_rows(num_rows), warps(warps), first_token(token_of(first_row())) {}

  // Calls zero(row), which all lanes of a warp take part in, for every row without a token.
  template <typename Zero>
  __device__ void each(Zero zero) const {
    const int64_t step = int64_t{gridDim.x} * warps * kWarpSize;
    int32_t token = first_token;
#pragma unroll 1
    for (int64_t first = first_row(); first < num_rows;) {
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, is_padding(token)); left != 0; left &= left - 1)
        zero(first + __ffs(left) - 1);
      first += step;
      token = token_of(first);
    }
  }

 private:
  __device__ int64_t first_row() const { return (int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x) * kWarpSize; }
  __device__ int32_t token_of(int64_t first) const {
    const int64_t row = first + threadIdx.x % kWarpSize;
    return row < num_rows ? row_to_token[row] : 0;
  }
};

// A row of `bytes`, by a warp; kBytes divides its address and length.
template <int kBytes>
__device__ void zero_row(void* row, int64_t bytes) {
#pragma unroll 4
  for (int64_t i = threadIdx.x % kWarpSize; i < bytes / kBytes; i += kWarpSize) static_cast<Vector<kBytes>*>(row)[i] = {};
}

}  // namespace cuda
}  // namespace pmo
