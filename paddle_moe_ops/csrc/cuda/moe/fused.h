// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Entries of the fused route and permute kernel (fused.cu): both in one launch, or either alone.
#pragma once

#include <cuda_runtime.h>

#include "cuda/moe/fused_plan.h"
#include "pmo/permute.h"
#include "pmo/route.h"

namespace pmo {
namespace cuda {

// True if the fused kernel supports this routing, by its sizes.
bool fused_routes(const pmo_route_params& p);

// Number of int32 values of workspace for a routing: [E, CTAs] counts, [E] totals.
int64_t fused_workspace_ints(int64_t num_experts);

// True if the fused kernel can move these rows, all in whole 16-byte accesses. The plan also requires sm_90.
bool fused_moves(const pmo_permute_params& p);

// A routing with its ids and scratch.
struct FusedRouting {
  const pmo_route_params* params;
  const int32_t* cleaned_ids;  // [T, K] instead of params->routing, or null
  int32_t* slot_to_row;        // [T, K]: the output, or workspace; may be null up to kMaxSlotsReadByAll slots
  int32_t* ints;               // fused_workspace_ints()
};

// Launches; `routing` or `permute` may be null. Returns kNotLaunched if there is no plan or not all CTAs can be resident.
constexpr int kNotLaunched = -1;
int launch_fused(const FusedRouting* routing, const pmo_permute_params* permute, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
