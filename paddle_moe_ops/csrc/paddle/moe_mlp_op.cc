// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp: a layer of SwiGLU experts, whose rows are weighted and added up by token.
//
// T tokens of d columns, M rows, E experts of inner size n. Forward, with H = X W1 by rows:
//
//   rows of X -> H [M, 2n], A = swiglu(H) -> weighted A W2 -> sums of each token's rows
//
// Backward, with dA' the gradient of the weighted A, s A:
//
//   rows of dO -> dA' = dO W2^T;  H, dA' -> dH, s A and ds;  dW2 = (s A)^T dO;  rows of X -> dW1 = X^T dH;  dH W1^T -> sums
//
// Where the kernels of pmo/grouped.h run, SwiGLU and the weights are the ends of products. Elsewhere they are passes of their own, and the
// weights are those of the sum. The gradient of SwiGLU is a pass of its own everywhere. x, the matrices, the weights, the maps and H are kept between the passes; without H the backward
// pass makes it again. Rows of d columns exist for a while, all of them: M d elements.
#include "paddle/direct.h"
#include "paddle/grouped.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "moe_mlp";

PMO_ATTRIBUTES(Attributes, (bool, transpose, transpose), (bool, keep_hidden, keep), (bool, need_x_grad, x_grad),
               (bool, need_gate_up_grad, gate_up_grad), (bool, need_down_grad, down_grad),
               (bool, need_weights_grad, weight_grad));

// The operands of both passes, checked.
class Layer {
 public:
  Layer(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
        const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
        const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor* hidden = nullptr,
        const paddle::Tensor* d_out = nullptr)
      : target_(kFunction, {&x, &gate_up, &down, &weights, &token_rows, &row_to_token}, {hidden, d_out}),
        transpose_(a.transpose),
        x_(x),
        gate_up_(gate_up),
        down_(down),
        weights_(weights),
        token_rows_(token_rows),
        row_to_token_(row_to_token),
        groups_(checked(target_, a, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets), kFunction, sizes,
                &offsets, dim(row_to_token.shape(), 0)),
        owners_(dense(row_to_token)),
        factors_(dense(weights)),
        hidden_size(x.shape()[1]),
        inner(MatrixSizes(down.shape(), a.transpose).inner),
        // the first product and dA' are of these sizes, the others of the same ones turned round
        has_kernels(groups_.has_kernels(x.dtype(), hidden_size, 2 * inner) &&
                    groups_.has_kernels(x.dtype(), hidden_size, inner)) {}

  int64_t num_rows() const { return groups_.num_rows(); }
  const Target& target() const { return target_; }
  const Grouped& groups() const { return groups_; }

  paddle::Tensor new_rows(int64_t columns) const {
    paddle::Tensor rows = paddle::empty({num_rows(), columns}, x_.dtype(), target_.place());
    prepare_pages(target_, rows);
    return rows;
  }

  // The rows of tokens; zeros in rows of none.
  paddle::Tensor rows_of(const paddle::Tensor& tokens) const {
    paddle::Tensor rows = paddle::empty({num_rows(), hidden_size}, x_.dtype(), target_.place());
    permute_rows(target_, kFunction, tokens, token_rows_, row_to_token_, &rows);
    return rows;
  }

  // A, and H if it is given.
  paddle::Tensor activations(paddle::Tensor* hidden) const {
    const paddle::Tensor rows = rows_of(x_);
    paddle::Tensor act = new_rows(inner);
    if (has_kernels) {
      pmo_grouped_product_params p = {};
      p.result = PMO_GROUPED_GATED;
      p.hidden = hidden == nullptr ? nullptr : hidden->data();
      groups_.launch(p, rows, gate_up_, transpose_, &act);
      return act;
    }
    const paddle::Tensor made = groups_.product(rows, gate_up_, transpose_, x_.dtype());
    pmo_swiglu_params p = {};
    p.struct_size = sizeof(p);
    p.num_rows = num_rows();
    p.width = inner;
    p.hidden = made.data();
    p.act = act.data();
    p.dtype = dtype_of(act, kFunction, "x");
    check_status(PMO_CALL(target_, swiglu, &p), kFunction);
    if (hidden != nullptr) *hidden = made;
    return act;
  }

  // The sums of each token's rows of A W2, weighted.
  paddle::Tensor outputs(const paddle::Tensor& act) const {
    Weights weights;
    weights.values = &weights_;
    if (!has_kernels) {
      return sum_rows(target_, kFunction, groups_.product(act, down_, transpose_, x_.dtype()), token_rows_, weights);
    }
    pmo_grouped_product_params p = {};
    p.weights = factors_.data<float>();
    paddle::Tensor rows = new_rows(hidden_size);
    groups_.launch(p, act, down_, transpose_, &rows);
    return sum_rows(target_, kFunction, rows, token_rows_, {});
  }

  // dH in `d_hidden`, and s A; ds if it is given.
  paddle::Tensor activation_gradients(const paddle::Tensor& hidden, const paddle::Tensor& rows_of_d_out, paddle::Tensor* d_hidden,
                                      paddle::Tensor* d_weights) const {
    paddle::Tensor scaled;
    if (has_kernels) {
      scaled = new_rows(inner);
      groups_.launch({}, rows_of_d_out, down_, !transpose_, &scaled);
    } else {
      scaled = groups_.product(rows_of_d_out, down_, !transpose_, x_.dtype());
    }
    paddle::Tensor dot_products = empty_float32({num_rows()}, owners_);
    *d_hidden = new_rows(2 * inner);
    pmo_swiglu_backward_params p = {};
    p.struct_size = sizeof(p);
    p.num_rows = num_rows();
    p.width = inner;
    p.hidden = hidden.data();
    p.row_to_token = owners_.data<int32_t>();
    p.weights = factors_.data<float>();
    p.d_hidden = d_hidden->data();
    p.scaled = scaled.data();
    p.d_weights = dot_products.data<float>();
    p.dtype = dtype_of(scaled, kFunction, "x");
    check_status(PMO_CALL(target_, swiglu_backward, &p), kFunction);
    if (d_weights != nullptr) *d_weights = dot_products;
    return scaled;
  }

  paddle::Tensor d_down(const paddle::Tensor& scaled, const paddle::Tensor& rows_of_d_out) const {
    return transpose_ ? groups_.outer(rows_of_d_out, scaled, x_.dtype()) : groups_.outer(scaled, rows_of_d_out, x_.dtype());
  }

  paddle::Tensor d_gate_up(const paddle::Tensor& d_hidden) const {
    const paddle::Tensor rows = rows_of(x_);
    return transpose_ ? groups_.outer(d_hidden, rows, x_.dtype()) : groups_.outer(rows, d_hidden, x_.dtype());
  }

  paddle::Tensor d_x(const paddle::Tensor& d_hidden) const {
    if (!has_kernels) {
      return sum_rows(target_, kFunction, groups_.product(d_hidden, gate_up_, !transpose_, x_.dtype()), token_rows_, {});
    }
    paddle::Tensor rows = new_rows(hidden_size);
    groups_.launch({}, d_hidden, gate_up_, !transpose_, &rows);
    return sum_rows(target_, kFunction, rows, token_rows_, {});
  }

 private:
  static const Target& checked(const Target& target, const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up,
                               const paddle::Tensor& down, const paddle::Tensor& weights, const paddle::Tensor& token_rows,
                               const paddle::Tensor& row_to_token, const paddle::Tensor& sizes, const paddle::Tensor& offsets) {
    require(sizes.defined() && offsets.defined(), kFunction, "a required tensor is missing");
    require(is_summed(x), kFunction, "x must be float32, float16 or bfloat16");
    require_rank(x, 2, kFunction, "x");
    require_rank(down, 3, kFunction, "down");
    require_dtype(gate_up, x.dtype(), kFunction, "gate_up");
    require_dtype(down, x.dtype(), kFunction, "down");
    const int64_t experts = down.shape()[0], columns = x.shape()[1], inner = MatrixSizes(down.shape(), a.transpose).inner;
    require_shape(down, a.transpose ? Shape{experts, columns, inner} : Shape{experts, inner, columns}, kFunction, "down");
    require_shape(gate_up, a.transpose ? Shape{experts, 2 * inner, columns} : Shape{experts, columns, 2 * inner}, kFunction,
                  "gate_up");
    require_shape(token_rows, {x.shape()[0], -1}, kFunction, "token_rows");
    require_dtype(token_rows, paddle::DataType::INT32, kFunction, "token_rows");
    require_rank(row_to_token, 1, kFunction, "row_to_token");
    require_dtype(row_to_token, paddle::DataType::INT32, kFunction, "row_to_token");
    require_shape(weights, row_to_token.shape(), kFunction, "weights");
    require_dtype(weights, paddle::DataType::FLOAT32, kFunction, "weights");
    require_shape(sizes, {experts}, kFunction, "sizes");
    return target;
  }

  const Target target_;
  const bool transpose_;
  const paddle::Tensor &x_, &gate_up_, &down_, &weights_, &token_rows_, &row_to_token_;
  const Grouped groups_;
  const paddle::Tensor owners_, factors_;

 public:
  const int64_t hidden_size, inner;
  const bool has_kernels;
};

Outputs moe_mlp(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                const paddle::Tensor& sizes, const paddle::Tensor& offsets) {
  const Layer layer(a, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets);
  if (!a.keep_hidden) {
    return {layer.outputs(layer.activations(nullptr)), paddle::empty({0, 2 * layer.inner}, x.dtype(), layer.target().place())};
  }
  paddle::Tensor hidden;
  if (layer.has_kernels) hidden = layer.new_rows(2 * layer.inner);
  const paddle::Tensor act = layer.activations(&hidden);
  if (layer.has_kernels) layer.groups().clear_others(&hidden);  // Paddle may look at the values of what an operator gives
  return {layer.outputs(act), hidden};
}

std::vector<Shape> moe_mlp_shapes(const Attributes& a, const Shape& x, const Shape& gate_up, const Shape&, const Shape&,
                                  const Shape&, const Shape& row_to_token, const Shape&, const Shape&) {
  return {x, {a.keep_hidden ? dim(row_to_token, 0) : 0, MatrixSizes(gate_up, a.transpose).outer}};
}

std::vector<paddle::DataType> moe_mlp_dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&,
                                             const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                             const paddle::DataType&, const paddle::DataType&) {
  return {x, x};
}

Outputs moe_mlp_backward(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                         const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                         const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& hidden,
                         const paddle::Tensor& d_out) {
  const Layer layer(a, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, &hidden, &d_out);
  require_gradient(d_out, x.shape(), x.dtype(), kFunction, "the gradient of the result");
  // A program from a file may give anything for what the forward pass kept.
  require(hidden.defined(), kFunction, "a required tensor is missing");
  require_gradient(hidden, {a.keep_hidden ? layer.num_rows() : 0, 2 * layer.inner}, x.dtype(), kFunction, "hidden");
  without_gradient({&token_rows, &row_to_token, &sizes, &offsets, &hidden});
  const auto zeros_like = [&](const paddle::Tensor& tensor) { return layer.target().zeros(tensor.shape(), tensor.dtype()); };
  Outputs gradients = {{}, {}, {}, {}};
  const bool is_there = d_out.initialized();
  if (is_there) {
    paddle::Tensor kept = hidden, d_hidden;
    if (!a.keep_hidden) {
      if (layer.has_kernels) kept = layer.new_rows(2 * layer.inner);
      layer.activations(&kept);
    }
    kept = dense(kept);
    {
      const paddle::Tensor rows = layer.rows_of(d_out);
      const paddle::Tensor scaled =
          layer.activation_gradients(kept, rows, &d_hidden, a.need_weights_grad ? &gradients[3] : nullptr);
      if (a.need_down_grad) gradients[2] = layer.d_down(scaled, rows);
    }
    if (a.need_gate_up_grad) gradients[1] = layer.d_gate_up(d_hidden);
    if (a.need_x_grad) gradients[0] = layer.d_x(d_hidden);
  }
  const paddle::Tensor* const operands[] = {&x, &gate_up, &down, &weights};
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = zeros_like(*operands[i]);
  }
  return gradients;
}

std::vector<Shape> moe_mlp_backward_shapes(const Attributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                           const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&,
                                           const Shape&, const Shape&) {
  return {x, gate_up, down, weights};
}

std::vector<paddle::DataType> moe_mlp_backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                                      const paddle::DataType& down, const paddle::DataType& weights,
                                                      const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                      const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {x, gate_up, down, weights};
}

Outputs moe_mlp_double_backward(const Attributes&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                                const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                                const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                                const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&) {
  fail_second_order(kFunction, "; detach an operand, where first-order ones are enough");
}

std::vector<Shape> moe_mlp_double_backward_shapes(const Attributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                                  const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&,
                                                  const Shape&, const Shape& d_out, const Shape&, const Shape&, const Shape&,
                                                  const Shape&) {
  return {x, gate_up, down, weights, d_out};
}

std::vector<paddle::DataType> moe_mlp_double_backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                                             const paddle::DataType& down, const paddle::DataType& weights,
                                                             const paddle::DataType&, const paddle::DataType&,
                                                             const paddle::DataType&, const paddle::DataType&,
                                                             const paddle::DataType&, const paddle::DataType& d_out,
                                                             const paddle::DataType&, const paddle::DataType&,
                                                             const paddle::DataType&, const paddle::DataType&) {
  return {x, gate_up, down, weights, d_out};
}

}  // namespace

PD_BUILD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets"})
    .Outputs({"out", "hidden"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_mlp))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_mlp_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_mlp_dtypes));
PMO_DIRECT(moe_mlp, moe_mlp);

PD_BUILD_GRAD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "hidden", paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_mlp_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_mlp_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_mlp_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_mlp)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "hidden", paddle::Grad("out"),
             paddle::Grad(paddle::Grad("x")), paddle::Grad(paddle::Grad("gate_up")), paddle::Grad(paddle::Grad("down")),
             paddle::Grad(paddle::Grad("weights"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights"),
              paddle::Grad(paddle::Grad("out"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_mlp_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_mlp_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_mlp_double_backward_dtypes));
