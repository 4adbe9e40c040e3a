// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Heuristics of a layer of experts: chunks, gather or permute, kernel and tile of each GEMM. Pure functions of sizes and GPU facts.
#pragma once

#include "pmo/layer.h"

namespace pmo {
namespace layer {

// Alignment of the arrays in a pass's workspace.
constexpr int64_t kArrayAlignment = 256;

inline int64_t aligned_bytes(int64_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

// True if memory bandwidth per SM is high: it is on an H200, not on an H100.
bool has_fast_memory(const pmo_layer_facts& facts);

// Tile rows of the faster kernel for a plain GEMM: PMO_GROUPED_TURNED_ROWS is the swap-AB kernel, PMO_GROUPED_TILE_ROWS the
// ping-pong kernel. `inner` is K; `columns` of the result, or of a chunk of them.
int32_t plain_tile_rows(const pmo_layer_facts& facts, int64_t inner, int64_t columns);

// Tile columns of the ping-pong kernel: PMO_GROUPED_WIDE_COLUMNS or PMO_GROUPED_TILE_COLUMNS.
int32_t tile_columns(int64_t inner, int64_t columns);

// int32 entries of the schedules of `num_heights` tile heights with `num_chunks` row chunks each.
int64_t schedule_size(int64_t num_experts, int64_t num_chunks, int64_t num_heights);

pmo_layer_plan plan_of(const pmo_layer_facts& facts);

int check_facts(const pmo_layer_facts& facts);
int check_layer(const pmo_layer_facts& facts, const pmo_layer_params& params);

}  // namespace layer
}  // namespace pmo
