// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute: rows in token order to rows in expert order, by the maps of a plan.
#include "paddle/direct.h"
#include "paddle/movement.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "permute";

PMO_ATTRIBUTES(Attributes, (int, fill, fill), (bool, has_scale, has_scale), (int64_t, scale_cols, cols),
               (int, scale_dtype, scale_type), (int64_t, hidden, hidden), (int, hidden_dtype, dtype));

// token_rows is an input for the gradient: saved inputs use no memory beyond the plan's.
Outputs permute(const Attributes& a, const paddle::Tensor& x, const paddle::optional<paddle::Tensor>& scale,
                const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token) {
  const Target target(kFunction, {&x, &slot_to_row, &token_rows, &row_to_token}, {scale ? &*scale : nullptr});
  require_rank(x, 2, kFunction, "x");
  require_rank(row_to_token, 1, kFunction, "row_to_token");
  require_described(x, a.hidden, a.hidden_dtype, kFunction);
  require_shape(token_rows, slot_to_row.shape(), kFunction, "token_rows");
  require_dtype(token_rows, paddle::DataType::INT32, kFunction, "token_rows");
  const int64_t num_rows = row_to_token.shape()[0];
  const Scale scales(target, kFunction, scale, a.has_scale, a.scale_cols, a.scale_dtype, x);
  paddle::Tensor rows = target.empty({num_rows, x.shape()[1]}, x.dtype());
  paddle::Tensor row_scales = scales.empty_rows(num_rows, true);
  permute_rows(target, kFunction, x, scales, slot_to_row, row_to_token, a.fill, &rows, &row_scales);
  return {rows, row_scales};
}

bool fits(const paddle::Tensor& x, const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
          const paddle::Tensor& row_to_token) {
  return has_columns(x) && x.dtype() != paddle::DataType::INT32 && dtype_of(x, kFunction, "x") >= 0 &&
         x.shape()[0] == dim(slot_to_row.shape(), 0) && are_on_one_device({&x, &slot_to_row, &token_rows, &row_to_token});
}

// permute without a scale, with zeros in padding rows.
Outputs quick_permute(const paddle::Tensor& x, const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
                      const paddle::Tensor& row_to_token) {
  const Target target(kFunction, {&x, &slot_to_row, &token_rows, &row_to_token});
  require_rank(row_to_token, 1, kFunction, "row_to_token");
  paddle::Tensor rows = target.empty({row_to_token.shape()[0], x.shape()[1]}, x.dtype());
  permute_rows(target, kFunction, x, slot_to_row, row_to_token, &rows);
  return {rows};
}

std::vector<Shape> permute_shapes(const Attributes& a, const Shape& x, const paddle::optional<Shape>& scale, const Shape&,
                                  const Shape&, const Shape& row_to_token) {
  const int64_t rows = dim(row_to_token, 0);
  return {{rows, dim(x, 1)}, scale_rows_shape(scale, a.has_scale, a.scale_cols, rows, true)};
}

std::vector<paddle::DataType> permute_dtypes(const Attributes& a, const paddle::DataType& x,
                                             const paddle::optional<paddle::DataType>&, const paddle::DataType&,
                                             const paddle::DataType&, const paddle::DataType&) {
  return {x, scale_rows_dtype(a.has_scale, a.scale_dtype)};
}

// If only the scales were used, the rows have no gradient, and that of x is zero.
Outputs permute_backward(const Attributes& a, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                         const paddle::Tensor& d_rows) {
  const Target target(kFunction, {&token_rows, &row_to_token}, {&d_rows});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(d_rows, {row_to_token.shape()[0], a.hidden}, dtype, kFunction, "the gradient of the rows");
  without_gradient({&token_rows, &row_to_token});
  if (d_rows.initialized()) return {sum_rows(target, kFunction, d_rows, token_rows, {})};
  return {target.zeros({token_rows.shape()[0], known_width(a.hidden, kFunction)}, dtype)};
}

std::vector<Shape> permute_backward_shapes(const Attributes& a, const Shape& token_rows, const Shape&, const Shape&) {
  return {{dim(token_rows, 0), a.hidden}};
}

std::vector<paddle::DataType> permute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                      const paddle::DataType& d_rows) {
  return {d_rows};
}

// Follows token_rows: slot_to_row may omit rows that the gradient includes.
Outputs permute_double_backward(const Attributes& a, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                                const paddle::Tensor& dd_x) {
  const Target target(kFunction, {&token_rows, &row_to_token, &dd_x});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(dd_x, {token_rows.shape()[0], a.hidden}, dtype, kFunction, "the gradient of the gradient of x");
  return {spread_rows(target, kFunction, dd_x, token_rows, row_to_token)};
}

std::vector<Shape> permute_double_backward_shapes(const Attributes& a, const Shape&, const Shape& row_to_token, const Shape&) {
  return {{dim(row_to_token, 0), a.hidden}};
}

}  // namespace

PD_BUILD_OP(pmo_permute)
    .Inputs({"x", paddle::Optional("scale"), "slot_to_row", "token_rows", "row_to_token"})
    .Outputs({"rows", "row_scales"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(permute))
    .SetInferShapeFn(PMO_INFER_SHAPE(permute_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(permute_dtypes));
PMO_DIRECT(permute, permute);
PMO_QUICK(permute, quick_permute, fits);

PD_BUILD_GRAD_OP(pmo_permute)
    .Inputs({"token_rows", "row_to_token", paddle::Grad("rows")})
    .Outputs({paddle::Grad("x")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(permute_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(permute_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(permute_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_permute)
    .Inputs({"token_rows", "row_to_token", paddle::Grad(paddle::Grad("x"))})
    .Outputs({paddle::Grad(paddle::Grad("rows"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(permute_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(permute_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(permute_backward_dtypes));
