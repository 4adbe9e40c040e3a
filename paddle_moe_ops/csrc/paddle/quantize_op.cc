// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// quantize_1x128: rows to float8 with one scale per 128 columns; permute_quantized: the same and a permutation to expert order;
// dequantize_1x128: the inverse. They have no gradient, since Paddle would cast that of a float8 tensor to float8.
#include "paddle/direct.h"
#include "paddle/movement.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

Outputs quantize(const paddle::Tensor& x, bool ue8m0, bool by_column, float amax_min) {
  constexpr char kFunction[] = "quantize_1x128";
  const Target target(kFunction, {&x});
  RowMaps maps;
  maps.fill = PMO_FILL_SCALES;  // zeroes the scales after the last row
  return quantize_rows(target, kFunction, x, maps, {ue8m0, by_column, amax_min});
}

std::vector<Shape> quantize_shapes(const Shape& x, bool ue8m0, bool by_column, float amax_min) {
  return {x, scales_shape({ue8m0, by_column, amax_min}, dim(x, 0), dim(x, 1))};
}

std::vector<paddle::DataType> quantize_dtypes(const paddle::DataType&, bool ue8m0, bool, float) {
  return {paddle::DataType::FLOAT8_E4M3FN, scales_dtype(ue8m0)};
}

Outputs permute_quantized(const paddle::Tensor& x, const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_token,
                          int fill, bool ue8m0, bool by_column, float amax_min) {
  constexpr char kFunction[] = "permute";
  const Target target(kFunction, {&x, &slot_to_row, &row_to_token});
  return quantize_rows(target, kFunction, x, {&slot_to_row, &row_to_token, fill}, {ue8m0, by_column, amax_min});
}

std::vector<Shape> permute_quantized_shapes(const Shape& x, const Shape&, const Shape& row_to_token, int, bool ue8m0,
                                            bool by_column, float amax_min) {
  const int64_t rows = dim(row_to_token, 0), hidden = dim(x, 1);
  return {{rows, hidden}, scales_shape({ue8m0, by_column, amax_min}, rows, hidden)};
}

std::vector<paddle::DataType> permute_quantized_dtypes(const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                       int, bool ue8m0, bool, float) {
  return {paddle::DataType::FLOAT8_E4M3FN, scales_dtype(ue8m0)};
}

Outputs dequantize(const paddle::Tensor& codes, const paddle::Tensor& scales, bool by_column, int dtype) {
  constexpr char kFunction[] = "dequantize_1x128";
  const Target target(kFunction, {&codes, &scales});
  return {dequantize_rows(target, kFunction, codes, scales, by_column, static_cast<paddle::DataType>(dtype))};
}

std::vector<Shape> dequantize_shapes(const Shape& codes, const Shape&, bool, int) { return {codes}; }

// A number that is no dtype of sums throws when the operator runs. Until then inference may return any dtype that Paddle knows.
std::vector<paddle::DataType> dequantize_dtypes(const paddle::DataType&, const paddle::DataType&, bool, int dtype) {
  const auto given = static_cast<paddle::DataType>(dtype);
  const bool is_known = given == paddle::DataType::FLOAT16 || given == paddle::DataType::BFLOAT16;
  return {is_known ? given : paddle::DataType::FLOAT32};
}

}  // namespace

PD_BUILD_OP(pmo_quantize_1x128)
    .Inputs({"x"})
    .Outputs({"codes", "scales"})
    .Attrs({"ue8m0: bool", "by_column: bool", "amax_min: float"})
    .SetKernelFn(PD_KERNEL(quantize))
    .SetInferShapeFn(PD_INFER_SHAPE(quantize_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(quantize_dtypes));
PMO_DIRECT(quantize_1x128, quantize);

PD_BUILD_OP(pmo_permute_quantized)
    .Inputs({"x", "slot_to_row", "row_to_token"})
    .Outputs({"codes", "scales"})
    .Attrs({"fill: int", "ue8m0: bool", "by_column: bool", "amax_min: float"})
    .SetKernelFn(PD_KERNEL(permute_quantized))
    .SetInferShapeFn(PD_INFER_SHAPE(permute_quantized_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(permute_quantized_dtypes));
PMO_DIRECT(permute_quantized, permute_quantized);

PD_BUILD_OP(pmo_dequantize_1x128)
    .Inputs({"codes", "scales"})
    .Outputs({"out"})
    .Attrs({"by_column: bool", "dtype: int"})
    .SetKernelFn(PD_KERNEL(dequantize))
    .SetInferShapeFn(PD_INFER_SHAPE(dequantize_shapes))
    .SetInferDtypeFn(PD_INFER_DTYPE(dequantize_dtypes));
PMO_DIRECT(dequantize_1x128, dequantize);

#endif
