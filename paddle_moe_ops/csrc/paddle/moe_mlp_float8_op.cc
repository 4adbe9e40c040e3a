// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_float8: a layer of experts whose GEMMs have float8 operands. Q quantises rows with one scale per 128 columns, and
// matrices with one per 128 x 128 elements. With it, paddle/moe_mlp.h becomes:
//
//   Q(X) -> its rows -> H, Q(A) = Q(swiglu(H)) -> weighted Q(A) Q(W2) -> sums of each token's rows
//   Q(dO) -> its rows -> dA' = Q(dO) Q(W2)^T;  H, dA' -> dH, Q(dH), s A and ds;  Q(dH) Q(W1)^T -> sums
//
// Wgrads are GEMMs in the dtype of x, as in paddle/moe_mlp.h. If the kernels of pmo/grouped_float8.h support the sizes, SwiGLU,
// its gradient and Q of either are epilogues, and no launch waits for the host. Otherwise fake-quantised values are multiplied in
// float32, as in paddle_moe_ops/_float8_mlp.py. SwiGLU's gradient is float32 too, since Q follows it.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr int64_t kGroup = PMO_QUANTIZE_GROUP;
constexpr float kAmaxMin = 0x1p-100f;  // minimum that kernels accept, since gradients may be small
constexpr auto kFloat8 = paddle::DataType::FLOAT8_E4M3FN;
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
  p.amax_min = kAmaxMin;
  check_status(PMO_CALL(target, near_blocks, &p), kMoeMlp);
  return values;
}

// Fake quantisation for the GEMMs of paddle_moe_ops/_float8_mlp.py.
Outputs near_blocks(const paddle::Tensor& matrices) {
  const Target target(kMoeMlp, {&matrices});
  require_rank(matrices, 3, kMoeMlp, "the matrices");
  return {fake_quantised_matrices(target, matrices)};
}

class Float8Layer : public ExpertLayer {
 public:
  Float8Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
              const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, PMO_GROUPED_TILE_ROWS, hidden, d_out),
        // sizes of the GEMMs for H and dA'; the other GEMMs have the same sizes, transposed
        has_kernels_(dtype() == paddle::DataType::BFLOAT16 && inner % kGroup == 0 &&
                     groups().has_float8_kernels(hidden_size, 2 * inner) && groups().has_float8_kernels(hidden_size, inner)) {}

  paddle::Tensor outputs(paddle::Tensor* hidden) const override {
    if (!has_kernels_) {
      const paddle::Tensor gate_up = gate_up_gemm();
      if (hidden != nullptr) *hidden = gate_up;
      const paddle::Tensor rows =
          groups().gemm(fake_quantised_rows(swiglu(gate_up)), fake_quantised(operands().down), transpose(), kFloat32);
      return in_dtype(target(), sums_of(rows, true), dtype());
    }
    const Float8 act = new_codes(inner);
    gated(hidden, &act);
    if (hidden != nullptr) groups().clear_ungrouped_rows(hidden);  // Paddle may check the values of outputs
    pmo_grouped_float8_params p = {};
    p.weights = row_weights().data<float>();
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch_float8(p, act, quantised(operands().down, false), &rows);
    return sums_of(rows);
  }

  ActivationGradients activation_gradients(const paddle::Tensor* kept, const paddle::Tensor& d_out,
                                           bool need_weights) const override {
    if (!has_kernels_) {
      const paddle::Tensor hidden = in_dtype(target(), kept != nullptr ? *kept : gate_up_gemm(), kFloat32);
      const paddle::Tensor d_scaled =
          groups().gemm(values_of(rows_in_float8(d_out)), fake_quantised(operands().down), !transpose(), kFloat32);
      ActivationGradients gradients = swiglu_backward(hidden, d_scaled);
      gradients.d_hidden = in_dtype(target(), gradients.d_hidden, dtype());
      gradients.scaled = in_dtype(target(), gradients.scaled, dtype());
      return gradients;
    }
    ActivationGradients gradients;
    if (kept != nullptr) {  // the launch overwrites H with dH, and a second backward pass may need H
      gradients.d_hidden = new_rows(2 * inner);
      target().copy(kept->data(), kept->numel() * static_cast<int64_t>(phi::SizeOf(kept->dtype())), gradients.d_hidden.data());
    } else {
      gated(&gradients.d_hidden, nullptr);
    }
    gradients.codes = new_codes(2 * inner);
    gradients.scaled = new_rows(inner);
    paddle::Tensor tiles;
    if (need_weights) tiles = target().empty_float32({num_rows(), inner / kGroup});
    pmo_grouped_float8_params p = {};
    p.result = PMO_GROUPED_GRADIENT;
    p.row_to_token = row_to_token().data<int32_t>();
    p.weights = row_weights().data<float>();
    p.hidden = gradients.d_hidden.data();
    set_codes(gradients.codes, &p);
    p.d_weights = need_weights ? tiles.data<float>() : nullptr;
    groups().launch_float8(p, rows_in_float8(d_out), quantised(operands().down, true), &gradients.scaled);
    if (need_weights) gradients.d_weights = sums_of_tiles(tiles);
    return gradients;
  }

  paddle::Tensor d_x(const ActivationGradients& gradients) const override {
    if (!has_kernels_) {
      const paddle::Tensor rows =
          groups().gemm(fake_quantised_rows(gradients.d_hidden), fake_quantised(operands().gate_up), !transpose(), kFloat32);
      return in_dtype(target(), sums_of(rows), dtype());
    }
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch_float8({}, gradients.codes, quantised(operands().gate_up, true), &rows);
    return sums_of(rows);
  }

 private:
  // ---- with float8 kernels

  Float8 new_codes(int64_t columns) const {
    return {new_rows(columns, kFloat8), target().empty_float32({num_rows(), columns / kGroup})};
  }

  static void set_codes(const Float8& quantised, pmo_grouped_float8_params* p) {
    p->codes = const_cast<void*>(quantised.codes.data());
    p->scales = const_cast<float*>(quantised.scales.data<float>());
    p->amax_min = kAmaxMin;
  }

  // Allocates and computes H, and computes Q(A); either may be null.
  void gated(paddle::Tensor* hidden, const Float8* act) const {
    pmo_grouped_float8_params p = {};
    p.result = PMO_GROUPED_GATED;
    if (hidden != nullptr) {
      *hidden = new_rows(2 * inner);
      p.hidden = hidden->data();
    }
    if (act != nullptr) set_codes(*act, &p);
    groups().launch_float8(p, rows_in_float8(operands().x), quantised(operands().gate_up, false), nullptr);
  }

  // Q of matrices, with K contiguous for the GEMM of the forward pass, or of the backward pass (`back`).
  Float8 quantised([[maybe_unused]] const paddle::Tensor& matrices, [[maybe_unused]] bool back) const {
    Float8 result;
#ifdef PMO_WITH_CUDA
    const paddle::Tensor source = dense(matrices);
    const Shape shape = source.shape();
    const bool transposes = transpose() == back;
    const int64_t rows = shape[transposes ? 2 : 1], columns = shape[transposes ? 1 : 2];
    result.codes = target().empty({shape[0], rows, columns}, kFloat8);
    result.scales = target().empty_float32({shape[0], groups_in(rows), groups_in(columns)});
    pmo_quantize_blocks_params p = {};
    p.struct_size = sizeof(p);
    p.num_matrices = shape[0];
    p.num_rows = shape[1];
    p.num_columns = shape[2];
    p.x = source.data();
    (transposes ? p.turned_codes : p.codes) = result.codes.data();
    (transposes ? p.turned_scales : p.scales) = result.scales.data<float>();
    p.dtype = dtype_of(source, kMoeMlp, "x");
    p.amax_min = kAmaxMin;
    check_status(pmo_quantize_blocks_cuda(&p, target().stream()), kMoeMlp);
#endif
    return result;
  }

  static int64_t groups_in(int64_t size) { return (size + kGroup - 1) / kGroup; }

  paddle::Tensor sums_of_tiles(const paddle::Tensor& tiles) const {
    paddle::Tensor sums = target().empty_float32({num_rows()});
    pmo_row_sums_params p = {};
    p.struct_size = sizeof(p);
    p.num_rows = num_rows();
    p.width = inner / kGroup;
    p.values = tiles.data<float>();
    p.row_to_token = row_to_token().data<int32_t>();
    p.out = sums.data<float>();
    check_status(PMO_CALL(target(), row_sums, &p), kMoeMlp);
    return sums;
  }

  // ---- by fake quantisation

  // H, in the dtype of x.
  paddle::Tensor gate_up_gemm() const {
    return groups().gemm(values_of(rows_in_float8(operands().x)), fake_quantised(operands().gate_up), transpose(), dtype());
  }

  paddle::Tensor values_of(const Float8& rows) const {
    return dequantize_rows(target(), kMoeMlp, rows.codes, rows.scales, false, kFloat32);
  }

  // Fake quantisation of rows by groups of 128 columns.
  paddle::Tensor fake_quantised_rows(const paddle::Tensor& rows) const {
    const Outputs quantised = quantize_rows(target(), kMoeMlp, rows, {}, {false, false, kAmaxMin});
    return values_of({quantised[0], quantised[1]});
  }

  paddle::Tensor fake_quantised(const paddle::Tensor& matrices) const { return fake_quantised_matrices(target(), matrices); }

  // ---- on both paths

  // Quantises and permutes tokens, with zeros in padding rows. Each token is read once.
  Float8 rows_in_float8(const paddle::Tensor& tokens) const {
    const RowMaps maps = {&operands().token_rows, &operands().row_to_token, PMO_FILL_ROWS | PMO_FILL_SCALES};
    const Outputs quantised = quantize_rows(target(), kMoeMlp, tokens, maps, {false, false, kAmaxMin});
    return {quantised[0], quantised[1]};
  }

  const bool has_kernels_;
};

}  // namespace

PMO_MLP_OPERATOR(pmo_moe_mlp_float8, Float8Layer);
PMO_DIRECT(moe_mlp_float8, run_mlp<Float8Layer>);
PMO_DIRECT(near_blocks, near_blocks);

#endif
