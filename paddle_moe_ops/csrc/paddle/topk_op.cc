// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// calculate_topk: the experts of each token and their weights from a router's logits.
#include "paddle/binding.h"
#include "paddle/direct.h"
#include "pmo/topk.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "calculate_topk";

PMO_ATTRIBUTES(Attributes, (int64_t, top_k, top_k), (bool, use_sigmoid, sigmoid), (bool, renormalize, renorm),
               (bool, pre_act, pre_act), (int64_t, num_groups, groups), (int64_t, topk_groups, topk_g),
               (int64_t, scores_per_group, per_g), (float, scaling_factor, factor), (bool, return_scores, scored));

const Names kNames = {{"topk", "top_k"}};

// The params common to the operator and its gradient.
template <typename Params>
Params params_of(const Attributes& a, const Matrix& gating) {
  const Shape shape = gating.tensor.shape();
  Params params = {};
  params.struct_size = sizeof(Params);
  params.num_tokens = shape[0];
  params.topk = a.top_k;
  params.num_experts = shape[1];
  params.gating = gating.data;
  params.gating_row_stride = gating.row_stride;
  params.dtype = dtype_of(gating.tensor, kFunction, "gating");
  params.use_sigmoid = a.use_sigmoid;
  params.pre_act = a.pre_act;
  params.renormalize = a.renormalize;
  params.scaling_factor = a.scaling_factor;
  return params;
}

Outputs topk(const Attributes& a, const paddle::Tensor& gating, const paddle::optional<paddle::Tensor>& correction_bias) {
  const paddle::Tensor* bias = correction_bias ? &*correction_bias : nullptr;
  const Target target(kFunction, {&gating}, {bias});
  require_rank(gating, 2, kFunction, "gating");
  // the number of experts, in [1, 2^16], bounds the allocation for a bad number of slots
  require(a.top_k >= 1 && a.top_k <= gating.shape()[1], kFunction, "top_k must be at least 1 and at most the number of experts");
  const Matrix logits(gating);
  auto p = params_of<pmo_topk_params>(a, logits);
  p.num_groups = a.num_groups;
  p.topk_groups = a.topk_groups;
  p.scores_per_group = a.scores_per_group;
  paddle::Tensor bias_values;
  if (bias != nullptr) {
    require_dtype(*bias, paddle::DataType::FLOAT32, kFunction, "correction_bias");
    require_shape(*bias, {p.num_experts}, kFunction, "correction_bias");
    bias_values = dense(*bias);
    p.correction_bias = bias_values.data<float>();
  }
  const Shape slots = {p.num_tokens, a.top_k};
  paddle::Tensor weights = target.empty(slots, gating.dtype());
  paddle::Tensor ids = target.empty(slots, paddle::DataType::INT64);
  paddle::Tensor scores = target.empty(a.return_scores ? gating.shape() : Shape{0}, gating.dtype());
  p.weights = weights.data();
  p.ids = ids.data<int64_t>();
  p.scores = a.return_scores ? scores.data() : nullptr;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) p.workspace_bytes = pmo_topk_cuda_workspace_bytes(&p);
#endif
  paddle::Tensor workspace = target.empty({p.workspace_bytes}, paddle::DataType::UINT8);
  p.workspace = workspace.data();
  check_status(PMO_CALL(target, topk, &p), kFunction, kNames);
  return {weights, ids, scores};
}

std::vector<Shape> topk_shapes(const Attributes& a, const Shape& gating, const paddle::optional<Shape>&) {
  const Shape slots = {dim(gating, 0), a.top_k};
  return {slots, slots, a.return_scores ? gating : Shape{0}};
}

std::vector<paddle::DataType> topk_dtypes(const paddle::DataType& gating, const paddle::optional<paddle::DataType>&) {
  return {gating, paddle::DataType::INT64, gating};
}

// The data of a gradient, null if that is undefined.
const void* gradient_data(const paddle::Tensor& gradient, paddle::Tensor* holder) {
  if (!gradient.initialized()) return nullptr;
  *holder = dense(gradient);
  return holder->data();
}

Outputs topk_backward(const Attributes& a, const paddle::Tensor& gating, const paddle::Tensor& ids,
                      const paddle::Tensor& d_weights, const paddle::Tensor& d_scores) {
  const Target target(kFunction, {&gating, &ids}, {&d_weights, &d_scores});
  require_gradient(d_weights, {gating.shape()[0], a.top_k}, gating.dtype(), kFunction, "the gradient of the weights");
  require_gradient(d_scores, a.return_scores ? gating.shape() : Shape{0}, gating.dtype(), kFunction,
                   "the gradient of the scores");
  without_gradient({&ids});
  const Matrix logits(gating);
  auto p = params_of<pmo_topk_backward_params>(a, logits);
  const paddle::Tensor dense_ids = dense(ids);
  paddle::Tensor weight_values, score_values;
  paddle::Tensor d_gating = target.empty(gating.shape(), gating.dtype());
  p.ids = dense_ids.data<int64_t>();
  p.d_weights = gradient_data(d_weights, &weight_values);
  p.d_scores = gradient_data(d_scores, &score_values);
  p.d_gating = d_gating.data();
  check_status(PMO_CALL(target, topk_backward, &p), kFunction, kNames);
  return {d_gating};
}

std::vector<Shape> topk_backward_shapes(const Attributes&, const Shape& gating, const Shape&, const Shape&, const Shape&) {
  return {gating};
}

std::vector<paddle::DataType> topk_backward_dtypes(const paddle::DataType& gating, const paddle::DataType&,
                                                   const paddle::DataType&, const paddle::DataType&) {
  return {gating};
}

Outputs topk_double_backward(const Attributes&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                             const paddle::Tensor&, const paddle::Tensor&) {
  fail_second_order(kFunction, "; detach the weights and scores, or gating, where first-order ones are enough");
}

std::vector<Shape> topk_double_backward_shapes(const Attributes&, const Shape& gating, const Shape&, const Shape& d_weights,
                                               const Shape& d_scores, const Shape&) {
  return {gating, d_weights, d_scores};
}

std::vector<paddle::DataType> topk_double_backward_dtypes(const paddle::DataType& gating, const paddle::DataType&,
                                                          const paddle::DataType&, const paddle::DataType&,
                                                          const paddle::DataType&) {
  return {gating, gating, gating};
}

}  // namespace

PD_BUILD_OP(pmo_calculate_topk)
    .Inputs({"gating", paddle::Optional("bias")})
    .Outputs({"weights", "ids", "scores"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(topk))
    .SetInferShapeFn(PMO_INFER_SHAPE(topk_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(topk_dtypes));
PMO_DIRECT(calculate_topk, topk);

PD_BUILD_GRAD_OP(pmo_calculate_topk)
    .Inputs({"gating", "ids", paddle::Grad("weights"), paddle::Grad("scores")})
    .Outputs({paddle::Grad("gating")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(topk_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(topk_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(topk_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_calculate_topk)
    .Inputs({"gating", "ids", paddle::Grad("weights"), paddle::Grad("scores"), paddle::Grad(paddle::Grad("gating"))})
    .Outputs({paddle::Grad("gating"), paddle::Grad(paddle::Grad("weights")), paddle::Grad(paddle::Grad("scores"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(topk_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(topk_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(topk_double_backward_dtypes));
