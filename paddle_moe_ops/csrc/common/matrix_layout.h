// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The memory layout of the codes and scales of pmo_dequantize_matrices_*.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"
#include "pmo/matrices.h"
#include "pmo/quantize.h"

namespace pmo {

PMO_ANYWHERE constexpr bool is_int4(int32_t format) { return format == PMO_MATRIX_INT4 || format == PMO_MATRIX_INT4_1X128; }

// Bytes of the int4 codes of `inner` inputs.
PMO_ANYWHERE constexpr int64_t bytes_of_int4(int64_t inner) { return 16 * divide_up(inner, int64_t{32}); }

// Codes in 16 bytes: kernels read rows of codes whose number is a multiple of it.
PMO_ANYWHERE constexpr int64_t codes_in_16_bytes(int32_t format) { return is_int4(format) ? 32 : 16; }

// One matrix as it is stored: rows and columns of values, of bytes of codes, and of scales. The scale of element (r, c) is at
// row r / scale_height and column c / scale_width of the scales.
struct MatrixLayout {
  int64_t rows, columns;
  int64_t code_rows, code_columns;
  int64_t scale_height, scale_width;
  int64_t scale_rows, scale_columns;

  MatrixLayout(int32_t format, int64_t inner, int64_t outer, bool transpose) {
    constexpr int64_t kGroup = PMO_QUANTIZE_GROUP;
    const int64_t packed = is_int4(format) ? bytes_of_int4(inner) : inner;
    const bool by_output = format == PMO_MATRIX_INT8 || format == PMO_MATRIX_INT4;
    const int64_t inputs = by_output ? (inner > 0 ? inner : 1) : kGroup,
                  outputs = format == PMO_MATRIX_FLOAT8_128X128 ? kGroup : 1;
    rows = transpose ? outer : inner;
    columns = transpose ? inner : outer;
    code_rows = transpose ? outer : packed;
    code_columns = transpose ? packed : outer;
    scale_height = transpose ? outputs : inputs;
    scale_width = transpose ? inputs : outputs;
    scale_rows = by_output && !transpose ? 1 : divide_up(rows, scale_height);
    scale_columns = by_output && transpose ? 1 : divide_up(columns, scale_width);
  }
};

// Byte of the int4 code of an input, along D; the code is in the high half if is_high_int4.
PMO_ANYWHERE inline int64_t byte_of_int4(int64_t input) { return input / 32 * 16 + input % 8 * 2 + input / 16 % 2; }
PMO_ANYWHERE inline bool is_high_int4(int64_t input) { return input / 8 % 2 != 0; }

// The int4 code in the low or in the high half of a byte.
PMO_ANYWHERE inline int int4_of(uint8_t byte, bool high) {
  const int half = high ? byte >> 4 : byte & 15;
  return half - (half & 8) * 2;
}

}  // namespace pmo
