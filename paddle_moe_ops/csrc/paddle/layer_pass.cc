// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Both passes of a layer of experts without Paddle's autograd, for a node of Python: it keeps quantised matrices from one call to
// the next, keeps H as codes, and adds gradients of matrices to existing ones.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

using Optional = paddle::optional<paddle::Tensor>;

Float8 codes_of(const Optional& codes, const Optional& scales) {
  Float8 matrix;
  if (codes) matrix.codes = dense(*codes);
  if (scales) matrix.scales = dense(*scales);
  return matrix;
}

std::unique_ptr<ExpertLayer> layer_of(bool float8, const MlpAttributes& a, const MlpOperands& o,
                                      const paddle::Tensor* hidden = nullptr, const paddle::Tensor* d_out = nullptr) {
  return float8 ? new_float8_layer(a, o, hidden, d_out) : new_layer(a, o, hidden, d_out);
}

// -> out, H or its codes, scales of H; `keep` is a pmo_layer_hidden
Outputs layer_forward(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                      const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                      const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                      const Optional& gate_up_codes, const Optional& gate_up_scales, const Optional& down_codes,
                      const Optional& down_scales, bool transpose, bool by_slot, int64_t workspace, bool float8, int keep) {
  MlpAttributes a = {};
  a.transpose = transpose;
  a.by_slot = by_slot;
  a.workspace = workspace;
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  MatrixCodes codes;
  codes.gate_up = codes_of(gate_up_codes, gate_up_scales);
  codes.down = codes_of(down_codes, down_scales);
  Kept kept;
  const paddle::Tensor out = layer_of(float8, a, o)->outputs(static_cast<pmo_layer_hidden>(keep), false, codes, &kept);
  return {out, kept.values, kept.scales};
}

// -> gradients of x, gate_up, down and weights; undefined where they are not needed or were added to a sum. With `defers`, which
// leaves the gradients of matrices to layer_wgrads: then dH and s A.
Outputs layer_backward(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                       const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                       const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                       const Optional& gate_up_codes, const Optional& gate_up_scales, const Optional& turned_gate_up_codes,
                       const Optional& turned_gate_up_scales, const Optional& turned_down_codes,
                       const Optional& turned_down_scales, const Optional& hidden, const Optional& hidden_scales,
                       const paddle::Tensor& d_out, const Optional& gate_up_sum, const Optional& down_sum, bool transpose,
                       bool by_slot, int64_t workspace, bool float8, bool float8_wgrads, bool need_x, bool need_gate_up,
                       bool need_down, bool need_weights, bool defers) {
  const MlpAttributes a = {
      transpose,    static_cast<bool>(hidden), need_x, need_gate_up, need_down, need_weights, true, workspace, by_slot,
      float8_wgrads};
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  const std::unique_ptr<ExpertLayer> layer = layer_of(float8, a, o, nullptr, &d_out);
  require_gradient(d_out, x.shape(), x.dtype(), kMoeMlp, "the gradient of the result");
  MatrixCodes codes;
  codes.gate_up = codes_of(gate_up_codes, gate_up_scales);
  codes.turned_gate_up = codes_of(turned_gate_up_codes, turned_gate_up_scales);
  codes.turned_down = codes_of(turned_down_codes, turned_down_scales);
  Kept kept;
  if (hidden) kept.values = *hidden;
  if (hidden_scales) kept.scales = *hidden_scales;
  const Sums sums = {gate_up_sum ? &*gate_up_sum : nullptr, down_sum ? &*down_sum : nullptr};
  Outputs gradients = {{}, {}, {}, {}};
  Deferred deferred;
  layer->backward(a, kept, d_out, codes, sums, &gradients, defers ? &deferred : nullptr);
  if (by_slot && need_weights) gradients[3] = gather_slots(layer->target(), kMoeMlp, slot_to_row, gradients[3]);
  if (defers) gradients.insert(gradients.end(), {deferred.d_hidden, deferred.scaled});
  return gradients;
}

// -> gradients of gate_up, if dH is given, and of down, if s A is, as those of layer_backward; `inner` is n. The matrices
// themselves are not needed.
Outputs layer_wgrads(const paddle::Tensor& x, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                     const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                     const Optional& d_hidden, const Optional& scaled, const paddle::Tensor& d_out, const Optional& gate_up_sum,
                     const Optional& down_sum, int64_t inner, bool transpose, int64_t workspace, bool float8,
                     bool float8_wgrads) {
  require_rank(x, 2, kMoeMlp, "x");
  require_rank(sizes, 1, kMoeMlp, "sizes");
  require_rank(row_to_token, 1, kMoeMlp, "row_to_token");
  const Target target(kMoeMlp, {&x});
  const int64_t experts = sizes.shape()[0], columns = x.shape()[1], rows = row_to_token.shape()[0];
  // Stand-ins of the right shape, which nothing reads.
  const paddle::Tensor byte = target.empty({1}, paddle::DataType::UINT8);
  const auto unread = [&](int64_t first, int64_t second) {
    const Shape shape = transpose ? Shape{experts, second, first} : Shape{experts, first, second};
    return paddle::from_blob(const_cast<void*>(byte.data()), shape, x.dtype(), phi::DataLayout::NCHW, target.place());
  };
  const paddle::Tensor gate_up = unread(columns, 2 * inner), down = unread(inner, columns),
                       weights = target.empty_float32({rows});
  const bool has_d_hidden = static_cast<bool>(d_hidden), has_scaled = static_cast<bool>(scaled);
  const MlpAttributes a = {transpose, false, false, has_d_hidden, has_scaled, false, true, workspace, false, float8_wgrads};
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  const std::unique_ptr<ExpertLayer> layer = layer_of(float8, a, o, nullptr, &d_out);
  require_gradient(d_out, x.shape(), x.dtype(), kMoeMlp, "the gradient of the result");
  Deferred deferred;
  if (has_d_hidden) {
    require_gradient(*d_hidden, {rows, 2 * inner}, x.dtype(), kMoeMlp, "the gradient of the first product");
    deferred.d_hidden = dense(*d_hidden);
  }
  if (has_scaled) {
    require_gradient(*scaled, {rows, inner}, x.dtype(), kMoeMlp, "the weighted activation");
    deferred.scaled = dense(*scaled);
  }
  const Sums sums = {gate_up_sum ? &*gate_up_sum : nullptr, down_sum ? &*down_sum : nullptr};
  Outputs gradients = {{}, {}, {}, {}};
  layer->wgrads(a, deferred, d_out, sums, &gradients);
  return {gradients[1], gradients[2]};
}

}  // namespace

PMO_DIRECT(layer_forward, layer_forward);
PMO_DIRECT(layer_backward, layer_backward);
PMO_DIRECT(layer_wgrads, layer_wgrads);

#endif
