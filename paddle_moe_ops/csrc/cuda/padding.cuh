// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows without a token become zero.
#pragma once

#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace pmo {
namespace cuda {

// The warps of the grid share out all rows; kBytes divides the address and row_bytes.
template <int kBytes>
__device__ void zero_padding_rows(void* rows, int64_t row_bytes, const int32_t* row_to_token, int64_t num_rows) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t row = int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x; row < num_rows; row += step) {
    if (row_to_token[row] >= 0) continue;
    auto* target = reinterpret_cast<Vector<kBytes>*>(static_cast<char*>(rows) + row * row_bytes);
    for (int64_t i = lane; i < row_bytes / kBytes; i += kWarpSize) target[i] = Vector<kBytes>{};
  }
}

}  // namespace cuda
}  // namespace pmo
