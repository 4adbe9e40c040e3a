// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Launch plans of the fused kernel (fused.cu) and of its form for few slots (few_slots.cu): shape, stages and shared memory, from
// sizes and the limits of the GPU. Plain C++, so that tests cover every GPU without one.
//
// The kernels count in 32 bits. Sizes that do not fit have no plan, including loop counters that run past their ends; the
// operators then launch other kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/status.h"
#include "cuda/device_limits.h"

namespace pmo {
namespace cuda {

// ---- the fused kernel

constexpr int kFusedThreads = 384;
constexpr int kFusedWarps = kFusedThreads / kWarpSize;
constexpr int kBlockThreads = kFusedThreads + kWarpSize;  // the last warp loads rows while the others route
constexpr int kChunksAhead = 4;                           // chunks of slots that a warp loads ahead
constexpr int kMaxBlocks = 512;
constexpr int kMaxFusedExperts = 1024;

constexpr int kBlocksPerSmWithRows = 2;     // CTAs per SM
constexpr int kBlocksPerSmWithoutRows = 3;  // CTAs per SM of launches without rows
static_assert(kBlocksPerSmWithoutRows * kBlockThreads <= kMultiprocessorThreads, "an SM holds the CTAs");
// A cooperative launch starts when all its CTAs can be resident. One that fills the GPU waits for the last CTA of every other
// kernel, and a kernel of a collective stays until its peers arrive. So routing without rows leaves a quarter of the GPU to
// others: NCCL has at most 32 CTAs. A launch that permutes rows uses the whole GPU: a quarter less makes it 5 to 10 % slower.
constexpr int kQuarters = 4, kQuartersWithoutRows = 3;

constexpr int64_t kMinSlotsForThirdBlock = int64_t{1} << 20;  // slots; from here on a third CTA per SM is faster
constexpr int64_t kMaxSlotsReadByAll = 1024;                  // slots; up to here every CTA reads all ids
constexpr int64_t kMaxLocalSlots = 2048;                      // slots of a CTA that keeps their rows in shared memory
constexpr int64_t kMinBulkStoreBytes = 4608;                  // row length from which cp.async.bulk stores rows
constexpr int64_t kMinPieceBytes = 1024;                      // minimal length of a piece of a row
constexpr int64_t kMinBytesToMoveAlone = int64_t{200} << 20;
constexpr int64_t kMinRowsPerToken = 4;      // rows per token; with fewer, grid barriers cost more than they gain
constexpr int64_t kStaticSharedBytes = 256;  // upper limit of the static shared memory
constexpr int64_t kReservedShared = 1024;    // shared memory that the SM reserves per CTA
constexpr int64_t kStageAlignment = 128;
constexpr int64_t kMaxTokensBeyond = 4096;  // loops of a warp run up to this many tokens past the last one
static_assert(kMaxTokensBeyond > (kChunksAhead + 1) * kFusedWarps * kWarpSize,
              "a warp loads chunks ahead, and chunks of all warps follow");

enum class Move { kNone, kThreads, kBulk };

// Problem sizes, as fused_routes and fused_moves accept them.
struct FusedSizes {
  int64_t num_tokens = 0, topk = 0, num_rows = 0;
  int64_t num_experts = 0;       // 0: the routing is given
  bool has_slot_to_row = false;  // slot_to_row has memory
  int64_t row_bytes = 0;         // 0: no rows
  int64_t scale_bytes = 0;
  bool fill = false;  // zero padding rows
};

struct FusedPlan {
  bool fits = false;  // false: no plan, other kernels are launched
  Move move = Move::kNone;
  int blocks = 0;
  bool cooperative = false;        // CTAs synchronise
  bool counts_everything = false;  // few slots: every CTA counts all of them, without grid barriers
  bool cleaned_in_shared = false;  // cleaned ids of a CTA stay in its shared memory
  int64_t local_slots = 0;         // slots of a CTA in shared memory
  // A token's row is cut into pieces. A CTA has a range of them and stages some at a time.
  int64_t pieces_per_token = 1, piece_bytes = 0, pieces_per_stage = 0, num_stages = 1;
  int64_t stage_bytes = 0, shared_bytes = 0;  // of a CTA: its stage, and all its dynamic shared memory
};

// Number of int32 values in RoutingScratch (fused_route.cuh), after a CTA's stage.
constexpr int64_t routing_scratch_ints(int64_t experts, bool counts_everything, int64_t local_slots) {
  return experts * 4 + 3 + (counts_everything ? 0 : experts * kFusedWarps) + local_slots;
}

// Largest dynamic shared memory of a CTA.
inline int64_t shared_of_kernel(const DeviceLimits& limits) { return limits.shared_per_block - kStaticSharedBytes; }

// Dynamic shared memory of a CTA if `blocks` CTAs share an SM.
inline int64_t shared_of_block(const DeviceLimits& limits, int blocks) {
  const int64_t share = limits.shared_per_multiprocessor / blocks - kReservedShared;
  return std::min<int64_t>(limits.shared_per_block, share) - kStaticSharedBytes;
}

// Registers of a CTA whose kernel has launch bounds of `blocks` CTAs per SM.
constexpr int64_t registers_of_block(int blocks) {
  constexpr int kThreadUnit = 8, kWarpUnit = 256;
  const int of_thread = kMultiprocessorRegisters / (blocks * kBlockThreads) / kThreadUnit * kThreadUnit;
  const int of_warp = round_up(of_thread * kWarpSize, kWarpUnit);
  return int64_t{kBlockThreads / kWarpSize} * of_warp;
}

// Plan with at most `blocks` CTAs, all resident, if an SM has room for `per_multiprocessor` of them.
inline FusedPlan plan_fused_blocks(const DeviceLimits& limits, const FusedSizes& sizes, Move move, int per_multiprocessor,
                                   int64_t blocks) {
  const bool routes = sizes.num_experts > 0, moves = move != Move::kNone;
  const FusedPlan none;
  if (per_multiprocessor * kBlockThreads > limits.threads_per_multiprocessor ||
      per_multiprocessor * registers_of_block(moves ? kBlocksPerSmWithRows : kBlocksPerSmWithoutRows) >
          limits.registers_per_multiprocessor) {
    return none;
  }
  FusedPlan plan;
  plan.move = move;
  blocks = std::min<int64_t>(kMaxBlocks, blocks);
  const int64_t slots_of_block = (sizes.num_tokens / blocks + 2) * sizes.topk;
  const bool slots_are_local = slots_of_block <= kMaxLocalSlots;  // false with many tokens per CTA
  plan.counts_everything = routes && sizes.num_tokens * sizes.topk <= kMaxSlotsReadByAll && slots_are_local;
  plan.cleaned_in_shared = routes && !plan.counts_everything && slots_are_local;
  const bool exchanges = routes && !plan.counts_everything;
  if (exchanges && !sizes.has_slot_to_row) return none;
  if (plan.counts_everything || plan.cleaned_in_shared) plan.local_slots = slots_of_block;
  const int64_t scratch_bytes =
      routes ? routing_scratch_ints(sizes.num_experts, plan.counts_everything, plan.local_slots) * int64_t{sizeof(int32_t)} : 0;
  const int64_t room = shared_of_block(limits, per_multiprocessor) - scratch_bytes;
  if (room < 0) return none;
  if (moves) {
    const int64_t for_stage = room / kStageAlignment * kStageAlignment;
    // A stage holds at least two pieces, each with its token's scales; rounding adds at most 16 bytes to a piece.
    const int64_t longest = for_stage / 2 - 16 - sizes.scale_bytes;
    if (longest < std::min(kMinPieceBytes, sizes.row_bytes)) return none;
    // Few tokens: cut rows, so that every SM has work. Long rows are cut as well.
    const int64_t most = std::max<int64_t>(1, sizes.row_bytes / kMinPieceBytes);
    int64_t parts = exchanges ? 1 : std::max<int64_t>(1, std::min(blocks / sizes.num_tokens, most));
    parts = std::max(parts, divide_up(sizes.row_bytes, longest));
    plan.piece_bytes = round_up(sizes.row_bytes / parts, 16);
    plan.pieces_per_token = divide_up(sizes.row_bytes, plan.piece_bytes);
    if (exchanges && plan.pieces_per_token > 1) return none;  // CTAs that share a token would count its slots twice
    const int64_t pieces = sizes.num_tokens * plan.pieces_per_token;
    if (!sizes.fill) blocks = std::min(blocks, pieces);
    const int64_t per_block = divide_up(pieces, blocks);
    const int64_t of_stage = for_stage / (plan.piece_bytes + sizes.scale_bytes);
    plan.num_stages = divide_up(per_block, of_stage);
    plan.pieces_per_stage = divide_up(per_block, plan.num_stages);
    plan.stage_bytes = round_up(plan.pieces_per_stage * (plan.piece_bytes + sizes.scale_bytes), kStageAlignment);
    if (pieces + per_block + plan.pieces_per_token > kMaxIndex || plan.pieces_per_stage * sizes.topk + kWarpSize > kMaxIndex) {
      return none;
    }
  } else {
    blocks = std::min(blocks, sizes.num_tokens);
  }
  plan.fits = true;
  plan.blocks = static_cast<int>(blocks);
  plan.shared_bytes = plan.stage_bytes + scratch_bytes;
  plan.cooperative = exchanges || plan.num_stages > 1;
  return plan;
}

inline FusedPlan plan_fused(const DeviceLimits& limits, const FusedSizes& sizes) {
  const FusedPlan none;
  const bool routes = sizes.num_experts > 0, moves = sizes.row_bytes > 0;
  if (sizes.num_tokens + kMaxTokensBeyond > kMaxIndex) return none;
  const int64_t multiprocessors = limits.multiprocessors;
  if (!moves) {
    const bool many_slots = sizes.num_tokens * sizes.topk >= kMinSlotsForThirdBlock;
    const int64_t wanted = multiprocessors * (many_slots ? kBlocksPerSmWithoutRows : kBlocksPerSmWithRows);
    for (int room = kBlocksPerSmWithoutRows; room > 0; --room) {  // CTAs per SM, as shared memory allows
      const int64_t others_fit = std::max<int64_t>(1, multiprocessors * room * kQuartersWithoutRows / kQuarters);
      const FusedPlan plan = plan_fused_blocks(limits, sizes, Move::kNone, room, std::min(wanted, others_fit));
      if (plan.fits) return plan;
    }
    return none;
  }
  if (limits.major < 9) return none;  // no cp.async.bulk
  const Move move = sizes.row_bytes >= kMinBulkStoreBytes ? Move::kBulk : Move::kThreads;
  // If move_pieces (permute.cu) is faster, there is no plan.
  const bool few_rows = sizes.num_rows < kMinRowsPerToken * sizes.num_tokens;
  const bool small = (sizes.num_tokens + sizes.num_rows) * sizes.row_bytes < kMinBytesToMoveAlone;
  if (!routes && (move == Move::kThreads || few_rows || small)) return none;
  const FusedPlan plan = plan_fused_blocks(limits, sizes, move, kBlocksPerSmWithRows, multiprocessors * kBlocksPerSmWithRows);
  return plan.num_stages > 1 && (move == Move::kThreads || few_rows) ? none : plan;
}

// ---- few slots

constexpr int kFewTopk = 8;
constexpr int kFewWords = kFewTopk / 2;   // words of a token, two slots each
constexpr int32_t kFewTokens = 768;       // tokens; with more, exchanging counts (fused_route.cuh) is faster
constexpr int32_t kFewTokensAlone = 576;  // the same without rows
constexpr int kFewThreads = 256;
constexpr int kFewAccesses = 4;       // accesses of a row in the registers of a thread
constexpr int kFewBlocks = 256;       // target number of CTAs
constexpr int32_t kPaddingRows = 32;  // padding rows per CTA, about

struct FewSlotsPlan {
  bool fits = false;
  int threads = 0;  // of a CTA
  int parts = 1;    // of a token's row, a CTA each
  int blocks = 0;
};

inline FewSlotsPlan plan_few_slots(const FusedSizes& sizes, int64_t padding_alignment) {
  FewSlotsPlan plan;
  if (padding_alignment != 1 || sizes.topk > kFewTopk || sizes.num_experts > kMaxFusedExperts ||
      sizes.num_tokens > (sizes.row_bytes > 0 ? kFewTokens : kFewTokensAlone)) {
    return plan;
  }
  // Every CTA reads all ids. With few of them, CTAs are smaller and more numerous.
  plan.threads = sizes.num_tokens <= kFewThreads / 2 ? kFewThreads / 2 : kFewThreads;
  const int64_t accesses = sizes.row_bytes / 16;
  const int64_t wanted = divide_up(sizes.num_tokens * accesses, plan.threads * kFewBlocks);
  const int64_t held = std::min<int64_t>(std::max<int64_t>(wanted, 1), kFewAccesses) * plan.threads;
  const int64_t parts = std::max<int64_t>(1, divide_up(accesses, held));
  const int64_t blocks = 1 + std::max(sizes.num_tokens * parts, std::min<int64_t>(kFewBlocks, sizes.num_rows / kPaddingRows));
  plan.parts = static_cast<int>(parts);
  plan.blocks = static_cast<int>(blocks);
  // Each warp of the grid zeroes every step-th padding row, so a row number runs at most one step past the last one.
  const int64_t step = plan.threads / kWarpSize * blocks;
  plan.fits = std::max(sizes.num_rows, sizes.num_tokens * kFewTopk) + 2 * step <= kMaxIndex;
  return plan;
}

}  // namespace cuda
}  // namespace pmo
