// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Arithmetic of routers, with the same bits on the host and the GPU: plain float32 operations, none of them fused, none from a
// library.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/arithmetic.h"

namespace pmo {

// Sums of a token's values: value i is added to lane i % 32, then halves of the lanes are added onto each other.
constexpr int kScoreLanes = 32;

PMO_ANYWHERE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PMO_ANYWHERE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The bits of |value| as a signed integer. Compilers vectorise comparisons of integers, while comparisons of floats may signal
// NaN.
PMO_ANYWHERE inline int32_t magnitude_of(float value) { return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFFu); }

constexpr int32_t kInfinityBits = 0x7F800000;

// exp(-|x|), to two units in the last place; NaN stays NaN. -|x| = n ln(2) + r with |r| <= ln(2) / 2. The Taylor polynomial of
// exp(r) is off by less than 6e-9. 2^n is multiplied in two steps, so that subnormal results are rounded once.
PMO_ANYWHERE inline float exp_minus(float x) {
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // n * kLn2High is exact
  constexpr float kShifter = 0x1.8p23f;        // a float32 this large has no fraction: adding it rounds to integers
  constexpr int32_t kBeyondBits = 0x42D00000;  // 104: exp(-104) rounds to 0
  const int32_t magnitude = magnitude_of(x);
  const int32_t within = magnitude < kBeyondBits ? magnitude : kBeyondBits;
  const uint32_t nan = 0u - static_cast<uint32_t>(magnitude > kInfinityBits);  // keeps the bits of NaN
  x = float_of(static_cast<uint32_t>(within) | (nan & bits_of(x)) | 0x80000000u);
  const float shifted = x * kLog2E + kShifter;
  const float n = shifted - kShifter;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = bits_of(shifted) - bits_of(kShifter) + 127 + 100;
  return p * float_of(exponent << 23) * 0x1p-100f;
}

PMO_ANYWHERE inline float sigmoid(float x) {
  const float e = exp_minus(x);
  const uint32_t negative = 0u - (bits_of(x) >> 31);
  return float_of((negative & bits_of(e)) | (~negative & bits_of(1.0f))) / (1.0f + e);
}

// sigmoid(x) * (1 - sigmoid(x)), without the cancellation
PMO_ANYWHERE inline float sigmoid_slope(float x) {
  const float e = exp_minus(x), sum = 1.0f + e;
  return e / (sum * sum);
}

// Divisor of weights with this sum. Sigmoid scores can all underflow to zero, and stay so; NaN stays NaN. The sum can be
// subnormal. Then 1 / sum overflows, but weight / sum does not: gradients multiply by the latter.
PMO_ANYWHERE inline float divisor_of(float sum) { return sum == 0.0f ? 1.0f : sum; }

// The order of choice as integers: higher is chosen first. NaN is above all numbers, the zeros are equal, and 0 is no value's
// key.
constexpr uint32_t kNanKey = 0xFFFFFFFEu;

PMO_ANYWHERE inline uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value + 0.0f);  // -0 becomes 0
  const uint32_t key = bits ^ (static_cast<int32_t>(bits) < 0 ? 0xFFFFFFFFu : 0x80000000u);
  return magnitude_of(value) > kInfinityBits ? kNanKey : key;
}

PMO_ANYWHERE inline float value_of(uint32_t key) {
  return float_of(key == kNanKey ? 0x7FC00000u : ((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key));
}

// A key and its index in one integer: of equal keys, the lower index is higher. Never the highest integer.
PMO_ANYWHERE inline uint64_t candidate(uint32_t key, int64_t place) {
  return uint64_t{key} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(place));
}

PMO_ANYWHERE inline int64_t place_of(uint64_t candidate) { return 0xFFFFFFFFu - static_cast<uint32_t>(candidate); }

}  // namespace pmo
