// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Paddle's own kernels that the tests need on a custom device; the CPU computes them (host_kernels.h).
//
// Paddle itself falls back to the CPU for kernels that the device lacks, but not everywhere. Sums of gradients and values passed
// inside a program then stay on the CPU, and kernels requested by name must exist.
#include "host_kernels.h"

#include "paddle/phi/kernels/abs_grad_kernel.h"
#include "paddle/phi/kernels/abs_kernel.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/add_n_kernel.h"
#include "paddle/phi/kernels/arange_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/argsort_grad_kernel.h"
#include "paddle/phi/kernels/argsort_kernel.h"
#include "paddle/phi/kernels/bitwise_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/clip_grad_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/cum_grad_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/cum_maxmin_kernel.h"
#include "paddle/phi/kernels/einsum_grad_kernel.h"
#include "paddle/phi/kernels/einsum_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/empty_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/flatten_grad_kernel.h"
#include "paddle/phi/kernels/flatten_kernel.h"
#include "paddle/phi/kernels/flip_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_grad_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/gather_nd_grad_kernel.h"
#include "paddle/phi/kernels/gather_nd_kernel.h"
#include "paddle/phi/kernels/gaussian_kernel.h"
#include "paddle/phi/kernels/index_add_kernel.h"
#include "paddle/phi/kernels/index_sample_grad_kernel.h"
#include "paddle/phi/kernels/index_sample_kernel.h"
#include "paddle/phi/kernels/index_select_grad_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/linspace_kernel.h"
#include "paddle/phi/kernels/logical_kernel.h"
#include "paddle/phi/kernels/logsumexp_grad_kernel.h"
#include "paddle/phi/kernels/logsumexp_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/nonzero_kernel.h"
#include "paddle/phi/kernels/one_hot_kernel.h"
#include "paddle/phi/kernels/put_along_axis_kernel.h"
#include "paddle/phi/kernels/reduce_all_kernel.h"
#include "paddle/phi/kernels/reduce_any_kernel.h"
#include "paddle/phi/kernels/reduce_max_grad_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_grad_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/searchsorted_kernel.h"
#include "paddle/phi/kernels/set_value_kernel.h"
#include "paddle/phi/kernels/sign_kernel.h"
#include "paddle/phi/kernels/slice_grad_kernel.h"
#include "paddle/phi/kernels/slice_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/squeeze_grad_kernel.h"
#include "paddle/phi/kernels/squeeze_kernel.h"
#include "paddle/phi/kernels/stack_grad_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"
#include "paddle/phi/kernels/swiglu_grad_kernel.h"
#include "paddle/phi/kernels/swiglu_kernel.h"
#include "paddle/phi/kernels/take_along_axis_grad_kernel.h"
#include "paddle/phi/kernels/take_along_axis_kernel.h"
#include "paddle/phi/kernels/tile_grad_kernel.h"
#include "paddle/phi/kernels/tile_kernel.h"
#include "paddle/phi/kernels/top_k_grad_kernel.h"
#include "paddle/phi/kernels/top_k_kernel.h"
#include "paddle/phi/kernels/transpose_grad_kernel.h"
#include "paddle/phi/kernels/transpose_kernel.h"
#include "paddle/phi/kernels/unbind_kernel.h"
#include "paddle/phi/kernels/unsqueeze_grad_kernel.h"
#include "paddle/phi/kernels/unsqueeze_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

// Kernels that Paddle's headers declare with other template parameters, or not at all.
namespace phi {
template <typename T, typename Context>
void RigAssign(const Context& dev_ctx, const DenseTensor& x, DenseTensor* out);
template <typename T, typename Context>
void RigAssignRaw(const Context& dev_ctx, const paddle::optional<DenseTensor>& x, DenseTensor* out);
template <typename T, typename Context>
void RigShareData(const Context& dev_ctx, const DenseTensor& x, DenseTensor* out);
}  // namespace phi

// KERNEL(name, function): Paddle's name of the kernel, and a declaration with its arguments.
#define RIG_KERNELS(KERNEL)                              \
  KERNEL(abs, AbsKernel)                                 \
  KERNEL(abs_grad, AbsGradKernel)                        \
  KERNEL(add, AddKernel)                                 \
  KERNEL(add_double_grad, AddDoubleGradKernel)           \
  KERNEL(add_grad, AddGradKernel)                        \
  KERNEL(add_n, AddNKernel)                              \
  KERNEL(all, AllKernel)                                 \
  KERNEL(any, AnyKernel)                                 \
  KERNEL(arange_tensor, ArangeTensorKernel)              \
  KERNEL(argmax, ArgMaxKernel)                           \
  KERNEL(argsort, ArgsortKernel)                         \
  KERNEL(argsort_grad, ArgsortGradKernel)                \
  KERNEL(assign, RigAssign)                              \
  KERNEL(assign_raw, RigAssignRaw)                       \
  KERNEL(bitwise_and, BitwiseAndKernel)                  \
  KERNEL(bitwise_or, BitwiseOrKernel)                    \
  KERNEL(cast, CastKernel)                               \
  KERNEL(ceil, CeilKernel)                               \
  KERNEL(clip, ClipKernel)                               \
  KERNEL(clip_grad, ClipGradKernel)                      \
  KERNEL(concat, ConcatKernel)                           \
  KERNEL(concat_grad, ConcatGradKernel)                  \
  KERNEL(contiguous, ContiguousKernel)                   \
  KERNEL(cummax, CummaxKernel)                           \
  KERNEL(cumsum, CumsumKernel)                           \
  KERNEL(cumsum_grad, CumsumGradKernel)                  \
  KERNEL(div_scale, DivScaleKernel)                      \
  KERNEL(divide, DivideKernel)                           \
  KERNEL(divide_grad, DivideGradKernel)                  \
  KERNEL(einsum, EinsumKernel)                           \
  KERNEL(einsum_grad, EinsumGradKernel)                  \
  KERNEL(elementwise_pow, ElementwisePowKernel)          \
  KERNEL(elementwise_pow_grad, ElementwisePowGradKernel) \
  KERNEL(embedding, EmbeddingKernel)                     \
  KERNEL(embedding_grad, EmbeddingGradKernel)            \
  KERNEL(empty, EmptyKernel)                             \
  KERNEL(equal, EqualKernel)                             \
  KERNEL(exp, ExpKernel)                                 \
  KERNEL(exp_grad, ExpGradKernel)                        \
  KERNEL(expand, ExpandKernel)                           \
  KERNEL(expand_grad, ExpandGradKernel)                  \
  KERNEL(fill, FillKernel)                               \
  KERNEL(flatten, FlattenKernel)                         \
  KERNEL(flatten_grad, FlattenGradKernel)                \
  KERNEL(flip, FlipKernel)                               \
  KERNEL(floor_divide, FloorDivideKernel)                \
  KERNEL(full, FullKernel)                               \
  KERNEL(full_like, FullLikeKernel)                      \
  KERNEL(gather, GatherKernel)                           \
  KERNEL(gather_grad, GatherGradKernel)                  \
  KERNEL(gather_nd, GatherNdKernel)                      \
  KERNEL(gather_nd_grad, GatherNdGradKernel)             \
  KERNEL(gaussian, GaussianKernel)                       \
  KERNEL(greater_equal, GreaterEqualKernel)              \
  KERNEL(greater_than, GreaterThanKernel)                \
  KERNEL(index_add, IndexAddKernel)                      \
  KERNEL(index_sample, IndexSampleKernel)                \
  KERNEL(index_sample_grad, IndexSampleGradKernel)       \
  KERNEL(index_select, IndexSelectKernel)                \
  KERNEL(index_select_grad, IndexSelectGradKernel)       \
  KERNEL(isfinite, IsfiniteKernel)                       \
  KERNEL(isnan, IsnanKernel)                             \
  KERNEL(less_equal, LessEqualKernel)                    \
  KERNEL(less_than, LessThanKernel)                      \
  KERNEL(linspace, LinspaceKernel)                       \
  KERNEL(log, LogKernel)                                 \
  KERNEL(log_grad, LogGradKernel)                        \
  KERNEL(logical_and, LogicalAndKernel)                  \
  KERNEL(logical_not, LogicalNotKernel)                  \
  KERNEL(logical_or, LogicalOrKernel)                    \
  KERNEL(logsumexp, LogsumexpKernel)                     \
  KERNEL(logsumexp_grad, LogsumexpGradKernel)            \
  KERNEL(matmul, MatmulKernel)                           \
  KERNEL(matmul_grad, MatmulGradKernel)                  \
  KERNEL(max, MaxKernel)                                 \
  KERNEL(max_grad, ReduceMaxGradKernel)                  \
  KERNEL(maximum, MaximumKernel)                         \
  KERNEL(maximum_grad, MaximumGradKernel)                \
  KERNEL(mean, MeanKernel)                               \
  KERNEL(mean_grad, ReduceMeanGradKernel)                \
  KERNEL(min, MinKernel)                                 \
  KERNEL(minimum, MinimumKernel)                         \
  KERNEL(minimum_grad, MinimumGradKernel)                \
  KERNEL(multiply, MultiplyKernel)                       \
  KERNEL(multiply_grad, MultiplyGradKernel)              \
  KERNEL(nonzero, NonZeroKernel)                         \
  KERNEL(not_equal, NotEqualKernel)                      \
  KERNEL(one_hot, OneHotKernel)                          \
  KERNEL(pow, PowKernel)                                 \
  KERNEL(pow_double_grad, PowDoubleGradKernel)           \
  KERNEL(pow_grad, PowGradKernel)                        \
  KERNEL(put_along_axis, PutAlongAxisKernel)             \
  KERNEL(remainder, RemainderKernel)                     \
  KERNEL(rsqrt, RsqrtKernel)                             \
  KERNEL(scale, ScaleKernel)                             \
  KERNEL(scatter, ScatterKernel)                         \
  KERNEL(searchsorted, SearchsortedKernel)               \
  KERNEL(set_value_with_tensor, SetTensorValueKernel)    \
  KERNEL(share_data, RigShareData)                       \
  KERNEL(sigmoid, SigmoidKernel)                         \
  KERNEL(sigmoid_grad, SigmoidGradKernel)                \
  KERNEL(sign, SignKernel)                               \
  KERNEL(silu, SiluKernel)                               \
  KERNEL(silu_grad, SiluGradKernel)                      \
  KERNEL(slice, SliceKernel)                             \
  KERNEL(slice_grad, SliceGradKernel)                    \
  KERNEL(softmax, SoftmaxKernel)                         \
  KERNEL(softmax_grad, SoftmaxGradKernel)                \
  KERNEL(split, SplitKernel)                             \
  KERNEL(split_with_num, SplitWithNumKernel)             \
  KERNEL(sqrt, SqrtKernel)                               \
  KERNEL(sqrt_grad, SqrtGradKernel)                      \
  KERNEL(square, SquareKernel)                           \
  KERNEL(square_grad, SquareGradKernel)                  \
  KERNEL(squeeze, SqueezeKernel)                         \
  KERNEL(squeeze_grad, SqueezeGradKernel)                \
  KERNEL(stack, StackKernel)                             \
  KERNEL(stack_grad, StackGradKernel)                    \
  KERNEL(strided_copy, StridedCopyKernel)                \
  KERNEL(subtract, SubtractKernel)                       \
  KERNEL(subtract_grad, SubtractGradKernel)              \
  KERNEL(sum, SumKernel)                                 \
  KERNEL(sum_grad, ReduceSumGradKernel)                  \
  KERNEL(swiglu, SwiGLUKernel)                           \
  KERNEL(swiglu_grad, SwiGLUGradKernel)                  \
  KERNEL(take_along_axis, TakeAlongAxisKernel)           \
  KERNEL(take_along_axis_grad, TakeAlongAxisGradKernel)  \
  KERNEL(tanh, TanhKernel)                               \
  KERNEL(tanh_grad, TanhGradKernel)                      \
  KERNEL(tile, TileKernel)                               \
  KERNEL(tile_grad, TileGradKernel)                      \
  KERNEL(topk, TopkKernel)                               \
  KERNEL(topk_grad, TopkGradKernel)                      \
  KERNEL(transpose, TransposeKernel)                     \
  KERNEL(transpose_grad, TransposeGradKernel)            \
  KERNEL(unbind, UnbindKernel)                           \
  KERNEL(unsqueeze, UnsqueezeKernel)                     \
  KERNEL(unsqueeze_grad, UnsqueezeGradKernel)            \
  KERNEL(where, WhereKernel)                             \
  KERNEL(where_grad, WhereGradKernel)

namespace {

#define RIG_NAME(name, function)           \
  struct name_of_##name {                  \
    static constexpr char kText[] = #name; \
  };
RIG_KERNELS(RIG_NAME)

template <typename Name, typename Function>
void Register() {
  using phi::DataType;
  rig::RegisterAll<Name, Function, DataType::BOOL, DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32,
                   DataType::INT64, DataType::FLOAT16, DataType::BFLOAT16, DataType::FLOAT32, DataType::FLOAT64,
                   DataType::FLOAT8_E4M3FN, DataType::FLOAT8_E5M2>();
}

// Registers kernels when the library is loaded; Paddle then collects them.
[[maybe_unused]] const bool kRegistered = [] {
#define RIG_REGISTER(name, function) Register<name_of_##name, decltype(&phi::function<float, phi::CPUContext>)>();
  RIG_KERNELS(RIG_REGISTER)
  return true;
}();

}  // namespace
