// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows of a token, spread over the lanes of a warp; shared by unpermute, its gradient and comm/exchange.cu.
//
// A warp needs one load for up to 32 rows, no shared memory and no barrier. Weights arrive while the rows' data are in flight.
#pragma once

#include <cstdint>

#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

// Index of a row's weight, or -1.
template <typename Params>
__device__ int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : __ldg(p.weight_index + row);
  return place >= 0 && place < p.num_weights ? place : -1;
}

// Factor of a row in unpermute: its weight, 1 without weights, 0 without an index.
template <typename Params>
__device__ float weight_of(const Params& p, int64_t row) {
  if (p.weights == nullptr) return 1.0f;
  const int64_t place = weight_place(p, row);
  return place >= 0 ? __ldg(p.weights + place) : 0.0f;
}

// 32 entries of a token, one per lane. The first -1 ends the token; other entries outside [0, N) are skipped.
struct WarpRows {
  int32_t row;    // of the lane's entry
  unsigned used;  // lanes whose entry is a row
  bool ended;     // no entries after this segment

  template <typename Params>
  __device__ WarpRows(const Params& p, int64_t token, int64_t begin) {
    const int64_t entry = begin + threadIdx.x % kWarpSize;
    row = entry < p.max_rows_per_token ? __ldg(p.token_rows + token * p.max_rows_per_token + entry) : -1;
    const unsigned ends = __ballot_sync(kAllLanes, row == -1);
    ended = ends != 0 || begin + kWarpSize >= p.max_rows_per_token;
    used = __ballot_sync(kAllLanes, row >= 0 && row < p.num_rows) & (ends == 0 ? kAllLanes : (ends & -ends) - 1);
  }

  __device__ bool is_used() const { return (used >> threadIdx.x % kWarpSize & 1) != 0; }

  // Removes the lowest lane from `left` and returns it; -1 if there is none.
  static __device__ int pop_lane(unsigned* left) {
    const int lane = __ffs(*left) - 1;
    *left &= *left - 1;
    return lane;
  }
};

// True if a token has exactly one row; `first` is its first segment.
template <typename Params>
__device__ bool has_one_row(const Params& p, int64_t token, const WarpRows& first) {
  int count = __popc(first.used);
  bool ended = first.ended;
  for (int64_t begin = kWarpSize; !ended && count < 2; begin += kWarpSize) {
    const WarpRows segment(p, token, begin);
    count += __popc(segment.used);
    ended = segment.ended;
  }
  return count == 1;
}

}  // namespace cuda
}  // namespace pmo
