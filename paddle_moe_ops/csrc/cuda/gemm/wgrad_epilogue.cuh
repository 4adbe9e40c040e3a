// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of grouped_outer.cu get to memory.
//
// They go through shared memory and the copy engine, in pieces of 64 x 64: lines of memory are written whole, no lane computes addresses or
// exchanges words, and the warpgroup continues while they are on their way.
#pragma once

#include "cuda/gemm/wgrad_producer.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_HOPPER_CODE

// The sums d[first ...] of 64 x 64 to shared memory, as rows of the result.
template <typename T>
__device__ inline void hold_piece(const float (&d)[128], int first, bool turned, uint32_t buffer) {
  const int warp = threadIdx.x % kWarpgroup / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto words_of = [&](int group, uint32_t (&word)[4]) {
    const int at = first + 8 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = Pair<T>::pack(d[at + 2 * i], d[at + 2 * i + 1]);
  };
  uint32_t word[4];
  if (turned) {
    // Of each 16 columns of sums, which are rows now: lanes 0 to 15 have the addresses of the first eight, in two groups of eight numbers.
    const uint32_t row = buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      words_of(group, word);
      store_turned_matrices(row + group * 16 * 128, word);
    }
    return;
  }
  // Of each 16 rows and columns: lanes 0 to 15 have the addresses of the rows' first eight columns, the others those of the last eight.
  const uint32_t row = buffer + (16 * warp + lane % 16) * 128;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    words_of(group, word);
    store_matrices(row + ((2 * group + lane / 16) ^ lane % 8) * 16, word);
  }
}

// Stores the four pieces of a warpgroup's sums, which are zeros if the tile has no rows. `buffer` has room for them, and `meeting` is a
// barrier of the warpgroup.
template <typename T>
__device__ inline void store_pieces(const OuterArguments& a, const float (&d)[128], const OuterPlace& place, uint32_t buffer,
                                    int meeting) {
  const bool stores = threadIdx.x % kWarpSize == 0;  // a warp stores one piece
  if (stores) stores_wait_read();                    // of the tile before
  meet(meeting, kWarpgroup);
  if (place.rows == 0) {
    for (int i = threadIdx.x % kWarpgroup * 16; i < kBytesOfResults; i += kWarpgroup * 16) store_16_bytes(buffer + i, 0, 0, 0, 0);
  } else {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) hold_piece<T>(d, 32 * piece, a.turned, buffer + piece * kPieceBytes);
  }
  fence_async_proxy();
  meet(meeting, kWarpgroup);
  if (!stores) return;
  const int piece = threadIdx.x % kWarpgroup / kWarpSize, of_b = place.of_b + piece * 64;
  store_box_past_l2(&a.out, buffer + piece * kPieceBytes, a.turned ? place.of_a : of_b, a.turned ? of_b : place.of_a,
                    place.expert);
  stores_commit();
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
