// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What the checks of a routing and of a rowmap note down.
#pragma once

#include <cstdint>

namespace pmo {
namespace cuda {

// Of all places that threads find, the lowest one stays; PMO_NOWHERE is above all.
__device__ inline void note_first(int64_t* place, int64_t found) {
  atomicMin(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(found));
}

}  // namespace cuda
}  // namespace pmo
