// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "common/checks.h"

#include <cfloat>
#include <string>
#include <utility>

#include "common/dtypes.h"
#include "common/ids.h"
#include "common/scales.h"
#include "common/status.h"

namespace pmo {
namespace {

// Checks the fields common to the forward and backward params.
template <typename Params>
int check_common(const Params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(Params), "struct_size", "the size of the params struct of this library");
  PMO_REQUIRE_COUNT(p.num_tokens, "num_tokens");
  PMO_REQUIRE_COUNT(p.max_rows_per_token, "max_rows_per_token");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COUNT(p.num_weights, "num_weights");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "float32, float16 or bfloat16");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens * p.max_rows_per_token, "token_rows");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.weights, "weights");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.weight_index, "weight_index");
  return PMO_OK;
}

// Checks the fields common to both directions of a row_id_map.
int check_row_id_map(const pmo_row_id_map_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_row_id_map_params), "struct_size", "the size of pmo_row_id_map_params of this library");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE_SLOTS(p.num_tokens, 2 * p.num_experts + 1, "num_experts");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.pad_offsets, "pad_offsets");
  PMO_REQUIRE_ARRAY(p.row_id_map, p.num_tokens, "row_id_map");
  return PMO_OK;
}

// Checks the fields common to the router's forward and backward params.
template <typename Params>
int check_router(const Params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(Params), "struct_size", "the size of the params struct of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "float32, float16 or bfloat16");
  PMO_REQUIRE_ARRAY(p.ids, p.num_tokens * p.topk, "ids");
  return PMO_OK;
}

// True if an array is aligned to elements of its dtype, and present if it is required.
bool is_array_of(int32_t dtype, const void* array, bool required) {
  return array == nullptr ? !required : reinterpret_cast<uintptr_t>(array) % static_cast<uintptr_t>(dtype_size(dtype)) == 0;
}

constexpr char kArrayOfDtype[] = "an array aligned to its element size";

}  // namespace

int check_route_sizes(const pmo_route_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_route_params), "struct_size", "the size of pmo_route_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(p.padding_alignment >= 1 && p.padding_alignment <= kMaxIndex, "padding_alignment", "in [1, 2^31)");
  PMO_REQUIRE(p.routing_kind >= PMO_ROUTING_IDS32 && p.routing_kind <= PMO_ROUTING_MASK, "routing_kind",
              "one of pmo_routing_kind");
  PMO_REQUIRE(p.duplicates == PMO_DUPLICATES_FIRST || p.duplicates == PMO_DUPLICATES_EACH, "duplicates", "one of pmo_duplicates");
  PMO_REQUIRE(p.routing_kind != PMO_ROUTING_MASK || p.topk <= p.num_experts, "topk", "at most num_experts for a mask");
  return PMO_OK;
}

int check_routing_arrays(const pmo_route_params& p) {
  const bool mask = p.routing_kind == PMO_ROUTING_MASK;
  const int64_t elements = p.num_tokens * (mask ? p.num_experts : p.topk);
  PMO_REQUIRE(mask ? elements == 0 || p.routing != nullptr : is_id_array(p.routing, p.routing_kind, elements), "routing",
              "an array aligned to its element size");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.probs, "probs");
  PMO_REQUIRE_ARRAY(p.routed_per_expert, p.num_experts, "routed_per_expert");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.expected_per_expert, "expected_per_expert");
  return PMO_OK;
}

int check_route_outputs(const pmo_route_params& p) {
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_ARRAY(p.routed_per_expert, p.num_experts, "routed_per_expert");
  PMO_REQUIRE(p.row_probs == nullptr || p.probs != nullptr || p.num_tokens * p.topk == 0, "probs",
              "given when row_probs is wanted");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.probs, "probs");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.row_probs, "row_probs");
  const std::pair<const int32_t*, const char*> maps[] = {
      {p.slot_to_row, "slot_to_row"},       {p.token_rows, "token_rows"},       {p.row_to_token, "row_to_token"},
      {p.row_to_slot, "row_to_slot"},       {p.row_to_expert, "row_to_expert"}, {p.tokens_per_expert, "tokens_per_expert"},
      {p.expert_offsets, "expert_offsets"}, {p.overflow, "overflow"},           {p.rowmap, "rowmap"}};
  for (const auto& map : maps) PMO_REQUIRE_OPTIONAL_ARRAY(map.first, map.second);
  return PMO_OK;
}

int check_clean_rowmap(const pmo_clean_rowmap_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_clean_rowmap_params), "struct_size",
              "the size of pmo_clean_rowmap_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_ARRAY(p.rowmap, p.num_tokens, "rowmap");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens, "token_rows");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.num_rows, "row_to_token");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.slot_to_row, "slot_to_row");
  PMO_REQUIRE(p.duplicates == PMO_DUPLICATES_FIRST || p.duplicates == PMO_DUPLICATES_EACH, "duplicates", "one of pmo_duplicates");
  PMO_REQUIRE(is_id_kind(p.ids_kind), "ids_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  const bool by_expert = p.ids == nullptr && p.topk == p.num_experts;
  const bool needs_ids = p.slot_values != nullptr || (p.slot_to_row != nullptr && !by_expert);
  PMO_REQUIRE(is_id_array(p.ids, p.ids_kind, needs_ids ? p.num_tokens * p.topk : 0), "ids",
              "an array aligned to its element size when slots are wanted, or NULL with topk = num_experts");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.slot_values, "slot_values");
  if (p.slot_values != nullptr) PMO_REQUIRE_ARRAY(p.row_values, p.num_rows, "row_values");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.row_to_slot, "row_to_slot");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.row_to_expert, "row_to_expert");
  PMO_REQUIRE(p.row_to_slot == nullptr || by_expert, "row_to_slot", "NULL unless slots are experts (no ids, topk = num_experts)");
  return PMO_OK;
}

int check_make_row_id_map(const pmo_row_id_map_params& p) {
  if (const int status = check_row_id_map(p)) return status;
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens * p.topk, "token_rows");
  PMO_REQUIRE_ARRAY(p.row_to_expert, p.num_rows, "row_to_expert");
  return PMO_OK;
}

int check_read_row_id_map(const pmo_row_id_map_params& p) {
  if (const int status = check_row_id_map(p)) return status;
  PMO_REQUIRE_ARRAY(p.rowmap, p.num_tokens, "rowmap");
  return PMO_OK;
}

int check_slots(const pmo_slots_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_slots_params), "struct_size", "the size of pmo_slots_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE(p.num_experts >= 0 && p.num_experts <= kMaxExperts, "num_experts", "in [0, 2^16]");
  PMO_REQUIRE_ARRAY(p.slot_to_row, p.num_tokens * p.topk, "slot_to_row");
  PMO_REQUIRE_ARRAY(p.row_values, p.num_rows, "row_values");
  PMO_REQUIRE_ARRAY(p.slot_values, p.num_tokens * (p.num_experts == 0 ? p.topk : p.num_experts), "slot_values");
  PMO_REQUIRE_ARRAY(p.row_to_expert, p.num_experts == 0 ? 0 : p.num_rows, "row_to_expert");
  return PMO_OK;
}

int check_permute(const pmo_permute_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_permute_params), "struct_size", "the size of pmo_permute_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE_COLUMNS(p.scale_cols, "scale_cols");
  PMO_REQUIRE(dtype_size(p.dtype) > 0, "dtype", "one of pmo_dtype");
  PMO_REQUIRE(p.row_scales == nullptr || dtype_size(p.scale_dtype) > 0, "scale_dtype", "one of pmo_dtype");
  PMO_REQUIRE(p.rows == nullptr || p.x != nullptr || p.num_tokens * p.hidden == 0, "x", "given when rows is wanted");
  PMO_REQUIRE(p.row_scales == nullptr || p.scale != nullptr || p.num_tokens * p.scale_cols == 0, "scale",
              "given when row_scales is wanted");
  PMO_REQUIRE(p.first_row >= 0 && p.first_row <= kMaxIndex - p.num_rows, "first_row", ">= 0, with num_rows below 2^31");
  PMO_REQUIRE_ARRAY(p.slot_to_row, p.num_tokens * p.topk, "slot_to_row");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.num_rows, "row_to_token");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.rows_end, "rows_end");
  return PMO_OK;
}

int check_route_permute(const pmo_route_params& route, const pmo_permute_params& permute) {
  PMO_REQUIRE(permute.num_tokens == route.num_tokens && permute.topk == route.topk && permute.num_rows == route.num_rows,
              "permute", "of the same num_tokens, topk and num_rows as route");
  PMO_REQUIRE(permute.slot_to_row == route.slot_to_row && permute.row_to_token == route.row_to_token, "permute",
              "given the slot_to_row and row_to_token that route writes");
  PMO_REQUIRE(permute.first_row == 0 && permute.rows_end == nullptr, "permute", "of all rows");
  return check_permute(permute);
}

int check_unpermute(const pmo_unpermute_params& p) {
  if (const int status = check_common(p)) return status;
  PMO_REQUIRE(p.rows != nullptr || p.num_rows * p.hidden == 0, "rows", "given");
  PMO_REQUIRE(p.out != nullptr || p.num_tokens * p.hidden == 0, "out", "given");
  PMO_REQUIRE(p.out_row_stride >= p.hidden && p.out_row_stride <= kMaxColumns, "out_row_stride", "in [hidden, 2^28]");
  return PMO_OK;
}

int check_unpermute_backward(const pmo_unpermute_backward_params& p) {
  if (const int status = check_common(p)) return status;
  PMO_REQUIRE(p.d_out != nullptr || p.num_tokens * p.hidden == 0, "d_out", "given");
  PMO_REQUIRE(p.d_weights == nullptr || p.weights != nullptr || p.num_weights == 0, "weights", "given when d_weights is wanted");
  PMO_REQUIRE(p.d_weights == nullptr || p.rows != nullptr || p.num_rows * p.hidden == 0, "rows",
              "given when d_weights is wanted");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.d_weights, "d_weights");
  PMO_REQUIRE_ARRAY(p.row_to_token, p.d_rows == nullptr ? 0 : p.num_rows, "row_to_token");
  return PMO_OK;
}

int check_quantize_sizes(const pmo_quantize_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_quantize_params), "struct_size", "the size of pmo_quantize_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "float32, float16 or bfloat16");
  PMO_REQUIRE(p.scale_layout == PMO_SCALES_BY_ROW || p.scale_layout == PMO_SCALES_BY_COLUMN, "scale_layout",
              "one of pmo_scale_layout");
  return PMO_OK;
}

int check_quantize(const pmo_quantize_params& p) {
  if (const int status = check_quantize_sizes(p)) return status;
  PMO_REQUIRE(p.amax_min >= kAmaxMin && p.amax_min <= FLT_MAX, "amax_min", "in [2^-100, FLT_MAX]");
  const bool has_map = has_row_map(p);
  PMO_REQUIRE(has_map || (p.topk == 1 && p.num_rows == p.num_tokens), "slot_to_row",
              "given, unless topk is 1 and num_rows is num_tokens");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.slot_to_row, "slot_to_row");
  PMO_REQUIRE_ARRAY(p.row_to_token, has_map ? p.num_rows : 0, "row_to_token");
  PMO_REQUIRE(p.x != nullptr || p.num_tokens * p.hidden == 0, "x", "given");
  PMO_REQUIRE(p.codes != nullptr || p.num_rows * p.hidden == 0, "codes", "given");
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(p.scales), p.num_rows * p.hidden, "scales");
  PMO_REQUIRE_OPTIONAL_ARRAY(static_cast<const int32_t*>(p.workspace), "workspace");
  return PMO_OK;
}

int check_dequantize(const pmo_dequantize_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_dequantize_params), "struct_size", "the size of pmo_dequantize_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "float32, float16 or bfloat16");
  PMO_REQUIRE(p.scale_layout == PMO_SCALES_BY_ROW || p.scale_layout == PMO_SCALES_BY_COLUMN, "scale_layout",
              "one of pmo_scale_layout");
  const int64_t elements = p.num_rows * p.hidden;
  PMO_REQUIRE(p.codes != nullptr || elements == 0, "codes", "given");
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(p.scales), elements, "scales");
  PMO_REQUIRE(p.out != nullptr || elements == 0, "out", "given");
  return PMO_OK;
}

int check_topk(const pmo_topk_params& p) {
  if (const int status = check_router(p)) return status;
  PMO_REQUIRE(p.num_groups >= 1 && p.num_groups <= p.num_experts && p.num_experts % p.num_groups == 0, "num_groups",
              "a divisor of num_experts");
  PMO_REQUIRE(p.topk_groups >= 1 && p.topk_groups <= p.num_groups, "topk_groups", "in [1, num_groups]");
  PMO_REQUIRE(p.scores_per_group >= 1, "scores_per_group", ">= 1");
  PMO_REQUIRE(p.topk >= 1 && p.topk <= p.num_experts / p.num_groups * p.topk_groups, "topk",
              "at least 1 and at most the experts to choose from");
  const bool required = p.num_tokens > 0;
  PMO_REQUIRE(is_array_of(p.dtype, p.gating, required), "gating", kArrayOfDtype);
  PMO_REQUIRE(is_array_of(p.dtype, p.weights, required), "weights", kArrayOfDtype);
  PMO_REQUIRE(is_array_of(p.dtype, p.scores, false), "scores", kArrayOfDtype);
  PMO_REQUIRE_OPTIONAL_ARRAY(p.correction_bias, "correction_bias");
  return PMO_OK;
}

int check_topk_backward(const pmo_topk_backward_params& p) {
  if (const int status = check_router(p)) return status;
  const bool required = p.num_tokens > 0;
  PMO_REQUIRE(is_array_of(p.dtype, p.gating, required), "gating", kArrayOfDtype);
  PMO_REQUIRE(is_array_of(p.dtype, p.d_gating, required), "d_gating", kArrayOfDtype);
  PMO_REQUIRE(is_array_of(p.dtype, p.d_weights, false), "d_weights", kArrayOfDtype);
  PMO_REQUIRE(is_array_of(p.dtype, p.d_scores, false), "d_scores", kArrayOfDtype);
  return PMO_OK;
}

}  // namespace pmo
