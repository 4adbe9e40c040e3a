// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Core calls shared by several operators: permuting rows, as they are or quantised, summing them by token, and values per slot.
#pragma once

#include "paddle/binding.h"
#include "pmo/permute.h"
#include "pmo/quantize.h"
#include "pmo/route.h"

namespace pmo {
namespace binding {

// The optional scale input of an operator. Paddle treats an optional input without elements as missing. So attributes carry its
// presence, its columns and its dtype.
struct Scale {
  const Target& target;
  bool given;
  paddle::Tensor tensor;  // [T, S] if given

  Scale(const Target& target, const char* function, const paddle::optional<paddle::Tensor>& scale, bool has_scale,
        int64_t columns, int dtype, const paddle::Tensor& x);
  // The scales in expert order: [num_rows, S], or [0] if there is no scale or it is not permuted.
  paddle::Tensor empty_rows(int64_t num_rows, bool moved) const;
};

// Shape and dtype of Scale::empty_rows for inference.
Shape scale_rows_shape(const paddle::optional<Shape>& scale, bool has_scale, int64_t columns, int64_t num_rows, bool moved);
paddle::DataType scale_rows_dtype(bool has_scale, int dtype);

// Params of pmo_permute_* with the operands that they point to: x [T, H], and row_to_token [N].
class Permutation {
 public:
  Permutation(const Target& target, const char* function, const paddle::Tensor& x, const Scale& scale,
              const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_token, int fill, paddle::Tensor* rows,
              paddle::Tensor* row_scales);

  const pmo_permute_params& params() const { return params_; }

 private:
  Matrix x_;
  Tensors maps_;
  paddle::optional<Matrix> scale_;
  pmo_permute_params params_ = {};
};

// Permutes x [T, H] to `rows` [N, H], and the scale, if present, to `row_scales` [N, S].
void permute_rows(const Target& target, const char* function, const paddle::Tensor& x, const Scale& scale,
                  const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_token, int fill, paddle::Tensor* rows,
                  paddle::Tensor* row_scales);

// Permutes without a scale, with zeros in padding rows.
void permute_rows(const Target& target, const char* function, const paddle::Tensor& x, const paddle::Tensor& slot_to_row,
                  const paddle::Tensor& row_to_token, paddle::Tensor* rows);

// The gradient of the gradient of permute, whose maps may differ: rows in token_rows are copies of their token, all others zeros.
// [N, H]
paddle::Tensor spread_rows(const Target& target, const char* function, const paddle::Tensor& x, const paddle::Tensor& token_rows,
                           const paddle::Tensor& row_to_token);

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8
// Options of a quantisation, attributes of an operator.
struct Quantization {
  bool ue8m0;
  bool by_column;  // scales
  float amax_min;
};

// Dtype and shape of the scales of `num_rows` rows of `hidden` columns; sizes of -1 are unknown.
paddle::DataType scales_dtype(bool ue8m0);
Shape scales_shape(const Quantization& quantization, int64_t num_rows, int64_t hidden);

// Maps from tokens to rows; without maps, row t is token t.
struct RowMaps {
  const paddle::Tensor* slot_to_row = nullptr;
  const paddle::Tensor* row_to_token = nullptr;
  int fill = 0;
};

// x [T, H] -> codes [N, H] in float8_e4m3fn, and scales. Codes are written to `given`, or to new memory if that is null.
Outputs quantize_rows(const Target& target, const char* function, const paddle::Tensor& x, const RowMaps& maps,
                      const Quantization& quantization, const paddle::Tensor* given = nullptr);

// codes [N, H] and their scales -> [N, H] of a dtype that can be summed
paddle::Tensor dequantize_rows(const Target& target, const char* function, const paddle::Tensor& codes,
                               const paddle::Tensor& scales, bool by_column, paddle::DataType dtype);
#endif

// The float32 weight of each row: values[r], or values[index[r]] with `index` [N].
struct Weights {
  const paddle::Tensor* values = nullptr;
  const paddle::Tensor* index = nullptr;
  bool copy_single_row = false;
};

// Sum of each token's rows -> [T, H]
paddle::Tensor sum_rows(const Target& target, const char* function, const paddle::Tensor& rows, const paddle::Tensor& token_rows,
                        const Weights& weights);

// Contents of a line of token_rows after a token's rows. kNones: -1 to the end, as in a plan. kAnything: one -1 and then
// anything, as in a cleaned rowmap.
enum class LineEnd { kNones, kAnything };

// The gradients of sum_rows: d_rows [N, H], and d_weights in the shape of the weights. A null gradient is not computed. `rows`
// may be null if d_weights is.
void sum_rows_backward(const Target& target, const char* function, const paddle::Tensor& d_out, const paddle::Tensor* rows,
                       const paddle::Tensor& token_rows, LineEnd line_end, const paddle::Tensor& row_to_token,
                       const Weights& weights, paddle::Tensor* d_rows, paddle::Tensor* d_weights);

// The operands of a weighted sum and of its gradient.
struct WeightedSum {
  const paddle::Tensor& rows;
  const paddle::Tensor& token_rows;
  const paddle::Tensor& row_to_token;
  Weights weights;
  const paddle::Tensor& d_out;
};

// The gradients of sum_rows_backward with respect to rows, weights and d_out, from those of d_rows and d_weights; null ones are
// zeros.
Outputs sum_rows_double_backward(const Target& target, const char* function, const WeightedSum& sum,
                                 const paddle::Tensor* dd_rows, const paddle::Tensor* dd_weights);

// Runs pmo_clean_rowmap_*, with a workspace if it needs one, and reports the findings of its checks.
void clean_rowmap(const Target& target, const char* function, const Names& names, pmo_clean_rowmap_params* params);

// The value of each slot's row, 0 if it has none: [T, K]. With `row_to_expert`, which must have as many rows: [T, num_experts],
// by the experts of the rows.
paddle::Tensor gather_slots(const Target& target, const char* function, const paddle::Tensor& slot_to_row,
                            const paddle::Tensor& row_values, const paddle::Tensor* row_to_expert = nullptr,
                            int64_t num_experts = 0);

// row_values[N] = the slots' values, [T, K] or [T, num_experts] as above, summed in slot order. With `accumulate` they are added
// to row_values.
void scatter_slots(const Target& target, const char* function, const paddle::Tensor& slot_to_row,
                   const paddle::Tensor& slot_values, bool accumulate, paddle::Tensor* row_values,
                   const paddle::Tensor* row_to_expert = nullptr, int64_t num_experts = 0);

}  // namespace binding
}  // namespace pmo
