// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What kernels share: sums over the lanes of a warp, and a warp's share of the work.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "paddle_moe_ops needs compute capability 8.0 or newer: compile for sm_80 and above"
#endif

namespace pmo {
namespace cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The sum and the highest of the values of a warp's lanes, for all of them.
__device__ inline int32_t sum_over_warp(int32_t value) { return __reduce_add_sync(kAllLanes, value); }

// In this order everywhere: halves onto halves.
__device__ inline float sum_over_warp_by_halves(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ inline uint32_t max_over_warp(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

// The sum of the values of the lanes up to the calling one.
__device__ inline int32_t inclusive_sum_over_warp(int32_t value) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % kWarpSize >= step) value += other;
  }
  return value;
}

// Calls visit(value) with the values of the lanes in `set`, of which there are mostly eight or so, the lowest first. Lanes are known to
// the compiler, so that no step waits for the one before it.
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

// The same for few lanes.
template <typename Visit>
__device__ inline void for_each_of_few_lanes(unsigned set, int32_t value, Visit visit) {
#pragma unroll 1
  for (; set != 0; set &= set - 1) visit(__shfl_sync(kAllLanes, value, __ffs(set) - 1));
}

// What a warp of a grid of one-dimensional blocks takes, if every item is cut into `parts`, one to a warp, from block `first_block` on.
struct WarpShare {
  int64_t item;
  int32_t part;

  __device__ explicit WarpShare(int32_t parts, unsigned first_block = 0) {
    const int64_t warp = int64_t{blockIdx.x - first_block} * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    // a division of 64 bits takes as many instructions as some rows do
    item = warp <= UINT32_MAX ? static_cast<uint32_t>(warp) / static_cast<uint32_t>(parts) : warp / parts;
    part = static_cast<int32_t>(warp - item * parts);
  }
};

}  // namespace cuda
}  // namespace pmo
