// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Tiles, stages and producer roles of the grouped wgrad (wgrad.cu).
//
// A stage holds 32 rows, the K of this GEMM: 128 columns of operand A, then 256 columns of operand B. It consists of boxes of 32
// rows x 64 columns with 128-byte swizzle.
#pragma once

#include "cuda/gemm/gather.cuh"
#include "cuda/gemm/scheduler.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace pmo {
namespace cuda {

// Operands A and B are p and q, or q and p if transposed_out: then rows of the result are columns of B.
struct WgradParams {
  CUtensorMap a, b, out;
  const int32_t *first, *stop;
  int num_rows, num_experts, a_tiles, b_tiles, columns_a, columns_b;
  bool transposed_out;
  GatheredRows gathered;  // operand A, if it is gathered
  TileScheduler scheduler;
  // With accumulation in the operands' dtype, in place of the map `out`: the block's first element, and strides in elements.
  void* sums;
  int64_t sums_expert_stride, sums_row_stride;
};

// A tile: its expert or kNoMoreTiles, the expert's first row and number of rows, the first columns in both operands.
struct WgradTile {
  int expert, first, rows, column_a, column_b;
};

constexpr int kColumnsA = 128, kColumnsB = 256, kWgradTileK = 32;
constexpr int kBoxesA = kColumnsA / 64, kStageBoxes = kBoxesA + kColumnsB / 64;  // those of operand A first
constexpr int kStageBoxBytes = kWgradTileK * 128;
constexpr int kWgradStageBytes = kStageBoxes * kStageBoxBytes;

// Stages, and boxes of a consumer warpgroup's results, 64 x 256. Results that are added in float32 are twice as large.
template <int kAccumulation>
struct WgradShared {
  static constexpr bool kFloat32 = kAccumulation == PMO_GROUPED_ADDS_FLOAT32;
  static constexpr int kStages = kFloat32 ? 4 : 6;
  static constexpr int kEpilogueBytes = (kFloat32 ? 8 : 4) * kBoxBytes;
  static constexpr int kBytes =
      kStages * kWgradStageBytes + 2 * kEpilogueBytes + 1024;  // the first stage is aligned to 1024 bytes
};

#ifdef PMO_SM90A

constexpr int kBandRows = 8;                   // rows of tiles in a band, which share columns of operand B in the L2
constexpr int kMmaK = 16;                      // rows of an MMA
constexpr int kGatherBarrier = 5;              // named barrier of the gather warps
constexpr int kLookupRows = 256;               // rows whose tokens are looked up together
constexpr int kGatherThreads = 2 * kWarpSize;  // the last two warps of the first warpgroup
constexpr int kGatherRegisters = 88, kGatherConsumerRegisters = 208;

template <int kStages>
using WgradPipeline = SmemPipeline<kStages, kWgradStageBytes, kBoxesA * kStageBoxBytes>;

using WgradQueue = TileQueue<WgradTile, 2>;

// Tokens of kLookupRows rows: row 4 i + r of K step s is [s][r][i].
struct TokenTable {
  alignas(16) uint32_t of_steps[kLookupRows / kWgradTileK][4][kWgradTileK / 4];
};

// Scheduler warp: tiles expert by expert, in bands. CTA b starts with tile b.
__device__ inline void schedule_tiles(const WgradParams& a, WgradQueue& queue) {
  const int tiles_of_expert = a.a_tiles * a.b_tiles;
  const bool is_first = threadIdx.x % kWarpSize == 0;
  WgradQueue::State state;
  for (int tile_index = blockIdx.x;; state.advance()) {
    const int expert = tile_index / tiles_of_expert;
    WgradTile tile = {kNoMoreTiles, 0, 0, 0, 0};
    if (expert < a.num_experts) {
      const int first = __ldg(a.first + expert);
      const BandedTile at(tile_index - expert * tiles_of_expert, a.a_tiles, a.b_tiles, kBandRows);
      tile = {expert, first, max(min(__ldg(a.stop + expert), a.num_rows) - first, 0), at.row * kColumnsA, at.column * kColumnsB};
    }
    queue.producer_acquire(state);
    if (is_first) queue.push(state, tile);
    if (tile.expert == kNoMoreTiles) break;
    if (is_first) tile_index = a.scheduler.next_tile(gridDim.x);
    tile_index = __shfl_sync(kAllLanes, tile_index, 0);
  }
  if (is_first) a.scheduler.finish(gridDim.x);
}

// Load warp: TMA loads of boxes kFirstBox to kStopBox - 1 of each stage. Each operand has its own warp: issuing all six boxes of
// a K step takes one warp as long as the MMAs of the step.
template <int kFirstBox, int kStopBox, int kStages>
__device__ inline void load_boxes(const WgradParams& a, const WgradPipeline<kStages>& pipeline, WgradQueue& queue) {
  PipelineState<kStages> state;
  WgradQueue::State at;
  for (WgradTile tile = queue.pop(at); tile.expert != kNoMoreTiles; tile = queue.pop(at)) {
    for (int k_offset = 0; k_offset < tile.rows; k_offset += kWgradTileK) {
      mbarrier_wait_parity(&pipeline.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &pipeline.full[state.stage];
        mbarrier_arrive_expect_tx(full, (kStopBox - kFirstBox) * kStageBoxBytes);
#pragma unroll
        for (int box = kFirstBox; box < kStopBox; ++box) {
          const bool is_a = box < kBoxesA;
          const int column = is_a ? tile.column_a + 64 * box : tile.column_b + 64 * (box - kBoxesA);
          tma_load_2d(pipeline.a(state.stage) + box * kStageBoxBytes, is_a ? &a.a : &a.b, full, column, tile.first + k_offset);
        }
      }
      state.advance();
    }
  }
}

// Gather warps: cp.async of token rows into operand A, 16 bytes a lane, with TMA's 128-byte swizzle and zeros after an expert's
// rows.
//
// The result of a load, global or shared, arrives only after all copies that the warp issued before it. So tokens are looked up
// kLookupRows rows at a time, one batch ahead, and each lane loads the tokens of a K step before it issues the copies of the
// step.
template <int kStages>
__device__ inline void gather_rows(const WgradParams& a, const WgradPipeline<kStages>& pipeline, WgradQueue& queue,
                                   TokenTable& sources) {
  constexpr int kRowsOfLane = kWgradTileK / 4, kFound = kLookupRows / kGatherThreads;
  // 16 lanes copy the 256 bytes of a row that a tile needs, so both warps copy four rows at a time.
  const int lane = threadIdx.x % kGatherThreads, row_of_4 = lane / 16, box = lane % 16;
  const uint32_t in_piece = box / 8 * kStageBoxBytes + row_of_4 * 128;
  const uint32_t even = in_piece + (box % 8 ^ row_of_4) * 16, odd = in_piece + 512 + (box % 8 ^ (row_of_4 + 4)) * 16;
  uint32_t found[kFound];
  const auto look_up = [&](int first, int count, int k_offset) {
#pragma unroll
    for (int i = 0; i < kFound; ++i) {
      const int row = k_offset + i * kGatherThreads + lane;
      found[i] = row < count ? a.gathered.source_of(first + row) : GatheredRows::kNone;
    }
  };
  PipelineState<kStages> state;
  WgradQueue::State at;
  WgradTile next = queue.pop(at);
  look_up(next.first, next.rows, 0);
  while (next.expert != kNoMoreTiles) {
    const WgradTile tile = next;
    next = queue.pop(at);
    const int column = tile.column_a + box * 8;
    const bool is_inside = column < a.columns_a;
    const char* const first = a.gathered.first_row(column * 2);
    if (tile.rows == 0) look_up(next.first, next.rows, 0);
    for (int k_offset = 0; k_offset < tile.rows; k_offset += kLookupRows) {
      bar_sync(kGatherBarrier, kGatherThreads);  // both warps have read the previous batch
#pragma unroll
      for (int i = 0; i < kFound; ++i) {
        const int row = i * kGatherThreads + lane;
        sources.of_steps[row / kWgradTileK][row % 4][row % kWgradTileK / 4] = found[i];
      }
      bar_sync(kGatherBarrier, kGatherThreads);
      const bool is_last = k_offset + kLookupRows >= tile.rows;
      look_up(is_last ? next.first : tile.first, is_last ? next.rows : tile.rows, is_last ? 0 : k_offset + kLookupRows);
      const int steps = (min(tile.rows - k_offset, kLookupRows) + kWgradTileK - 1) / kWgradTileK;
      for (int step = 0; step < steps; ++step) {
        uint32_t source[kRowsOfLane];
#pragma unroll
        for (int i = 0; i < kRowsOfLane / 4; ++i) {
          const uint4 four = reinterpret_cast<const uint4*>(sources.of_steps[step][row_of_4])[i];
          source[4 * i] = four.x, source[4 * i + 1] = four.y, source[4 * i + 2] = four.z, source[4 * i + 3] = four.w;
        }
        mbarrier_wait_parity(&pipeline.empty[state.stage], state.phase ^ 1);
        const uint32_t target = pipeline.a(state.stage);
#pragma unroll
        for (int i = 0; i < kRowsOfLane; i += 4) {
          const auto target_of = [&](int each) { return target + (each % 2 ? odd : even) + (i + each) / 2 * 1024; };
          a.gathered.copy<4>(&source[i], first, is_inside, target_of);
        }
        cp_async_mbarrier_arrive_noinc(&pipeline.full[state.stage]);
        state.advance();
      }
    }
  }
}

// Zeroes the rows of a stage from `k_offset` to the next multiple of kMmaK, in both operands. Called by a warpgroup; `barrier` is
// a named barrier of it.
__device__ inline void zero_stage_tail(uint32_t stage, int k_offset, int barrier) {
  const int end = (k_offset + kMmaK - 1) / kMmaK * kMmaK;
  // A row is eight 16-byte chunks of each box, in any order under swizzle.
  const int at = threadIdx.x % kWarpgroupThreads;
  if (at < 8 * kStageBoxes) {
    for (int row = k_offset; row < end; ++row) {
      st_shared_v4(stage + at / 8 * kStageBoxBytes + row * 128 + at % 8 * 16, 0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
