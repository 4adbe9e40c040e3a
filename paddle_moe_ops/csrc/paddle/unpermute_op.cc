// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute: the sum of each token's rows, plain or weighted. Two operators, because the gradient of the plain sum needs no rows
// and so must not keep them alive.
#include "paddle/direct.h"
#include "paddle/movement.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "unpermute";

// A map with one entry per row, which only the gradient reads.
void require_rows_map(const paddle::Tensor& map, const paddle::Tensor& rows, const char* name) {
  require_rank(rows, 2, kFunction, "the rows");
  require_shape(map, {rows.shape()[0]}, kFunction, name);
  require_dtype(map, paddle::DataType::INT32, kFunction, name);
}

Shape out_shape(const Shape& rows, const Shape& token_rows) { return {dim(token_rows, 0), dim(rows, 1)}; }

// row_to_token is there for the gradient, which zeroes the rows that no token uses.
Outputs unpermute(const paddle::Tensor& rows, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token) {
  const Target target(kFunction, {&rows, &token_rows, &row_to_token});
  require_rows_map(row_to_token, rows, "row_to_token");
  return {sum_rows(target, kFunction, rows, token_rows, {})};
}

std::vector<Shape> unpermute_shapes(const Shape& rows, const Shape& token_rows, const Shape&) {
  return {out_shape(rows, token_rows)};
}

std::vector<paddle::DataType> unpermute_dtypes(const paddle::DataType& rows, const paddle::DataType&, const paddle::DataType&) {
  return {rows};
}

Outputs quick_unpermute(const paddle::Tensor& rows, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token) {
  if (!has_columns(rows)) return {};
  return unpermute(rows, token_rows, row_to_token);
}

// A permutation: the lines of a plan's token_rows hold nothing but -1 behind their rows. (In a cleaned rowmap anything may stand there,
// so moe_unpermute has to use the gradient of the sum.)
Outputs unpermute_backward(const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token, const paddle::Tensor& d_out) {
  const Target target(kFunction, {&token_rows, &row_to_token, &d_out});
  require_rank(d_out, 2, kFunction, "the gradient");
  require_rank(row_to_token, 1, kFunction, "row_to_token");
  paddle::Tensor d_rows = paddle::empty({row_to_token.shape()[0], d_out.shape()[1]}, d_out.dtype(), d_out.place());
  permute_rows(target, kFunction, d_out, token_rows, row_to_token, &d_rows);
  return {d_rows};
}

std::vector<Shape> unpermute_backward_shapes(const Shape&, const Shape& row_to_token, const Shape& d_out) {
  return {{dim(row_to_token, 0), dim(d_out, 1)}};
}

std::vector<paddle::DataType> unpermute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                        const paddle::DataType& d_out) {
  return {d_out};
}

// probs is [N], one per row, or [T, K], one per slot; row_to_slot leads from a row to its slot.
Weights weights_of(const paddle::Tensor& probs, const paddle::Tensor& row_to_slot) {
  Weights weights;
  weights.values = &probs;
  weights.index = probs.shape().size() == 1 ? nullptr : &row_to_slot;
  return weights;
}

Outputs unpermute_weighted(const paddle::Tensor& rows, const paddle::Tensor& probs, const paddle::Tensor& token_rows,
                           const paddle::Tensor& row_to_token, const paddle::Tensor& row_to_slot, bool, bool) {
  const Target target(kFunction, {&rows, &probs, &token_rows, &row_to_token, &row_to_slot});
  require_rows_map(row_to_token, rows, "row_to_token");
  require_rows_map(row_to_slot, rows, "row_to_slot");
  return {sum_rows(target, kFunction, rows, token_rows, weights_of(probs, row_to_slot))};
}

Outputs quick_unpermute_weighted(const paddle::Tensor& rows, const paddle::Tensor& probs, const paddle::Tensor& token_rows,
                                 const paddle::Tensor& row_to_token, const paddle::Tensor& row_to_slot) {
  const Shape shape = probs.shape();
  if (!has_columns(rows) || (shape.size() != 1 && shape != token_rows.shape())) return {};
  return unpermute_weighted(rows, probs, token_rows, row_to_token, row_to_slot, false, false);
}

std::vector<Shape> unpermute_weighted_shapes(const Shape& rows, const Shape&, const Shape& token_rows, const Shape&, const Shape&,
                                             bool, bool) {
  return {out_shape(rows, token_rows)};
}

std::vector<paddle::DataType> unpermute_weighted_dtypes(const paddle::DataType& rows, const paddle::DataType&,
                                                        const paddle::DataType&, const paddle::DataType&,
                                                        const paddle::DataType&) {
  return {rows};
}

Outputs unpermute_weighted_backward(const paddle::Tensor& rows, const paddle::Tensor& probs, const paddle::Tensor& token_rows,
                                    const paddle::Tensor& row_to_token, const paddle::Tensor& row_to_slot,
                                    const paddle::Tensor& d_out, bool need_rows_grad, bool need_probs_grad) {
  const Target target(kFunction, {&rows, &probs, &token_rows, &row_to_token, &row_to_slot, &d_out});
  paddle::Tensor d_rows =
      need_rows_grad ? paddle::empty(rows.shape(), rows.dtype(), rows.place()) : target.zeros(rows.shape(), rows.dtype());
  paddle::Tensor d_probs =
      need_probs_grad ? empty_float32(probs.shape(), rows) : target.zeros(probs.shape(), paddle::DataType::FLOAT32);
  sum_rows_backward(target, kFunction, d_out, &rows, token_rows, row_to_token, weights_of(probs, row_to_slot),
                    need_rows_grad ? &d_rows : nullptr, need_probs_grad ? &d_probs : nullptr);
  return {d_rows, d_probs};
}

std::vector<Shape> unpermute_weighted_backward_shapes(const Shape& rows, const Shape& probs, const Shape&, const Shape&,
                                                      const Shape&, const Shape&, bool, bool) {
  return {rows, probs};
}

std::vector<paddle::DataType> unpermute_weighted_backward_dtypes(const paddle::DataType& rows, const paddle::DataType& probs,
                                                                 const paddle::DataType&, const paddle::DataType&,
                                                                 const paddle::DataType&, const paddle::DataType&) {
  return {rows, probs};
}

}  // namespace

PD_BUILD_OP(pmo_unpermute)
    .Inputs({"rows", "token_rows", "row_to_token"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(unpermute))
    .SetInferShapeFn(PD_INFER_SHAPE(unpermute_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(unpermute_dtypes));
PMO_DIRECT(unpermute, unpermute);
PMO_QUICK(unpermute, quick_unpermute);

PD_BUILD_GRAD_OP(pmo_unpermute)
    .Inputs({"token_rows", "row_to_token", paddle::Grad("out")})
    .Outputs({paddle::Grad("rows")})
    .SetKernelFn(PD_KERNEL(unpermute_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(unpermute_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(unpermute_backward_dtypes));

PD_BUILD_OP(pmo_unpermute_weighted)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot"})
    .Outputs({"out"})
    .Attrs({"need_rows_grad: bool", "need_probs_grad: bool"})
    .SetKernelFn(PD_KERNEL(unpermute_weighted))
    .SetInferShapeFn(PD_INFER_SHAPE(unpermute_weighted_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(unpermute_weighted_dtypes));
PMO_DIRECT(unpermute_weighted, unpermute_weighted);
PMO_QUICK(unpermute_weighted, quick_unpermute_weighted);

// The gradient as an operator of its own, for those who write their backward passes themselves.
PD_BUILD_OP(pmo_unpermute_weighted_backward)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot", "d_out"})
    .Outputs({"d_rows", "d_probs"})
    .Attrs({"need_rows_grad: bool", "need_probs_grad: bool"})
    .SetKernelFn(PD_KERNEL(unpermute_weighted_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(unpermute_weighted_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(unpermute_weighted_backward_dtypes));
PMO_DIRECT(unpermute_weighted_backward, unpermute_weighted_backward);

PD_BUILD_GRAD_OP(pmo_unpermute_weighted)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot", paddle::Grad("out")})
    .Outputs({paddle::Grad("rows"), paddle::Grad("probs")})
    .Attrs({"need_rows_grad: bool", "need_probs_grad: bool"})
    .SetKernelFn(PD_KERNEL(unpermute_weighted_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(unpermute_weighted_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(unpermute_weighted_backward_dtypes));
