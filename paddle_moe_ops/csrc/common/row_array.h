// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The arrays that permute copies: rows and their scales.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/padding.h"
#include "pmo/permute.h"

namespace pmo {

// Lines of `source`, one per token, that are copied to lines of `target`. Empty if there is nothing to copy.
struct RowArray {
  const char* source = nullptr;
  char* target = nullptr;
  int64_t source_stride = 0;  // bytes
  int64_t row_bytes = 0;
  bool fill = false;  // zero the padding rows

  RowArray() = default;
  RowArray(const void* source_rows, void* target_rows, int64_t stride, int64_t columns, int32_t dtype, bool fill_padding) {
    if (target_rows == nullptr || columns == 0) return;
    source = static_cast<const char*>(source_rows);
    target = static_cast<char*>(target_rows);
    source_stride = stride * dtype_size(dtype);
    row_bytes = columns * dtype_size(dtype);
    fill = fill_padding;
  }
};

inline RowArray rows_of(const pmo_permute_params& p) {
  return RowArray(p.x, p.rows, p.x_row_stride, p.hidden, p.dtype, fills(p, PMO_FILL_ROWS));
}

inline RowArray scales_of(const pmo_permute_params& p) {
  return RowArray(p.scale, p.row_scales, p.scale_row_stride, p.scale_cols, p.scale_dtype, fills(p, PMO_FILL_SCALES));
}

}  // namespace pmo
