// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cfloat>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/checks.h"
#include "common/dtypes.h"
#include "common/grouped_sizes.h"
#include "common/scales.h"
#include "common/status.h"

namespace pmo {
namespace {

// Checks the sizes of stacked matrices.
int check_sizes(int32_t dtype, int64_t num_matrices, const char* first_name, int64_t first, const char* second_name,
                int64_t second) {
  PMO_REQUIRE(is_sum_dtype(dtype), "dtype", "PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(num_matrices >= 0 && num_matrices <= kMaxExperts, "num_matrices", "in [0, 2^16]");
  PMO_REQUIRE(is_size(first, 1), first_name, "in [0, 2^30)");
  PMO_REQUIRE(is_size(second, 1), second_name, "in [0, 2^30)");
  const int64_t tiles = divide_up(first, int64_t{128}) * divide_up(second, int64_t{128});
  PMO_REQUIRE(num_matrices == 0 || tiles <= kMaxIndexOnDevice / num_matrices, "num_matrices", "below 2^30 / blocks of a matrix");
  return PMO_OK;
}

}  // namespace

int check_grouped_float8(const pmo_grouped_float8_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_float8_params of this library");
  PMO_REQUIRE(p.result >= PMO_GROUPED_PLAIN && p.result <= PMO_GROUPED_GRADIENT, "result", "one of pmo_grouped_result");
  const bool is_plain = p.result == PMO_GROUPED_PLAIN, is_gated = p.result == PMO_GROUPED_GATED;
  PMO_REQUIRE(is_size(p.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.num_sources, 1), "num_sources", "in [0, 2^30)");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_size(p.inner, 16), "inner", "a multiple of 16");
  PMO_REQUIRE(is_size(p.outer, is_plain   ? 8
                               : is_gated ? 256
                                          : 128),
              "outer", "a multiple of 8; of 256 if the result is gated, of 128 if it is a gradient");
  PMO_REQUIRE(is_size(p.width, 8), "width", "a multiple of 8");
  PMO_REQUIRE(is_size(p.first_column, 128) && p.first_column + p.width <= p.outer, "first_column",
              "a multiple of 128 in the matrix");
  if (!is_plain) {
    PMO_REQUIRE(p.first_column == 0 && (is_gated ? 2 : 1) * p.width == p.outer, "width", "all columns of the result");
  }
  PMO_REQUIRE(is_size(p.first_row, 1), "first_row", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.window_rows, 1), "window_rows", "in [0, 2^30)");
  PMO_REQUIRE(p.codes == nullptr || !is_plain, "codes", "NULL if the result is plain");
  PMO_REQUIRE(p.hidden_codes == nullptr || !is_plain, "hidden_codes", "NULL if the result is plain");
  PMO_REQUIRE(p.hidden_codes == nullptr || !is_gated || p.hidden == nullptr, "hidden", "NULL if a gated result has hidden_codes");
  const bool writes_codes = p.codes != nullptr || (is_gated && p.hidden_codes != nullptr);
  if (writes_codes) PMO_REQUIRE(p.amax_min >= kAmaxMin && p.amax_min <= FLT_MAX, "amax_min", "in [2^-100, FLT_MAX]");
  if (p.num_rows == 0) return PMO_OK;
  PMO_REQUIRE(p.num_sources > 0 && p.inner > 0 && p.outer > 0, "inner", "positive where there are rows");
  PMO_REQUIRE(is_16_bytes(p.x), "x", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_16_bytes(p.matrix), "matrix", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(p.out == nullptr ? is_gated : is_16_bytes(p.out), "out", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(p.hidden == nullptr ? p.result != PMO_GROUPED_GRADIENT : is_16_bytes(p.hidden), "hidden",
              "an array at a multiple of 16 bytes");
  PMO_REQUIRE(p.hidden_codes == nullptr || is_16_bytes(p.hidden_codes), "hidden_codes", "an array at a multiple of 16 bytes");
  PMO_REQUIRE_ARRAY(p.hidden_scales, p.hidden_codes == nullptr ? 0 : 1, "hidden_scales");
  PMO_REQUIRE(p.codes == nullptr || is_16_bytes(p.codes), "codes", "an array at a multiple of 16 bytes");
  PMO_REQUIRE_ARRAY(p.scales, p.codes == nullptr ? 0 : 1, "scales");
  PMO_REQUIRE_ARRAY(p.x_scales, 1, "x_scales");
  PMO_REQUIRE_ARRAY(p.matrix_scales, 1, "matrix_scales");
  PMO_REQUIRE_ARRAY(p.first, p.num_experts, "first");
  PMO_REQUIRE_ARRAY(p.stop, p.num_experts, "stop");
  PMO_REQUIRE_ARRAY(p.tiles, p.num_experts + 1, "tiles");
  PMO_REQUIRE_ARRAY(p.window, 2, "window");
  PMO_REQUIRE_ARRAY(p.counters, 2, "counters");
  return PMO_OK;
}

int check_quantize_blocks(const pmo_quantize_blocks_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_quantize_blocks_params of this library");
  if (const int status = check_sizes(p.dtype, p.num_matrices, "num_rows", p.num_rows, "num_columns", p.num_columns))
    return status;
  PMO_REQUIRE(p.amax_min >= kAmaxMin && p.amax_min <= FLT_MAX, "amax_min", "in [2^-100, FLT_MAX]");
  if (p.num_matrices == 0 || p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  PMO_REQUIRE(p.x != nullptr && reinterpret_cast<uintptr_t>(p.x) % dtype_size(p.dtype) == 0, "x",
              "an array aligned to its element size");
  PMO_REQUIRE((p.codes == nullptr) == (p.scales == nullptr), "scales", "given with codes");
  PMO_REQUIRE((p.turned_codes == nullptr) == (p.turned_scales == nullptr), "turned_scales", "given with turned_codes");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.scales, "scales");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.turned_scales, "turned_scales");
  return PMO_OK;
}

int check_quantize_columns(const pmo_quantize_columns_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_quantize_columns_params of this library");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(is_size(p.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.num_sources, 1), "num_sources", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.num_columns, 1), "num_columns", "in [0, 2^30)");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_size(p.num_blocks, 1), "num_blocks", "in [0, 2^30)");
  PMO_REQUIRE(p.row_to_token != nullptr || p.num_sources >= p.num_rows, "num_sources", "at least num_rows without row_to_token");
  PMO_REQUIRE(p.amax_min >= kAmaxMin && p.amax_min <= FLT_MAX, "amax_min", "in [2^-100, FLT_MAX]");
  if (p.num_rows == 0 || p.num_columns == 0 || p.num_blocks == 0) return PMO_OK;
  PMO_REQUIRE(p.num_sources == 0 || p.x_row_stride >= p.num_columns, "x_row_stride", "at least num_columns");
  const bool is_aligned = p.x != nullptr && reinterpret_cast<uintptr_t>(p.x) % dtype_size(p.dtype) == 0;
  PMO_REQUIRE(p.num_sources == 0 || is_aligned, "x", "an array aligned to its element size");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.row_to_token, "row_to_token");
  PMO_REQUIRE_ARRAY(p.first, p.num_experts, "first");
  PMO_REQUIRE_ARRAY(p.stop, p.num_experts, "stop");
  PMO_REQUIRE_ARRAY(p.tiles, p.num_experts + 1, "tiles");
  PMO_REQUIRE(p.codes == nullptr ? p.values != nullptr : is_16_bytes(p.codes), "codes",
              "an array at a multiple of 16 bytes; NULL only with values");
  PMO_REQUIRE_ARRAY(p.scales, p.codes == nullptr ? 0 : 1, "scales");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.values, "values");
  return PMO_OK;
}

int check_grouped_outer_float8(const pmo_grouped_outer_float8_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_outer_float8_params of this library");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_accumulation(p.accumulation), "accumulation", "one of pmo_grouped_accumulation");
  PMO_REQUIRE(is_size(p.num_blocks, 1), "num_blocks", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.a_columns, 8), "a_columns", "a multiple of 8");
  PMO_REQUIRE(is_size(p.b_columns, 8), "b_columns", "a multiple of 8");
  PMO_REQUIRE(is_size(p.out_rows, 1), "out_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.out_columns, 8), "out_columns", "a multiple of 8");
  const int64_t rows = p.transpose != 0 ? p.b_columns : p.a_columns, columns = p.transpose != 0 ? p.a_columns : p.b_columns;
  PMO_REQUIRE(is_size(p.first_row, 1) && p.first_row + rows <= p.out_rows, "first_row",
              "a row of out with all rows of the result");
  PMO_REQUIRE(is_size(p.first_column, 8) && p.first_column + columns <= p.out_columns, "first_column",
              "a multiple of 8, and a column of out with all columns of the result");
  // tiles are counted in 32 bits
  PMO_REQUIRE((p.a_columns / 128 + 2) * (p.b_columns / 128 + 1) <= kMaxIndexOnDevice / p.num_experts, "num_experts",
              "below 2^30 / blocks of 128 x 128 of a matrix");
  if (p.a_columns == 0 || p.b_columns == 0) return PMO_OK;
  PMO_REQUIRE(is_16_bytes(p.out), "out", "an array at a multiple of 16 bytes");
  PMO_REQUIRE_ARRAY(p.tiles, p.num_experts + 1, "tiles");
  PMO_REQUIRE_ARRAY(p.counters, 2, "counters");
  if (p.num_blocks == 0) return PMO_OK;
  PMO_REQUIRE(is_16_bytes(p.a), "a", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_16_bytes(p.b), "b", "an array at a multiple of 16 bytes");
  PMO_REQUIRE_ARRAY(p.a_scales, 1, "a_scales");
  PMO_REQUIRE_ARRAY(p.b_scales, 1, "b_scales");
  return PMO_OK;
}

int check_dequantize_matrices(const pmo_dequantize_matrices_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_dequantize_matrices_params of this library");
  PMO_REQUIRE(p.format >= PMO_MATRIX_INT8 && p.format <= PMO_MATRIX_FLOAT8_128X128, "format", "one of pmo_matrix_format");
  if (const int status = check_sizes(p.dtype, p.num_matrices, "inner", p.inner, "outer", p.outer)) return status;
  if (p.num_matrices == 0 || p.inner == 0 || p.outer == 0) return PMO_OK;
  PMO_REQUIRE(p.codes != nullptr, "codes", "an array");
  PMO_REQUIRE_ARRAY(p.scales, 1, "scales");
  const auto item_bytes = static_cast<uintptr_t>(p.widens != 0 ? 4 : dtype_size(p.dtype));
  PMO_REQUIRE(p.out != nullptr && reinterpret_cast<uintptr_t>(p.out) % item_bytes == 0, "out",
              "an array aligned to its element size");
  return PMO_OK;
}

}  // namespace pmo
