// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The rows of a token over the lanes of a warp: what unpermute and its gradient have in common.
//
// A warp needs one load for all rows, no shared memory and no barrier; weights arrive while the rows' data are on their way.
#pragma once

#include <cstdint>

#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

// Position of a row's weight, or -1.
template <typename Params>
__device__ int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : __ldg(p.weight_index + row);
  return place >= 0 && place < p.num_weights ? place : -1;
}

// What unpermute multiplies a row by.
template <typename Params>
__device__ float weight_of(const Params& p, int64_t row) {
  if (p.weights == nullptr) return 1.0f;
  const int64_t place = weight_place(p, row);
  return place >= 0 ? __ldg(p.weights + place) : 0.0f;
}

// 32 entries of a token, one per lane. The first -1 ends the token; other entries outside [0, N) are skipped.
struct WarpRows {
  int32_t row;    // of the lane's entry
  unsigned used;  // lanes whose entry counts
  bool ended;     // nothing follows this segment

  template <typename Params>
  __device__ WarpRows(const Params& p, int64_t token, int64_t begin) {
    const int64_t entry = begin + threadIdx.x % kWarpSize;
    row = entry < p.max_rows_per_token ? __ldg(p.token_rows + token * p.max_rows_per_token + entry) : -1;
    const unsigned ends = __ballot_sync(kAllLanes, row == -1);
    ended = ends != 0 || begin + kWarpSize >= p.max_rows_per_token;
    used = __ballot_sync(kAllLanes, row >= 0 && row < p.num_rows) & (ends == 0 ? kAllLanes : (ends & -ends) - 1);
  }

  __device__ bool is_used() const { return (used >> threadIdx.x % kWarpSize & 1) != 0; }

  // The next lane of `left`, which loses it; -1 if there is none.
  static __device__ int take(unsigned* left) {
    const int lane = __ffs(*left) - 1;
    *left &= *left - 1;
    return lane;
  }
};

// Whether a token whose first segment is given has exactly one row.
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
