// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A pass with float8 operands, with launches in the order of pmo/layer.h. Tokens are quantised once, and their codes permuted by
// row chunks.
#include "layer/pass.h"

namespace pmo {
namespace layer {
namespace {

class Float8Pass : public Pass {
 public:
  Float8Pass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream)
      : Pass(facts, params, kernels, stream),
        tokens_(take_codes(f_.num_tokens, f_.hidden)),
        chunk_(codes_in(shared_codes_, held_rows(f_, plan_) * f_.hidden)) {
    take_matrix_codes();
  }

  int forward() {
    const bool keeps_codes = f_.keeps_hidden == PMO_LAYER_KEEPS_CODES;
    PMO_TRY(compute_tables());
    const Codes act = take_codes(f_.num_rows, f_.inner);
    pmo_grouped_float8_params g = {};
    g.codes = act.codes;
    g.scales = act.scales;
    (keeps_codes ? g.hidden_codes : g.hidden) = p_.hidden;
    g.hidden_scales = p_.hidden_scales;
    PMO_TRY(activations(g));
    if (f_.keeps_hidden == PMO_LAYER_KEEPS && p_.clears_hidden) PMO_TRY(clear_hidden());
    pmo_layer_codes matrix;
    PMO_TRY(codes_of(p_.down_codes, down(), p_.transpose == 0, &matrix));
    return gemm_unpermute(act, f_.inner, matrix, p_.weights, p_.out);
  }

  int backward() {
    const bool keeps_codes = f_.keeps_hidden == PMO_LAYER_KEEPS_CODES;
    void* const scaled = given_or_taken(p_.scaled, f_.inner);
    void* hidden = p_.hidden;
    if (f_.keeps_hidden != PMO_LAYER_KEEPS) hidden = given_or_taken(p_.d_hidden, 2 * f_.inner);
    const Codes d_hidden = keeps_codes ? Codes{p_.hidden, p_.hidden_scales} : take_codes(f_.num_rows, 2 * f_.inner);
    PMO_TRY(compute_tables());
    if (f_.keeps_hidden == PMO_LAYER_RECOMPUTES) {
      pmo_grouped_float8_params g = {};
      g.hidden = hidden;
      PMO_TRY(activations(g));
    }
    PMO_TRY(activation_gradients(hidden, d_hidden, scaled));
    if (f_.part == PMO_LAYER_WHOLE) PMO_TRY(wgrads(scaled, hidden));
    if (p_.d_x == nullptr) return PMO_OK;
    pmo_layer_codes matrix;
    PMO_TRY(codes_of(p_.turned_gate_up_codes, gate_up(), p_.transpose != 0, &matrix));
    return gemm_unpermute(d_hidden, 2 * f_.inner, matrix, nullptr, p_.d_x);
  }

 private:
  // Codes [rows, columns] and scales [rows, columns / 128].
  Codes take_codes(int64_t rows, int64_t columns) { return codes_in(take(codes_bytes(rows, columns)), rows * columns); }

  int quantize(const Rows& tokens) {
    pmo_quantize_params q = {};
    q.struct_size = sizeof q;
    q.num_tokens = q.num_rows = tokens.count;
    q.topk = 1;
    q.hidden = tokens.width;
    q.x = tokens.data;
    q.x_row_stride = tokens.stride;
    q.codes = tokens_.codes;
    q.scales = tokens_.scales;
    q.dtype = f_.dtype;
    q.scale_layout = PMO_SCALES_BY_ROW;
    q.amax_min = kAmaxMin;
    return kernels_.quantize(&q, stream_);
  }

  // Permutes a chunk of the quantised tokens' rows.
  int permute_codes(int64_t first_row, int64_t end_row) {
    pmo_permute_params m = permutation(first_row, end_row);
    m.hidden = f_.hidden;
    m.scale_cols = divide_up(f_.hidden, kGroup);
    m.x = tokens_.codes;
    m.x_row_stride = f_.hidden;
    m.scale = tokens_.scales;
    m.scale_row_stride = m.scale_cols;
    m.rows = chunk_.codes;
    m.row_scales = chunk_.scales;
    m.dtype = PMO_FLOAT8_E4M3FN;
    m.scale_dtype = PMO_FLOAT32;
    m.fill = PMO_FILL_ROWS | PMO_FILL_SCALES;
    return kernels_.permute(&m, stream_);
  }

  int launch(pmo_grouped_float8_params g, const Codes& rows, int64_t inner, const pmo_layer_codes& matrix, int64_t outer,
             const Columns& out) {
    g.inner = inner;
    g.outer = outer;
    g.first_column = out.first;
    g.width = out.width;
    g.x = rows.codes;
    g.x_scales = rows.scales;
    g.matrix = matrix.codes;
    g.matrix_scales = matrix.scales;
    g.out = out.data;
    g.amax_min = kAmaxMin;
    return kernels_.gemm_float8(&g, stream_);
  }

  // A GEMM of token rows with n columns of results, chunk by chunk.
  int launch_on_tokens(pmo_grouped_float8_params g, const Rows& tokens, const pmo_layer_codes& matrix, int64_t outer, void* out) {
    PMO_TRY(quantize(tokens));
    return each_row_chunk([&](int64_t first, int64_t end, int64_t chunk) {
      PMO_TRY(permute_codes(first, end));
      set_schedule(&g, PMO_GROUPED_TILE_ROWS, chunk);
      g.first_row = first;
      g.num_sources = g.window_rows = end - first;
      return launch(g, chunk_, f_.hidden, matrix, outer, {out, 0, f_.inner});
    });
  }

  int activations(pmo_grouped_float8_params g) {
    pmo_layer_codes matrix;
    PMO_TRY(codes_of(p_.gate_up_codes, gate_up(), p_.transpose == 0, &matrix));
    g.result = PMO_GROUPED_GATED;
    return launch_on_tokens(g, x(), matrix, 2 * f_.inner, nullptr);
  }

  // Replaces H by dH and computes Q(dH), s A and the gradients of the weights. If H was kept as codes, these are replaced by Q(dH).
  int activation_gradients(void* hidden, const Codes& d_hidden, void* scaled) {
    pmo_layer_codes matrix;
    PMO_TRY(codes_of(p_.turned_down_codes, down(), p_.transpose != 0, &matrix));
    float* const dots = take_dots();
    pmo_grouped_float8_params g = {};
    g.result = PMO_GROUPED_GRADIENT;
    g.row_to_token = p_.row_to_token;
    g.weights = p_.weights;
    g.hidden = hidden;
    if (f_.keeps_hidden == PMO_LAYER_KEEPS_CODES) {
      g.hidden_codes = p_.hidden;
      g.hidden_scales = p_.hidden_scales;
    }
    g.codes = d_hidden.codes;
    g.scales = d_hidden.scales;
    g.d_weights = dots;
    PMO_TRY(launch_on_tokens(g, d_out(), matrix, f_.inner, scaled));
    return sum_dots(dots);
  }

  // out [T, d] = sums of each token's rows of a plain GEMM.
  int gemm_unpermute(const Codes& rows, int64_t inner, const pmo_layer_codes& matrix, const float* weights, void* out) {
    return each_columns([&](const Columns& columns) {
      pmo_grouped_float8_params g = {};
      set_schedule(&g, PMO_GROUPED_TILE_ROWS, kAllRows);
      g.num_sources = g.window_rows = f_.num_rows;
      g.weights = weights;
      PMO_TRY(launch(g, rows, inner, matrix, f_.hidden, columns));
      return unpermute(columns, out);
    });
  }

  const Codes tokens_, chunk_;  // of x or dO, and a chunk of their rows
};

}  // namespace

int run_float8(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream) {
  Float8Pass pass(facts, params, kernels, stream);
  return facts.backward == 0 ? pass.forward() : pass.backward();
}

}  // namespace layer
}  // namespace pmo
