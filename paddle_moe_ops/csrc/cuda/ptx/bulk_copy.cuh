// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// cp.async.bulk: copies of contiguous bytes between global and shared memory without a tensor map, and the mbarrier that loads
// complete on. For sm_90 and newer, base architectures included.
//
// Every address and length is a multiple of 16 bytes. On older architectures these functions trap: the host launches no kernel
// there that calls them.
#pragma once

#include <cstdint>

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Called by one thread: one arrival per phase. The fence makes the mbarrier visible to the async proxy.
__device__ inline void bulk_mbarrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(smem_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Called by one thread, before the loads of a phase, whose bytes complete it.
__device__ inline void bulk_mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

// Spins on mbarrier.try_wait until the loads of a phase are complete; phases count from 0.
__device__ inline void bulk_mbarrier_wait_parity(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "mbarrier.try_wait.parity.shared.b64 ready, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ready;\n"
        "}"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(phase & 1)
        : "memory");
  }
}

// L2 policy for source rows, which are read once: their lines are evicted first.
__device__ inline uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void cp_async_bulk_load(void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   smem_address(target)),
               "l"(source), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
               : "memory");
}

__device__ inline void cp_async_bulk_store(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

// Commits the bulk stores of this thread and waits until they have read their shared memory.
__device__ inline void cp_async_bulk_wait_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#else

__device__ inline void bulk_mbarrier_init(uint64_t*) { __trap(); }
__device__ inline void bulk_mbarrier_arrive_expect_tx(uint64_t*, uint32_t) { __trap(); }
__device__ inline void bulk_mbarrier_wait_parity(uint64_t*, uint32_t) { __trap(); }
__device__ inline uint64_t createpolicy_evict_first() { return 0; }
__device__ inline void cp_async_bulk_load(void*, const void*, uint32_t, uint64_t*, uint64_t) { __trap(); }
__device__ inline void cp_async_bulk_store(void*, const void*, uint32_t) { __trap(); }
__device__ inline void cp_async_bulk_wait_read() { __trap(); }

#endif

}  // namespace cuda
}  // namespace pmo
