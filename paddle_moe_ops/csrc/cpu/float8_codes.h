// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The nearest float8 number. Like row_kernels_body.h, included once per variant of the row kernels, inside an anonymous namespace
// and after cpu/float_bits.h and <algorithm>.

// All bits set if the condition holds: for choices without branches, since a branch would keep a loop from being vectorised.
inline int32_t mask_if(bool condition) { return -static_cast<int32_t>(condition); }

// The float8 number nearest to a value, ties to even: `largest` for larger values, 0x7F for NaN. Its exponent has the bias `bias`.
template <int kMantissaBits, int kBias, int32_t kLargest>
inline int32_t to_float8(float value) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kAddend = static_cast<uint32_t>(127 + 24 - kBias - kMantissaBits) << 23;
  const auto bits = static_cast<int32_t>(float_bits(value));
  const int32_t magnitude = bits & 0x7FFFFFFF;
  const int32_t rounding = (1 << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1);
  const int32_t normal = (magnitude - ((127 - kBias) << 23) + rounding) >> kShift;
  // Below the least normal number the result is subnormal: the addend puts the last place of the sum at that of the result, and
  // the addition rounds.
  const float sum = bits_float(static_cast<uint32_t>(magnitude)) + bits_float(kAddend);
  const int32_t subnormal = static_cast<int32_t>(float_bits(sum)) - static_cast<int32_t>(kAddend);
  const int32_t is_subnormal = mask_if(magnitude < ((128 - kBias) << 23)), is_nan = mask_if(magnitude > 0x7F800000);
  const int32_t rounded = std::min((subnormal & is_subnormal) | (normal & ~is_subnormal), kLargest);
  return (0x7F & is_nan) | ((rounded | ((bits >> 24) & 0x80)) & ~is_nan);
}

inline int32_t to_e4m3(float value) { return to_float8<3, 7, 0x7E>(value); }
inline int32_t to_e5m2(float value) { return to_float8<2, 15, 0x7B>(value); }
