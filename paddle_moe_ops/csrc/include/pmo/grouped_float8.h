// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Products of each expert's float8 rows and its float8 matrix, on GPUs of compute capability 9.0, and the matrices in float8.
//
// Codes are float8_e4m3fn. A row has a scale for each 128 columns, a matrix one for each 128 x 128 of its elements; the last group of
// either may be smaller. Rows, their experts, tiles and the window are those of pmo/grouped.h.
#pragma once

#include "pmo/grouped.h"

#ifdef __cplusplus
extern "C" {
#endif

// The sums are those of row r of x times the expert's matrix, columns from first_column on: the products of codes are added up in float32
// for each 128 of the contraction, multiplied by both scales, and added to the rest in float32, in ascending order. All other arithmetic
// is that of pmo_grouped_product_params, from numbers that were rounded to bfloat16; so are codes and scales of results, by the rule of
// pmo_quantize_params. Where a gradient reads hidden_codes, it takes code times scale, rounded to bfloat16, for a number of hidden, and its
// own codes and scales may be written over those.
typedef struct pmo_grouped_float8_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t num_sources;          // rows of x
  int64_t num_experts;          // E
  int64_t inner;                // length of the contraction, a multiple of 16
  int64_t outer;                // columns of a matrix, a multiple of 8; of 256 if the result is gated, of 128 if it is a gradient
  int64_t first_column;         // a multiple of 128; 0 unless the result is plain
  int64_t width;                // columns of the sums, half of them if the result is gated, a multiple of 8
  int64_t first_row;            // x begins with this row
  int64_t window_rows;          // the most rows that tiles of the window begin in
  const void* x;                // codes [num_sources, inner], at a multiple of 16 bytes
  const float* x_scales;        // [num_sources, inner / 128, rounded up]
  const void* matrix;           // codes [E, outer, inner], at a multiple of 16 bytes
  const float* matrix_scales;   // [E, outer / 128, rounded up, inner / 128, rounded up]
  const int32_t* row_to_token;  // [M] or NULL: in a gradient, the results of rows with a negative one are zeros
  const float* weights;         // [M] or NULL
  const int32_t* first;         // [E]
  const int32_t* stop;          // [E]
  const int32_t* tiles;         // [E + 1]
  const int32_t* window;        // [2]
  void* out;                    // bfloat16 [M, width]; of a gated result it may be NULL
  void* hidden;                 // bfloat16 [M, 2 * width]; of a gated result it may be NULL, and is with hidden_codes
  void* hidden_codes;           // [M, 2 * width] or NULL: hidden that a gated result makes and a gradient reads
  float* hidden_scales;         // [M, 2 * width / 128], with hidden_codes
  void* codes;                  // of out if the result is gated, of the new hidden if it is a gradient, or NULL
  float* scales;                // [M, columns of codes / 128], with codes
  float* d_weights;             // [M, width / 128] or NULL
  int32_t* counters;            // [2], zeros, which they are again after the launch
  float amax_min;               // of codes, as in pmo_quantize_params
  int32_t result;               // of pmo_grouped_result
} pmo_grouped_float8_params;

PMO_API int pmo_grouped_float8_cuda(const pmo_grouped_float8_params* params, void* stream);

// Stacked matrices in float8: one scale for each 128 x 128 elements, by the rule of pmo_quantize_params for all of them. Both forms have
// the same codes and scales. Moves E * A * B * (itemsize + 1, or + 2 with both forms) bytes.
typedef struct pmo_quantize_blocks_params {
  int64_t struct_size;
  int64_t num_matrices;  // E
  int64_t num_rows;      // A
  int64_t num_columns;   // B
  const void* x;         // [E, A, B] contiguous
  void* codes;           // [E, A, B] or NULL
  float* scales;         // [E, A / 128, B / 128], each rounded up, with codes
  void* turned_codes;    // [E, B, A] or NULL
  float* turned_scales;  // [E, B / 128, A / 128], each rounded up, with turned_codes
  int32_t dtype;         // of x: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  float amax_min;        // in [2^-100, FLT_MAX]
} pmo_quantize_blocks_params;

PMO_API int pmo_quantize_blocks_cuda(const pmo_quantize_blocks_params* params, void* stream);

// The values of such codes: each times its scale, in float32. For places without products of float8. Any NaN will do.
typedef struct pmo_near_blocks_params {
  int64_t struct_size;
  int64_t num_matrices;  // E
  int64_t num_rows;      // A
  int64_t num_columns;   // B
  const void* x;         // [E, A, B] contiguous
  float* out;            // [E, A, B]
  int32_t dtype;         // of x: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  float amax_min;        // in [2^-100, FLT_MAX]
  int32_t num_threads;
  int32_t reserved;
} pmo_near_blocks_params;

PMO_API int pmo_near_blocks_cpu(const pmo_near_blocks_params* params, void* stream);
PMO_API int pmo_near_blocks_cuda(const pmo_near_blocks_params* params, void* stream);

#ifdef __cplusplus
}
#endif
