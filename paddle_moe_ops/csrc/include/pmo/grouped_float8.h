// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMMs with float8 operands for GPUs of compute capability 9.0, and the quantisation of their operands by blocks.
//
// Codes are float8_e4m3fn. A row has one scale per 128 columns, a matrix one per block of 128 x 128 elements; the last group of
// either may be smaller. Rows, experts, tiles and window are those of pmo/grouped.h.
#pragma once

#include "pmo/grouped.h"

#ifdef __cplusplus
extern "C" {
#endif

// Y[r] = x[r] times the expert's matrix, columns from first_column on. Products of codes are accumulated in float32 over 128 of
// K, multiplied by both scales and added to a float32 accumulator, in ascending order of K. Epilogues are those of
// pmo_grouped_product_params, from values rounded to bfloat16, except that GRADIENT does not round Y. Codes and scales of results
// follow the rule of pmo_quantize_params, from values rounded to bfloat16. If GRADIENT reads hidden_codes, an element of hidden is
// code * scale, rounded to bfloat16; its own codes and scales may overwrite those.
typedef struct pmo_grouped_float8_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t num_sources;          // rows of x
  int64_t num_experts;          // E
  int64_t inner;                // K, a multiple of 16
  int64_t outer;                // columns of a matrix, a multiple of 8; of 256 with GATED, of 128 with GRADIENT
  int64_t first_column;         // a multiple of 128; 0 unless the result is plain
  int64_t width;                // columns of Y, half of them with GATED, a multiple of 8
  int64_t first_row;            // x begins with this row
  int64_t window_rows;          // upper bound on the rows of the launch's tiles
  const void* x;                // codes [num_sources, inner], at a multiple of 16 bytes
  const float* x_scales;        // [num_sources, inner / 128, rounded up]
  const void* matrix;           // codes [E, outer, inner], at a multiple of 16 bytes
  const float* matrix_scales;   // [E, outer / 128, rounded up, inner / 128, rounded up]
  const int32_t* row_to_token;  // [M] or NULL: with GRADIENT, rows with a negative entry produce zeros
  const float* weights;         // [M] or NULL
  const int32_t* first;         // [E]
  const int32_t* stop;          // [E]
  const int32_t* tiles;         // [E + 1]
  const int32_t* window;        // [2]
  void* out;                    // bfloat16 [M, width]; may be NULL with GATED
  void* hidden;                 // bfloat16 [M, 2 * width]; may be NULL with GATED, and is NULL with GATED and hidden_codes
  void* hidden_codes;           // [M, 2 * width] or NULL: hidden in float8, written by GATED and read by GRADIENT
  float* hidden_scales;         // [M, 2 * width / 128], with hidden_codes
  void* codes;                  // of out with GATED, of the new hidden with GRADIENT, or NULL
  float* scales;                // [M, columns of codes / 128], with codes
  float* d_weights;             // [M, width / 128] or NULL
  int32_t* counters;            // [2] zeros, and zeros again after the launch
  float amax_min;               // of codes, as in pmo_quantize_params
  int32_t result;               // of pmo_grouped_result
} pmo_grouped_float8_params;

PMO_API int pmo_grouped_float8_cuda(const pmo_grouped_float8_params* params, void* stream);

// Block quantisation of stacked matrices: one scale per 128 x 128 elements, by the rule of pmo_quantize_params. The transposed
// form has the same codes and scales. Moves E * A * B * (itemsize + 1, or + 2 with both forms) bytes.
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
  int32_t num_threads;
  int32_t reserved;
} pmo_quantize_blocks_params;

PMO_API int pmo_quantize_blocks_cpu(const pmo_quantize_blocks_params* params, void* stream);
PMO_API int pmo_quantize_blocks_cuda(const pmo_quantize_blocks_params* params, void* stream);

// Quantisation of rows as an operand of wgrads, whose K is the rows of an expert. Expert e has the row blocks tiles[e] to
// tiles[e + 1] - 1: the first one has its rows first[e] to first[e] + 127, up to stop[e]. Codes of a block are transposed, with
// zeros after the last row. A scale serves a column of a block or, `by_blocks`, 128 columns, by the rule of pmo_quantize_params,
// except that all codes of a group with an infinity are NaN: a loss scaler looks for overflows in the gradients of matrices. Rows of
// no expert are not read, and blocks from num_blocks on not written. Moves M * C * (itemsize + 1) bytes.
typedef struct pmo_quantize_columns_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t num_sources;          // rows of x
  int64_t num_columns;          // C
  int64_t num_experts;          // E
  int64_t num_blocks;           // row blocks that codes and scales have room for
  const void* x;                // [num_sources, C]
  int64_t x_row_stride;         // at least C
  const int32_t* row_to_token;  // [M]: row r is x[row_to_token[r]], or zeros if there is no such row of x; NULL: row r is x[r]
  const int32_t* first;         // [E]; this and the next two as pmo_grouped_tables_* computes them for M rows and tiles of 128
  const int32_t* stop;          // [E]
  const int32_t* tiles;         // [E + 1]
  void* codes;                  // [num_blocks, C, 128] or NULL, at a multiple of 16 bytes
  float* scales;                // [num_blocks, C], or [num_blocks, C / 128, rounded up] with by_blocks; given with codes
  float* values;                // [M, C] or NULL: codes times scales, in the rows of experts
  int32_t dtype;                // of x: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t by_blocks;
  float amax_min;  // in [2^-100, FLT_MAX]
  int32_t num_threads;
} pmo_quantize_columns_params;

PMO_API int pmo_quantize_columns_cpu(const pmo_quantize_columns_params* params, void* stream);
PMO_API int pmo_quantize_columns_cuda(const pmo_quantize_columns_params* params, void* stream);

// Wgrad of rows quantised by columns (a) and by blocks (b): out[e] = A^T B over the rows of expert e, or its transpose. Products of
// codes are accumulated in float32 over a row block, multiplied by both scales and added to a float32 accumulator, in ascending
// order of blocks. Results, accumulation and the part of out are those of pmo_grouped_outer_params, with dtype bfloat16.
typedef struct pmo_grouped_outer_float8_params {
  int64_t struct_size;
  int64_t num_experts;  // E
  int64_t num_blocks;   // row blocks of codes and scales
  int64_t a_columns;    // a multiple of 8
  int64_t b_columns;    // a multiple of 8
  int64_t out_rows;
  int64_t out_columns;    // a multiple of 8
  int64_t first_row;      // the result has a_columns rows and b_columns columns of out from here on, or the reverse
  int64_t first_column;   // a multiple of 8
  const void* a;          // codes [num_blocks, a_columns, 128], at a multiple of 16 bytes
  const float* a_scales;  // [num_blocks, a_columns]
  const void* b;          // codes [num_blocks, b_columns, 128], at a multiple of 16 bytes
  const float* b_scales;  // [num_blocks, b_columns / 128, rounded up]
  const int32_t* tiles;   // [E + 1] row blocks before each expert, those from num_blocks on are ignored
  void* out;              // [E, out_rows, out_columns], at a multiple of 16 bytes
  int32_t* counters;      // [2] zeros, and zeros again after the launch
  int32_t transpose;
  int32_t accumulation;  // pmo_grouped_accumulation
} pmo_grouped_outer_float8_params;

PMO_API int pmo_grouped_outer_float8_cuda(const pmo_grouped_outer_float8_params* params, void* stream);

#ifdef __cplusplus
}
#endif
