// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_unpermute: rows back to token order by Paddle's [T, E] rowmap, and the probabilities back to [T, K]. Two operators, because
// the gradient of the plain sum needs no rows and so must not keep them alive.
#include "paddle/direct.h"
#include "paddle/movement.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "moe_unpermute";
constexpr char kGradientOfRows[] = "the gradient of the gradient of hidden_states_unzipped";
constexpr char kGradientOfProbs[] = "the gradient of the gradient of token_prob_unzipped";

// The last four describe hidden_states_unzipped and select the gradients that are computed; only the gradients read them.
PMO_ATTRIBUTES(Attributes, (bool, compat_paddle, compat), (int, checks, checks), (int64_t, hidden, hidden),
               (int, hidden_dtype, dtype), (bool, need_rows_grad, rows_grad), (bool, need_prob_grad, prob_grad));

const Names kNames = {{"routing", "expert_routemap_topk"}};

// Maps of a user's rowmap with only those entries that lie in [0, N) and name a row for the first time.
struct CleanMaps {
  paddle::Tensor token_rows, row_to_token, slot_to_row;

  // compat_paddle: slots that repeat an expert id all read its row, as in Paddle; otherwise only the first does. If `slot_values`
  // is given, row values are written to it, and slot_to_row is not computed.
  CleanMaps(const Target& target, const paddle::Tensor& rowmap, const paddle::Tensor& routemap, const paddle::Tensor& row_values,
            bool compat_paddle, int checks, paddle::Tensor* slot_values = nullptr) {
    require_rank(rowmap, 2, kFunction, "zipped_expertwise_rowmap");
    require_rank(routemap, 2, kFunction, "expert_routemap_topk");
    require_dtype(rowmap, paddle::DataType::INT32, kFunction, "zipped_expertwise_rowmap");
    const int32_t ids_kind = index_kind(routemap, kFunction, "expert_routemap_topk");
    require(rowmap.shape()[0] == routemap.shape()[0], kFunction, "expert_routemap_topk must have one line per token");
    const paddle::Tensor dense_rowmap = dense(rowmap);
    const paddle::Tensor ids = dense(routemap);
    token_rows = target.empty_int32(rowmap.shape());
    const int64_t num_rows = row_values.numel();
    row_to_token = target.empty_int32({num_rows});
    pmo_clean_rowmap_params p = {};
    p.struct_size = sizeof(p);
    p.num_tokens = rowmap.shape()[0];
    p.topk = routemap.shape()[1];
    p.num_experts = rowmap.shape()[1];
    p.num_rows = num_rows;
    p.rowmap = dense_rowmap.data<int32_t>();
    p.ids = ids.data();
    p.ids_kind = ids_kind;
    p.duplicates = compat_paddle ? PMO_DUPLICATES_EACH : PMO_DUPLICATES_FIRST;
    p.checks = checks;
    p.token_rows = token_rows.data<int32_t>();
    p.row_to_token = row_to_token.data<int32_t>();
    const paddle::Tensor values = dense(row_values);
    if (slot_values == nullptr) {
      slot_to_row = target.empty_int32(routemap.shape());
      p.slot_to_row = slot_to_row.data<int32_t>();
    } else {
      require_dtype(row_values, paddle::DataType::FLOAT32, kFunction, "token_prob_unzipped");
      *slot_values = target.empty_float32(routemap.shape());
      p.row_values = values.data<float>();
      p.slot_values = slot_values->data<float>();
    }
    clean_rowmap(target, kFunction, kNames, &p);
  }
};

Outputs combine(const paddle::Tensor& rows, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                const paddle::Tensor& probs, bool weighted, bool compat_paddle, int checks, int64_t hidden, int hidden_dtype) {
  const Target target(kFunction, {&rows, &rowmap, &routemap, &probs});
  require_rank(rows, 2, kFunction, "hidden_states_unzipped");
  require_described(rows, hidden, hidden_dtype, kFunction);
  const int64_t num_rows = rows.shape()[0];
  require(probs.numel() == num_rows, kFunction, "token_prob_unzipped must have one value per row");
  paddle::Tensor slot_probs;
  const CleanMaps maps(target, rowmap, routemap, probs, compat_paddle, checks, &slot_probs);
  Weights weights;
  weights.values = weighted ? &probs : nullptr;
  weights.copy_single_row = compat_paddle;
  return {sum_rows(target, kFunction, rows, maps.token_rows, weights), slot_probs};
}

// d_rows and d_probs; `rows` is needed for the weighted sum only. Undefined gradients count as zeros.
Outputs combine_backward(const Attributes& a, const paddle::Tensor* rows, const paddle::Tensor& rowmap,
                         const paddle::Tensor& routemap, const paddle::Tensor& probs, const paddle::Tensor& d_hidden,
                         const paddle::Tensor& d_prob_topk) {
  const Target target(kFunction, {&rowmap, &routemap, &probs}, {rows, &d_hidden, &d_prob_topk});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(d_hidden, {rowmap.shape()[0], a.hidden}, dtype, kFunction, "the gradient of hidden_states");
  require_gradient(d_prob_topk, routemap.shape(), paddle::DataType::FLOAT32, kFunction, "the gradient of expert_prob_topk");
  without_gradient({&rowmap, &routemap});
  const CleanMaps maps(target, rowmap, routemap, probs, a.compat_paddle, 0);
  const bool weighted = rows != nullptr;
  const bool needs_d_rows = a.need_rows_grad && d_hidden.initialized();
  const bool needs_d_weights = a.need_prob_grad && weighted && d_hidden.initialized();
  paddle::Tensor d_rows, d_probs;
  if (needs_d_rows || needs_d_weights) {
    Weights weights;
    weights.values = weighted ? &probs : nullptr;
    weights.copy_single_row = a.compat_paddle;
    sum_rows_backward(target, kFunction, d_hidden, rows, maps.token_rows, LineEnd::kAnything, maps.row_to_token, weights,
                      needs_d_rows ? &d_rows : nullptr, needs_d_weights ? &d_probs : nullptr);
  }
  if (!needs_d_rows) d_rows = target.zeros({probs.numel(), known_width(a.hidden, kFunction)}, dtype);
  if (a.need_prob_grad && d_prob_topk.initialized()) {
    if (!needs_d_weights) d_probs = target.empty_float32(probs.shape());
    scatter_slots(target, kFunction, maps.slot_to_row, d_prob_topk, needs_d_weights, &d_probs);
  } else if (!needs_d_weights) {
    d_probs = target.zeros(probs.shape(), paddle::DataType::FLOAT32);
  }
  return {d_rows, d_probs};
}

Outputs moe_unpermute(const Attributes& a, const paddle::Tensor& rows, const paddle::Tensor& rowmap,
                      const paddle::Tensor& routemap, const paddle::Tensor& probs) {
  return combine(rows, rowmap, routemap, probs, false, a.compat_paddle, a.checks, a.hidden, a.hidden_dtype);
}

Outputs moe_unpermute_weighted(const Attributes& a, const paddle::Tensor& rows, const paddle::Tensor& rowmap,
                               const paddle::Tensor& routemap, const paddle::Tensor& probs) {
  return combine(rows, rowmap, routemap, probs, true, a.compat_paddle, a.checks, a.hidden, a.hidden_dtype);
}

bool fits(const paddle::Tensor& rows, const paddle::Tensor& rowmap, const paddle::Tensor& routemap, const paddle::Tensor& probs,
          int64_t num_tokens, int64_t num_experts) {
  const Shape shape = probs.shape();
  return has_columns(rows) && is_summed(rows) && can_count(num_experts) && rowmap.dtype() == paddle::DataType::INT32 &&
         rowmap.shape() == Shape{num_tokens, num_experts} && is_routemap(routemap) && routemap.shape()[0] == num_tokens &&
         probs.dtype() == paddle::DataType::FLOAT32 && (shape.size() == 1 || (shape.size() == 2 && shape[1] == 1)) &&
         shape[0] == rows.shape()[0] && are_on_one_device({&rows, &rowmap, &routemap, &probs});
}

Outputs quick_combine(const paddle::Tensor& rows, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                      const paddle::Tensor& probs, bool weighted) {
  const int checks = default_checks(Target(kFunction, {&rows}));
  return combine(rows, rowmap, routemap, probs, weighted, false, checks, rows.shape()[1], static_cast<int>(rows.dtype()));
}

Outputs quick_moe_unpermute(const paddle::Tensor& rows, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                            const paddle::Tensor& probs, int64_t, int64_t) {
  return quick_combine(rows, rowmap, routemap, probs, false);
}

Outputs quick_moe_unpermute_weighted(const paddle::Tensor& rows, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                                     const paddle::Tensor& probs, int64_t, int64_t) {
  return quick_combine(rows, rowmap, routemap, probs, true);
}

std::vector<Shape> moe_unpermute_shapes(const Attributes&, const Shape& rows, const Shape& rowmap, const Shape& routemap,
                                        const Shape&) {
  return {{dim(rowmap, 0), dim(rows, 1)}, {dim(routemap, 0), dim(routemap, 1)}};
}

std::vector<paddle::DataType> moe_unpermute_dtypes(const paddle::DataType& rows, const paddle::DataType&, const paddle::DataType&,
                                                   const paddle::DataType&) {
  return {rows, paddle::DataType::FLOAT32};
}

Outputs moe_unpermute_backward(const Attributes& a, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                               const paddle::Tensor& probs, const paddle::Tensor& d_hidden, const paddle::Tensor& d_prob_topk) {
  const Outputs gradients = combine_backward(a, nullptr, rowmap, routemap, probs, d_hidden, d_prob_topk);
  without_gradient({&probs});  // their shape alone is read
  return gradients;
}

std::vector<Shape> moe_unpermute_backward_shapes(const Attributes& a, const Shape&, const Shape&, const Shape& probs,
                                                 const Shape&, const Shape&) {
  return {{dim(probs, 0), a.hidden}, probs};
}

std::vector<paddle::DataType> moe_unpermute_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                            const paddle::DataType& probs, const paddle::DataType& d_hidden,
                                                            const paddle::DataType&) {
  return {d_hidden, probs};
}

Outputs moe_unpermute_weighted_backward(const Attributes& a, const paddle::Tensor& rows, const paddle::Tensor& rowmap,
                                        const paddle::Tensor& routemap, const paddle::Tensor& probs,
                                        const paddle::Tensor& d_hidden, const paddle::Tensor& d_prob_topk) {
  return combine_backward(a, &rows, rowmap, routemap, probs, d_hidden, d_prob_topk);
}

std::vector<Shape> moe_unpermute_weighted_backward_shapes(const Attributes&, const Shape& rows, const Shape&, const Shape&,
                                                          const Shape& probs, const Shape&, const Shape&) {
  return {rows, probs};
}

std::vector<paddle::DataType> moe_unpermute_weighted_backward_dtypes(const paddle::DataType& rows, const paddle::DataType&,
                                                                     const paddle::DataType&, const paddle::DataType& probs,
                                                                     const paddle::DataType&, const paddle::DataType&) {
  return {rows, probs};
}

// Applies the forward pass to the incoming gradients of d_rows and d_probs.
Outputs moe_unpermute_double_backward(const Attributes& a, const paddle::Tensor& rowmap, const paddle::Tensor& routemap,
                                      const paddle::Tensor& probs, const paddle::Tensor& dd_rows,
                                      const paddle::Tensor& dd_probs) {
  const Target target(kFunction, {&rowmap, &routemap, &probs}, {&dd_rows, &dd_probs});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(dd_rows, {probs.numel(), a.hidden}, dtype, kFunction, kGradientOfRows);
  require_gradient(dd_probs, probs.shape(), paddle::DataType::FLOAT32, kFunction, kGradientOfProbs);
  const CleanMaps maps(target, rowmap, routemap, probs, a.compat_paddle, 0);
  const bool sums_rows = a.need_rows_grad && dd_rows.initialized();
  const bool gathers_probs = a.need_prob_grad && dd_probs.initialized();
  return {sums_rows ? sum_rows(target, kFunction, dd_rows, maps.token_rows, {})
                    : target.zeros({rowmap.shape()[0], known_width(a.hidden, kFunction)}, dtype),
          gathers_probs ? gather_slots(target, kFunction, maps.slot_to_row, dd_probs)
                        : target.zeros(routemap.shape(), paddle::DataType::FLOAT32)};
}

std::vector<Shape> moe_unpermute_double_backward_shapes(const Attributes& a, const Shape& rowmap, const Shape& routemap,
                                                        const Shape&, const Shape&, const Shape&) {
  return {{dim(rowmap, 0), a.hidden}, routemap};
}

std::vector<paddle::DataType> moe_unpermute_double_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                                   const paddle::DataType& probs, const paddle::DataType& dd_rows,
                                                                   const paddle::DataType&) {
  return {dd_rows, probs};
}

Outputs moe_unpermute_weighted_double_backward(const Attributes& a, const paddle::Tensor& rows, const paddle::Tensor& rowmap,
                                               const paddle::Tensor& routemap, const paddle::Tensor& probs,
                                               const paddle::Tensor& d_hidden, const paddle::Tensor& dd_rows,
                                               const paddle::Tensor& dd_probs) {
  // a copied single row would be part of some of the sums below, and not of others
  if (a.compat_paddle) fail_second_order(kFunction, " for the weighted combine with compat=\"paddle\"");
  const Target target(kFunction, {&rows, &rowmap, &routemap, &probs}, {&d_hidden, &dd_rows, &dd_probs});
  const auto dtype = static_cast<paddle::DataType>(a.hidden_dtype);
  require_gradient(dd_rows, {probs.numel(), a.hidden}, dtype, kFunction, kGradientOfRows);
  require_gradient(dd_probs, probs.shape(), paddle::DataType::FLOAT32, kFunction, kGradientOfProbs);
  const CleanMaps maps(target, rowmap, routemap, probs, a.compat_paddle, 0);
  const bool has_dd_rows = a.need_rows_grad && dd_rows.initialized();
  const bool has_dd_probs = a.need_prob_grad && dd_probs.initialized();
  // an undefined gradient of the sums counts as zeros
  const paddle::Tensor d_out =
      d_hidden.initialized() ? d_hidden : target.zeros({rowmap.shape()[0], known_width(a.hidden, kFunction)}, dtype);
  Weights weights;
  weights.values = &probs;
  const WeightedSum sum = {rows, maps.token_rows, maps.row_to_token, weights, d_out};
  Outputs gradients =
      sum_rows_double_backward(target, kFunction, sum, has_dd_rows ? &dd_rows : nullptr, has_dd_probs ? &dd_probs : nullptr);
  gradients.push_back(has_dd_probs ? gather_slots(target, kFunction, maps.slot_to_row, dd_probs)
                                   : target.zeros(routemap.shape(), paddle::DataType::FLOAT32));
  return gradients;
}

std::vector<Shape> moe_unpermute_weighted_double_backward_shapes(const Attributes& a, const Shape& rows, const Shape& rowmap,
                                                                 const Shape& routemap, const Shape& probs, const Shape&,
                                                                 const Shape&, const Shape&) {
  return {rows, probs, {dim(rowmap, 0), a.hidden}, routemap};
}

std::vector<paddle::DataType> moe_unpermute_weighted_double_backward_dtypes(const paddle::DataType& rows, const paddle::DataType&,
                                                                            const paddle::DataType&,
                                                                            const paddle::DataType& probs,
                                                                            const paddle::DataType&, const paddle::DataType&,
                                                                            const paddle::DataType&) {
  return {rows, probs, rows, probs};
}

}  // namespace

PD_BUILD_OP(pmo_moe_unpermute)
    .Inputs({"rows", "rowmap", "ids", "row_probs"})
    .Outputs({"out", "probs"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_dtypes));
PMO_DIRECT(moe_unpermute, moe_unpermute);
PMO_QUICK(moe_unpermute, quick_moe_unpermute, fits);

PD_BUILD_GRAD_OP(pmo_moe_unpermute)
    .Inputs({"rowmap", "ids", "row_probs", paddle::Grad("out"), paddle::Grad("probs")})
    .Outputs({paddle::Grad("rows"), paddle::Grad("row_probs")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_unpermute)
    .Inputs({"rowmap", "ids", "row_probs", paddle::Grad(paddle::Grad("rows")), paddle::Grad(paddle::Grad("row_probs"))})
    .Outputs({paddle::Grad(paddle::Grad("out")), paddle::Grad(paddle::Grad("probs"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_double_backward_dtypes));

PD_BUILD_OP(pmo_moe_unpermute_weighted)
    .Inputs({"rows", "rowmap", "ids", "row_probs"})
    .Outputs({"out", "probs"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute_weighted))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_dtypes));
PMO_DIRECT(moe_unpermute_weighted, moe_unpermute_weighted);
PMO_QUICK(moe_unpermute_weighted, quick_moe_unpermute_weighted, fits);

PD_BUILD_GRAD_OP(pmo_moe_unpermute_weighted)
    .Inputs({"rows", "rowmap", "ids", "row_probs", paddle::Grad("out"), paddle::Grad("probs")})
    .Outputs({paddle::Grad("rows"), paddle::Grad("row_probs")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute_weighted_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_weighted_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_weighted_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_unpermute_weighted)
    .Inputs({"rows", "rowmap", "ids", "row_probs", paddle::Grad("out"), paddle::Grad(paddle::Grad("rows")),
             paddle::Grad(paddle::Grad("row_probs"))})
    .Outputs({paddle::Grad("rows"), paddle::Grad("row_probs"), paddle::Grad(paddle::Grad("out")),
              paddle::Grad(paddle::Grad("probs"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(moe_unpermute_weighted_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(moe_unpermute_weighted_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(moe_unpermute_weighted_double_backward_dtypes));
