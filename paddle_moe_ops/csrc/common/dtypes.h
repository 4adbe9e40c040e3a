// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Element types: from the number in a params struct to a size or a C++ type.
#pragma once

#include <cstdint>

#include "pmo/base.h"

namespace pmo {

// Bytes of an element; 0 for values outside pmo_dtype.
inline int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case PMO_FLOAT32:
    case PMO_INT32:
      return 4;
    case PMO_FLOAT16:
    case PMO_BFLOAT16:
      return 2;
    case PMO_FLOAT8_E4M3FN:
    case PMO_FLOAT8_E5M2:
      return 1;
    default:
      return 0;
  }
}

// True if rows of the dtype can be summed.
inline bool is_sum_dtype(int32_t dtype) { return dtype == PMO_FLOAT32 || dtype == PMO_FLOAT16 || dtype == PMO_BFLOAT16; }

// Returns body(Type()) with the type of the dtype, which is_sum_dtype accepts.
template <typename Float32Type, typename Float16Type, typename BFloat16Type, typename Body>
auto with_sum_dtype(int32_t dtype, Body body) {
  switch (dtype) {
    case PMO_FLOAT32:
      return body(Float32Type());
    case PMO_FLOAT16:
      return body(Float16Type());
    default:
      return body(BFloat16Type());
  }
}

}  // namespace pmo
