// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The tiles of the grouped products of Hopper: their order, who makes which, and how the warps of a block learn where they are.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/warp.cuh"
#include "pmo/grouped.h"

namespace pmo {
namespace cuda {

constexpr int kTileRows = PMO_GROUPED_TILE_ROWS, kTileColumns = PMO_GROUPED_TILE_COLUMNS, kTileDepth = 64;

constexpr int kNoTile = -1;  // in place of a tile's expert, after the last tile

// Hands out the tiles of a launch in their order, after one for each of its makers: blocks, or clusters of them. Makers that take tiles by
// their number drift apart, until the L2 has lost what the first of them have read. `counters` are two zeros, which they are again after the
// launch.
struct TileCounter {
  int32_t* counters;

#ifdef PMO_HOPPER_CODE
  // For one thread of a maker: the next tile.
  __device__ int next(int makers) const { return makers + atomicAdd(counters, 1); }

  // The same thread, when it wants no more.
  __device__ void leave(int makers) const {
    __threadfence();
    if (atomicAdd(counters + 1, 1) == makers - 1) counters[0] = counters[1] = 0;  // no maker will look at them any more
  }
#endif
};

struct GroupedArguments {
  CUtensorMap rows, matrix;
  const int32_t* row_to_token;
  const float* weights;
  const int32_t *first, *stop, *tiles, *window;
  void *out, *hidden;
  float* d_weights;
  int num_experts, inner, first_column, width, to_up, first_row, column_tiles;
  TileCounter counter;
};

// Where a tile is: its expert, its first row, the end of the expert's rows, its first column.
struct GroupedPlace {
  int expert, row, end, column;
};

#ifdef PMO_HOPPER_CODE

// In a test build with PMO_SCHEDULER_JITTER, a power of two, half of the calls delay the warp by up to that many cycles, so the scheduler
// warp may fall behind the warps that wait for its tiles, or run ahead of them. Nothing in other builds.
__device__ inline void jitter() {
#ifdef PMO_SCHEDULER_JITTER
  const uint32_t begin = static_cast<uint32_t>(clock64()), random = (begin ^ blockIdx.x << 16) * 2654435769u;
  const uint32_t cycles = random >> 31 ? random >> 8 & (PMO_SCHEDULER_JITTER - 1) : 0;
  while (static_cast<uint32_t>(clock64()) - begin < cycles) {
  }
#endif
}

// Row and column of a tile of height x width: in bands of so many rows, down each column of a band.
struct TilePlace {
  int row, column;

  __device__ TilePlace(int tile, int height, int width, int rows_of_band) {
    const int band = tile / (rows_of_band * width), inside = tile - band * rows_of_band * width;
    const int rows = min(height - band * rows_of_band, rows_of_band);
    column = inside / rows;
    row = band * rows_of_band + inside - column * rows;
  }
};

// A warp's or a warpgroup's place in a ring.
template <int kStages>
struct RingOf {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void skip(int steps) {
    stage += steps;
    phase ^= stage / kStages & 1;
    stage %= kStages;
  }

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Places of a block's tiles. One warp finds them, ahead of the others: divisions take long, and nothing is multiplied
// meanwhile where a warpgroup makes them.
template <typename Place, int kCount>
struct PlacesOf {
  using Ring = RingOf<kCount>;

  uint64_t given[kCount], taken[kCount];
  Place places[kCount];

  // By one thread; a barrier must follow. So many warps take each place.
  __device__ void init(int takers) {
    for (uint64_t& each : given) init_barrier(&each, 1);
    for (uint64_t& each : taken) init_barrier(&each, takers);
  }

  // All lanes of the warp that finds places: waits until the next one may be given.
  __device__ void wait_for_room(const Ring& ring) {
    jitter();
    wait(&taken[ring.stage], ring.phase ^ 1);
  }

  // One lane of it after that.
  __device__ void give(const Ring& ring, const Place& place) {
    places[ring.stage] = place;
    arrive(&given[ring.stage]);
  }

  // The next place, for all lanes of a warp.
  __device__ Place take(Ring& ring) {
    jitter();
    wait(&given[ring.stage], ring.phase);
    const Place place = places[ring.stage];
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive(&taken[ring.stage]);
    ring.advance();
    return place;
  }
};

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
