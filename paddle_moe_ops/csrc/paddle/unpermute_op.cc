// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute: the sum of each token's rows, plain or weighted. Two operators, because the gradient of the plain sum needs no rows
// and so must not keep them alive.
#include "paddle/direct.h"
#include "paddle/movement.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "unpermute";

PMO_ATTRIBUTES(Attributes, (int64_t, hidden, hidden), (int, hidden_dtype, dtype));
PMO_ATTRIBUTES(WeightedAttributes, (bool, need_rows_grad, rows_grad), (bool, need_probs_grad, prob_grad));

// Checks a map with one entry per row, which only the gradient reads.
void require_rows_map(const paddle::Tensor& map, const paddle::Tensor& rows, const char* name) {
  require_rank(rows, 2, kFunction, "the rows");
  require_shape(map, {rows.shape()[0]}, kFunction, name);
  require_dtype(map, paddle::DataType::INT32, kFunction, name);
}

Shape out_shape(const Shape& rows, const Shape& token_rows) { return {dim(token_rows, 0), dim(rows, 1)}; }

// row_to_token is an input for the gradient, which zeroes the rows that no token uses.
Outputs unpermute(const Attributes& a, const paddle::Tensor& rows, const paddle::Tensor& token_rows,
                  const paddle::Tensor& row_to_token) {
  const Target target(kFunction, {&rows, &token_rows, &row_to_token});
  require_rows_map(row_to_token, rows, "row_to_token");
  require_described(rows, a.hidden, a.hidden_dtype, kFunction);
  return {sum_rows(target, kFunction, rows, token_rows, {})};
}

std::vector<Shape> unpermute_shapes(const Attributes&, const Shape& rows, const Shape& token_rows, const Shape&) {
  return {out_shape(rows, token_rows)};
}

std::vector<paddle::DataType> unpermute_dtypes(const paddle::DataType& rows, const paddle::DataType&, const paddle::DataType&) {
  return {rows};
}

bool fits(const paddle::Tensor& rows, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token) {
  return has_columns(rows) && is_summed(rows) && rows.shape()[0] == dim(row_to_token.shape(), 0) &&
         are_on_one_device({&rows, &token_rows, &row_to_token});
}

Outputs quick_unpermute(const paddle::Tensor& rows, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token) {
  return unpermute({kUnknown, static_cast<int>(rows.dtype())}, rows, token_rows, row_to_token);
}

Outputs unpermute_backward(const Attributes& a, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                           const paddle::Tensor& d_out) {
  const Target target(kFunction, {&token_rows, &row_to_token, &d_out});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(d_out, {token_rows.shape()[0], a.hidden}, dtype, kFunction, "the gradient of the sums");
  without_gradient({&token_rows, &row_to_token});
  paddle::Tensor d_rows;
  sum_rows_backward(target, kFunction, d_out, nullptr, token_rows, LineEnd::kNones, row_to_token, {}, &d_rows, nullptr);
  return {d_rows};
}

std::vector<Shape> unpermute_backward_shapes(const Attributes&, const Shape&, const Shape& row_to_token, const Shape& d_out) {
  return {{dim(row_to_token, 0), dim(d_out, 1)}};
}

std::vector<paddle::DataType> unpermute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                        const paddle::DataType& d_out) {
  return {d_out};
}

Outputs unpermute_double_backward(const Attributes& a, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                                  const paddle::Tensor& dd_rows) {
  const Target target(kFunction, {&token_rows, &row_to_token, &dd_rows});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(dd_rows, {row_to_token.shape()[0], a.hidden}, dtype, kFunction, "the gradient of the gradient of the rows");
  return {sum_rows(target, kFunction, dd_rows, token_rows, {})};
}

std::vector<Shape> unpermute_double_backward_shapes(const Attributes&, const Shape& token_rows, const Shape&,
                                                    const Shape& dd_rows) {
  return {out_shape(dd_rows, token_rows)};
}

// probs is [N], one per row, or [T, K], one per slot; row_to_slot maps a row to its slot.
Weights weights_of(const paddle::Tensor& probs, const paddle::Tensor& row_to_slot) {
  Weights weights;
  weights.values = &probs;
  weights.index = probs.shape().size() == 1 ? nullptr : &row_to_slot;
  return weights;
}

Outputs unpermute_weighted(const WeightedAttributes&, const paddle::Tensor& rows, const paddle::Tensor& probs,
                           const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                           const paddle::Tensor& row_to_slot) {
  const Target target(kFunction, {&rows, &probs, &token_rows, &row_to_token, &row_to_slot});
  require_rows_map(row_to_token, rows, "row_to_token");
  require_rows_map(row_to_slot, rows, "row_to_slot");
  return {sum_rows(target, kFunction, rows, token_rows, weights_of(probs, row_to_slot))};
}

bool fits_weighted(const paddle::Tensor& rows, const paddle::Tensor& probs, const paddle::Tensor& token_rows,
                   const paddle::Tensor& row_to_token, const paddle::Tensor& row_to_slot) {
  return fits(rows, token_rows, row_to_token) && probs.dtype() == paddle::DataType::FLOAT32 &&
         (probs.shape() == row_to_token.shape() || probs.shape() == token_rows.shape()) &&
         are_on_one_device({&rows, &probs, &row_to_slot});
}

Outputs quick_unpermute_weighted(const paddle::Tensor& rows, const paddle::Tensor& probs, const paddle::Tensor& token_rows,
                                 const paddle::Tensor& row_to_token, const paddle::Tensor& row_to_slot) {
  return unpermute_weighted({}, rows, probs, token_rows, row_to_token, row_to_slot);
}

std::vector<Shape> unpermute_weighted_shapes(const WeightedAttributes&, const Shape& rows, const Shape&, const Shape& token_rows,
                                             const Shape&, const Shape&) {
  return {out_shape(rows, token_rows)};
}

std::vector<paddle::DataType> unpermute_weighted_dtypes(const paddle::DataType& rows, const paddle::DataType&,
                                                        const paddle::DataType&, const paddle::DataType&,
                                                        const paddle::DataType&) {
  return {rows};
}

Outputs unpermute_weighted_backward(const WeightedAttributes& a, const paddle::Tensor& rows, const paddle::Tensor& probs,
                                    const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                                    const paddle::Tensor& row_to_slot, const paddle::Tensor& d_out) {
  const Target target(kFunction, {&rows, &probs, &token_rows, &row_to_token, &row_to_slot, &d_out});
  require_rows_map(row_to_token, rows, "row_to_token");
  require_rank(token_rows, 2, kFunction, "token_rows");
  require_gradient(d_out, {token_rows.shape()[0], rows.shape()[1]}, rows.dtype(), kFunction, "the gradient of the sums");
  without_gradient({&token_rows, &row_to_token, &row_to_slot});
  paddle::Tensor d_rows, d_probs;
  sum_rows_backward(target, kFunction, d_out, &rows, token_rows, LineEnd::kNones, row_to_token, weights_of(probs, row_to_slot),
                    a.need_rows_grad ? &d_rows : nullptr, a.need_probs_grad ? &d_probs : nullptr);
  if (!a.need_rows_grad) d_rows = target.zeros(rows.shape(), rows.dtype());
  if (!a.need_probs_grad) d_probs = target.zeros(probs.shape(), paddle::DataType::FLOAT32);
  return {d_rows, d_probs};
}

std::vector<Shape> unpermute_weighted_backward_shapes(const WeightedAttributes&, const Shape& rows, const Shape& probs,
                                                      const Shape&, const Shape&, const Shape&, const Shape&) {
  return {rows, probs};
}

std::vector<paddle::DataType> unpermute_weighted_backward_dtypes(const paddle::DataType& rows, const paddle::DataType& probs,
                                                                 const paddle::DataType&, const paddle::DataType&,
                                                                 const paddle::DataType&, const paddle::DataType&) {
  return {rows, probs};
}

Outputs unpermute_weighted_double_backward(const WeightedAttributes& a, const paddle::Tensor& rows, const paddle::Tensor& probs,
                                           const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                                           const paddle::Tensor& row_to_slot, const paddle::Tensor& d_out,
                                           const paddle::Tensor& dd_rows, const paddle::Tensor& dd_probs) {
  const Target target(kFunction, {&rows, &probs, &token_rows, &row_to_token, &row_to_slot, &d_out}, {&dd_rows, &dd_probs});
  require_gradient(dd_rows, rows.shape(), rows.dtype(), kFunction, "the gradient of the gradient of the rows");
  require_gradient(dd_probs, probs.shape(), probs.dtype(), kFunction, "the gradient of the gradient of the probabilities");
  const WeightedSum sum = {rows, token_rows, row_to_token, weights_of(probs, row_to_slot), d_out};
  return sum_rows_double_backward(target, kFunction, sum, a.need_rows_grad && dd_rows.initialized() ? &dd_rows : nullptr,
                                  a.need_probs_grad && dd_probs.initialized() ? &dd_probs : nullptr);
}

std::vector<Shape> unpermute_weighted_double_backward_shapes(const WeightedAttributes&, const Shape& rows, const Shape& probs,
                                                             const Shape&, const Shape&, const Shape&, const Shape& d_out,
                                                             const Shape&, const Shape&) {
  return {rows, probs, d_out};
}

std::vector<paddle::DataType> unpermute_weighted_double_backward_dtypes(const paddle::DataType& rows,
                                                                        const paddle::DataType& probs, const paddle::DataType&,
                                                                        const paddle::DataType&, const paddle::DataType&,
                                                                        const paddle::DataType& d_out, const paddle::DataType&,
                                                                        const paddle::DataType&) {
  return {rows, probs, d_out};
}

}  // namespace

PD_BUILD_OP(pmo_unpermute)
    .Inputs({"rows", "token_rows", "row_to_token"})
    .Outputs({"out"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_dtypes));
PMO_DIRECT(unpermute, unpermute);
PMO_QUICK(unpermute, quick_unpermute, fits);

PD_BUILD_GRAD_OP(pmo_unpermute)
    .Inputs({"token_rows", "row_to_token", paddle::Grad("out")})
    .Outputs({paddle::Grad("rows")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_unpermute)
    .Inputs({"token_rows", "row_to_token", paddle::Grad(paddle::Grad("rows"))})
    .Outputs({paddle::Grad(paddle::Grad("out"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_backward_dtypes));

PD_BUILD_OP(pmo_unpermute_weighted)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot"})
    .Outputs({"out"})
    .Attrs(WeightedAttributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_weighted))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_weighted_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_weighted_dtypes));
PMO_DIRECT(unpermute_weighted, unpermute_weighted);
PMO_QUICK(unpermute_weighted, quick_unpermute_weighted, fits_weighted);

// The gradient as an operator of its own, for callers that write their backward passes themselves.
PD_BUILD_OP(pmo_unpermute_weighted_backward)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot", "d_out"})
    .Outputs({"d_rows", "d_probs"})
    .Attrs(WeightedAttributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_weighted_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_weighted_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_weighted_backward_dtypes));
PMO_DIRECT(unpermute_weighted_backward, unpermute_weighted_backward);

PD_BUILD_GRAD_OP(pmo_unpermute_weighted)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot", paddle::Grad("out")})
    .Outputs({paddle::Grad("rows"), paddle::Grad("probs")})
    .Attrs(WeightedAttributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_weighted_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_weighted_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_weighted_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_unpermute_weighted)
    .Inputs({"rows", "probs", "token_rows", "row_to_token", "row_to_slot", paddle::Grad("out"),
             paddle::Grad(paddle::Grad("rows")), paddle::Grad(paddle::Grad("probs"))})
    .Outputs({paddle::Grad("rows"), paddle::Grad("probs"), paddle::Grad(paddle::Grad("out"))})
    .Attrs(WeightedAttributes::names())
    .SetKernelFn(PMO_KERNEL(unpermute_weighted_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(unpermute_weighted_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(unpermute_weighted_double_backward_dtypes));
