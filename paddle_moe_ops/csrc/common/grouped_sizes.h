// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Limits that the checks of grouped GEMMs share.
#pragma once

#include <cstdint>

#include "pmo/grouped.h"

namespace pmo {

// Row and column indices, and tiles of all matrices, are 32-bit integers on the device.
constexpr int64_t kMaxIndexOnDevice = INT32_MAX / 2;

inline bool is_size(int64_t value, int64_t multiple) { return value >= 0 && value <= kMaxIndexOnDevice && value % multiple == 0; }

inline bool is_16_bytes(const void* array) { return array != nullptr && reinterpret_cast<uintptr_t>(array) % 16 == 0; }

inline bool is_accumulation(int32_t value) { return value >= PMO_GROUPED_OVERWRITES && value <= PMO_GROUPED_ADDS_FLOAT32; }

}  // namespace pmo
