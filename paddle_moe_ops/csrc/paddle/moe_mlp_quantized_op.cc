// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_quantized: a layer of experts whose matrices are constants, stored as the codes and scales of pmo/matrices.h.
//
// Integer codes: the layer of the matrices' values, rounded to the dtype of the tokens. With few rows, the kernels of a forward pass
// that keeps no H read the codes; otherwise they read values from memory. Without kernels each GEMM dequantises the matrices of the
// experts that have rows. Float8 codes: the layer with float8 operands. Kernels read codes with contiguous K, so a forward pass
// transposes codes that are not stored transposed, and a backward pass those that are. Matrices and scales have no gradient.
#include <memory>

#include "paddle/direct.h"
#include "paddle/moe_mlp.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own
using paddle::DataType;

PMO_ATTRIBUTES(QuantizedAttributes, (bool, transpose, transpose), (bool, keep_hidden, keep), (bool, need_x_grad, x_grad),
               (bool, need_weights_grad, weight_grad), (bool, in_place, in_place), (int64_t, workspace, workspace),
               (bool, by_slot, by_slot), (int, format, format));

MlpAttributes of_layer(const QuantizedAttributes& a) {
  return {a.transpose,         a.keep_hidden, a.need_x_grad, false,     false,
          a.need_weights_grad, a.in_place,    a.workspace,   a.by_slot, false};
}

// A tensor [E, A, B] as [E, B, A], dense.
paddle::Tensor turned(const paddle::Tensor& tensor) { return dense(paddle::experimental::transpose(tensor, {0, 2, 1})); }

// The codes and scales that kernels read: those given, or transposed. Scales by output [E, N] have one form.
Float8 readable(const Target& target, const paddle::Tensor& codes, const paddle::Tensor& scales, bool as_stored) {
  const paddle::Tensor stored = dense(codes);
  if (as_stored) return {target.aligned(stored), dense(scales)};
  const bool by_output = scales.shape().size() == 2;
  const paddle::Tensor bytes =
      paddle::from_blob(const_cast<void*>(stored.data()), stored.shape(), DataType::UINT8, phi::DataLayout::NCHW, target.place());
  return {target.aligned(turned(bytes)), by_output ? dense(scales) : turned(scales)};
}

MatrixCodes codes_of(const QuantizedAttributes& a, const ExpertLayer& layer, const MlpOperands& o, bool backward) {
  MatrixCodes codes;
  if (!layer.has_kernels()) return codes;
  const bool is_float8 = a.format == PMO_MATRIX_FLOAT8_128X128;
  const pmo_layer_hidden keep = a.keep_hidden ? PMO_LAYER_KEEPS : PMO_LAYER_RECOMPUTES;
  if (!is_float8 && (backward || !layer.reads_integer_codes(keep))) return codes;
  const auto of = [&](const paddle::Tensor& matrix, const paddle::Tensor& scales, bool turns) {
    return readable(layer.target(), matrix, scales, a.transpose != turns);
  };
  if (!backward || !a.keep_hidden) codes.gate_up = of(o.gate_up, o.scales->gate_up, false);
  if (!backward) {
    codes.down = of(o.down, o.scales->down, false);
  } else {
    codes.turned_gate_up = of(o.gate_up, o.scales->gate_up, true);
    codes.turned_down = of(o.down, o.scales->down, true);
  }
  return codes;
}

std::unique_ptr<ExpertLayer> layer_of(const QuantizedAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
                                      const paddle::Tensor* d_out = nullptr) {
  const MlpAttributes attributes = of_layer(a);
  return a.format == PMO_MATRIX_FLOAT8_128X128 ? new_float8_layer(attributes, o, hidden, d_out)
                                               : new_layer(attributes, o, hidden, d_out);
}

Outputs run(const QuantizedAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up,
            const paddle::Tensor& gate_up_scales, const paddle::Tensor& down, const paddle::Tensor& down_scales,
            const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
            const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row) {
  const MatrixScales scales = {gate_up_scales, down_scales, a.format};
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row, &scales};
  const std::unique_ptr<ExpertLayer> layer = layer_of(a, o);
  return mlp_forward(of_layer(a), *layer, o, codes_of(a, *layer, o, false));
}

Outputs run_backward(const QuantizedAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up,
                     const paddle::Tensor& gate_up_scales, const paddle::Tensor& down, const paddle::Tensor& down_scales,
                     const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                     const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                     const paddle::Tensor& hidden, const paddle::Tensor& d_out) {
  const MatrixScales scales = {gate_up_scales, down_scales, a.format};
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row, &scales};
  const std::unique_ptr<ExpertLayer> layer = layer_of(a, o, &hidden, &d_out);
  const Outputs gradients = mlp_backward(of_layer(a), *layer, o, hidden, d_out, codes_of(a, *layer, o, true));
  return {gradients[0], gradients[3]};
}

std::vector<Shape> shapes(const QuantizedAttributes& a, const Shape& x, const Shape& gate_up, const Shape&, const Shape& down,
                          const Shape&, const Shape& weights, const Shape& token_rows, const Shape& row_to_token,
                          const Shape& sizes, const Shape& offsets, const Shape& slot_to_row) {
  return mlp_shapes(of_layer(a), x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row);
}

std::vector<DataType> dtypes(const DataType& x, const DataType&, const DataType&, const DataType&, const DataType&,
                             const DataType&, const DataType&, const DataType&, const DataType&, const DataType&,
                             const DataType&) {
  return {x, x};
}

std::vector<Shape> backward_shapes(const QuantizedAttributes&, const Shape& x, const Shape&, const Shape&, const Shape&,
                                   const Shape&, const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&,
                                   const Shape&, const Shape&, const Shape&) {
  return {x, weights};
}

std::vector<DataType> backward_dtypes(const DataType& x, const DataType&, const DataType&, const DataType&, const DataType&,
                                      const DataType& weights, const DataType&, const DataType&, const DataType&, const DataType&,
                                      const DataType&, const DataType&, const DataType&) {
  return {x, weights};
}

Outputs double_backward(const QuantizedAttributes&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                        const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                        const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                        const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&) {
  fail_second_order(kMoeMlp, "; detach an operand, where first-order ones are enough");
}

std::vector<Shape> double_backward_shapes(const QuantizedAttributes&, const Shape& x, const Shape&, const Shape&, const Shape&,
                                          const Shape&, const Shape& weights, const Shape&, const Shape&, const Shape&,
                                          const Shape&, const Shape&, const Shape&, const Shape& d_out, const Shape&,
                                          const Shape&) {
  return {x, weights, d_out};
}

std::vector<DataType> double_backward_dtypes(const DataType& x, const DataType&, const DataType&, const DataType&,
                                             const DataType&, const DataType& weights, const DataType&, const DataType&,
                                             const DataType&, const DataType&, const DataType&, const DataType&,
                                             const DataType& d_out, const DataType&, const DataType&) {
  return {x, weights, d_out};
}

}  // namespace

PD_BUILD_OP(pmo_moe_mlp_quantized)
    .Inputs({"x", "gate_up", "gate_up_scales", "down", "down_scales", "weights", "token_rows", "row_to_token", "sizes", "offsets",
             "slot_to_row"})
    .Outputs({"out", "hidden"})
    .Attrs(QuantizedAttributes::names())
    .SetKernelFn(PMO_KERNEL(run))
    .SetInferShapeFn(PMO_INFER_SHAPE(shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(dtypes));

PD_BUILD_GRAD_OP(pmo_moe_mlp_quantized)
    .Inputs({"x", "gate_up", "gate_up_scales", "down", "down_scales", "weights", "token_rows", "row_to_token", "sizes", "offsets",
             "slot_to_row", "hidden", paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("weights")})
    .Attrs(QuantizedAttributes::names())
    .SetKernelFn(PMO_KERNEL(run_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_mlp_quantized)
    .Inputs({"x", "gate_up", "gate_up_scales", "down", "down_scales", "weights", "token_rows", "row_to_token", "sizes", "offsets",
             "slot_to_row", "hidden", paddle::Grad("out"), paddle::Grad(paddle::Grad("x")),
             paddle::Grad(paddle::Grad("weights"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("weights"), paddle::Grad(paddle::Grad("out"))})
    .Attrs(QuantizedAttributes::names())
    .SetKernelFn(PMO_KERNEL(double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(double_backward_dtypes));

PMO_DIRECT(moe_mlp_quantized, run);

// Values of matrices that are codes, rounded to the dtype with a number of Paddle: for layers that are composed of other operators.
namespace {

PMO_ATTRIBUTES(ValuesAttributes, (int64_t, inner, inner), (int64_t, outer, outer), (bool, transpose, transpose),
               (int, format, format), (int, dtype, dtype));

Outputs values_of(const ValuesAttributes& a, const paddle::Tensor& codes, const paddle::Tensor& scales) {
  const Target target(kMoeMlp, {&codes, &scales});
  const auto dtype = static_cast<DataType>(a.dtype);
  require(dtype == DataType::FLOAT32 || dtype == DataType::FLOAT16 || dtype == DataType::BFLOAT16, kMoeMlp,
          "values must be float32, float16 or bfloat16");
  const ExpertMatrices::Codes matrices = {dense(codes), dense(scales), a.format, a.inner, a.outer, a.transpose, dtype};
  require_codes(matrices, kMoeMlp, "codes");
  return {dequantised(target, kMoeMlp, matrices)};
}

std::vector<Shape> values_shapes(const ValuesAttributes& a, const Shape& codes, const Shape&) {
  return {{dim(codes, 0), a.transpose ? a.outer : a.inner, a.transpose ? a.inner : a.outer}};
}

std::vector<DataType> values_dtypes(const ValuesAttributes& a, const DataType&, const DataType&) {
  return {static_cast<DataType>(a.dtype)};
}

}  // namespace

PD_BUILD_OP(pmo_dequantize_matrices)
    .Inputs({"codes", "scales"})
    .Outputs({"values"})
    .Attrs(ValuesAttributes::names())
    .SetKernelFn(PMO_KERNEL(values_of))
    .SetInferShapeFn(PMO_INFER_SHAPE(values_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));

PMO_DIRECT(dequantize_matrices, values_of);

#endif
