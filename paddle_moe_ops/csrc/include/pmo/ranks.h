// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Expert parallelism through memory that ranks share: which token goes where, and what travels beside its row.
//
// Every rank has a window of P regions, one for each rank that sends to it. A region of a token window has S rows. The P regions that a
// rank writes to, one in the window of each rank, are mapped next to each other: an array [P, region] whose part p is at rank p. So what
// goes to row p * S + i of that array is row i of this rank's region at rank p.
//
// A region of a window of records: the number n of its tokens (int32, then 60 bytes of nothing), int32 [S, K] expert ids, float32 [S, K]
// probabilities; what follows the first n records is not written. A region of a window of values: 32-bit numbers [S, K].
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PMO_RECORDS_HEADER 64

// A call of a rank in words: all but the last must be the same on all ranks; the last one has a bit for each gradient that the rank computes.
// If ranks differ, the barrier marks its state, and operators that are given the mark write 0xFF to each byte of their floating-point
// outputs, which is NaN in every dtype.
#define PMO_CALL_WORDS 8
#define PMO_BARRIER_REGION (64 + 2 * 4 * PMO_CALL_WORDS)
#define PMO_CALLS_DIFFER 1
#define PMO_GRADIENT_MODES_DIFFER 2

typedef struct pmo_rank_plan_params {
  int64_t struct_size;
  int64_t num_tokens;        // T
  int64_t topk;              // K
  int64_t num_ranks;         // P
  int64_t experts_per_rank;  // rank p has the experts from p * experts_per_rank on
  int64_t rows_per_rank;     // S
  int64_t capacity;          // tokens that a rank gets at most, at most S; the last ones are dropped
  const void* ids;           // [T, K]; what is no id of an expert has no rank
  const float* probs;        // [T, K]
  void* records;             // [P, region_bytes]
  int64_t region_bytes;      // a multiple of 4 that holds S records
  int32_t* token_rows;       // [T, min(P, K)] the token's rows, ascending, -1 last
  int32_t* row_to_token;     // [P * S], -1 = no token; may be NULL
  int32_t* dropped;          // [1] slots whose token found no room
  int32_t* routed;           // [P * experts_per_rank] tokens that chose the expert, whether they found room or not
  void* workspace;           // CUDA only
  int64_t workspace_bytes;
  int32_t ids_kind;  // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t num_threads;
} pmo_rank_plan_params;

// A token has one row for each rank that has one of its experts; a region's rows follow ascending token. The token's ids and probabilities
// are recorded there.
PMO_API int64_t pmo_rank_plan_cuda_workspace_bytes(const pmo_rank_plan_params* params);
PMO_API int pmo_rank_plan_cpu(const pmo_rank_plan_params* params, void* stream);
PMO_API int pmo_rank_plan_cuda(const pmo_rank_plan_params* params, void* stream);

typedef struct pmo_rank_records_params {
  int64_t struct_size;
  int64_t num_ranks;      // P
  int64_t rows_per_rank;  // S
  int64_t topk;           // K
  int64_t first_expert;
  int64_t num_experts;  // of this rank
  const void* records;  // [P, region_bytes], what arrived
  int64_t region_bytes;
  const int32_t* mark;  // [1] not 0: probabilities become NaN; may be NULL
  int32_t* ids;         // [P * S, K] counted from first_expert; -1 = an expert of another rank, or no token
  float* probs;         // [P * S, K], 0 where the id is -1
  int32_t* rows;        // [P * S] the row itself where there is a token, else -1
  int32_t num_threads;
} pmo_rank_records_params;

PMO_API int pmo_rank_records_cpu(const pmo_rank_records_params* params, void* stream);
PMO_API int pmo_rank_records_cuda(const pmo_rank_records_params* params, void* stream);

typedef struct pmo_rank_values_params {
  int64_t struct_size;
  int64_t num_ranks;      // P
  int64_t rows_per_rank;  // S
  int64_t topk;           // K
  int64_t num_tokens;     // T, of get
  int64_t experts_per_rank;
  int64_t region_bytes;
  const void* row_values;     // put: [P * S, K]
  const void* ids;            // get: [T, K]
  const int32_t* token_rows;  // get: [T, min(P, K)]
  void* window;               // [P, region_bytes]
  void* slot_values;          // get: [T, K]; take: [P * S, K]
  const int32_t* mark;        // get: [1] not 0: values become NaN; may be NULL
  int32_t ids_kind;
  int32_t num_threads;
} pmo_rank_values_params;

// Puts the values of rows into this rank's regions at the ranks whose tokens they are.
PMO_API int pmo_rank_put_cpu(const pmo_rank_values_params* params, void* stream);
PMO_API int pmo_rank_put_cuda(const pmo_rank_values_params* params, void* stream);

// What all ranks put here, row by row.
PMO_API int pmo_rank_take_cpu(const pmo_rank_values_params* params, void* stream);
PMO_API int pmo_rank_take_cuda(const pmo_rank_values_params* params, void* stream);

// The value of each slot that the rank of its expert put here, 0 where the token has no row there.
PMO_API int pmo_rank_get_cpu(const pmo_rank_values_params* params, void* stream);
PMO_API int pmo_rank_get_cuda(const pmo_rank_values_params* params, void* stream);

typedef struct pmo_rank_rows_params {
  int64_t struct_size;
  int64_t num_tokens;  // T
  int64_t topk;        // K
  int64_t num_ranks;   // P
  int64_t experts_per_rank;
  int64_t rows_per_rank;       // S
  int64_t num_rows;            // N, of the plan of this rank's tokens over all experts
  const void* ids;             // [T, K]
  const int32_t* token_rows;   // [T, min(P, K)], of rank_plan
  const int32_t* row_to_slot;  // [N], of the plan over all experts
  int32_t* places;             // [N]
  int32_t ids_kind;
  int32_t num_threads;
} pmo_rank_rows_params;

// Where each row of the plan is in a window of S * K rows for each rank, where row r * K + k is that of slot k of the token in row r; -1 = none.
PMO_API int pmo_rank_rows_cpu(const pmo_rank_rows_params* params, void* stream);
PMO_API int pmo_rank_rows_cuda(const pmo_rank_rows_params* params, void* stream);

#define PMO_FETCHED_PERIOD 8

typedef struct pmo_rank_send_params {
  int64_t struct_size;
  int64_t num_tokens;          // T
  int64_t max_rows_per_token;  // C
  int64_t num_ranks;           // P
  int64_t rank;                // of this process
  int64_t rows_per_rank;       // S
  int64_t fetched;             // of every PMO_FETCHED_PERIOD rows of a region, those that their receiver fetches
  int64_t hidden;              // H
  const void* x;               // [T, H]
  int64_t x_row_stride;        // elements
  const int32_t* token_rows;   // [T, C] rows of windows; what is outside [0, P * S) is none
  void* arrived;               // [P * S, H] the regions at this rank
  void* peers;                 // [P * S, H] this rank's regions at all ranks
  void* own;                   // [P * S, H] rows r * S + i of this rank r go there; NULL: they stay where they are
  int32_t dtype;               // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t num_threads;
  int32_t leaves_room;  // CUDA: not 0: another kernel of the library is to run at the same time
} pmo_rank_send_params;

// Rows to where other ranks get them, so that half of an exchange is written and the other half read, while the memory of both has time for
// something else. Row p * S + i for another rank p goes to that row of `peers`; or, if i is one of those that are fetched, of `arrived`,
// where rank p reads it. Both are the same memory seen from two ranks, in which row i of a region is of one kind.
PMO_API int pmo_rank_send_cpu(const pmo_rank_send_params* params, void* stream);
PMO_API int pmo_rank_send_cuda(const pmo_rank_send_params* params, void* stream);

typedef struct pmo_rank_receive_params {
  int64_t struct_size;
  int64_t num_tokens;          // T
  int64_t max_rows_per_token;  // C
  int64_t num_ranks;           // P
  int64_t rank;
  int64_t rows_per_rank;      // S
  int64_t fetched;            // as all ranks gave it to rank_send
  int64_t hidden;             // H
  const int32_t* token_rows;  // [T, C] rows of windows, -1 ends a token; what is outside [0, P * S) is skipped
  const void* arrived;        // [P * S, H]
  const void* peers;          // [P * S, H]
  const void* own;            // [P * S, H] where rows r * S + i of this rank r are; NULL, only with C <= 1: in out already
  int64_t own_row_stride;     // elements
  const int32_t* mark;        // [1] not 0: out becomes NaN; may be NULL
  void* out;                  // [T, H]
  int32_t dtype;              // as above
  int32_t num_threads;
} pmo_rank_receive_params;

// out[t] = the sum of token t's rows, which all ranks sent before a barrier: as pmo_unpermute makes it, without weights. A single row is
// copied; no row is zeros.
PMO_API int pmo_rank_receive_cpu(const pmo_rank_receive_params* params, void* stream);
PMO_API int pmo_rank_receive_cuda(const pmo_rank_receive_params* params, void* stream);

typedef struct pmo_rank_barrier_params {
  int64_t struct_size;
  int64_t num_ranks;     // P, at most 1024
  int64_t region_bytes;  // a multiple of 4, at least PMO_BARRIER_REGION
  int64_t timeout_ms;
  const void* arrived;  // [P, region_bytes] a counter of 32 bits at the beginning of each region, and two calls, of that rank
  void* peers;          // [P, region_bytes] this rank's regions at all ranks
  int32_t* state;       // [2] how often this rank has come here, and the mark: not 0 once ranks differed
  const int32_t* call;  // [PMO_CALL_WORDS] the call of this rank, on the host
  int32_t* calls;       // [P, PMO_CALL_WORDS] the calls of all ranks
  // [1 + P * PMO_CALL_WORDS] in memory that the host reads: the reason and the calls, where ranks differ and the first word is 0
  int32_t* report;
  const int32_t* forward_calls;  // [P, PMO_CALL_WORDS], `calls` of the forward pass of which this is the backward pass; or NULL
  int32_t gradient;              // the bit in their last words that says whether a rank runs this backward pass
} pmo_rank_barrier_params;

// Waits until all ranks have come here as often as this one. What any rank wrote before is visible afterwards. Where a rank does not come within
// timeout_ms, it is an error that names the rank: on CUDA one of the kernel, which ends the context. The calls of the ranks are compared. If
// a rank does not run this backward pass, nothing is waited for, and the state counts no barrier.
PMO_API int pmo_rank_barrier_cpu(const pmo_rank_barrier_params* params, void* stream);
PMO_API int pmo_rank_barrier_cuda(const pmo_rank_barrier_params* params, void* stream);

typedef struct pmo_rank_spoil_params {
  int64_t struct_size;
  int64_t num_ranks;     // P
  int64_t data_bytes;    // of data
  int64_t code;          // of the call that this rank is in
  const int64_t* codes;  // [P] those of all ranks
  void* data;            // floating-point numbers that arrived
} pmo_rank_spoil_params;

// Makes data NaN where ranks are in different calls; else it is neither read nor written.
PMO_API int pmo_rank_spoil_cpu(const pmo_rank_spoil_params* params, void* stream);
PMO_API int pmo_rank_spoil_cuda(const pmo_rank_spoil_params* params, void* stream);

#ifdef __cplusplus
}
#endif
