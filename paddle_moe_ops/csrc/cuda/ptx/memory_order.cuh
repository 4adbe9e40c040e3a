// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Acquire loads and release stores at system scope, for flags that GPUs of one host write into each other's memory, and the
// global timer.
#pragma once

#include <cstdint>

namespace pmo {
namespace cuda {

__device__ inline uint32_t ld_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void st_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// %globaltimer in nanoseconds.
__device__ inline uint64_t globaltimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace cuda
}  // namespace pmo
