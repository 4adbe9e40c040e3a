// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/movement.h"

#include <algorithm>

#include "common/scales.h"
#include "paddle/pages.h"

namespace pmo {
namespace binding {
namespace {

// The data of a map's dense form, which is appended to `kept`.
const int32_t* map_data(const paddle::Tensor& map, const char* function, const char* name, Tensors* kept) {
  require_dtype(map, paddle::DataType::INT32, function, name);
  kept->push_back(dense(map));
  return kept->back().data<int32_t>();
}

// Sets the fields common to the sum and its gradient. `kept` keeps dense copies alive as long as they are needed.
template <typename Params>
void set_sum_params(Params* p, const char* function, const paddle::Tensor& token_rows, int64_t num_rows, int64_t hidden,
                    const Weights& weights, Tensors* kept) {
  p->struct_size = sizeof(Params);
  require_rank(token_rows, 2, function, "token_rows");
  p->num_tokens = token_rows.shape()[0];
  p->max_rows_per_token = token_rows.shape()[1];
  p->num_rows = num_rows;
  p->hidden = hidden;
  p->token_rows = map_data(token_rows, function, "token_rows", kept);
  p->copy_single_row = weights.copy_single_row;
  if (weights.values == nullptr) return;
  require_dtype(*weights.values, paddle::DataType::FLOAT32, function, "the probabilities");
  kept->push_back(dense(*weights.values));
  p->num_weights = kept->back().numel();
  p->weights = kept->back().template data<float>();
  if (weights.index == nullptr) {
    require(p->num_weights == num_rows, function, "the probabilities must have one value per row");
  } else {
    require_shape(*weights.index, {num_rows}, function, "row_to_slot");
    p->weight_index = map_data(*weights.index, function, "row_to_slot", kept);
  }
}

pmo_slots_params slots_params(const char* function, const paddle::Tensor& slot_to_row, int64_t num_rows,
                              const paddle::Tensor* row_to_expert, int64_t num_experts, Tensors* kept) {
  require_rank(slot_to_row, 2, function, "slot_to_row");
  pmo_slots_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = slot_to_row.shape()[0];
  p.topk = slot_to_row.shape()[1];
  p.num_rows = num_rows;
  p.slot_to_row = map_data(slot_to_row, function, "slot_to_row", kept);
  if (row_to_expert == nullptr) return p;
  p.row_to_expert = map_data(*row_to_expert, function, "row_to_expert", kept);
  p.num_experts = num_experts;
  return p;
}

}  // namespace

Scale::Scale(const Target& target, const char* function, const paddle::optional<paddle::Tensor>& scale, bool has_scale,
             int64_t columns, int dtype, const paddle::Tensor& x)
    : target(target), given(has_scale) {
  require(has_scale || !scale, function, "has_scale must be true with a scale");
  if (!has_scale) return;
  if (scale) {
    tensor = *scale;
    require_rank(tensor, 2, function, "scale");
    require(static_cast<int>(tensor.dtype()) == dtype, function, "the attribute scale_dtype must describe the scale");
    return;
  }
  const auto scale_dtype = static_cast<paddle::DataType>(dtype);
  require(columns >= 0 && (columns == 0 || x.shape()[0] == 0), function, "scale is missing");
  require(scale_dtype == paddle::DataType::FLOAT32 || scale_dtype == paddle::DataType::INT32, function,
          "scale must be float32 or int32");
  tensor = target.empty({x.shape()[0], columns}, scale_dtype);
}

paddle::Tensor Scale::empty_rows(int64_t num_rows, bool moved) const {
  if (!given) return target.empty_float32({0});
  return target.empty(moved ? Shape{num_rows, tensor.shape()[1]} : Shape{0}, tensor.dtype());
}

Shape scale_rows_shape(const paddle::optional<Shape>& scale, bool has_scale, int64_t columns, int64_t num_rows, bool moved) {
  if (!has_scale || !moved) return {0};
  return {num_rows, scale ? dim(*scale, 1) : columns};
}

// A number that is no dtype of scales throws when the operator runs.
paddle::DataType scale_rows_dtype(bool has_scale, int dtype) {
  const bool is_int32 = has_scale && static_cast<paddle::DataType>(dtype) == paddle::DataType::INT32;
  return is_int32 ? paddle::DataType::INT32 : paddle::DataType::FLOAT32;
}

Permutation::Permutation(const Target& target, const char* function, const paddle::Tensor& x, const Scale& scale,
                         const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_token, int fill, paddle::Tensor* rows,
                         paddle::Tensor* row_scales)
    : x_(x) {
  require_rank(slot_to_row, 2, function, "slot_to_row");
  require(slot_to_row.shape()[0] == x.shape()[0], function, "the map must have one line per token");
  pmo_permute_params& p = params_;
  p.struct_size = sizeof(p);
  p.num_tokens = x.shape()[0];
  p.topk = slot_to_row.shape()[1];
  p.num_rows = row_to_token.shape()[0];
  p.hidden = x.shape()[1];
  p.dtype = dtype_of(x, function, "the rows");
  p.slot_to_row = map_data(slot_to_row, function, "slot_to_row", &maps_);
  p.row_to_token = map_data(row_to_token, function, "row_to_token", &maps_);
  p.fill = fill;
  p.x = x_.data;
  p.x_row_stride = x_.row_stride;
  prepare_pages(target, *rows);
  p.rows = rows->data();
  if (!scale.given) return;
  require(scale.tensor.shape()[0] == p.num_tokens, function, "scale must have one line per token");
  scale_ = Matrix(scale.tensor);
  p.scale = scale_->data;
  p.scale_row_stride = scale_->row_stride;
  p.scale_cols = scale.tensor.shape()[1];
  p.scale_dtype = dtype_of(scale.tensor, function, "scale");
  p.row_scales = row_scales->data();
}

void permute_rows(const Target& target, const char* function, const paddle::Tensor& x, const Scale& scale,
                  const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_token, int fill, paddle::Tensor* rows,
                  paddle::Tensor* row_scales) {
  const Permutation permutation(target, function, x, scale, slot_to_row, row_to_token, fill, rows, row_scales);
  check_status(PMO_CALL(target, permute, &permutation.params()), function);
}

void permute_rows(const Target& target, const char* function, const paddle::Tensor& x, const paddle::Tensor& slot_to_row,
                  const paddle::Tensor& row_to_token, paddle::Tensor* rows) {
  const Scale none(target, function, {}, false, -1, 0, x);
  permute_rows(target, function, x, none, slot_to_row, row_to_token, PMO_FILL_ROWS, rows, nullptr);
}

paddle::Tensor spread_rows(const Target& target, const char* function, const paddle::Tensor& x, const paddle::Tensor& token_rows,
                           const paddle::Tensor& row_to_token) {
  const Scale none(target, function, {}, false, -1, 0, x);
  // row_to_token may omit rows that token_rows contains, so it cannot select the rows to fill
  paddle::Tensor rows = target.zeros({row_to_token.shape()[0], x.shape()[1]}, x.dtype());
  permute_rows(target, function, x, none, token_rows, row_to_token, 0, &rows, nullptr);
  return rows;
}

#ifndef PMO_PADDLE_2
paddle::DataType scales_dtype(bool ue8m0) { return ue8m0 ? paddle::DataType::INT32 : paddle::DataType::FLOAT32; }

Shape scales_shape(const Quantization& quantization, int64_t num_rows, int64_t hidden) {
  const int64_t groups = hidden < 0 ? -1 : divide_up(hidden, kGroupColumns);
  const int64_t words = quantization.ue8m0 && groups >= 0 ? divide_up(groups, kPackedScales) : groups;
  if (!quantization.by_column) return {num_rows, words};
  return {words, num_rows < 0 ? -1 : round_up(num_rows, kColumnAlignment)};
}

Outputs quantize_rows(const Target& target, const char* function, const paddle::Tensor& x, const RowMaps& maps,
                      const Quantization& quantization, const paddle::Tensor* given) {
  require_rank(x, 2, function, "x");
  const Matrix source(x);
  Tensors kept;
  pmo_quantize_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = x.shape()[0];
  p.topk = 1;
  p.num_rows = p.num_tokens;
  p.hidden = x.shape()[1];
  p.x = source.data;
  p.x_row_stride = source.row_stride;
  p.dtype = dtype_of(x, function, "x");
  p.ue8m0 = quantization.ue8m0;
  p.scale_layout = quantization.by_column ? PMO_SCALES_BY_COLUMN : PMO_SCALES_BY_ROW;
  p.fill = maps.fill;
  p.amax_min = quantization.amax_min;
  if (maps.slot_to_row != nullptr) {
    require_rank(*maps.slot_to_row, 2, function, "slot_to_row");
    require_rank(*maps.row_to_token, 1, function, "row_to_token");
    require(maps.slot_to_row->shape()[0] == p.num_tokens, function, "the map must have one line per token");
    p.topk = maps.slot_to_row->shape()[1];
    p.num_rows = maps.row_to_token->shape()[0];
    p.slot_to_row = map_data(*maps.slot_to_row, function, "slot_to_row", &kept);
    p.row_to_token = map_data(*maps.row_to_token, function, "row_to_token", &kept);
  }
  paddle::Tensor codes = given != nullptr ? *given : target.empty({p.num_rows, p.hidden}, paddle::DataType::FLOAT8_E4M3FN);
  paddle::Tensor scales = target.empty(scales_shape(quantization, p.num_rows, p.hidden), scales_dtype(quantization.ue8m0));
  if (given == nullptr) prepare_pages(target, codes);
  p.codes = codes.data();
  p.scales = scales.data();
  paddle::Tensor workspace;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) p.workspace_bytes = pmo_quantize_cuda_workspace_bytes(&p);
#endif
  if (p.workspace_bytes > 0) {
    workspace = target.empty({p.workspace_bytes}, paddle::DataType::UINT8);
    p.workspace = workspace.data();
  }
  check_status(PMO_CALL(target, quantize, &p), function);
  return {codes, scales};
}

paddle::Tensor dequantize_rows(const Target& target, const char* function, const paddle::Tensor& codes,
                               const paddle::Tensor& scales, bool by_column, paddle::DataType dtype) {
  require_rank(codes, 2, function, "codes");
  require_dtype(codes, paddle::DataType::FLOAT8_E4M3FN, function, "codes");
  const bool ue8m0 = scales.dtype() == paddle::DataType::INT32;
  require_dtype(scales, scales_dtype(ue8m0), function, "scales");
  require(dtype == paddle::DataType::FLOAT32 || dtype == paddle::DataType::FLOAT16 || dtype == paddle::DataType::BFLOAT16,
          function, "dtype must be float32, float16 or bfloat16");
  const Matrix source(codes);
  const paddle::Tensor dense_scales = dense(scales);
  pmo_dequantize_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = codes.shape()[0];
  p.hidden = codes.shape()[1];
  require_shape(scales, scales_shape({ue8m0, by_column, 0}, p.num_rows, p.hidden), function, "scales");
  paddle::Tensor out = target.empty(codes.shape(), dtype);
  prepare_pages(target, out);
  p.codes = source.data;
  p.codes_row_stride = source.row_stride;
  p.scales = dense_scales.data();
  p.out = out.data();
  p.dtype = dtype_of(out, function, "dtype");
  p.ue8m0 = ue8m0;
  p.scale_layout = by_column ? PMO_SCALES_BY_COLUMN : PMO_SCALES_BY_ROW;
  check_status(PMO_CALL(target, dequantize, &p), function);
  return out;
}
#endif

paddle::Tensor sum_rows(const Target& target, const char* function, const paddle::Tensor& rows, const paddle::Tensor& token_rows,
                        const Weights& weights) {
  require_rank(rows, 2, function, "the rows");
  pmo_unpermute_params p = {};
  Tensors kept;
  set_sum_params(&p, function, token_rows, rows.shape()[0], rows.shape()[1], weights, &kept);
  p.dtype = dtype_of(rows, function, "the rows");
  const Matrix source(rows);
  p.rows = source.data;
  p.rows_row_stride = source.row_stride;
  paddle::Tensor out = target.empty({p.num_tokens, p.hidden}, rows.dtype());
  prepare_pages(target, out);
  p.out = out.data();
  p.out_row_stride = p.hidden;
  check_status(PMO_CALL(target, unpermute, &p), function);
  return out;
}

void sum_rows_backward(const Target& target, const char* function, const paddle::Tensor& d_out, const paddle::Tensor* rows,
                       const paddle::Tensor& token_rows, LineEnd line_end, const paddle::Tensor& row_to_token,
                       const Weights& weights, paddle::Tensor* d_rows, paddle::Tensor* d_weights) {
  if (d_rows != nullptr) *d_rows = target.empty({row_to_token.shape()[0], d_out.shape()[1]}, d_out.dtype());
  if (weights.values == nullptr && line_end == LineEnd::kNones) {  // every row is a copy, and every entry of the map is valid
    permute_rows(target, function, d_out, token_rows, row_to_token, d_rows);
    return;
  }
  pmo_unpermute_backward_params p = {};
  Tensors kept;
  set_sum_params(&p, function, token_rows, row_to_token.shape()[0], d_out.shape()[1], weights, &kept);
  p.dtype = dtype_of(d_out, function, "the gradient");
  p.row_to_token = map_data(row_to_token, function, "row_to_token", &kept);
  const Matrix gradient(d_weights == nullptr ? d_out : target.aligned(dense(d_out)));
  p.d_out = gradient.data;
  p.d_out_row_stride = gradient.row_stride;
  paddle::optional<Matrix> inputs;
  if (d_weights != nullptr) {
    inputs = Matrix(target.aligned(dense(*rows)));
    p.rows = inputs->data;
    p.rows_row_stride = inputs->row_stride;
    *d_weights = target.empty_float32(weights.values->shape());
    p.d_weights = d_weights->data<float>();
  }
  if (d_rows != nullptr) {
    prepare_pages(target, *d_rows);
    p.d_rows = d_rows->data();
  }
  check_status(PMO_CALL(target, unpermute_backward, &p), function);
}

Outputs sum_rows_double_backward(const Target& target, const char* function, const WeightedSum& sum,
                                 const paddle::Tensor* dd_rows, const paddle::Tensor* dd_weights) {
  Weights by_dd = sum.weights;
  if (dd_weights != nullptr) by_dd.values = dd_weights;
  paddle::Tensor rows, weights, d_out;
  // d_rows = w * d_out and d_weights = d_out . rows are linear in each factor, so both formulas apply again
  if (dd_rows != nullptr || dd_weights != nullptr) {
    sum_rows_backward(target, function, sum.d_out, dd_rows, sum.token_rows, LineEnd::kAnything, sum.row_to_token, by_dd,
                      dd_weights != nullptr ? &rows : nullptr, dd_rows != nullptr ? &weights : nullptr);
  }
  if (dd_rows != nullptr) d_out = sum_rows(target, function, *dd_rows, sum.token_rows, sum.weights);
  if (dd_weights != nullptr) {
    const paddle::Tensor summed = sum_rows(target, function, sum.rows, sum.token_rows, by_dd);
    // Paddle's CPU add does not support 16-bit floats
    d_out = d_out.defined() ? paddle::experimental::add_n({d_out, summed}) : summed;
  }
  if (!rows.defined()) rows = target.zeros(sum.rows.shape(), sum.rows.dtype());
  if (!weights.defined()) weights = target.zeros(sum.weights.values->shape(), paddle::DataType::FLOAT32);
  if (!d_out.defined()) d_out = target.zeros(sum.d_out.shape(), sum.d_out.dtype());
  return {rows, weights, d_out};
}

void clean_rowmap(const Target& target, const char* function, const Names& names, pmo_clean_rowmap_params* params) {
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) params->workspace_bytes = pmo_clean_rowmap_cuda_workspace_bytes(params);
#endif
  paddle::Tensor workspace = target.empty({params->workspace_bytes}, paddle::DataType::UINT8);
  params->workspace = workspace.data();
  check_status(PMO_CALL(target, clean_rowmap, params), function, names);
  if (!target.is_gpu() || params->checks == 0) return;
  pmo_rowmap_findings findings;  // the CPU operator reports itself
  target.copy_to_host(params->workspace, sizeof(findings), &findings);
  check_status(pmo_clean_rowmap_report(params, &findings), function, names);
}

paddle::Tensor gather_slots(const Target& target, const char* function, const paddle::Tensor& slot_to_row,
                            const paddle::Tensor& row_values, const paddle::Tensor* row_to_expert, int64_t num_experts) {
  require_dtype(row_values, paddle::DataType::FLOAT32, function, "the values of the rows");
  Tensors kept;
  pmo_slots_params p = slots_params(function, slot_to_row, row_values.numel(), row_to_expert, num_experts, &kept);
  const paddle::Tensor values = dense(row_values);
  paddle::Tensor slots = target.empty_float32({p.num_tokens, row_to_expert == nullptr ? p.topk : num_experts});
  p.row_values = const_cast<float*>(values.data<float>());  // the gather only reads it
  p.slot_values = slots.data<float>();
  check_status(PMO_CALL(target, gather_slots, &p), function);
  return slots;
}

void scatter_slots(const Target& target, const char* function, const paddle::Tensor& slot_to_row,
                   const paddle::Tensor& slot_values, bool accumulate, paddle::Tensor* row_values,
                   const paddle::Tensor* row_to_expert, int64_t num_experts) {
  Tensors kept;
  pmo_slots_params p = slots_params(function, slot_to_row, row_values->numel(), row_to_expert, num_experts, &kept);
  require_dtype(slot_values, paddle::DataType::FLOAT32, function, "the values of the slots");
  require_shape(slot_values, {p.num_tokens, row_to_expert == nullptr ? p.topk : num_experts}, function,
                "the values of the slots");
  const paddle::Tensor values = dense(slot_values);
  p.row_values = row_values->data<float>();
  p.slot_values = const_cast<float*>(values.data<float>());  // the scatter only reads it
  p.accumulate = accumulate;
  check_status(PMO_CALL(target, scatter_slots, &p), function);
}

}  // namespace binding
}  // namespace pmo
