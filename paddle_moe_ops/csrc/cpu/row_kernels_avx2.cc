// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for AVX2 with FMA and F16C.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtypes.h"
#include "common/scales.h"
#include "cpu/row_kernels.h"
#include "pmo/base.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

struct Lanes {
  __m256 low, high;

  static Lanes splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Lanes add(const Lanes& a, const Lanes& b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static Lanes multiply(const Lanes& a, const Lanes& b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }

  static Lanes load(Float32, const char* from) {
    const float* floats = reinterpret_cast<const float*>(from);
    return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
  }
  static Lanes load(Float16, const char* from) {
    return {_mm256_cvtph_ps(load_eighth(from)), _mm256_cvtph_ps(load_eighth(from + 16))};
  }
  static Lanes load(BFloat16, const char* from) { return {widen(load_eighth(from)), widen(load_eighth(from + 16))}; }

  void get(float* to) const {
    _mm256_storeu_ps(to, low);
    _mm256_storeu_ps(to + 8, high);
  }

  static __m128i load_eighth(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m256 widen(__m128i bfloats) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bfloats), 16)); }
};

struct Line {
  __m256i low, high;

  static Line load(const char* from) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
  }

  static Line pack(Float32, const Lanes* lanes) {
    return {_mm256_castps_si256(lanes[0].low), _mm256_castps_si256(lanes[0].high)};
  }
  static Line pack(Float16, const Lanes* lanes) { return {to_float16(lanes[0]), to_float16(lanes[1])}; }

  static void unpack_pairs(const char* from, Lanes* lanes) {
    const Line pairs = load(from);
    lanes[0] = {even_columns(pairs.low), even_columns(pairs.high)};
    lanes[1] = {odd_columns(pairs.low), odd_columns(pairs.high)};
  }
  static Line pack(BFloat16, const Lanes* lanes) {
    return {to_pairs(lanes[0].low, lanes[1].low), to_pairs(lanes[0].high, lanes[1].high)};
  }

  void store(char* to) const {
    __m256i* halves = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(halves, low);
    _mm256_storeu_si256(halves + 1, high);
  }
  void stream(char* to) const {
    __m256i* halves = reinterpret_cast<__m256i*>(to);
    _mm256_stream_si256(halves, low);
    _mm256_stream_si256(halves + 1, high);
  }

  static __m256i to_float16(const Lanes& lanes) {
    return _mm256_set_m128i(_mm256_cvtps_ph(lanes.high, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(lanes.low, _MM_FROUND_TO_NEAREST_INT));
  }
  static __m256 even_columns(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 odd_columns(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
  }
  static __m256i to_pairs(__m256 even, __m256 odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(rounded(even), 16), rounded(odd), 0xAA);
  }
  // The high halves are the nearest bfloat16 values, ties to even.
  static __m256i rounded(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  }
};

#include "cpu/row_kernels_body.h"
}  // namespace

const RowKernels* row_kernels_avx2(int32_t dtype) { return kernels_for(dtype); }

}  // namespace cpu
}  // namespace pmo
#pragma GCC pop_options

#else

namespace pmo {
namespace cpu {
const RowKernels* row_kernels_avx2(int32_t) { return nullptr; }
}  // namespace cpu
}  // namespace pmo

#endif
