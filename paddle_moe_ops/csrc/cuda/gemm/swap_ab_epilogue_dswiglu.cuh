// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dSwiGLU epilogue of the swap-AB grouped GEMM (swap_ab.cu): accumulators, hidden rows from the pipeline, weights w of rows.
//
//   d_act    = the accumulators rounded to T, as a plain epilogue stores them
//   d_hidden = the gradient of w * silu(gate) * up with respect to gate and up, for the output gradient d_act
//   out      = w * act with act = silu(gate) * up rounded to T
//   d_weights[r, column tile] = the part of dot(act[r], d_act[r]) in 128 columns
//
// The load warp delivers hidden in stages of 32 rows, two subtiles. d_hidden takes hidden's place and out fills the rest of the
// stage, from which TMA stores both while the next stage is computed.
//
// The subtile loop is a real loop, so that its code stays in the instruction caches. Unrolled, 100 KB of code came from the L2
// for every tile while other warps loaded operands, and it took up to four times as long.
#pragma once

#include "cuda/gemm/swap_ab_epilogue.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// A lane's accumulators of one subtile, rounded to T: four words of two in each 64-column block. Registers can't be indexed by a
// loop variable, so a switch moves them.
template <typename T>
struct SubtileAccumulators {
  uint32_t of[2][4];

  __device__ SubtileAccumulators(const float (&d)[kSwapAbAccumulators], int subtile) {
    switch (subtile) {
#define PMO_SUBTILE(SUBTILE) \
  case SUBTILE:              \
    move<SUBTILE>(d);        \
    break
      PMO_SUBTILE(0);
      PMO_SUBTILE(1);
      PMO_SUBTILE(2);
      PMO_SUBTILE(3);
      PMO_SUBTILE(4);
      PMO_SUBTILE(5);
      PMO_SUBTILE(6);
      PMO_SUBTILE(7);
      PMO_SUBTILE(8);
      PMO_SUBTILE(9);
#undef PMO_SUBTILE
    }
  }

  template <int kSubtile>
  __device__ void move(const float (&d)[kSwapAbAccumulators]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 4 * kSwapAbAccumulators / 2 + kSubtile * 8 + i % 4 * 2;
      uint32_t& word = of[i / 4][i % 4];
      word = Pair<T>::pack(d[at], d[at + 1]);
      asm volatile("" : "+r"(word));  // register fence: moved here, not selected at each use
    }
  }
};

// Sums of four rows over the eight lanes that share them, 4, 8 and 16 apart. Lanes 0 to 15 return one row each: lanes 0 to 3 the
// first of the four, 4 to 7 the third, 8 to 11 the second, 12 to 15 the last.
__device__ inline float reduce_dots(const float (&dots)[4]) {
  const bool is_high = threadIdx.x & 4, is_odd = threadIdx.x & 8;
  float kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float given = __shfl_xor_sync(kAllLanes, is_high ? dots[i] : dots[2 + i], 4);
    kept[i] = __fadd_rn(is_high ? dots[2 + i] : dots[i], given);
  }
  const float given = __shfl_xor_sync(kAllLanes, is_odd ? kept[0] : kept[1], 8);
  const float sum = __fadd_rn(is_odd ? kept[1] : kept[0], given);
  return __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 16));
}

// One subtile, 16 rows x 128 columns of a warpgroup, in shared memory: `hidden` becomes d_hidden, `act` receives out.
// `partial_dots` receives 16 partial dot products of each warp. The first `columns` columns belong to the result; hidden has
// zeros in the others.
template <typename T>
__device__ inline void dswiglu_subtile(const float (&d)[kSwapAbAccumulators], const TileFacts& rows, int subtile, int columns,
                                       uint32_t hidden, uint32_t act, float* partial_dots) {
  const SubtileLane lane;
  const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / kWarpSize, quad = thread % 4 * 2,
            first_row = subtile * kSubtileRows + quad;
  const bool is_whole = rows.all_have_token && columns >= kTileColumns;
  float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of four rows
  float2 weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) weight[half] = *reinterpret_cast<const float2*>(&rows.weights[first_row + half * 8]);
  const uint32_t gates = hidden + lane.to_write, ups = gates + kSubtilePairBytes;
  SubtileAccumulators<T> d_act(d, subtile);
  uint32_t gate[2][4], up[2][4];
  ldmatrix_x4_trans(gates, gate[0]);
  ldmatrix_x4_trans(ups, up[0]);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    if (!is_whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t kept = 64 * block + 16 * warp + i % 2 * 8 < columns ? rows.mask(first_row + i / 2 * 8) : 0;
        gate[block][i] &= kept;
        up[block][i] &= kept;
        d_act.of[block][i] &= kept;
      }
    }
    uint32_t scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2 * 2;
      const float2 from = Pair<T>::unpack(d_act.of[block][i]);
      const float2 made = dswiglu_pair<T>(gate[block][i], up[block][i], from.x, from.y, weight[i / 2], scaled[i]);
      dots[row] = fmaf(made.x, from.x, dots[row]);
      dots[row + 1] = fmaf(made.y, from.y, dots[row + 1]);
    }
    if (block == 0) {
      ldmatrix_x4_trans(gates + 2 * kSubtilePairBytes, gate[1]);
      ldmatrix_x4_trans(ups + 2 * kSubtilePairBytes, up[1]);
    }
    stmatrix_x4_trans(gates + 2 * block * kSubtilePairBytes, gate[block]);
    stmatrix_x4_trans(ups + 2 * block * kSubtilePairBytes, up[block]);
    stmatrix_x4_trans(act + block * kSubtilePairBytes + lane.to_write, scaled);
  }
  const float dot = reduce_dots(dots);
  const int of_four = thread % kWarpSize / 4;
  if (of_four < 4) partial_dots[warp * kSubtileRows + of_four % 2 * 8 + quad + of_four / 2] = dot;
}

// Stores a stage of dswiglu_subtile results. TMA stores the whole subtiles: each warp issues 64 columns of d_hidden or of out,
// and one of its lanes commits them afterwards. Lanes store a last subtile with fewer than 16 rows of the expert, which they have
// read by the next barrier.
template <typename T>
__device__ inline void store_dswiglu_stage(const SwapAbParams& p, const SwapAbTile& tile, int first_subtile, int column,
                                           uint32_t hidden, uint32_t act, const float* partial_dots) {
  const int thread = threadIdx.x % kWarpgroupThreads, warp = __shfl_sync(kAllLanes, thread / kWarpSize, 0),
            lane = thread % kWarpSize;
  const int rows = tile.rows - first_subtile * kSubtileRows, row = tile.row + first_subtile * kSubtileRows;
  const auto gates_of = [&](int block) { return hidden + 2 * block * kSubtilePairBytes; };
  const auto act_of = [&](int block) { return act + block * kSubtilePairBytes; };
  if (const int block = warp % 2, first = column + block * 64; elect_sync() && rows >= kSubtileRows && first < p.width) {
    const bool has_two = rows >= 2 * kSubtileRows;
    if (warp >= 2) {
      store_out(p, act_of(block), first, row, has_two);
    } else {
      store_hidden(p, gates_of(block), first, row, has_two);
    }
  }
  const int row_of_stage = warp / 2 * kSubtileRows + lane;
  if (p.d_weights != nullptr && warp % 2 == 0 && lane < kSubtileRows && row_of_stage < rows && column < p.width) {
    const float* const of_row = partial_dots + warp / 2 * kDotsOfSubtile + lane;
    float dot = of_row[0];
#pragma unroll
    for (int i = 1; i < kWarpgroupThreads / kWarpSize; ++i) dot = __fadd_rn(dot, of_row[i * kSubtileRows]);
    const int tiles = (p.width + kTileColumns - 1) / kTileColumns;
    p.d_weights[int64_t{row + row_of_stage} * tiles + column / kTileColumns] = dot;
  }
  const int last = tile.rows / kSubtileRows - first_subtile;  // subtile with fewer than 16 rows
  if (tile.rows % kSubtileRows == 0 || last >= 2) return;
  const SubtileLane part;
  const int64_t of_row = row + last * kSubtileRows + part.row, width = int64_t{p.width} * 2;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const int at = column + 64 * block + part.column;
    if (part.row >= tile.rows % kSubtileRows || at >= p.width) break;
    const uint32_t gates = gates_of(block) + last * kSubtileBytes + part.to_read;
    store_from_subtile<T>(p.hidden, width, of_row, at, gates);
    store_from_subtile<T>(p.hidden, width, of_row, at + p.width, gates + kSubtilePairBytes);
    store_from_subtile<T>(p.out, p.width, of_row, at, act_of(block) + last * kSubtileBytes + part.to_read);
  }
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
