// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows and tiles of each expert from sizes and offsets, by the threads of one CTA; the rules are in pmo/grouped_rows.h.
#pragma once

#include "common/ids.h"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

// Exclusive prefix and total of a block-wide scan of non-negative values.
struct Scanned {
  int64_t before, all;
};

// Block-wide scan; all threads call it. `of_warps` has a value per warp and lies in shared memory.
template <int kWarps, typename Operation>
__device__ Scanned scan(int64_t value, int64_t (&of_warps)[kWarps], Operation operation) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value = operation(value, other);
  }
  if (lane == kWarpSize - 1) of_warps[warp] = value;
  __syncthreads();
  const int64_t neighbour = __shfl_up_sync(kAllLanes, value, 1);
  Scanned result = {lane == 0 ? 0 : neighbour, 0};
  int64_t warps_before = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) warps_before = result.all;
    result.all = operation(result.all, of_warps[i]);
  }
  result.before = operation(result.before, warps_before);
  __syncthreads();  // before of_warps is overwritten
  return result;
}

struct Sum {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};
struct Larger {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};

// Calls store(expert, first row, row after the last one, tiles before) for each expert, by one thread of the CTA, and returns the
// number of tiles. `p` has num_rows, num_experts, sizes, offsets and their kinds. All threads call it.
template <int kWarps, typename Params, typename Store>
__device__ int32_t expert_ranges(const Params& p, int64_t tile_rows, int64_t (&of_warps)[kWarps], Store store) {
  const auto limited = [&](int64_t number) { return min(max(number, int64_t{0}), int64_t{p.num_rows}); };
  int64_t rows_before = 0, end_before = 0, tiles_before = 0;
  for (int64_t chunk = 0; chunk < p.num_experts; chunk += kWarps * kWarpSize) {
    const int64_t expert = chunk + threadIdx.x;
    const bool is_expert = expert < p.num_experts;
    const int64_t size = is_expert ? limited(id_at(p.sizes, p.sizes_kind, expert)) : 0;
    const Scanned rows = scan(size, of_warps, Sum());
    int64_t begin = limited(rows_before + rows.before);
    if (p.offsets != nullptr) begin = is_expert ? limited(id_at(p.offsets, p.offsets_kind, expert)) : 0;
    const int64_t own_end = is_expert ? limited(begin + size) : 0;
    const Scanned ends = scan(own_end, of_warps, Larger());
    const int64_t earlier = Larger()(ends.before, end_before), end = Larger()(own_end, earlier), first = Larger()(begin, earlier);
    const int64_t count = is_expert ? divide_up(end - first, tile_rows) : 0;
    const Scanned tiles = scan(count, of_warps, Sum());
    if (is_expert) {
      store(static_cast<int>(expert), static_cast<int32_t>(first), static_cast<int32_t>(end),
            static_cast<int32_t>(tiles_before + tiles.before));
    }
    rows_before += rows.all;
    end_before = Larger()(end_before, ends.all);
    tiles_before += tiles.all;
  }
  return static_cast<int32_t>(tiles_before);
}

}  // namespace cuda
}  // namespace pmo
