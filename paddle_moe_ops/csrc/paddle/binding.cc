// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/binding.h"

#include <memory>

#include "common/ids.h"

#ifndef PMO_PADDLE_2
#include "paddle/common/enforce.h"
#include "paddle/common/errors.h"
#endif

namespace pmo {
namespace binding {
namespace {

#ifndef PMO_PADDLE_2
// A Paddle exception whose text is only ours: Paddle's would begin with the kind and end with the place in this file.
class Failure : public common::enforce::EnforceNotMet {
 public:
  Failure(const common::ErrorSummary& error, const std::string& text) : EnforceNotMet(error, __FILE__, __LINE__), text_(text) {}

  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};
#endif

std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  return text + "]";
}

[[noreturn]] void fail_argument(const char* function, const char* name, const std::string& expected, const std::string& given) {
  fail(std::string(function) + ": " + name + " must be " + expected + ", but got " + given);
}

bool fits(const Shape& given, const Shape& shape) {
  if (given.size() != shape.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] >= 0 && given[i] != shape[i]) return false;
  }
  return true;
}

}  // namespace

#ifdef PMO_PADDLE_2  // its operators have one kind of exception
void fail(const std::string& text) { PD_THROW(text); }
void fail_internally(const std::string& text) { PD_THROW(text); }
#else
void fail(const std::string& text) { throw Failure(common::errors::InvalidArgument("%s", text), text); }
void fail_internally(const std::string& text) { throw Failure(common::errors::Unavailable("%s", text), text); }
#endif

void fail_second_order(const char* function, const char* advice) {
  const std::string text = std::string(function) + ": second-order gradients are not supported" + advice;
#ifdef PMO_PADDLE_2
  fail(text);
#else
  throw Failure(common::errors::Unimplemented("%s", text), text);
#endif
}

void check_status(int status, const char* function, const Names& names) {
  if (status == PMO_OK) return;
  std::string text = pmo_last_error();
  for (const auto& name : names) {
    const std::string core_name = std::string(name.first) + " ";
    if (text.compare(0, core_name.size(), core_name) == 0) text = std::string(name.second) + " " + text.substr(core_name.size());
  }
  text = std::string(function) + ": " + text;
  if (status == PMO_INTERNAL) fail_internally(text);
  fail(text);
}

int32_t dtype_of(const paddle::Tensor& tensor, const char* function, const char* name) {
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
      fail(std::string(function) + ": " + name +
           " has a dtype that this operator does not move: " + phi::DataTypeToString(tensor.dtype()));
  }
}

void require_dtype(const paddle::Tensor& tensor, paddle::DataType dtype, const char* function, const char* name) {
  if (tensor.dtype() == dtype) return;
  fail_argument(function, name, phi::DataTypeToString(dtype), phi::DataTypeToString(tensor.dtype()));
}

int32_t index_kind(const paddle::Tensor& tensor, const char* function, const char* name) {
  if (tensor.dtype() == paddle::DataType::INT64) return PMO_ROUTING_IDS64;
  if (tensor.dtype() == paddle::DataType::INT32) return PMO_ROUTING_IDS32;
  fail_argument(function, name, "int32 or int64", phi::DataTypeToString(tensor.dtype()));
}

std::vector<int64_t> require_host_integers(const Target& target, const paddle::Tensor& tensor, const char* function,
                                           const char* name) {
  const int32_t kind = index_kind(tensor, function, name);
  const int64_t count = tensor.numel();
  std::vector<char> bytes(static_cast<size_t>(count) * phi::SizeOf(tensor.dtype()));
  target.copy_to_host(tensor.data(), static_cast<int64_t>(bytes.size()), bytes.data());
  std::vector<int64_t> integers;
  integers.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) integers.push_back(id_at(bytes.data(), kind, i));
  return integers;
}

void require_shape(const paddle::Tensor& tensor, const Shape& shape, const char* function, const char* name) {
  if (!fits(tensor.shape(), shape)) fail_argument(function, name, "of shape " + text_of(shape), text_of(tensor.shape()));
}

void require_rank(const paddle::Tensor& tensor, size_t rank, const char* function, const char* name) {
  require_shape(tensor, Shape(rank, -1), function, name);
}

void require_gradient(const paddle::Tensor& gradient, const Shape& shape, paddle::DataType dtype, const char* function,
                      const char* name) {
  if (!gradient.defined()) return;
  require_shape(gradient, shape, function, name);
  require_dtype(gradient, dtype, function, name);
}

void require_described(const paddle::Tensor& rows, int64_t hidden, int hidden_dtype, const char* function) {
  const bool has_width = hidden == kUnknown || rows.shape()[1] == hidden;
  require(has_width && static_cast<int>(rows.dtype()) == hidden_dtype, function,
          "the attributes hidden and hidden_dtype must describe the rows");
}

int64_t known_width(int64_t hidden, const char* function) {
  require(hidden >= 0, function, "the width of an undefined gradient is unknown");
  return hidden;
}

void without_gradient(std::initializer_list<const paddle::Tensor*> saved) {
  // the kernel's arguments are the very tensors whose edges Paddle reads after the kernel has run
  for (const paddle::Tensor* tensor : saved) const_cast<paddle::Tensor*>(tensor)->set_autograd_meta(nullptr);
}

}  // namespace binding
}  // namespace pmo
