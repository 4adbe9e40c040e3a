// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels around the grouped GEMMs: tables of experts' rows, zeros in rows of no expert, SwiGLU and dSwiGLU, row sums.
//
// M rows in all, E experts. Rows of no expert are those outside all groups.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Tables of the rows of each expert and of its tiles. A group begins at its offset, or at the end of the previous one. It is cut
// where it overlaps earlier groups, and at row M. A negative size counts as 0.
//
// For one tile height or for two, one after the other:
//
//   first    [E]      first row
//   stop     [E]      the row after the last one
//   tiles    [E + 1]  tiles before those of each expert; number of all
//   window   [P + 3]  tiles that begin before row p * chunk_rows, for p < P; number of all; 0; number of all
//   counters [2]      zeros, of the tile scheduler
//
// A launch of row chunk p computes tiles window[p] to window[p + 1] - 1, one of all rows those from window[P + 1] on.
typedef struct pmo_grouped_tables_params {
  int64_t struct_size;
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  const void* sizes;    // [E] int32 or int64, as sizes_kind says: PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  const void* offsets;  // [E] of offsets_kind, or NULL: the groups follow each other from row 0 on
  int64_t num_chunks;   // P, may be 0
  int64_t chunk_rows;   // 1 or more if there are chunks
  int32_t* tables;      // [3 E + P + 6] for each height
  int32_t sizes_kind;
  int32_t offsets_kind;
  int32_t tile_rows;        // 1 or more
  int32_t other_tile_rows;  // the second height; 0: there is none
} pmo_grouped_tables_params;

PMO_API int pmo_grouped_tables_cpu(const pmo_grouped_tables_params* params, void* stream);
PMO_API int pmo_grouped_tables_cuda(const pmo_grouped_tables_params* params, void* stream);

// Writes zeros to rows of no expert.
typedef struct pmo_grouped_clear_params {
  int64_t struct_size;
  int64_t num_rows;      // M
  int64_t num_experts;   // E
  int64_t row_size;      // bytes, a multiple of 16
  const int32_t* first;  // [E], of pmo_grouped_tables_*
  const int32_t* stop;   // [E]
  void* rows;            // [M] rows, at a multiple of 16 bytes
} pmo_grouped_clear_params;

PMO_API int pmo_grouped_clear_cpu(const pmo_grouped_clear_params* params, void* stream);
PMO_API int pmo_grouped_clear_cuda(const pmo_grouped_clear_params* params, void* stream);

// act = silu(gate) * up in float32, rounded once; hidden[r] is gate and up, n columns each.
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

// Gradient of weights[r] * act[r], act rounded as above. Rows without a token produce zeros and are not read.
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

// out[r] = sum of values[r], in one fixed order; 0 for a row without a token, which is not read.
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

// Facts that decide whether the kernels of pmo/grouped.h support a GEMM and its wgrad.
typedef struct pmo_grouped_facts {
  int64_t struct_size;
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  int64_t inner;        // K
  int64_t outer;        // columns of the result
  int32_t dtype;        // of the operands, a pmo_dtype; PMO_FLOAT8_E4M3FN for the kernels of pmo/grouped_float8.h
  int32_t capability;   // result of pmo_grouped_capability_cuda
} pmo_grouped_facts;

// 1 if they support it; else 0.
PMO_API int32_t pmo_grouped_takes(const pmo_grouped_facts* facts);

// 10 * major + minor of the current GPU, or 0 if it is unknown or this library lacks the kernels.
PMO_API int32_t pmo_grouped_capability_cuda(void);

#ifdef __cplusplus
}
#endif
