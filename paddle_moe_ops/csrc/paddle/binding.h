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

#ifndef PMO_PADDLE_2
#include "paddle/common/enforce.h"
#include "paddle/common/errors.h"
#endif
#include "paddle/device.h"
#include "paddle/extension.h"
#include "pmo/base.h"

namespace pmo {
namespace binding {

using Shape = std::vector<int64_t>;
using Outputs = std::vector<paddle::Tensor>;
using Names = std::vector<std::pair<const char*, const char*>>;  // the core's name of an argument, and the caller's

#ifdef PMO_PADDLE_2  // no ValueError for operators there
[[noreturn]] inline void fail(const std::string& text) { PD_THROW(text); }
#else
[[noreturn]] inline void fail(const std::string& text) { PADDLE_THROW(common::errors::InvalidArgument("%s", text)); }
#endif

inline void require(bool condition, const char* function, const char* text) {
  if (!condition) fail(std::string(function) + ": " + text);
}

// Turns a failed core call into the exception that Python sees as ValueError. Core texts begin with the core's name of the
// argument; `names` maps it to the caller's.
inline void check_status(int status, const char* function, const Names& names = {}) {
  if (status == PMO_OK) return;
  std::string text = pmo_last_error();
  for (const auto& name : names) {
    const std::string core_name = std::string(name.first) + " ";
    if (text.compare(0, core_name.size(), core_name) == 0) text = std::string(name.second) + " " + text.substr(core_name.size());
  }
  fail(std::string(function) + ": " + text);
}

inline int32_t dtype_of(const paddle::Tensor& tensor, const char* function, const char* name) {
  switch (tensor.dtype()) {
    case paddle::DataType::FLOAT32:
      return PMO_FLOAT32;
    case paddle::DataType::FLOAT16:
      return PMO_FLOAT16;
    case paddle::DataType::BFLOAT16:
      return PMO_BFLOAT16;
#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no such dtypes
    case paddle::DataType::FLOAT8_E4M3FN:
      return PMO_FLOAT8_E4M3FN;
    case paddle::DataType::FLOAT8_E5M2:
      return PMO_FLOAT8_E5M2;
#endif
    case paddle::DataType::INT32:
      return PMO_INT32;
    default:
      fail(std::string(function) + ": " + name + " has a dtype that this operator does not move");
  }
}

inline void require_dtype(const paddle::Tensor& tensor, paddle::DataType dtype, const char* function, const char* name) {
  if (tensor.dtype() != dtype) fail(std::string(function) + ": " + name + " has the wrong dtype");
}

inline void require_shape(const paddle::Tensor& tensor, const Shape& shape, const char* function, const char* name) {
  if (tensor.shape() != shape) fail(std::string(function) + ": " + name + " has the wrong shape");
}

inline void require_rank(const paddle::Tensor& tensor, size_t rank, const char* function, const char* name) {
  if (tensor.shape().size() != rank) fail(std::string(function) + ": " + name + " has the wrong number of dimensions");
}

// The width and dtype of the rows that the caller passed on for the gradient, which may get no tensor to read them off.
inline void require_described(const paddle::Tensor& rows, int64_t hidden, int hidden_dtype, const char* function) {
  require(rows.shape()[1] == hidden && static_cast<int>(rows.dtype()) == hidden_dtype, function,
          "the attributes hidden and hidden_dtype must describe the rows");
}

inline paddle::Tensor dense(const paddle::Tensor& tensor) {
#ifdef PMO_PADDLE_2  // operators get contiguous tensors there, and there is no access to strides
  return tensor;
#else
  return tensor.is_contiguous() ? tensor : tensor.contiguous();
#endif
}

// A matrix whose rows are contiguous, with its distance between rows; copies the tensor only where its rows are not.
struct Matrix {
  paddle::Tensor tensor;
  const void* data;
  int64_t row_stride;

  explicit Matrix(const paddle::Tensor& source) : tensor(source) {
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

inline paddle::Tensor empty_int32(const Shape& shape, const paddle::Tensor& like) {
  return paddle::empty(shape, paddle::DataType::INT32, like.place());
}

inline paddle::Tensor empty_float32(const Shape& shape, const paddle::Tensor& like) {
  return paddle::empty(shape, paddle::DataType::FLOAT32, like.place());
}

// A dimension of a shape inference input: -1 where the shape has no such dimension (inference must never throw).
inline int64_t dim(const Shape& shape, size_t axis) { return axis < shape.size() ? shape[axis] : -1; }

}  // namespace binding
}  // namespace pmo
