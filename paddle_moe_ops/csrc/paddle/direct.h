// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Operators that Python calls without Paddle's machinery for custom operators, where no gradient is wanted.
//
// That machinery copies the descriptions of all registered operators, some hundred strings, at every call, and takes attributes apart
// again: several times as long as a small call of an operator itself. A function announced here is the same one that Paddle calls.
//
// Quick calls go further: they take the place of the Python function's checks too. Where one of those might have something to say, they
// decline, and the call goes the long way. Bad data is found when an operator runs, so it runs again then, to say what is wrong.
//
// Paddle copies those descriptions where a gradient is wanted, whatever we do. Strings of up to 15 characters cost it no allocation: that
// is why inputs, outputs and attributes have short names.
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
  // Of a quick operator, which takes dense tensors only and declines what does not fit; an exception means that it declines, too. Else null.
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

// Checks of quick calls, which Python functions make otherwise.
inline bool has_columns(const paddle::Tensor& matrix) { return matrix.shape().size() == 2 && matrix.shape()[1] > 0; }
inline bool can_count(int64_t num_experts) { return num_experts >= 1 && num_experts <= int64_t{1} << 16; }
bool is_summed(const paddle::Tensor& rows);  // of a dtype that sums have
bool holds_ids(const paddle::Tensor& routemap);
bool are_together(std::initializer_list<const paddle::Tensor*> tensors);  // on one device

// What `validate=None` means where PADDLE_MOE_OPS_VALIDATE does not say.
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

// At global scope of an operator's file, with the kernel function that is passed to PMO_KERNEL.
#define PMO_DIRECT(name, function) \
  [[maybe_unused]] static const bool name##_is_direct = pmo::binding::announce<&pmo::binding::ByPosition<&function>::call>(#name)

// The same for a function of tensors, integers and lists of them, which Python knows as quick_name. It gives its only output, or a tuple of
// several. `fits` has the same parameters and says whether a call has nothing to say but about its data. Where a tensor wants a gradient,
// Python gets True if they fit, and calls the operator through Paddle without checks of its own.
#define PMO_QUICK(name, function, fits) \
  [[maybe_unused]] static const bool name##_is_quick = pmo::binding::announce_quick<&function, &fits>("quick_" #name)
