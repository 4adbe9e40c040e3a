// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Expert parallelism through symmetric buffers, memory that ranks map from each other: rows of tokens for each rank, and their
// records.
//
// Every rank has a symmetric buffer of P regions, one per sending rank. A region of a token buffer has S rows. The P regions that
// a rank writes to, one in the buffer of each rank, are mapped contiguously: an array [P, region] whose part p is memory of rank
// p. So row p * S + i of that array is row i of this rank's region at rank p.
//
// A region of a record buffer: the number n of its tokens (int32, then 60 unused bytes), int32 [S, K] expert ids, float32 [S, K]
// probabilities. Values after the first n records are undefined. A region of a value buffer: 32-bit values [S, K].
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PMO_RECORDS_HEADER 64

// A call of a rank in words. All but the last must be equal on all ranks; the last one has a bit for each gradient that the rank
// computes. If ranks differ, the barrier marks its state. Operators with that mark write 0xFF to each byte of their
// floating-point outputs, NaN in every dtype.
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
  int64_t capacity;          // at most this many tokens go to a rank, at most S; later ones are dropped
  const void* ids;           // [T, K]; values outside the expert ids have no rank
  const float* probs;        // [T, K]
  void* records;             // [P, region_bytes]
  int64_t region_bytes;      // a multiple of 4 with room for S records
  int32_t* token_rows;       // [T, min(P, K)] the token's rows, ascending, -1 last
  int32_t* row_to_token;     // [P * S], -1 = no token; may be NULL
  int32_t* dropped;          // [1] slots of dropped tokens
  int32_t* routed;           // [P * experts_per_rank] tokens that chose the expert, dropped ones included
  void* workspace;           // CUDA only
  int64_t workspace_bytes;
  int32_t ids_kind;  // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t num_threads;
} pmo_rank_plan_params;

// A token has one row per rank with at least one of its experts; a region's rows follow ascending token. The token's ids and
// probabilities are recorded in the same region.
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
  const void* records;  // [P, region_bytes], received
  int64_t region_bytes;
  const int32_t* mark;  // [1] not 0: probabilities become NaN; may be NULL
  int32_t* ids;         // [P * S, K] counted from first_expert; -1 = an expert of another rank, or no token
  float* probs;         // [P * S, K], 0 if the id is -1
  int32_t* rows;        // [P * S] the row itself if it has a token, else -1
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

// Stores the values of rows in this rank's regions at the ranks that own the tokens.
PMO_API int pmo_rank_put_cpu(const pmo_rank_values_params* params, void* stream);
PMO_API int pmo_rank_put_cuda(const pmo_rank_values_params* params, void* stream);

// Copies the values that all ranks stored in this rank's buffer, row by row.
PMO_API int pmo_rank_take_cpu(const pmo_rank_values_params* params, void* stream);
PMO_API int pmo_rank_take_cuda(const pmo_rank_values_params* params, void* stream);

// Value of each slot, as the rank of its expert stored it in this rank's buffer; 0 if the token has no row at that rank.
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

// Position of each row of the plan in a symmetric buffer of S * K rows per rank. Row r * K + k belongs to slot k of the token in
// row r; -1 = none.
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
  int64_t fetched;             // rows of every PMO_FETCHED_PERIOD in a region that their receiver fetches
  int64_t hidden;              // H
  const void* x;               // [T, H]
  int64_t x_row_stride;        // elements
  const int32_t* token_rows;   // [T, C] rows of the symmetric buffers; entries outside [0, P * S) are none
  void* arrived;               // [P * S, H] the regions at this rank
  void* peers;                 // [P * S, H] this rank's regions at all ranks
  void* own;                   // [P * O, H] target of rows r * S + i of this rank r, row r * O + i; NULL: they are not copied
  int64_t own_rows_per_rank;   // O, up to S
  int32_t dtype;               // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t num_threads;
  int32_t leaves_room;  // CUDA: not 0: leaves room for another kernel of the library to run concurrently
} pmo_rank_send_params;

// Stores rows for other ranks. A part of an exchange is written by the sender and the rest fetched by the receiver, so that both
// directions of the link are busy. Row p * S + i for another rank p is stored to that row of `peers`. If i is a fetched row, it
// is stored to that row of `arrived` instead, from which rank p reads it. Both are the same memory seen from two ranks, in which
// row i of a region is of one kind.
PMO_API int pmo_rank_send_cpu(const pmo_rank_send_params* params, void* stream);
PMO_API int pmo_rank_send_cuda(const pmo_rank_send_params* params, void* stream);

typedef struct pmo_rank_receive_params {
  int64_t struct_size;
  int64_t num_tokens;          // T
  int64_t max_rows_per_token;  // C
  int64_t num_ranks;           // P
  int64_t rank;
  int64_t rows_per_rank;      // S
  int64_t fetched;            // the same as in rank_send on all ranks
  int64_t hidden;             // H
  const int32_t* token_rows;  // [T, C] rows of the symmetric buffers, -1 ends a token; entries outside [0, P * S) are skipped
  const void* arrived;        // [P * S, H]
  const void* peers;          // [P * S, H]
  // [P * O, H] source of rows r * S + i of this rank r, row r * O + i; NULL, only with C <= 1: out already contains them
  const void* own;
  int64_t own_row_stride;     // elements
  int64_t own_rows_per_rank;  // O, up to S
  const int32_t* mark;        // [1] not 0: out becomes NaN; may be NULL
  void* out;                  // [T, H]
  int32_t dtype;              // as above
  int32_t num_threads;
} pmo_rank_receive_params;

// out[t] = sum of token t's rows, which all ranks sent before a barrier, with the arithmetic of pmo_unpermute without weights. A
// single row is copied; a token without rows becomes zeros.
PMO_API int pmo_rank_receive_cpu(const pmo_rank_receive_params* params, void* stream);
PMO_API int pmo_rank_receive_cuda(const pmo_rank_receive_params* params, void* stream);

typedef struct pmo_rank_barrier_params {
  int64_t struct_size;
  int64_t num_ranks;     // P, at most 1024
  int64_t region_bytes;  // a multiple of 4, at least PMO_BARRIER_REGION
  int64_t timeout_ms;
  const void* arrived;  // [P, region_bytes] a counter of 32 bits at the beginning of each region, and two calls, of that rank
  void* peers;          // [P, region_bytes] this rank's regions at all ranks
  int32_t* state;       // [2] number of barriers of this rank, and the mark: not 0 once ranks differed
  const int32_t* call;  // [PMO_CALL_WORDS] the call of this rank, on the host
  int32_t* calls;       // [P, PMO_CALL_WORDS] the calls of all ranks
  // [1 + P * PMO_CALL_WORDS] in memory that the host reads: the reason and the calls, if ranks differ and the first word is 0
  int32_t* report;
  const int32_t* forward_calls;  // [P, PMO_CALL_WORDS], `calls` of the forward pass of which this is the backward pass; or NULL
  int32_t gradient;              // the bit in their last words that says whether a rank runs this backward pass
} pmo_rank_barrier_params;

// Waits until all ranks have reached as many barriers as this one. Writes of any rank before its barrier are visible afterwards.
// If a rank does not arrive within timeout_ms, the call fails and names the rank: on CUDA by a kernel error, which ends the
// context. The calls of the ranks are compared. If a rank does not run this backward pass, the call returns without waiting, and
// the state counts no barrier.
PMO_API int pmo_rank_barrier_cpu(const pmo_rank_barrier_params* params, void* stream);
PMO_API int pmo_rank_barrier_cuda(const pmo_rank_barrier_params* params, void* stream);

// Exchange of few tokens, in one launch each way on CUDA: plan, send, barrier and receive in one. A rank sends up to L tokens to
// each rank, and receives P * L lines of H columns, line p * L + i from row i of rank p's region. So lines lack the rows that
// regions have to fill pages.
#define PMO_FEW_TOKENS 256  // L at most
#define PMO_FEW_RANKS 32    // P at most, and K
#define PMO_FEW_EXPERTS 4096

typedef struct pmo_rank_dispatch_params {
  int64_t struct_size;
  pmo_rank_plan_params plan;  // with L as capacity; without row_to_token, workspace and num_threads
  pmo_rank_barrier_params barrier;
  int64_t rank;
  int64_t hidden;               // H
  const void* x;                // [T, H]
  int64_t x_row_stride;         // elements
  void* arrived;                // [P * S, H] the regions at this rank
  void* peers;                  // [P * S, H] this rank's regions at all ranks
  const void* arrived_records;  // [P, plan.region_bytes] those of other ranks at this rank
  void* tokens;                 // [P * L, H] zeros in lines without a token
  int32_t* ids;                 // [P * L, K] counted from the first expert of this rank; -1 = an expert of another rank, or none
  float* probs;                 // [P * L, K], 0 if the id is -1
  int32_t* rows;                // [P * L] row p * S + i of the regions, -1 without a token
  void* workspace;              // CUDA only
  int64_t workspace_bytes;
  int32_t* counter;  // CUDA only: [1] zero before the first launch, which launches leave at zero
  int32_t dtype;     // PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t num_threads;
} pmo_rank_dispatch_params;

// Sends tokens to the ranks of their experts, and receives those of all ranks. If the ranks' calls differ, all floating-point
// outputs are NaN. With up to L tokens a CUDA rank sends token t in row t of each region, so that no rank counts tokens;
// otherwise rows follow ascending token, as in rank_plan.
PMO_API int64_t pmo_rank_dispatch_cuda_workspace_bytes(const pmo_rank_dispatch_params* params);
PMO_API int pmo_rank_dispatch_cpu(const pmo_rank_dispatch_params* params, void* stream);
PMO_API int pmo_rank_dispatch_cuda(const pmo_rank_dispatch_params* params, void* stream);

typedef struct pmo_rank_combine_params {
  int64_t struct_size;
  pmo_rank_barrier_params barrier;
  int64_t num_tokens;          // T
  int64_t max_rows_per_token;  // C
  int64_t rank;
  int64_t rows_per_rank;      // S
  int64_t lines_per_rank;     // L
  int64_t hidden;             // H
  const void* lines;          // [P * L, H] parts of the sums of received tokens
  int64_t line_stride;        // elements
  const int32_t* rows;        // [P * L], of rank_dispatch
  const int32_t* token_rows;  // [T, C], of rank_dispatch
  void* arrived;              // [P * S, H] the regions at this rank
  void* peers;                // [P * S, H] this rank's regions at all ranks
  void* out;                  // [T, H]
  int32_t* counter;           // as above
  int32_t dtype;              // as above
  int32_t num_threads;
} pmo_rank_combine_params;

// Sends the lines of received tokens back. out[t] = sum of token t's lines at all ranks, as in rank_receive.
PMO_API int pmo_rank_combine_cpu(const pmo_rank_combine_params* params, void* stream);
PMO_API int pmo_rank_combine_cuda(const pmo_rank_combine_params* params, void* stream);

typedef struct pmo_rank_spoil_params {
  int64_t struct_size;
  int64_t num_ranks;     // P
  int64_t data_bytes;    // of data
  int64_t code;          // of this rank's call
  const int64_t* codes;  // [P] codes of all ranks
  void* data;            // received floating-point values
} pmo_rank_spoil_params;

// Fills data with NaN if ranks are in different calls; otherwise data is neither read nor written.
PMO_API int pmo_rank_spoil_cpu(const pmo_rank_spoil_params* params, void* stream);
PMO_API int pmo_rank_spoil_cuda(const pmo_rank_spoil_params* params, void* stream);

#ifdef __cplusplus
}
#endif
