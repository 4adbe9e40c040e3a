// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "common/grouped_sizes.h"
#include "common/ids.h"
#include "common/status.h"
#include "layer/plan.h"
#include "pmo/grouped.h"

namespace pmo {
namespace layer {

int check_facts(const pmo_layer_facts& f) {
  PMO_REQUIRE(f.struct_size == sizeof f, "struct_size", "the size of pmo_layer_facts of this library");
  PMO_REQUIRE_COUNT(f.num_tokens, "num_tokens");
  PMO_REQUIRE(is_size(f.num_rows, 1), "num_rows", "in [0, 2^30)");
  PMO_REQUIRE_EXPERTS(f.num_experts, "num_experts");
  PMO_REQUIRE(is_size(f.hidden, 8) && f.hidden > 0, "hidden", "a positive multiple of 8");
  PMO_REQUIRE(is_size(2 * f.inner, 16) && f.inner > 0, "inner", "a positive multiple of 8");
  PMO_REQUIRE(f.workspace >= 1, "workspace", "1 or more");
  PMO_REQUIRE(f.dtype == PMO_FLOAT16 || f.dtype == PMO_BFLOAT16, "dtype", "PMO_FLOAT16 or PMO_BFLOAT16");
  const int32_t most_kept = f.float8 != 0 ? PMO_LAYER_KEEPS_CODES : PMO_LAYER_KEEPS;
  PMO_REQUIRE(f.keeps_hidden >= PMO_LAYER_RECOMPUTES && f.keeps_hidden <= most_kept, "keeps_hidden", "one of pmo_layer_hidden");
  const bool is_part = f.part >= PMO_LAYER_WHOLE && f.part <= PMO_LAYER_WGRADS && (f.backward != 0 || f.part == PMO_LAYER_WHOLE);
  PMO_REQUIRE(is_part, "part", "a pmo_layer_part, PMO_LAYER_WHOLE in a forward pass");
  if (f.part == PMO_LAYER_WGRADS) {
    PMO_REQUIRE(f.float8 == 0, "float8", "0 with PMO_LAYER_WGRADS");
    PMO_REQUIRE(f.keeps_hidden == 0 && f.needs_d_weights == 0, "keeps_hidden", "0 with PMO_LAYER_WGRADS, as needs_d_weights");
  }
  const bool may_have_float8_wgrads = f.part == PMO_LAYER_WGRADS || (f.backward != 0 && f.float8 != 0);
  PMO_REQUIRE(f.float8_wgrads == 0 || may_have_float8_wgrads, "float8_wgrads",
              "0 unless a backward pass has float8 operands or is PMO_LAYER_WGRADS");
  if (f.float8 == 0 && f.float8_wgrads == 0) {
    if (f.has_codes == 0) return PMO_OK;
    PMO_REQUIRE(f.codes_format >= PMO_MATRIX_INT8 && f.codes_format <= PMO_MATRIX_INT4_1X128, "codes_format",
                "a format of integers without float8 operands");
    return PMO_OK;
  }
  PMO_REQUIRE(f.dtype == PMO_BFLOAT16, "dtype", "PMO_BFLOAT16 with float8 operands");
  PMO_REQUIRE(f.hidden % 16 == 0, "hidden", "a multiple of 16 with float8 operands");
  PMO_REQUIRE(f.inner % PMO_QUANTIZE_GROUP == 0, "inner", "a multiple of 128 with float8 operands");
  return PMO_OK;
}

int check_layer(const pmo_layer_facts& f, const pmo_layer_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_layer_params of this library");
  if (const int status = check_facts(f)) return status;
  PMO_REQUIRE_SLOTS(f.num_tokens, p.slots_per_token, "slots_per_token");
  const bool is_backward = f.backward != 0;
  const auto has_rows = [&](const void* array, int64_t stride) {
    return f.num_tokens == 0 || (is_16_bytes(array) && stride >= f.hidden && stride % 8 == 0);
  };
  PMO_REQUIRE(has_rows(p.x, p.x_row_stride), "x", "rows at multiples of 16 bytes");
  if (is_backward) PMO_REQUIRE(has_rows(p.d_out, p.d_out_row_stride), "d_out", "rows at multiples of 16 bytes");
  const bool reads_values = f.part != PMO_LAYER_WGRADS && f.has_codes == 0;
  PMO_REQUIRE(!reads_values || is_16_bytes(p.gate_up), "gate_up", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(!reads_values || is_16_bytes(p.down), "down", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_id_kind(p.sizes_kind) && is_id_kind(p.offsets_kind), "sizes_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  const bool has_hidden = p.hidden != nullptr;
  PMO_REQUIRE(f.num_rows == 0 || has_hidden == (f.keeps_hidden != 0), "hidden", "an array where facts.keeps_hidden");
  PMO_REQUIRE(f.num_rows == 0 || (p.hidden_scales != nullptr) == (f.keeps_hidden == PMO_LAYER_KEEPS_CODES), "hidden_scales",
              "an array where facts.keeps_hidden is PMO_LAYER_KEEPS_CODES");
  PMO_REQUIRE(f.num_rows == 0 || (p.d_weights != nullptr) == (f.needs_d_weights != 0), "d_weights",
              "an array where facts.needs_d_weights");
  const auto is_deferred = [&](const void* array, bool is_due) {
    return f.num_rows == 0 || ((array != nullptr) == is_due && (!is_due || is_16_bytes(array)));
  };
  const bool are_dgrads = f.part == PMO_LAYER_DGRADS, are_wgrads = f.part == PMO_LAYER_WGRADS;
  PMO_REQUIRE(is_deferred(p.scaled, are_dgrads || (are_wgrads && p.d_down != nullptr)), "scaled",
              "an array at a multiple of 16 bytes with PMO_LAYER_DGRADS, or with PMO_LAYER_WGRADS and d_down");
  PMO_REQUIRE(
      is_deferred(p.d_hidden, (are_dgrads && f.keeps_hidden != PMO_LAYER_KEEPS) || (are_wgrads && p.d_gate_up != nullptr)),
      "d_hidden",
      "an array at a multiple of 16 bytes with PMO_LAYER_DGRADS and no values of H, or with PMO_LAYER_WGRADS "
      "and d_gate_up");
  if (f.part == PMO_LAYER_DGRADS) {
    PMO_REQUIRE(p.d_gate_up == nullptr && p.d_down == nullptr, "d_gate_up", "NULL with PMO_LAYER_DGRADS, as d_down");
  } else if (f.part == PMO_LAYER_WGRADS) {
    PMO_REQUIRE(p.d_x == nullptr, "d_x", "NULL with PMO_LAYER_WGRADS");
  }
  if (p.slot_to_row != nullptr) {
    PMO_REQUIRE(f.num_rows == 0 || plan_of(f).sum_tile_rows == PMO_GROUPED_FEW_ROWS, "slot_to_row",
                "NULL unless the plan has PMO_GROUPED_FEW_ROWS");
    PMO_REQUIRE_SLOTS(f.num_tokens, p.topk, "topk");
  }
  PMO_REQUIRE(is_16_bytes(p.workspace), "workspace", "an array at a multiple of 16 bytes");
  PMO_REQUIRE(is_backward || p.out != nullptr || f.num_tokens == 0, "out", "an array");
  PMO_REQUIRE(is_accumulation(p.gate_up_accumulation), "gate_up_accumulation", "one of pmo_grouped_accumulation");
  PMO_REQUIRE(is_accumulation(p.down_accumulation), "down_accumulation", "one of pmo_grouped_accumulation");
  if (f.has_codes == 0) return PMO_OK;
  PMO_REQUIRE(f.float8 != 0 || f.num_rows == 0 || plan_of(f).sum_tile_rows == PMO_GROUPED_FEW_ROWS, "has_codes",
              "0 where values are read: in a backward pass, with H kept, or with many rows");
  const auto has_codes = [](const pmo_layer_codes& matrix) { return is_16_bytes(matrix.codes) && matrix.scales != nullptr; };
  const bool multiplies_forward = !is_backward || f.keeps_hidden == PMO_LAYER_RECOMPUTES;
  PMO_REQUIRE(!multiplies_forward || has_codes(p.gate_up_codes), "gate_up_codes", "codes and scales");
  PMO_REQUIRE(is_backward || has_codes(p.down_codes), "down_codes", "codes and scales");
  PMO_REQUIRE(!is_backward || has_codes(p.turned_down_codes), "turned_down_codes", "codes and scales");
  PMO_REQUIRE(p.d_x == nullptr || has_codes(p.turned_gate_up_codes), "turned_gate_up_codes", "codes and scales");
  return PMO_OK;
}

}  // namespace layer
}  // namespace pmo
