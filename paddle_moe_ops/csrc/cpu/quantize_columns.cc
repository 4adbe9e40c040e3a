// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Quantisation of rows as operands of wgrads on the CPU, by blocks of 128 rows of an expert and 128 columns. A block is transposed as
// float32, and each of its columns quantised as a row, with the block's amax as `amax_min` where they share a scale. Threads own
// row blocks. Bytes moved: M * C * (itemsize + 1), and 4 with values.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/checks.h"
#include "common/dtypes.h"
#include "common/scales.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cpu {
namespace {

constexpr int64_t kSide = kGroupColumns;
constexpr uint8_t kNanCode = 0x7F;

bool has_infinity(const float* values, int64_t count) {
  return std::any_of(values, values + count, [](float value) { return std::isinf(value); });
}

// A row block: its first row, and its number of rows.
struct RowBlock {
  int64_t number, first, rows;
};

// Columns of a row block, at most kSide.
template <typename Rows>
class Tile {
 public:
  Tile(const pmo_quantize_columns_params& p, const RowBlock& block, int64_t column)
      : p_(p), block_(block), column_(column), columns_(std::min(p.num_columns - column, kSide)) {
    for (int64_t row = 0; row < kSide; ++row) {
      const auto* const source = row < block.rows ? source_of(block.first + row) : nullptr;
      for (int64_t i = 0; i < columns_; ++i) x_[i][row] = source == nullptr ? 0.0f : Rows::load(source[i]);
    }
  }

  void quantize() const {
    const bool all_are_nan = p_.by_blocks && has_infinity(x_[0], columns_ * kSide);
    const float amax = p_.by_blocks ? amax_of<Float32Rows>(x_[0], kSide, columns_, kSide, p_.amax_min) : p_.amax_min;
    const auto quantize_row = row_kernels(PMO_FLOAT32).quantize;
    for (int64_t i = 0; i < columns_; ++i) {
      uint8_t codes[kSide];
      float scale = 0.0f;
      quantize_row(x_[i], kSide, amax, false, codes, &scale);
      if (all_are_nan || (!p_.by_blocks && has_infinity(x_[i], kSide))) std::fill(codes, codes + kSide, kNanCode);
      const int64_t column = block_.number * p_.num_columns + column_ + i;
      if (p_.codes != nullptr) {
        std::copy(codes, codes + kSide, static_cast<uint8_t*>(p_.codes) + column * kSide);
        p_.scales[p_.by_blocks ? block_.number * divide_up(p_.num_columns, kSide) + column_ / kSide : column] = scale;
      }
      if (p_.values == nullptr) continue;
      float values[kSide];
      row_kernels(PMO_FLOAT32).dequantize(codes, &scale, kSide, false, values);
      for (int64_t row = 0; row < block_.rows; ++row)
        p_.values[(block_.first + row) * p_.num_columns + column_ + i] = values[row];
    }
  }

 private:
  const typename Rows::Element* source_of(int64_t row) const {
    if (p_.row_to_token != nullptr) row = p_.row_to_token[row];
    if (row < 0 || row >= p_.num_sources) return nullptr;
    return static_cast<const typename Rows::Element*>(p_.x) + row * p_.x_row_stride + column_;
  }

  const pmo_quantize_columns_params& p_;
  const RowBlock& block_;
  const int64_t column_, columns_;
  float x_[kSide][kSide];
};

int quantize_columns(const pmo_quantize_columns_params& p) {
  if (const int status = check_quantize_columns(p)) return status;
  if (p.num_rows == 0 || p.num_columns == 0 || p.num_blocks == 0) return PMO_OK;
  const int64_t blocks = std::min<int64_t>(p.tiles[p.num_experts], p.num_blocks);
  const int64_t bytes = p.num_rows * p.num_columns * (dtype_size(p.dtype) + 1);
  return with_rows(p.dtype, [&](auto rows) {
    parallel_ranges(blocks, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        const auto* const next = std::upper_bound(p.tiles, p.tiles + p.num_experts + 1, number);
        const int64_t expert = next - p.tiles - 1, first = p.first[expert] + (number - p.tiles[expert]) * kSide;
        const RowBlock block = {number, first, std::min({int64_t{p.stop[expert]}, p.num_rows, first + kSide}) - first};
        for (int64_t column = 0; column < p.num_columns; column += kSide) Tile<decltype(rows)>(p, block, column).quantize();
      }
    });
    return static_cast<int>(PMO_OK);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_quantize_columns_cpu(const pmo_quantize_columns_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::quantize_columns);
}
