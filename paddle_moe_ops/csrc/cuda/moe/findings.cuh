// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Findings of the checks of a routing and of a rowmap: the lowest place of each kind.
#pragma once

#include <cstdint>

namespace pmo {
namespace cuda {

// Keeps the lowest of all places that threads find; PMO_NOWHERE is above all places.
__device__ inline void note_first(int64_t* place, int64_t found) {
  atomicMin(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(found));
}

}  // namespace cuda
}  // namespace pmo
