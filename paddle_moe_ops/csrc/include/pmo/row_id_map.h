// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// TransformerEngine's row_id_map, which lists a token's rows and experts in one line: from a plan, and back to a rowmap.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Line t of row_id_map [T, 2E + 1], for a token with n rows:
//
//   columns [0, n)      the rows, descending, hence by descending expert
//   columns [E, E + n)  the rows' experts
//   column 2E           n
//
// With pad_offsets the map counts rows as if no segment were padded: it contains r - pad_offsets[e] for row r of expert e.
typedef struct pmo_row_id_map_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_experts;
  int64_t num_rows;
  const int32_t* token_rows;     // make: [T, K] ascending; entries outside [0, N) are skipped
  const int32_t* row_to_expert;  // make: [N]; a row whose expert is outside [0, E) is skipped
  const int32_t* pad_offsets;    // [E], or NULL
  int32_t* row_id_map;           // [T, 2E + 1]
  int32_t* rowmap;               // read: [T, E] row of the pair, negative = none
  int32_t num_threads;
} pmo_row_id_map_params;

// row_id_map from the maps of a plan; at most the first E rows of a token, which has more only with PMO_DUPLICATES_EACH. The
// rest of a line is -1.
PMO_API int pmo_make_row_id_map_cpu(const pmo_row_id_map_params* params, void* stream);
PMO_API int pmo_make_row_id_map_cuda(const pmo_row_id_map_params* params, void* stream);

// rowmap from row_id_map. Entries whose expert is outside [0, E) are skipped. If several entries of a token name one expert, the
// first one counts. n is clamped to [0, E]. Rows are not checked: pmo_clean_rowmap_* does that.
PMO_API int pmo_read_row_id_map_cpu(const pmo_row_id_map_params* params, void* stream);
PMO_API int pmo_read_row_id_map_cuda(const pmo_row_id_map_params* params, void* stream);

#ifdef __cplusplus
}
#endif
