// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Zeroing of padding rows: the rows without a token.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/padding.h"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

// Upper limit of the CTAs that zero padding rows.
constexpr int64_t kMaxPaddingBlocks = 1024;

// Number of CTAs of `threads` threads for padding rows, in front of a grid's others. Other warps need not load row_to_token after
// their own work, and CTAs in front finish before the others.
inline unsigned padding_blocks(int64_t num_rows, int64_t threads) {
  return static_cast<unsigned>(std::min(divide_up(num_rows, threads), kMaxPaddingBlocks));
}

// Index of a row in the chunk that begins with first_row; outside [0, number of rows) for any row that is not in it.
__device__ inline int32_t index_in_chunk(int32_t row, int64_t first_row) {
  return static_cast<int32_t>(static_cast<uint32_t>(row) - static_cast<uint32_t>(first_row));
}

// Rows of the chunk [first_row, first_row + num_rows) before row *rows_end; all if that is null.
__device__ inline int64_t rows_before_end(const int32_t* rows_end, int64_t first_row, int64_t num_rows) {
  return rows_end == nullptr ? num_rows : min(max(__ldg(rows_end) - first_row, int64_t{0}), num_rows);
}

// Padding rows, divided among the first `warps` warps of each of the first `blocks` CTAs of the grid. CTAs are one-dimensional.
struct PaddingRows {
  const int32_t* row_to_token;
  int64_t num_rows;
  unsigned blocks;
  int warps;

  __device__ PaddingRows(const int32_t* row_to_token, int64_t num_rows, unsigned blocks,
                         int warps = static_cast<int>(blockDim.x) / kWarpSize)
      : row_to_token(row_to_token), num_rows(num_rows), blocks(blocks), warps(warps) {}

  // Calls zero(row), by all lanes of a warp, for every padding row.
  template <typename Zero>
  __device__ void each(Zero zero) const {
    const int64_t step = int64_t{blocks} * warps * kWarpSize;
#pragma unroll 1
    for (int64_t first = (int64_t{threadIdx.x / kWarpSize} * blocks + blockIdx.x) * kWarpSize; first < num_rows; first += step) {
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, is_padding(token_of(first))); left != 0; left &= left - 1)
        zero(first + __ffs(left) - 1);
    }
  }

 private:
  __device__ int32_t token_of(int64_t first) const {
    const int64_t row = first + threadIdx.x % kWarpSize;
    return row < num_rows ? row_to_token[row] : 0;
  }
};

// Zeroes a row of `bytes` bytes, by a warp; kBytes divides its address and length.
template <int kBytes>
__device__ void zero_row(void* row, int64_t bytes) {
#pragma unroll 4
  for (int64_t i = threadIdx.x % kWarpSize; i < bytes / kBytes; i += kWarpSize) static_cast<Vector<kBytes>*>(row)[i] = {};
}

}  // namespace cuda
}  // namespace pmo
