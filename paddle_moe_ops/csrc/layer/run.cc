// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A pass in the dtype of its tokens, with launches in the order of pmo/layer.h.
#include "layer/pass.h"

namespace pmo {
namespace layer {
namespace {

class PlainPass : public Pass {
 public:
  PlainPass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream)
      : Pass(facts, params, kernels, stream),
        act_(f_.part == PMO_LAYER_WGRADS ? p_.scaled : given_or_taken(p_.scaled, f_.inner)) {}

  int forward() {
    PMO_TRY(compute_tables());
    PMO_TRY(activations(p_.hidden));
    if (p_.hidden != nullptr && p_.clears_hidden) PMO_TRY(clear_hidden());
    return gemm_unpermute(rows_of(act_, f_.inner), p_.down, p_.transpose, p_.weights, p_.out);
  }

  int backward() {
    PMO_TRY(compute_tables());
    if (f_.part == PMO_LAYER_WGRADS) return wgrads(p_.scaled, p_.d_hidden);
    void* const hidden = f_.keeps_hidden ? p_.hidden : given_or_taken(p_.d_hidden, 2 * f_.inner);
    if (!f_.keeps_hidden) PMO_TRY(activations(hidden));
    PMO_TRY(activation_gradients(hidden));
    if (f_.part == PMO_LAYER_WHOLE) {
      buffer_has_d_out_ = plan_.num_chunks == 1;
      PMO_TRY(wgrads(act_, hidden));
    }
    if (p_.d_x == nullptr) return PMO_OK;
    return gemm_unpermute(rows_of(hidden, 2 * f_.inner), p_.gate_up, !p_.transpose, nullptr, p_.d_x);
  }

 private:
  int launch(pmo_grouped_product_params g, const Rows& rows, const void* matrix, int64_t outer, bool transpose,
             const Columns& out, int64_t chunk) {
    set_schedule(&g, g.tile_rows, chunk);
    g.num_sources = rows.count;
    g.inner = rows.width;
    g.outer = outer;
    g.first_column = out.first;
    g.width = out.width;
    g.first_row = rows.first_row;
    g.window_rows = chunk == kAllRows ? f_.num_rows : rows.count;
    g.x = rows.data;
    g.x_row_stride = rows.stride;
    g.matrix = matrix;
    g.out = out.data;
    g.dtype = f_.dtype;
    g.transpose = transpose;
    g.tile_columns = tile_columns(g.inner, g.width);
    return kernels_.gemm(&g, stream_);
  }

  // A GEMM of token rows with n columns of results: gathered, or by chunks of permuted rows.
  int launch_on_tokens(const pmo_grouped_product_params& g, const Rows& tokens, const void* matrix, int64_t outer,
                       bool transpose) {
    const Columns out = {act_, 0, f_.inner};
    if (plan_.gathers) return launch(g, tokens, matrix, outer, transpose, out, kAllRows);
    return each_row_chunk([&](int64_t first, int64_t end, int64_t chunk) {
      Rows rows;
      PMO_TRY(permute(tokens, first, end, {nullptr, 0, f_.hidden}, &rows));
      return launch(g, rows, matrix, outer, transpose, out, chunk);
    });
  }

  // A, and H unless it is null.
  int activations(void* hidden) {
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_GATED;
    g.tile_rows = PMO_GROUPED_TURNED_ROWS;
    g.gathers = plan_.gathers;
    g.row_to_token = plan_.gathers ? p_.row_to_token : nullptr;
    g.hidden = hidden;
    return launch_on_tokens(g, x(), p_.gate_up, 2 * f_.inner, p_.transpose);
  }

  // Replaces H by its gradient and A by s A; computes the gradients of the weights.
  int activation_gradients(void* hidden) {
    float* const dots = take_dots();
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_GRADIENT;
    g.tile_rows = PMO_GROUPED_TURNED_ROWS;
    g.gathers = plan_.gathers;
    g.row_to_token = p_.row_to_token;
    g.weights = p_.weights;
    g.hidden = hidden;
    g.d_weights = dots;
    PMO_TRY(launch_on_tokens(g, d_out(), p_.down, f_.inner, !p_.transpose));
    return sum_dots(dots);
  }

  // out [T, d] = sums of each token's rows of a plain GEMM.
  int gemm_unpermute(const Rows& source, const void* matrix, bool transpose, const float* weights, void* out) {
    return each_columns([&](const Columns& columns) {
      pmo_grouped_product_params g = {};
      g.result = PMO_GROUPED_PLAIN;
      g.tile_rows = plan_.sum_tile_rows;
      g.weights = weights;
      PMO_TRY(launch(g, source, matrix, f_.hidden, transpose, columns, kAllRows));
      return unpermute(columns, out);
    });
  }

  void* const act_;
};

}  // namespace
}  // namespace layer
}  // namespace pmo

extern "C" int pmo_layer_run(const pmo_layer_facts* facts, const pmo_layer_params* params, const pmo_layer_kernels* kernels,
                             void* stream) {
  if (facts == nullptr || params == nullptr || kernels == nullptr) {
    return pmo::fail(PMO_INVALID_ARGUMENT, "facts, params and kernels must be given");
  }
  return pmo::guarded([&] {
    PMO_TRY(pmo::layer::check_layer(*facts, *params));
    if (pmo::layer::plan_of(*facts).sum_tile_rows == PMO_GROUPED_FEW_ROWS) {
      return pmo::layer::run_few_rows(*facts, *params, *kernels, stream);
    }
    if (facts->float8 != 0) return pmo::layer::run_float8(*facts, *params, *kernels, stream);
    pmo::layer::PlainPass pass(*facts, *params, *kernels, stream);
    return facts->backward == 0 ? pass.forward() : pass.backward();
  });
}
