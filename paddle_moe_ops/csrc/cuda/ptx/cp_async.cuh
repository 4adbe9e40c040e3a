// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// cp.async: 16-byte asynchronous copies from global to shared memory by ordinary threads, which complete on an mbarrier (sm_90a).
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// Copies 16 bytes, or writes 16 zero bytes if `valid` is false.
__device__ inline void cp_async_16_zfill(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}

// Arrives at the mbarrier once all earlier cp.async copies of this thread have completed. The arrival is one of those that
// mbarrier_init counted (noinc).
__device__ inline void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
