// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Direct calls: operators that Python calls without Paddle's dispatch of custom operators, if no gradient is needed.
//
// At every call, that dispatch copies the descriptions of all registered operators, about a hundred strings, and parses
// attributes again. Both take several times as long as a small operator itself. A function announced by PMO_DIRECT is the same
// one that Paddle calls.
//
// Quick calls also replace the checks of the Python function. If one of those could fail or warn, the quick call declines, and
// Python runs its checks and the operator. Bad data is found while an operator runs: it then runs a second time to report the
// error.
//
// Paddle always copies those descriptions if a gradient is needed. Strings of up to 15 characters need no allocation: that is why
// inputs, outputs and attributes have short names.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "paddle/attributes.h"
#include "paddle/binding.h"

namespace pmo {
namespace binding {

// An argument as Python passed it.
struct DirectArgument {
  enum Kind { kNone, kTensor, kInteger, kNumber, kIntegers, kTensors };

  Kind kind = kNone;
  paddle::Tensor tensor;
  int64_t integer = 0;  // bool too
  double number = 0.0;  // integers too
  std::vector<int> integers;
  Tensors tensors;

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
    } else if constexpr (std::is_same_v<Type, Tensors>) {
      expect(kind == kTensors);
      return (tensors);
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
  // For quick operators, else null: true if a quick call accepts the arguments, whose tensors are all dense. An exception counts
  // as false.
  bool (*fits)(const DirectArgument* arguments);
};

std::vector<DirectOperator>& direct_operators();

template <typename Function>
struct DirectCall;
template <typename Result, typename... Parameters>
struct DirectCall<Result (*)(Parameters...)> {
  static constexpr size_t kCount = sizeof...(Parameters);

  template <auto kFunction>
  static Result run(const DirectArgument* arguments) {
    return run<kFunction>(arguments, std::make_index_sequence<kCount>());
  }

 private:
  template <auto kFunction, size_t... kPlaces>
  static Result run(const DirectArgument* arguments, std::index_sequence<kPlaces...>) {
    return kFunction(arguments[kPlaces].template as<Parameters>()...);
  }
};

// Checks of quick calls, in place of those of the Python functions.
inline bool has_columns(const paddle::Tensor& matrix) { return matrix.shape().size() == 2 && matrix.shape()[1] > 0; }
inline bool can_count(int64_t num_experts) { return num_experts >= 1 && num_experts <= int64_t{1} << 16; }
bool is_summed(const paddle::Tensor& rows);  // true if their dtype can be summed
bool is_routemap(const paddle::Tensor& routemap);
bool are_on_one_device(std::initializer_list<const paddle::Tensor*> tensors);

// The default of `validate=None` if PADDLE_MOE_OPS_VALIDATE is not set.
inline int default_checks(const Target& target) {
  return target.is_gpu() ? 0 : PMO_CHECK_RANGE | PMO_CHECK_DUPLICATES | PMO_CHECK_NAN;
}

template <auto kFunction>
bool announce(const char* name) {
  using Call = DirectCall<decltype(kFunction)>;
  direct_operators().push_back({name, Call::kCount, Call::template run<kFunction>, nullptr});
  return true;
}

template <auto kFunction, auto kFits>
bool announce_quick(const char* name) {
  static_assert(DirectCall<decltype(kFunction)>::kCount == DirectCall<decltype(kFits)>::kCount, "they take the same arguments");
  announce<kFunction>(name);
  direct_operators().back().fits = DirectCall<decltype(kFits)>::template run<kFits>;
  return true;
}

}  // namespace binding
}  // namespace pmo

// Announces a direct call. Used at global scope of an operator's file, with the kernel function that is passed to PMO_KERNEL.
#define PMO_DIRECT(name, function) \
  [[maybe_unused]] static const bool name##_is_direct = pmo::binding::announce<&pmo::binding::ByPosition<&function>::call>(#name)

// Announces a quick call, quick_name in Python, of a function of tensors, integers and lists of integers. It returns its only
// output or a tuple of outputs. `fits` has the same parameters and returns whether only the data of a call can still be invalid.
// If a tensor needs a gradient and the arguments fit, the call returns True, and Python calls the operator through Paddle without
// checks.
#define PMO_QUICK(name, function, fits) \
  [[maybe_unused]] static const bool name##_is_quick = pmo::binding::announce_quick<&function, &fits>("quick_" #name)
