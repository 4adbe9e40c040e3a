// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_float8: a layer of experts whose GEMMs, but for wgrads, have float8 operands, as pmo/layer.h describes it.
//
// Without kernels for the sizes, rows and matrices are dequantised and multiplied in float32. SwiGLU's gradient is float32 too,
// since a quantisation follows it.
//
// An operator that keeps H quantises both matrices once: the forward pass also writes the form that the backward pass reads, and keeps
// it as the bytes of `codes`. Paddle computes zeros for results without a gradient, and has none of float8.
#include <memory>
#include <utility>

#include "common/arithmetic.h"
#include "common/scales.h"
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"
#include "pmo/grouped_float8.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr auto kFloat32 = paddle::DataType::FLOAT32;

constexpr int64_t groups_in(int64_t size) { return pmo::divide_up(size, int64_t{PMO_QUANTIZE_GROUP}); }

// Shape of the scales of matrices [E, A, B].
Shape scales_of(const Shape& matrices) { return {matrices[0], groups_in(matrices[1]), groups_in(matrices[2])}; }

// Writes codes and scales of dense matrices [E, A, B], and of their transposes, by one launch; null: not wanted.
void quantize_into(const Target& target, const paddle::Tensor& matrices, const Float8* straight, const Float8* turned) {
  const Shape shape = matrices.shape();
  pmo_quantize_blocks_params p = {};
  p.struct_size = sizeof(p);
  p.num_matrices = shape[0];
  p.num_rows = shape[1];
  p.num_columns = shape[2];
  p.x = matrices.data();
  const auto set = [](const Float8* form, void** codes, float** scales) {
    if (form == nullptr) return;
    *codes = const_cast<void*>(form->codes.data());
    *scales = const_cast<float*>(form->scales.data<float>());
  };
  set(straight, &p.codes, &p.scales);
  set(turned, &p.turned_codes, &p.turned_scales);
  p.dtype = dtype_of(matrices, kMoeMlp, "the matrices");
  p.amax_min = pmo::kAmaxMin;
  check_status(PMO_CALL(target, quantize_blocks, &p), kMoeMlp);
}

// Memory for codes and scales of matrices [E, A, B].
Float8 new_codes(const Target& target, const Shape& matrices) {
  return {target.empty(matrices, paddle::DataType::FLOAT8_E4M3FN), target.empty_float32(scales_of(matrices))};
}

// Places of codes, then of scales, in the bytes that the operator keeps. Sizes of kernels leave no gap between them.
class KeptLayout {
 public:
  int64_t gate_up, down, gate_up_scales, down_scales;
  int64_t bytes;  // -1 if a program does not know a size

  KeptLayout(const Shape& gate_up_shape, const Shape& down_shape) {
    gate_up = take(gate_up_shape, false);
    down = take(down_shape, false);
    gate_up_scales = take(gate_up_shape, true);
    down_scales = take(down_shape, true);
    bytes = is_known_ ? end_ : -1;
  }

  // Zeroes what is neither codes nor scales: results have the same bits in every run.
  void clear_gaps(const Target& target, const paddle::Tensor& kept) const {
    for (const Gap& gap : gaps_) {
      if (gap.bytes > 0) target.clear(static_cast<char*>(const_cast<void*>(kept.data())) + gap.first, gap.bytes);
    }
  }

 private:
  struct Gap {
    int64_t first, bytes;
  };

  int64_t take(const Shape& shape, bool is_scale) {
    constexpr int64_t kAlignment = 256;
    const int64_t place = end_, rows = dim(shape, 1), columns = dim(shape, 2);
    is_known_ = is_known_ && dim(shape, 0) >= 0 && rows >= 0 && columns >= 0;
    if (!is_known_) return place;
    end_ += dim(shape, 0) * (is_scale ? 4 * groups_in(rows) * groups_in(columns) : rows * columns);
    if (is_scale) return place;
    gaps_[num_gaps_++] = {end_, pmo::round_up(end_, kAlignment) - end_};
    end_ = pmo::round_up(end_, kAlignment);
    return place;
  }

  int64_t end_ = 0;
  bool is_known_ = true;
  Gap gaps_[2] = {};
  int num_gaps_ = 0;
};

class Float8Layer : public ExpertLayer {
 public:
  Float8Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
              const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, true, hidden, d_out), kept_(o.gate_up.shape(), o.down.shape()) {}

  // Bytes of the codes that the operator keeps.
  int64_t kept_bytes() const { return kept_.bytes; }

  // Codes of both matrices for a forward pass. Those of the backward pass are written to `kept`, by the same launches.
  MatrixCodes quantised(const paddle::Tensor& kept) const {
    MatrixCodes codes = kept_codes(kept);
    kept_.clear_gaps(target(), kept);
    codes.gate_up = quantised(gate_up().values, codes.turned_gate_up);
    codes.down = quantised(down().values, codes.turned_down);
    return codes;
  }

  // Codes of both matrices for a backward pass, in `kept`.
  MatrixCodes kept_codes(const paddle::Tensor& kept) const {
    MatrixCodes codes;
    codes.turned_gate_up = kept_at(kept, kept_.gate_up, kept_.gate_up_scales, backward_shape(gate_up()));
    codes.turned_down = kept_at(kept, kept_.down, kept_.down_scales, backward_shape(down()));
    return codes;
  }

 protected:
  paddle::Tensor composed_hidden(const MatrixCodes& codes) const override {
    return groups().gemm(values_of(rows_in_float8(operands().x)), near(codes.gate_up, gate_up()), transpose(), dtype());
  }

  paddle::Tensor composed_outputs(paddle::Tensor hidden, const MatrixCodes& codes) const override {
    const paddle::Tensor act = fake_quantised_rows(swiglu(std::exchange(hidden, {})));
    const paddle::Tensor rows = groups().gemm(act, near(codes.down, down()), transpose(), kFloat32);
    return in_dtype(target(), sums_of(rows, true), dtype());
  }

  ActivationGradients activation_gradients(paddle::Tensor hidden, const paddle::Tensor& d_out,
                                           const MatrixCodes& codes) const override {
    const paddle::Tensor d_scaled =
        groups().gemm(values_of(rows_in_float8(d_out)), near(codes.turned_down, down()), !transpose(), kFloat32);
    ActivationGradients gradients = swiglu_backward(in_dtype(target(), std::exchange(hidden, {}), kFloat32), d_scaled);
    gradients.d_hidden = in_dtype(target(), gradients.d_hidden, dtype());
    gradients.scaled = in_dtype(target(), gradients.scaled, dtype());
    return gradients;
  }

  paddle::Tensor composed_d_x(const ActivationGradients& gradients, const MatrixCodes& codes) const override {
    const paddle::Tensor rows =
        groups().gemm(fake_quantised_rows(gradients.d_hidden), near(codes.turned_gate_up, gate_up()), !transpose(), kFloat32);
    return in_dtype(target(), sums_of(rows), dtype());
  }

  paddle::Tensor wgrad_operand(const paddle::Tensor& rows, bool is_gradient) const override {
    return has_float8_wgrads() ? groups().fake_quantised_columns(rows, is_gradient) : rows;
  }

  Kept kept_of(const paddle::Tensor& hidden, pmo_layer_hidden keep) const override {
    if (keep == PMO_LAYER_KEEPS) return {hidden, {}};
    const Float8 codes = quantised_rows(hidden);
    return {codes.codes, codes.scales};
  }

  paddle::Tensor hidden_of(const Kept& kept) const override {
    if (!kept.scales.defined()) return kept.values;
    return dequantize_rows(target(), kMoeMlp, kept.values, kept.scales, false, dtype());
  }

 private:
  // Shape of the codes that a backward pass reads: kernels read contiguous K, other passes the matrices as they are stored.
  Shape backward_shape(const ExpertMatrices& matrices) const {
    const Shape shape = matrices.shape();
    return has_kernels() && transpose() ? Shape{shape[0], shape[2], shape[1]} : shape;
  }

  Float8 kept_at(const paddle::Tensor& kept, int64_t codes, int64_t scales, const Shape& shape) const {
    if (kept.numel() == 0) return new_codes(target(), shape);
    const auto at = [&](int64_t place, const Shape& sizes, paddle::DataType dtype) {
      char* const address = static_cast<char*>(const_cast<void*>(kept.data())) + place;
      return paddle::from_blob(address, sizes, dtype, phi::DataLayout::NCHW, target().place());
    };
    return {at(codes, shape, paddle::DataType::FLOAT8_E4M3FN), at(scales, scales_of(shape), kFloat32)};
  }

  // Codes of matrices for a forward pass; writes those of the backward pass.
  Float8 quantised(const paddle::Tensor& matrices, const Float8& backward) const {
    const paddle::Tensor source = dense(matrices);
    if (!has_kernels()) {
      quantize_into(target(), source, &backward, nullptr);
      return backward;
    }
    const Shape shape = backward.codes.shape();
    const Float8 forward = new_codes(target(), {shape[0], shape[2], shape[1]});
    quantize_into(target(), source, transpose() ? &forward : &backward, transpose() ? &backward : &forward);
    return forward;
  }

  paddle::Tensor values_of(const Float8& rows) const {
    return dequantize_rows(target(), kMoeMlp, rows.codes, rows.scales, false, kFloat32);
  }

  Float8 quantised_rows(const paddle::Tensor& rows) const {
    const Outputs quantised = quantize_rows(target(), kMoeMlp, rows, {}, {false, false, pmo::kAmaxMin});
    return {quantised[0], quantised[1]};
  }

  // Fake quantisation of rows by groups of 128 columns.
  paddle::Tensor fake_quantised_rows(const paddle::Tensor& rows) const { return values_of(quantised_rows(rows)); }

  // Codes of matrices that GEMMs dequantise: those given, or computed from values.
  ExpertMatrices near(Float8 given, const ExpertMatrices& matrices) const {
    if (!matrices.values.defined()) return matrices;
    if (!given.codes.defined()) {
      given = new_codes(target(), matrices.shape());
      quantize_into(target(), dense(matrices.values), &given, nullptr);
    }
    const Shape shape = given.codes.shape();
    return ExpertMatrices(
        ExpertMatrices::Codes{given.codes, given.scales, PMO_MATRIX_FLOAT8_128X128, shape[1], shape[2], false, kFloat32});
  }

  // Quantises and permutes tokens, with zeros in padding rows. Each token is read once.
  Float8 rows_in_float8(const paddle::Tensor& tokens) const {
    const RowMaps maps = {&operands().token_rows, &operands().row_to_token, PMO_FILL_ROWS | PMO_FILL_SCALES};
    const Outputs quantised = quantize_rows(target(), kMoeMlp, tokens, maps, {false, false, pmo::kAmaxMin});
    return {quantised[0], quantised[1]};
  }

  const KeptLayout kept_;
};

Outputs run(const MlpAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
            const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
            const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row) {
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  const Float8Layer layer(a, o);
  const paddle::Tensor kept = layer.target().empty({a.keep_hidden ? layer.kept_bytes() : 0}, paddle::DataType::UINT8);
  Outputs results = mlp_forward(a, layer, o, a.keep_hidden ? layer.quantised(kept) : MatrixCodes());
  results.push_back(kept);
  return results;
}

Outputs run_backward(const MlpAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                     const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                     const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                     const paddle::Tensor& hidden, const paddle::Tensor& codes, const paddle::Tensor& d_out) {
  const MlpOperands o = {x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row};
  const Float8Layer layer(a, o, &hidden, &d_out);
  // A program from a file may pass any tensor.
  require(codes.defined(), kMoeMlp, "a required tensor is missing");
  require_gradient(codes, {a.keep_hidden ? layer.kept_bytes() : 0}, paddle::DataType::UINT8, kMoeMlp, "codes");
  without_gradient({&codes});
  const bool reads_codes = a.keep_hidden && d_out.initialized();
  return mlp_backward(a, layer, o, hidden, d_out, reads_codes ? layer.kept_codes(codes) : MatrixCodes());
}

std::vector<Shape> shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape& down, const Shape& weights,
                          const Shape& token_rows, const Shape& row_to_token, const Shape& sizes, const Shape& offsets,
                          const Shape& slot_to_row) {
  std::vector<Shape> all = mlp_shapes(a, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row);
  all.push_back({a.keep_hidden ? KeptLayout(gate_up, down).bytes : 0});
  return all;
}

std::vector<paddle::DataType> dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&,
                                     const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                     const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {x, x, paddle::DataType::UINT8};
}

std::vector<Shape> backward_shapes(const MlpAttributes&, const Shape& x, const Shape& gate_up, const Shape& down,
                                   const Shape& weights, const Shape&, const Shape&, const Shape&, const Shape&, const Shape&,
                                   const Shape&, const Shape&, const Shape&) {
  return {x, gate_up, down, weights};
}

std::vector<paddle::DataType> backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                              const paddle::DataType& down, const paddle::DataType& weights,
                                              const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                              const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                              const paddle::DataType&, const paddle::DataType&) {
  return {x, gate_up, down, weights};
}

// -> codes, scales, transposed codes, transposed scales, as the flags say
Outputs quantize_matrices(const paddle::Tensor& matrices, bool straight, bool turned) {
  const Target target(kMoeMlp, {&matrices});
  require_rank(matrices, 3, kMoeMlp, "the matrices");
  const paddle::Tensor source = dense(matrices);
  const Shape shape = source.shape();
  Float8 forms[2];
  if (straight) forms[0] = new_codes(target, shape);
  if (turned) forms[1] = new_codes(target, {shape[0], shape[2], shape[1]});
  quantize_into(target, source, straight ? &forms[0] : nullptr, turned ? &forms[1] : nullptr);
  return {forms[0].codes, forms[0].scales, forms[1].codes, forms[1].scales};
}

}  // namespace

std::unique_ptr<ExpertLayer> pmo::binding::new_float8_layer(const MlpAttributes& a, const MlpOperands& o,
                                                            const paddle::Tensor* hidden, const paddle::Tensor* d_out) {
  return std::make_unique<Float8Layer>(a, o, hidden, d_out);
}

PD_BUILD_OP(pmo_moe_mlp_float8)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row"})
    .Outputs({"out", "hidden", "codes"})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(run))
    .SetInferShapeFn(PMO_INFER_SHAPE(shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(dtypes));

PD_BUILD_GRAD_OP(pmo_moe_mlp_float8)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row", "hidden",
             "codes", paddle::Grad("out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights")})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(run_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_moe_mlp_float8)
    .Inputs({"x", "gate_up", "down", "weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row", "hidden",
             paddle::Grad("out"), paddle::Grad(paddle::Grad("x")), paddle::Grad(paddle::Grad("gate_up")),
             paddle::Grad(paddle::Grad("down")), paddle::Grad(paddle::Grad("weights"))})
    .Outputs({paddle::Grad("x"), paddle::Grad("gate_up"), paddle::Grad("down"), paddle::Grad("weights"),
              paddle::Grad(paddle::Grad("out"))})
    .Attrs(MlpAttributes::names())
    .SetKernelFn(PMO_KERNEL(mlp_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(mlp_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(mlp_double_backward_dtypes));

PMO_DIRECT(moe_mlp_float8, run);
PMO_DIRECT(quantize_matrices, quantize_matrices);

#endif
