// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_float8: a layer of experts whose GEMMs, but for wgrads, have float8 operands, as pmo/layer.h describes it.
//
// Without kernels for the sizes, rows and matrices are dequantised and multiplied in float32. SwiGLU's gradient is float32 too,
// since a quantisation follows it.
#include <memory>
#include <utility>

#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"
#include "pmo/grouped_rows.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr auto kFloat32 = paddle::DataType::FLOAT32;

class Float8Layer : public ExpertLayer {
 public:
  Float8Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
              const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, true, hidden, d_out) {}

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
      const Outputs quantised = quantize_matrices(matrices.values, true, false);
      given = {quantised[0], quantised[1]};
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
};

}  // namespace

std::unique_ptr<ExpertLayer> pmo::binding::new_float8_layer(const MlpAttributes& a, const MlpOperands& o,
                                                            const paddle::Tensor* hidden, const paddle::Tensor* d_out) {
  return std::make_unique<Float8Layer>(a, o, hidden, d_out);
}

Outputs pmo::binding::quantize_matrices(const paddle::Tensor& matrices, bool straight, bool turned) {
  Outputs results = {{}, {}, {}, {}};
  const Target target(kMoeMlp, {&matrices});
  require_rank(matrices, 3, kMoeMlp, "the matrices");
  const paddle::Tensor source = dense(matrices);
  const Shape shape = source.shape();
  const auto groups_in = [](int64_t size) { return (size + PMO_QUANTIZE_GROUP - 1) / PMO_QUANTIZE_GROUP; };
  const auto allocate = [&](size_t place, int64_t rows, int64_t columns) {
    results[place] = target.empty({shape[0], rows, columns}, paddle::DataType::FLOAT8_E4M3FN);
    results[place + 1] = target.empty_float32({shape[0], groups_in(rows), groups_in(columns)});
  };
  pmo_quantize_blocks_params p = {};
  p.struct_size = sizeof(p);
  p.num_matrices = shape[0];
  p.num_rows = shape[1];
  p.num_columns = shape[2];
  p.x = source.data();
  if (straight) {
    allocate(0, shape[1], shape[2]);
    p.codes = results[0].data();
    p.scales = results[1].data<float>();
  }
  if (turned) {
    allocate(2, shape[2], shape[1]);
    p.turned_codes = results[2].data();
    p.turned_scales = results[3].data<float>();
  }
  p.dtype = dtype_of(source, kMoeMlp, "the matrices");
  p.amax_min = pmo::kAmaxMin;
  check_status(PMO_CALL(target, quantize_blocks, &p), kMoeMlp);
  return results;
}

PMO_MLP_OPERATOR(pmo_moe_mlp_float8, Float8Layer);
PMO_DIRECT(moe_mlp_float8, run_mlp<Float8Layer>);
PMO_DIRECT(quantize_matrices, pmo::binding::quantize_matrices);

#endif
