// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A layer of SwiGLU experts: both passes on the kernels of pmo/grouped.h, chunk by chunk.
//
// T tokens of d columns, M rows, E experts of inner size n. Forward, with H = X W1 by rows:
//
//   rows of X -> H [M, 2n] and A = swiglu(H) [M, n]     GEMM with SwiGLU epilogue, by row chunks
//   weights[r] A W2 -> Y -> sums of each token's rows   GEMM and unpermute, by column chunks
//
// Backward, with dA' the gradient of the weighted A, s A, rounded to the dtype:
//
//   rows of dO -> dA' = dO W2^T -> dH, s A and ds       dgrad with SwiGLU's gradient as epilogue, by row chunks
//   dW2 = (s A)^T dO, dW1 = X^T dH                      wgrad, by column chunks of dO and X
//   dH W1^T -> rows of dX -> sums                       dgrad and unpermute, by column chunks
//
// A matrix of M rows and d columns exists one chunk at a time, in one buffer. Otherwise GEMMs gather token rows themselves. Each
// element is the same sum either way, so the bits do not depend on the chunks.
//
// A forward pass that keeps no H and has few rows per expert runs the kernel for few rows, which needs no tile schedules, reads codes
// as they are and quantises rows itself. Integer codes are for such a pass only.
//
// With float8 operands, Q quantises rows with one scale per 128 columns, and matrices with one per 128 x 128 elements:
//
//   rows of Q(X) -> H and Q(A)                          by row chunks; H in bfloat16 or as Q(H)
//   weights[r] Q(A) Q(W2) -> Y -> sums
//
//   rows of Q(dO) -> dA' = Q(dO) Q(W2)^T -> dH, Q(dH), s A and ds
//   Q(dH) Q(W1)^T -> rows of dX -> sums                 wgrads as above
//
// Wgrads may have float8 operands, too. Their K is an expert's rows, so they are quantised anew, by blocks of 128 rows: C with one
// scale per column, B with one per 128 columns:
//
//   dW2 = C(s A)^T B(dO), dW1 = C(X)^T B(dH)            by column chunks of dO and X
//
// Each pass reads its own form of each matrix, the one with contiguous K, and quantises the matrices unless their codes are given.
#pragma once

#include "pmo/base.h"
#include "pmo/grouped.h"
#include "pmo/grouped_float8.h"
#include "pmo/grouped_rows.h"
#include "pmo/permute.h"
#include "pmo/quantize.h"

#ifdef __cplusplus
extern "C" {
#endif

// H between the passes.
typedef enum pmo_layer_hidden {
  PMO_LAYER_RECOMPUTES = 0,
  PMO_LAYER_KEEPS = 1,        // in the dtype of the tokens
  PMO_LAYER_KEEPS_CODES = 2,  // Q(H), with float8 operands
} pmo_layer_hidden;

// The part of a backward pass that a call runs.
typedef enum pmo_layer_part {
  PMO_LAYER_WHOLE = 0,
  PMO_LAYER_DGRADS = 1,  // all but dW1 and dW2; dH and s A stay in arrays of the caller
  PMO_LAYER_WGRADS = 2,  // dW1 and dW2 from these, X and dO; reads neither matrices nor weights
} pmo_layer_part;

// All that the choices of a pass depend on.
typedef struct pmo_layer_facts {
  int64_t struct_size;
  int64_t num_tokens;   // T
  int64_t num_rows;     // M
  int64_t num_experts;  // E
  int64_t hidden;       // d, a multiple of 8; of 16 with float8 operands
  int64_t inner;        // n, a multiple of 8; of 128 with float8 operands
  int64_t workspace;    // bytes of the chunk buffer; it has room for 256 columns of all rows in any case
  int32_t dtype;        // PMO_FLOAT16 or PMO_BFLOAT16; the latter with float8 operands
  int32_t num_sms;
  int32_t memory_gbps;      // memory bandwidth in GB/s; 0 if it is unknown
  int32_t backward;         // 0: the forward pass
  int32_t keeps_hidden;     // pmo_layer_hidden
  int32_t needs_d_weights;  // whether the backward pass computes the gradient of the weights
  int32_t float8;           // whether GEMMs other than wgrads have float8 operands; 0 with PMO_LAYER_WGRADS
  int32_t has_codes;        // whether the codes of the matrices are given: float8 ones with float8, otherwise integers
  int32_t codes_format;     // of integer codes: PMO_MATRIX_INT8, PMO_MATRIX_INT4 or PMO_MATRIX_INT4_1X128
  int32_t part;             // pmo_layer_part of a backward pass
  int32_t float8_wgrads;    // whether the wgrads of a backward pass have float8 operands; with float8, or PMO_LAYER_WGRADS
} pmo_layer_facts;

// The choices of a pass.
typedef struct pmo_layer_plan {
  int64_t chunk_rows;     // of a row chunk
  int64_t num_chunks;     // number of row chunks; 0 if the GEMM gathers
  int64_t chunk_columns;  // of a column chunk
  int64_t buffer_bytes;   // of the chunk buffer
  int64_t wgrad_columns;  // of a column chunk of wgrads with float8 operands; 0 without
  int64_t tables_size;    // int32 entries of the tile schedules; 0 with the kernel for few rows
  int64_t bytes;          // workspace of the pass: the buffer and all other temporary arrays
  int32_t gathers;        // whether the GEMM whose rows are tokens gathers them
  int32_t gathers_x;      // whether wgrad of W1 gathers them
  int32_t gathers_d_out;  // whether wgrad of W2 gathers them
  int32_t sum_tile_rows;  // tile rows of the GEMM whose rows are summed; PMO_GROUPED_FEW_ROWS: of both
} pmo_layer_plan;

// Needs no GPU.
PMO_API int pmo_layer_plan_of(const pmo_layer_facts* facts, pmo_layer_plan* plan);

// Codes and scales of matrices [E, N, K] of pmo/matrices.h, transposed.
typedef struct pmo_layer_codes {
  const void* codes;
  const float* scales;
} pmo_layer_codes;

typedef struct pmo_layer_params {
  int64_t struct_size;
  int64_t slots_per_token;      // W
  const void* x;                // [T, d], at a multiple of 16 bytes
  int64_t x_row_stride;         // a multiple of 8, at least d
  const void* gate_up;          // W1 [E, d, 2n], or [E, 2n, d] with `transpose`; gates first
  const void* down;             // W2 [E, n, d], or [E, d, n]
  const float* weights;         // [M] or NULL; with slot_to_row [T, K]
  const int32_t* token_rows;    // [T, W] rows of each token; the first -1 ends a token
  const int32_t* row_to_token;  // [M], negative for none
  const void* sizes;            // [E] rows of each expert, of sizes_kind
  const void* offsets;          // [E] or more, first row of each expert, of offsets_kind; NULL: groups follow each other
  void* hidden;                 // [M, 2n]: H. Forward: written unless it is NULL. Backward: replaced by dH; NULL: recomputed
  float* hidden_scales;      // [M, 2n / 128]: `hidden` has the codes of H, which become those of dH; as facts.keeps_hidden says
  void* workspace;           // `bytes` of the plan, at a multiple of 16 bytes
  void* out;                 // forward: [T, d]
  const void* d_out;         // backward: [T, d], at a multiple of 16 bytes
  int64_t d_out_row_stride;  // a multiple of 8, at least d
  void* d_x;                 // [T, d] or NULL
  void* d_gate_up;           // shape of gate_up, or NULL
  void* d_down;              // shape of down, or NULL
  float* d_weights;          // [M] or NULL, as facts.needs_d_weights says
  void* scaled;              // [M, n]: s A, written by PMO_LAYER_DGRADS, and read by PMO_LAYER_WGRADS for d_down
  void* d_hidden;            // [M, 2n]: dH, likewise, for d_gate_up; PMO_LAYER_DGRADS leaves it in `hidden` if that has values
  // As facts.has_codes says. Forward: of both matrices. Backward: turned; gate_up_codes only if H is recomputed.
  pmo_layer_codes gate_up_codes, down_codes, turned_gate_up_codes, turned_down_codes;
  const int32_t* slot_to_row;  // NULL, or [T, K] rows of slots, whose weights are given; with the kernel for few rows only
  int64_t topk;                // K of slot_to_row
  int32_t sizes_kind;          // PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64
  int32_t offsets_kind;
  int32_t transpose;
  int32_t clears_hidden;         // forward: whether H gets zeros in rows of no expert; not for codes
  int32_t gate_up_accumulation;  // pmo_grouped_accumulation of d_gate_up
  int32_t down_accumulation;     // and of d_down
} pmo_layer_params;

// The functions that a pass calls, those of one device.
typedef struct pmo_layer_kernels {
  int (*tables)(const pmo_grouped_tables_params*, void* stream);
  int (*permute)(const pmo_permute_params*, void* stream);
  int (*gemm)(const pmo_grouped_product_params*, void* stream);
  int (*wgrad)(const pmo_grouped_outer_params*, void* stream);
  int (*row_sums)(const pmo_row_sums_params*, void* stream);
  int (*unpermute)(const pmo_unpermute_params*, void* stream);
  int (*clear)(const pmo_grouped_clear_params*, void* stream);
  int (*quantize)(const pmo_quantize_params*, void* stream);  // from here on only with float8 operands
  int (*quantize_blocks)(const pmo_quantize_blocks_params*, void* stream);
  int (*gemm_float8)(const pmo_grouped_float8_params*, void* stream);
  int (*quantize_columns)(const pmo_quantize_columns_params*, void* stream);  // from here on only with float8 wgrads
  int (*wgrad_float8)(const pmo_grouped_outer_float8_params*, void* stream);
} pmo_layer_kernels;

// One pass. No host synchronisation. Rows of no expert are not read, and not written but for clears_hidden.
PMO_API int pmo_layer_run(const pmo_layer_facts* facts, const pmo_layer_params* params, const pmo_layer_kernels* kernels,
                          void* stream);

// SMs and memory bandwidth in GB/s of the current GPU; 0 if they are unknown.
PMO_API void pmo_gpu_facts_cuda(int32_t* num_sms, int32_t* memory_gbps);

#ifdef __cplusplus
}
#endif
