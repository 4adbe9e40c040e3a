// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A forward pass on the kernel for few rows, with launches in the order of pmo/layer.h. Both GEMMs read matrices of the dtype of the
// tokens, or codes; with float8 operands they quantise their rows themselves.
#include "layer/pass.h"

namespace pmo {
namespace layer {
namespace {

class FewRowsPass : public Pass {
 public:
  FewRowsPass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream)
      : Pass(facts, params, kernels, stream), act_(take(f_.num_rows * f_.inner * kItemBytes)) {
    if (f_.float8 != 0) take_matrix_codes();
  }

  int forward() {
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_GATED;
    g.gathers = 1;
    g.row_to_token = p_.row_to_token;
    PMO_TRY(set_matrix(p_.gate_up, gate_up(), p_.gate_up_codes, &g));
    PMO_TRY(launch(g, x(), 2 * f_.inner, {act_, 0, f_.inner}));
    return gemm_unpermute();
  }

 private:
  // out [T, d] = sums of each token's rows of weights[r] A W2.
  int gemm_unpermute() {
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_PLAIN;
    g.weights = p_.weights;
    g.slot_to_row = p_.slot_to_row;
    g.topk = p_.topk;
    g.num_tokens = f_.num_tokens;
    g.row_to_token = p_.row_to_token;
    PMO_TRY(set_matrix(p_.down, down(), p_.down_codes, &g));
    return each_columns([&](const Columns& columns) {
      // The launch before the first one made A, and nothing else that this one reads.
      g.only_x_is_new = columns.first == 0 && (f_.float8 == 0 || f_.has_codes != 0);
      PMO_TRY(launch(g, rows_of(act_, f_.inner), f_.hidden, columns));
      return unpermute(columns, p_.out, true);
    });
  }

  int set_matrix(const void* values, const Matrices& matrices, const pmo_layer_codes& given, pmo_grouped_product_params* g) {
    g->matrix = values;
    g->transpose = p_.transpose;
    if (f_.float8 == 0 && f_.has_codes == 0) return PMO_OK;
    pmo_layer_codes codes;
    PMO_TRY(codes_of(given, matrices, p_.transpose == 0, &codes));
    g->matrix = codes.codes;
    g->matrix_scales = codes.scales;
    g->matrix_format = f_.float8 != 0 ? PMO_MATRIX_FLOAT8_128X128 : f_.codes_format;
    g->transpose = 1;
    return PMO_OK;
  }

  int launch(pmo_grouped_product_params g, const Rows& rows, int64_t outer, const Columns& out) {
    g.struct_size = sizeof g;
    g.tile_rows = PMO_GROUPED_FEW_ROWS;
    g.num_rows = g.window_rows = f_.num_rows;
    g.num_experts = f_.num_experts;
    g.sizes = p_.sizes;
    g.offsets = p_.offsets;
    g.sizes_kind = p_.sizes_kind;
    g.offsets_kind = p_.offsets_kind;
    g.num_sources = rows.count;
    g.inner = rows.width;
    g.outer = outer;
    g.first_column = out.first;
    g.width = out.width;
    g.x = rows.data;
    g.x_row_stride = rows.stride;
    g.out = out.data;
    g.dtype = f_.dtype;
    g.amax_min = kAmaxMin;
    return kernels_.gemm(&g, stream_);
  }

  void* const act_;
};

}  // namespace

int run_few_rows(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream) {
  return FewRowsPass(facts, params, kernels, stream).forward();
}

}  // namespace layer
}  // namespace pmo
