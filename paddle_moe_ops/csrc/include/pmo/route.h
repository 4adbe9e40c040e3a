// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing: from expert ids or a mask to the compact maps that every other operator follows.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pmo_routing_kind {
  PMO_ROUTING_IDS32 = 0,  // int32 [T, K] expert ids, -1 = unassigned slot
  PMO_ROUTING_IDS64 = 1,  // int64 [T, K]
  PMO_ROUTING_MASK = 2,   // one byte per element [T, E], non-zero = routed; slot k is the k-th set expert, ascending
} pmo_routing_kind;

typedef enum pmo_duplicates {
  PMO_DUPLICATES_FIRST = 0,  // an expert named twice by a token has one row, owned by the first slot
  PMO_DUPLICATES_EACH = 1,   // every slot has a row
} pmo_duplicates;

// T tokens, K slots per token, E experts, A rows of alignment, N rows of the permuted buffer. Any output of pmo_route_* may be
// NULL: it is not computed. A row is owned by one slot. Rows of an expert follow ascending flat slot t * K + k. The segment of
// expert e + 1 begins at the next multiple of A after that of e.
typedef struct pmo_route_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_experts;
  int64_t padding_alignment;
  int64_t num_rows;  // N; rows at or beyond it are dropped
  const void* routing;
  const float* probs;                  // [T, K] for ids, [T, E] for a mask, or NULL
  const int32_t* expected_per_expert;  // [E] counts that PMO_CHECK_COUNTS compares with, or NULL
  int32_t routing_kind;
  int32_t duplicates;
  int32_t checks;
  int32_t num_threads;  // 0: the process default
  void* workspace;      // filled by pmo_route_count_*, read by pmo_route_*
  int64_t workspace_bytes;
  int32_t* routed_per_expert;  // [E] true counts (written by pmo_route_count_*)
  int32_t* slot_to_row;        // [T, K], -1 = none
  int32_t* token_rows;         // [T, K] the token's rows ascending, -1 last
  int32_t* row_to_token;       // [N], -1 = padding
  int32_t* row_to_slot;        // [N] t * K + k, -1 = padding
  int32_t* row_to_expert;      // [N], -1 = padding
  float* row_probs;            // [N], 0 = padding; needs probs
  int32_t* tokens_per_expert;  // [E] routed rows inside the buffer
  int32_t* expert_offsets;     // [E + 1] first row of each segment, clamped to N
  int32_t* overflow;           // [1] slots dropped because their row is at or beyond N
  int32_t* rowmap;             // [T, E] row of the pair, -1 = none (Paddle's zipped_expertwise_rowmap)
} pmo_route_params;

// Findings of the checks: the first place of each kind in flat order, PMO_NOWHERE if there is none.
#define PMO_NOWHERE INT64_MAX
typedef struct pmo_route_findings {
  int64_t bad_place;         // flat slot of an id outside [-1, E); the token for a mask with more than topk experts
  int64_t bad_value;         // that id; the number of experts that the token sets
  int64_t duplicate_place;   // flat slot that names an expert again
  int64_t duplicate_expert;  // that expert
  int64_t duplicate_first;   // flat slot that named it first
  int64_t nan_place;         // flat index into probs
} pmo_route_findings;

// 0 if the sizes are unusable; pmo_last_error() names the size.
PMO_API int64_t pmo_route_cpu_workspace_bytes(const pmo_route_params* params);
PMO_API int64_t pmo_route_cuda_workspace_bytes(const pmo_route_params* params);

// Counts the routed slots per expert; must precede pmo_route_* with the same params and workspace. On the CPU it also runs the
// checks. On CUDA it reads nothing back: for checks the caller copies the pmo_route_findings at the beginning of the workspace,
// and routed_per_expert, to the host and calls pmo_route_report.
PMO_API int pmo_route_count_cpu(const pmo_route_params* params, void* stream);
PMO_API int pmo_route_count_cuda(const pmo_route_params* params, void* stream);

// Converts findings and counts (both in host memory) to a status and its text, for the checks of params->checks. Overflow is
// included once params->num_rows is set.
PMO_API int pmo_route_report(const pmo_route_params* params, const pmo_route_findings* findings,
                             const int32_t* routed_per_expert);

// Writes the maps.
PMO_API int pmo_route_cpu(const pmo_route_params* params, void* stream);
PMO_API int pmo_route_cuda(const pmo_route_params* params, void* stream);

// Rows of a buffer for these counts, with every segment padded to a multiple of padding_alignment.
PMO_API int64_t pmo_padded_rows(const int32_t* counts, int64_t num_experts, int64_t padding_alignment);

typedef struct pmo_clean_rowmap_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_experts;
  int64_t num_rows;
  const int32_t* rowmap;  // [T, E] from a user
  const void* ids;  // [T, K] expert ids; NULL: slot e of a token is its expert e (topk = num_experts), or slots are not computed
  const float* row_values;  // [N], only for slot_values
  int32_t ids_kind;         // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t duplicates;       // FIRST: a repeated id's later slots have no row; EACH: they share the row
  int32_t checks;
  int32_t num_threads;
  int32_t* token_rows;     // [T, E] rows in ascending expert order, then -1 (all others, if slots are experts; else one)
  int32_t* row_to_token;   // [N], -1 = no token uses the row
  int32_t* slot_to_row;    // [T, K], -1 = none, or NULL
  float* slot_values;      // [T, K] values of the slots' rows, 0 = none; or NULL, and without ids NULL
  int32_t* row_to_slot;    // [N] t * E + e, -1 = none, if slots are experts; or NULL
  int32_t* row_to_expert;  // [N], -1 = none, or NULL
  void* workspace;         // CUDA only
  int64_t workspace_bytes;
} pmo_clean_rowmap_params;

typedef struct pmo_rowmap_findings {
  int64_t bad_id_place;  // flat slot of an id outside [-1, E)
  int64_t bad_id;
  int64_t bad_row_place;  // flat t * E + e of a row outside [-1, N)
  int64_t bad_row;
  int64_t repeat_place;  // flat place that names a row again
  int64_t repeat_row;
  int64_t repeat_first;  // flat place that named it first
} pmo_rowmap_findings;

// Trusted maps of a [T, E] rowmap: entries outside [-1, N), and any but the first (lowest t * E + e) that name a row, count
// as -1. On CUDA it reads nothing back: for checks the caller copies the pmo_rowmap_findings at the beginning of the workspace
// to the host and calls pmo_clean_rowmap_report.
PMO_API int pmo_clean_rowmap_cpu(const pmo_clean_rowmap_params* params, void* stream);
PMO_API int pmo_clean_rowmap_cuda(const pmo_clean_rowmap_params* params, void* stream);
PMO_API int64_t pmo_clean_rowmap_cuda_workspace_bytes(const pmo_clean_rowmap_params* params);
PMO_API int pmo_clean_rowmap_report(const pmo_clean_rowmap_params* params, const pmo_rowmap_findings* findings);

typedef struct pmo_slots_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_experts;  // 0: slot_values is [T, K]; else it is [T, num_experts] and a slot's value is at the expert of its row
  int64_t num_rows;
  const int32_t* slot_to_row;    // [T, K]
  const int32_t* row_to_expert;  // [N], read only if num_experts > 0
  float* row_values;             // [N]
  float* slot_values;            // [T, K] or [T, num_experts]
  int32_t accumulate;            // scatter only: add to row_values instead of starting from zeros
  int32_t num_threads;
} pmo_slots_params;

// slot_values[slot] = row_values[slot_to_row[slot]], 0 if there is no row.
PMO_API int pmo_gather_slots_cpu(const pmo_slots_params* params, void* stream);
PMO_API int pmo_gather_slots_cuda(const pmo_slots_params* params, void* stream);

// row_values[slot_to_row[slot]] += slot_values[slot] in slot order; rows that no slot names become 0 (or stay, if accumulating).
// No two tokens may share a row.
PMO_API int pmo_scatter_slots_cpu(const pmo_slots_params* params, void* stream);
PMO_API int pmo_scatter_slots_cuda(const pmo_slots_params* params, void* stream);

#ifdef __cplusplus
}
#endif
