// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The attributes of an operator as a struct.
//
// Paddle expects an operator's attributes as a list of strings, and passes them to its functions one by one, by position. This
// header declares the list once, with the type of each attribute, its field and its name for Paddle:
//
//   PMO_ATTRIBUTES(Attributes, (int64_t, padding_alignment, align), (int, checks, checks));
//
// defines a struct with these fields, and Attributes::names(), the strings. An operator and its gradients declare the same list,
// because the shape inference of gradients receives the attributes of the forward operator. Their functions accept the struct
// before their inputs. PMO_KERNEL, PMO_INFER_SHAPE, PMO_INFER_DTYPE and PMO_DIRECT convert them to the functions that Paddle
// expects, and leave functions without attributes unchanged.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "paddle/operator_api.h"

namespace pmo {
namespace binding {

// A field, and the parameter that initialises it. Lists are not copied: attributes live no longer than the call.
template <typename Type>
using Attribute = std::conditional_t<std::is_arithmetic_v<Type>, Type, const Type&>;

// The types of all attributes; the first one is a placeholder for macros.
template <typename Placeholder, typename... Types>
struct AttributeTypes {};

// The AttributeTypes of a function's first parameter; void if that is no struct of attributes.
template <typename First, typename = void>
struct AttributeTypesOf {
  using Types = void;
};
template <typename First>
struct AttributeTypesOf<First, std::void_t<typename First::Types>> {
  using Types = typename First::Types;
};
template <typename Result, typename First, typename... Others>
struct AttributeTypesOf<Result (*)(First, Others...)> : AttributeTypesOf<std::decay_t<First>> {};

template <auto kFunction, typename Function = decltype(kFunction), typename Types = typename AttributeTypesOf<Function>::Types>
struct ByPosition;
template <auto kFunction, typename Result, typename... Inputs>
struct ByPosition<kFunction, Result (*)(Inputs...), void> {
  static Result call(Inputs... inputs) { return kFunction(inputs...); }
};
template <auto kFunction, typename Result, typename Attributes, typename... Inputs, typename Placeholder, typename... Types>
struct ByPosition<kFunction, Result (*)(const Attributes&, Inputs...), AttributeTypes<Placeholder, Types...>> {
  static Result call(Inputs... inputs, Attribute<Types>... attributes) { return kFunction(Attributes{attributes...}, inputs...); }
};

}  // namespace binding
}  // namespace pmo

// macro(type, field, name) for each of up to ten attributes
#define PMO_EACH_1(macro, first) macro first
#define PMO_EACH_2(macro, first, ...) macro first PMO_EACH_1(macro, __VA_ARGS__)
#define PMO_EACH_3(macro, first, ...) macro first PMO_EACH_2(macro, __VA_ARGS__)
#define PMO_EACH_4(macro, first, ...) macro first PMO_EACH_3(macro, __VA_ARGS__)
#define PMO_EACH_5(macro, first, ...) macro first PMO_EACH_4(macro, __VA_ARGS__)
#define PMO_EACH_6(macro, first, ...) macro first PMO_EACH_5(macro, __VA_ARGS__)
#define PMO_EACH_7(macro, first, ...) macro first PMO_EACH_6(macro, __VA_ARGS__)
#define PMO_EACH_8(macro, first, ...) macro first PMO_EACH_7(macro, __VA_ARGS__)
#define PMO_EACH_9(macro, first, ...) macro first PMO_EACH_8(macro, __VA_ARGS__)
#define PMO_EACH_10(macro, first, ...) macro first PMO_EACH_9(macro, __VA_ARGS__)
#define PMO_EACH_CHOICE(a, b, c, d, e, f, g, h, i, j, chosen, ...) chosen
#define PMO_EACH(macro, ...)                                                                                                    \
  PMO_EACH_CHOICE(__VA_ARGS__, PMO_EACH_10, PMO_EACH_9, PMO_EACH_8, PMO_EACH_7, PMO_EACH_6, PMO_EACH_5, PMO_EACH_4, PMO_EACH_3, \
                  PMO_EACH_2, PMO_EACH_1, )                                                                                     \
  (macro, __VA_ARGS__)

#define PMO_ATTRIBUTE_TYPE(type, field, name) , type
#define PMO_ATTRIBUTE_STRING(type, field, name) #name ": " #type,
#define PMO_ATTRIBUTE_FIELD(type, field, name) pmo::binding::Attribute<type> field;

#define PMO_ATTRIBUTES(Name, ...)                                                                     \
  struct Name {                                                                                       \
    using Types = pmo::binding::AttributeTypes<void PMO_EACH(PMO_ATTRIBUTE_TYPE, __VA_ARGS__)>;       \
    static std::vector<std::string> names() { return {PMO_EACH(PMO_ATTRIBUTE_STRING, __VA_ARGS__)}; } \
    PMO_EACH(PMO_ATTRIBUTE_FIELD, __VA_ARGS__)                                                        \
  }

#define PMO_KERNEL(function) PD_KERNEL(pmo::binding::ByPosition<&function>::call)
#define PMO_INFER_SHAPE(function) PD_INFER_SHAPE(pmo::binding::ByPosition<&function>::call)
#define PMO_INFER_DTYPE(function) PD_INFER_DTYPE(pmo::binding::ByPosition<&function>::call)
