// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Bulk copies between global and shared memory (sm_90 and newer), and the shared-memory barrier that their loads complete on.
//
// Every address and length is a multiple of 16 bytes. On older architectures these functions trap: the host never launches a
// kernel that calls them there.
#pragma once

#include <cstdint>

namespace pmo {
namespace cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// One thread; the fence makes the barrier visible to the copy engine.
__device__ inline void init_load_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread, before the loads of a phase: how many bytes complete it.
__device__ inline void expect_loads(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the loads of a phase have come; phases count from 0.
__device__ inline void wait_for_loads(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "mbarrier.try_wait.parity.shared.b64 ready, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ready;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase & 1)
        : "memory");
  }
}

// Source rows are read once: their lines are the first that L2 may drop.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void bulk_load(void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}

__device__ inline void bulk_store(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(shared_address(source)),
               "r"(bytes)
               : "memory");
}

// The calling thread's stores have read their shared memory, which may be written again.
__device__ inline void wait_for_store_reads() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#else

__device__ inline void init_load_barrier(uint64_t*) { __trap(); }
__device__ inline void expect_loads(uint64_t*, uint32_t) { __trap(); }
__device__ inline void wait_for_loads(uint64_t*, uint32_t) { __trap(); }
__device__ inline uint64_t evict_first_policy() { return 0; }
__device__ inline void bulk_load(void*, const void*, uint32_t, uint64_t*, uint64_t) { __trap(); }
__device__ inline void bulk_store(void*, const void*, uint32_t) { __trap(); }
__device__ inline void wait_for_store_reads() { __trap(); }

#endif

}  // namespace cuda
}  // namespace pmo
