// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// grouped_product: groups of rows, each times its own matrix; paddle/grouped.h chooses the implementation.
#include "paddle/direct.h"
#include "paddle/grouped.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "grouped_gemm";

// follow: the groups are contiguous, and offsets are not read. wide: the result is float32 for any dtype of x.
PMO_ATTRIBUTES(Attributes, (bool, transpose, transpose), (bool, follow, follow), (bool, wide, wide), (bool, need_x_grad, x_grad),
               (bool, need_w_grad, w_grad));

paddle::DataType product_dtype(const Attributes& a, paddle::DataType x) { return a.wide ? paddle::DataType::FLOAT32 : x; }

// The operands of a call, checked.
class Product {
 public:
  Product(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices, const paddle::Tensor& sizes,
          const paddle::Tensor& offsets)
      : target_(kFunction, {&x, &matrices}),
        a_(a),
        x_(x),
        matrices_(matrices),
        groups_(checked(target_, a, x, matrices, sizes, offsets), kFunction, sizes, a.follow ? nullptr : &offsets,
                dim(x.shape(), 0)) {}

  // Grouped GEMM of rows [M, D] with matrices like those of the call; `back`: of rows [M, N] with transposed matrices (dgrad)
  paddle::Tensor gemm(const paddle::Tensor& rows, const paddle::Tensor& matrices, paddle::DataType dtype,
                      bool back = false) const {
    return groups_.gemm(rows, matrices, a_.transpose != back, dtype);
  }

  // Wgrad, in the shape of the matrices: sums over the rows of each group.
  paddle::Tensor wgrad(const paddle::Tensor& rows, const paddle::Tensor& gradients) const {
    return a_.transpose ? groups_.wgrad(gradients, rows, matrices_.dtype()) : groups_.wgrad(rows, gradients, matrices_.dtype());
  }

  const Target& target() const { return target_; }
  paddle::DataType dtype() const { return product_dtype(a_, x_.dtype()); }
  Shape shape() const { return {groups_.num_rows(), MatrixSizes(matrices_.shape(), a_.transpose).outer}; }
  paddle::Tensor zeros_like(const paddle::Tensor& tensor) const { return target_.zeros(tensor.shape(), tensor.dtype()); }
  paddle::Tensor zeros() const { return target_.zeros(shape(), dtype()); }

 private:
  static const Target& checked(const Target& target, const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                               const paddle::Tensor& sizes, const paddle::Tensor& offsets) {
    require(sizes.defined() && offsets.defined(), kFunction, "a required tensor is missing");
    require(is_summed(x), kFunction, "X must be float32, float16 or bfloat16");
    require_dtype(matrices, x.dtype(), kFunction, "W");
    require_rank(matrices, 3, kFunction, "W");
    require_shape(x, {-1, MatrixSizes(matrices.shape(), a.transpose).inner}, kFunction, "X");
    require_shape(sizes, {matrices.shape()[0]}, kFunction, "m_sizes");
    index_kind(sizes, kFunction, "m_sizes");
    if (!a.follow) {
      require_rank(offsets, 1, kFunction, "expert_offsets");
      index_kind(offsets, kFunction, "expert_offsets");
      require(offsets.shape()[0] >= matrices.shape()[0], kFunction,
              "expert_offsets must have one entry for each expert at least");
    }
    return target;
  }

  const Target target_;
  const Attributes& a_;
  const paddle::Tensor &x_, &matrices_;
  const Grouped groups_;
};

Outputs grouped_product(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices, const paddle::Tensor& sizes,
                        const paddle::Tensor& offsets) {
  const Product call(a, x, matrices, sizes, offsets);
  return {call.gemm(x, matrices, call.dtype())};
}

std::vector<Shape> grouped_product_shapes(const Attributes& a, const Shape& x, const Shape& matrices, const Shape&,
                                          const Shape&) {
  return {{dim(x, 0), MatrixSizes(matrices, a.transpose).outer}};
}

std::vector<paddle::DataType> grouped_product_dtypes(const Attributes& a, const paddle::DataType& x, const paddle::DataType&,
                                                     const paddle::DataType&, const paddle::DataType&) {
  return {product_dtype(a, x)};
}

Outputs grouped_product_backward(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                                 const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& d_out) {
  const Product call(a, x, matrices, sizes, offsets);
  require_gradient(d_out, call.shape(), call.dtype(), kFunction, "the gradient of the product");
  without_gradient({&sizes, &offsets});
  const bool has_d_out = d_out.initialized();
  return {a.need_x_grad && has_d_out ? call.gemm(d_out, matrices, x.dtype(), true) : call.zeros_like(x),
          a.need_w_grad && has_d_out ? call.wgrad(x, d_out) : call.zeros_like(matrices)};
}

// dgrad and wgrad of a product by themselves, for calls that compute wgrad later. The groups are those of `grouped_product`.
Outputs grouped_dgrad(const paddle::Tensor& d_out, const paddle::Tensor& matrices, const paddle::Tensor& sizes,
                      const paddle::Tensor& offsets, bool transpose, bool follow) {
  require_rank(matrices, 3, kFunction, "W");
  require_shape(d_out, {-1, MatrixSizes(matrices.shape(), transpose).outer}, kFunction, "the gradient of the product");
  require_shape(sizes, {matrices.shape()[0]}, kFunction, "m_sizes");
  const Target target(kFunction, {&d_out, &matrices});
  const Grouped groups(target, kFunction, sizes, follow ? nullptr : &offsets, d_out.shape()[0]);
  return {groups.gemm(d_out, matrices, !transpose, matrices.dtype())};
}

Outputs grouped_wgrad(const paddle::Tensor& x, const paddle::Tensor& d_out, const paddle::Tensor& sizes,
                      const paddle::Tensor& offsets, bool transpose, bool follow) {
  require_rank(x, 2, kFunction, "X");
  require_shape(d_out, {x.shape()[0], -1}, kFunction, "the gradient of the product");
  require_rank(sizes, 1, kFunction, "m_sizes");
  const Target target(kFunction, {&x, &d_out});
  const Grouped groups(target, kFunction, sizes, follow ? nullptr : &offsets, x.shape()[0]);
  return {transpose ? groups.wgrad(d_out, x, x.dtype()) : groups.wgrad(x, d_out, x.dtype())};
}

std::vector<Shape> grouped_product_backward_shapes(const Attributes&, const Shape& x, const Shape& matrices, const Shape&,
                                                   const Shape&, const Shape&) {
  return {x, matrices};
}

std::vector<paddle::DataType> grouped_product_backward_dtypes(const paddle::DataType& x, const paddle::DataType& matrices,
                                                              const paddle::DataType&, const paddle::DataType&,
                                                              const paddle::DataType&) {
  return {x, matrices};
}

Outputs grouped_product_double_backward(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                                        const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& d_out,
                                        const paddle::Tensor& dd_x, const paddle::Tensor& dd_w) {
  const Product call(a, x, matrices, sizes, offsets);
  require_gradient(d_out, call.shape(), call.dtype(), kFunction, "the gradient of the product");
  require_gradient(dd_x, x.shape(), x.dtype(), kFunction, "the gradient of the gradient of x");
  require_gradient(dd_w, matrices.shape(), x.dtype(), kFunction, "the gradient of the gradient of the matrices");
  without_gradient({&sizes, &offsets});
  const bool by_x = a.need_x_grad && dd_x.initialized(), by_w = a.need_w_grad && dd_w.initialized();
  paddle::Tensor d_x = by_w ? call.gemm(d_out, dd_w, x.dtype(), true) : call.zeros_like(x);
  paddle::Tensor d_w = by_x ? call.wgrad(dd_x, d_out) : call.zeros_like(matrices);
  if (!by_x && !by_w) return {d_x, d_w, call.zeros()};
  if (!by_x) return {d_x, d_w, call.gemm(x, dd_w, call.dtype())};
  if (!by_w) return {d_x, d_w, call.gemm(dd_x, matrices, call.dtype())};
  // Paddle's CPU add does not support 16-bit floats.
  const auto wide = paddle::DataType::FLOAT32;
  const paddle::Tensor d_out_sum = paddle::add(call.gemm(dd_x, matrices, wide), call.gemm(x, dd_w, wide));
  return {d_x, d_w, in_dtype(call.target(), d_out_sum, call.dtype())};
}

std::vector<Shape> grouped_product_double_backward_shapes(const Attributes&, const Shape& x, const Shape& matrices, const Shape&,
                                                          const Shape&, const Shape& d_out, const Shape&, const Shape&) {
  return {x, matrices, d_out};
}

std::vector<paddle::DataType> grouped_product_double_backward_dtypes(const paddle::DataType& x, const paddle::DataType& matrices,
                                                                     const paddle::DataType&, const paddle::DataType&,
                                                                     const paddle::DataType& d_out, const paddle::DataType&,
                                                                     const paddle::DataType&) {
  return {x, matrices, d_out};
}

}  // namespace

PD_BUILD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "sizes", "offsets"})
    .Outputs({"out"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_dtypes));
PMO_DIRECT(grouped_product, grouped_product);
PMO_DIRECT(grouped_dgrad, grouped_dgrad);
PMO_DIRECT(grouped_wgrad, grouped_wgrad);

PD_BUILD_GRAD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "sizes", "offsets", paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("matrices")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "sizes", "offsets", paddle::Grad("out"), paddle::Grad(paddle::Grad("x")),
             paddle::Grad(paddle::Grad("matrices"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("matrices"), paddle::Grad(paddle::Grad("out"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_double_backward_dtypes));
