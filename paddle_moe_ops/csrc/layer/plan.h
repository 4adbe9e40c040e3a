// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Heuristics of a layer of experts: chunks, gather or permute, kernel and tile of each GEMM. Pure functions of sizes and GPU facts.
#pragma once

#include "common/arithmetic.h"
#include "common/grouped_layout.h"
#include "pmo/layer.h"

namespace pmo {
namespace layer {

// Alignment of the arrays in a pass's workspace.
constexpr int64_t kArrayAlignment = 256;

constexpr int64_t kItemBytes = 2;  // of a row's element

constexpr int64_t kGroup = PMO_QUANTIZE_GROUP;  // columns that share a scale

inline int64_t aligned_bytes(int64_t bytes) { return round_up(bytes, kArrayAlignment); }

// True if memory bandwidth per SM is high: it is on an H200, not on an H100.
bool has_fast_memory(const pmo_layer_facts& facts);

// Tile rows of the faster kernel for a plain GEMM: PMO_GROUPED_TURNED_ROWS is the swap-AB kernel, PMO_GROUPED_TILE_ROWS the
// ping-pong kernel. `inner` is K; `columns` of the result, or of a chunk of them.
int32_t plain_tile_rows(const pmo_layer_facts& facts, int64_t inner, int64_t columns);

// Tile columns of the ping-pong kernel: PMO_GROUPED_WIDE_COLUMNS or PMO_GROUPED_TILE_COLUMNS.
int32_t tile_columns(int64_t inner, int64_t columns);

// Bytes of the codes and scales of rows, and of the larger matrix.
int64_t codes_bytes(int64_t rows, int64_t columns);
int64_t matrix_codes_bytes(const pmo_layer_facts& facts);

// Bytes of row blocks as operands of wgrads: codes, and scales as `by_blocks` says.
int64_t column_codes_bytes(int64_t blocks, int64_t columns, bool by_blocks);

// Upper bound on the row blocks of all experts: tiles of 128 rows.
int64_t row_blocks(const pmo_layer_facts& facts);

// Memory that the codes of a chunk of rows and, later, a wgrad's operand of n or 2n columns share.
int64_t shared_codes_bytes(const pmo_layer_facts& facts, const pmo_layer_plan& plan);

// True if all tiles have 128 rows, as float8 kernels require.
inline bool has_float8_tiles(const pmo_layer_facts& facts) { return facts.float8 != 0 || facts.float8_wgrads != 0; }

// Rows of a row chunk and those that its last tile reads.
int64_t held_rows(const pmo_layer_facts& facts, const pmo_layer_plan& plan);

// Layout of the tile schedules of a plan.
GroupedLayout layout_of(const pmo_layer_facts& facts, const pmo_layer_plan& plan);

pmo_layer_plan plan_of(const pmo_layer_facts& facts);

int check_facts(const pmo_layer_facts& facts);
int check_layer(const pmo_layer_facts& facts, const pmo_layer_params& params);

}  // namespace layer
}  // namespace pmo
