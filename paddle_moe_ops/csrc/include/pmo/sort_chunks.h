// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Reordering a buffer that is a sequence of chunks of rows, such as one chunk per (rank, expert) after an all-to-all.
#pragma once

#include "pmo/base.h"
#include "pmo/route.h"

#ifdef __cplusplus
extern "C" {
#endif

// Chunk c has split_sizes[c] rows after those of the chunks before it. The output is the chunks order[0], order[1], ...; rows
// after the last chunk do not move. source_to_dest[r] is the new place of row r, always a permutation of [0, R):
//
//   out[source_to_dest[r]] = x[r], probs alike;  with `inverse`: out[r] = x[source_to_dest[r]]
//
// Bad values, unless PMO_CHECK_RANGE (sizes, order) or PMO_CHECK_DUPLICATES (order) reject them: a negative size counts as 0, and
// chunks end at row R. Entries of `order` that name no chunk, or one that was named before, are skipped. Chunks that `order` does
// not name follow the others, ascending.
//
// Moves 2 * R * H * itemsize bytes: every row is read once and written once. Chunks stay contiguous, so the copy needs no map.
typedef struct pmo_sort_chunks_params {
  int64_t struct_size;
  int64_t num_rows;    // R
  int64_t num_chunks;  // C
  int64_t hidden;
  const void* x;  // [R, H]
  int64_t x_row_stride;
  const void* split_sizes;  // [C]
  const void* order;        // [C]
  const float* probs;       // [R] or NULL
  void* out;                // [R, H] contiguous, or NULL: move only the probabilities
  float* probs_out;         // [R], or NULL
  int32_t* source_to_dest;  // [R], or NULL
  void* workspace;          // CUDA only, 4-byte aligned
  int64_t workspace_bytes;
  int32_t dtype;
  int32_t split_sizes_kind;  // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t order_kind;
  int32_t inverse;
  int32_t checks;  // CPU; on CUDA nothing is checked
  int32_t num_threads;
} pmo_sort_chunks_params;

PMO_API int pmo_sort_chunks_cpu(const pmo_sort_chunks_params* params, void* stream);
PMO_API int pmo_sort_chunks_cuda(const pmo_sort_chunks_params* params, void* stream);
PMO_API int64_t pmo_sort_chunks_cuda_workspace_bytes(const pmo_sort_chunks_params* params);  // 0 for few chunks

// The checks of the CPU operator, for a caller with both arrays in host memory: params->split_sizes and params->order point to
// them.
PMO_API int pmo_sort_chunks_report(const pmo_sort_chunks_params* params);

#ifdef __cplusplus
}
#endif
