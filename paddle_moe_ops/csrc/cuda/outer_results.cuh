// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of grouped_outer.cu get to memory.
//
// They go through shared memory and the copy engine: lines of memory are written whole, no lane computes addresses or exchanges words,
// and the warpgroup continues while they are on their way.
#pragma once

#include "cuda/grouped_results.cuh"
#include "cuda/grouped_stages.cuh"

namespace pmo {
namespace cuda {

constexpr int kOuterResultBytes = kTileRows * kTileColumns * 2;

struct OuterArguments {
  CUtensorMap p, q, out;
  const int32_t *first, *stop;
  int num_rows, num_experts, p_tiles, q_tiles;
  GatheredRows gathered;
  bool gathers_q;  // not p
  int gathered_columns;
};

// A tile: its expert, the expert's first row and number of rows, and the tile's row and column in the result.
struct OuterPlace {
  int expert, first, rows, row, column;
};

#ifdef PMO_HOPPER_CODE

// `buffer` has room for a tile, and `together` is a barrier of the warpgroup.
template <typename T>
__device__ inline void store_through_shared(const OuterArguments& a, const float (&d)[128], const OuterPlace& place,
                                            uint32_t buffer, int together) {
  constexpr int kHalfBytes = kTileRows * 128;  // 64 columns of a tile
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % kWarpSize;
  if (thread == 0) stores_wait_read();
  meet(together, kWarpgroup);
  // Of each 16 rows and columns: lanes 0 to 15 have the addresses of the rows' first eight columns, the others those of the last eight.
  const uint32_t row = buffer + (thread / kWarpSize * 16 + lane % 16) * 128;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int group = 0; group < kTileColumns / 16; ++group) {
      const int at = 64 * block + 8 * group;
      const uint32_t word[4] = {Pair<T>::pack(d[at], d[at + 1]), Pair<T>::pack(d[at + 2], d[at + 3]),
                                Pair<T>::pack(d[at + 4], d[at + 5]), Pair<T>::pack(d[at + 6], d[at + 7])};
      const int swizzled = (group % 4 * 2 + lane / 16) ^ lane % 8;
      store_matrices(row + block * 64 * 128 + group / 4 * kHalfBytes + swizzled * 16, word);
    }
  }
  fence_async_proxy();
  meet(together, kWarpgroup);
  if (thread == 0) {
    store_box(&a.out, buffer, place.column, place.row, place.expert);
    store_box(&a.out, buffer + kHalfBytes, place.column + 64, place.row, place.expert);
    stores_commit();
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
