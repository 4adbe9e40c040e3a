// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Quantisation of values to float8_e4m3fn by the rule of pmo/quantize.h, and dequantisation.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

// Scale of a group whose largest magnitude is `amax`.
__device__ inline float float8_scale(float amax, float amax_min) {
  return __fdiv_rn(fminf(fmaxf(amax, amax_min), FLT_MAX), 448.0f);
}

// Two codes, the first in the low byte. The conversion rounds to nearest even, saturates and maps NaN to 0x7F.
template <__nv_fp8_interpretation_t kFormat = __NV_E4M3>
__device__ inline uint32_t float8_pair(float first, float second, float factor) {
  return __nv_cvt_float2_to_fp8x2({__fmul_rn(first, factor), __fmul_rn(second, factor)}, __NV_SATFINITE, kFormat);
}

// The same with a factor of each.
__device__ inline uint32_t float8_pair(float first, float second, float first_factor, float second_factor) {
  return __nv_cvt_float2_to_fp8x2({__fmul_rn(first, first_factor), __fmul_rn(second, second_factor)}, __NV_SATFINITE, __NV_E4M3);
}

// The codes of values, four to a word.
template <__nv_fp8_interpretation_t kFormat = __NV_E4M3, int kCount>
__device__ inline void float8_codes(const float (&values)[kCount], float factor, uint32_t (&words)[kCount / 4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float* v = values + i;
    words[i / 4] = float8_pair<kFormat>(v[0], v[1], factor) | float8_pair<kFormat>(v[2], v[3], factor) << 16;
  }
}

// The same with a factor of each value.
template <int kCount>
__device__ inline void float8_codes(const float (&values)[kCount], const float (&factors)[kCount],
                                    uint32_t (&words)[kCount / 4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float *v = values + i, *f = factors + i;
    words[i / 4] = float8_pair(v[0], v[1], f[0], f[1]) | float8_pair(v[2], v[3], f[2], f[3]) << 16;
  }
}

// Scale of a group spread over kLanes neighbouring lanes of a warp; `values` are a lane's own. All lanes of the warp call it.
template <int kLanes, int kCount>
__device__ inline float float8_group_scale(const float (&values)[kCount], float amax_min) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(values[i]));  // fmaxf ignores NaN
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
  return float8_scale(amax, amax_min);
}

// Value of a code. Exact: float16 represents every e4m3 value.
__device__ inline float float8_value(uint32_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

}  // namespace cuda
}  // namespace pmo
