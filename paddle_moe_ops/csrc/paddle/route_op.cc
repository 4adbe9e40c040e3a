// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// route: a Plan of compact maps from expert ids or a mask.
#include "paddle/routing.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "route";

Outputs route(const paddle::Tensor& routing, const paddle::optional<paddle::Tensor>& probs,
              const paddle::optional<paddle::Tensor>& counts, int64_t num_experts, int64_t topk, int64_t padding_alignment,
              int counts_source, const std::vector<int>& tokens_per_expert, int64_t buffer_size, int duplicates, int checks) {
  require_cpu({&routing}, kFunction);
  if (probs) require_cpu({&*probs}, kFunction);
  if (counts) require_cpu({&*counts}, kFunction);
  Routing step(
      {kFunction, {}, topk, num_experts, padding_alignment, buffer_size, counts_source, tokens_per_expert, duplicates, checks},
      routing, probs ? &*probs : nullptr, counts ? &*counts : nullptr);
  pmo_route_params& p = step.params;
  const int64_t rows = step.num_rows();
  paddle::Tensor slot_to_row = empty_int32({p.num_tokens, p.topk}, routing);
  paddle::Tensor token_rows = empty_int32({p.num_tokens, p.topk}, routing);
  paddle::Tensor row_to_token = empty_int32({rows}, routing);
  paddle::Tensor row_to_slot = empty_int32({rows}, routing);
  paddle::Tensor row_to_expert = empty_int32({rows}, routing);
  paddle::Tensor row_probs = empty_float32({probs ? rows : 0}, routing);
  paddle::Tensor clamped_counts = empty_int32({num_experts}, routing);
  paddle::Tensor expert_offsets = empty_int32({num_experts + 1}, routing);
  paddle::Tensor overflow = empty_int32({1}, routing);
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.token_rows = token_rows.data<int32_t>();
  p.row_to_token = row_to_token.data<int32_t>();
  p.row_to_slot = row_to_slot.data<int32_t>();
  p.row_to_expert = row_to_expert.data<int32_t>();
  p.row_probs = probs ? row_probs.data<float>() : nullptr;
  p.tokens_per_expert = clamped_counts.data<int32_t>();
  p.expert_offsets = expert_offsets.data<int32_t>();
  p.overflow = overflow.data<int32_t>();
  step.run();
  return {slot_to_row,    token_rows,     row_to_token,
          row_to_slot,    row_to_expert,  row_probs,
          clamped_counts, expert_offsets, step.routed_per_expert(),
          overflow};
}

std::vector<Shape> route_shapes(const Shape& routing, const paddle::optional<Shape>& probs, const paddle::optional<Shape>&,
                                int64_t num_experts, int64_t topk, int64_t padding_alignment, int counts_source,
                                const std::vector<int>& tokens_per_expert, int64_t buffer_size, int, int) {
  const int64_t rows = static_num_rows(counts_source, tokens_per_expert, padding_alignment, buffer_size);
  const Shape slots = {dim(routing, 0), topk >= 0 ? topk : dim(routing, 1)};
  return {slots, slots, {rows}, {rows}, {rows}, {probs ? rows : 0}, {num_experts}, {num_experts + 1}, {num_experts}, {1}};
}

std::vector<paddle::DataType> route_dtypes(const paddle::DataType&, const paddle::optional<paddle::DataType>&,
                                           const paddle::optional<paddle::DataType>&) {
  std::vector<paddle::DataType> dtypes(10, paddle::DataType::INT32);
  dtypes[5] = paddle::DataType::FLOAT32;
  return dtypes;
}

// d_probs: the gradient of a row's probability goes back to the slot that owns the row, or to (token, expert) for a mask.
Outputs route_backward(const paddle::optional<paddle::Tensor>& given_probs, const paddle::Tensor& slot_to_row,
                       const paddle::Tensor& row_to_expert, const paddle::Tensor& d_row_probs, int64_t, int64_t topk, int64_t,
                       int, const std::vector<int>&, int64_t, int, int) {
  require(static_cast<bool>(given_probs), kFunction, "probs is missing");
  const paddle::Tensor& probs = *given_probs;
  const bool is_mask = topk >= 0;
  paddle::Tensor d_probs = empty_float32(probs.shape(), slot_to_row);
  const paddle::Tensor row_values = dense(d_row_probs);
  pmo_slots_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = slot_to_row.shape()[0];
  p.topk = slot_to_row.shape()[1];
  p.num_experts = probs.shape()[1];
  p.num_rows = row_to_expert.shape()[0];
  require_shape(row_values, {p.num_rows}, kFunction, "the gradient of row_probs");
  require_shape(probs, {p.num_tokens, is_mask ? p.num_experts : p.topk}, kFunction, "probs");
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.row_to_expert = is_mask ? row_to_expert.data<int32_t>() : nullptr;
  p.row_values = const_cast<float*>(row_values.data<float>());  // read only by the gather
  p.slot_values = d_probs.data<float>();
  check_status(pmo_gather_slots_cpu(&p, nullptr), kFunction);
  return {d_probs};
}

std::vector<Shape> route_backward_shapes(const paddle::optional<Shape>& probs, const Shape&, const Shape&, const Shape&, int64_t,
                                         int64_t, int64_t, int, const std::vector<int>&, int64_t, int, int) {
  return {probs ? *probs : Shape{0}};
}

std::vector<paddle::DataType> route_backward_dtypes(const paddle::optional<paddle::DataType>&, const paddle::DataType&,
                                                    const paddle::DataType&, const paddle::DataType&) {
  return {paddle::DataType::FLOAT32};
}

// The gradient's shape inference gets the attributes of the forward operator, so both declare the same list.
std::vector<std::string> attributes() {
  return {"num_experts: int64_t",
          "topk: int64_t",
          "padding_alignment: int64_t",
          "counts_source: int",
          "tokens_per_expert_list: std::vector<int>",
          "buffer_size: int64_t",
          "duplicates: int",
          "checks: int"};
}

}  // namespace

PD_BUILD_OP(pmo_route)
    .Inputs({"routing", paddle::Optional("probs"), paddle::Optional("counts")})
    .Outputs({"slot_to_row", "token_rows", "row_to_token", "row_to_slot", "row_to_expert", "row_probs", "tokens_per_expert",
              "expert_offsets", "routed_per_expert", "overflow"})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(route))
    .SetInferShapeFn(PD_INFER_SHAPE(route_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(route_dtypes));

PD_BUILD_GRAD_OP(pmo_route)
    .Inputs({paddle::Optional("probs"), "slot_to_row", "row_to_expert", paddle::Grad("row_probs")})
    .Outputs({paddle::Grad(paddle::Optional("probs"))})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(route_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(route_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(route_backward_dtypes));
