// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Arrays of int32 or int64, as a kind says: PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"
#include "pmo/route.h"

namespace pmo {

inline bool is_id_kind(int32_t kind) { return kind == PMO_ROUTING_IDS32 || kind == PMO_ROUTING_IDS64; }

// True if an array of `count` ids is present and aligned.
inline bool is_id_array(const void* ids, int32_t kind, int64_t count) {
  const uintptr_t id_size = kind == PMO_ROUTING_IDS64 ? sizeof(int64_t) : sizeof(int32_t);
  return count == 0 || (ids != nullptr && reinterpret_cast<uintptr_t>(ids) % id_size == 0);
}

PMO_ANYWHERE inline int64_t id_at(const void* ids, int32_t kind, int64_t place) {
  return kind == PMO_ROUTING_IDS64 ? static_cast<const int64_t*>(ids)[place] : static_cast<const int32_t*>(ids)[place];
}

// Returns body(ids) with a pointer of the array's element type, for loops that are compiled for each type.
template <typename Body>
auto with_ids(const void* ids, int32_t kind, Body body) {
  return kind == PMO_ROUTING_IDS64 ? body(static_cast<const int64_t*>(ids)) : body(static_cast<const int32_t*>(ids));
}

}  // namespace pmo
