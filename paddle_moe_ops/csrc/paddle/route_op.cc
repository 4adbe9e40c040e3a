// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// route: a Plan of compact maps from expert ids or a mask. Two operators, with and without probabilities: Paddle treats an
// optional input without elements as missing.
#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/routing.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "route";

PMO_ATTRIBUTES(Attributes, (int64_t, num_experts, num_experts), (int64_t, topk, topk), (int64_t, padding_alignment, align),
               (int, counts_source, source), (std::vector<int>, tokens_per_expert, list), (int64_t, buffer_size, buffer),
               (int, duplicates, duplicates), (int, checks, checks));

Outputs build_plan(const Attributes& a, const paddle::Tensor& routing, const paddle::Tensor* probs,
                   const paddle::optional<paddle::Tensor>& counts) {
  const Target target(kFunction, {&routing}, {probs, counts ? &*counts : nullptr});
  require((routing.dtype() == paddle::DataType::BOOL) == (a.topk >= 0), kFunction,
          "topk must be given with a mask, and only there");
  Routing step(target,
               {kFunction,
                {},
                a.topk,
                a.num_experts,
                a.padding_alignment,
                a.buffer_size,
                a.counts_source,
                a.tokens_per_expert,
                a.duplicates,
                a.checks},
               routing, probs, counts ? &*counts : nullptr);
  const Outputs outputs = step.outputs();
  step.run();
  return outputs;
}

Outputs route(const Attributes& a, const paddle::Tensor& routing, const paddle::optional<paddle::Tensor>& counts) {
  return build_plan(a, routing, nullptr, counts);
}

Outputs route_with_probs(const Attributes& a, const paddle::Tensor& routing, const paddle::Tensor& probs,
                         const paddle::optional<paddle::Tensor>& counts) {
  require(probs.defined(), kFunction, "a required tensor is missing");
  return build_plan(a, routing, &probs, counts);
}

std::vector<Shape> plan_shapes(const Attributes& a, const Shape& routing, bool has_probs) {
  const int64_t rows = static_num_rows(a.counts_source, a.tokens_per_expert, a.padding_alignment, a.buffer_size);
  const Shape slots = {dim(routing, 0), a.topk >= 0 ? a.topk : dim(routing, 1)};
  const Shape experts = {a.num_experts};
  return {slots, slots, {rows}, {rows}, {rows}, {has_probs ? rows : 0}, experts, {a.num_experts + 1}, experts, {}};
}

std::vector<Shape> route_shapes(const Attributes& a, const Shape& routing, const paddle::optional<Shape>&) {
  return plan_shapes(a, routing, false);
}

std::vector<Shape> route_with_probs_shapes(const Attributes& a, const Shape& routing, const Shape&,
                                           const paddle::optional<Shape>&) {
  return plan_shapes(a, routing, true);
}

std::vector<paddle::DataType> plan_dtypes() {
  std::vector<paddle::DataType> dtypes(10, paddle::DataType::INT32);
  dtypes[5] = paddle::DataType::FLOAT32;
  return dtypes;
}

std::vector<paddle::DataType> route_dtypes(const paddle::DataType&, const paddle::optional<paddle::DataType>&) {
  return plan_dtypes();
}

std::vector<paddle::DataType> route_with_probs_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                      const paddle::optional<paddle::DataType>&) {
  return plan_dtypes();
}

// d_probs: the gradient of a row's probability is added to the slot that owns the row, or to (token, expert) for a mask.
Outputs route_with_probs_backward(const Attributes& a, const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_expert,
                                  const paddle::Tensor& d_row_probs) {
  const bool is_mask = a.topk >= 0;
  const Target target(kFunction, {&slot_to_row, &row_to_expert}, {&d_row_probs});
  require_gradient(d_row_probs, row_to_expert.shape(), paddle::DataType::FLOAT32, kFunction, "the gradient of row_probs");
  without_gradient({&slot_to_row, &row_to_expert});
  const Shape shape = {slot_to_row.shape()[0], is_mask ? a.num_experts : slot_to_row.shape()[1]};
  if (!d_row_probs.initialized()) return {target.zeros(shape, paddle::DataType::FLOAT32)};
  return {gather_slots(target, kFunction, slot_to_row, d_row_probs, is_mask ? &row_to_expert : nullptr, a.num_experts)};
}

std::vector<Shape> route_with_probs_backward_shapes(const Attributes& a, const Shape& slot_to_row, const Shape&, const Shape&) {
  return {{dim(slot_to_row, 0), a.topk >= 0 ? a.num_experts : dim(slot_to_row, 1)}};
}

std::vector<paddle::DataType> route_with_probs_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                               const paddle::DataType&) {
  return {paddle::DataType::FLOAT32};
}

Outputs route_with_probs_double_backward(const Attributes& a, const paddle::Tensor& slot_to_row,
                                         const paddle::Tensor& row_to_expert, const paddle::Tensor& dd_probs) {
  const bool is_mask = a.topk >= 0;
  const Target target(kFunction, {&slot_to_row, &row_to_expert, &dd_probs});
  const Shape shape = {slot_to_row.shape()[0], is_mask ? a.num_experts : slot_to_row.shape()[1]};
  require_gradient(dd_probs, shape, paddle::DataType::FLOAT32, kFunction, "the gradient of the gradient of probs");
  paddle::Tensor d_row_probs = target.empty_float32(row_to_expert.shape());
  scatter_slots(target, kFunction, slot_to_row, dd_probs, false, &d_row_probs, is_mask ? &row_to_expert : nullptr, a.num_experts);
  return {d_row_probs};
}

std::vector<Shape> route_with_probs_double_backward_shapes(const Attributes&, const Shape&, const Shape& row_to_expert,
                                                           const Shape&) {
  return {row_to_expert};
}

std::vector<std::string> outputs() {
  return {"slot_to_row", "token_rows", "row_to_token",   "row_to_slot", "row_to_expert",
          "row_probs",   "row_counts", "expert_offsets", "routed",      "overflow"};
}

}  // namespace

PD_BUILD_OP(pmo_route)
    .Inputs({"routing", paddle::Optional("counts")})
    .Outputs(outputs())
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(route))
    .SetInferShapeFn(PMO_INFER_SHAPE(route_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(route_dtypes));
PMO_DIRECT(route, route);

PD_BUILD_OP(pmo_route_with_probs)
    .Inputs({"routing", "probs", paddle::Optional("counts")})
    .Outputs(outputs())
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(route_with_probs))
    .SetInferShapeFn(PMO_INFER_SHAPE(route_with_probs_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(route_with_probs_dtypes));
PMO_DIRECT(route_with_probs, route_with_probs);

PD_BUILD_GRAD_OP(pmo_route_with_probs)
    .Inputs({"slot_to_row", "row_to_expert", paddle::Grad("row_probs")})
    .Outputs({paddle::Grad("probs")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(route_with_probs_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(route_with_probs_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(route_with_probs_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_route_with_probs)
    .Inputs({"slot_to_row", "row_to_expert", paddle::Grad(paddle::Grad("probs"))})
    .Outputs({paddle::Grad(paddle::Grad("row_probs"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(route_with_probs_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(route_with_probs_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(route_with_probs_backward_dtypes));
