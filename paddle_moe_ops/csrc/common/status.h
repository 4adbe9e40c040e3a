// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Helpers to report failures across the C ABI.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "pmo/base.h"

namespace pmo {

// Maps contain int32 positions, so tokens, slots and rows stay below 2^31; with rows below 2^28 columns no size in bytes
// overflows.
constexpr int64_t kMaxIndex = INT32_MAX;
constexpr int64_t kMaxColumns = int64_t{1} << 28;
// Beyond any model; it limits the counters that a nonsensical number of experts allocates.
constexpr int64_t kMaxExperts = int64_t{1} << 16;

// Stores the text for pmo_last_error() and returns the status.
int fail(pmo_status status, const std::string& text) noexcept;

// "[1, 2, 3]", as Python prints a list.
std::string list_text(const int32_t* values, int64_t size);

// The text for an expert id outside [-1, E), the same wherever it is found.
std::string bad_id_text(int64_t num_experts, int64_t topk, int64_t slot, int64_t id);

// Runs an operator's body; an exception (no memory for its scratch) becomes a status.
template <typename Body>
int guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return fail(PMO_INTERNAL, error.what());
  }
}

// Common frame of the *_cpu entry points: checks the pointer, turns exceptions into a status.
template <typename Params, typename Body>
int run_cpu(const Params* params, void* stream, Body body) noexcept {
  if (params == nullptr) return fail(PMO_INVALID_ARGUMENT, "params must be given");
  if (stream != nullptr) return fail(PMO_INVALID_ARGUMENT, "stream must be NULL on the CPU");
  return guarded([&] { return body(*params); });
}

template <typename T>
bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(T) == 0;
}

}  // namespace pmo

// Returns PMO_INVALID_ARGUMENT from the calling function unless `condition` holds. `name` is the argument, `expected` its
// requirement.
#define PMO_REQUIRE(condition, name, expected)                                                                \
  do {                                                                                                        \
    if (!(condition)) return ::pmo::fail(PMO_INVALID_ARGUMENT, std::string(name) + " must be " + (expected)); \
  } while (0)

#define PMO_REQUIRE_COUNT(value, name) PMO_REQUIRE((value) >= 0 && (value) <= ::pmo::kMaxIndex, name, "in [0, 2^31)")

#define PMO_REQUIRE_COLUMNS(value, name) PMO_REQUIRE((value) >= 0 && (value) <= ::pmo::kMaxColumns, name, "in [0, 2^28]")

#define PMO_REQUIRE_EXPERTS(value, name) PMO_REQUIRE((value) >= 1 && (value) <= ::pmo::kMaxExperts, name, "in [1, 2^16]")

// The shape of a [T, K] map.
#define PMO_REQUIRE_SLOTS(tokens, slots, slots_name)                                                                   \
  PMO_REQUIRE_COUNT(tokens, "num_tokens");                                                                             \
  PMO_REQUIRE((slots) >= 0 && (slots) <= ::pmo::kMaxIndex && ((slots) == 0 || (tokens) <= ::pmo::kMaxIndex / (slots)), \
              slots_name, ">= 0, with num_tokens times it below 2^31")

// An int or float array of the params struct: present if it has elements, and aligned to its element.
#define PMO_REQUIRE_ARRAY(pointer, elements, name)                                           \
  PMO_REQUIRE((elements) == 0 || ((pointer) != nullptr && ::pmo::is_aligned(pointer)), name, \
              "an array aligned to its element size")

#define PMO_REQUIRE_OPTIONAL_ARRAY(pointer, name) \
  PMO_REQUIRE(::pmo::is_aligned(pointer), name, "NULL or an array aligned to its element size")
