// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Operators that Python calls without Paddle's machinery for custom operators, where nobody wants a gradient.
//
// That machinery copies the descriptions of all registered operators, some hundred strings, at every call, and takes attributes apart
// again: several times as long as a small call of an operator itself. A function announced here is the same one that Paddle calls.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "paddle/binding.h"

namespace pmo {
namespace binding {

// An argument as Python passed it: what is not of its kind stays as it is here.
struct DirectArgument {
  paddle::Tensor tensor;
  bool is_none = false;
  int64_t integer = 0;  // bool too
  double number = 0.0;  // integers too
  std::vector<int> integers;

  template <typename Parameter>
  decltype(auto) as() const {
    using Type = std::decay_t<Parameter>;
    if constexpr (std::is_same_v<Type, paddle::Tensor>) {
      return (tensor);  // undefined if it is missing, which the operators refuse
    } else if constexpr (std::is_same_v<Type, paddle::optional<paddle::Tensor>>) {
      return is_none ? Type() : Type(tensor);
    } else if constexpr (std::is_same_v<Type, std::vector<int>>) {
      return (integers);
    } else if constexpr (std::is_floating_point_v<Type>) {
      return static_cast<Type>(number);
    } else {
      return static_cast<Type>(integer);
    }
  }
};

struct DirectOperator {
  const char* name;
  size_t num_arguments;
  Outputs (*run)(const DirectArgument* arguments);
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

template <auto kFunction>
bool announce(const char* name) {
  using Call = DirectCall<decltype(kFunction)>;
  direct_operators().push_back({name, Call::kCount, Call::template run<kFunction>});
  return true;
}

}  // namespace binding
}  // namespace pmo

// At global scope of an operator's file, with the kernel function that is passed to PD_KERNEL.
#define PMO_DIRECT(name, function) [[maybe_unused]] static const bool name##_is_direct = pmo::binding::announce<&function>(#name)
