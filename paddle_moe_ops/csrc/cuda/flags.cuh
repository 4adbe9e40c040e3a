// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Counters by which ranks tell each other how far they have come. Each rank has one in the memory of each other rank; pmo/ranks.h.
#pragma once

#include <cstdint>
#include <cstdio>

namespace pmo {
namespace cuda {

__device__ inline void tell_rank(void* peers, int64_t region_bytes, int64_t rank, uint32_t turn) {
  auto* const counter = reinterpret_cast<uint32_t*>(static_cast<char*>(peers) + rank * region_bytes);
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(counter), "r"(turn) : "memory");
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Waits until a rank has told `turn` or more; after too long it ends the context.
__device__ inline void await_rank(const void* arrived, int64_t region_bytes, int64_t rank, uint32_t turn, int64_t timeout_ms) {
  const auto* const counter = reinterpret_cast<const uint32_t*>(static_cast<const char*>(arrived) + rank * region_bytes);
  const uint64_t begin = nanoseconds(), most = static_cast<uint64_t>(timeout_ms) * 1000000;
  for (;;) {
    uint32_t told;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(told) : "l"(counter) : "memory");
    if (static_cast<int32_t>(told - turn) >= 0) return;
    if (nanoseconds() - begin > most) {
      printf("paddle_moe_ops: ExpertParallel: rank %d of the group did not answer\n", static_cast<int>(rank));
      __trap();
    }
    __nanosleep(40);
  }
}

}  // namespace cuda
}  // namespace pmo
