// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of grouped_outer.cu get to memory.
//
// New results of 16 bits go through shared memory and the copy engine: lines of memory are written whole, no lane works out addresses or
// exchanges words, and the warpgroup goes on while they are on their way. Of what is added to, or is float32, lanes load and store 16
// columns at a time, two of which exchange numbers, so that each has four that follow each other.
#pragma once

#include "cuda/grouped_results.cuh"
#include "cuda/grouped_stages.cuh"

namespace pmo {
namespace cuda {

constexpr int kOuterResultBytes = kTileRows * kTileColumns * 2;

// The results are out[e][i, j] of p_columns x q_columns for each expert; `target` is that of the first one.
struct OuterArguments {
  CUtensorMap p, q, out;
  const int32_t *first, *stop;
  void* target;
  int64_t row_stride, matrix_stride;
  int num_rows, num_experts, p_columns, q_columns, p_tiles, q_tiles;
};

// A tile: its expert, the expert's first row and how many, and the tile's row and column in the result.
struct OuterPlace {
  int expert, first, rows, row, column;
};

#ifdef PMO_HOPPER_CODE

// `buffer` takes a tile, and `together` is a barrier of the warpgroup.
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

// Four numbers that follow each other in memory.
template <typename Out>
struct Four {
  uint2 words;

  __device__ float4 unpack() const {
    const float2 low = Pair<Out>::unpack(words.x), high = Pair<Out>::unpack(words.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
  static __device__ Four pack(const float4& from) {
    return {make_uint2(Pair<Out>::pack(from.x, from.y), Pair<Out>::pack(from.z, from.w))};
  }
};

template <>
struct Four<float> {
  float4 numbers;

  __device__ float4 unpack() const { return numbers; }
  static __device__ Four pack(const float4& from) { return {from}; }
};

template <bool kAdds, typename Out>
__device__ inline void store_from_registers(const OuterArguments& a, const float (&d)[128], const OuterPlace& place) {
  constexpr int kGroups = kTileColumns / 16;
  const int lane = threadIdx.x % kWarpSize;
  const bool is_odd = lane & 1;
  const int row = place.row + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
  const int column = place.column + lane % 2 * 8 + lane % 4 / 2 * 4;  // of the first group
  Out* origin = static_cast<Out*>(a.target) + place.expert * a.matrix_stride + column;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {  // rows 0, 8, 64 and 72 from here
    const int down = eight / 2 * 64 + eight % 2 * 8, first = eight / 2 * 64 + eight % 2 * 2;
    const bool is_live = row + down < a.p_columns;
    auto* target = reinterpret_cast<Four<Out>*>(origin + (row + down) * a.row_stride);
    Four<Out> old[kGroups];
    if (kAdds) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (is_live && column + 16 * group < a.q_columns) old[group] = target[4 * group];
      }
      asm volatile("" ::: "memory");  // eight at a time: more have no registers
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float* left = d + first + 8 * group;  // two of the first eight columns; four further on two of the others
      const float2 kept = is_odd ? make_float2(left[4], left[5]) : make_float2(left[0], left[1]);
      const float2 given = is_odd ? make_float2(left[0], left[1]) : make_float2(left[4], left[5]);
      const float2 got = make_float2(__shfl_xor_sync(kAllLanes, given.x, 1), __shfl_xor_sync(kAllLanes, given.y, 1));
      float4 sum = is_odd ? make_float4(got.x, got.y, kept.x, kept.y) : make_float4(kept.x, kept.y, got.x, got.y);
      if (is_live && column + 16 * group < a.q_columns) {
        if (kAdds) {
          const float4 before = old[group].unpack();
          sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
        }
        target[4 * group] = Four<Out>::pack(sum);
      }
    }
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
