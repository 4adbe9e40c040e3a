// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for AVX-512 (F, BW, VL).
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

// GCC 12 warns about the operands that its own intrinsics leave undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,prefer-vector-width=512")
namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

struct Lanes {
  __m512 values;

  static Lanes splat(float value) { return {_mm512_set1_ps(value)}; }
  static Lanes add(const Lanes& a, const Lanes& b) { return {_mm512_add_ps(a.values, b.values)}; }
  static Lanes multiply(const Lanes& a, const Lanes& b) { return {_mm512_mul_ps(a.values, b.values)}; }
  static Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) { return {_mm512_fmadd_ps(a.values, b.values, c.values)}; }

  static Lanes load(Float32, const char* from) { return {_mm512_loadu_ps(from)}; }
  static Lanes load(Float16, const char* from) { return {_mm512_cvtph_ps(load_half(from))}; }
  static Lanes load(BFloat16, const char* from) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(from)), 16))};
  }

  void get(float* to) const { _mm512_storeu_ps(to, values); }

  static __m256i load_half(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
};

struct Line {
  __m512i bits;

  static constexpr __mmask32 kOdd = 0xAAAAAAAA;

  static Line load(const char* from) { return {_mm512_loadu_si512(from)}; }

  static Line pack(Float32, const Lanes* lanes) { return {_mm512_castps_si512(lanes[0].values)}; }
  static Line pack(Float16, const Lanes* lanes) {
    const __m512i low = _mm512_castsi256_si512(to_float16(lanes[0]));
    return {_mm512_inserti64x4(low, to_float16(lanes[1]), 1)};
  }

  static void unpack_pairs(const char* from, Lanes* lanes) {
    const __m512i pairs = _mm512_loadu_si512(from);
    lanes[0].values = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    lanes[1].values = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
  }
  // Rounds the lanes to bfloat16, ties to even, by integer arithmetic: the conversion instruction flushes subnormals.
  static Line pack(BFloat16, const Lanes* lanes) {
    const __m512i even = _mm512_castps_si512(lanes[0].values), odd = _mm512_castps_si512(lanes[1].values);
    const __m512i high = _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), kOdd, odd);
    const __m512i low = _mm512_mask_mov_epi16(even, kOdd, _mm512_slli_epi32(odd, 16));
    // Beyond the middle, or on it and the high half is odd: low | (high & 1) > 0x8000.
    const __m512i rest = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(1), 0xF8);
    const __mmask32 up = _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
    return {_mm512_mask_sub_epi16(high, up, high, _mm512_set1_epi16(-1))};
  }

  void store(char* to) const { _mm512_storeu_si512(to, bits); }
  void stream(char* to) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits); }

  static __m256i to_float16(const Lanes& lanes) {
    return _mm512_cvtps_ph(lanes.values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

#include "cpu/row_kernels_body.h"
}  // namespace

const RowKernels* row_kernels_avx512(int32_t dtype) { return kernels_for(dtype); }

}  // namespace cpu
}  // namespace pmo
#pragma GCC pop_options

#else

namespace pmo {
namespace cpu {
const RowKernels* row_kernels_avx512(int32_t) { return nullptr; }
}  // namespace cpu
}  // namespace pmo

#endif
