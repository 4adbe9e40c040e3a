// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Block quantisation of stacked matrices to float8_e4m3fn, one scale per 128 x 128 block, with an optional transposed copy.
// Memory-bound.
//
//   x           [E, A, B] contiguous
//   straight    codes [E, A, B], scales [E, ceil(A / 128), ceil(B / 128)]
//   transposed  codes [E, B, A], scales [E, ceil(B / 128), ceil(A / 128)]
//
// A CTA quantises one block per iteration of a grid-stride loop, as a tile of cuda/float8_tile.cuh.
//
// Bytes moved: E A B (itemsize + 1 per form).
#include <cfloat>
#include <cstdint>

#include "common/checks.h"
#include "cuda/float8.cuh"
#include "cuda/float8_tile.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kBand = 8;  // rows of blocks in a band

struct QuantizeBlocksParams {
  const void* x;
  TileCodes straight, transposed;
  float *scales, *transposed_scales;
  float amax_min;
  int row_blocks, column_blocks;
  int64_t blocks;
  bool in_vectors;
};

template <typename Rows>
constexpr int kMinBlocksPerSm = sizeof(typename Rows::Element) == 2 ? 3 : 2;  // CTAs per SM

template <typename Rows>
__global__ void __launch_bounds__(kTileThreads, kMinBlocksPerSm<Rows>)
    quantize_blocks(const __grid_constant__ QuantizeBlocksParams work) {
  using Element = typename Rows::Element;
  __shared__ TransposedTile transposed;
  const TileCodes &straight = work.straight, &across = work.transposed;
  const int thread_row = threadIdx.x / kThreadsOfRow, thread_column = threadIdx.x % kThreadsOfRow;
  for (int64_t block = blockIdx.x; block < work.blocks; block += gridDim.x) {
    const int64_t of_matrix = int64_t{work.row_blocks} * work.column_blocks, matrix = block / of_matrix;
    const int inside = static_cast<int>(block - matrix * of_matrix);
    // Rasterisation in bands, column by column: neighbouring parts of both forms are written at about the same time.
    const int band = inside / (kBand * work.column_blocks), rest = inside - band * kBand * work.column_blocks;
    const int height = min(work.row_blocks - band * kBand, kBand);
    const int column_block = rest / height, row_block = band * kBand + rest - column_block * height;
    const int row = row_block * kTile + thread_row * kTileSide, column = column_block * kTile + thread_column * kTileSide;
    const int64_t of_x = matrix * straight.rows * straight.columns;
    TileElements<Rows> elements;
    elements.load(static_cast<const Element*>(work.x) + of_x, work.in_vectors, row, column, straight.rows, straight.columns);
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      float values[kTileSide];
      elements.unpack(i, values);
#pragma unroll
      for (int j = 0; j < kTileSide; ++j) amax = fmaxf(amax, fabsf(values[j]));  // fmaxf ignores NaN
    }
    const float scale = float8_scale(max_over_tile(amax), work.amax_min), inverse = __frcp_rn(scale);
    uint32_t codes[kTileSide][kTileSide / 4];
    uint8_t* target = straight.codes + of_x + int64_t{row} * straight.columns + column;
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
      float values[kTileSide];
      elements.unpack(i, values);
      float8_codes(values, inverse, codes[i]);
      if (straight.codes != nullptr && row + i < straight.rows) {
        straight.store<kTileSide>(target + int64_t{i} * straight.columns, codes[i], straight.columns - column);
      }
    }
    if (threadIdx.x == 0 && straight.codes != nullptr)
      work.scales[matrix * of_matrix + int64_t{row_block} * work.column_blocks + column_block] = scale;
    if (across.codes == nullptr) continue;
    if (threadIdx.x == 0)
      work.transposed_scales[matrix * of_matrix + int64_t{column_block} * work.row_blocks + row_block] = scale;
    transposed.put(codes);
    __syncthreads();
    transposed.store(across, matrix * across.rows, column_block, row_block);
  }
}

int quantize(const pmo_quantize_blocks_params& p, cudaStream_t stream) {
  if (const int status = check_quantize_blocks(p)) return status;
  if (p.num_matrices == 0 || p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  QuantizeBlocksParams work = {
      p.x, {p.codes, p.num_rows, p.num_columns}, {p.turned_codes, p.num_columns, p.num_rows}, p.scales, p.turned_scales};
  work.amax_min = p.amax_min;
  work.row_blocks = static_cast<int>(divide_up(p.num_rows, int64_t{kTile}));
  work.column_blocks = static_cast<int>(divide_up(p.num_columns, int64_t{kTile}));
  work.blocks = p.num_matrices * work.row_blocks * work.column_blocks;
  work.in_vectors = address(p.x) % 16 == 0 && p.num_columns % kTileSide == 0;
  const Grid grid = {grid_for(work.blocks, 1), kTileThreads};
  return with_rows(
      p.dtype, [&](auto rows_of) { return launch("quantize_blocks", quantize_blocks<decltype(rows_of)>, grid, stream, work); });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_quantize_blocks_cuda(const pmo_quantize_blocks_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::quantize);
}
