// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A float32 as its bits and back. Like row_kernels_body.h, included once per variant of the row kernels, inside an anonymous namespace
// and after <cstdint> and <cstring>.

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
