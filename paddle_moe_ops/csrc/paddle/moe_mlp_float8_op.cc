// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp_float8: a layer of experts whose products take float8 operands. With Q for quantising, rows with a scale for each 128 columns and
// matrices with one for each 128 x 128 elements, paddle/moe_mlp.h becomes:
//
//   Q(X) -> its rows -> H, Q(A) = Q(swiglu(H)) -> weighted Q(A) Q(W2) -> sums of each token's rows
//   Q(dO) -> its rows -> dA' = Q(dO) Q(W2)^T;  H, dA' -> dH, Q(dH), s A and ds;  Q(dH) Q(W1)^T -> sums
//
// The gradients of the matrices are products of numbers in the dtype of x, as there. Where the kernels of pmo/grouped_float8.h run, SwiGLU, its
// gradient and Q of either are the ends of products, and no launch waits for the host. Elsewhere quantised values are multiplied in float32,
// as paddle_moe_ops/_float8_mlp.py does it, and SwiGLU's gradient is in float32, too: Q follows it.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/grouped_rows.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr int64_t kGroup = PMO_QUANTIZE_GROUP;
constexpr float kAmaxMin = 0x1p-100f;  // the least that kernels take, since gradients may be small
constexpr auto kFloat8 = paddle::DataType::FLOAT8_E4M3FN;
constexpr auto kFloat32 = paddle::DataType::FLOAT32;

// The values that matrices [E, A, B] have in float8.
paddle::Tensor near_matrices(const Target& target, const paddle::Tensor& matrices) {
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

// The same for paddle_moe_ops/_float8_mlp.py, which multiplies them itself.
Outputs near_blocks(const paddle::Tensor& matrices) {
  const Target target(kMoeMlp, {&matrices});
  require_rank(matrices, 3, kMoeMlp, "the matrices");
  return {near_matrices(target, matrices)};
}

class Float8Layer : public ExpertLayer {
 public:
  Float8Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
              const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, PMO_GROUPED_TILE_ROWS, hidden, d_out),
        // the first product and dA' are of these sizes, the others of the same ones turned round
        has_kernels_(dtype() == paddle::DataType::BFLOAT16 && inner % kGroup == 0 &&
                     groups().has_float8_kernels(hidden_size, 2 * inner) && groups().has_float8_kernels(hidden_size, inner)) {}

  paddle::Tensor outputs(paddle::Tensor* hidden) const override {
    if (!has_kernels_) {
      const paddle::Tensor made = first_product();
      if (hidden != nullptr) *hidden = made;
      const paddle::Tensor rows = groups().product(near_rows(swiglu(made)), near(operands().down), transpose(), kFloat32);
      return in_dtype(target(), sums_of(rows, true), dtype());
    }
    const Float8 act = new_codes(inner);
    gated(hidden, &act);
    if (hidden != nullptr) groups().clear_others(hidden);  // Paddle may look at the values of what an operator gives
    pmo_grouped_float8_params p = {};
    p.weights = factors().data<float>();
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch_float8(p, act, quantised(operands().down, false), &rows);
    return sums_of(rows);
  }

  ActivationGradients activation_gradients(const paddle::Tensor* kept, const paddle::Tensor& d_out,
                                           bool need_weights) const override {
    if (!has_kernels_) {
      const paddle::Tensor hidden = in_dtype(target(), kept != nullptr ? *kept : first_product(), kFloat32);
      const paddle::Tensor d_scaled =
          groups().product(values_of(rows_in_float8(d_out)), near(operands().down), !transpose(), kFloat32);
      ActivationGradients made = swiglu_backward(hidden, d_scaled);
      made.d_hidden = in_dtype(target(), made.d_hidden, dtype());
      made.scaled = in_dtype(target(), made.scaled, dtype());
      return made;
    }
    ActivationGradients made;
    if (kept != nullptr) {  // the launch writes dH where H is, which a second backward pass may need
      made.d_hidden = new_rows(2 * inner);
      target().copy(kept->data(), kept->numel() * static_cast<int64_t>(phi::SizeOf(kept->dtype())), made.d_hidden.data());
    } else {
      gated(&made.d_hidden, nullptr);
    }
    made.codes = new_codes(2 * inner);
    made.scaled = new_rows(inner);
    paddle::Tensor tiles;
    if (need_weights) tiles = target().empty_float32({num_rows(), inner / kGroup});
    pmo_grouped_float8_params p = {};
    p.result = PMO_GROUPED_GRADIENT;
    p.row_to_token = owners().data<int32_t>();
    p.weights = factors().data<float>();
    p.hidden = made.d_hidden.data();
    set_codes(made.codes, &p);
    p.d_weights = need_weights ? tiles.data<float>() : nullptr;
    groups().launch_float8(p, rows_in_float8(d_out), quantised(operands().down, true), &made.scaled);
    if (need_weights) made.d_weights = sums_of_tiles(tiles);
    return made;
  }

  paddle::Tensor d_x(const ActivationGradients& gradients) const override {
    if (!has_kernels_) {
      const paddle::Tensor rows =
          groups().product(near_rows(gradients.d_hidden), near(operands().gate_up), !transpose(), kFloat32);
      return in_dtype(target(), sums_of(rows), dtype());
    }
    paddle::Tensor rows = new_rows(hidden_size);
    groups().launch_float8({}, gradients.codes, quantised(operands().gate_up, true), &rows);
    return sums_of(rows);
  }

 private:
  // ---- with kernels

  Float8 new_codes(int64_t columns) const {
    return {new_rows(columns, kFloat8), target().empty_float32({num_rows(), columns / kGroup})};
  }

  static void set_codes(const Float8& made, pmo_grouped_float8_params* p) {
    p->codes = const_cast<void*>(made.codes.data());
    p->scales = const_cast<float*>(made.scales.data<float>());
    p->amax_min = kAmaxMin;
  }

  // H in new memory, and Q(A), if they are wanted.
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

  // Q of matrices, the numbers of a contraction side by side: that of the forward pass, or of the backward pass.
  Float8 quantised([[maybe_unused]] const paddle::Tensor& matrices, [[maybe_unused]] bool back) const {
    Float8 made;
#ifdef PMO_WITH_CUDA
    const paddle::Tensor source = dense(matrices);
    const Shape shape = source.shape();
    const bool turned = transpose() == back;
    const int64_t rows = shape[turned ? 2 : 1], columns = shape[turned ? 1 : 2];
    made.codes = target().empty({shape[0], rows, columns}, kFloat8);
    made.scales = target().empty_float32({shape[0], groups_in(rows), groups_in(columns)});
    pmo_quantize_blocks_params p = {};
    p.struct_size = sizeof(p);
    p.num_matrices = shape[0];
    p.num_rows = shape[1];
    p.num_columns = shape[2];
    p.x = source.data();
    (turned ? p.turned_codes : p.codes) = made.codes.data();
    (turned ? p.turned_scales : p.scales) = made.scales.data<float>();
    p.dtype = dtype_of(source, kMoeMlp, "x");
    p.amax_min = kAmaxMin;
    check_status(pmo_quantize_blocks_cuda(&p, target().stream()), kMoeMlp);
#endif
    return made;
  }

  static int64_t groups_in(int64_t size) { return (size + kGroup - 1) / kGroup; }

  paddle::Tensor sums_of_tiles(const paddle::Tensor& tiles) const {
    paddle::Tensor sums = target().empty_float32({num_rows()});
    pmo_row_sums_params p = {};
    p.struct_size = sizeof(p);
    p.num_rows = num_rows();
    p.width = inner / kGroup;
    p.values = tiles.data<float>();
    p.row_to_token = owners().data<int32_t>();
    p.out = sums.data<float>();
    check_status(PMO_CALL(target(), row_sums, &p), kMoeMlp);
    return sums;
  }

  // ---- by values

  // H, in the dtype of x.
  paddle::Tensor first_product() const {
    return groups().product(values_of(rows_in_float8(operands().x)), near(operands().gate_up), transpose(), dtype());
  }

  paddle::Tensor values_of(const Float8& rows) const {
    return dequantize_rows(target(), kMoeMlp, rows.codes, rows.scales, false, kFloat32);
  }

  // The values that rows have in float8.
  paddle::Tensor near_rows(const paddle::Tensor& rows) const {
    const Outputs made = quantize_rows(target(), kMoeMlp, rows, {}, {false, false, kAmaxMin});
    return values_of({made[0], made[1]});
  }

  paddle::Tensor near(const paddle::Tensor& matrices) const { return near_matrices(target(), matrices); }

  // ---- either way

  // The rows of Q of tokens, whose padding is zeros. Each token is read once.
  Float8 rows_in_float8(const paddle::Tensor& tokens) const {
    const RowMaps maps = {&operands().token_rows, &operands().row_to_token, PMO_FILL_ROWS | PMO_FILL_SCALES};
    const Outputs made = quantize_rows(target(), kMoeMlp, tokens, maps, {false, false, kAmaxMin});
    return {made[0], made[1]};
  }

  const bool has_kernels_;
};

}  // namespace

PMO_MLP_OPERATOR(pmo_moe_mlp_float8, Float8Layer);
PMO_DIRECT(moe_mlp_float8, run_mlp<Float8Layer>);
PMO_DIRECT(near_blocks, near_blocks);

#endif
