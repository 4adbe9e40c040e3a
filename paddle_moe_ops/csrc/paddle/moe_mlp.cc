// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/moe_mlp.h"

#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

namespace pmo {
namespace binding {
namespace {

// Checks all operands; returns the target.
const Target& checked(const Target& target, const MlpAttributes& a, const MlpOperands& o) {
  require(o.sizes.defined() && o.offsets.defined() && o.slot_to_row.defined(), kMoeMlp, "a required tensor is missing");
  require(is_summed(o.x), kMoeMlp, "x must be float32, float16 or bfloat16");
  require_rank(o.token_rows, 2, kMoeMlp, "token_rows");
  require_shape(o.x, {o.token_rows.shape()[0], -1}, kMoeMlp, "x");
  require_rank(o.down, 3, kMoeMlp, "down");
  require_dtype(o.gate_up, o.x.dtype(), kMoeMlp, "gate_up");
  require_dtype(o.down, o.x.dtype(), kMoeMlp, "down");
  const int64_t experts = o.down.shape()[0], columns = o.x.shape()[1], inner = MatrixSizes(o.down.shape(), a.transpose).inner;
  require_shape(o.down, a.transpose ? Shape{experts, columns, inner} : Shape{experts, inner, columns}, kMoeMlp, "down");
  require_shape(o.gate_up, a.transpose ? Shape{experts, 2 * inner, columns} : Shape{experts, columns, 2 * inner}, kMoeMlp,
                "gate_up");
  require_dtype(o.token_rows, paddle::DataType::INT32, kMoeMlp, "token_rows");
  require_rank(o.row_to_token, 1, kMoeMlp, "row_to_token");
  require_dtype(o.row_to_token, paddle::DataType::INT32, kMoeMlp, "row_to_token");
  if (a.by_slot) {
    require_shape(o.slot_to_row, {o.x.shape()[0], -1}, kMoeMlp, "slot_to_row");
    require_dtype(o.slot_to_row, paddle::DataType::INT32, kMoeMlp, "slot_to_row");
  }
  require_shape(o.weights, a.by_slot ? o.slot_to_row.shape() : o.row_to_token.shape(), kMoeMlp, "weights");
  require_dtype(o.weights, paddle::DataType::FLOAT32, kMoeMlp, "weights");
  require_shape(o.sizes, {experts}, kMoeMlp, "sizes");
  return target;
}

// The weight of each row, dense.
paddle::Tensor weights_by_row(const Target& target, const MlpAttributes& a, const MlpOperands& o) {
  if (!a.by_slot) return dense(o.weights);
  paddle::Tensor by_row = target.empty_float32(o.row_to_token.shape());
  scatter_slots(target, kMoeMlp, o.slot_to_row, o.weights, false, &by_row);
  return by_row;
}

}  // namespace

ExpertLayer::ExpertLayer(const MlpAttributes& attributes, const MlpOperands& operands, int32_t tile_rows,
                         const paddle::Tensor* hidden, const paddle::Tensor* d_out)
    : target_(kMoeMlp,
              {&operands.x, &operands.gate_up, &operands.down, &operands.weights, &operands.token_rows, &operands.row_to_token},
              {hidden, d_out}),
      transpose_(attributes.transpose),
      operands_(operands),
      groups_(checked(target_, attributes, operands), kMoeMlp, operands.sizes, &operands.offsets,
              dim(operands.row_to_token.shape(), 0), tile_rows),
      row_to_token_(dense(operands.row_to_token)),
      row_weights_(weights_by_row(target_, attributes, operands)),
      hidden_size(operands.x.shape()[1]),
      inner(MatrixSizes(operands.down.shape(), attributes.transpose).inner) {}

paddle::Tensor ExpertLayer::new_rows(int64_t columns, paddle::DataType dtype) const {
  paddle::Tensor rows = target_.empty({num_rows(), columns}, dtype);
  prepare_pages(target_, rows);
  return rows;
}

paddle::Tensor ExpertLayer::rows_of(const paddle::Tensor& tokens) const {
  paddle::Tensor rows = target_.empty({num_rows(), hidden_size}, dtype());
  permute_rows(target_, kMoeMlp, tokens, operands_.token_rows, operands_.row_to_token, &rows);
  return rows;
}

paddle::Tensor ExpertLayer::sums_of(const paddle::Tensor& rows, bool weighted) const {
  Weights weights;
  if (weighted) weights.values = &row_weights_;
  return sum_rows(target_, kMoeMlp, rows, operands_.token_rows, weights);
}

paddle::Tensor ExpertLayer::swiglu(const paddle::Tensor& hidden) const {
  paddle::Tensor act = new_rows(inner, hidden.dtype());
  pmo_swiglu_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows();
  p.width = inner;
  p.hidden = hidden.data();
  p.act = act.data();
  p.dtype = dtype_of(act, kMoeMlp, "x");
  check_status(PMO_CALL(target_, swiglu, &p), kMoeMlp);
  return act;
}

ActivationGradients ExpertLayer::swiglu_backward(const paddle::Tensor& hidden, paddle::Tensor scaled) const {
  ActivationGradients gradients;
  gradients.d_weights = target_.empty_float32({num_rows()});
  gradients.d_hidden = new_rows(2 * inner, hidden.dtype());
  pmo_swiglu_backward_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows();
  p.width = inner;
  p.hidden = hidden.data();
  p.row_to_token = row_to_token_.data<int32_t>();
  p.weights = row_weights_.data<float>();
  p.d_hidden = gradients.d_hidden.data();
  p.scaled = scaled.data();
  p.d_weights = gradients.d_weights.data<float>();
  p.dtype = dtype_of(scaled, kMoeMlp, "x");
  check_status(PMO_CALL(target_, swiglu_backward, &p), kMoeMlp);
  gradients.scaled = scaled;
  return gradients;
}

paddle::Tensor ExpertLayer::d_down(const ActivationGradients& gradients, const paddle::Tensor& d_out) const {
  const paddle::Tensor rows = gradients.d_out.defined() ? gradients.d_out : rows_of(d_out);
  return transpose_ ? groups_.wgrad(rows, gradients.scaled, dtype()) : groups_.wgrad(gradients.scaled, rows, dtype());
}

paddle::Tensor ExpertLayer::d_gate_up(const ActivationGradients& gradients) const {
  const paddle::Tensor rows = rows_of(operands_.x);
  return transpose_ ? groups_.wgrad(gradients.d_hidden, rows, dtype()) : groups_.wgrad(rows, gradients.d_hidden, dtype());
}

void ExpertLayer::backward(const MlpAttributes& a, const paddle::Tensor* kept, const paddle::Tensor& d_out,
                           Outputs* gradients) const {
  ActivationGradients activation = activation_gradients(kept, d_out, a.need_weights_grad);
  if (a.need_weights_grad) (*gradients)[3] = activation.d_weights;
  if (a.need_down_grad) (*gradients)[2] = d_down(activation, d_out);
  activation.scaled = activation.d_out = {};  // frees their memory early
  if (a.need_gate_up_grad) (*gradients)[1] = d_gate_up(activation);
  if (a.need_x_grad) (*gradients)[0] = d_x(activation);
}

Outputs mlp_forward(const MlpAttributes& a, const ExpertLayer& layer, const MlpOperands& o) {
  paddle::Tensor hidden;
  const paddle::Tensor out = layer.outputs(a.keep_hidden ? &hidden : nullptr);
  if (!a.keep_hidden) hidden = layer.target().empty({0, 2 * layer.inner}, o.x.dtype());
  return {out, hidden};
}

Outputs mlp_backward(const MlpAttributes& a, const ExpertLayer& layer, const MlpOperands& o, const paddle::Tensor& hidden,
                     const paddle::Tensor& d_out) {
  require_gradient(d_out, o.x.shape(), o.x.dtype(), kMoeMlp, "the gradient of the result");
  // A program from a file may pass any tensor as `hidden`.
  require(hidden.defined(), kMoeMlp, "a required tensor is missing");
  require_gradient(hidden, {a.keep_hidden ? layer.num_rows() : 0, 2 * layer.inner}, o.x.dtype(), kMoeMlp, "hidden");
  without_gradient({&o.token_rows, &o.row_to_token, &o.sizes, &o.offsets, &o.slot_to_row, &hidden});
  const auto zeros_like = [&](const paddle::Tensor& tensor) { return layer.target().zeros(tensor.shape(), tensor.dtype()); };
  Outputs gradients = {{}, {}, {}, {}};
  const bool has_d_out = d_out.initialized();
  if (has_d_out) {
    const paddle::Tensor kept = dense(hidden);
    layer.backward(a, a.keep_hidden ? &kept : nullptr, d_out, &gradients);
    if (a.by_slot && a.need_weights_grad) gradients[3] = gather_slots(layer.target(), kMoeMlp, o.slot_to_row, gradients[3]);
  }
  const paddle::Tensor* const operands[] = {&o.x, &o.gate_up, &o.down, &o.weights};
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = zeros_like(*operands[i]);
  }
  return gradients;
}

std::vector<Shape> mlp_shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape&, const Shape&,
                              const Shape&, const Shape& row_to_token, const Shape&, const Shape&, const Shape&) {
  return {x, {a.keep_hidden ? dim(row_to_token, 0) : 0, MatrixSizes(gate_up, a.transpose).outer}};
}

std::vector<paddle::DataType> mlp_dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {x, x};
}

std::vector<Shape> mlp_backward_shapes(const MlpAttributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                       const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&, const Shape&,
                                       const Shape&, const Shape&) {
  return {x, gate_up, down, weights};
}

std::vector<paddle::DataType> mlp_backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                                  const paddle::DataType& down, const paddle::DataType& weights,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&) {
  return {x, gate_up, down, weights};
}

Outputs mlp_double_backward(const MlpAttributes&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&) {
  fail_second_order(kMoeMlp, "; detach an operand, where first-order ones are enough");
}

std::vector<Shape> mlp_double_backward_shapes(const MlpAttributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                              const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&,
                                              const Shape&, const Shape&, const Shape& d_out, const Shape&, const Shape&,
                                              const Shape&, const Shape&) {
  return {x, gate_up, down, weights, d_out};
}

std::vector<paddle::DataType> mlp_double_backward_dtypes(
    const paddle::DataType& x, const paddle::DataType& gate_up, const paddle::DataType& down, const paddle::DataType& weights,
    const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType& d_out, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType&) {
  return {x, gate_up, down, weights, d_out};
}

}  // namespace binding
}  // namespace pmo
