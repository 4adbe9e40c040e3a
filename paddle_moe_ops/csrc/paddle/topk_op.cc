// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// calculate_topk: the experts of each token and their weights from a router's logits.
#include "paddle/binding.h"
#include "paddle/direct.h"
#include "pmo/topk.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "calculate_topk";

const Names kNames = {{"topk", "top_k"}};

// Attributes of the operator, in their order.
struct Router {
  int64_t top_k;
  bool use_sigmoid, renormalize, pre_act;
  float scaling_factor;

  template <typename Params>
  void describe(const Matrix& gating, Params* params) const {
    const Shape shape = gating.tensor.shape();
    params->struct_size = sizeof(Params);
    params->num_tokens = shape[0];
    params->topk = top_k;
    params->num_experts = shape[1];
    params->gating = gating.data;
    params->gating_row_stride = gating.row_stride;
    params->dtype = dtype_of(gating.tensor, kFunction, "gating");
    params->use_sigmoid = use_sigmoid;
    params->pre_act = pre_act;
    params->renormalize = renormalize;
    params->scaling_factor = scaling_factor;
  }
};

Outputs topk(const paddle::Tensor& gating, const paddle::optional<paddle::Tensor>& correction_bias, int64_t top_k,
             bool use_sigmoid, bool renormalize, bool pre_act, int64_t num_groups, int64_t topk_groups, int64_t scores_per_group,
             float scaling_factor, bool return_scores) {
  const paddle::Tensor* bias = correction_bias ? &*correction_bias : nullptr;
  const Target target(kFunction, {&gating}, {bias});
  require_rank(gating, 2, kFunction, "gating");
  // experts in [1, 2^16] bound what a bad number of slots can ask for
  require(top_k >= 1 && top_k <= gating.shape()[1], kFunction, "top_k must be at least 1 and at most the number of experts");
  const Matrix logits(gating);
  pmo_topk_params p = {};
  Router{top_k, use_sigmoid, renormalize, pre_act, scaling_factor}.describe(logits, &p);
  p.num_groups = num_groups;
  p.topk_groups = topk_groups;
  p.scores_per_group = scores_per_group;
  paddle::Tensor bias_values;
  if (bias != nullptr) {
    require_dtype(*bias, paddle::DataType::FLOAT32, kFunction, "correction_bias");
    require_shape(*bias, {p.num_experts}, kFunction, "correction_bias");
    bias_values = dense(*bias);
    p.correction_bias = bias_values.data<float>();
  }
  const Shape slots = {p.num_tokens, top_k};
  paddle::Tensor weights = paddle::empty(slots, gating.dtype(), target.place());
  paddle::Tensor ids = paddle::empty(slots, paddle::DataType::INT64, target.place());
  paddle::Tensor scores = paddle::empty(return_scores ? gating.shape() : Shape{0}, gating.dtype(), target.place());
  p.weights = weights.data();
  p.ids = ids.data<int64_t>();
  p.scores = return_scores ? scores.data() : nullptr;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) p.workspace_bytes = pmo_topk_cuda_workspace_bytes(&p);
#endif
  paddle::Tensor workspace = paddle::empty({p.workspace_bytes}, paddle::DataType::UINT8, target.place());
  p.workspace = workspace.data();
  check_status(PMO_CALL(target, topk, &p), kFunction, kNames);
  return {weights, ids, scores};
}

std::vector<Shape> topk_shapes(const Shape& gating, const paddle::optional<Shape>&, int64_t top_k, bool, bool, bool, int64_t,
                               int64_t, int64_t, float, bool return_scores) {
  const Shape slots = {dim(gating, 0), top_k};
  return {slots, slots, return_scores ? gating : Shape{0}};
}

std::vector<paddle::DataType> topk_dtypes(const paddle::DataType& gating, const paddle::optional<paddle::DataType>&) {
  return {gating, paddle::DataType::INT64, gating};
}

// The data of a gradient that may not be there.
const void* gradient_data(const paddle::Tensor& gradient, paddle::Tensor* holder) {
  if (!gradient.initialized()) return nullptr;
  *holder = dense(gradient);
  return holder->data();
}

Outputs topk_backward(const paddle::Tensor& gating, const paddle::Tensor& ids, const paddle::Tensor& d_weights,
                      const paddle::Tensor& d_scores, int64_t top_k, bool use_sigmoid, bool renormalize, bool pre_act, int64_t,
                      int64_t, int64_t, float scaling_factor, bool return_scores) {
  const Target target(kFunction, {&gating, &ids}, {&d_weights, &d_scores});
  require_gradient(d_weights, {gating.shape()[0], top_k}, gating.dtype(), kFunction, "the gradient of the weights");
  require_gradient(d_scores, return_scores ? gating.shape() : Shape{0}, gating.dtype(), kFunction, "the gradient of the scores");
  without_gradient({&ids});
  const Matrix logits(gating);
  pmo_topk_backward_params p = {};
  Router{top_k, use_sigmoid, renormalize, pre_act, scaling_factor}.describe(logits, &p);
  const paddle::Tensor dense_ids = dense(ids);
  paddle::Tensor weight_values, score_values;
  paddle::Tensor d_gating = paddle::empty(gating.shape(), gating.dtype(), target.place());
  p.ids = dense_ids.data<int64_t>();
  p.d_weights = gradient_data(d_weights, &weight_values);
  p.d_scores = gradient_data(d_scores, &score_values);
  p.d_gating = d_gating.data();
  check_status(PMO_CALL(target, topk_backward, &p), kFunction, kNames);
  return {d_gating};
}

std::vector<Shape> topk_backward_shapes(const Shape& gating, const Shape&, const Shape&, const Shape&, int64_t, bool, bool, bool,
                                        int64_t, int64_t, int64_t, float, bool) {
  return {gating};
}

std::vector<paddle::DataType> topk_backward_dtypes(const paddle::DataType& gating, const paddle::DataType&,
                                                   const paddle::DataType&, const paddle::DataType&) {
  return {gating};
}

Outputs topk_double_backward(const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                             const paddle::Tensor&, int64_t, bool, bool, bool, int64_t, int64_t, int64_t, float, bool) {
  fail_second_order(kFunction, "; detach the weights and scores, or gating, where first-order ones are enough");
}

std::vector<Shape> topk_double_backward_shapes(const Shape& gating, const Shape&, const Shape& d_weights, const Shape& d_scores,
                                               const Shape&, int64_t, bool, bool, bool, int64_t, int64_t, int64_t, float, bool) {
  return {gating, d_weights, d_scores};
}

std::vector<paddle::DataType> topk_double_backward_dtypes(const paddle::DataType& gating, const paddle::DataType&,
                                                          const paddle::DataType&, const paddle::DataType&,
                                                          const paddle::DataType&) {
  return {gating, gating, gating};
}

// The gradient's shape inference gets the attributes of the forward operator, so both declare the same list.
std::vector<std::string> attributes() {
  return {"top_k: int64_t",  "sigmoid: bool",  "renorm: bool",  "pre_act: bool", "groups: int64_t",
          "topk_g: int64_t", "per_g: int64_t", "factor: float", "scored: bool"};
}

}  // namespace

PD_BUILD_OP(pmo_calculate_topk)
    .Inputs({"gating", paddle::Optional("bias")})
    .Outputs({"weights", "ids", "scores"})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(topk))
    .SetInferShapeFn(PD_INFER_SHAPE(topk_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(topk_dtypes));
PMO_DIRECT(calculate_topk, topk);

PD_BUILD_GRAD_OP(pmo_calculate_topk)
    .Inputs({"gating", "ids", paddle::Grad("weights"), paddle::Grad("scores")})
    .Outputs({paddle::Grad("gating")})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(topk_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(topk_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(topk_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_calculate_topk)
    .Inputs({"gating", "ids", paddle::Grad("weights"), paddle::Grad("scores"), paddle::Grad(paddle::Grad("gating"))})
    .Outputs({paddle::Grad("gating"), paddle::Grad(paddle::Grad("weights")), paddle::Grad(paddle::Grad("scores"))})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(topk_double_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(topk_double_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(topk_double_backward_dtypes));
