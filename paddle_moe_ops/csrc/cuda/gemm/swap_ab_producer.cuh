// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Producer roles of the swap-AB grouped GEMM (swap_ab.cu): scheduler warp, TMA load warp, gather warpgroup.
#pragma once

#include "cuda/gemm/swap_ab_pipeline.cuh"

namespace pmo {
namespace cuda {
namespace {  // as in swap_ab_pipeline.cuh

#ifdef PMO_SM90A

constexpr int kBandRows = 8;  // at most: rows of tiles in a band, which share columns of the matrix in the L2
constexpr int kRequestAhead =
    4;  // K steps before the end of a tile at which the next one is requested: the time to find its coordinates
constexpr int kGatherBarrier = 3;  // named barrier of the gather warpgroup

// Coordinates of tile `tile_index` of the launch; rows = 0 after the last tile. Called by all lanes of a warp. The rows of an
// expert are cut into tiles of equal height, a multiple of 16, if the launch covers all tiles (is_whole). Otherwise tiles have
// kSwapAbRows rows, as the tables count them.
template <pmo_grouped_result kEpilogue>
__device__ inline SwapAbTile tile_at(const SwapAbParams& p, int tile_index, int first_tile, int last_tile, bool is_whole) {
  SwapAbTile tile = {0, 0, 0, 0};
  const int some_row_tile = first_tile + tile_index / p.column_tiles;  // of the same expert
  if (some_row_tile >= last_tile) return tile;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && __ldg(p.tiles + 1 + lane) <= some_row_tile;
    tile.expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int begin = __ldg(p.tiles + tile.expert), end = __ldg(p.tiles + tile.expert + 1);
  const int first = __ldg(p.first + tile.expert), rows = __ldg(p.stop + tile.expert) - first;
  const int begin_here = max(begin, first_tile), height = min(end, last_tile) - begin_here;
  const int bands = (height + kBandRows - 1) / kBandRows;
  const BandedTile at(tile_index - (begin_here - first_tile) * p.column_tiles, height, p.column_tiles,
                      (height + bands - 1) / bands);
  const int even = ((rows + end - begin - 1) / (end - begin) + kSubtileRows - 1) / kSubtileRows * kSubtileRows;
  const int rows_of_tile = is_whole ? even : kSwapAbRows, skipped = (begin_here + at.row - begin) * rows_of_tile;
  tile.row = first + skipped;
  tile.rows = min(rows - skipped, rows_of_tile);
  tile.column = at.column * kResultColumns<kEpilogue>;
  return tile;
}

// Scheduler warp: finds coordinates and pushes tiles. CTA b starts with tile b; each request of the load warp fetches the next
// one.
template <pmo_grouped_result kEpilogue>
__device__ inline void schedule_tiles(const SwapAbParams& p, SwapAbShared& shared, const SwapAbPipeline& pipeline) {
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1);
  const bool is_whole = first_tile == 0 && last_tile == __ldg(p.tiles + p.num_experts), is_first = threadIdx.x % kWarpSize == 0;
  SwapAbQueue::State slot;
  uint32_t phase = 0;
  for (int tile_index = blockIdx.x, count = 0;; ++count) {
    const SwapAbTile tile = tile_at<kEpilogue>(p, tile_index, first_tile, last_tile, is_whole);
    shared.queue.producer_acquire(slot);
    if (kEpilogue == PMO_GROUPED_GRADIENT) pipeline.facts(count).fill(p, tile);
    if (is_first) shared.queue.push(slot, tile);
    slot.advance();
    if (tile.rows == 0) break;
    mbarrier_wait_parity(&shared.tile_request, phase);
    phase ^= 1;
    if (is_first) tile_index = p.scheduler.next_tile(gridDim.x);
    tile_index = __shfl_sync(kAllLanes, tile_index, 0);
  }
  if (is_first) p.scheduler.finish(gridDim.x);
}

// dSwiGLU: loads the hidden rows of a tile into the stages after those of its mainloop, 32 rows a stage.
__device__ inline void load_hidden(const SwapAbParams& p, SwapAbShared& shared, const SwapAbPipeline& pipeline,
                                   SwapAbState& state, const SwapAbTile& tile) {
  for (int row = 0; row < tile.rows; row += 2 * kSubtileRows) {
    mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
    if (elect_sync()) {
      uint64_t* full = &shared.full[state.stage];
      mbarrier_arrive_expect_tx(full, kHiddenBytes);
#pragma unroll
      for (int block = 0; block < kSwapAbColumns / 64; ++block) {
        tma_load_3d(pipeline.hidden(state.stage, block), &p.hidden_32, full, tile.column + 64 * block, tile.row + row, 0);
      }
    }
    state.advance();
  }
}

// Load warp: TMA loads of the matrix and, unless rows are gathered, of X.
template <pmo_grouped_result kEpilogue, bool kTransposed, bool kGather>
__device__ inline void load_tiles(const SwapAbParams& p, SwapAbShared& shared, const SwapAbPipeline& pipeline) {
  SwapAbState state;
  SwapAbQueue::State slot;
  for (SwapAbTile tile = shared.queue.pop(slot); tile.rows > 0; tile = shared.queue.pop(slot)) {
    const int subtiles = (tile.rows + 15) / 16;
    const uint32_t bytes = kMatrixBytes + (kGather ? 0 : subtiles * 16 * kTileK * 2);
    const int requests_at = max((p.inner - 1) / kTileK - kRequestAhead, 0) * kTileK;
    for (int k_offset = 0; k_offset < p.inner; k_offset += kTileK) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        if (k_offset == requests_at) mbarrier_arrive(&shared.tile_request);
        uint64_t* full = &shared.full[state.stage];
        mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          const int offset = kEpilogue == PMO_GROUPED_GATED ? box / 2 * 64 + box % 2 * p.up_offset : box * 64;
          const int column = p.first_column + tile.column + offset;
          tma_load_3d(pipeline.matrix(state.stage) + box * kBoxBytes, &p.matrix, full, kTransposed ? k_offset : column,
                      kTransposed ? column : k_offset, tile.expert);
        }
        if constexpr (!kGather) {
          const int row = tile.row - p.first_row;
          // nvcc 13.0 miscompiles a loop of subtiles / 2 passes: rows from 128 on were wrong.
#pragma unroll
          for (int subtile = 0; subtile < kSwapAbRows / kSubtileRows; subtile += 2) {
            const uint32_t target = pipeline.rows(state.stage) + subtile * kSubtileBytes;
            if (subtile + 1 < subtiles) {
              tma_load_2d(target, &p.rows, full, k_offset, row + subtile * kSubtileRows);
            } else if (subtile < subtiles) {
              tma_load_2d(target, &p.rows_16, full, k_offset, row + subtile * kSubtileRows);
            }
          }
        }
      }
      state.advance();
    }
    if (kEpilogue == PMO_GROUPED_GRADIENT) load_hidden(p, shared, pipeline, state, tile);
  }
}

// Gather warpgroup: cp.async of token rows into the stages, 16 bytes a lane, with TMA's 128-byte swizzle.
//
// The result of a load, global or shared, arrives only after all copies that the warp issued before it. So a tile's tokens are
// looked up once and stay in registers.
template <pmo_grouped_result kEpilogue>
__device__ inline void gather_rows(const SwapAbParams& p, SwapAbShared& shared, const SwapAbPipeline& pipeline) {
  constexpr int kRowsOfLane = kSwapAbRows / kGatherRows;
  const int lane = threadIdx.x % kWarpgroupThreads, first_row = lane / 8, chunk = lane % 8;
  const uint32_t to_write = first_row * 128 + (chunk ^ first_row % 8) * 16;
  SwapAbState state;
  SwapAbQueue::State slot;
  for (SwapAbTile tile = shared.queue.pop(slot); tile.rows > 0; tile = shared.queue.pop(slot)) {
    bar_sync(kGatherBarrier, kWarpgroupThreads);  // all have read the tokens of the previous tile
    for (int row = lane; row < kSwapAbRows; row += kWarpgroupThreads) {
      shared.sources[row % kGatherRows][row / kGatherRows] =
          row < tile.rows ? p.gathered.source_of(tile.row + row) : GatheredRows::kNone;
    }
    bar_sync(kGatherBarrier, kWarpgroupThreads);
    uint32_t source[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) source[i] = shared.sources[first_row][i];
    for (int k_offset = 0; k_offset < p.inner; k_offset += kTileK) {
      const bool is_inside = k_offset + chunk * 8 < p.inner;
      const char* const first = p.gathered.first_row(k_offset * 2 + chunk * 16);
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      const uint32_t target = pipeline.rows(state.stage) + to_write;
#pragma unroll
      for (int i = 0; i < kRowsOfLane; i += 2) {
        if (kGatherRows * i >= tile.rows) break;
        p.gathered.copy<2>(&source[i], first, is_inside, [&](int each) { return target + (i + each) * kGatherRows * 128; });
      }
      cp_async_mbarrier_arrive_noinc(&shared.full[state.stage]);
      state.advance();
    }
    for (int row = 0; kEpilogue == PMO_GROUPED_GRADIENT && row < tile.rows; row += 2 * kSubtileRows) {  // stages of hidden
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      mbarrier_arrive(&shared.full[state.stage]);
      state.advance();
    }
  }
}

#endif  // PMO_SM90A

}  // namespace
}  // namespace cuda
}  // namespace pmo
