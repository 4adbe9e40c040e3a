// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp: a layer of experts in the dtype of its tokens, as paddle/moe_mlp.h describes it.
//
// If the kernels of pmo/grouped.h support the sizes, SwiGLU and the weights are epilogues of the GEMMs. Otherwise SwiGLU is a
// kernel of its own, and the weights are those of the sum. The gradient of SwiGLU is always a kernel of its own.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

class Layer : public ExpertLayer {
 public:
  Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
        const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, PMO_GROUPED_TURNED_ROWS, hidden, d_out),
        // sizes of the GEMMs for H and dA'; the other GEMMs have the same sizes, transposed
        has_kernels_(groups().has_kernels(dtype(), hidden_size, 2 * inner) && groups().has_kernels(dtype(), hidden_size, inner)) {
  }

  paddle::Tensor outputs(paddle::Tensor* hidden) const override {
    const paddle::Tensor act = activations(hidden);
    if (!has_kernels_) return sums_of(groups().gemm(act, operands().down, transpose(), dtype()), true);
    if (hidden != nullptr) groups().clear_ungrouped_rows(hidden);  // Paddle may check the values of outputs
    pmo_grouped_product_params p = {};
    p.weights = row_weights().data<float>();
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch(p, act, operands().down, transpose(), &rows);
    return sums_of(rows);
  }

  ActivationGradients activation_gradients(const paddle::Tensor* kept, const paddle::Tensor& d_out, bool) const override {
    paddle::Tensor hidden, scaled;
    if (kept != nullptr) {
      hidden = *kept;
    } else {
      activations(&hidden);
    }
    const paddle::Tensor rows = rows_of(d_out);
    if (has_kernels_) {
      scaled = new_rows(inner);
      groups().launch({}, rows, operands().down, !transpose(), &scaled);
    } else {
      scaled = groups().gemm(rows, operands().down, !transpose(), dtype());
    }
    ActivationGradients gradients = swiglu_backward(hidden, scaled);
    gradients.d_out = rows;
    return gradients;
  }

  paddle::Tensor d_x(const ActivationGradients& gradients) const override {
    if (!has_kernels_) return sums_of(groups().gemm(gradients.d_hidden, operands().gate_up, !transpose(), dtype()));
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch({}, gradients.d_hidden, operands().gate_up, !transpose(), &rows);
    return sums_of(rows);
  }

 private:
  // Returns A, and H if `hidden` is not null.
  paddle::Tensor activations(paddle::Tensor* hidden) const {
    const paddle::Tensor rows = rows_of(operands().x);
    if (!has_kernels_) {
      const paddle::Tensor gate_up = groups().gemm(rows, operands().gate_up, transpose(), dtype());
      if (hidden != nullptr) *hidden = gate_up;
      return swiglu(gate_up);
    }
    paddle::Tensor act = new_rows(inner);
    if (hidden != nullptr) *hidden = new_rows(2 * inner);
    pmo_grouped_product_params p = {};
    p.result = PMO_GROUPED_GATED;
    p.hidden = hidden == nullptr ? nullptr : hidden->data();
    groups().launch(p, rows, operands().gate_up, transpose(), &act);
    return act;
  }

  const bool has_kernels_;
};

}  // namespace

PMO_MLP_OPERATOR(pmo_moe_mlp, Layer);
PMO_DIRECT(moe_mlp, run_mlp<Layer>);
