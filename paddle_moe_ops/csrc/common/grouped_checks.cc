// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cfloat>

#include "common/checks.h"
#include "common/grouped_sizes.h"
#include "common/ids.h"
#include "common/matrix_layout.h"
#include "common/scales.h"
#include "common/status.h"

namespace pmo {
namespace {

bool is_grouped_dtype(int32_t dtype) { return dtype == PMO_FLOAT16 || dtype == PMO_BFLOAT16; }

// Kernels store the row stride of gathered operands, in bytes, in 32 bits.
int check_gathered(int64_t num_sources, int64_t row_stride, const char* name, const int32_t* row_to_token, int64_t num_rows) {
  PMO_REQUIRE(is_size(num_sources, 1), "num_sources", "in [0, 2^30)");
  PMO_REQUIRE(row_stride <= INT32_MAX, name, "below 2^31 where rows are gathered");
  PMO_REQUIRE_ARRAY(row_to_token, num_rows, "row_to_token");
  return PMO_OK;
}

// The kernel for few rows reads sizes and offsets, and all rows of x.
int check_few_rows(const pmo_grouped_product_params& p) {
  PMO_REQUIRE(p.num_experts <= PMO_GROUPED_MAX_FEW_EXPERTS, "num_experts", "at most PMO_GROUPED_MAX_FEW_EXPERTS");
  PMO_REQUIRE(p.hidden == nullptr, "hidden", "NULL with PMO_GROUPED_FEW_ROWS");
  PMO_REQUIRE(p.first_row == 0 && p.window_rows >= p.num_rows, "window_rows", "all rows with PMO_GROUPED_FEW_ROWS");
  PMO_REQUIRE(p.gathers != 0 || p.num_sources >= p.num_rows, "num_sources", "at least num_rows with PMO_GROUPED_FEW_ROWS");
  PMO_REQUIRE(p.x_row_stride <= INT32_MAX, "x_row_stride", "below 2^31 with PMO_GROUPED_FEW_ROWS");
  PMO_REQUIRE(is_id_kind(p.sizes_kind), "sizes_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_array(p.sizes, p.sizes_kind, p.num_experts), "sizes", "an aligned array of ids");
  PMO_REQUIRE(p.offsets == nullptr || (is_id_kind(p.offsets_kind) && is_id_array(p.offsets, p.offsets_kind, p.num_experts)),
              "offsets", "NULL or an aligned array of ids");
  return PMO_OK;
}

// Weights of slots, which the kernel for few rows reads.
int check_slots(const pmo_grouped_product_params& p) {
  PMO_REQUIRE(p.result == PMO_GROUPED_PLAIN && p.weights != nullptr, "slot_to_row", "NULL without weights");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_ARRAY(p.slot_to_row, p.num_tokens * p.topk, "slot_to_row");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.num_rows, "row_to_token");
  return PMO_OK;
}

// Scales and kinds of codes that the kernel for few rows reads.
int check_codes(const pmo_grouped_product_params& p) {
  PMO_REQUIRE(p.matrix_format >= PMO_MATRIX_INT8 && p.matrix_format <= PMO_MATRIX_FLOAT8_128X128, "matrix_format",
              "one of pmo_matrix_format");
  PMO_REQUIRE(p.transpose != 0, "transpose", "1 with codes");
  PMO_REQUIRE_ARRAY(p.matrix_scales, 1, "matrix_scales");
  const bool is_float8 = p.matrix_format == PMO_MATRIX_FLOAT8_128X128;
  PMO_REQUIRE(p.inner % codes_in_16_bytes(p.matrix_format) == 0, "inner", "a multiple of 16, or of 32 for int4, with codes");
  if (!is_float8) return PMO_OK;
  PMO_REQUIRE(p.dtype == PMO_BFLOAT16, "dtype", "PMO_BFLOAT16 with float8 codes");
  PMO_REQUIRE(p.amax_min >= kAmaxMin && p.amax_min <= FLT_MAX, "amax_min", "in [2^-100, FLT_MAX]");
  PMO_REQUIRE(p.first_column % PMO_QUANTIZE_GROUP == 0, "first_column", "a multiple of 128 with float8 codes");
  PMO_REQUIRE(p.result == PMO_GROUPED_PLAIN || p.width % PMO_QUANTIZE_GROUP == 0, "width",
              "a multiple of 128 with float8 codes and SwiGLU");
  return PMO_OK;
}

}  // namespace

int check_grouped_product(const pmo_grouped_product_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_product_params of this library");
  PMO_REQUIRE(p.result >= PMO_GROUPED_PLAIN && p.result <= PMO_GROUPED_GRADIENT, "result", "one of pmo_grouped_result");
  const bool has_few_rows = p.tile_rows == PMO_GROUPED_FEW_ROWS;
  PMO_REQUIRE(p.tile_rows == PMO_GROUPED_TILE_ROWS || p.tile_rows == PMO_GROUPED_TURNED_ROWS || has_few_rows, "tile_rows",
              "PMO_GROUPED_TILE_ROWS, PMO_GROUPED_TURNED_ROWS or PMO_GROUPED_FEW_ROWS");
  PMO_REQUIRE(p.tile_rows != PMO_GROUPED_TILE_ROWS || p.result == PMO_GROUPED_PLAIN, "tile_rows",
              "PMO_GROUPED_TURNED_ROWS or PMO_GROUPED_FEW_ROWS unless the result is plain");
  PMO_REQUIRE(!has_few_rows || p.result != PMO_GROUPED_GRADIENT, "tile_rows", "PMO_GROUPED_TURNED_ROWS for a gradient");
  PMO_REQUIRE(p.tile_rows != PMO_GROUPED_TILE_ROWS || p.tile_columns == PMO_GROUPED_TILE_COLUMNS ||
                  p.tile_columns == PMO_GROUPED_WIDE_COLUMNS,
              "tile_columns", "PMO_GROUPED_TILE_COLUMNS or PMO_GROUPED_WIDE_COLUMNS");
  PMO_REQUIRE(is_grouped_dtype(p.dtype), "dtype", "PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(is_size(p.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.num_sources, 1), "num_sources", "in [0, 2^30)");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_size(p.inner, 8), "inner", "a multiple of 8");
  PMO_REQUIRE(is_size(p.outer, 8), "outer", "a multiple of 8");
  PMO_REQUIRE(is_size(p.width, 8), "width", "a multiple of 8");
  PMO_REQUIRE(is_size(p.first_column, 8) && p.first_column + p.width <= p.outer, "first_column", "a multiple of 8 in the matrix");
  if (p.result != PMO_GROUPED_PLAIN) {
    const int64_t columns = p.result == PMO_GROUPED_GATED ? 2 * p.width : p.width;
    PMO_REQUIRE(p.first_column == 0 && columns == p.outer, "width", "all columns of the result");
  }
  PMO_REQUIRE(is_size(p.first_row, 1), "first_row", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.window_rows, 1), "window_rows", "in [0, 2^30)");
  if (p.num_rows == 0) return PMO_OK;
  PMO_REQUIRE(p.num_sources > 0 && p.inner > 0 && p.outer > 0, "inner", "positive where there are rows");
  PMO_REQUIRE(p.x_row_stride >= p.inner && p.x_row_stride % 8 == 0, "x_row_stride", "a multiple of 8 that holds a row");
  PMO_REQUIRE(is_16_bytes(p.x), "x", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_16_bytes(p.matrix), "matrix", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_16_bytes(p.out), "out", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(p.hidden == nullptr ? p.result != PMO_GROUPED_GRADIENT : is_16_bytes(p.hidden), "hidden",
              "an array at a multiple of 16 bytes");
  if (has_few_rows) {
    if (const int status = check_few_rows(p)) return status;
    if (p.matrix_scales != nullptr) {
      if (const int status = check_codes(p)) return status;
    }
    if (p.slot_to_row != nullptr) {
      if (const int status = check_slots(p)) return status;
    }
  } else {
    PMO_REQUIRE_ARRAY(p.first, p.num_experts, "first");
    PMO_REQUIRE_ARRAY(p.stop, p.num_experts, "stop");
    PMO_REQUIRE_ARRAY(p.tiles, p.num_experts + 1, "tiles");
    PMO_REQUIRE_ARRAY(p.window, 2, "window");
    if (p.tile_rows == PMO_GROUPED_TURNED_ROWS) PMO_REQUIRE_ARRAY(p.counters, 2, "counters");
    PMO_REQUIRE(p.matrix_scales == nullptr, "matrix_scales", "NULL unless tile_rows is PMO_GROUPED_FEW_ROWS");
    PMO_REQUIRE(p.slot_to_row == nullptr, "slot_to_row", "NULL unless tile_rows is PMO_GROUPED_FEW_ROWS");
  }
  if (p.gathers == 0) return PMO_OK;
  PMO_REQUIRE(p.result != PMO_GROUPED_PLAIN, "gathers", "0 for a plain result");
  return check_gathered(p.num_sources, p.x_row_stride, "x_row_stride", p.row_to_token, p.num_rows);
}

int check_grouped_outer(const pmo_grouped_outer_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_outer_params of this library");
  PMO_REQUIRE(is_grouped_dtype(p.dtype), "dtype", "PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(is_size(p.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(p.gathered >= PMO_GROUPED_GATHERS_NONE && p.gathered <= PMO_GROUPED_GATHERS_Q, "gathered",
              "one of pmo_grouped_gathered");
  PMO_REQUIRE(is_accumulation(p.accumulation), "accumulation", "one of pmo_grouped_accumulation");
  PMO_REQUIRE(is_size(p.p_columns, 8), "p_columns", "a multiple of 8");
  PMO_REQUIRE(is_size(p.q_columns, 8), "q_columns", "a multiple of 8");
  PMO_REQUIRE(is_size(p.out_rows, 1), "out_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.out_columns, 8), "out_columns", "a multiple of 8");
  PMO_REQUIRE(is_size(p.first_p, 1) && p.first_p + p.p_columns <= p.out_rows, "first_p",
              "a row of out with p_columns from there on");
  PMO_REQUIRE(is_size(p.first_q, 8) && p.first_q + p.q_columns <= p.out_columns, "first_q",
              "a multiple of 8, and a column of out with q_columns from there on");
  // tiles are counted in 32 bits
  PMO_REQUIRE((p.p_columns / 128 + 1) * (p.q_columns / 128 + 1) <= kMaxIndexOnDevice / p.num_experts, "num_experts",
              "below 2^30 / blocks of 128 x 128 of a matrix");
  if (p.p_columns == 0 || p.q_columns == 0) return PMO_OK;
  PMO_REQUIRE(is_16_bytes(p.out), "out", "an array at a multiple of 16 bytes");
  PMO_REQUIRE_ARRAY(p.first, p.num_experts, "first");
  PMO_REQUIRE_ARRAY(p.stop, p.num_experts, "stop");
  PMO_REQUIRE_ARRAY(p.counters, 2, "counters");
  if (p.num_rows == 0) return PMO_OK;
  PMO_REQUIRE(p.p_row_stride >= p.p_columns && p.p_row_stride % 8 == 0, "p_row_stride", "a multiple of 8 that holds a row");
  PMO_REQUIRE(p.q_row_stride >= p.q_columns && p.q_row_stride % 8 == 0, "q_row_stride", "a multiple of 8 that holds a row");
  PMO_REQUIRE(is_16_bytes(p.p), "p", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_16_bytes(p.q), "q", "an array at a multiple of 16 bytes");
  if (p.gathered == PMO_GROUPED_GATHERS_NONE) return PMO_OK;
  if (p.gathered == PMO_GROUPED_GATHERS_P) {
    return check_gathered(p.num_sources, p.p_row_stride, "p_row_stride", p.row_to_token, p.num_rows);
  }
  return check_gathered(p.num_sources, p.q_row_stride, "q_row_stride", p.row_to_token, p.num_rows);
}

}  // namespace pmo
