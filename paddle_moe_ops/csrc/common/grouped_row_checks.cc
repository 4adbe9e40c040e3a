// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/grouped_sizes.h"
#include "common/ids.h"
#include "common/status.h"
#include "pmo/grouped_rows.h"

namespace pmo {
namespace {

// GPUs and sizes of the grouped GEMM kernels, per dtype. Everything else runs as one GEMM per expert.
struct Choice {
  int32_t capability, dtype;
  int64_t multiple;
};

constexpr Choice kChoices[] = {
    {90, PMO_FLOAT16, 8},
    {90, PMO_BFLOAT16, 8},
    {90, PMO_FLOAT8_E4M3FN, 16},
};

constexpr int64_t kTileSide = 128;

// True if rows are present and aligned to their elements, which are accessed one by one.
bool is_rows(const void* rows, int32_t dtype, int64_t elements) {
  return elements == 0 || (rows != nullptr && reinterpret_cast<uintptr_t>(rows) % dtype_size(dtype) == 0);
}

}  // namespace

int check_grouped_tables(const pmo_grouped_tables_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_tables_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_id_kind(p.sizes_kind), "sizes_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_kind(p.offsets_kind), "offsets_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(p.tile_rows >= 1, "tile_rows", "1 or more");
  PMO_REQUIRE(p.other_tile_rows >= 0, "other_tile_rows", "0 or more");
  PMO_REQUIRE_COUNT(p.num_chunks, "num_chunks");
  PMO_REQUIRE(p.num_chunks == 0 || (p.chunk_rows >= 1 && p.chunk_rows <= kMaxIndex), "chunk_rows", "in [1, 2^31)");
  PMO_REQUIRE(is_id_array(p.sizes, p.sizes_kind, p.num_experts), "sizes", "an array aligned to its element size");
  PMO_REQUIRE(p.offsets == nullptr || is_id_array(p.offsets, p.offsets_kind, p.num_experts), "offsets",
              "NULL or an array aligned to its element size");
  PMO_REQUIRE_ARRAY(p.tables, p.num_experts, "tables");
  return PMO_OK;
}

int check_grouped_clear(const pmo_grouped_clear_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_grouped_clear_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(p.row_size >= 0 && p.row_size <= 4 * kMaxColumns && p.row_size % 16 == 0, "row_size",
              "a multiple of 16 in [0, 2^30]");
  PMO_REQUIRE_ARRAY(p.first, p.num_experts, "first");
  PMO_REQUIRE_ARRAY(p.stop, p.num_experts, "stop");
  PMO_REQUIRE(p.num_rows * p.row_size == 0 || is_16_bytes(p.rows), "rows", "an array at a multiple of 16 bytes");
  return PMO_OK;
}

int check_row_sums(const pmo_row_sums_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_row_sums_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.width, "width");
  PMO_REQUIRE_ARRAY(p.values, p.num_rows * p.width, "values");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.num_rows, "row_to_token");
  PMO_REQUIRE_ARRAY(p.out, p.num_rows, "out");
  return PMO_OK;
}

int check_swiglu(const pmo_swiglu_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_swiglu_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.width, "width");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(is_rows(p.hidden, p.dtype, p.num_rows * p.width), "hidden", "an array aligned to its element size");
  PMO_REQUIRE(is_rows(p.act, p.dtype, p.num_rows * p.width), "act", "an array aligned to its element size");
  return PMO_OK;
}

int check_swiglu_backward(const pmo_swiglu_backward_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_swiglu_backward_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.width, "width");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(is_rows(p.hidden, p.dtype, p.num_rows * p.width), "hidden", "an array aligned to its element size");
  PMO_REQUIRE(is_rows(p.d_hidden, p.dtype, p.num_rows * p.width), "d_hidden", "an array aligned to its element size");
  PMO_REQUIRE(is_rows(p.scaled, p.dtype, p.num_rows * p.width), "scaled", "an array aligned to its element size");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.num_rows, "row_to_token");
  PMO_REQUIRE_ARRAY(p.weights, p.num_rows, "weights");
  PMO_REQUIRE_ARRAY(p.d_weights, p.num_rows, "d_weights");
  return PMO_OK;
}

}  // namespace pmo

extern "C" int32_t pmo_grouped_takes(const pmo_grouped_facts* facts) {
  if (facts == nullptr || facts->struct_size != sizeof *facts) return 0;
  const pmo_grouped_facts& f = *facts;
  for (const int64_t size : {f.num_rows, f.inner, f.outer}) {
    if (size < 0 || size > pmo::kMaxIndexOnDevice) return 0;
  }
  if (f.inner == 0 || f.outer == 0 || f.num_experts < 1 || f.num_experts > pmo::kMaxExperts) return 0;
  const int64_t tiles_of_matrix = (f.inner / pmo::kTileSide + 1) * (f.outer / pmo::kTileSide + 1);
  if (tiles_of_matrix > pmo::kMaxIndexOnDevice / f.num_experts) return 0;
  for (const pmo::Choice& each : pmo::kChoices) {
    if (each.capability == f.capability && each.dtype == f.dtype) {
      return f.inner % each.multiple == 0 && f.outer % each.multiple == 0;
    }
  }
  return 0;
}
