// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Counters by which ranks tell each other how far they have come. Each rank has one in the memory of each other rank; pmo/ranks.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "common/status.h"

namespace pmo {
namespace cpu {

inline void tell_ranks(void* peers, int64_t region_bytes, int64_t num_ranks, uint32_t turn) {
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto* const counter = reinterpret_cast<uint32_t*>(static_cast<char*>(peers) + rank * region_bytes);
    __atomic_store_n(counter, turn, __ATOMIC_RELEASE);
  }
}

// Waits until all ranks have told `turn` or more; after too long it fails.
inline int await_ranks(const void* arrived, int64_t region_bytes, int64_t num_ranks, uint32_t turn, int64_t timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const auto* const counter = reinterpret_cast<const uint32_t*>(static_cast<const char*>(arrived) + rank * region_bytes);
    while (static_cast<int32_t>(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - turn) < 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        return fail(PMO_INTERNAL, "rank " + std::to_string(rank) + " of the group did not answer");
      }
      std::this_thread::yield();
    }
  }
  return PMO_OK;
}

}  // namespace cpu
}  // namespace pmo
