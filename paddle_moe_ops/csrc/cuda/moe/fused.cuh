// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Work description of the fused kernels (fused.cu, few_slots.cu), the share of a CTA, and zeroing of padding rows.
#pragma once

#include <cstdint>

#include "cuda/moe/fused_plan.h"
#include "cuda/moe/padding.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

constexpr int kRowVectors = 8;  // 16-byte vectors of a row in the registers of a lane
constexpr int kMaxPerLane = kMaxBlocks / kWarpSize;

using Vector16 = Vector<16>;

// Named barrier of the routing threads.
__device__ inline void sync_routing() { asm volatile("bar.sync 1, %0;" ::"n"(kFusedThreads) : "memory"); }

// Kernel parameters, passed by value. Sizes fit 32 bits, as the plan ensures.
struct FusedWork {
  int32_t num_tokens, topk, num_experts, padding_alignment, num_rows;

  // routing
  const void* ids;  // [T, K]
  bool ids_are_64_bit, first_only, probs_by_expert;
  bool cleaned_in_shared, counts_everything;  // fields of the plan
  const float* probs;                         // [T, K], or [T, E] if probs_by_expert
  int32_t* slot_to_row;                       // [T, K], an output or workspace; read only if the routing is given
  int32_t *routed_per_expert, *token_rows, *row_to_token, *row_to_slot, *row_to_expert, *tokens_per_expert, *expert_offsets,
      *overflow, *rowmap;
  float* row_probs;
  int32_t* counts;  // [E, CTAs] slots of each expert in a CTA, then in the CTAs before it
  int32_t* totals;  // [E]

  // rows, in bytes
  const char* x;
  char* rows;
  const char* scale;
  char* row_scales;
  int64_t x_stride, scale_stride;
  int32_t row_bytes, scale_bytes;
  bool fill_rows, fill_scales;
  int32_t first_row;        // of a chunk of rows
  const int32_t* rows_end;  // NULL, or the row from which on padding is not filled

  // A token's row is cut into pieces of piece_bytes (the last may be shorter). A CTA owns a contiguous range of all pieces and
  // stages pieces_per_stage of them at a time. The CTA that owns a token's first piece writes its maps.
  int32_t pieces_per_token, piece_bytes, pieces_per_stage, num_stages;
};

// Rows of a CTA's tokens, from first_token on.
struct BlockRows {
  const int32_t* rows;  // [tokens, K]
  int32_t first_token;
};

// This CTA's share of the work.
struct Share {
  int32_t first_piece, last_piece;  // [first, last)
  int32_t first_token, last_token;  // tokens with a piece in the range
  int32_t owned_from;               // this CTA writes the maps of tokens [owned_from, last_token)

  __device__ explicit Share(const FusedWork& work) {
    const int32_t pieces = work.num_tokens * work.pieces_per_token;
    const int32_t blocks = gridDim.x, block = blockIdx.x;
    const int32_t each = pieces / blocks, rest = pieces - each * blocks;
    first_piece = block * each + min(block, rest);
    last_piece = first_piece + each + (block < rest ? 1 : 0);
    first_token = first_piece / work.pieces_per_token;
    owned_from = divide_up(first_piece, work.pieces_per_token);
    last_token = divide_up(last_piece, work.pieces_per_token);
    if (last_piece == first_piece) last_token = first_token;
  }
};

__device__ inline void zero_padding_row(const FusedWork& work, int64_t row) {
  if (work.fill_rows) zero_row<16>(work.rows + row * work.row_bytes, work.row_bytes);
  if (work.fill_scales) zero_row<16>(work.row_scales + row * work.scale_bytes, work.scale_bytes);
}

// Launches the kernel for few slots (few_slots.cu), whose CTAs do not communicate; permutes the rows as well if there are any.
int launch_few_slots(const FusedWork& work, const FewSlotsPlan& plan, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
