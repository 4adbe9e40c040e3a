// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Elements of rows to float32 and back, rounding to nearest even; plain code that compilers vectorise.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/dtypes.h"
#include "common/scoring.h"

namespace pmo {
namespace cpu {

struct Float32Rows {
  using Element = float;
  static float load(float element) { return element; }
  static float store(float value) { return value; }
};

struct BFloat16Rows {
  using Element = uint16_t;
  static float load(uint16_t element) { return float_of(static_cast<uint32_t>(element) << 16); }

  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
  }
};

struct Float16Rows {
  using Element = uint16_t;

  static float load(uint16_t element) {
    const uint32_t half = element;
    const uint32_t magnitude = (half & 0x7FFFu) << 13;
    const uint32_t exponent = half & 0x7C00u;
    // A subnormal half is mantissa * 2^-24: put the mantissa under the exponent of 2^-14, then subtract 2^-14 (exact).
    const float subnormal = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
    const uint32_t bias = exponent == 0x7C00u ? 224u : 112u;  // all-ones exponents stay all ones
    return float_of((half & 0x8000u) << 16 | (exponent == 0 ? bits_of(subnormal) : magnitude + (bias << 23)));
  }

  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the result is subnormal: adding 0.5 puts the last place of the sum at 2^-24, and the addition rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | (magnitude >= (143u << 23) ? special : finite));
  }
};

// Largest finite magnitude of rows x columns elements whose rows are `stride` elements apart, at least `amax_min`. NaN is ignored.
template <typename Rows>
float amax_of(const typename Rows::Element* x, int64_t stride, int64_t rows, int64_t columns, float amax_min) {
  float amax = amax_min;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      const float magnitude = std::fabs(Rows::load(x[row * stride + i]));
      amax = magnitude > amax ? magnitude : amax;  // never for NaN
    }
  }
  return std::min(amax, FLT_MAX);
}

// Returns body(Rows()) for a row type that is summed.
template <typename Body>
int with_rows(int32_t dtype, Body body) {
  return with_sum_dtype<Float32Rows, Float16Rows, BFloat16Rows>(dtype, body);
}

}  // namespace cpu
}  // namespace pmo
