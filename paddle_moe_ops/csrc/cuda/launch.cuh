// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Launching kernels from the C ABI: grids, errors, workspaces.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "common/status.h"

namespace pmo {
namespace cuda {

constexpr int kWarpSize = 32;

// Threads that a multiprocessor holds: fewer on Turing than anywhere later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMultiprocessorThreads = 1024;
#else
constexpr int kMultiprocessorThreads = 1536;
#endif
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The sum and the highest of the values of a warp's lanes, for all of them.
__device__ inline int32_t sum_over_warp(int32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, value);
#else
  for (int step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
#endif
}

// In this order everywhere: halves onto halves.
__device__ inline float sum_over_warp_by_halves(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ inline uint32_t max_over_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
#endif
}

// The sum of the values of the lanes up to the calling one.
__device__ inline int32_t inclusive_sum_over_warp(int32_t value) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % kWarpSize >= step) value += other;
  }
  return value;
}

// What a warp of a grid of one-dimensional blocks takes, if every item is cut into `parts`, one to a warp.
struct WarpShare {
  int64_t item;
  int32_t part;

  __device__ explicit WarpShare(int32_t parts) {
    const int64_t warp = int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    // a division of 64 bits takes as many instructions as some rows do
    item = warp <= UINT32_MAX ? static_cast<uint32_t>(warp) / static_cast<uint32_t>(parts) : warp / parts;
    part = static_cast<int32_t>(warp - item * parts);
  }
};

inline int cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return PMO_OK;
  return fail(PMO_INTERNAL, std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

// Blocks for a loop over `items` with a grid stride: enough to cover them, at most `limit`.
inline unsigned grid_for(int64_t items, int64_t items_per_block, int64_t limit = int64_t{1} << 20) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

// What every *_cuda entry point does around its body.
template <typename Params, typename Body>
int run_cuda(const Params* params, void* stream, Body body) noexcept {
  if (params == nullptr) return fail(PMO_INVALID_ARGUMENT, "params must be given");
  return guarded([&] { return body(*params, static_cast<cudaStream_t>(stream)); });
}

// Hands out aligned pieces of a workspace; with a null base it only adds up their sizes.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace cuda
}  // namespace pmo

// Returns from the calling function when a CUDA call or the launch before it failed.
#define PMO_CUDA(call)                                                                       \
  do {                                                                                       \
    if (const int pmo_status_ = ::pmo::cuda::cuda_status((call), #call)) return pmo_status_; \
  } while (0)

#define PMO_CUDA_LAUNCHED(kernel)                                                                         \
  do {                                                                                                    \
    if (const int pmo_status_ = ::pmo::cuda::cuda_status(cudaGetLastError(), kernel)) return pmo_status_; \
  } while (0)
