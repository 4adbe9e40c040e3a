// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// paddle_quantize: float8 codes of a matrix and of its transpose, by the rule of pmo/paddle_float8.h.
//
// A CTA has a tile of 128 x 128 elements (cuda/float8_tile.cuh), which it reads once for both forms. The 16 threads of a row
// reduce its amax by shuffles. A column's amax is reduced over the two rows of threads of a warp, then through shared memory over
// the warps, where one thread of each column computes its multiplier.
//
// Memory-bound: M N (itemsize + 1 per form) bytes.
#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/paddle_float8.h"
#include "cuda/float8.cuh"
#include "cuda/float8_tile.cuh"
#include "pmo/paddle_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kWarps = kTileThreads / kWarpSize;

struct PaddleQuantizeWork {
  const void* x;
  TileCodes straight, transposed;
  PaddleScales scales, transposed_scales;
  PaddleRule rule;
  int row_blocks, column_blocks;
  bool in_vectors, blocks;
};

// Largest magnitudes of the thread's columns, NaN left out.
template <typename Rows>
__device__ void column_maxima(const TileElements<Rows>& elements, float (&amax)[kTileSide]) {
#pragma unroll
  for (int j = 0; j < kTileSide; ++j) amax[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileSide; ++i) {
    float values[kTileSide];
    elements.unpack(i, values);
#pragma unroll
    for (int j = 0; j < kTileSide; ++j) amax[j] = fmaxf(amax[j], fabsf(values[j]));  // fmaxf ignores NaN
  }
}

// Maximum over the threads of a row of the tile.
__device__ float max_over_row(float amax) {
#pragma unroll
  for (int lanes = 1; lanes < kThreadsOfRow; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
  return amax;
}

// The multipliers of the tile's columns in shared memory, and their scales in the transposed form. It synchronises all threads.
__device__ void multipliers_of_columns(const PaddleQuantizeWork& work, float (&amax)[kTileSide], int first_column, int row_block,
                                       float* multipliers) {
  __shared__ float of_warps[kWarps][kTile];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int j = 0; j < kTileSide; ++j) {
    amax[j] = fmaxf(amax[j], __shfl_xor_sync(kAllLanes, amax[j], kThreadsOfRow));
    if (lane < kThreadsOfRow) of_warps[warp][lane * kTileSide + j] = amax[j];
  }
  __syncthreads();
  if (threadIdx.x < kTile) {
    float of_column = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) of_column = fmaxf(of_column, of_warps[i][threadIdx.x]);
    const float multiplier = work.rule.multiplier(of_column);
    multipliers[threadIdx.x] = multiplier;
    const int column = first_column + static_cast<int>(threadIdx.x);
    if (column < work.transposed.rows) work.transposed_scales.store(column, row_block, 1.0f / multiplier);
  }
  __syncthreads();
}

// Stores the scale of a block to its line, or to all of its lines of packed scales.
__device__ void store_block_scale(const PaddleScales& scales, int line_block, int group, float scale) {
  if (!scales.packed) {
    if (threadIdx.x == 0) scales.store(line_block, group, scale);
  } else if (threadIdx.x < kTile && line_block * kTile + threadIdx.x < scales.lines) {
    scales.store(line_block * kTile + threadIdx.x, group, scale);
  }
}

template <typename Rows, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kTileThreads) paddle_quantize(const __grid_constant__ PaddleQuantizeWork work) {
  __shared__ TransposedTile transposed;
  __shared__ float multipliers[kTile];
  const int thread_row = threadIdx.x / kThreadsOfRow, thread_column = threadIdx.x % kThreadsOfRow;
  const int rows = work.transposed.columns, columns = work.transposed.rows;
  for (int64_t tile = blockIdx.x; tile < int64_t{work.row_blocks} * work.column_blocks; tile += gridDim.x) {
    const int row_block = static_cast<int>(tile / work.column_blocks);
    const int column_block = static_cast<int>(tile - int64_t{row_block} * work.column_blocks);
    const int row = row_block * kTile + thread_row * kTileSide, column = column_block * kTile + thread_column * kTileSide;
    TileElements<Rows> elements;
    elements.load(work.x, work.in_vectors, row, column, rows, columns);
    float amax[kTileSide], of_block = 0.0f;
    if (work.blocks || work.transposed.codes != nullptr) column_maxima(elements, amax);
    if (work.blocks) {
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) of_block = fmaxf(of_block, amax[j]);
      of_block = work.rule.multiplier(max_over_tile(of_block));
      if (work.straight.codes != nullptr) store_block_scale(work.scales, row_block, column_block, 1.0f / of_block);
      if (work.transposed.codes != nullptr) {
        store_block_scale(work.transposed_scales, column_block, row_block, 1.0f / of_block);
      }
    }
    if (work.straight.codes != nullptr) {
      uint8_t* target = work.straight.codes + int64_t{row} * columns + column;
#pragma unroll
      for (int i = 0; i < kTileSide; ++i) {
        float values[kTileSide], multiplier = of_block;
        elements.unpack(i, values);
        if (!work.blocks) {
          float of_row = 0.0f;
#pragma unroll
          for (int j = 0; j < kTileSide; ++j) of_row = fmaxf(of_row, fabsf(values[j]));
          multiplier = work.rule.multiplier(max_over_row(of_row));
          if (thread_column == 0 && row + i < rows) work.scales.store(row + i, column_block, 1.0f / multiplier);
        }
        uint32_t codes[kTileSide / 4];
        float8_codes<kFormat>(values, multiplier, codes);
        if (row + i < rows) work.straight.store<kTileSide>(target + int64_t{i} * columns, codes, columns - column);
      }
    }
    if (work.transposed.codes == nullptr) continue;
    if (!work.blocks) multipliers_of_columns(work, amax, column_block * kTile, row_block, multipliers);
    uint32_t codes[kTileSide][kTileSide / 4];
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      float values[kTileSide];
      elements.unpack(i, values);
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) {
        values[j] = __fmul_rn(values[j], work.blocks ? of_block : multipliers[thread_column * kTileSide + j]);
      }
      float8_codes<kFormat>(values, 1.0f, codes[i]);
    }
    transposed.put(codes);
    __syncthreads();
    transposed.store(work.transposed, 0, column_block, row_block);
  }
}

int quantize(const pmo_paddle_quantize_params& p, cudaStream_t stream) {
  if (const int status = check_paddle_quantize(p)) return status;
  if (p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  const PaddleQuantizeWork work = {
      p.x,
      {p.codes, p.num_rows, p.num_columns},
      {p.transposed_codes, p.num_columns, p.num_rows},
      paddle_scales(p, p.scales, p.num_rows, p.num_columns),
      paddle_scales(p, p.transposed_scales, p.num_columns, p.num_rows),
      paddle_rule(p),
      static_cast<int>(divide_up(p.num_rows, int64_t{kTile})),
      static_cast<int>(divide_up(p.num_columns, int64_t{kTile})),
      address(p.x) % 16 == 0 && p.num_columns % kTileSide == 0,
      p.blocks != 0,
  };
  const Grid grid = {grid_for(int64_t{work.row_blocks} * work.column_blocks, 1), kTileThreads};
  return with_rows(p.dtype, [&](auto rows) {
    using Rows = decltype(rows);
    const auto kernel = p.codes_dtype == PMO_FLOAT8_E5M2 ? paddle_quantize<Rows, __NV_E5M2> : paddle_quantize<Rows, __NV_E4M3>;
    return launch("paddle_quantize", kernel, grid, stream, work);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_paddle_quantize_cuda(const pmo_paddle_quantize_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::quantize);
}
