// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/moe_mlp.h"

#include <utility>

#include "common/matrix_layout.h"
#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

namespace pmo {
namespace binding {
namespace {

// Inner size n of a layer: half of the outputs of gate_up, a dimension that no format packs.
int64_t inner_of(const MlpAttributes& a, const MlpOperands& o) { return dim(o.gate_up.shape(), a.transpose ? 1 : 2) / 2; }

void check_quantized(const MlpAttributes& a, const MlpOperands& o) {
  require_shape(o.gate_up, {o.down.shape()[0], -1, -1}, kMoeMlp, "gate_up");
  const int64_t columns = o.x.shape()[1], inner = inner_of(a, o);
  const MatrixScales& scales = *o.scales;
  require_codes({o.gate_up, scales.gate_up, scales.format, columns, 2 * inner, a.transpose, o.x.dtype()}, kMoeMlp, "gate_up");
  require_codes({o.down, scales.down, scales.format, inner, columns, a.transpose, o.x.dtype()}, kMoeMlp, "down");
}

// If both matrices agree on the width of tokens, an error names the tokens.
void check_width(const MlpAttributes& a, const MlpOperands& o) {
  require_rank(o.gate_up, 3, kMoeMlp, "gate_up");
  const int64_t columns = dim(o.down.shape(), a.transpose ? 1 : 2), rows = dim(o.gate_up.shape(), a.transpose ? 2 : 1);
  const bool is_packed = o.scales != nullptr && rows == bytes_of_int4(columns);
  if (rows == columns || is_packed) require_shape(o.x, {-1, columns}, kMoeMlp, "x");
}

// Checks all operands; returns the target.
const Target& checked(const Target& target, const MlpAttributes& a, const MlpOperands& o) {
  require(o.sizes.defined() && o.offsets.defined() && o.slot_to_row.defined(), kMoeMlp, "a required tensor is missing");
  require(is_summed(o.x), kMoeMlp, "x must be float32, float16 or bfloat16");
  require_rank(o.token_rows, 2, kMoeMlp, "token_rows");
  require_shape(o.x, {o.token_rows.shape()[0], -1}, kMoeMlp, "x");
  require_rank(o.down, 3, kMoeMlp, "down");
  check_width(a, o);
  const int64_t experts = o.down.shape()[0], columns = o.x.shape()[1];
  if (o.scales != nullptr) {
    check_quantized(a, o);
  } else {
    const int64_t inner = MatrixSizes(o.down.shape(), a.transpose).inner;
    require_dtype(o.gate_up, o.x.dtype(), kMoeMlp, "gate_up");
    require_dtype(o.down, o.x.dtype(), kMoeMlp, "down");
    require_shape(o.down, a.transpose ? Shape{experts, columns, inner} : Shape{experts, inner, columns}, kMoeMlp, "down");
    require_shape(o.gate_up, a.transpose ? Shape{experts, 2 * inner, columns} : Shape{experts, columns, 2 * inner}, kMoeMlp,
                  "gate_up");
  }
  require_dtype(o.token_rows, paddle::DataType::INT32, kMoeMlp, "token_rows");
  require_rank(o.row_to_token, 1, kMoeMlp, "row_to_token");
  require_dtype(o.row_to_token, paddle::DataType::INT32, kMoeMlp, "row_to_token");
  if (a.by_slot) {
    require_shape(o.slot_to_row, {o.x.shape()[0], -1}, kMoeMlp, "slot_to_row");
    require_dtype(o.slot_to_row, paddle::DataType::INT32, kMoeMlp, "slot_to_row");
  }
  require_shape(o.weights, a.by_slot ? o.slot_to_row.shape() : o.row_to_token.shape(), kMoeMlp, "probs");
  require_dtype(o.weights, paddle::DataType::FLOAT32, kMoeMlp, "probs");
  require_shape(o.sizes, {experts}, kMoeMlp, "sizes");
  return target;
}

ExpertMatrices matrices_of(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor& matrices,
                           const paddle::Tensor* scales, int64_t inner, int64_t outer) {
  if (scales == nullptr) return ExpertMatrices(matrices);
  const bool is_float8 = o.scales->format == PMO_MATRIX_FLOAT8_128X128;
  return ExpertMatrices(ExpertMatrices::Codes{dense(matrices), dense(*scales), o.scales->format, inner, outer, a.transpose,
                                              is_float8 ? paddle::DataType::FLOAT32 : o.x.dtype()});
}

// H for a backward pass that overwrites it.
paddle::Tensor overwritable(const MlpAttributes& a, const ExpertLayer& layer, const paddle::Tensor& hidden) {
  paddle::Tensor values = dense(hidden);
  if (a.in_place) {
    values.bump_inplace_version();
    return values;
  }
  paddle::Tensor copy = layer.target().empty(values.shape(), values.dtype());
  layer.target().copy(values.data(), values.numel() * static_cast<int64_t>(phi::SizeOf(values.dtype())), copy.data());
  return copy;
}

}  // namespace

bool layer_has_kernels(const Target& target, paddle::DataType dtype, int64_t num_rows, int64_t num_experts, int64_t hidden_size,
                       int64_t inner, bool float8) {
  if (float8 && (dtype != paddle::DataType::BFLOAT16 || inner % PMO_QUANTIZE_GROUP != 0)) return false;
  const int32_t operands = float8 ? PMO_FLOAT8_E4M3FN : grouped_dtype(dtype);
  // sizes of the GEMMs for H and dA'; the other GEMMs have the same sizes, transposed
  return has_grouped_kernels(target, operands, num_rows, num_experts, hidden_size, 2 * inner) &&
         has_grouped_kernels(target, operands, num_rows, num_experts, hidden_size, inner);
}

ExpertLayer::ExpertLayer(const MlpAttributes& attributes, const MlpOperands& operands, bool float8, const paddle::Tensor* hidden,
                         const paddle::Tensor* d_out)
    : target_(kMoeMlp,
              {&operands.x, &operands.gate_up, &operands.down, &operands.weights, &operands.token_rows, &operands.row_to_token},
              {hidden, d_out, operands.scales ? &operands.scales->gate_up : nullptr,
               operands.scales ? &operands.scales->down : nullptr}),
      transpose_(attributes.transpose),
      float8_(float8),
      float8_wgrads_(float8 && attributes.float8_wgrads),
      workspace_(attributes.workspace),
      operands_(operands),
      groups_(checked(target_, attributes, operands), kMoeMlp, operands.sizes, &operands.offsets,
              dim(operands.row_to_token.shape(), 0)),
      gate_up_(matrices_of(attributes, operands, operands.gate_up, operands.scales ? &operands.scales->gate_up : nullptr,
                           operands.x.shape()[1], 2 * inner_of(attributes, operands))),
      down_(matrices_of(attributes, operands, operands.down, operands.scales ? &operands.scales->down : nullptr,
                        inner_of(attributes, operands), operands.x.shape()[1])),
      by_slot_(attributes.by_slot),
      row_to_token_(dense(operands.row_to_token)),
      hidden_size(operands.x.shape()[1]),
      inner(inner_of(attributes, operands)),
      has_kernels_(
          layer_has_kernels(target_, operands.x.dtype(), num_rows(), operands.down.shape()[0], hidden_size, inner, float8)) {}

const paddle::Tensor& ExpertLayer::row_weights() const {
  if (!row_weights_.defined() && by_slot_) {
    row_weights_ = target_.empty_float32(operands_.row_to_token.shape());
    scatter_slots(target_, kMoeMlp, operands_.slot_to_row, operands_.weights, false, &row_weights_);
  } else if (!row_weights_.defined()) {
    row_weights_ = dense(operands_.weights);
  }
  return row_weights_;
}

paddle::Tensor ExpertLayer::outputs(pmo_layer_hidden keep, bool clears, const MatrixCodes& codes, Kept* kept) const {
  if (!has_kernels_) {
    paddle::Tensor hidden = composed_hidden(codes);
    if (keep != PMO_LAYER_RECOMPUTES) *kept = kept_of(hidden, keep);
    return composed_outputs(std::move(hidden), codes);
  }
  paddle::Tensor out = target_.empty(operands_.x.shape(), dtype());
  pmo_layer_facts f = {};
  pmo_layer_params p = {};
  f.keeps_hidden = keep;
  if (keep == PMO_LAYER_KEEPS) {
    kept->values = new_rows(2 * inner, dtype());
    p.clears_hidden = clears;
#ifndef PMO_PADDLE_2
  } else if (keep == PMO_LAYER_KEEPS_CODES) {
    kept->values = new_rows(2 * inner, paddle::DataType::FLOAT8_E4M3FN);
    kept->scales = target_.empty_float32({num_rows(), 2 * inner / PMO_QUANTIZE_GROUP});
    p.hidden_scales = kept->scales.data<float>();
#endif
  }
  if (keep != PMO_LAYER_RECOMPUTES) p.hidden = kept->values.data();
  p.out = out.data();
  run(f, p, codes);
  return out;
}

void ExpertLayer::set_wgrads(const MlpAttributes& a, const Sums& sums, Outputs* gradients, pmo_layer_params* p) const {
  const auto memory = [&](const paddle::Tensor* sum, size_t place, bool is_wanted, const paddle::Tensor& operand,
                          int32_t* accumulation) -> void* {
    if (!is_wanted) return nullptr;
    if (sum == nullptr) {
      (*gradients)[place] = target_.empty(operand.shape(), operand.dtype());
      return (*gradients)[place].data();
    }
    *accumulation = sum->dtype() == paddle::DataType::FLOAT32 ? PMO_GROUPED_ADDS_FLOAT32 : PMO_GROUPED_ADDS;
    return const_cast<void*>(sum->data());
  };
  p->d_gate_up = memory(sums.gate_up, 1, a.need_gate_up_grad, operands_.gate_up, &p->gate_up_accumulation);
  p->d_down = memory(sums.down, 2, a.need_down_grad, operands_.down, &p->down_accumulation);
}

void ExpertLayer::backward(const MlpAttributes& a, const Kept& kept, const paddle::Tensor& d_out, const MatrixCodes& codes,
                           const Sums& sums, Outputs* gradients, Deferred* deferred) const {
  if (!has_kernels_) return composed_backward(a, kept, d_out, codes, gradients, deferred);
  const auto wanted = [&](size_t place, bool is_wanted, const paddle::Tensor& operand) -> void* {
    if (!is_wanted) return nullptr;
    (*gradients)[place] = target_.empty(operand.shape(), operand.dtype());
    return (*gradients)[place].data();
  };
  pmo_layer_facts f = {};
  pmo_layer_params p = {};
  f.backward = 1;
  p.d_x = wanted(0, a.need_x_grad, operands_.x);
  if (deferred == nullptr) {
    set_wgrads(a, sums, gradients, &p);
  } else {
    f.part = PMO_LAYER_DGRADS;
    const bool has_values = kept.values.defined() && !kept.scales.defined();
    deferred->scaled = new_rows(inner, dtype());
    deferred->d_hidden = has_values ? kept.values : new_rows(2 * inner, dtype());
    p.scaled = deferred->scaled.data();
    if (!has_values) p.d_hidden = deferred->d_hidden.data();
  }
  p.d_weights = static_cast<float*>(wanted(3, a.need_weights_grad, row_weights()));
  f.needs_d_weights = a.need_weights_grad;
  if (kept.values.defined()) {
    f.keeps_hidden = kept.scales.defined() ? PMO_LAYER_KEEPS_CODES : PMO_LAYER_KEEPS;
    p.hidden = const_cast<void*>(kept.values.data());
    if (kept.scales.defined()) p.hidden_scales = const_cast<float*>(kept.scales.data<float>());
  }
  const Matrix rows = readable_rows(target_, d_out);
  p.d_out = rows.data;
  p.d_out_row_stride = rows.row_stride;
  run(f, p, codes);
}

void ExpertLayer::wgrads(const MlpAttributes& a, const Deferred& deferred, const paddle::Tensor& d_out, const Sums& sums,
                         Outputs* gradients) const {
  if (!has_kernels_) return composed_wgrads(a, {deferred.d_hidden, deferred.scaled, {}, {}}, d_out, gradients);
  pmo_layer_facts f = {};
  pmo_layer_params p = {};
  f.backward = 1;
  f.part = PMO_LAYER_WGRADS;
  set_wgrads(a, sums, gradients, &p);
  if (a.need_down_grad) p.scaled = const_cast<void*>(deferred.scaled.data());
  if (a.need_gate_up_grad) p.d_hidden = const_cast<void*>(deferred.d_hidden.data());
  const Matrix rows = readable_rows(target_, d_out);
  p.d_out = rows.data;
  p.d_out_row_stride = rows.row_stride;
  run(f, p, {});
}

pmo_layer_plan ExpertLayer::plan_of(pmo_layer_facts* f, bool has_codes) const {
  pmo_layer_plan plan = {};
  f->struct_size = sizeof *f;
  f->num_tokens = operands_.x.shape()[0];
  f->num_rows = num_rows();
  f->num_experts = operands_.down.shape()[0];
  f->hidden = hidden_size;
  f->inner = inner;
  f->workspace = workspace_;
  f->dtype = dtype_of(operands_.x, kMoeMlp, "x");
  f->float8 = float8_ && f->part != PMO_LAYER_WGRADS;
  f->float8_wgrads = float8_wgrads_ && f->backward != 0;
  f->has_codes = has_codes;
  if (operands_.scales != nullptr) f->codes_format = operands_.scales->format;
#ifdef PMO_WITH_CUDA
  pmo_gpu_facts_cuda(&f->num_sms, &f->memory_gbps);
#endif
  check_status(pmo_layer_plan_of(f, &plan), kMoeMlp);
  return plan;
}

bool ExpertLayer::reads_integer_codes(pmo_layer_hidden keep) const {
  if (!has_kernels_) return false;
  pmo_layer_facts f = {};
  f.keeps_hidden = keep;
  return plan_of(&f, true).sum_tile_rows == PMO_GROUPED_FEW_ROWS;
}

void ExpertLayer::run([[maybe_unused]] pmo_layer_facts f, [[maybe_unused]] pmo_layer_params p,
                      [[maybe_unused]] const MatrixCodes& codes) const {
#ifdef PMO_WITH_CUDA
  static constexpr pmo_layer_kernels kKernels = {
      pmo_grouped_tables_cuda,  pmo_permute_cuda,        pmo_grouped_product_cuda,  pmo_grouped_outer_cuda,
      pmo_row_sums_cuda,        pmo_unpermute_cuda,      pmo_grouped_clear_cuda,    pmo_quantize_cuda,
      pmo_quantize_blocks_cuda, pmo_grouped_float8_cuda, pmo_quantize_columns_cuda, pmo_grouped_outer_float8_cuda};
  const MlpOperands& o = operands_;
  const bool reads_matrices = f.part != PMO_LAYER_WGRADS;
  const pmo_layer_plan plan = plan_of(&f, codes.down.codes.defined() || codes.turned_down.codes.defined());
  const paddle::Tensor workspace = target_.empty({plan.bytes}, paddle::DataType::UINT8);
  const Matrix tokens = readable_rows(target_, o.x);
  const auto readable = [&](const ExpertMatrices& matrices) -> paddle::Tensor {
    if (!reads_matrices) return {};
    if (matrices.values.defined()) return target_.aligned(dense(matrices.values));
    return f.has_codes ? matrices.of_codes.codes : dequantised(target_, kMoeMlp, matrices.of_codes);
  };
  const paddle::Tensor gate_up = readable(gate_up_), down = readable(down_);
  const paddle::Tensor token_rows = dense(o.token_rows), sizes = integers_on(target_, o.sizes),
                       offsets = integers_on(target_, o.offsets);
  const auto pointers = [](const Float8& matrix) {
    return matrix.codes.defined() ? pmo_layer_codes{matrix.codes.data(), matrix.scales.data<float>()} : pmo_layer_codes{};
  };
  p.struct_size = sizeof p;
  p.slots_per_token = token_rows.shape()[1];
  p.x = tokens.data;
  p.x_row_stride = tokens.row_stride;
  if (reads_matrices) {
    p.gate_up = gate_up.data();
    p.down = down.data();
  }
  const bool reads_slots = by_slot_ && plan.sum_tile_rows == PMO_GROUPED_FEW_ROWS;
  const paddle::Tensor slot_to_row = reads_slots ? dense(o.slot_to_row) : paddle::Tensor();
  const paddle::Tensor weights = reads_slots ? dense(o.weights) : row_weights();
  if (reads_slots) {
    p.slot_to_row = slot_to_row.data<int32_t>();
    p.topk = slot_to_row.shape()[1];
  }
  p.weights = weights.data<float>();
  p.token_rows = token_rows.data<int32_t>();
  p.row_to_token = row_to_token_.data<int32_t>();
  p.sizes = sizes.data();
  p.offsets = offsets.data();
  p.sizes_kind = index_kind(o.sizes, kMoeMlp, "sizes");
  p.offsets_kind = index_kind(o.offsets, kMoeMlp, "offsets");
  p.gate_up_codes = pointers(codes.gate_up);
  p.down_codes = pointers(codes.down);
  p.turned_gate_up_codes = pointers(codes.turned_gate_up);
  p.turned_down_codes = pointers(codes.turned_down);
  p.workspace = const_cast<void*>(workspace.data());
  p.transpose = transpose_;
  check_status(pmo_layer_run(&f, &p, &kKernels, target_.stream()), kMoeMlp);
#endif
}

// ---- without kernels

Kept ExpertLayer::kept_of(const paddle::Tensor& hidden, pmo_layer_hidden) const { return {hidden, {}}; }

paddle::Tensor ExpertLayer::hidden_of(const Kept& kept) const { return kept.values; }

paddle::Tensor ExpertLayer::wgrad_operand(const paddle::Tensor& rows, bool) const { return rows; }

paddle::Tensor ExpertLayer::new_rows(int64_t columns, paddle::DataType dtype) const {
  paddle::Tensor rows = target_.empty({num_rows(), columns}, dtype);
  prepare_pages(target_, rows);
  return rows;
}

paddle::Tensor ExpertLayer::rows_of(const paddle::Tensor& tokens) const {
  paddle::Tensor rows = target_.empty({num_rows(), hidden_size}, dtype());
  permute_rows(target_, kMoeMlp, tokens, operands_.token_rows, operands_.row_to_token, &rows);
  return rows;
}

paddle::Tensor ExpertLayer::sums_of(const paddle::Tensor& rows, bool weighted) const {
  Weights weights;
  if (weighted) weights.values = &row_weights();
  return sum_rows(target_, kMoeMlp, rows, operands_.token_rows, weights);
}

paddle::Tensor ExpertLayer::swiglu(const paddle::Tensor& hidden) const {
  paddle::Tensor act = new_rows(inner, hidden.dtype());
  pmo_swiglu_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows();
  p.width = inner;
  p.hidden = hidden.data();
  p.act = act.data();
  p.dtype = dtype_of(act, kMoeMlp, "x");
  check_status(PMO_CALL(target_, swiglu, &p), kMoeMlp);
  return act;
}

ExpertLayer::ActivationGradients ExpertLayer::swiglu_backward(const paddle::Tensor& hidden, paddle::Tensor scaled) const {
  ActivationGradients gradients;
  gradients.d_weights = target_.empty_float32({num_rows()});
  gradients.d_hidden = new_rows(2 * inner, hidden.dtype());
  pmo_swiglu_backward_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows();
  p.width = inner;
  p.hidden = hidden.data();
  p.row_to_token = row_to_token_.data<int32_t>();
  p.weights = row_weights().data<float>();
  p.d_hidden = gradients.d_hidden.data();
  p.scaled = scaled.data();
  p.d_weights = gradients.d_weights.data<float>();
  p.dtype = dtype_of(scaled, kMoeMlp, "x");
  check_status(PMO_CALL(target_, swiglu_backward, &p), kMoeMlp);
  gradients.scaled = scaled;
  return gradients;
}

void ExpertLayer::composed_wgrads(const MlpAttributes& a, ActivationGradients activation, const paddle::Tensor& d_out,
                                  Outputs* gradients) const {
  const auto wgrad = [&](paddle::Tensor inputs, paddle::Tensor outputs) {
    inputs = wgrad_operand(inputs, false);
    outputs = wgrad_operand(outputs, true);
    return transpose_ ? groups_.wgrad(outputs, inputs, dtype()) : groups_.wgrad(inputs, outputs, dtype());
  };
  if (a.need_down_grad) {
    (*gradients)[2] = wgrad(activation.scaled, activation.d_out.defined() ? activation.d_out : rows_of(d_out));
  }
  activation.scaled = activation.d_out = {};  // frees their memory early
  if (a.need_gate_up_grad) (*gradients)[1] = wgrad(rows_of(operands_.x), activation.d_hidden);
}

void ExpertLayer::composed_backward(const MlpAttributes& a, const Kept& kept, const paddle::Tensor& d_out,
                                    const MatrixCodes& codes, Outputs* gradients, Deferred* deferred) const {
  ActivationGradients activation =
      activation_gradients(kept.values.defined() ? hidden_of(kept) : composed_hidden(codes), d_out, codes);
  if (a.need_weights_grad) (*gradients)[3] = activation.d_weights;
  if (deferred == nullptr) {
    paddle::Tensor d_hidden = activation.d_hidden;
    composed_wgrads(a, std::exchange(activation, {}), d_out, gradients);
    activation.d_hidden = d_hidden;
  } else {
    *deferred = {activation.d_hidden, activation.scaled};
    activation.scaled = activation.d_out = {};
  }
  if (a.need_x_grad) (*gradients)[0] = composed_d_x(activation, codes);
}

Outputs mlp_forward(const MlpAttributes& a, const ExpertLayer& layer, const MlpOperands& o, const MatrixCodes& codes) {
  Kept kept;
  // Paddle may check the values of outputs.
  const paddle::Tensor out = layer.outputs(a.keep_hidden ? PMO_LAYER_KEEPS : PMO_LAYER_RECOMPUTES, true, codes, &kept);
  if (!a.keep_hidden) kept.values = layer.target().empty({0, 2 * layer.inner}, o.x.dtype());
  return {out, kept.values};
}

Outputs mlp_backward(const MlpAttributes& a, const ExpertLayer& layer, const MlpOperands& o, const paddle::Tensor& hidden,
                     const paddle::Tensor& d_out, const MatrixCodes& codes) {
  require_gradient(d_out, o.x.shape(), o.x.dtype(), kMoeMlp, "the gradient of the result");
  // A program from a file may pass any tensor as `hidden`.
  require(hidden.defined(), kMoeMlp, "a required tensor is missing");
  require_gradient(hidden, {a.keep_hidden ? layer.num_rows() : 0, 2 * layer.inner}, o.x.dtype(), kMoeMlp, "hidden");
  without_gradient({&o.token_rows, &o.row_to_token, &o.sizes, &o.offsets, &o.slot_to_row, &hidden});
  const auto zeros_like = [&](const paddle::Tensor& tensor) { return layer.target().zeros(tensor.shape(), tensor.dtype()); };
  Outputs gradients = {{}, {}, {}, {}};
  const bool has_d_out = d_out.initialized();
  if (has_d_out) {
    Kept kept;
    if (a.keep_hidden) kept.values = layer.has_kernels() ? overwritable(a, layer, hidden) : dense(hidden);
    layer.backward(a, kept, d_out, codes, {}, &gradients);
    if (a.by_slot && a.need_weights_grad) gradients[3] = gather_slots(layer.target(), kMoeMlp, o.slot_to_row, gradients[3]);
  }
  const paddle::Tensor* const operands[] = {&o.x, &o.gate_up, &o.down, &o.weights};
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool is_matrix = i == 1 || i == 2;
    if (!gradients[i].defined() && !(is_matrix && o.scales != nullptr)) gradients[i] = zeros_like(*operands[i]);
  }
  return gradients;
}

std::vector<Shape> mlp_shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape&, const Shape&,
                              const Shape&, const Shape& row_to_token, const Shape&, const Shape&, const Shape&) {
  return {x, {a.keep_hidden ? dim(row_to_token, 0) : 0, MatrixSizes(gate_up, a.transpose).outer}};
}

std::vector<paddle::DataType> mlp_dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {x, x};
}

std::vector<Shape> mlp_backward_shapes(const MlpAttributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                       const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&, const Shape&,
                                       const Shape&, const Shape&) {
  return {x, gate_up, down, weights};
}

std::vector<paddle::DataType> mlp_backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                                  const paddle::DataType& down, const paddle::DataType& weights,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&) {
  return {x, gate_up, down, weights};
}

Outputs mlp_double_backward(const MlpAttributes&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                            const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&) {
  fail_second_order(kMoeMlp, "; detach an operand, where first-order ones are enough");
}

std::vector<Shape> mlp_double_backward_shapes(const MlpAttributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                              const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&,
                                              const Shape&, const Shape&, const Shape& d_out, const Shape&, const Shape&,
                                              const Shape&, const Shape&) {
  return {x, gate_up, down, weights, d_out};
}

std::vector<paddle::DataType> mlp_double_backward_dtypes(
    const paddle::DataType& x, const paddle::DataType& gate_up, const paddle::DataType& down, const paddle::DataType& weights,
    const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType& d_out, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType&) {
  return {x, gate_up, down, weights, d_out};
}

}  // namespace binding
}  // namespace pmo
