// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Permuting rows from token order to expert order, and back.
#pragma once

#include "pmo/base.h"
#include "pmo/route.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pmo_fill {
  PMO_FILL_ROWS = 1,    // zero the padding rows of `rows`
  PMO_FILL_SCALES = 2,  // zero the padding rows of `row_scales`
} pmo_fill;

// rows[slot_to_row[t, k] - first_row] = x[t], and the scales alike. Moves (T + N) * H * itemsize bytes: each source row is read
// once.
typedef struct pmo_permute_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_rows;
  int64_t hidden;
  int64_t scale_cols;
  const void* x;  // [T, H]
  int64_t x_row_stride;
  const void* scale;  // [T, S] or NULL
  int64_t scale_row_stride;
  int64_t first_row;            // of the chunk [first_row, first_row + N) of all rows
  const int32_t* slot_to_row;   // [T, K]; entries outside the chunk are skipped
  const int32_t* row_to_token;  // [N]; negative = padding row, which no slot may name if it is filled
  const int32_t* rows_end;      // NULL, or the row, of all rows, from which on padding is not filled
  void* rows;                   // [N, H] contiguous, or NULL: move only the scales
  void* row_scales;             // [N, S] contiguous, or NULL
  int32_t dtype;
  int32_t scale_dtype;
  int32_t fill;
  int32_t num_threads;
} pmo_permute_params;

PMO_API int pmo_permute_cpu(const pmo_permute_params* params, void* stream);
PMO_API int pmo_permute_cuda(const pmo_permute_params* params, void* stream);

// pmo_route_count_*, pmo_route_* and pmo_permute_* in as few launches as possible; `permute` may be NULL. It needs no
// pmo_route_count_* before it. On CUDA the data are not checked, even if route->checks is set. The sizes of `permute`, and the
// maps that it reads, must be those of `route`.
PMO_API int pmo_route_permute_cpu(const pmo_route_params* route, const pmo_permute_params* permute, void* stream);
PMO_API int pmo_route_permute_cuda(const pmo_route_params* route, const pmo_permute_params* permute, void* stream);

// out[t] = sum of the token's rows, in the order of token_rows, each times its weight if there are weights.
//
// Arithmetic in float32 with round to nearest even (the same bits on every backend):
//
//   acc = -0.0f; plain acc = acc + v; weighted acc = fma(v, w, acc); one rounding to the output type at the end.
//
// No rows: +0.0. One unweighted row is copied.
typedef struct pmo_unpermute_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t max_rows_per_token;  // columns of token_rows
  int64_t num_rows;
  int64_t num_weights;
  int64_t hidden;
  const void* rows;  // [N, H]
  int64_t rows_row_stride;
  const int32_t* token_rows;    // [T, max_rows_per_token]; the first -1 ends a token, other entries outside [0, N) are skipped
  const float* weights;         // NULL: plain sum
  const int32_t* weight_index;  // [N] position of a row's weight, outside [0, num_weights) = weight 0; NULL: row r has weights[r]
  void* out;                    // [T, H]
  int64_t out_row_stride;
  int32_t dtype;
  int32_t copy_single_row;  // also copy a token's only row when there are weights (Paddle's own behaviour)
  int32_t num_threads;
  int32_t overlaps;  // CUDA: not 0 if the previous launch of the stream made no other input than rows; this one may start early
} pmo_unpermute_params;

PMO_API int pmo_unpermute_cpu(const pmo_unpermute_params* params, void* stream);
PMO_API int pmo_unpermute_cuda(const pmo_unpermute_params* params, void* stream);

// Gradient of pmo_unpermute: d_rows[r] = w_r * d_out[t] (a copy without weights), d_weights[index(r)] = dot(d_out[t], rows[r]).
// Rows that no token uses become zeros. The dot product runs in float32 over 16 lanes (element j in lane j % 16, fma), which one
// fixed tree adds up. So its bits depend on nothing but the data. If all tokens have the same number of weights, num_weights /
// num_tokens, weight_index maps a token's rows to weights of the token. (CUDA: 256 lanes; for accesses of v elements, as wide as
// H and the alignment allow, element j is in lane j / v % 256.)
typedef struct pmo_unpermute_backward_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t max_rows_per_token;
  int64_t num_rows;
  int64_t num_weights;
  int64_t hidden;
  const void* d_out;  // [T, H]
  int64_t d_out_row_stride;
  const void* rows;  // [N, H] the forward input; needed for d_weights only
  int64_t rows_row_stride;
  const int32_t* token_rows;    // as in the forward; no row may be listed twice
  const int32_t* row_to_token;  // [N]; negative = padding row, which no token may list: its gradient is zero
  const float* weights;
  const int32_t* weight_index;
  void* d_rows;      // [N, H] contiguous, or NULL
  float* d_weights;  // [num_weights], or NULL
  int32_t dtype;
  int32_t copy_single_row;
  int32_t num_threads;
} pmo_unpermute_backward_params;

PMO_API int pmo_unpermute_backward_cpu(const pmo_unpermute_backward_params* params, void* stream);
PMO_API int pmo_unpermute_backward_cuda(const pmo_unpermute_backward_params* params, void* stream);

#ifdef __cplusplus
}
#endif
