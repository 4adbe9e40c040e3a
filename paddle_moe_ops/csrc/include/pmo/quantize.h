// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Quantisation of rows to float8_e4m3fn with a scale per 128 columns, and dequantisation.
#pragma once

#include "pmo/base.h"
#include "pmo/permute.h"

#ifdef __cplusplus
extern "C" {
#endif

// Columns that share a scale; the last group of a row may be shorter.
#define PMO_QUANTIZE_GROUP 128

// S = ceil(H / 128) scales of a row in C words. float32: C = S. Packed ue8m0: C = ceil(S / 4), four exponents to an int32, the
// lowest group in the lowest byte, unused bytes 0.
typedef enum pmo_scale_layout {
  PMO_SCALES_BY_ROW = 0,     // [N, C]
  PMO_SCALES_BY_COLUMN = 1,  // [C, N rounded up to a multiple of 4]
} pmo_scale_layout;

// codes[slot_to_row[t, k]] = the codes of x[t], and the scales alike. A source row is read and quantised once for any number of
// rows; one without rows is not read. Moves T * H * itemsize + N * (H + 4 C) bytes.
//
// Arithmetic for a group of columns, in float32 with round to nearest even (the same bits on every backend):
//
//   a = max |x|, NaN left out; a = min(max(a, amax_min), FLT_MAX)
//   scale = a / 448, for ue8m0 the smallest power of two that is not less
//   code = the e4m3fn number nearest to x * (1 / scale), ties to even
//
// Magnitudes beyond 448, infinity among them, become 448; NaN becomes 0x7F.
typedef struct pmo_quantize_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_rows;
  int64_t hidden;
  const void* x;  // [T, H]
  int64_t x_row_stride;
  const int32_t* slot_to_row;  // [T, K]; entries outside [0, N) are skipped. NULL: row t is token t; then topk is 1 and N = T
  const int32_t*
      row_to_token;  // [N]; negative = padding row, which no slot may name if it is filled. Not read without slot_to_row
  void* codes;       // [N, H] contiguous
  void* scales;      // in the layout asked for, contiguous
  int32_t dtype;     // of x: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t ue8m0;
  int32_t scale_layout;
  int32_t fill;    // PMO_FILL_ROWS: zero the codes of padding rows; PMO_FILL_SCALES: their scales, and alignment rows after row N
  float amax_min;  // in [2^-100, FLT_MAX]
  int32_t num_threads;
  void* workspace;  // CUDA only; may be NULL, but many column-major scales are then slower
  int64_t workspace_bytes;
} pmo_quantize_params;

PMO_API int pmo_quantize_cpu(const pmo_quantize_params* params, void* stream);
PMO_API int pmo_quantize_cuda(const pmo_quantize_params* params, void* stream);

// 0 if no workspace helps or the sizes are unusable. With a workspace, column-major scales are those of the tokens in
// row_to_token, so the maps must agree.
PMO_API int64_t pmo_quantize_cuda_workspace_bytes(const pmo_quantize_params* params);

// out = code * scale in float32, rounded to the output type; the bits of a NaN are unspecified. A ue8m0 exponent of 0 is a
// scale of 0, as in padding rows.
typedef struct pmo_dequantize_params {
  int64_t struct_size;
  int64_t num_rows;
  int64_t hidden;
  const void* codes;  // [N, H]
  int64_t codes_row_stride;
  const void* scales;  // as pmo_quantize_* writes them
  void* out;           // [N, H] contiguous
  int32_t dtype;       // of out: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t ue8m0;
  int32_t scale_layout;
  int32_t num_threads;
} pmo_dequantize_params;

PMO_API int pmo_dequantize_cpu(const pmo_dequantize_params* params, void* stream);
PMO_API int pmo_dequantize_cuda(const pmo_dequantize_params* params, void* stream);

#ifdef __cplusplus
}
#endif
