// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What products of experts' rows need besides the products: tables of the rows, zeros in rows of no expert, SwiGLU.
//
// M rows in all, E experts. Rows of no expert are those outside all groups.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Which rows and which tiles of `tile_rows` rows each expert has. A group begins at its offset, or where the one before it
// ended; it is cut where it overlaps those before it, and at row M. A negative size counts as 0.
typedef struct pmo_grouped_tables_params {
  int64_t struct_size;
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  const void* sizes;    // [E] int32 or int64, as sizes_kind says: PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  const void* offsets;  // [E] of offsets_kind, or NULL: the groups follow each other from row 0 on
  int32_t* first;       // [E] first row
  int32_t* stop;        // [E] the row after the last one
  int32_t* tiles;       // [E + 1] tiles before those of each expert; all
  int32_t* window;      // [4] 0, and all tiles; two zeros, which are the counters of products
  int32_t sizes_kind;
  int32_t offsets_kind;
  int32_t tile_rows;  // 1 or more
  int32_t reserved;
} pmo_grouped_tables_params;

PMO_API int pmo_grouped_tables_cpu(const pmo_grouped_tables_params* params, void* stream);
PMO_API int pmo_grouped_tables_cuda(const pmo_grouped_tables_params* params, void* stream);

// Zeros in rows of no expert.
typedef struct pmo_grouped_clear_params {
  int64_t struct_size;
  int64_t num_rows;      // M
  int64_t num_experts;   // E
  int64_t row_size;      // bytes, a multiple of 16
  const int32_t* first;  // [E], as pmo_grouped_tables_* makes them
  const int32_t* stop;   // [E]
  void* rows;            // [M] rows, at a multiple of 16 bytes
} pmo_grouped_clear_params;

PMO_API int pmo_grouped_clear_cpu(const pmo_grouped_clear_params* params, void* stream);
PMO_API int pmo_grouped_clear_cuda(const pmo_grouped_clear_params* params, void* stream);

// act = silu(gate) * up, where hidden[r] is gate and up, n columns each. In float32, rounded once.
typedef struct pmo_swiglu_params {
  int64_t struct_size;
  int64_t num_rows;    // M
  int64_t width;       // n
  const void* hidden;  // [M, 2 n]
  void* act;           // [M, n]
  int32_t dtype;       // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t num_threads;
} pmo_swiglu_params;

PMO_API int pmo_swiglu_cpu(const pmo_swiglu_params* params, void* stream);
PMO_API int pmo_swiglu_cuda(const pmo_swiglu_params* params, void* stream);

// The gradients of weights[r] * act[r], act rounded as above, from their gradient. Rows of no token give zeros, and are not read.
typedef struct pmo_swiglu_backward_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t width;                // n
  const void* hidden;           // [M, 2 n]
  const int32_t* row_to_token;  // [M], negative for none
  const float* weights;         // [M]
  void* d_hidden;               // [M, 2 n]
  void* scaled;                 // [M, n] the gradient; becomes weights[r] * act[r]
  float* d_weights;             // [M] the dot products of act and the gradient
  int32_t dtype;                // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t num_threads;
} pmo_swiglu_backward_params;

PMO_API int pmo_swiglu_backward_cpu(const pmo_swiglu_backward_params* params, void* stream);
PMO_API int pmo_swiglu_backward_cuda(const pmo_swiglu_backward_params* params, void* stream);

// out[r] = the sum of the numbers of row r, 0 for a row of no token, which is not read. Always in the same order.
typedef struct pmo_row_sums_params {
  int64_t struct_size;
  int64_t num_rows;             // M
  int64_t width;                // W
  const float* values;          // [M, W]
  const int32_t* row_to_token;  // [M], negative for none
  float* out;                   // [M]
} pmo_row_sums_params;

PMO_API int pmo_row_sums_cpu(const pmo_row_sums_params* params, void* stream);
PMO_API int pmo_row_sums_cuda(const pmo_row_sums_params* params, void* stream);

// What decides whether the products of pmo/grouped.h make a product, and the gradient of its matrices.
typedef struct pmo_grouped_facts {
  int64_t struct_size;
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  int64_t inner;        // length of the contraction
  int64_t outer;        // columns of the result
  int32_t dtype;        // of what is multiplied, a pmo_dtype; PMO_FLOAT8_E4M3FN for the products of pmo/grouped_float8.h
  int32_t capability;   // as pmo_grouped_capability_cuda gives it
} pmo_grouped_facts;

// 1 if they do; else 0.
PMO_API int32_t pmo_grouped_takes(const pmo_grouped_facts* facts);

// Ten times the compute capability of the current GPU, or 0 if it cannot be told or this library has no such products.
PMO_API int32_t pmo_grouped_capability_cuda(void);

#ifdef __cplusplus
}
#endif
