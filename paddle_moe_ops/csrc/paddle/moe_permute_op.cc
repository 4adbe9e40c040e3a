// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_permute: routing and permutation in one operator, with Paddle's outputs.
//
// In addition to Paddle's five outputs it returns the count of dropped slots and the three compact maps that the gradients
// follow. So no [T, H] tensor is kept for the backward pass.
#include <algorithm>

#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/routing.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "moe_permute";

// Arguments other than tensors. The only attribute contains the fields in this order, then the counts of a list. Fifteen
// attributes would cost Paddle more time than the operator for a few tokens.
struct Spec {
  int num_experts = 0, counts_source = 0, padding_alignment = 0;
  int do_gather = 0, return_expert_indices = 0, buffer_size = 0, fill = 0, checks = 0;
  int hidden = 0, hidden_dtype = 0;  // of the rows: the gradient of an output that no one computed is undefined
  int need_hidden_grad = 0, need_prob_grad = 0;
  int has_scale = 0, scale_cols = 0, scale_dtype = 0;  // Paddle treats a scale without elements as missing
  std::vector<int> counts;

  explicit Spec(const std::vector<int>& numbers) {  // never throws: inference reads it
    int* const fields[] = {
        &num_experts, &counts_source, &padding_alignment, &do_gather,        &return_expert_indices, &buffer_size, &fill,
        &checks,      &hidden,        &hidden_dtype,      &need_hidden_grad, &need_prob_grad,        &has_scale,   &scale_cols,
        &scale_dtype};
    auto number = numbers.begin();
    for (int* field : fields) *field = number != numbers.end() ? *number++ : 0;
    counts.assign(number, numbers.end());
  }

  int64_t static_rows() const { return static_num_rows(counts_source, counts, padding_alignment, buffer_size); }
};

using Numbers = std::vector<int>;

Outputs moe_permute(const paddle::Tensor& hidden_states, const paddle::optional<paddle::Tensor>& scale,
                    const paddle::Tensor& routemap, const paddle::Tensor& probs, const paddle::optional<paddle::Tensor>& counts,
                    const Numbers& numbers) {
  const Spec spec(numbers);
  const Target target(kFunction, {&hidden_states, &routemap, &probs}, {scale ? &*scale : nullptr, counts ? &*counts : nullptr});
  require_rank(hidden_states, 2, kFunction, "hidden_states");
  require_described(hidden_states, spec.hidden, spec.hidden_dtype, kFunction);
  require(routemap.dtype() != paddle::DataType::BOOL, kFunction, "expert_routemap_topk must hold expert ids");
  Routing step(target,
               {kFunction,
                {{"routing", "expert_routemap_topk"}, {"probs", "expert_prob_topk"}, {"buffer_size", "override_buffer_size"}},
                -1,
                spec.num_experts,
                spec.padding_alignment,
                spec.buffer_size,
                spec.counts_source,
                spec.counts,
                PMO_DUPLICATES_FIRST,
                spec.checks},
               routemap, &probs, counts ? &*counts : nullptr);
  require(routemap.shape()[0] == hidden_states.shape()[0], kFunction, "expert_routemap_topk must have one line per token");
  pmo_route_params& p = step.params;
  const int64_t rows = step.num_rows();
  const Shape slots = {p.num_tokens, p.topk};
  paddle::Tensor slot_to_row = target.empty_int32(slots);
  paddle::Tensor token_rows = target.empty_int32(slots);
  paddle::Tensor row_to_token = target.empty_int32({rows});
  paddle::Tensor rowmap = target.empty_int32({p.num_tokens, spec.num_experts});
  paddle::Tensor row_probs = target.empty_float32({rows});
  paddle::Tensor expert_indices = target.empty_int32({spec.return_expert_indices ? rows : 0});
  paddle::Tensor overflow = target.empty_int32({});
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.token_rows = token_rows.data<int32_t>();
  p.row_to_token = row_to_token.data<int32_t>();
  p.row_to_expert = spec.return_expert_indices ? expert_indices.data<int32_t>() : nullptr;
  p.row_probs = row_probs.data<float>();
  p.overflow = overflow.data<int32_t>();
  p.rowmap = rowmap.data<int32_t>();

  const Scale scales(target, kFunction, scale, spec.has_scale, spec.scale_cols, spec.scale_dtype, hidden_states);
  paddle::Tensor row_scales = scales.empty_rows(rows, spec.do_gather);
  paddle::Tensor unzipped = target.empty({spec.do_gather ? rows : 0, hidden_states.shape()[1]}, hidden_states.dtype());
  if (spec.do_gather) {
    step.run(&Permutation(target, kFunction, hidden_states, scales, slot_to_row, row_to_token, spec.fill, &unzipped, &row_scales)
                  .params());
  } else {
    step.run();
  }
  return {unzipped, rowmap, row_probs, row_scales, expert_indices, overflow, slot_to_row, token_rows, row_to_token};
}

bool fits(const paddle::Tensor& hidden_states, const paddle::Tensor& routemap, const paddle::Tensor& probs, int64_t num_experts,
          const std::vector<int>& tokens_per_expert, int64_t padding_alignment, int64_t override_buffer_size) {
  const Shape slots = routemap.shape();
  const auto can_be_size = [](int64_t size, int64_t least) { return size >= least && size <= INT32_MAX; };
  return has_columns(hidden_states) && hidden_states.dtype() != paddle::DataType::INT32 &&
         dtype_of(hidden_states, kFunction, "hidden_states") >= 0 && is_routemap(routemap) &&
         slots[0] == hidden_states.shape()[0] && probs.dtype() == paddle::DataType::FLOAT32 && probs.shape() == slots &&
         are_on_one_device({&hidden_states, &routemap, &probs}) && can_count(num_experts) && can_be_size(padding_alignment, 1) &&
         can_be_size(override_buffer_size, -1) &&
         (tokens_per_expert.empty() || static_cast<int64_t>(tokens_per_expert.size()) == num_experts) &&
         std::all_of(tokens_per_expert.begin(), tokens_per_expert.end(), [](int count) { return count >= 0; });
}

// moe_permute without a scale, with zeros in padding rows; returns the first four outputs. Empty `counts`: rows are counted.
Outputs quick_moe_permute(const paddle::Tensor& hidden_states, const paddle::Tensor& routemap, const paddle::Tensor& probs,
                          int64_t num_experts, const std::vector<int>& tokens_per_expert, int64_t padding_alignment,
                          int64_t override_buffer_size) {
  const Target target(kFunction, {&hidden_states, &routemap, &probs});
  Routing step(target,
               {kFunction,
                {},
                -1,
                num_experts,
                padding_alignment,
                override_buffer_size,
                tokens_per_expert.empty() ? kCountsFromRouting : kCountsFromList,
                tokens_per_expert,
                PMO_DUPLICATES_FIRST,
                default_checks(target)},
               routemap, &probs, nullptr);
  pmo_route_params& p = step.params;
  const int64_t rows = step.num_rows();
  paddle::Tensor slot_to_row = target.empty_int32({p.num_tokens, p.topk});
  paddle::Tensor row_to_token = target.empty_int32({rows});
  paddle::Tensor rowmap = target.empty_int32({p.num_tokens, num_experts});
  paddle::Tensor row_probs = target.empty_float32({rows});
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.row_to_token = row_to_token.data<int32_t>();
  p.row_probs = row_probs.data<float>();
  p.rowmap = rowmap.data<int32_t>();
  const Scale no_scale(target, kFunction, {}, false, -1, 0, hidden_states);
  paddle::Tensor row_scales = no_scale.empty_rows(rows, true);
  paddle::Tensor unzipped = target.empty({rows, hidden_states.shape()[1]}, hidden_states.dtype());
  step.run(&Permutation(target, kFunction, hidden_states, no_scale, slot_to_row, row_to_token, PMO_FILL_ROWS | PMO_FILL_SCALES,
                        &unzipped, &row_scales)
                .params());
  return {unzipped, rowmap, row_probs, row_scales};
}

std::vector<Shape> moe_permute_shapes(const Shape& hidden_states, const paddle::optional<Shape>& scale, const Shape& routemap,
                                      const Shape&, const paddle::optional<Shape>&, const Numbers& numbers) {
  const Spec spec(numbers);
  const int64_t rows = spec.static_rows();
  const Shape slots = {dim(routemap, 0), dim(routemap, 1)};
  return {{spec.do_gather ? rows : 0, dim(hidden_states, 1)},
          {dim(routemap, 0), spec.num_experts},
          {rows},
          scale_rows_shape(scale, spec.has_scale, spec.scale_cols, rows, spec.do_gather),
          {spec.return_expert_indices ? rows : 0},
          {},
          slots,
          slots,
          {rows}};
}

// Paddle drops a scale without elements, so its dtype is the attribute's.
std::vector<paddle::DataType> moe_permute_dtypes(const paddle::DataType& hidden_states, const paddle::optional<paddle::DataType>&,
                                                 const paddle::DataType&, const paddle::DataType&,
                                                 const paddle::optional<paddle::DataType>&, const Numbers& numbers) {
  const Spec spec(numbers);
  const paddle::DataType map = paddle::DataType::INT32;
  const paddle::DataType prob = paddle::DataType::FLOAT32;
  return {hidden_states, map, prob, scale_rows_dtype(spec.has_scale, spec.scale_dtype), map, map, map, map, map};
}

// d_hidden_states: the plain sum over the token's rows; d_probs: the gradient of the row that a slot owns. An output whose
// gradient was not computed arrives as an undefined tensor.
Outputs moe_permute_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
                             const paddle::Tensor& row_to_token, const paddle::Tensor& d_unzipped,
                             const paddle::Tensor& d_row_probs, const Numbers& numbers) {
  const Spec spec(numbers);
  const Target target(kFunction, {&slot_to_row, &token_rows, &row_to_token}, {&d_unzipped, &d_row_probs});
  const int64_t num_rows = row_to_token.shape()[0];
  const auto dtype = static_cast<paddle::DataType>(spec.hidden_dtype);
  require_gradient(d_unzipped, {spec.do_gather ? num_rows : 0, spec.hidden}, dtype, kFunction,
                   "the gradient of hidden_states_unzipped");
  require_gradient(d_row_probs, {num_rows}, paddle::DataType::FLOAT32, kFunction, "the gradient of token_prob_unzipped");
  without_gradient({&slot_to_row, &token_rows, &row_to_token});
  paddle::Tensor d_hidden;
  if (spec.need_hidden_grad && spec.do_gather && d_unzipped.initialized()) {
    d_hidden = sum_rows(target, kFunction, d_unzipped, token_rows, {});
  } else {
    d_hidden = target.zeros({token_rows.shape()[0], known_width(spec.hidden, kFunction)}, dtype);
  }
  if (spec.need_prob_grad && d_row_probs.initialized())
    return {d_hidden, gather_slots(target, kFunction, slot_to_row, d_row_probs)};
  return {d_hidden, target.zeros(slot_to_row.shape(), paddle::DataType::FLOAT32)};
}

std::vector<Shape> moe_permute_backward_shapes(const Shape& slot_to_row, const Shape& token_rows, const Shape&, const Shape&,
                                               const Shape&, const Numbers& numbers) {
  return {{dim(token_rows, 0), Spec(numbers).hidden}, slot_to_row};
}

std::vector<paddle::DataType> moe_permute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                          const paddle::DataType&, const paddle::DataType& d_unzipped,
                                                          const paddle::DataType&) {
  return {d_unzipped, paddle::DataType::FLOAT32};
}

// Both gradients are linear, so their own gradients apply the forward's copies to the incoming tensors.
Outputs moe_permute_double_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& token_rows,
                                    const paddle::Tensor& row_to_token, const paddle::Tensor& dd_hidden,
                                    const paddle::Tensor& dd_probs, const Numbers& numbers) {
  const Spec spec(numbers);
  const Target target(kFunction, {&slot_to_row, &token_rows, &row_to_token}, {&dd_hidden, &dd_probs});
  const int64_t num_rows = row_to_token.shape()[0];
  const auto dtype = static_cast<paddle::DataType>(spec.hidden_dtype);
  require_gradient(dd_hidden, {token_rows.shape()[0], spec.hidden}, dtype, kFunction,
                   "the gradient of the gradient of hidden_states");
  require_gradient(dd_probs, slot_to_row.shape(), paddle::DataType::FLOAT32, kFunction,
                   "the gradient of the gradient of expert_prob_topk");
  paddle::Tensor d_unzipped;
  if (spec.need_hidden_grad && spec.do_gather && dd_hidden.initialized()) {
    d_unzipped = spread_rows(target, kFunction, dd_hidden, token_rows, row_to_token);
  } else {
    d_unzipped = target.zeros({spec.do_gather ? num_rows : 0, known_width(spec.hidden, kFunction)}, dtype);
  }
  paddle::Tensor d_row_probs = target.zeros({num_rows}, paddle::DataType::FLOAT32);
  if (spec.need_prob_grad && dd_probs.initialized()) scatter_slots(target, kFunction, slot_to_row, dd_probs, false, &d_row_probs);
  return {d_unzipped, d_row_probs};
}

std::vector<Shape> moe_permute_double_backward_shapes(const Shape&, const Shape&, const Shape& row_to_token, const Shape&,
                                                      const Shape&, const Numbers& numbers) {
  const Spec spec(numbers);
  return {{spec.do_gather ? dim(row_to_token, 0) : 0, spec.hidden}, {dim(row_to_token, 0)}};
}

// The gradients' shape inference receives the attribute of the forward operator, so all declare the same one.
std::vector<std::string> attributes() { return {"numbers: std::vector<int>"}; }

}  // namespace

PD_BUILD_OP(pmo_moe_permute)
    .Inputs({"x", paddle::Optional("scale"), "ids", "probs", paddle::Optional("counts")})
    .Outputs({"rows", "rowmap", "row_probs", "row_scales", "row_experts", "overflow", "slot_to_row", "token_rows",
              "row_to_token"})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_dtypes));
PMO_DIRECT(moe_permute, moe_permute);
PMO_QUICK(moe_permute, quick_moe_permute, fits);

PD_BUILD_GRAD_OP(pmo_moe_permute)
    .Inputs({"slot_to_row", "token_rows", "row_to_token", paddle::Grad("rows"), paddle::Grad("row_probs")})
    .Outputs({paddle::Grad("x"), paddle::Grad("probs")})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_permute)
    .Inputs({"slot_to_row", "token_rows", "row_to_token", paddle::Grad(paddle::Grad("x")), paddle::Grad(paddle::Grad("probs"))})
    .Outputs({paddle::Grad(paddle::Grad("rows")), paddle::Grad(paddle::Grad("row_probs"))})
    .Attrs(attributes())
    .SetKernelFn(PD_KERNEL(moe_permute_double_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(moe_permute_double_backward_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(moe_permute_backward_dtypes));
