// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/ids.h"
#include "common/status.h"

namespace pmo {

int check_index_add(const pmo_index_add_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_index_add_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COUNT(p.num_tokens, "num_tokens");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE_COUNT(p.first_token, "first_token");
  PMO_REQUIRE(p.dtype == PMO_FLOAT32 || p.dtype == PMO_BFLOAT16, "dtype", "PMO_FLOAT32 or PMO_BFLOAT16");
  PMO_REQUIRE(p.rows_dtype == p.dtype || p.rows_dtype == PMO_BFLOAT16, "rows_dtype", "dtype or PMO_BFLOAT16");
  PMO_REQUIRE(is_id_kind(p.index_kind), "index_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  if (p.num_rows == 0 || p.num_tokens == 0 || p.hidden == 0) return PMO_OK;
  PMO_REQUIRE(p.rows_row_stride >= p.hidden && p.rows_row_stride <= kMaxColumns, "rows_row_stride", "in [hidden, 2^28]");
  PMO_REQUIRE(p.rows != nullptr && reinterpret_cast<uintptr_t>(p.rows) % dtype_size(p.rows_dtype) == 0, "rows",
              "an array aligned to its element size");
  PMO_REQUIRE(p.row_to_token != nullptr && is_id_array(p.row_to_token, p.index_kind, p.num_rows), "row_to_token",
              "an array aligned to its element size");
  PMO_REQUIRE(p.out != nullptr && reinterpret_cast<uintptr_t>(p.out) % dtype_size(p.dtype) == 0, "out",
              "an array aligned to its element size");
  return PMO_OK;
}

}  // namespace pmo
