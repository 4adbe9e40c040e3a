// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dequantize_matrices on the CPU: threads own contiguous ranges of stored rows. A row is dequantised in
// float32, in a buffer of the thread, and then rounded. Bytes moved: E * D * N * (bytes of a code + itemsize).
#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/matrix_layout.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "pmo/matrices.h"

namespace pmo {
namespace cpu {
namespace {

// Space for one row: its int4 codes in a byte each, and its values.
struct RowBuffer {
  std::vector<int8_t> codes;
  std::vector<float> values;
};

// values[i] = code * scale, with a scale for each `width` columns
void scale_codes(const int8_t* codes, const float* scales, int64_t width, int64_t columns, float* values) {
  if (width == 1) {
    for (int64_t i = 0; i < columns; ++i) values[i] = static_cast<float>(codes[i]) * scales[i];
    return;
  }
  for (int64_t first = 0; first < columns; first += width) {
    const float scale = scales[first / width];
    const int64_t end = std::min(first + width, columns);
    for (int64_t i = first; i < end; ++i) values[i] = static_cast<float>(codes[i]) * scale;
  }
}

// The values of a stored row of one matrix.
void row_values(const pmo_dequantize_matrices_params& p, const MatrixLayout& layout, const uint8_t* codes, const float* scales,
                int64_t row, RowBuffer* buffer) {
  if (p.format == PMO_MATRIX_FLOAT8_128X128) {
    const uint8_t* line = codes + row * layout.code_columns;
    row_kernels(PMO_FLOAT32).dequantize(line, scales, layout.columns, false, buffer->values.data());
    return;
  }
  const auto* line = reinterpret_cast<const int8_t*>(codes + row * layout.code_columns);
  int8_t* unpacked = buffer->codes.data();
  if (is_int4(p.format) && p.transpose != 0) {
    for (int64_t i = 0; i < layout.columns; ++i) {
      const auto byte = static_cast<uint8_t>(line[byte_of_int4(i)]);
      unpacked[i] = static_cast<int8_t>(int4_of(byte, is_high_int4(i)));
    }
    line = unpacked;
  } else if (is_int4(p.format)) {
    const uint8_t* packed = codes + byte_of_int4(row) * layout.code_columns;
    const int shift = is_high_int4(row) ? 4 : 0;
    for (int64_t i = 0; i < layout.columns; ++i) unpacked[i] = static_cast<int8_t>(int4_of(packed[i] >> shift & 15, false));
    line = unpacked;
  }
  scale_codes(line, scales, layout.scale_width, layout.columns, buffer->values.data());
}

// Rounds a row to the type of `Rows`, stored as `Out`.
template <typename Rows, typename Out>
void round_row(const float* values, int64_t columns, Out* out) {
  for (int64_t i = 0; i < columns; ++i) {
    const auto rounded = Rows::store(values[i]);
    if constexpr (std::is_same_v<Out, typename Rows::Element>) {
      out[i] = rounded;
    } else {
      out[i] = Rows::load(rounded);
    }
  }
}

template <typename Rows, typename Out>
void dequantize_rows(const pmo_dequantize_matrices_params& p, const MatrixLayout& layout, int64_t begin, int64_t end) {
  const auto columns = static_cast<size_t>(layout.columns);
  RowBuffer buffer = {std::vector<int8_t>(columns), std::vector<float>(columns)};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t matrix = i / layout.rows, row = i % layout.rows;
    const auto* codes = static_cast<const uint8_t*>(p.codes) + matrix * layout.code_rows * layout.code_columns;
    const float* scales = p.scales + (matrix * layout.scale_rows + row / layout.scale_height) * layout.scale_columns;
    row_values(p, layout, codes, scales, row, &buffer);
    round_row<Rows>(buffer.values.data(), layout.columns, static_cast<Out*>(p.out) + i * layout.columns);
  }
}

int dequantize(const pmo_dequantize_matrices_params& p) {
  if (const int status = check_dequantize_matrices(p)) return status;
  const MatrixLayout layout(p.format, p.inner, p.outer, p.transpose != 0);
  if (p.num_matrices == 0 || layout.rows == 0 || layout.columns == 0) return PMO_OK;
  const int64_t count = p.num_matrices * layout.rows;
  const int64_t bytes = count * layout.columns * (1 + (p.widens != 0 ? 4 : dtype_size(p.dtype)));
  return with_rows(p.dtype, [&](auto rows) {
    using Rows = decltype(rows);
    parallel_ranges(count, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
      if (p.widens != 0) {
        dequantize_rows<Rows, float>(p, layout, begin, end);
      } else {
        dequantize_rows<Rows, typename Rows::Element>(p, layout, begin, end);
      }
    });
    return static_cast<int>(PMO_OK);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_dequantize_matrices_cpu(const pmo_dequantize_matrices_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::dequantize);
}
