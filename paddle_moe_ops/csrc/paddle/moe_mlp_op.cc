// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// moe_mlp: a layer of experts in the dtype of its tokens, as paddle/moe_mlp.h describes it.
//
// If the kernels of pmo/grouped.h support the sizes, a pass is one call of pmo/layer.h. Otherwise it is composed: SwiGLU and its
// gradient are kernels of their own, and the weights are those of the sum.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "pmo/layer.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

class Layer : public ExpertLayer {
 public:
  Layer(const MlpAttributes& a, const MlpOperands& o, const paddle::Tensor* hidden = nullptr,
        const paddle::Tensor* d_out = nullptr)
      : ExpertLayer(a, o, PMO_GROUPED_TURNED_ROWS, hidden, d_out),
        workspace_(a.workspace),
        // sizes of the GEMMs for H and dA'; the other GEMMs have the same sizes, transposed
        has_kernels_(groups().has_kernels(dtype(), hidden_size, 2 * inner) && groups().has_kernels(dtype(), hidden_size, inner)) {
  }

  paddle::Tensor outputs(paddle::Tensor* hidden) const override {
    if (!has_kernels_) return sums_of(groups().gemm(activations(hidden), operands().down, transpose(), dtype()), true);
    paddle::Tensor out = target().empty(operands().x.shape(), dtype());
    pmo_layer_facts f = {};
    pmo_layer_params p = {};
    if (hidden != nullptr) {
      *hidden = new_rows(2 * inner);
      p.hidden = hidden->data();
      f.keeps_hidden = p.clears_hidden = 1;  // Paddle may check the values of outputs
    }
    p.out = out.data();
    run(f, p);
    return out;
  }

  void backward(const MlpAttributes& a, const paddle::Tensor* kept, const paddle::Tensor& d_out,
                Outputs* gradients) const override {
    if (!has_kernels_) return ExpertLayer::backward(a, kept, d_out, gradients);
    const auto wanted = [&](size_t place, bool is_wanted, const paddle::Tensor& operand) -> void* {
      if (!is_wanted) return nullptr;
      (*gradients)[place] = target().empty(operand.shape(), operand.dtype());
      return (*gradients)[place].data();
    };
    pmo_layer_facts f = {};
    pmo_layer_params p = {};
    f.backward = 1;
    p.d_x = wanted(0, a.need_x_grad, operands().x);
    p.d_gate_up = wanted(1, a.need_gate_up_grad, operands().gate_up);
    p.d_down = wanted(2, a.need_down_grad, operands().down);
    p.d_weights = static_cast<float*>(wanted(3, a.need_weights_grad, row_weights()));
    f.needs_d_weights = a.need_weights_grad;
    paddle::Tensor hidden;
    if (kept != nullptr) {
      hidden = *kept;
      if (a.in_place) {
        hidden.bump_inplace_version();
      } else {
        hidden = new_rows(2 * inner);
        target().copy(kept->data(), kept->numel() * static_cast<int64_t>(phi::SizeOf(dtype())), hidden.data());
      }
      p.hidden = hidden.data();
      f.keeps_hidden = 1;
    }
    const Matrix rows = readable_rows(target(), d_out);
    p.d_out = rows.data;
    p.d_out_row_stride = rows.row_stride;
    run(f, p);
  }

  // ---- without kernels

  ActivationGradients activation_gradients(const paddle::Tensor* kept, const paddle::Tensor& d_out, bool) const override {
    paddle::Tensor hidden;
    if (kept != nullptr) {
      hidden = *kept;
    } else {
      activations(&hidden);
    }
    const paddle::Tensor rows = rows_of(d_out);
    ActivationGradients gradients = swiglu_backward(hidden, groups().gemm(rows, operands().down, !transpose(), dtype()));
    gradients.d_out = rows;
    return gradients;
  }

  paddle::Tensor d_x(const ActivationGradients& gradients) const override {
    return sums_of(groups().gemm(gradients.d_hidden, operands().gate_up, !transpose(), dtype()));
  }

 private:
  // Returns A, and H if `hidden` is not null.
  paddle::Tensor activations(paddle::Tensor* hidden) const {
    const paddle::Tensor gate_up = groups().gemm(rows_of(operands().x), operands().gate_up, transpose(), dtype());
    if (hidden != nullptr) *hidden = gate_up;
    return swiglu(gate_up);
  }

  // Runs a pass on the kernels of pmo/layer.h; the caller says which, and sets its results.
  void run([[maybe_unused]] pmo_layer_facts f, [[maybe_unused]] pmo_layer_params p) const {
#ifdef PMO_WITH_CUDA
    static constexpr pmo_layer_kernels kKernels = {pmo_grouped_tables_cuda, pmo_permute_cuda,  pmo_grouped_product_cuda,
                                                   pmo_grouped_outer_cuda,  pmo_row_sums_cuda, pmo_unpermute_cuda,
                                                   pmo_grouped_clear_cuda};
    const MlpOperands& o = operands();
    f.struct_size = sizeof f;
    f.num_tokens = o.x.shape()[0];
    f.num_rows = num_rows();
    f.num_experts = o.down.shape()[0];
    f.hidden = hidden_size;
    f.inner = inner;
    f.workspace = workspace_;
    f.dtype = dtype_of(o.x, kMoeMlp, "x");
    pmo_gpu_facts_cuda(&f.num_sms, &f.memory_gbps);
    pmo_layer_plan plan;
    check_status(pmo_layer_plan_of(&f, &plan), kMoeMlp);
    const paddle::Tensor workspace = target().empty({plan.bytes}, paddle::DataType::UINT8);
    const Matrix tokens = readable_rows(target(), o.x);
    const paddle::Tensor gate_up = target().aligned(dense(o.gate_up)), down = target().aligned(dense(o.down));
    const paddle::Tensor token_rows = dense(o.token_rows), sizes = integers_on(target(), o.sizes),
                         offsets = integers_on(target(), o.offsets);
    p.struct_size = sizeof p;
    p.slots_per_token = token_rows.shape()[1];
    p.x = tokens.data;
    p.x_row_stride = tokens.row_stride;
    p.gate_up = gate_up.data();
    p.down = down.data();
    p.weights = row_weights().data<float>();
    p.token_rows = token_rows.data<int32_t>();
    p.row_to_token = row_to_token().data<int32_t>();
    p.sizes = sizes.data();
    p.offsets = offsets.data();
    p.sizes_kind = index_kind(o.sizes, kMoeMlp, "sizes");
    p.offsets_kind = index_kind(o.offsets, kMoeMlp, "offsets");
    p.workspace = const_cast<void*>(workspace.data());
    p.transpose = transpose();
    check_status(pmo_layer_run(&f, &p, &kKernels, target().stream()), kMoeMlp);
#endif
  }

  const int64_t workspace_;
  const bool has_kernels_;
};

// True if the groups ascend within the rows, as those of a plan do. Both tensors are on the host.
bool are_groups(const paddle::Tensor& sizes, const paddle::Tensor& offsets, int64_t num_rows) {
  const paddle::Tensor lengths = dense(sizes), starts = dense(offsets);
  int64_t end = 0;
  const int64_t experts = lengths.shape()[0];
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t size = lengths.data<int32_t>()[expert], start = starts.data<int32_t>()[expert];
    if (size < 0 || start < end) return false;
    end = start + size;
  }
  const int64_t last = starts.data<int32_t>()[experts];
  return last >= end && last <= num_rows;
}

// A quick call has the plan's own maps. `by_row`: the weights are [M], else [T, K].
bool fits(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down, const paddle::Tensor& weights,
          const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token, const paddle::Tensor& sizes,
          const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row, int64_t transpose, int64_t workspace_mb,
          int64_t by_row) {
  const Shape matrix = down.shape();
  if (!has_columns(x) || !is_summed(x) || matrix.size() != 3 || workspace_mb < 1) return false;
  const int64_t experts = matrix[0], inner = MatrixSizes(matrix, transpose != 0).inner, hidden = x.shape()[1];
  const bool has_sizes =
      experts > 0 && inner > 0 && sizes.shape() == Shape{experts} && x.shape()[0] == dim(token_rows.shape(), 0) &&
      matrix == (transpose != 0 ? Shape{experts, hidden, inner} : Shape{experts, inner, hidden}) &&
      gate_up.shape() == (transpose != 0 ? Shape{experts, 2 * inner, hidden} : Shape{experts, hidden, 2 * inner}) &&
      weights.shape() == (by_row != 0 ? row_to_token.shape() : slot_to_row.shape());
  const bool has_dtypes = gate_up.dtype() == x.dtype() && down.dtype() == x.dtype() &&
                          weights.dtype() == paddle::DataType::FLOAT32 && sizes.dtype() == paddle::DataType::INT32 &&
                          offsets.dtype() == paddle::DataType::INT32 && dim(offsets.shape(), 0) == experts + 1;
  if (!has_sizes || !has_dtypes) return false;
  if (!are_on_one_device({&x, &gate_up, &down, &weights, &token_rows, &row_to_token, &sizes, &offsets})) return false;
  if (x.is_cpu()) return are_groups(sizes, offsets, dim(row_to_token.shape(), 0));
  const Target target(kMoeMlp, {&x});
  const Grouped groups(target, kMoeMlp, sizes, &offsets, dim(row_to_token.shape(), 0));
  return groups.has_kernels(x.dtype(), hidden, 2 * inner) && groups.has_kernels(x.dtype(), hidden, inner);
}

Outputs quick_moe_mlp(const paddle::Tensor& x, const paddle::Tensor& gate_up, const paddle::Tensor& down,
                      const paddle::Tensor& weights, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                      const paddle::Tensor& sizes, const paddle::Tensor& offsets, const paddle::Tensor& slot_to_row,
                      int64_t transpose, int64_t workspace_mb, int64_t by_row) {
  const MlpAttributes attributes = {transpose != 0, false, false, false, false, false, false, workspace_mb << 20, by_row == 0};
  return {run_mlp<Layer>(attributes, x, gate_up, down, weights, token_rows, row_to_token, sizes, offsets, slot_to_row)[0]};
}

}  // namespace

PMO_MLP_OPERATOR(pmo_moe_mlp, Layer);
PMO_DIRECT(moe_mlp, run_mlp<Layer>);
PMO_QUICK(moe_mlp, quick_moe_mlp, fits);
