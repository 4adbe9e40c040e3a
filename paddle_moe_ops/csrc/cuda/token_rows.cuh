// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The rows of a few tokens and their weights, in shared memory: what unpermute and its gradient have in common.
//
// A block reads the maps of its tokens once, a warp per token, and goes through the resulting list: rows that are used, in order, so
// that a loop over it has no gaps and can load several rows ahead, even those of the next token.
#pragma once

#include <cstdint>

#include "cuda/launch.cuh"

namespace pmo {
namespace cuda {

constexpr int kTileTokens = 8;  // at most
constexpr int kWindow = 8;      // rows whose loads are issued before the first of them is used

// Position of a row's weight, or -1.
template <typename Params>
__device__ int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : __ldg(p.weight_index + row);
  return place >= 0 && place < p.num_weights ? place : -1;
}

// One row of the list, or a token without rows.
struct alignas(16) ListedRow {
  int32_t row;  // -1: the token has none
  float weight;
  int32_t place;  // of the weight; -1: none
  int16_t token;  // within the tile
  bool last;      // of its token
  bool only;      // the token has no other
};

// The list of a tile: tokens [first, first + count). Tokens with more than 32 entries are listed in several segments, one at a time.
struct RowList {
  ListedRow rows[kTileTokens * kWarpSize];
  int32_t counts[kTileTokens];
  int32_t size;
  int32_t more;  // the token goes on behind this segment

  // Every thread of the block takes part; ends with a barrier. A tile of several tokens must have at most 32 entries per token.
  template <typename Params>
  __device__ void fill(const Params& p, int64_t first, int count, int64_t segment) {
    const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    __syncthreads();  // the list before this one is no longer read
    for (int index = threadIdx.x / kWarpSize; index < count; index += warps) {
      const Segment part(p, first + index, segment);
      if (lane == 0) counts[index] = __popc(part.used);
      if (lane == 0 && index == 0) more = part.ended ? 0 : 1;
    }
    __syncthreads();
    for (int index = threadIdx.x / kWarpSize; index < count; index += warps) {
      const Segment part(p, first + index, segment);  // from the L1
      int32_t base = 0;
      for (int earlier = 0; earlier < index; ++earlier) base += max(counts[earlier], 1);
      const int32_t here = __popc(part.used), rank = __popc(part.used & ((1u << lane) - 1));
      const bool only = here == 1 && (p.max_rows_per_token <= kWarpSize || has_one_row(p, first + index));
      const auto token = static_cast<int16_t>(index);
      if ((part.used >> lane & 1) != 0) {
        const int64_t place = p.weights == nullptr ? -1 : weight_place(p, part.row);
        const float weight = place < 0 ? 0.0f : __ldg(p.weights + place);
        rows[base + rank] = {part.row, weight, static_cast<int32_t>(place), token, part.ended && rank + 1 == here, only};
      } else if (here == 0 && lane == 0) {
        rows[base] = {-1, 0.0f, -1, token, part.ended, false};
      }
      if (index + 1 == count && lane == 0) size = base + max(here, 1);
    }
    __syncthreads();
  }

 private:
  // 32 entries of a token, one per lane. The first -1 ends the token; other entries outside [0, N) are skipped.
  struct Segment {
    int32_t row;
    unsigned used;
    bool ended;

    template <typename Params>
    __device__ Segment(const Params& p, int64_t token, int64_t begin) {
      const int64_t entry = begin + threadIdx.x % kWarpSize;
      row = entry < p.max_rows_per_token ? __ldg(p.token_rows + token * p.max_rows_per_token + entry) : -1;
      const unsigned ends = __ballot_sync(kAllLanes, row == -1);
      ended = ends != 0 || begin + kWarpSize >= p.max_rows_per_token;
      used = __ballot_sync(kAllLanes, row >= 0 && row < p.num_rows) & (ends == 0 ? kAllLanes : (ends & -ends) - 1);
    }
  };

  template <typename Params>
  static __device__ bool has_one_row(const Params& p, int64_t token) {
    int count = 0;
    bool ended = false;
    for (int64_t begin = 0; !ended && count < 2; begin += kWarpSize) {
      const Segment part(p, token, begin);
      count += __popc(part.used);
      ended = part.ended;
    }
    return count == 1;
  }
};

}  // namespace cuda
}  // namespace pmo
