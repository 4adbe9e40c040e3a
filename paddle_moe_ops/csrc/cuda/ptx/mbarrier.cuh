// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// mbarrier: arrival and transaction barriers in shared memory (sm_90a).
//
// A phase completes when all expected arrivals and all expected bytes of TMA or cp.async.bulk have come in. The parity of the
// phase alternates 0, 1, 0, ...; a fresh mbarrier counts as if its phase of parity 1 were complete.
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

__device__ inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

// Makes mbarrier_init visible to the async proxy and to the other CTAs of the cluster.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives and raises the transaction count of the current phase by `bytes`.
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

#define PMO_MBARRIER_WAIT(ORDER)           \
  asm volatile(                            \
      "{\n"                                \
      ".reg .pred done;\n"                 \
      "again:\n"                           \
      "mbarrier.try_wait.parity" ORDER     \
      ".shared::cta.b64 done, [%0], %1;\n" \
      "@done bra ready;\n"                 \
      "bra again;\n"                       \
      "ready:\n"                           \
      "}" ::"r"(smem_address(barrier)),    \
      "r"(parity)                          \
      : "memory")

// Spins on mbarrier.try_wait until the phase of this parity is complete.
__device__ inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) { PMO_MBARRIER_WAIT(""); }

// The same with acquire semantics at cluster scope: also orders writes that other CTAs of the cluster released by their arrivals.
__device__ inline void mbarrier_wait_parity_acquire_cluster(uint64_t* barrier, uint32_t parity) {
  PMO_MBARRIER_WAIT(".acquire.cluster");
}

#undef PMO_MBARRIER_WAIT

// Arrives at the mbarrier at the same shared address of CTA `rank` of the cluster, which may be the calling CTA. Orders no
// earlier memory access across CTAs: for stages that wgmma has read and whose completion the thread has waited for.
__device__ inline void mbarrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// The same with release semantics at cluster scope: pairs with mbarrier_wait_parity_acquire_cluster.
__device__ inline void mbarrier_arrive_release_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
