// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// TMA: tensor copies between global and shared memory through a CUtensorMap, and the proxy fence that they need (sm_90a).
//
// One thread issues a copy of a box. x, y, z are element coordinates, innermost dimension first. A load fills elements outside
// the tensor with zeros and completes on an mbarrier; a store skips elements outside the tensor and completes with a bulk group
// of the issuing thread.
#pragma once

#include <cuda.h>

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// Loads a tensor map, a kernel parameter, before its first use.
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void tma_load_2d(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

__device__ inline void tma_load_3d(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Multicast: writes the box to the same shared address of every CTA of the cluster whose bit is set in `cta_mask`. It completes
// on the mbarrier at the same shared address of each.
__device__ inline void tma_load_3d_multicast(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                                             int cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], "
      "[%2], %6;" ::"r"(target),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(cta_mask))
      : "memory");
}

// Every thread that wrote the box calls fence_proxy_async before the store. The issuing thread commits the store to a bulk group
// and waits with cp_async_bulk_wait_group_read before anyone overwrites the box.
__device__ inline void tma_store_3d(const CUtensorMap* map, uint32_t source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(source), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

// The same with the L2 policy evict_first.
__device__ inline void tma_store_3d_evict_first(const CUtensorMap* map, uint32_t source, int x, int y, int z) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
               "r"(source), "r"(x), "r"(y), "r"(z), "l"(policy)
               : "memory");
}

__device__ inline void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending bulk groups of this thread have read their shared memory.
template <int kPending = 0>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Proxy fence: makes shared-memory writes that happened before it visible to the async proxy, hence to TMA and wgmma.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
