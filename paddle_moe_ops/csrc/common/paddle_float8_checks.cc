// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cfloat>
#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/grouped_sizes.h"
#include "common/status.h"
#include "pmo/paddle_float8.h"

namespace pmo {
namespace {

constexpr char kElementArray[] = "an array aligned to its element size";

bool is_bfloat16_array(const void* rows) { return rows != nullptr && reinterpret_cast<uintptr_t>(rows) % 2 == 0; }

}  // namespace

int check_paddle_quantize(const pmo_paddle_quantize_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_paddle_quantize_params of this library");
  PMO_REQUIRE(is_size(p.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE(is_size(p.num_columns, 1), "num_columns", "in [0, 2^30)");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16");
  PMO_REQUIRE(p.codes_dtype == PMO_FLOAT8_E4M3FN || p.codes_dtype == PMO_FLOAT8_E5M2, "codes_dtype",
              "PMO_FLOAT8_E4M3FN or PMO_FLOAT8_E5M2");
  PMO_REQUIRE(p.epsilon >= 0.0f && p.epsilon <= FLT_MAX, "epsilon", "in [0, FLT_MAX]");
  PMO_REQUIRE(p.overflow >= 1.0f && p.overflow <= FLT_MAX, "overflow", "in [1, FLT_MAX]");
  PMO_REQUIRE(p.ue8m0 == 0 || p.pow2 != 0, "pow2", "set with ue8m0");
  if (p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  PMO_REQUIRE(p.x != nullptr && reinterpret_cast<uintptr_t>(p.x) % dtype_size(p.dtype) == 0, "x", kElementArray);
  PMO_REQUIRE_ARRAY(static_cast<const float*>(p.scales), p.codes == nullptr ? 0 : 1, "scales");
  PMO_REQUIRE_ARRAY(static_cast<const float*>(p.transposed_scales), p.transposed_codes == nullptr ? 0 : 1, "transposed_scales");
  return PMO_OK;
}

int check_paddle_swiglu(const pmo_paddle_swiglu_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_paddle_swiglu_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.width, "width");
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  PMO_REQUIRE(is_bfloat16_array(p.x), "x", kElementArray);
  PMO_REQUIRE_OPTIONAL_ARRAY(p.probs, "probs");
  PMO_REQUIRE(p.codes != nullptr, "codes", "an array");
  PMO_REQUIRE_ARRAY(p.scales, 1, "scales");
  return PMO_OK;
}

int check_paddle_swiglu_backward(const pmo_paddle_swiglu_backward_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_paddle_swiglu_backward_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.width, "width");
  if (p.num_rows == 0) return PMO_OK;
  PMO_REQUIRE_ARRAY(p.d_probs, 1, "d_probs");
  if (p.width == 0) return PMO_OK;
  PMO_REQUIRE(is_bfloat16_array(p.x), "x", kElementArray);
  PMO_REQUIRE(is_bfloat16_array(p.d_out), "d_out", kElementArray);
  PMO_REQUIRE_ARRAY(p.probs, 1, "probs");
  PMO_REQUIRE(is_bfloat16_array(p.d_x), "d_x", kElementArray);
  PMO_REQUIRE(is_bfloat16_array(p.out), "out", kElementArray);
  return PMO_OK;
}

}  // namespace pmo
