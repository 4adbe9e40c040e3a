// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Operators of a layer of SwiGLU experts whose weighted output rows are summed by token.
//
// T tokens of d columns, M rows, E experts of inner size n. Forward, with H = X W1 by rows:
//
//   rows of X -> H [M, 2n], A = swiglu(H) -> weighted A W2 -> sums of each token's rows
//
// Backward, with dA' the gradient of the weighted activations s A:
//
//   rows of dO -> dA' = dO W2^T;  H, dA' -> dH, s A and ds;  dW2 = (s A)^T dO;  rows of X -> dW1 = X^T dH;  dH W1^T -> sums
//
// x, the matrices, the weights, the maps and H are kept between the passes; without H the backward pass recomputes it. With the
// kernels of pmo/layer.h, M rows of d columns exist one chunk at a time; otherwise all at the same time.
//
// With the attribute in_place the backward pass may overwrite H, and then counts up its version: Paddle refuses a second backward
// pass.
#pragma once

#include <memory>
#include <vector>

#include "paddle/attributes.h"
#include "paddle/binding.h"
#include "paddle/grouped.h"
#include "pmo/layer.h"

namespace pmo {
namespace binding {

constexpr char kMoeMlp[] = "moe_mlp";  // name of the function in errors

PMO_ATTRIBUTES(MlpAttributes, (bool, transpose, transpose), (bool, keep_hidden, keep), (bool, need_x_grad, x_grad),
               (bool, need_gate_up_grad, gate_up_grad), (bool, need_down_grad, down_grad), (bool, need_weights_grad, weight_grad),
               (bool, in_place, in_place), (int64_t, workspace, workspace), (bool, by_slot, by_slot),
               (bool, float8_wgrads, float8_wgrads));

// Scales of matrices that are codes, and their pmo_matrix_format.
struct MatrixScales {
  const paddle::Tensor &gate_up, &down;
  int32_t format;
};

// `weights` [M] by row, or with the attribute by_slot [T, K]; `slot_to_row` [T, K] is read only then. With `scales` the matrices
// are codes.
struct MlpOperands {
  const paddle::Tensor &x, &gate_up, &down, &weights, &token_rows, &row_to_token, &sizes, &offsets, &slot_to_row;
  const MatrixScales* scales = nullptr;
};

// H between the passes, or its codes and scales; `values` is undefined if it is recomputed.
struct Kept {
  paddle::Tensor values, scales;
};

// Quantised matrices that a call was given; undefined ones are quantised by the pass. The turned ones are those of the backward
// pass. Without float8 kernels, all are codes of the matrices as they are stored.
struct MatrixCodes {
  Float8 gate_up, down, turned_gate_up, turned_down;
};

// Tensors that gradients of matrices are added to, or null.
struct Sums {
  const paddle::Tensor *gate_up = nullptr, *down = nullptr;
};

// Results of the SwiGLU backward pass from which wgrads are computed later, by rows: dH, and s A.
struct Deferred {
  paddle::Tensor d_hidden, scaled;
};

// True if the kernels of pmo/layer.h run a layer of M = num_rows rows.
bool layer_has_kernels(const Target& target, paddle::DataType dtype, int64_t num_rows, int64_t num_experts, int64_t hidden_size,
                       int64_t inner, bool float8);

// A layer of experts: the checked operands of both passes. If there are kernels, a pass is one call of pmo/layer.h. Otherwise it is
// composed of GEMMs and the kernels around them.
class ExpertLayer {
 public:
  ExpertLayer(const MlpAttributes& attributes, const MlpOperands& operands, bool float8, const paddle::Tensor* hidden,
              const paddle::Tensor* d_out);
  virtual ~ExpertLayer() = default;

  // The result, and `kept` as `keep` says; H as values has zeros in rows of no expert if `clears`.
  paddle::Tensor outputs(pmo_layer_hidden keep, bool clears, const MatrixCodes& codes, Kept* kept) const;
  // Sets the gradients of x, gate_up, down and weights that the attributes want, except those added to `sums`. Kernels overwrite
  // what was kept. With `deferred`, the gradients of the matrices are left to `wgrads`.
  void backward(const MlpAttributes& attributes, const Kept& kept, const paddle::Tensor& d_out, const MatrixCodes& codes,
                const Sums& sums, Outputs* gradients, Deferred* deferred = nullptr) const;
  // Sets the gradients of gate_up, from dH, and of down, from s A, that the attributes want, in the same way. Reads neither matrices
  // nor weights.
  void wgrads(const MlpAttributes& attributes, const Deferred& deferred, const paddle::Tensor& d_out, const Sums& sums,
              Outputs* gradients) const;

  // True if a forward pass reads integer codes as they are, transposed ones.
  bool reads_integer_codes(pmo_layer_hidden keep) const;

  int64_t num_rows() const { return groups_.num_rows(); }
  const Target& target() const { return target_; }
  bool has_kernels() const { return has_kernels_; }

 protected:
  // Outputs of the SwiGLU backward pass, by rows: dH, s A and ds; and the permuted rows of dO, if they were computed.
  struct ActivationGradients {
    paddle::Tensor d_hidden, scaled, d_weights, d_out;
  };

  // Composed passes; those with H free it early.
  virtual paddle::Tensor composed_hidden(const MatrixCodes& codes) const = 0;
  virtual paddle::Tensor composed_outputs(paddle::Tensor hidden, const MatrixCodes& codes) const = 0;
  virtual ActivationGradients activation_gradients(paddle::Tensor hidden, const paddle::Tensor& d_out,
                                                   const MatrixCodes& codes) const = 0;
  // An operand of wgrads, by rows: a gradient, or an activation.
  virtual paddle::Tensor wgrad_operand(const paddle::Tensor& rows, bool is_gradient) const;
  virtual paddle::Tensor composed_d_x(const ActivationGradients& gradients, const MatrixCodes& codes) const = 0;
  // H as kept, and back.
  virtual Kept kept_of(const paddle::Tensor& hidden, pmo_layer_hidden keep) const;
  virtual paddle::Tensor hidden_of(const Kept& kept) const;

  const MlpOperands& operands() const { return operands_; }
  const ExpertMatrices& gate_up() const { return gate_up_; }
  const ExpertMatrices& down() const { return down_; }
  bool transpose() const { return transpose_; }
  bool has_float8_wgrads() const { return float8_wgrads_; }
  const Grouped& groups() const { return groups_; }
  paddle::DataType dtype() const { return operands_.x.dtype(); }

  paddle::Tensor new_rows(int64_t columns, paddle::DataType dtype) const;
  // Permutes tokens to expert order; zeros in padding rows.
  paddle::Tensor rows_of(const paddle::Tensor& tokens) const;
  paddle::Tensor sums_of(const paddle::Tensor& rows, bool weighted = false) const;
  // SwiGLU and its backward pass as separate kernels. `scaled` is dA' on entry and s A on return. All tensors have one dtype.
  paddle::Tensor swiglu(const paddle::Tensor& hidden) const;
  ActivationGradients swiglu_backward(const paddle::Tensor& hidden, paddle::Tensor scaled) const;

 private:
  void composed_backward(const MlpAttributes& attributes, const Kept& kept, const paddle::Tensor& d_out, const MatrixCodes& codes,
                         Outputs* gradients, Deferred* deferred) const;
  void composed_wgrads(const MlpAttributes& attributes, ActivationGradients activation, const paddle::Tensor& d_out,
                       Outputs* gradients) const;
  const paddle::Tensor& row_weights() const;
  // Memory for the gradients of the matrices that the attributes want, or the sums that they are added to.
  void set_wgrads(const MlpAttributes& attributes, const Sums& sums, Outputs* gradients, pmo_layer_params* params) const;
  // The plan of a pass of which the caller has set the kind, and the other facts.
  pmo_layer_plan plan_of(pmo_layer_facts* facts, bool has_codes) const;
  // Runs a pass on the kernels of pmo/layer.h; the caller says which, and sets its results.
  void run(pmo_layer_facts facts, pmo_layer_params params, const MatrixCodes& codes) const;

  const Target target_;
  const bool transpose_, float8_, float8_wgrads_;
  const int64_t workspace_;
  const MlpOperands operands_;
  const Grouped groups_;
  const ExpertMatrices gate_up_, down_;
  const bool by_slot_;
  // Dense per-row arrays: the row's token, and the row's weight once row_weights() was called.
  const paddle::Tensor row_to_token_;
  mutable paddle::Tensor row_weights_;

 public:
  const int64_t hidden_size, inner;

 private:
  const bool has_kernels_;
};

// The layer in the dtype of its tokens, and the one with float8 operands.
std::unique_ptr<ExpertLayer> new_layer(const MlpAttributes& attributes, const MlpOperands& operands, const paddle::Tensor* hidden,
                                       const paddle::Tensor* d_out);
std::unique_ptr<ExpertLayer> new_float8_layer(const MlpAttributes& attributes, const MlpOperands& operands,
                                              const paddle::Tensor* hidden, const paddle::Tensor* d_out);

// Forward and backward pass of an operator.
Outputs mlp_forward(const MlpAttributes& attributes, const ExpertLayer& layer, const MlpOperands& operands,
                    const MatrixCodes& codes = {});
Outputs mlp_backward(const MlpAttributes& attributes, const ExpertLayer& layer, const MlpOperands& operands,
                     const paddle::Tensor& hidden, const paddle::Tensor& d_out, const MatrixCodes& codes = {});

// Shape and dtype inference, common to all operators, in Paddle's order: x, gate_up, down, weights, token_rows, row_to_token,
// sizes, offsets, slot_to_row -> out, hidden.
std::vector<Shape> mlp_shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape& down,
                              const Shape& weights, const Shape& token_rows, const Shape& row_to_token, const Shape& sizes,
                              const Shape& offsets, const Shape& slot_to_row);
std::vector<paddle::DataType> mlp_dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                         const paddle::DataType&, const paddle::DataType&, const paddle::DataType&);
std::vector<Shape> mlp_backward_shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape& down,
                                       const Shape& weights, const Shape& token_rows, const Shape& row_to_token,
                                       const Shape& sizes, const Shape& offsets, const Shape& slot_to_row, const Shape& hidden,
                                       const Shape& d_out);
std::vector<paddle::DataType> mlp_backward_dtypes(const paddle::DataType& x, const paddle::DataType& gate_up,
                                                  const paddle::DataType& down, const paddle::DataType& weights,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
                                                  const paddle::DataType&);

// Throws: there is no formula for the gradient of the gradient.
Outputs mlp_double_backward(const MlpAttributes& a, const paddle::Tensor& x, const paddle::Tensor& gate_up,
                            const paddle::Tensor& down, const paddle::Tensor& weights, const paddle::Tensor& token_rows,
                            const paddle::Tensor& row_to_token, const paddle::Tensor& sizes, const paddle::Tensor& offsets,
                            const paddle::Tensor& slot_to_row, const paddle::Tensor& hidden, const paddle::Tensor& d_out,
                            const paddle::Tensor& dd_x, const paddle::Tensor& dd_gate_up, const paddle::Tensor& dd_down,
                            const paddle::Tensor& dd_weights);
std::vector<Shape> mlp_double_backward_shapes(const MlpAttributes& a, const Shape& x, const Shape& gate_up, const Shape& down,
                                              const Shape& weights, const Shape& token_rows, const Shape& row_to_token,
                                              const Shape& sizes, const Shape& offsets, const Shape& slot_to_row,
                                              const Shape& hidden, const Shape& d_out, const Shape& dd_x, const Shape& dd_gate_up,
                                              const Shape& dd_down, const Shape& dd_weights);
std::vector<paddle::DataType> mlp_double_backward_dtypes(
    const paddle::DataType& x, const paddle::DataType& gate_up, const paddle::DataType& down, const paddle::DataType& weights,
    const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType& d_out, const paddle::DataType&, const paddle::DataType&,
    const paddle::DataType&, const paddle::DataType&);

}  // namespace binding
}  // namespace pmo
