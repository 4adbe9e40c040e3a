// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Codes of the matrices of experts, and their values.
//
// E matrices [D, N] of D inputs and N outputs, or [N, D] transposed. The scale of an element belongs to its format:
//
//   INT8            one per output      codes int8 [E, D, N]
//   INT4            one per output      two codes to a byte along D, uint8 [E, 16 * ceil(D / 32), N]
//   INT4_1X128      128 inputs, 1 output
//   FLOAT8_128X128  128 x 128 elements  codes float8_e4m3fn [E, D, N]
//
// Scales are float32 [E, N], [E, ceil(D / 128), N] and [E, ceil(D / 128), ceil(N / 128)], with the last two dimensions swapped in
// transposed matrices, as are those of the codes.
//
// int4 codes are two's complement. Byte j of 32 inputs has the code of input 16 * (j % 2) + j / 2 in the low half, and of the input 8
// further in the high half: word q of the 16 bytes has the codes that lane q of four needs for two MMAs. Codes after the last input
// are ignored.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pmo_matrix_format {
  PMO_MATRIX_INT8 = 0,
  PMO_MATRIX_INT4 = 1,
  PMO_MATRIX_INT4_1X128 = 2,
  PMO_MATRIX_FLOAT8_128X128 = 3,
} pmo_matrix_format;

// out = code * scale in float32, rounded to `dtype`. The bits of a NaN are unspecified. With `widens`, out is float32 and has the
// rounded values. Moves E * D * N * (bytes of a code + itemsize) bytes.
typedef struct pmo_dequantize_matrices_params {
  int64_t struct_size;
  int64_t num_matrices;  // E
  int64_t inner;         // D
  int64_t outer;         // N
  const void* codes;
  const float* scales;
  void* out;  // [E, D, N], or [E, N, D] transposed
  int32_t format;
  int32_t transpose;
  int32_t dtype;  // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t widens;
  int32_t num_threads;
  int32_t reserved;
} pmo_dequantize_matrices_params;

PMO_API int pmo_dequantize_matrices_cpu(const pmo_dequantize_matrices_params* params, void* stream);
PMO_API int pmo_dequantize_matrices_cuda(const pmo_dequantize_matrices_params* params, void* stream);

#ifdef __cplusplus
}
#endif
