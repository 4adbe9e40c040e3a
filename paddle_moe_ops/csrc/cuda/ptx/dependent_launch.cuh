// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Programmatic dependent launch: a kernel launched with Grid::overlaps may start before the previous kernel of its stream ends.
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

// Waits until the previous kernel has completed and its stores are visible. At least one thread of each CTA calls it, so that this
// kernel completes after the previous one.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel to start once all CTAs have called this or ended.
__device__ inline void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cuda
}  // namespace pmo
