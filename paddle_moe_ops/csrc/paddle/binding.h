// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Helpers of the Paddle operators: argument checks for any caller, tensors to raw pointers, core status to exception.
//
// Python functions check arguments first, with more detailed errors. The checks in C++ also hold for direct callers of an
// operator and for graphs loaded from a file: they prevent accesses out of bounds.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "paddle/device.h"
#include "paddle/operator_api.h"
#include "pmo/base.h"
#include "pmo/route.h"

namespace pmo {
namespace binding {

using Shape = std::vector<int64_t>;
using Tensors = std::vector<paddle::Tensor>;
using Outputs = Tensors;
using Names = std::vector<std::pair<const char*, const char*>>;  // the core's name of an argument, and the caller's

// Throws for an error of the caller: ValueError in Python, but RuntimeError under Paddle 2.
[[noreturn]] void fail(const std::string& text);

// Throws for a failure of the machine: RuntimeError.
[[noreturn]] void fail_internally(const std::string& text);

// Throws from a double-gradient operator without a formula: NotImplementedError, which is a RuntimeError.
[[noreturn]] void fail_second_order(const char* function, const char* advice);

inline void require(bool condition, const char* function, const char* text) {
  if (!condition) fail(std::string(function) + ": " + text);
}

// Turns a failed core call into an exception. Core texts begin with the core's name of the argument; `names` maps it to the caller's.
void check_status(int status, const char* function, const Names& names = {});

// The core's number of a tensor's dtype.
int32_t dtype_of(const paddle::Tensor& tensor, const char* function, const char* name);

void require_dtype(const paddle::Tensor& tensor, paddle::DataType dtype, const char* function, const char* name);
// Kind of an integer tensor of either width: PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64.
int32_t index_kind(const paddle::Tensor& tensor, const char* function, const char* name);
// A copy of dense integers in host memory: a synchronisation on a GPU.
std::vector<int64_t> require_host_integers(const Target& target, const paddle::Tensor& tensor, const char* function,
                                           const char* name);
void require_shape(const paddle::Tensor& tensor, const Shape& shape, const char* function, const char* name);
void require_rank(const paddle::Tensor& tensor, size_t rank, const char* function, const char* name);

// Checks the gradient of an output, which comes from outside (a user, a hook, a PyLayer): Paddle does not compare it with the
// output. An undefined gradient, which no one computed, passes; -1 in `shape` accepts any size.
void require_gradient(const paddle::Tensor& gradient, const Shape& shape, paddle::DataType dtype, const char* function,
                      const char* name);

// Width of rows that a program does not know.
constexpr int64_t kUnknown = -1;

// Checks `rows` against the width and dtype that the caller passed as attributes: the gradient may receive no tensor to read them
// from. The width may be kUnknown.
void require_described(const paddle::Tensor& rows, int64_t hidden, int hidden_dtype, const char* function);

// A width for zeros in place of an undefined gradient; throws if it is kUnknown.
int64_t known_width(int64_t hidden, const char* function);

// Detaches saved inputs of a backward operator that take no part in differentiation. Paddle returns saved outputs with the edge
// to the operator that computed them. With create_graph=True its engine would wait forever for a gradient along that edge, and
// silently lose all others.
void without_gradient(std::initializer_list<const paddle::Tensor*> saved);

// The tensor, or an allocated one if it has no memory and therefore no elements.
inline paddle::Tensor with_memory(const paddle::Tensor& tensor) {
  return has_place(tensor) ? tensor : paddle::empty(tensor.shape(), tensor.dtype());
}

inline paddle::Tensor dense(const paddle::Tensor& tensor) {
#ifdef PMO_PADDLE_2  // operators receive contiguous tensors, and strides are not accessible
  return tensor;
#else
  return tensor.is_contiguous() ? with_memory(tensor) : tensor.contiguous();
#endif
}

// A matrix with contiguous rows, and its row stride in elements; copies the tensor only if its rows are not contiguous.
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

// A dimension of a shape inference input; -1 if the shape has no such dimension (inference must never throw).
inline int64_t dim(const Shape& shape, size_t axis) { return axis < shape.size() ? shape[axis] : -1; }

}  // namespace binding
}  // namespace pmo
