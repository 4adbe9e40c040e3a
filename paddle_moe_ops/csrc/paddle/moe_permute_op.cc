// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_permute: routing and permutation in one operator, with Paddle's outputs.
//
// Beside Paddle's five outputs it returns the count of dropped slots and the three compact maps that the gradients follow, so that
// no [T, H] tensor is kept for the backward pass.
#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/routing.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "moe_permute";

Outputs moe_permute(const paddle::Tensor& hidden_states, const paddle::optional<paddle::Tensor>& scale,
                    const paddle::Tensor& routemap, const paddle::Tensor& probs, const paddle::optional<paddle::Tensor>& counts,
                    int64_t num_experts, int counts_source, const std::vector<int>& tokens_per_expert, int64_t padding_alignment,
                    bool do_gather, bool return_expert_indices, int64_t override_buffer_size, int fill, int checks,
                    int64_t hidden, int hidden_dtype, bool, bool, bool has_scale, int64_t scale_cols, int scale_dtype) {
  const Target target(kFunction, {&hidden_states, &routemap, &probs}, {scale ? &*scale : nullptr, counts ? &*counts : nullptr});
  require_rank(hidden_states, 2, kFunction, "hidden_states");
  require_described(hidden_states, hidden, hidden_dtype, kFunction);
  require(routemap.dtype() != paddle::DataType::BOOL, kFunction, "expert_routemap_topk must hold expert ids");
  Routing step(target,
               {kFunction,
                {{"routing", "expert_routemap_topk"}, {"probs", "expert_prob_topk"}, {"buffer_size", "override_buffer_size"}},
                -1,
                num_experts,
                padding_alignment,
                override_buffer_size,
                counts_source,
                tokens_per_expert,
                PMO_DUPLICATES_FIRST,
                checks},
               routemap, &probs, counts ? &*counts : nullptr);
  require(routemap.shape()[0] == hidden_states.shape()[0], kFunction, "expert_routemap_topk must have one line per token");
  pmo_route_params& p = step.params;
  const int64_t rows = step.num_rows();
  const Shape slots = {p.num_tokens, p.topk};
  paddle::Tensor slot_to_row = empty_int32(slots, routemap);
  paddle::Tensor token_rows = empty_int32(slots, routemap);
  paddle::Tensor row_to_token = empty_int32({rows}, routemap);
  paddle::Tensor rowmap = empty_int32({p.num_tokens, num_experts}, routemap);
  paddle::Tensor row_probs = empty_float32({rows}, routemap);
  paddle::Tensor expert_indices = empty_int32({return_expert_indices ? rows : 0}, routemap);
  paddle::Tensor overflow = empty_int32({1}, routemap);
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.token_rows = token_rows.data<int32_t>();
  p.row_to_token = row_to_token.data<int32_t>();
  p.row_to_expert = return_expert_indices ? expert_indices.data<int32_t>() : nullptr;
  p.row_probs = row_probs.data<float>();
  p.overflow = overflow.data<int32_t>();
  p.rowmap = rowmap.data<int32_t>();

  const Scale scales(kFunction, scale, has_scale, scale_cols, scale_dtype, hidden_states);
  paddle::Tensor row_scales = scales.empty_rows(rows, do_gather);
  paddle::Tensor unzipped = paddle::empty({do_gather ? rows : 0, hidden}, hidden_states.dtype(), routemap.place());
  if (do_gather) {
    step.run(
        &Permutation(target, kFunction, hidden_states, scales, slot_to_row, row_to_token, fill, &unzipped, &row_scales).params());
  } else {
    step.run();
  }
  return {unzipped, rowmap, row_probs, row_scales, expert_indices, overflow, slot_to_row, token_rows, row_to_token};
}

std::vector<Shape> moe_permute_shapes(const Shape& hidden_states, const paddle::optional<Shape>& scale, const Shape& routemap,
                                      const Shape&, const paddle::optional<Shape>&, int64_t num_experts, int counts_source,
                                      const std::vector<int>& tokens_per_expert, int64_t padding_alignment, bool do_gather,
                                      bool return_expert_indices, int64_t override_buffer_size, int, int, int64_t, int, bool,
                                      bool, bool has_scale, int64_t scale_cols, int) {
  const int64_t rows = static_num_rows(counts_source, tokens_per_expert, padding_alignment, override_buffer_size);
  const Shape slots = {dim(routemap, 0), dim(routemap, 1)};
  return {{do_gather ? rows : 0, dim(hidden_states, 1)},
          {dim(routemap, 0), num_experts},
          {rows},
          scale_rows_shape(scale, has_scale, scale_cols, rows, do_gather),
          {return_expert_indices ? rows : 0},
          {1},
          slots,
          slots,
          {rows}};
}

// Paddle drops a scale without elements, so its dtype is the attribute's.
std::vector<paddle::DataType> moe_permute_dtypes(const paddle::DataType& hidden_states, const paddle::optional<paddle::DataType>&,
                                                 const paddle::DataType&, const paddle::DataType&,
                                                 const paddle::optional<paddle::DataType>&, int64_t, int, const std::vector<int>&,
                                                 int64_t, bool, bool, int64_t, int, int, int64_t, int, bool, bool, bool has_scale,
                                                 int64_t, int scale_dtype) {
  const paddle::DataType map = paddle::DataType::INT32;
  const paddle::DataType prob = paddle::DataType::FLOAT32;
  return {hidden_states, map, prob, scale_rows_dtype(has_scale, scale_dtype), map, map, map, map, map};
}

// d_hidden_states: the plain sum over the token's rows; d_probs: the gradient of the row that a slot owns. An output whose
// gradient was not computed arrives as an undefined tensor, so width and dtype of hidden_states travel as attributes.
Outputs moe_permute_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
                             const paddle::Tensor& row_to_token, const paddle::Tensor& d_unzipped,
                             const paddle::Tensor& d_row_probs, int64_t, int, const std::vector<int>&, int64_t, bool do_gather,
                             bool, int64_t, int, int, int64_t hidden, int hidden_dtype, bool need_hidden_grad,
                             bool need_prob_grad) {
  const Target target(kFunction, {&slot_to_row, &token_rows, &row_to_token}, {&d_unzipped, &d_row_probs});
  const int64_t num_rows = row_to_token.shape()[0];
  const auto dtype = static_cast<paddle::DataType>(hidden_dtype);
  require_gradient(d_unzipped, {do_gather ? num_rows : 0, hidden}, dtype, kFunction, "the gradient of hidden_states_unzipped");
  require_gradient(d_row_probs, {num_rows}, paddle::DataType::FLOAT32, kFunction, "the gradient of token_prob_unzipped");
  without_gradient({&slot_to_row, &token_rows, &row_to_token});
  paddle::Tensor d_hidden;
  if (need_hidden_grad && do_gather && d_unzipped.initialized()) {
    d_hidden = sum_rows(target, kFunction, d_unzipped, token_rows, {});
  } else {
    d_hidden = target.zeros({token_rows.shape()[0], hidden}, dtype);
  }
  if (need_prob_grad && d_row_probs.initialized()) return {d_hidden, gather_slots(target, kFunction, slot_to_row, d_row_probs)};
  return {d_hidden, target.zeros(slot_to_row.shape(), paddle::DataType::FLOAT32)};
}

std::vector<Shape> moe_permute_backward_shapes(const Shape& slot_to_row, const Shape& token_rows, const Shape&, const Shape&,
                                               const Shape&, int64_t, int, const std::vector<int>&, int64_t, bool, bool, int64_t,
                                               int, int, int64_t hidden, int, bool, bool, bool, int64_t, int) {
  return {{dim(token_rows, 0), hidden}, slot_to_row};
}

std::vector<paddle::DataType> moe_permute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                          const paddle::DataType&, const paddle::DataType& d_unzipped,
                                                          const paddle::DataType&) {
  return {d_unzipped, paddle::DataType::FLOAT32};
}

// Both gradients are linear, so theirs are the forward's copies of what comes in.
Outputs moe_permute_double_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
                                    const paddle::Tensor& row_to_token, const paddle::Tensor& dd_hidden,
                                    const paddle::Tensor& dd_probs, int64_t, int, const std::vector<int>&, int64_t,
                                    bool do_gather, bool, int64_t, int, int, int64_t hidden, int hidden_dtype,
                                    bool need_hidden_grad, bool need_prob_grad) {
  const Target target(kFunction, {&slot_to_row, &token_rows, &row_to_token}, {&dd_hidden, &dd_probs});
  const int64_t num_rows = row_to_token.shape()[0];
  const auto dtype = static_cast<paddle::DataType>(hidden_dtype);
  require_gradient(dd_hidden, {token_rows.shape()[0], hidden}, dtype, kFunction, "the gradient of the gradient of hidden_states");
  require_gradient(dd_probs, slot_to_row.shape(), paddle::DataType::FLOAT32, kFunction,
                   "the gradient of the gradient of expert_prob_topk");
  paddle::Tensor d_unzipped;
  if (need_hidden_grad && do_gather && dd_hidden.initialized()) {
    d_unzipped = spread_rows(target, kFunction, dd_hidden, token_rows, row_to_token);
  } else {
    d_unzipped = target.zeros({do_gather ? num_rows : 0, hidden}, dtype);
  }
  paddle::Tensor d_row_probs = target.zeros({num_rows}, paddle::DataType::FLOAT32);
  if (need_prob_grad && dd_probs.initialized()) scatter_slots(target, kFunction, slot_to_row, dd_probs, false, &d_row_probs);
  return {d_unzipped, d_row_probs};
}

std::vector<Shape> moe_permute_double_backward_shapes(const Shape&, const Shape&, const Shape& row_to_token, const Shape&,
                                                      const Shape&, int64_t, int, const std::vector<int>&, int64_t,
                                                      bool do_gather, bool, int64_t, int, int, int64_t hidden, int, bool, bool,
                                                      bool, int64_t, int) {
  return {{do_gather ? dim(row_to_token, 0) : 0, hidden}, {dim(row_to_token, 0)}};
}

// The gradient's shape inference gets the attributes of the forward operator, so both declare the same list.
std::vector<std::string> attributes() {
  return {"num_experts: int64_t",
          "counts_source: int",
          "tokens_per_expert_list: std::vector<int>",
          "padding_alignment: int64_t",
          "do_gather: bool",
          "return_expert_indices: bool",
          "override_buffer_size: int64_t",
          "fill: int",
          "checks: int",
          "hidden: int64_t",
          "hidden_dtype: int",
          "need_hidden_grad: bool",
          "need_prob_grad: bool",
          "has_scale: bool",
          "scale_cols: int64_t",
          "scale_dtype: int"};
}

}  // namespace

PD_BUILD_OP(pmo_moe_permute)
    .Inputs({"hidden_states", paddle::Optional("scale"), "expert_routemap_topk", "expert_prob_topk", paddle::Optional("counts")})
    .Outputs({"hidden_states_unzipped", "zipped_expertwise_rowmap", "token_prob_unzipped", "scale_unzipped", "expert_indices",
              "overflow", "slot_to_row", "token_rows", "row_to_token"})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_dtypes));
PMO_DIRECT(moe_permute, moe_permute);

PD_BUILD_GRAD_OP(pmo_moe_permute)
    .Inputs({"slot_to_row", "token_rows", "row_to_token", paddle::Grad("hidden_states_unzipped"),
             paddle::Grad("token_prob_unzipped")})
    .Outputs({paddle::Grad("hidden_states"), paddle::Grad("expert_prob_topk")})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_permute)
    .Inputs({"slot_to_row", "token_rows", "row_to_token", paddle::Grad(paddle::Grad("hidden_states")),
             paddle::Grad(paddle::Grad("expert_prob_topk"))})
    .Outputs({paddle::Grad(paddle::Grad("hidden_states_unzipped")), paddle::Grad(paddle::Grad("token_prob_unzipped"))})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute_double_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_double_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_backward_dtypes));
