// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Quantisation of values to float8_e4m3fn by the rule of pmo/quantize.h, and dequantisation.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

namespace pmo {
namespace cuda {

// Scale of a group whose largest magnitude is `amax`.
__device__ inline float float8_scale(float amax, float amax_min) {
  return __fdiv_rn(fminf(fmaxf(amax, amax_min), FLT_MAX), 448.0f);
}

// Two codes, the first in the low byte. The conversion rounds to nearest even, saturates and maps NaN to 0x7F.
__device__ inline uint32_t float8_pair(float first, float second, float inverse) {
  return __nv_cvt_float2_to_fp8x2({__fmul_rn(first, inverse), __fmul_rn(second, inverse)}, __NV_SATFINITE, __NV_E4M3);
}

// Value of a code. Exact: float16 represents every e4m3 value.
__device__ inline float float8_value(uint32_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

}  // namespace cuda
}  // namespace pmo
