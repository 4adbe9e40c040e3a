// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Float8 operators of paddle.incubate.nn.functional (pmo/paddle_float8.h), for dygraph. They have no gradient, as in Paddle.
#include "pmo/paddle_float8.h"

#include <tuple>
#include <utility>
#include <vector>

#include "common/arithmetic.h"
#include "common/paddle_float8.h"
#include "paddle/direct.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own
using pmo::divide_up;
using pmo::kGroupColumns;

constexpr char kQuantize[] = "fp8_quant_blockwise";
constexpr char kStack[] = "fused_stack_transpose_quant";
constexpr char kSplit[] = "fused_transpose_split_quant";
constexpr char kSwiglu[] = "fused_weighted_swiglu_act_quant";
constexpr char kSwigluBackward[] = "fused_swiglu_weighted_bwd";
constexpr float kBfloat16Max = 0x1.FEp127f;

pmo_paddle_quantize_params params_of(const paddle::Tensor& x, const char* function) {
  pmo_paddle_quantize_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = x.shape()[0];
  p.num_columns = x.shape()[1];
  p.x = x.data();
  p.dtype = dtype_of(x, function, "x");
  p.codes_dtype = PMO_FLOAT8_E4M3FN;
  p.overflow = kBfloat16Max;
  return p;
}

// Codes and scales of a form, uninitialised.
std::pair<paddle::Tensor, paddle::Tensor> form_of(const Target& target, const pmo_paddle_quantize_params& p, int64_t rows,
                                                  int64_t columns) {
  const pmo::PaddleScales scales = pmo::paddle_scales(p, nullptr, rows, columns);
  const Shape shape = scales.by_column ? Shape{scales.words(), scales.lines} : Shape{scales.lines, scales.words()};
  const bool e5m2 = p.codes_dtype == PMO_FLOAT8_E5M2;
  return {target.empty({rows, columns}, e5m2 ? paddle::DataType::FLOAT8_E5M2 : paddle::DataType::FLOAT8_E4M3FN),
          target.empty(shape, scales.packed ? paddle::DataType::INT32 : paddle::DataType::FLOAT32)};
}

// Codes and scales of x, then those of its transpose; None for the form that is not asked for.
Outputs quantize(const paddle::Tensor& x, bool straight, bool transposed, bool blocks, bool e5m2, bool pow2, bool ue8m0,
                 bool by_column, float epsilon) {
  const Target target(kQuantize, {&x});
  require_rank(x, 2, kQuantize, "x");
  const paddle::Tensor source = dense(x);
  pmo_paddle_quantize_params p = params_of(source, kQuantize);
  p.codes_dtype = e5m2 ? PMO_FLOAT8_E5M2 : PMO_FLOAT8_E4M3FN;
  p.blocks = blocks;
  p.pow2 = pow2 || ue8m0;
  p.ue8m0 = ue8m0;
  p.scales_by_column = by_column;
  p.epsilon = epsilon;
  Outputs results(4);
  if (straight) {
    std::tie(results[0], results[1]) = form_of(target, p, p.num_rows, p.num_columns);
    p.codes = results[0].data();
    p.scales = results[1].data();
  }
  if (transposed) {
    std::tie(results[2], results[3]) = form_of(target, p, p.num_columns, p.num_rows);
    p.transposed_codes = results[2].data();
    p.transposed_scales = results[3].data();
  }
  check_status(PMO_CALL(target, paddle_quantize, &p), kQuantize);
  return results;
}

// Codes and scales of matrices of one shape by blocks, one matrix below the other.
Outputs quantize_stack(const std::vector<paddle::Tensor>& matrices, bool transposed) {
  const Target target(kStack, {&matrices[0]});
  const Shape shape = matrices[0].shape();
  require_rank(matrices[0], 2, kStack, "x[0]");
  const int64_t count = static_cast<int64_t>(matrices.size()), height = shape[transposed ? 1 : 0],
                width = shape[transposed ? 0 : 1];
  require(height % kGroupColumns == 0 && width % kGroupColumns == 0, kStack, "sizes must be multiples of 128");
  const int64_t blocks = height / kGroupColumns * (width / kGroupColumns);
  const paddle::Tensor codes = target.empty({count * height, width}, paddle::DataType::FLOAT8_E4M3FN);
  paddle::Tensor scales = target.empty_float32({count * height / kGroupColumns, width / kGroupColumns});
  for (int64_t i = 0; i < count; ++i) {
    require(matrices[i].shape() == shape && matrices[i].dtype() == matrices[0].dtype(), kStack, "matrices must be alike");
    require(matrices[i].place() == matrices[0].place(), kStack, "matrices must be on one device");
    const paddle::Tensor source = dense(matrices[i]);
    pmo_paddle_quantize_params p = params_of(source, kStack);
    p.blocks = 1;
    (transposed ? p.transposed_codes : p.codes) = static_cast<uint8_t*>(const_cast<void*>(codes.data())) + i * height * width;
    (transposed ? p.transposed_scales : p.scales) = scales.data<float>() + i * blocks;
    check_status(PMO_CALL(target, paddle_quantize, &p), kStack);
  }
  return {codes, scales};
}

// The transposed rows of each expert: codes [H, t] of all experts, then their scales [t / 128, H].
Outputs quantize_split(const paddle::Tensor& x, const std::vector<int>& counts, bool pow2) {
  const Target target(kSplit, {&x});
  require_rank(x, 2, kSplit, "x");
  const paddle::Tensor source = dense(x);
  const size_t experts = counts.size();
  Outputs results(2 * experts);
  pmo_paddle_quantize_params all = params_of(source, kSplit);
  all.pow2 = pow2;
  all.scales_by_column = 1;
  int64_t first = 0;
  for (size_t i = 0; i < experts; ++i) {
    require(counts[i] >= 0 && counts[i] <= all.num_rows - first, kSplit, "counts must add up to the rows");
    pmo_paddle_quantize_params p = all;
    p.num_rows = counts[i];
    p.x = static_cast<const char*>(source.data()) + first * all.num_columns * static_cast<int64_t>(phi::SizeOf(source.dtype()));
    std::tie(results[i], results[experts + i]) = form_of(target, p, p.num_columns, p.num_rows);
    p.transposed_codes = results[i].data();
    p.transposed_scales = results[experts + i].data();
    check_status(PMO_CALL(target, paddle_quantize, &p), kSplit);
    first += counts[i];
  }
  require(first == all.num_rows, kSplit, "counts must add up to the rows");
  return results;
}

// A bfloat16 matrix whose rows have 2 n columns.
paddle::Tensor gated_rows(const paddle::Tensor& x, const char* function, const char* name) {
  require_rank(x, 2, function, name);
  require_dtype(x, paddle::DataType::BFLOAT16, function, name);
  require(x.shape()[1] % 2 == 0, function, "rows must have an even number of columns");
  return dense(x);
}

paddle::Tensor probabilities(const paddle::Tensor& probs, int64_t num_rows, const char* function) {
  require_dtype(probs, paddle::DataType::FLOAT32, function, "the probabilities");
  require(probs.numel() == num_rows, function, "the probabilities must have one value per row");
  return dense(probs);
}

Outputs swiglu(const paddle::Tensor& x, const paddle::optional<paddle::Tensor>& probs, bool pow2) {
  const Target target(kSwiglu, {&x}, {probs.get_ptr()});
  const paddle::Tensor source = gated_rows(x, kSwiglu, "x");
  pmo_paddle_swiglu_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = x.shape()[0];
  p.width = x.shape()[1] / 2;
  p.x = source.data();
  p.pow2 = pow2;
  paddle::Tensor weights;
  if (probs) {
    weights = probabilities(*probs, p.num_rows, kSwiglu);
    p.probs = weights.data<float>();
  }
  paddle::Tensor codes = target.empty({p.num_rows, p.width}, paddle::DataType::FLOAT8_E4M3FN);
  paddle::Tensor scales = target.empty_float32({p.num_rows, divide_up(p.width, kGroupColumns)});
  p.codes = codes.data();
  p.scales = scales.data<float>();
  check_status(PMO_CALL(target, paddle_swiglu, &p), kSwiglu);
  return {codes, scales};
}

// Gradients of x and of the probabilities, and the output.
Outputs swiglu_backward(const paddle::Tensor& x, const paddle::Tensor& d_out, const paddle::Tensor& probs) {
  const Target target(kSwigluBackward, {&x, &d_out, &probs});
  const paddle::Tensor source = gated_rows(x, kSwigluBackward, "o1");
  pmo_paddle_swiglu_backward_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = x.shape()[0];
  p.width = x.shape()[1] / 2;
  require_dtype(d_out, paddle::DataType::BFLOAT16, kSwigluBackward, "do2_s");
  require_shape(d_out, {p.num_rows, p.width}, kSwigluBackward, "do2_s");
  const paddle::Tensor gradient = dense(d_out), weights = probabilities(probs, p.num_rows, kSwigluBackward);
  paddle::Tensor d_x = target.empty(x.shape(), x.dtype()), d_probs = target.empty_float32(probs.shape());
  paddle::Tensor out = target.empty(d_out.shape(), x.dtype());
  p.x = source.data();
  p.d_out = gradient.data();
  p.probs = weights.data<float>();
  p.d_x = d_x.data();
  p.d_probs = d_probs.data<float>();
  p.out = out.data();
  check_status(PMO_CALL(target, paddle_swiglu_backward, &p), kSwigluBackward);
  return {d_x, d_probs, out};
}

}  // namespace

PMO_DIRECT(paddle_quantize, quantize);
PMO_DIRECT(paddle_quantize_stack, quantize_stack);
PMO_DIRECT(paddle_quantize_split, quantize_split);
PMO_DIRECT(paddle_swiglu, swiglu);
PMO_DIRECT(paddle_swiglu_backward, swiglu_backward);

#endif
