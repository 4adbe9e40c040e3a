// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_float8: a layer of experts whose GEMMs, but for wgrads, have float8 operands, as pmo/layer.h describes it.
//
// Without kernels for the sizes, fake-quantised values are multiplied in float32, and SwiGLU's gradient is float32 too, since a
// quantisation follows it.
#include <memory>
#include <utility>

#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr auto kFloat32 = paddle::DataType::FLOAT32;

// Fake quantisation of matrices [E, A, B] by 128 x 128 blocks.
paddle::Tensor fake_quantised_matrices(const Target& target, const paddle::Tensor& matrices) {
  const paddle::Tensor source = dense(matrices);
  paddle::Tensor values = target.empty(source.shape(), kFloat32);
  prepare_pages(target, values);
  pmo_near_blocks_params p = {};
  p.struct_size = sizeof(p);
  p.num_matrices = source.shape()[0];
  p.num_rows = source.shape()[1];
  p.num_columns = source.shape()[2];
  p.x = source.data();
  p.out = values.data<float>();
  p.dtype = dtype_of(source, kMoeMlp, "the matrices");
  p.amax_min = pmo::kAmaxMin;
  check_status(PMO_CALL(target, near_blocks, &p), kMoeMlp);
  return values;
}

// Fake quantisation of matrices, for the `codes` of MatrixCodes without kernels.
Outputs near_blocks(const paddle::Tensor& matrices) {
  const Target target(kMoeMlp, {&matrices});
  require_rank(matrices, 3, kMoeMlp, "the matrices");
  return {fake_quantised_matrices(target, matrices)};
}

class Float8Layer : public ExpertLayer {
 public:
  Float8Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
              const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, true, hidden, d_out) {}

 protected:
  paddle::Tensor composed_hidden(const MatrixCodes& codes) const override {
    return groups().gemm(values_of(rows_in_float8(operands().x)), near(codes.gate_up, operands().gate_up), transpose(), dtype());
  }

  paddle::Tensor composed_outputs(paddle::Tensor hidden, const MatrixCodes& codes) const override {
    const paddle::Tensor act = fake_quantised_rows(swiglu(std::exchange(hidden, {})));
    const paddle::Tensor rows = groups().gemm(act, near(codes.down, operands().down), transpose(), kFloat32);
    return in_dtype(target(), sums_of(rows, true), dtype());
  }

  ActivationGradients activation_gradients(paddle::Tensor hidden, const paddle::Tensor& d_out,
                                           const MatrixCodes& codes) const override {
    const paddle::Tensor d_scaled =
        groups().gemm(values_of(rows_in_float8(d_out)), near(codes.turned_down, operands().down), !transpose(), kFloat32);
    ActivationGradients gradients = swiglu_backward(in_dtype(target(), std::exchange(hidden, {}), kFloat32), d_scaled);
    gradients.d_hidden = in_dtype(target(), gradients.d_hidden, dtype());
    gradients.scaled = in_dtype(target(), gradients.scaled, dtype());
    return gradients;
  }

  paddle::Tensor composed_d_x(const ActivationGradients& gradients, const MatrixCodes& codes) const override {
    const paddle::Tensor matrices = near(codes.turned_gate_up, operands().gate_up);
    const paddle::Tensor rows = groups().gemm(fake_quantised_rows(gradients.d_hidden), matrices, !transpose(), kFloat32);
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

  paddle::Tensor near(const Float8& given, const paddle::Tensor& matrices) const {
    return given.codes.defined() ? given.codes : fake_quantised_matrices(target(), matrices);
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

PMO_MLP_OPERATOR(pmo_moe_mlp_float8, Float8Layer);
PMO_DIRECT(moe_mlp_float8, run_mlp<Float8Layer>);
PMO_DIRECT(near_blocks, near_blocks);

#endif
