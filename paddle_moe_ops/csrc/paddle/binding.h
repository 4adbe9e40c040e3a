// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What the Paddle operators share: argument checks that hold for any caller, tensors to raw pointers, core status to exception.
//
// The Python fronts check arguments first and say more; the checks here are the ones that keep a direct caller of the operator, or
// a graph loaded from a file, from reading or writing out of bounds.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "paddle/device.h"
#include "paddle/extension.h"
#include "pmo/base.h"
#include "pmo/route.h"

namespace pmo {
namespace binding {

using Shape = std::vector<int64_t>;
using Tensors = std::vector<paddle::Tensor>;
using Outputs = Tensors;
using Names = std::vector<std::pair<const char*, const char*>>;  // the core's name of an argument, and the caller's

// The caller's fault: ValueError in Python, but RuntimeError under Paddle 2.
[[noreturn]] void fail(const std::string& text);

// The machine's fault: RuntimeError.
[[noreturn]] void fail_internally(const std::string& text);

// What a double-gradient operator without a formula says when it is needed: NotImplementedError, which is a RuntimeError.
[[noreturn]] void fail_second_order(const char* function, const char* advice);

inline void require(bool condition, const char* function, const char* text) {
  if (!condition) fail(std::string(function) + ": " + text);
}

// Turns a failed core call into an exception. Core texts begin with the core's name of the argument; `names` maps it to the caller's.
void check_status(int status, const char* function, const Names& names = {});

// The core's number of a tensor's dtype.
int32_t dtype_of(const paddle::Tensor& tensor, const char* function, const char* name);

void require_dtype(const paddle::Tensor& tensor, paddle::DataType dtype, const char* function, const char* name);
// For integers of either width: PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64.
int32_t index_kind(const paddle::Tensor& tensor, const char* function, const char* name);
// A copy of dense integers in host memory: a synchronisation on a GPU.
std::vector<int64_t> require_host_integers(const Target& target, const paddle::Tensor& tensor, const char* function,
                                           const char* name);
void require_shape(const paddle::Tensor& tensor, const Shape& shape, const char* function, const char* name);
void require_rank(const paddle::Tensor& tensor, size_t rank, const char* function, const char* name);

// For the gradient of an output, which comes from outside (a user, a hook, a PyLayer): Paddle does not compare it with the output.
// An undefined one, which no one computed, passes; so does any size where `shape` has -1.
void require_gradient(const paddle::Tensor& gradient, const Shape& shape, paddle::DataType dtype, const char* function,
                      const char* name);

// The width and dtype of the rows that the caller passed on for the gradient, which may get no tensor to read them off.
void require_described(const paddle::Tensor& rows, int64_t hidden, int hidden_dtype, const char* function);

// For saved inputs of a backward operator that take no part in differentiation. Paddle gives saved outputs back with the edge to the operator
// that made them: with create_graph=True its engine would wait for ever for a gradient along that edge, and silently lose all others.
void without_gradient(std::initializer_list<const paddle::Tensor*> saved);

// The tensor, or one that has memory if it has none and therefore no elements.
inline paddle::Tensor with_memory(const paddle::Tensor& tensor) {
  return has_place(tensor) ? tensor : paddle::empty(tensor.shape(), tensor.dtype());
}

inline paddle::Tensor dense(const paddle::Tensor& tensor) {
#ifdef PMO_PADDLE_2  // operators get contiguous tensors there, and there is no access to strides
  return tensor;
#else
  return tensor.is_contiguous() ? with_memory(tensor) : tensor.contiguous();
#endif
}

// A matrix whose rows are contiguous, with its distance between rows; copies the tensor only where its rows are not.
struct Matrix {
  paddle::Tensor tensor;
  const void* data;
  int64_t row_stride;

  explicit Matrix(const paddle::Tensor& source) : tensor(with_memory(source)) {
    const Shape shape = source.shape();
#ifdef PMO_PADDLE_2
    row_stride = shape[1];
#else
    if (shape[1] > 1 && source.strides()[1] != 1) tensor = source.contiguous();
    row_stride = shape[0] > 1 ? tensor.strides()[0] : shape[1];
#endif
    data = tensor.data();
  }
};

// A dimension of a shape inference input: -1 where the shape has no such dimension (inference must never throw).
inline int64_t dim(const Shape& shape, size_t axis) { return axis < shape.size() ? shape[axis] : -1; }

}  // namespace binding
}  // namespace pmo
