// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Kernels of Paddle that run on the device: those of a decoder's forward pass, so that a CUDA graph can capture it. A kernel
// returns false for arguments that it does not take; the host then computes them (host_kernels.h).
//
// The tests of operators compare with Paddle's CPU kernels. So these are used only if RIG_DEVICE_KERNELS is set.
#include <cuda_runtime.h>

#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <string>

#include "blas.h"
#include "device_loops.h"
#include "host_kernels.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/swiglu_kernel.h"

namespace phi {
template <typename T, typename Context>
void RigAssign(const Context& dev_ctx, const DenseTensor& x, DenseTensor* out);
}  // namespace phi

namespace rig {
namespace {

using phi::DataType;
using phi::DenseTensor;
using Context = phi::DeviceContext;

void* StreamOf(const Context& context) { return static_cast<const phi::CustomContext&>(context).stream(); }

std::optional<Type> TypeOf(DataType dtype) {
  switch (dtype) {
    case DataType::FLOAT32:
      return Type::kFloat32;
    case DataType::BFLOAT16:
      return Type::kBFloat16;
    case DataType::INT32:
      return Type::kInt32;
    case DataType::INT64:
      return Type::kInt64;
    default:
      return std::nullopt;
  }
}

// True if the kernels read and write such a tensor.
bool IsTaken(const Context& context, const DenseTensor& tensor) {
  return TypeOf(tensor.dtype()) && tensor.dims().size() <= kMaxRank && tensor.has_allocation() && tensor.numel() > 0 &&
         tensor.place() == context.GetPlace();
}

bool IsContiguous(const DenseTensor& tensor) { return tensor.meta().is_contiguous(); }

Array ArrayOf(const DenseTensor& tensor) {
  Array array{const_cast<void*>(tensor.data()), *TypeOf(tensor.dtype()), tensor.dims().size(), {}, {}};
  for (int axis = 0; axis < array.rank; ++axis) {
    array.sizes[axis] = tensor.dims()[axis];
    array.strides[axis] = tensor.strides()[axis];
  }
  return array;
}

// The array with the sizes of another one, to whose last axes its own belong.
Array Broadcast(const Array& array, const Array& like) {
  Array wide = like;
  wide.data = array.data;
  wide.type = array.type;
  for (int axis = 0; axis < like.rank; ++axis) {
    const int own = axis - (like.rank - array.rank);
    wide.strides[axis] = own < 0 || array.sizes[own] == 1 ? 0 : array.strides[own];
  }
  return wide;
}

// Allocates an output unless it has memory; false if the kernels do not write such a tensor.
bool Allocate(const Context& context, DenseTensor* out, DataType dtype) {
  if (!TypeOf(dtype) || out->dims().size() > kMaxRank || out->numel() == 0) return false;
  context.Alloc(out, dtype);
  return true;
}

bool MapOne(const Context& context, MapOp op, const DenseTensor& x, DataType dtype, DenseTensor* out, float factor = 1.0f,
            float bias = 0.0f) {
  if (!IsTaken(context, x) || !Allocate(context, out, dtype)) return false;
  const Array from = ArrayOf(x);
  Map(op, from, from, ArrayOf(*out), factor, bias, StreamOf(context));
  return true;
}

template <MapOp op>
bool MapTwo(const Context& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  if (!IsTaken(context, x) || !IsTaken(context, y) || x.dtype() != y.dtype() || !Allocate(context, out, x.dtype())) return false;
  const Array to = ArrayOf(*out);
  Map(op, Broadcast(ArrayOf(x), to), Broadcast(ArrayOf(y), to), to, 1.0f, 0.0f, StreamOf(context));
  return true;
}

bool Cast(const Context& context, const DenseTensor& x, DataType dtype, DenseTensor* out) {
  return MapOne(context, MapOp::kCopy, x, dtype, out);
}

bool Assign(const Context& context, const DenseTensor& x, DenseTensor* out) {
  return MapOne(context, MapOp::kCopy, x, x.dtype(), out);
}

bool Contiguous(const Context& context, const DenseTensor& x, DenseTensor* out) {
  DenseTensor made;
  made.Resize(x.dims());
  if (!MapOne(context, MapOp::kCopy, x, x.dtype(), &made)) return false;
  *out = made;
  return true;
}

// Zeros, such as gradients that are missing, for which the host would wait.
bool FullLike(const Context& context, const DenseTensor&, const phi::Scalar& value, DataType dtype, DenseTensor* out) {
  if (value.to<double>() != 0.0 || !Allocate(context, out, dtype)) return false;
  const size_t bytes = out->numel() * phi::SizeOf(dtype);
  return cudaMemsetAsync(out->data(), 0, bytes, static_cast<cudaStream_t>(StreamOf(context))) == cudaSuccess;
}

bool Rsqrt(const Context& context, const DenseTensor& x, DenseTensor* out) {
  return MapOne(context, MapOp::kRsqrt, x, x.dtype(), out);
}

bool Scale(const Context& context, const DenseTensor& x, const phi::Scalar& scale, const phi::Scalar& bias, bool bias_after_scale,
           DenseTensor* out) {
  const float factor = scale.to<float>(), added = bias.to<float>();
  return MapOne(context, MapOp::kScale, x, x.dtype(), out, factor, bias_after_scale ? added : added * factor);
}

// Operators over the last axis of contiguous rows.
bool MapLastAxis(const Context& context, RowOp op, const DenseTensor& x, int64_t axis, DataType dtype, DenseTensor* out) {
  const int rank = x.dims().size();
  if (!IsTaken(context, x) || !IsContiguous(x) || (axis != -1 && axis != rank - 1) || !Allocate(context, out, dtype))
    return false;
  MapRows(op, ArrayOf(x), ArrayOf(*out), x.dims()[rank - 1], StreamOf(context));
  return true;
}

bool Mean(const Context& context, const DenseTensor& x, const phi::IntArray& axes, bool, DenseTensor* out) {
  return axes.size() == 1 && MapLastAxis(context, RowOp::kMean, x, axes[0], x.dtype(), out);
}

bool Softmax(const Context& context, const DenseTensor& x, int axis, DenseTensor* out) {
  return MapLastAxis(context, RowOp::kSoftmax, x, axis, x.dtype(), out);
}

bool Argmax(const Context& context, const DenseTensor& x, const phi::Scalar& axis, bool, bool flatten, DataType dtype,
            DenseTensor* out) {
  return !flatten && MapLastAxis(context, RowOp::kArgmax, x, axis.to<int64_t>(), dtype, out);
}

bool Gather(const Context& context, const DenseTensor& x, const DenseTensor& ids, const phi::Scalar& axis, DenseTensor* out) {
  if (axis.to<int>() != 0 || !IsTaken(context, x) || !IsTaken(context, ids) || !IsContiguous(x) || !IsContiguous(ids))
    return false;
  if (!Allocate(context, out, x.dtype())) return false;
  MoveRows(ArrayOf(x), ArrayOf(ids), ArrayOf(*out), ids.numel(), x.numel() / x.dims()[0], false, StreamOf(context));
  return true;
}

bool Embedding(const Context& context, const DenseTensor& ids, const DenseTensor& weight, int64_t padding, DenseTensor* out) {
  return padding < 0 && Gather(context, weight, ids, phi::Scalar(0), out);
}

bool Scatter(const Context& context, const DenseTensor& x, const DenseTensor& ids, const DenseTensor& updates, bool overwrites,
             DenseTensor* out) {
  for (const DenseTensor* each : {&x, &ids, &updates}) {
    if (!IsTaken(context, *each) || !IsContiguous(*each)) return false;
  }
  const Array from = ArrayOf(x);
  if (!overwrites || !Allocate(context, out, x.dtype())) return false;
  const Array to = ArrayOf(*out);
  if (to.data != from.data) Map(MapOp::kCopy, from, from, to, 1.0f, 0.0f, StreamOf(context));
  MoveRows(ArrayOf(updates), ArrayOf(ids), to, ids.numel(), x.numel() / x.dims()[0], true, StreamOf(context));
  return true;
}

// Copies between a tensor and parts of it that follow each other along an axis.
template <typename Part>
bool CopyParts(const Context& context, const DenseTensor& whole, int64_t axis, const std::vector<Part*>& parts, bool splits) {
  Array piece = ArrayOf(whole);
  axis = axis < 0 ? axis + piece.rank : axis;
  for (const DenseTensor* part : parts) {
    const Array array = ArrayOf(*part);
    piece.sizes[axis] = array.sizes[axis];
    Map(MapOp::kCopy, splits ? piece : array, array, splits ? array : piece, 1.0f, 0.0f, StreamOf(context));
    piece.data = static_cast<char*>(piece.data) + phi::SizeOf(whole.dtype()) * piece.strides[axis] * array.sizes[axis];
  }
  return true;
}

bool SplitTo(const Context& context, const DenseTensor& x, const phi::Scalar& axis, const std::vector<DenseTensor*>& outs) {
  if (!IsTaken(context, x)) return false;
  for (DenseTensor* out : outs) {
    if (!Allocate(context, out, x.dtype())) return false;
  }
  return CopyParts(context, x, axis.to<int64_t>(), outs, true);
}

bool Split(const Context& context, const DenseTensor& x, const phi::IntArray&, const phi::Scalar& axis,
           std::vector<DenseTensor*> outs) {
  return SplitTo(context, x, axis, outs);
}

bool SplitWithNum(const Context& context, const DenseTensor& x, int, const phi::Scalar& axis, std::vector<DenseTensor*> outs) {
  return SplitTo(context, x, axis, outs);
}

bool Concat(const Context& context, const std::vector<const DenseTensor*>& xs, const phi::Scalar& axis, DenseTensor* out) {
  for (const DenseTensor* x : xs) {
    if (!IsTaken(context, *x) || x->dtype() != xs[0]->dtype()) return false;
  }
  return Allocate(context, out, xs[0]->dtype()) && CopyParts(context, *out, axis.to<int64_t>(), xs, false);
}

bool SwiGLU(const Context& context, const DenseTensor& x, const paddle::optional<DenseTensor>& y, DenseTensor* out) {
  if (y || !IsTaken(context, x) || !IsContiguous(x) || !Allocate(context, out, x.dtype())) return false;
  SwiGlu(ArrayOf(x), ArrayOf(*out), x.dims()[x.dims().size() - 1] / 2, StreamOf(context));
  return true;
}

bool Matmul(const Context& context, const DenseTensor& x, const DenseTensor& y, bool transpose_x, bool transpose_y,
            DenseTensor* out) {
  const int rank = x.dims().size(), rank_y = y.dims().size();
  const bool is_bfloat16 = x.dtype() == DataType::BFLOAT16;
  if (!IsTaken(context, x) || !IsTaken(context, y) || !IsContiguous(x) || !IsContiguous(y) || x.dtype() != y.dtype())
    return false;
  if ((!is_bfloat16 && x.dtype() != DataType::FLOAT32) || rank < 2 || rank_y < 2) return false;
  Gemm gemm{
      x.data(),           y.data(), nullptr, is_bfloat16, transpose_x, transpose_y, x.dims()[rank - 2], y.dims()[rank_y - 1],
      x.dims()[rank - 1], 1};
  if (transpose_x) std::swap(gemm.m, gemm.k);
  if (transpose_y) gemm.n = y.dims()[rank_y - 2];
  const int64_t batch = x.numel() / (gemm.m * gemm.k);
  if (rank_y == 2 && !transpose_x) {
    gemm.m *= batch;
  } else if (rank_y == rank && y.numel() / (gemm.n * gemm.k) == batch) {
    gemm.batch = batch;
  } else {
    return false;
  }
  if (!Allocate(context, out, x.dtype())) return false;
  gemm.c = out->data();
  return RunGemm(gemm, StreamOf(context));
}

// The function as an untyped pointer. Its arguments are those of Paddle's kernel, which the first argument declares.
template <typename... Arguments>
void* As(void (*)(const phi::CPUContext&, Arguments...), bool (*kernel)(const Context&, Arguments...)) {
  return reinterpret_cast<void*>(kernel);
}
#define RIG_OWN(name, declared, kernel) {name, As(&phi::declared<float, phi::CPUContext>, &kernel)}

const std::map<std::string, void*>& Kernels() {
  static const std::map<std::string, void*> kernels = {
      RIG_OWN("add", AddKernel, MapTwo<MapOp::kAdd>),
      RIG_OWN("argmax", ArgMaxKernel, Argmax),
      RIG_OWN("assign", RigAssign, Assign),
      RIG_OWN("cast", CastKernel, Cast),
      RIG_OWN("concat", ConcatKernel, Concat),
      RIG_OWN("contiguous", ContiguousKernel, Contiguous),
      RIG_OWN("embedding", EmbeddingKernel, Embedding),
      RIG_OWN("full_like", FullLikeKernel, FullLike),
      RIG_OWN("gather", GatherKernel, Gather),
      RIG_OWN("matmul", MatmulKernel, Matmul),
      RIG_OWN("mean", MeanKernel, Mean),
      RIG_OWN("multiply", MultiplyKernel, MapTwo<MapOp::kMultiply>),
      RIG_OWN("rsqrt", RsqrtKernel, Rsqrt),
      RIG_OWN("scale", ScaleKernel, Scale),
      RIG_OWN("scatter", ScatterKernel, Scatter),
      RIG_OWN("softmax", SoftmaxKernel, Softmax),
      RIG_OWN("split", SplitKernel, Split),
      RIG_OWN("split_with_num", SplitWithNumKernel, SplitWithNum),
      RIG_OWN("subtract", SubtractKernel, MapTwo<MapOp::kSubtract>),
      RIG_OWN("swiglu", SwiGLUKernel, SwiGLU),
  };
  return kernels;
}

}  // namespace

void* FindDeviceKernel(const char* name) {
  if (std::getenv("RIG_DEVICE_KERNELS") == nullptr) return nullptr;
  const auto found = Kernels().find(name);
  return found == Kernels().end() ? nullptr : found->second;
}

}  // namespace rig
