// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM (forward and dgrad) and grouped wgrad for GPUs of compute capability 9.0.
//
// M rows in all; expert e has rows first[e] to stop[e] - 1. All arrays are of `dtype` (float16 or bfloat16) unless their type
// says otherwise. Accumulation is float32, in ascending order of K. The bits of the results do not depend on the tiling.
//
// Tiles of `tile_rows` rows are listed expert by expert: tiles[e] tiles precede those of expert e, tiles[E] is their number. A
// launch computes tiles window[0] to window[1] - 1. Kernels read these tables on the device, so the host does not read the numbers
// of rows. The kernel for few rows reads sizes and offsets instead of tables, as pmo_grouped_tables_params has them.
#pragma once

#include "pmo/base.h"
#include "pmo/matrices.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PMO_GROUPED_TILE_ROWS 128
#define PMO_GROUPED_TILE_COLUMNS 128
#define PMO_GROUPED_WIDE_COLUMNS 192
#define PMO_GROUPED_TURNED_ROWS 160
#define PMO_GROUPED_FEW_ROWS 64
#define PMO_GROUPED_MAX_FEW_EXPERTS 512

typedef enum pmo_grouped_result {
  PMO_GROUPED_PLAIN = 0,     // out [M, width] = weights[r] * Y
  PMO_GROUPED_GATED = 1,     // hidden [M, outer] = Y, unless it is NULL; out [M, outer / 2] = SwiGLU of its halves
  PMO_GROUPED_GRADIENT = 2,  // Y, rounded, is the gradient of weights[r] * SwiGLU(hidden[r]); hidden is replaced by its gradient,
                             // out [M, outer] = weights[r] * SwiGLU, d_weights = dot products of SwiGLU, rounded, and Y
} pmo_grouped_result;

// Y[r] = x[r] times the expert's matrix, columns from first_column on. Rows of x of no expert may contain anything.
typedef struct pmo_grouped_product_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t num_sources;          // rows of x
  int64_t num_experts;          // E
  int64_t inner;                // K, a multiple of 8
  int64_t outer;                // columns of a matrix, a multiple of 8
  int64_t first_column;         // 0 unless the result is plain
  int64_t width;                // columns of out, a multiple of 8
  int64_t first_row;            // x begins with this row, unless rows are gathered
  int64_t window_rows;          // upper bound on the rows of the launch's tiles
  const void* x;                // [num_sources, inner], at a multiple of 16 bytes
  int64_t x_row_stride;         // a multiple of 8
  const void* matrix;           // [E, inner, outer], or [E, outer, inner] with `transpose`
  const int32_t* row_to_token;  // [M] or NULL: with GRADIENT, rows with a negative entry produce zeros
  const float* weights;         // [M] or NULL
  const int32_t* first;         // [E]
  const int32_t* stop;          // [E]
  const int32_t* tiles;         // [E + 1]
  const int32_t* window;        // [2]
  void* out;
  void* hidden;       // [M, 2 * width] or NULL
  int32_t* counters;  // [2] zeros, and zeros again after the launch; not used with tiles of PMO_GROUPED_TILE_ROWS rows
  float* d_weights;   // [M, width / 128, rounded up] or NULL; sums of its rows are the gradients of the weights
  int32_t dtype;
  int32_t result;
  int32_t transpose;
  int32_t tile_rows;     // PMO_GROUPED_TURNED_ROWS: swap-AB kernel; PMO_GROUPED_TILE_ROWS: ping-pong kernel, PLAIN only;
                         // PMO_GROUPED_FEW_ROWS: kernel for few rows, up to PMO_GROUPED_MAX_FEW_EXPERTS experts, all rows, no
                         // `hidden`, not GRADIENT
  int32_t gathers;       // not 0: row r is x[row_to_token[r]], zeros if x has no such row; not with PLAIN
  int32_t tile_columns;  // of the ping-pong kernel: PMO_GROUPED_TILE_COLUMNS or PMO_GROUPED_WIDE_COLUMNS
  // The following are read by the kernel for few rows only.
  int32_t sizes_kind;
  int32_t offsets_kind;
  int32_t only_x_is_new;  // not 0: the previous launch of the stream was one of this kernel, and made no other input than x
  int32_t matrix_format;  // pmo_matrix_format, with matrix_scales
  float amax_min;         // of the codes of x with PMO_MATRIX_FLOAT8_128X128, as in pmo_quantize_params
  const void* sizes;      // [E]
  const void* offsets;    // [E] or NULL
  // NULL, or the scales of a matrix of codes (pmo/matrices.h), which are transposed. Float8: rows of x are quantised by the rule of
  // pmo_quantize_params, and Y is that of pmo_grouped_float8_params; the dtype is bfloat16.
  const float* matrix_scales;
  // NULL, or [num_tokens, topk] rows of slots: then `weights` are [num_tokens, topk]. Row r has the weight of the slot of token
  // row_to_token[r] that has this row, 0 if there is none.
  const int32_t* slot_to_row;
  int64_t num_tokens;
  int64_t topk;
} pmo_grouped_product_params;

PMO_API int pmo_grouped_product_cuda(const pmo_grouped_product_params* params, void* stream);

typedef enum pmo_grouped_gathered {
  PMO_GROUPED_GATHERS_NONE = 0,
  PMO_GROUPED_GATHERS_P = 1,
  PMO_GROUPED_GATHERS_Q = 2,
} pmo_grouped_gathered;

typedef enum pmo_grouped_accumulation {
  PMO_GROUPED_OVERWRITES = 0,
  PMO_GROUPED_ADDS = 1,          // to out of `dtype`
  PMO_GROUPED_ADDS_FLOAT32 = 2,  // to out of float32
} pmo_grouped_accumulation;

// Wgrad: out[e][first_p + i, first_q + j] = sum of p[r, i] q[r, j] over the rows r of expert e, in float32, rounded once; 0
// without rows. With accumulation the float32 sum is added to out, and the result is rounded once. Rows of no expert may contain anything. A gathered operand contains num_sources tokens: its row r is token
// row_to_token[r], or zeros if there is no such token.
typedef struct pmo_grouped_outer_params {
  int64_t struct_size;
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  int64_t p_columns;    // a multiple of 8
  int64_t q_columns;    // a multiple of 8
  int64_t out_rows;
  int64_t out_columns;          // a multiple of 8
  int64_t first_p;              // first_p + p_columns is at most out_rows
  int64_t first_q;              // a multiple of 8; first_q + q_columns is at most out_columns
  int64_t p_row_stride;         // a multiple of 8
  int64_t q_row_stride;         // a multiple of 8
  const void* p;                // [M, p_columns], at a multiple of 16 bytes
  const void* q;                // [M, q_columns], at a multiple of 16 bytes
  const int32_t* first;         // [E], not negative
  const int32_t* stop;          // [E]
  void* out;                    // [E, out_rows, out_columns], at a multiple of 16 bytes
  int64_t num_sources;          // rows of the gathered operand
  const int32_t* row_to_token;  // [M], with a gathered operand
  int32_t* counters;            // [2] zeros, and zeros again after the launch
  int32_t dtype;
  int32_t gathered;      // pmo_grouped_gathered
  int32_t accumulation;  // pmo_grouped_accumulation
  int32_t reserved;
} pmo_grouped_outer_params;

PMO_API int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void* stream);

// 1 if this library contains the kernels, which need CUDA 12 or newer to compile; else 0.
PMO_API int32_t pmo_grouped_product_cuda_is_built(void);

#ifdef __cplusplus
}
#endif
