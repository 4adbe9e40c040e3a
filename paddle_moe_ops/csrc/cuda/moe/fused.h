// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The fused kernel: routing and permutation, or either alone, in one launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/moe/fused_plan.h"
#include "pmo/permute.h"
#include "pmo/route.h"

namespace pmo {
namespace cuda {

// Whether the fused kernel can do this routing at all; sizes only.
bool fused_routes(const pmo_route_params& p);

// int32 values of workspace that the fused kernel needs for a routing: [blocks, E] counts, [E] totals.
int64_t fused_workspace_ints(int64_t num_experts);

// Whether the fused kernel can move these rows: sm_90, everything in whole 16-byte accesses.
bool fused_moves(const pmo_permute_params& p);

// Where a routing finds its ids and scratch.
struct FusedRouting {
  const pmo_route_params* params;
  const int32_t* cleaned_ids;  // [T, K] instead of params->routing, or null
  int32_t* slot_to_row;        // [T, K]: the output, or workspace; may be null up to kFusedSharedReads slots
  int32_t* ints;               // fused_workspace_ints()
};

// Launches; `routing` or `permute` may be null. Returns kNotLaunched where there is no plan for it, or the GPU cannot hold all blocks at
// once.
constexpr int kNotLaunched = -1;
int launch_fused(const FusedRouting* routing, const pmo_permute_params* permute, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
