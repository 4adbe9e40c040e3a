// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows without a token become zero.
#pragma once

#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace pmo {
namespace cuda {

// The first `warps` warps of every block, all lanes of each, share out all rows; kBytes divides the address and row_bytes.
template <int kBytes>
__device__ void zero_padding_rows(void* rows, int64_t row_bytes, const int32_t* row_to_token, int64_t num_rows, int warps) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = int64_t{gridDim.x} * warps * kWarpSize;
  const int64_t warp = int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (int64_t first = warp * kWarpSize; first < num_rows; first += step) {
    const bool empty = first + lane < num_rows && row_to_token[first + lane] < 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, empty); left != 0; left &= left - 1) {
      auto* target = reinterpret_cast<Vector<kBytes>*>(static_cast<char*>(rows) + (first + __ffs(left) - 1) * row_bytes);
      for (int64_t i = lane; i < row_bytes / kBytes; i += kWarpSize) target[i] = Vector<kBytes>{};
    }
  }
}

template <int kBytes>
__device__ void zero_padding_rows(void* rows, int64_t row_bytes, const int32_t* row_to_token, int64_t num_rows) {
  zero_padding_rows<kBytes>(rows, row_bytes, row_to_token, num_rows, blockDim.x / kWarpSize);
}

}  // namespace cuda
}  // namespace pmo
