// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for the build's own target, and the choice among the variants.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

#include "common/scales.h"
#include "cpu/row_kernels.h"
#include "pmo/base.h"

namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

inline float bfloat16_to_float(uint16_t value) { return bits_float(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;                        // rounding could carry a NaN into infinity
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}

inline float float16_to_float(uint16_t value) {
  const uint32_t half = value;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = (half & 0x7FFFu) << 13;
  const uint32_t exponent = half & 0x7C00u;
  const uint32_t normal = magnitude + (112u << 23);   // exponent bias 15 -> 127
  const uint32_t special = magnitude + (224u << 23);  // all-ones exponent stays all ones
  // A subnormal half is mantissa * 2^-24: put the mantissa under the exponent of 2^-14, take 2^-14 away again (exact).
  const float subnormal = bits_float(magnitude + (113u << 23)) - bits_float(113u << 23);
  const uint32_t finite = exponent == 0 ? float_bits(subnormal) : normal;
  return bits_float(sign | (exponent == 0x7C00u ? special : finite));
}

inline uint16_t float_to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the result is subnormal: adding 0.5 puts the last place of the sum at 2^-24, and the addition rounds.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  return static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? special : finite));
}

// Plain loops, which the compiler vectorises for what its target has.
struct Lanes {
  float values[16];

  template <typename Make>
  static Lanes make(Make value_of) {
    Lanes lanes;
    for (int lane = 0; lane < 16; ++lane) lanes.values[lane] = value_of(lane);
    return lanes;
  }

  static Lanes splat(float value) {
    return make([&](int) { return value; });
  }
  static Lanes add(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values[lane] + b.values[lane]; });
  }
  static Lanes multiply(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values[lane] * b.values[lane]; });
  }
  static Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return make([&](int lane) { return __builtin_fmaf(a.values[lane], b.values[lane], c.values[lane]); });
  }

  static Lanes load(Float32, const char* from) {
    Lanes lanes;
    std::memcpy(lanes.values, from, sizeof(lanes.values));
    return lanes;
  }
  static Lanes load(Float16, const char* from) { return load_halves(from, float16_to_float); }
  static Lanes load(BFloat16, const char* from) { return load_halves(from, bfloat16_to_float); }

  void get(float* to) const { std::memcpy(to, values, sizeof(values)); }

  template <typename Convert>
  static Lanes load_halves(const char* from, Convert convert) {
    uint16_t halves[16];
    std::memcpy(halves, from, sizeof(halves));
    return make([&](int lane) { return convert(halves[lane]); });
  }
};

struct Line {
  char bytes[kLineBytes];

  static Line load(const char* from) {
    Line line;
    std::memcpy(line.bytes, from, kLineBytes);
    return line;
  }
  static Line pack(Float32, const Lanes* lanes) { return load(reinterpret_cast<const char*>(lanes[0].values)); }
  static Line pack(Float16, const Lanes* lanes) { return pack_halves(lanes, float_to_float16); }
  static Line pack(BFloat16, const Lanes* lanes) { return pack_halves(lanes, float_to_bfloat16); }

  void store(char* to) const { std::memcpy(to, bytes, kLineBytes); }
  void stream(char* to) const {
#if defined(__x86_64__)
    for (int64_t byte = 0; byte < kLineBytes; byte += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + byte), _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + byte)));
    }
#else
    store(to);
#endif
  }

  template <typename Convert>
  static Line pack_halves(const Lanes* lanes, Convert convert) {
    uint16_t halves[32];
    for (int lane = 0; lane < 32; ++lane) halves[lane] = convert(lanes[lane / 16].values[lane % 16]);
    return load(reinterpret_cast<const char*>(halves));
  }
};

#include "cpu/row_kernels_body.h"

using Variant = const RowKernels* (*)(int32_t);

Variant choose_variant() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool fma = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 =
      fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && row_kernels_avx512(PMO_FLOAT32) != nullptr) return row_kernels_avx512;
  if (fma && row_kernels_avx2(PMO_FLOAT32) != nullptr) return row_kernels_avx2;
#endif
  return row_kernels_generic;
}

}  // namespace

const RowKernels* row_kernels_generic(int32_t dtype) { return kernels_for(dtype); }

const RowKernels& row_kernels(int32_t dtype) {
  static const Variant variant = choose_variant();
  return *variant(dtype);
}

}  // namespace cpu
}  // namespace pmo
