// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Float8 operators of paddle.incubate.nn.functional: quantisation by rows, columns and blocks, and weighted SwiGLU.
//
// Their rule differs from that of pmo/quantize.h. For a group of elements, in float32 with round to nearest even:
//
//   a          = max |x|, NaN left out; a = max(a, epsilon)
//   multiplier = 1 if a is 0, else L / a, L the largest finite code; `overflow` if the quotient is infinite
//                with pow2 the mantissa is cut off
//   scale      = 1 / multiplier
//   code       = the float8 number nearest to x * multiplier, ties to even
//
// Magnitudes beyond the largest code become the largest code; NaN becomes 0x7F.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Codes and scales of x [M, N], of its transpose, or of both. A group is 128 elements of a row (of the transpose: of a column), or
// with `blocks` a block of 128 x 128. Groups at the ends may be smaller.
//
// A form with L rows of codes and G groups in a row has scales [L, G], or [ceil(L / 128), G] with `blocks`. With ue8m0 they are
// [L, ceil(G / 4)] words of four exponents, the lowest group in the lowest byte, unused bytes 0; the exponent of a block is
// repeated for each of its rows. `scales_by_column` transposes them.
//
// Moves M * N * itemsize bytes, and M * N bytes for each form.
typedef struct pmo_paddle_quantize_params {
  int64_t struct_size;
  int64_t num_rows;        // M
  int64_t num_columns;     // N
  const void* x;           // [M, N]
  void* codes;             // [M, N], or NULL
  void* scales;            // float32 or int32; NULL without codes
  void* transposed_codes;  // [N, M], or NULL
  void* transposed_scales;
  int32_t dtype;        // of x: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t codes_dtype;  // PMO_FLOAT8_E4M3FN or PMO_FLOAT8_E5M2
  int32_t blocks;
  int32_t pow2;
  int32_t ue8m0;  // needs pow2
  int32_t scales_by_column;
  float epsilon;   // in [0, FLT_MAX]
  float overflow;  // in [1, FLT_MAX]
  int32_t num_threads;
  int32_t reserved;
} pmo_paddle_quantize_params;

PMO_API int pmo_paddle_quantize_cpu(const pmo_paddle_quantize_params* params, void* stream);
PMO_API int pmo_paddle_quantize_cuda(const pmo_paddle_quantize_params* params, void* stream);

// y = gate * sigmoid(gate) * up * probs[r] in float32, then codes float8_e4m3fn and a scale for each 128 columns, epsilon 0 and
// overflow FLT_MAX. The same bits on every backend. Moves 5 M n bytes.
typedef struct pmo_paddle_swiglu_params {
  int64_t struct_size;
  int64_t num_rows;    // M
  int64_t width;       // n
  const void* x;       // bfloat16 [M, 2 n], the gates first
  const float* probs;  // [M], or NULL
  void* codes;         // [M, n]
  float* scales;       // [M, ceil(n / 128)]
  int32_t pow2;
  int32_t num_threads;
} pmo_paddle_swiglu_params;

PMO_API int pmo_paddle_swiglu_cpu(const pmo_paddle_swiglu_params* params, void* stream);
PMO_API int pmo_paddle_swiglu_cuda(const pmo_paddle_swiglu_params* params, void* stream);

// Products d_out * silu(gate) * up of a row are added in one order: eight neighbouring columns c to partial sum c / 8 % 128, in
// the order of columns; then halves of the partial sums onto each other.
//
// Gradients of probs[r] * silu(gate) * up, and that output, rounded to bfloat16. The same bits on every backend. Moves 10 M n bytes.
typedef struct pmo_paddle_swiglu_backward_params {
  int64_t struct_size;
  int64_t num_rows;    // M
  int64_t width;       // n
  const void* x;       // bfloat16 [M, 2 n], the gates first
  const void* d_out;   // bfloat16 [M, n]
  const float* probs;  // [M]
  void* d_x;           // bfloat16 [M, 2 n]
  float* d_probs;      // [M]
  void* out;           // bfloat16 [M, n]
  int32_t num_threads;
  int32_t reserved;
} pmo_paddle_swiglu_backward_params;

PMO_API int pmo_paddle_swiglu_backward_cpu(const pmo_paddle_swiglu_backward_params* params, void* stream);
PMO_API int pmo_paddle_swiglu_backward_cuda(const pmo_paddle_swiglu_backward_params* params, void* stream);

#ifdef __cplusplus
}
#endif
