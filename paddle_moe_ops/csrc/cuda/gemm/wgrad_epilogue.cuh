// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Epilogue of the grouped wgrad (wgrad.cu): accumulators to global memory through shared memory, in boxes of 64 x 64.
//
// TMA stores write whole lines, and no lane computes addresses or exchanges words. The stores overlap the next tile's mainloop.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/wgrad_producer.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// Writes accumulators d[first ...] of 64 x 64 to shared memory, as rows of the result.
template <typename T>
__device__ inline void stage_box(const float (&d)[128], int first, bool transposed_out, uint32_t buffer) {
  const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto words_of = [&](int group, uint32_t (&word)[4]) {
    const int at = first + 8 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = Pair<T>::pack(d[at + 2 * i], d[at + 2 * i + 1]);
  };
  uint32_t word[4];
  if (transposed_out) {
    // 16 accumulator columns become rows: lanes 0 to 15 pass the addresses of the first eight rows, in two chunks of eight
    // elements.
    const uint32_t row = buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      words_of(group, word);
      stmatrix_x4_trans(row + group * 16 * 128, word);
    }
    return;
  }
  // 16 rows x 16 columns: lanes 0 to 15 pass the addresses of the first eight columns of each row, the others of the last eight.
  const uint32_t row = buffer + (16 * warp + lane % 16) * 128;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    words_of(group, word);
    stmatrix_x4(row + ((2 * group + lane / 16) ^ lane % 8) * 16, word);
  }
}

// Stores a warpgroup's four boxes, or zeros if the tile has no rows. `buffer` is kWgradEpilogueBytes of shared memory, `barrier`
// a named barrier of the warpgroup.
template <typename T>
__device__ inline void epilogue_wgrad(const WgradParams& a, const float (&d)[128], const WgradTile& tile, uint32_t buffer,
                                      int barrier) {
  const bool stores = threadIdx.x % kWarpSize == 0;  // each warp stores one box
  if (stores) cp_async_bulk_wait_group_read();       // of the previous tile
  bar_sync(barrier, kWarpgroupThreads);
  if (tile.rows == 0) {
    for (int i = threadIdx.x % kWarpgroupThreads * 16; i < kWgradEpilogueBytes; i += kWarpgroupThreads * 16)
      st_shared_v4(buffer + i, 0, 0, 0, 0);
  } else {
#pragma unroll
    for (int box = 0; box < 4; ++box) stage_box<T>(d, 32 * box, a.transposed_out, buffer + box * kBoxBytes);
  }
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
  if (!stores) return;
  const int box = threadIdx.x % kWarpgroupThreads / kWarpSize, column_b = tile.column_b + box * 64;
  tma_store_3d_evict_first(&a.out, buffer + box * kBoxBytes, a.transposed_out ? tile.column_a : column_b,
                           a.transposed_out ? column_b : tile.column_a, tile.expert);
  cp_async_bulk_commit_group();
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
