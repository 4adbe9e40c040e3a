// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for the build's own target, and the choice among the variants.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

#include "common/dtypes.h"
#include "common/scales.h"
#include "cpu/float_rows.h"
#include "cpu/row_kernels.h"
#include "pmo/base.h"

namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

// Plain loops, which the compiler vectorises for its target.
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
  static Lanes load(Float16, const char* from) { return load_halves(from, Float16Rows::load); }
  static Lanes load(BFloat16, const char* from) { return load_halves(from, BFloat16Rows::load); }

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

  static void unpack_pairs(const char* from, Lanes* lanes) {
    uint16_t halves[32];
    std::memcpy(halves, from, sizeof(halves));
    for (int odd = 0; odd < 2; ++odd) {
      lanes[odd] = Lanes::make([&](int lane) { return BFloat16Rows::load(halves[2 * lane + odd]); });
    }
  }
  static Line pack(Float32, const Lanes* lanes) { return load(reinterpret_cast<const char*>(lanes[0].values)); }
  static Line pack(Float16, const Lanes* lanes) {
    return pack_halves([&](int column) { return Float16Rows::store(lanes[column / 16].values[column % 16]); });
  }
  static Line pack(BFloat16, const Lanes* lanes) {
    return pack_halves([&](int column) { return BFloat16Rows::store(lanes[column % 2].values[column / 2]); });
  }

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

  template <typename Value>
  static Line pack_halves(Value value_of) {
    uint16_t halves[32];
    for (int column = 0; column < 32; ++column) halves[column] = value_of(column);
    return load(reinterpret_cast<const char*>(halves));
  }
};

#include "cpu/row_kernels_body.h"

using Variant = const RowKernels* (*)(int32_t);
constexpr Variant kVariants[] = {row_kernels_generic, row_kernels_avx2, row_kernels_avx512};  // as pmo_cpu_isa

std::atomic<int32_t> max_isa{PMO_CPU_AVX512};

int32_t best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool fma = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 =
      fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && row_kernels_avx512(PMO_FLOAT32) != nullptr) return PMO_CPU_AVX512;
  if (fma && row_kernels_avx2(PMO_FLOAT32) != nullptr) return PMO_CPU_AVX2;
#endif
  return PMO_CPU_GENERIC;
}

int32_t used_isa() {
  static const int32_t best = best_isa();
  return std::min(best, max_isa.load(std::memory_order_relaxed));
}

}  // namespace

const RowKernels* row_kernels_generic(int32_t dtype) { return kernels_for(dtype); }

const RowKernels& row_kernels(int32_t dtype) { return *kVariants[used_isa()](dtype); }

}  // namespace cpu
}  // namespace pmo

extern "C" void pmo_set_max_cpu_isa(int32_t isa) {
  pmo::cpu::max_isa.store(std::max<int32_t>(PMO_CPU_GENERIC, std::min<int32_t>(isa, PMO_CPU_AVX512)));
}

extern "C" int32_t pmo_used_cpu_isa(void) { return pmo::cpu::used_isa(); }
