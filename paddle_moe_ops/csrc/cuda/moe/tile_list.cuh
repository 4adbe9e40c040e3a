// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows of a tile of tokens and their weights in shared memory, for unpermute of many tokens.
//
// A CTA reads the maps of its tokens once, a warp per token, and then loops over the resulting list. The list holds the used rows
// in order and without gaps, so the loop loads several rows ahead, across tokens. It has one segment of 32 entries of each token.
// If a token of the tile has more, the caller processes the tokens one by one, segment by segment.
#pragma once

#include <cstdint>

#include "cuda/moe/warp_rows.cuh"

namespace pmo {
namespace cuda {

constexpr int kTileTokens = 8;  // at most

// A row of the list, or a token without rows.
struct alignas(8) ListedRow {
  int32_t row;    // -1: the token has no row
  int16_t token;  // within the tile
  bool last;      // last row of its token
  bool only;      // only row of its token
};

// The list of a tile: tokens [first, first + count).
struct TileList {
  ListedRow rows[kTileTokens * kWarpSize];
  float weights[kTileTokens * kWarpSize];  // of the rows, once they are loaded
  int32_t counts[kTileTokens];
  int32_t size;
  int32_t more;  // not 0: a token has entries after this segment

  // Called by all threads of the CTA; ends with a barrier.
  template <typename Params>
  __device__ void fill(const Params& p, int64_t first, int count, int64_t segment) {
    const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    __syncthreads();  // all have read the previous list
    if (threadIdx.x == 0) more = 0;
    __syncthreads();
    for (int index = threadIdx.x / kWarpSize; index < count; index += warps) {
      const WarpRows part(p, first + index, segment);
      if (lane == 0) counts[index] = __popc(part.used);
      if (lane == 0 && !part.ended) atomicOr(&more, 1);
    }
    __syncthreads();
    for (int index = threadIdx.x / kWarpSize; index < count; index += warps) {
      const WarpRows part(p, first + index, segment);  // from the L1
      int32_t base = 0;
      for (int earlier = 0; earlier < index; ++earlier) base += max(counts[earlier], 1);
      const int32_t here = __popc(part.used), rank = __popc(part.used & ((1u << lane) - 1));
      // A token's only row is also its last, in whichever segment it is: later segments neither add nor store.
      const bool is_whole = segment == 0 && part.ended;
      const bool has_one = is_whole ? here == 1 : here <= 1 && has_one_row(p, first + index, WarpRows(p, first + index, 0));
      const bool only = has_one && here == 1;
      const auto token = static_cast<int16_t>(index);
      if (part.is_used()) {
        rows[base + rank] = {part.row, token, only || (part.ended && rank + 1 == here), only};
      } else if (here == 0 && lane == 0) {
        rows[base] = {-1, token, part.ended && !has_one, false};
      }
      if (index + 1 == count && lane == 0) size = base + max(here, 1);
    }
    __syncthreads();
  }

  // Called by all threads, after they issued the loads of the rows' data: weights, two dependent loads, then arrive with the
  // data.
  template <typename Params>
  __device__ void load_weights(const Params& p) {
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
      if (rows[i].row >= 0) weights[i] = weight_of(p, rows[i].row);
    }
    __syncthreads();
  }
};

}  // namespace cuda
}  // namespace pmo
