// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp: a layer of experts in the dtype of its tokens, as paddle/moe_mlp.h describes it.
//
// Without kernels for the sizes, SwiGLU and its gradient are kernels of their own, and the weights are those of the sum.
#include <memory>
#include <utility>

#include "paddle/direct.h"
#include "paddle/moe_mlp.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

class Layer : public ExpertLayer {
 public:
  Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
        const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, false, hidden, d_out) {}

 protected:
  paddle::Tensor composed_hidden(const MatrixCodes&) const override {
    return groups().gemm(rows_of(operands().x), gate_up(), transpose(), dtype());
  }

  paddle::Tensor composed_outputs(paddle::Tensor hidden, const MatrixCodes&) const override {
    const paddle::Tensor act = swiglu(std::exchange(hidden, {}));
    return sums_of(groups().gemm(act, down(), transpose(), dtype()), true);
  }

  ActivationGradients activation_gradients(paddle::Tensor hidden, const paddle::Tensor& d_out,
                                           const MatrixCodes&) const override {
    const paddle::Tensor rows = rows_of(d_out);
    ActivationGradients gradients = swiglu_backward(hidden, groups().gemm(rows, down(), !transpose(), dtype()));
    gradients.d_out = rows;
    return gradients;
  }

  paddle::Tensor composed_d_x(const ActivationGradients& gradients, const MatrixCodes&) const override {
    return sums_of(groups().gemm(gradients.d_hidden, gate_up(), !transpose(), dtype()));
  }
};

Outputs run(const MlpAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
            const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
            const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row) {
  const MlpOperands operands = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  return mlp_forward(a, Layer(a, operands), operands);
}

Outputs run_backward(const MlpAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                     const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                     const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                     const paddle::Tensor& hidden, const paddle::Tensor& d_out) {
  const MlpOperands operands = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  return mlp_backward(a, Layer(a, operands, &hidden, &d_out), operands, hidden, d_out);
}

// True if the groups ascend within the rows, as those of a plan do. Both tensors are on the host.
bool are_groups(const paddle::Tensor& sizes, const paddle::Tensor& offsets, int64_t num_rows) {
  const paddle::Tensor lengths = dense(sizes), starts = dense(offsets);
  int64_t end = 0;
  const int64_t experts = lengths.shape()[0];
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t size = lengths.data<int32_t>()[expert], start = starts.data<int32_t>()[expert];
    if (size < 0 || start < end) return false;
    end = start + size;
  }
  const int64_t last = starts.data<int32_t>()[experts];
  return last >= end && last <= num_rows;
}

// A quick call has the plan's own maps. `by_row`: the weights are [M], else [T, K].
bool fits(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down, const paddle::Tensor& weights,
          const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token, const paddle::Tensor& sizes,
          const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row, int64_t transpose, int64_t workspace_mb,
          int64_t by_row) {
  const Shape matrix = down.shape();
  if (!has_columns(x) || !is_summed(x) || matrix.size() != 3 || workspace_mb < 1) return false;
  const int64_t experts = matrix[0], inner = MatrixSizes(matrix, transpose != 0).inner, hidden = x.shape()[1];
  const bool has_sizes =
      experts > 0 && inner > 0 && sizes.shape() == Shape{experts} && x.shape()[0] == dim(token_rows.shape(), 0) &&
      matrix == (transpose != 0 ? Shape{experts, hidden, inner} : Shape{experts, inner, hidden}) &&
      gate_up.shape() == (transpose != 0 ? Shape{experts, 2 * inner, hidden} : Shape{experts, hidden, 2 * inner}) &&
      weights.shape() == (by_row != 0 ? row_to_token.shape() : slot_to_row.shape());
  const bool has_dtypes = gate_up.dtype() == x.dtype() && down.dtype() == x.dtype() &&
                          weights.dtype() == paddle::DataType::FLOAT32 && sizes.dtype() == paddle::DataType::INT32 &&
                          offsets.dtype() == paddle::DataType::INT32 && dim(offsets.shape(), 0) == experts + 1;
  if (!has_sizes || !has_dtypes) return false;
  if (!are_on_one_device({&x, &gate_up, &down, &weights, &token_rows, &row_to_token, &sizes, &offsets})) return false;
  if (x.is_cpu()) return are_groups(sizes, offsets, dim(row_to_token.shape(), 0));
  const Target target(kMoeMlp, {&x});
  return layer_has_kernels(target, x.dtype(), dim(row_to_token.shape(), 0), experts, hidden, inner, false);
}

Outputs quick_moe_mlp(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                      const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                      const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                      int64_t transpose, int64_t workspace_mb, int64_t by_row) {
  const MlpAttributes attributes = {transpose != 0,     false,       false, false, false, false, false,
                                    workspace_mb << 20, by_row == 0, false};
  return {run(attributes, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row)[0]};
}

}  // namespace

std::unique_ptr<ExpertLayer> pmo::binding::new_layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden,
                                                     const paddle::Tensor* d_out) {
  return std::make_unique<Layer>(a, o, hidden, d_out);
}

PD_BUILD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row"})
    .Outputs({"out", "hidden"})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(run))
    .SetInferShapeFn(PMO_INFER_SHAPE(mlp_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(mlp_dtypes));

PD_BUILD_GRAD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row", "hidden",
             paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights")})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(run_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(mlp_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(mlp_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row", "hidden",
             paddle::Grad("out"), paddle::Grad(paddle::Grad("x")), paddle::Grad(paddle::Grad("gate_up")),
             paddle::Grad(paddle::Grad("down")), paddle::Grad(paddle::Grad("weights"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights"),
              paddle::Grad(paddle::Grad("out"))})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(mlp_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(mlp_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(mlp_double_backward_dtypes));

PMO_DIRECT(moe_mlp, run);
PMO_QUICK(moe_mlp, quick_moe_mlp, fits);
