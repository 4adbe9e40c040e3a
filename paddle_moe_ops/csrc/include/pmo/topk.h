// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Router top-k: from logits to the experts of each token and their weights, and the gradient.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Scores are the sigmoid of each logit or the softmax over a token's logits, in float32, rounded to the type of the logits.
// Experts are chosen by the scores (pre_act) or by the logits, in float32 and with the bias added. The highest is first; of equal
// values the lower expert; NaN is above all numbers. Weights are the scores of the chosen experts, without pre_act those of a
// router that has no others. With `renormalize` they are divided by their sum. Then they are multiplied by the factor and rounded
// once more.
//
// With topk_groups < num_groups only experts of a token's best groups are chosen. The best groups have the highest sums of their
// scores_per_group best values, added from the highest down; of equal sums the lower group.
//
// The same bits on every backend and run: exponentials are computed by the core itself, and sums have one order, that of 32
// lanes.
//
// Moves T * E elements, T * K ids of 8 bytes and weights, and T * E elements more with `scores`.
typedef struct pmo_topk_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;              // K, at most the experts of the groups that are kept
  int64_t num_experts;       // E
  int64_t num_groups;        // groups of E / num_groups experts that follow each other
  int64_t topk_groups;       // groups that are kept
  int64_t scores_per_group;  // at least 1
  const void* gating;        // [T, E]
  int64_t gating_row_stride;
  const float* correction_bias;  // [E] or NULL
  void* weights;                 // [T, K] contiguous, best expert first
  int64_t* ids;                  // [T, K] contiguous
  void* scores;                  // [T, E] contiguous, of all experts, or NULL
  int32_t dtype;                 // of gating, weights and scores: PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16
  int32_t use_sigmoid;
  int32_t pre_act;
  int32_t renormalize;
  float scaling_factor;
  int32_t num_threads;
  void* workspace;  // CUDA only, 4-byte aligned
  int64_t workspace_bytes;
} pmo_topk_params;

PMO_API int pmo_topk_cpu(const pmo_topk_params* params, void* stream);
PMO_API int pmo_topk_cuda(const pmo_topk_params* params, void* stream);
PMO_API int64_t pmo_topk_cuda_workspace_bytes(const pmo_topk_params* params);  // 0 for up to 1024 experts

// d_gating, from the gradients of the weights and of the scores, in float32 and rounded once. The choice has no
// gradient, nor has a rounding. Ids are those of the forward; ids outside [0, E) neither receive nor contribute gradients.
//
// Moves 2 * T * E elements, 3 * T * E with d_scores, and T * K ids and elements.
typedef struct pmo_topk_backward_params {
  int64_t struct_size;
  int64_t num_tokens;
  int64_t topk;
  int64_t num_experts;
  const void* gating;  // [T, E]
  int64_t gating_row_stride;
  const int64_t* ids;     // [T, K] contiguous, distinct within a token
  const void* d_weights;  // [T, K] contiguous, or NULL: zeros
  const void* d_scores;   // [T, E] contiguous, or NULL: zeros
  void* d_gating;         // [T, E] contiguous
  int32_t dtype;          // of all but the ids
  int32_t use_sigmoid;
  int32_t pre_act;
  int32_t renormalize;
  float scaling_factor;
  int32_t num_threads;
} pmo_topk_backward_params;

PMO_API int pmo_topk_backward_cpu(const pmo_topk_backward_params* params, void* stream);
PMO_API int pmo_topk_backward_cuda(const pmo_topk_backward_params* params, void* stream);

#ifdef __cplusplus
}
#endif
