// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Operators that Python calls without Paddle's machinery for custom operators, where no gradient is wanted.
//
// That machinery copies the descriptions of all registered operators, some hundred strings, at every call, and takes attributes apart
// again: several times as long as a small call of an operator itself. A function announced here is the same one that Paddle calls.
//
// Quick calls go further: they take the place of the Python function's checks too. Where one of those might have something to say, they
// decline, and the call goes the long way. They look at arguments, never at data: what is declined was not begun.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "paddle/binding.h"

namespace pmo {
namespace binding {

// An argument as Python passed it.
struct DirectArgument {
  enum Kind { kNone, kTensor, kInteger, kNumber, kIntegers };

  Kind kind = kNone;
  paddle::Tensor tensor;
  int64_t integer = 0;  // bool too
  double number = 0.0;  // integers too
  std::vector<int> integers;

  // The value for a parameter of an operator's function.
  template <typename Parameter>
  decltype(auto) as() const {
    using Type = std::decay_t<Parameter>;
    if constexpr (std::is_same_v<Type, paddle::Tensor>) {
      expect(kind == kTensor);
      return (tensor);
    } else if constexpr (std::is_same_v<Type, paddle::optional<paddle::Tensor>>) {
      expect(kind == kTensor || kind == kNone);
      return kind == kNone ? Type() : Type(tensor);
    } else if constexpr (std::is_same_v<Type, std::vector<int>>) {
      expect(kind == kIntegers);
      return (integers);
    } else if constexpr (std::is_floating_point_v<Type>) {
      expect(kind == kNumber || kind == kInteger);
      return static_cast<Type>(number);
    } else {
      expect(kind == kInteger && static_cast<Type>(integer) == integer);
      return static_cast<Type>(integer);
    }
  }

  static void expect(bool holds) {
    if (!holds) fail("an argument is not what the operator takes");
  }
};

struct DirectOperator {
  const char* name;
  size_t num_arguments;
  Outputs (*run)(const DirectArgument* arguments);
  bool is_quick;  // then it takes dense tensors without a gradient only, and no outputs or an exception mean that it declines
};

std::vector<DirectOperator>& direct_operators();

template <typename Function>
struct DirectCall;
template <typename... Parameters>
struct DirectCall<Outputs (*)(Parameters...)> {
  static constexpr size_t kCount = sizeof...(Parameters);

  template <auto kFunction>
  static Outputs run(const DirectArgument* arguments) {
    return run<kFunction>(arguments, std::make_index_sequence<kCount>());
  }

 private:
  template <auto kFunction, size_t... kPlaces>
  static Outputs run(const DirectArgument* arguments, std::index_sequence<kPlaces...>) {
    return kFunction(arguments[kPlaces].template as<Parameters>()...);
  }
};

// A check that Python functions make and operators do not.
inline bool has_columns(const paddle::Tensor& rows) { return rows.shape().size() == 2 && rows.shape()[1] > 0; }

template <auto kFunction>
bool announce(const char* name, bool is_quick) {
  using Call = DirectCall<decltype(kFunction)>;
  direct_operators().push_back({name, Call::kCount, Call::template run<kFunction>, is_quick});
  return true;
}

}  // namespace binding
}  // namespace pmo

// At global scope of an operator's file, with the kernel function that is passed to PD_KERNEL.
#define PMO_DIRECT(name, function) \
  [[maybe_unused]] static const bool name##_is_direct = pmo::binding::announce<&function>(#name, false)

// The same for a function of tensors whose first output is wanted; Python knows it as quick_name.
#define PMO_QUICK(name, function) \
  [[maybe_unused]] static const bool name##_is_quick = pmo::binding::announce<&function>("quick_" #name, true)
