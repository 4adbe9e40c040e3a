// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Checked arguments of operators between ranks: regions of symmetric buffers, plans and the barrier.
#pragma once

#include <vector>

#include "paddle/binding.h"
#include "pmo/ranks.h"

namespace pmo {
namespace binding {
namespace ranks {

inline constexpr char kFunction[] = "ExpertParallel";
inline constexpr char kNoMemory[] = "the window must be memory that ranks share";

// The address of regions [P, region_bytes].
void* regions(const paddle::Tensor& window, int64_t num_ranks, int64_t* region_bytes);

int64_t ranks_of(const paddle::Tensor& window);

// Sets the params of rank_plan but those of CUDA alone, and allocates token_rows, dropped and routed. `kept` owns what they point to.
Outputs prepare_plan(const Target& target, const paddle::Tensor& ids, const paddle::Tensor& probs, const paddle::Tensor& records,
                     int64_t experts_per_rank, int64_t rows_per_rank, int64_t capacity, pmo_rank_plan_params* p, Tensors* kept);

// Address of the mark in the state of a barrier.
const int32_t* mark_in(const paddle::Tensor& state);

// Buffers of a barrier, and the call of this rank.
struct BarrierBuffers {
  const paddle::Tensor& arrived;
  const paddle::Tensor& peers;
  const paddle::Tensor& state;
  const paddle::Tensor& report;
  const std::vector<int>& call;
  int64_t timeout_ms;
};

// Allocates the calls of all ranks and sets the params of the barrier.
paddle::Tensor prepare_barrier(const Target& target, const BarrierBuffers& buffers, const paddle::Tensor* forward_calls,
                               int gradient, pmo_rank_barrier_params* p);

}  // namespace ranks
}  // namespace binding
}  // namespace pmo
