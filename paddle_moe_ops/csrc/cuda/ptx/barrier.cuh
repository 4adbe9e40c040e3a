// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Named barriers of a CTA (ids 1 to 15; id 0 is __syncthreads) and the barrier of a cluster (sm_90a).
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// Arrives and waits for `threads` threads in all.
__device__ inline void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ inline void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits for all threads of the cluster.
__device__ inline void barrier_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
