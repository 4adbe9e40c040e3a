// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Warp-level reductions and scans, loops over lanes, and the mapping of warps to work items.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "paddle_moe_ops needs compute capability 8.0 or newer: compile for sm_80 and above"
#endif

namespace pmo {
namespace cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Sum over the lanes of a warp; all lanes receive it.
__device__ inline int32_t sum_over_warp(int32_t value) { return __reduce_add_sync(kAllLanes, value); }

// The same for floats, in one fixed order: lane l + 16 onto lane l, then l + 8, and so on.
__device__ inline float sum_over_warp_by_halves(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ inline uint32_t max_over_warp(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

// Inclusive prefix sum over the lanes.
__device__ inline int32_t inclusive_sum_over_warp(int32_t value) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % kWarpSize >= step) value += other;
  }
  return value;
}

// Calls visit(value) with the values of the lanes in `set`, lowest lane first, for about eight lanes. Lane numbers are
// compile-time constants, so shuffles of different lanes are independent.
template <typename Visit>
__device__ inline void for_each_lane(unsigned set, int32_t value, Visit visit) {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (; set != 0; set >>= kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t of_lane = __shfl_sync(kAllLanes, value, i);
      if ((set >> i & 1) != 0) visit(of_lane);
    }
    value = __shfl_down_sync(kAllLanes, value, kAtOnce);
  }
}

// The same for fewer lanes.
template <typename Visit>
__device__ inline void for_each_of_few_lanes(unsigned set, int32_t value, Visit visit) {
#pragma unroll 1
  for (; set != 0; set &= set - 1) visit(__shfl_sync(kAllLanes, value, __ffs(set) - 1));
}

// Work of a warp in a grid of one-dimensional CTAs: each item is cut into `parts`, one per warp, from CTA `first_block` on.
struct WarpShare {
  int64_t item;
  int32_t part;

  __device__ explicit WarpShare(int32_t parts, unsigned first_block = 0) {
    const int64_t warp = int64_t{blockIdx.x - first_block} * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    // a 64-bit division takes as many instructions as some rows
    item = warp <= UINT32_MAX ? static_cast<uint32_t>(warp) / static_cast<uint32_t>(parts) : warp / parts;
    part = static_cast<int32_t>(warp - item * parts);
  }
};

}  // namespace cuda
}  // namespace pmo
