// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// grouped_product: groups of rows, each times a matrix of its own, in host memory. Every product is Paddle's matmul, as in a loop in Python,
// but is written where it belongs: the gradient of the matrices is never put together from parts, and its memory, which is new to the process
// at every pass, comes in large pages.
#include <cstring>

#include "paddle/direct.h"
#include "paddle/pages.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "grouped_gemm";

PMO_ATTRIBUTES(Attributes, (bool, transpose, transpose), (bool, need_x_grad, x_grad), (bool, need_w_grad, w_grad));

paddle::Tensor view(const float* data, int64_t rows, int64_t columns) {
  return paddle::from_blob(const_cast<float*>(data), {rows, columns}, paddle::DataType::FLOAT32, phi::DataLayout::NCHW,
                           paddle::CPUPlace());
}

// Paddle's matmul, written to memory that is there; releases that cannot do that make a tensor, which is copied.
template <typename Tensor>
auto matmul_into(const Tensor& x, const Tensor& y, bool transpose_x, bool transpose_y, Tensor* out, int)
    -> decltype(paddle::matmul(x, y, transpose_x, transpose_y, paddle::optional<Tensor*>(out)), void()) {
  paddle::matmul(x, y, transpose_x, transpose_y, paddle::optional<Tensor*>(out));
}
template <typename Tensor>
void matmul_into(const Tensor& x, const Tensor& y, bool transpose_x, bool transpose_y, Tensor* out, long) {
  const Tensor made = paddle::matmul(x, y, transpose_x, transpose_y);
  std::memcpy(out->data(), made.data(), static_cast<size_t>(made.numel()) * sizeof(float));
}

// Rows in groups, and the size of what they are multiplied with.
class Groups {
 public:
  Groups(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices, const paddle::Tensor& borders)
      : target_(kFunction, {&x, &matrices, &borders}), transpose_(a.transpose) {
    if (target_.is_gpu()) fail(std::string(kFunction) + ": every tensor must be " + "in host memory");
    require_dtype(x, paddle::DataType::FLOAT32, kFunction, "x");
    require_dtype(matrices, paddle::DataType::FLOAT32, kFunction, "matrices");
    require_rank(x, 2, kFunction, "x");
    require_rank(matrices, 3, kFunction, "matrices");
    num_rows = x.shape()[0];
    experts = matrices.shape()[0];
    inner = matrices.shape()[transpose_ ? 2 : 1];
    outer = matrices.shape()[transpose_ ? 1 : 2];
    require_shape(x, {num_rows, inner}, kFunction, "x");
    require_shape(borders, {experts, 2}, kFunction, "borders");
    borders_ = require_host_integers(target_, dense(borders), kFunction, "borders");
    int64_t before = 0;
    for (const int64_t border : borders_) {
      require(border >= before && border <= num_rows, kFunction, "borders must ascend from 0 to the number of rows");
      before = border;
    }
  }

  // [num_rows, outer], or [num_rows, inner] with `back`: each row times the matrix of its group, or times the transposed one.
  paddle::Tensor product(const paddle::Tensor& rows, const paddle::Tensor& matrices, bool back) const {
    const int64_t from = back ? outer : inner, to = back ? inner : outer;
    const paddle::Tensor source = dense(rows), factors = dense(matrices);
    paddle::Tensor out = paddle::empty({num_rows, to}, paddle::DataType::FLOAT32, target_.place());
    prepare_pages(target_, out);
    float* const to_rows = data_of(out);
    int64_t made = 0;
    each([&](int64_t expert, int64_t begin, int64_t end) {
      fill_with_zeros(to_rows + made * to, (begin - made) * to);
      made = end;
      if (begin == end) return;
      if (from == 0) {
        fill_with_zeros(to_rows + begin * to, (end - begin) * to);
        return;
      }
      paddle::Tensor part = view(to_rows + begin * to, end - begin, to);
      matmul_into(view(source.data<float>() + begin * from, end - begin, from), matrix(factors, expert), false,
                  transpose_ != back, &part, 0);
    });
    fill_with_zeros(to_rows + made * to, (num_rows - made) * to);
    return out;
  }

  // Of the shape of the matrices: the sum over the rows of each group of the products of their columns, of rows and of gradients.
  paddle::Tensor outer_products(const paddle::Tensor& rows, const paddle::Tensor& gradients) const {
    const paddle::Tensor x = dense(rows), d_out = dense(gradients);
    const int64_t height = transpose_ ? outer : inner, width = transpose_ ? inner : outer;
    paddle::Tensor out = paddle::empty({experts, height, width}, paddle::DataType::FLOAT32, target_.place());
    prepare_pages(target_, out);
    each([&](int64_t expert, int64_t begin, int64_t end) {
      float* const to_matrix = data_of(out) + expert * height * width;
      if (begin == end) {
        fill_with_zeros(to_matrix, height * width);
        return;
      }
      if (height * width == 0) return;
      paddle::Tensor part = view(to_matrix, height, width);
      const paddle::Tensor of_x = view(x.data<float>() + begin * inner, end - begin, inner);
      const paddle::Tensor of_d_out = view(d_out.data<float>() + begin * outer, end - begin, outer);
      matmul_into(transpose_ ? of_d_out : of_x, transpose_ ? of_x : of_d_out, true, false, &part, 0);
    });
    return out;
  }

  paddle::Tensor zeros(const Shape& shape) const { return target_.zeros(shape, paddle::DataType::FLOAT32); }

  int64_t num_rows, experts, inner, outer;

 private:
  template <typename Function>
  void each(const Function& function) const {
    for (int64_t expert = 0; expert < experts; ++expert) function(expert, borders_[2 * expert], borders_[2 * expert + 1]);
  }

  paddle::Tensor matrix(const paddle::Tensor& matrices, int64_t expert) const {
    const int64_t height = transpose_ ? outer : inner, width = transpose_ ? inner : outer;
    return view(matrices.data<float>() + expert * height * width, height, width);
  }

  static float* data_of(paddle::Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.data<float>(); }
  static void fill_with_zeros(float* data, int64_t count) {
    if (count > 0) std::memset(data, 0, static_cast<size_t>(count) * sizeof(float));
  }

  const Target target_;
  const bool transpose_;
  std::vector<int64_t> borders_;
};

Outputs grouped_product(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                        const paddle::Tensor& borders) {
  return {Groups(a, x, matrices, borders).product(x, matrices, false)};
}

std::vector<Shape> grouped_product_shapes(const Attributes& a, const Shape& x, const Shape& matrices, const Shape&) {
  return {{dim(x, 0), dim(matrices, a.transpose ? 1 : 2)}};
}

std::vector<paddle::DataType> grouped_product_dtypes(const paddle::DataType& x, const paddle::DataType&,
                                                     const paddle::DataType&) {
  return {x};
}

Outputs grouped_product_backward(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                                 const paddle::Tensor& borders, const paddle::Tensor& d_out) {
  const Groups groups(a, x, matrices, borders);
  require_gradient(d_out, {groups.num_rows, groups.outer}, x.dtype(), kFunction, "the gradient of the product");
  without_gradient({&borders});
  const bool is_there = d_out.initialized();
  return {a.need_x_grad && is_there ? groups.product(d_out, matrices, true) : groups.zeros(x.shape()),
          a.need_w_grad && is_there ? groups.outer_products(x, d_out) : groups.zeros(matrices.shape())};
}

std::vector<Shape> grouped_product_backward_shapes(const Attributes&, const Shape& x, const Shape& matrices, const Shape&,
                                                   const Shape&) {
  return {x, matrices};
}

std::vector<paddle::DataType> grouped_product_backward_dtypes(const paddle::DataType& x, const paddle::DataType& matrices,
                                                              const paddle::DataType&, const paddle::DataType&) {
  return {x, matrices};
}

Outputs grouped_product_double_backward(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& matrices,
                                        const paddle::Tensor& borders, const paddle::Tensor& d_out, const paddle::Tensor& dd_x,
                                        const paddle::Tensor& dd_w) {
  const Groups groups(a, x, matrices, borders);
  require_gradient(d_out, {groups.num_rows, groups.outer}, x.dtype(), kFunction, "the gradient of the product");
  require_gradient(dd_x, x.shape(), x.dtype(), kFunction, "the gradient of the gradient of x");
  require_gradient(dd_w, matrices.shape(), x.dtype(), kFunction, "the gradient of the gradient of the matrices");
  without_gradient({&borders});
  const bool by_x = a.need_x_grad && dd_x.initialized(), by_w = a.need_w_grad && dd_w.initialized();
  paddle::Tensor d_x = by_w ? groups.product(d_out, dd_w, true) : groups.zeros(x.shape());
  paddle::Tensor d_w = by_x ? groups.outer_products(dd_x, d_out) : groups.zeros(matrices.shape());
  if (!by_x && !by_w) return {d_x, d_w, groups.zeros({groups.num_rows, groups.outer})};
  if (!by_x) return {d_x, d_w, groups.product(x, dd_w, false)};
  paddle::Tensor dd_out = groups.product(dd_x, matrices, false);
  return {d_x, d_w, by_w ? paddle::add(dd_out, groups.product(x, dd_w, false)) : dd_out};
}

std::vector<Shape> grouped_product_double_backward_shapes(const Attributes&, const Shape& x, const Shape& matrices, const Shape&,
                                                          const Shape& d_out, const Shape&, const Shape&) {
  return {x, matrices, d_out};
}

std::vector<paddle::DataType> grouped_product_double_backward_dtypes(const paddle::DataType& x, const paddle::DataType& matrices,
                                                                     const paddle::DataType&, const paddle::DataType& d_out,
                                                                     const paddle::DataType&, const paddle::DataType&) {
  return {x, matrices, d_out};
}

}  // namespace

PD_BUILD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "borders"})
    .Outputs({"out"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_dtypes));
PMO_DIRECT(grouped_product, grouped_product);

PD_BUILD_GRAD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "borders", paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("matrices")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_grouped_product)
    .Inputs({"x", "matrices", "borders", paddle::Grad("out"), paddle::Grad(paddle::Grad("x")),
             paddle::Grad(paddle::Grad("matrices"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("matrices"), paddle::Grad(paddle::Grad("out"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(grouped_product_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(grouped_product_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(grouped_product_double_backward_dtypes));
