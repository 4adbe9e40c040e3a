// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Tile schedulers of the persistent GEMM kernels: order of the tiles, dynamic assignment to CTAs, and hand-over within a CTA.
#pragma once

#include "cuda/gemm/pipeline.cuh"

namespace pmo {
namespace cuda {

constexpr int kNoMoreTiles = -1;  // expert of the tile after the last one

// Dynamic tile scheduler: worker w starts with tile w and then requests tiles one by one. A worker is a CTA or a cluster. With a
// static schedule (tile += workers) CTAs drift apart, until the L2 has evicted operands that the first of them have read.
// `counters` points to two zeros in global memory: tiles handed out after the first round, and finished workers. Both are zero
// again after the launch.
struct TileScheduler {
  int32_t* counters;

#ifdef PMO_SM90A
  // Called by one thread of a worker.
  __device__ int next_tile(int num_workers) const { return num_workers + atomicAdd(counters, 1); }

  // Called by the same thread after its last request. The last worker resets the counters.
  __device__ void finish(int num_workers) const {
    __threadfence();
    if (atomicAdd(counters + 1, 1) == num_workers - 1) counters[0] = counters[1] = 0;  // all others have finished
  }
#endif
};

#ifdef PMO_SM90A

// Test builds define PMO_SCHEDULER_JITTER, a power of two: half of the calls delay the warp by up to that many cycles, so that
// the scheduler warp falls behind the warps that wait for its tiles, or runs ahead of them. Empty in other builds.
__device__ inline void jitter() {
#ifdef PMO_SCHEDULER_JITTER
  const uint32_t begin = static_cast<uint32_t>(clock64()), random = (begin ^ blockIdx.x << 16) * 2654435769u;
  const uint32_t cycles = random >> 31 ? random >> 8 & (PMO_SCHEDULER_JITTER - 1) : 0;
  while (static_cast<uint32_t>(clock64()) - begin < cycles) {
  }
#endif
}

// Rasterisation of height x width tiles for L2 reuse: bands of `band_rows` rows of tiles, column by column within a band.
struct BandedTile {
  int row, column;

  __device__ BandedTile(int tile, int height, int width, int band_rows) {
    const int band = tile / (band_rows * width), inside = tile - band * band_rows * width;
    const int rows = min(height - band * band_rows, band_rows);
    column = inside / rows;
    row = band * band_rows + inside - column * rows;
  }
};

// Queue of a CTA's next kSlots tiles in shared memory, from the scheduler warp to all other warps. The scheduler warp runs ahead,
// so the integer divisions of a tile's coordinates overlap the mainloop.
template <typename Tile, int kSlots>
struct TileQueue {
  using State = PipelineState<kSlots>;

  uint64_t full[kSlots], empty[kSlots];
  Tile tiles[kSlots];

  // Called by one thread; a barrier of the CTA follows. `consumer_warps` warps pop each tile.
  __device__ void init(int consumer_warps) {
    for (uint64_t& each : full) mbarrier_init(&each, 1);
    for (uint64_t& each : empty) mbarrier_init(&each, consumer_warps);
  }

  // Called by all lanes of the scheduler warp: waits for a free slot.
  __device__ void producer_acquire(const State& state) {
    jitter();
    mbarrier_wait_parity(&empty[state.stage], state.phase ^ 1);
  }

  // Called by one of its lanes after that.
  __device__ void push(const State& state, const Tile& tile) {
    tiles[state.stage] = tile;
    mbarrier_arrive(&full[state.stage]);
  }

  // Called by all lanes of any other warp: waits for the next tile, returns it and releases its slot.
  __device__ Tile pop(State& state) {
    jitter();
    mbarrier_wait_parity(&full[state.stage], state.phase);
    const Tile tile = tiles[state.stage];
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&empty[state.stage]);
    state.advance();
    return tile;
  }
};

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
