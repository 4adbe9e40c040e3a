// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Adding rows to the tokens that an index names, in place.
#pragma once

#include "pmo/base.h"
#include "pmo/route.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[row_to_token[r] - first_token] += rows[r], in ascending order of r. Each addition is float32 and rounded once to `dtype`, so
// the bits are the same on every backend. Rows of other tokens, such as -1, are skipped.
//
// Moves N * H * (2 * itemsize of out + itemsize of rows) bytes.
typedef struct pmo_index_add_params {
  int64_t struct_size;
  int64_t num_rows;    // N
  int64_t num_tokens;  // T of out
  int64_t hidden;      // H
  int64_t first_token;
  const void* rows;  // [N, H] of rows_dtype
  int64_t rows_row_stride;
  const void* row_to_token;  // [N] of index_kind
  void* out;                 // [T, H] contiguous
  int32_t* workspace;        // CUDA: [2, T]
  int32_t dtype;             // PMO_FLOAT32 or PMO_BFLOAT16
  int32_t rows_dtype;        // dtype or PMO_BFLOAT16
  int32_t index_kind;        // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t num_threads;
} pmo_index_add_params;

PMO_API int pmo_index_add_cpu(const pmo_index_add_params* params, void* stream);
PMO_API int pmo_index_add_cuda(const pmo_index_add_params* params, void* stream);

#ifdef __cplusplus
}
#endif
