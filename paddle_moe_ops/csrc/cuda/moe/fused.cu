// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Fused route and permute: routing maps and permuted rows, or either alone, in one launch.
//
// CTAs: two per SM, all resident (a cooperative launch wherever they synchronise). Without rows: up to three quarters of the CTAs
// that the GPU has room for, so that kernels of collectives fit next to them. Each CTA owns a contiguous range of tokens, or of
// pieces of rows if there are fewer tokens than CTAs (fused_plan.h). 12 warps route and store rows, one warp loads rows.
//
// Routing (fused_route.cuh): a stable counting sort of slots by expert without atomics on positions. A CTA counts its slots, CTAs
// exchange counts through [E, CTAs] in global memory with two grid barriers, and every CTA then knows the first rows of its
// slots. With few slots every CTA counts all of them and no grid barrier is needed. Ranks within a CTA come from warp votes over
// whole tokens.
//
// Permutation (fused_move.cuh): a CTA stages source rows in shared memory by cp.async.bulk, as many as fit (about 110 KiB), and
// writes each to its rows: long rows by cp.async.bulk, short ones by ordinary stores if one stage holds all of them. The first
// stage loads while the routing runs. Between stages all CTAs synchronise, so that the whole GPU reads at one time and writes at
// another: memory loses time when it switches between reads and writes (docs/kernels.md). If that is slower, move_pieces
// (permute.cu) moves the rows.
//
// Memory-bound: (T + N) (H + S) elements; ids read once (by every CTA, if they are few), maps written once.
#include "cuda/moe/fused.cuh"

#include <cooperative_groups.h>

#include "common/status.h"
#include "cuda/moe/fused.h"
#include "cuda/moe/fused_move.cuh"
#include "cuda/moe/fused_route.cuh"

namespace pmo {
namespace cuda {
namespace {

// Counting by all CTAs together, until each knows the first rows of its slots; fills scratch.totals and scratch.before.
__device__ void count_together(const FusedWork& work, const Share& share, const Lane& me, const WarpRange& range,
                               const RoutingScratch& scratch, int32_t* cleaned) {
  const auto grid = cooperative_groups::this_grid();
  const int experts = work.num_experts, blocks = static_cast<int>(gridDim.x);
  count_own(work, share, me, range, scratch, cleaned);
  sync_routing();
  // prefix sums over the warps of the CTA, and the counts of the CTA
#pragma unroll 1
  for (int expert = threadIdx.x; expert < experts; expert += kFusedThreads) {
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kFusedWarps; ++i) {
      const int32_t count = scratch.histogram[i * experts + expert];
      scratch.histogram[i * experts + expert] = sum;
      sum += count;
    }
    __stcg(&work.counts[int64_t{expert} * blocks + blockIdx.x], sum);
  }
  grid.sync();
#pragma unroll 1
  for (int expert = threadIdx.x / kWarpSize * blocks + blockIdx.x; expert < experts; expert += kFusedWarps * blocks) {
    scan_expert(work, expert);
  }
  grid.sync();
#pragma unroll 1
  for (int expert = threadIdx.x; expert < experts; expert += kFusedThreads) {
    scratch.totals[expert] = __ldcg(&work.totals[expert]);
    scratch.before[expert] = __ldcg(&work.counts[int64_t{expert} * blocks + blockIdx.x]);
  }
  sync_routing();
}

// All maps of the CTA's tokens, by the routing threads.
__device__ void route_own(const FusedWork& work, const Share& share, int32_t* memory, uint64_t* warp_sums, int32_t* dropped) {
  const RoutingScratch scratch(memory, work);
  const Lane me(work.topk, work.num_experts);
  const WarpRange range(share.first_token, share.last_token, me.tokens_per_chunk);
  const int experts = work.num_experts, warp = threadIdx.x / kWarpSize;
  const bool local = work.counts_everything;
  int32_t* cleaned = work.cleaned_in_shared ? scratch.slots : work.slot_to_row + share.first_token * work.topk;
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * experts; i += kFusedThreads) scratch.totals[i] = 0;  // and `before`
  if (!local) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kFusedWarps * experts; i += kFusedThreads) scratch.histogram[i] = 0;
  }
  if (work.rowmap != nullptr) {
    const int64_t end = int64_t{share.last_token} * experts;
#pragma unroll 1
    for (int64_t i = int64_t{share.owned_from} * experts + threadIdx.x; i < end; i += kFusedThreads) work.rowmap[i] = -1;
  }
  sync_routing();
  if (local) {
    const int32_t slot = share.first_token * work.topk + static_cast<int32_t>(threadIdx.x);
    if (slot < share.last_token * work.topk) prefetch_prob(work, slot);
    count_everything(work, share, me, scratch);
    sync_routing();
  } else {
    count_together(work, share, me, range, scratch, cleaned);
  }
  scan_segments(work, scratch, warp_sums);
  if (local) {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < experts; expert += kFusedThreads) scratch.before[expert] += scratch.starts[expert];
    sync_routing();
    if (warp == 0) {  // one warp: the CTA has few tokens
      place_own(work, share, me, WarpRange{share.first_token, share.last_token}, scratch.before, nullptr, scratch.slots);
    }
  } else {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < experts; expert += kFusedThreads) {
      const int32_t first = scratch.starts[expert] + scratch.before[expert];
#pragma unroll
      for (int i = 0; i < kFusedWarps; ++i) scratch.histogram[i * experts + expert] += first;
    }
    sync_routing();
    place_own(work, share, me, range, scratch.histogram + warp * experts, cleaned, nullptr);
  }
  if (blockIdx.x == gridDim.x - 1) write_counts(work, scratch, dropped);
  write_padding(work, scratch);
}

// The rows that route_own wrote for the CTA's tokens.
__device__ BlockRows routed_rows(const FusedWork& work, const Share& share, int32_t* memory) {
  if (work.counts_everything) return {RoutingScratch(memory, work).slots, share.first_token};
  return {work.token_rows != nullptr ? work.token_rows : work.slot_to_row, 0};
}

template <bool kRoute, Move kMove>
__global__ void __launch_bounds__(kBlockThreads, kMove == Move::kNone ? kBlocksPerSmWithoutRows : kBlocksPerSmWithRows)
    fused(const __grid_constant__ FusedWork work, int32_t stage_bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barrier;
  __shared__ uint64_t warp_sums[kFusedWarps];
  __shared__ int32_t dropped;
  const Share share(work);
  const bool loader = threadIdx.x >= kFusedThreads;
  int32_t* scratch = reinterpret_cast<int32_t*>(shared + stage_bytes);

  BlockRows block_rows = {work.slot_to_row, 0};
  if (kRoute && !loader) {
    route_own(work, share, scratch, warp_sums, &dropped);
  } else if (kRoute && !work.counts_everything) {
    // Row loads would slow down the exchange of counts, so they start after both grid barriers.
    cooperative_groups::this_grid().sync();
    cooperative_groups::this_grid().sync();
  }
  if (kMove != Move::kNone && loader) {
    if (threadIdx.x == kFusedThreads) bulk_mbarrier_init(&barrier);
    __syncwarp();
    load_stage(work, Stage(work, share, 0, shared), &barrier);
  } else if (!kRoute && (work.fill_rows || work.fill_scales)) {
    zero_padding_rows(work);
  }
  __syncthreads();
  if (kRoute) block_rows = routed_rows(work, share, scratch);
  if constexpr (kMove != Move::kNone) move_stages<kMove == Move::kBulk>(work, share, shared, block_rows, &barrier);
}

template <bool kRoute, Move kMove>
int launch_plan(const FusedPlan& plan, int device, int64_t most_shared, const FusedWork& work, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  const auto kernel = fused<kRoute, kMove>;
  if (const int status = limit.raise(kernel, device, static_cast<int>(most_shared))) return status;
  const Grid grid = {static_cast<unsigned>(plan.blocks), kBlockThreads, static_cast<size_t>(plan.shared_bytes), plan.cooperative};
  const cudaError_t error = try_launch(kernel, grid, stream, work, static_cast<int32_t>(plan.stage_bytes));
  if (error == cudaErrorCooperativeLaunchTooLarge ||
      error == cudaErrorNotSupported) {  // this process may use only a part of the GPU
    forget(error);
    return kNotLaunched;
  }
  return cuda_status(error, "fused");
}

template <bool kRoute>
int launch_move(const FusedPlan& plan, int device, int64_t most_shared, const FusedWork& work, cudaStream_t stream) {
  switch (plan.move) {
    case Move::kBulk:
      return launch_plan<kRoute, Move::kBulk>(plan, device, most_shared, work, stream);
    case Move::kThreads:
      return launch_plan<true, Move::kThreads>(plan, device, most_shared, work, stream);
    default:
      return launch_plan<true, Move::kNone>(plan, device, most_shared, work, stream);
  }
}

void describe_routing(const FusedRouting& routing, FusedWork* work) {
  const pmo_route_params& p = *routing.params;
  work->num_experts = static_cast<int32_t>(p.num_experts);
  work->padding_alignment = static_cast<int32_t>(p.padding_alignment);
  work->ids = routing.cleaned_ids != nullptr ? routing.cleaned_ids : p.routing;
  work->ids_are_64_bit = routing.cleaned_ids == nullptr && p.routing_kind == PMO_ROUTING_IDS64;
  work->probs_by_expert = p.routing_kind == PMO_ROUTING_MASK;
  work->first_only = work->probs_by_expert || p.duplicates == PMO_DUPLICATES_FIRST;
  work->probs = p.probs;
  work->slot_to_row = routing.slot_to_row;
  work->routed_per_expert = p.routed_per_expert;
  work->token_rows = p.token_rows;
  work->row_to_token = p.row_to_token;
  work->row_to_slot = p.row_to_slot;
  work->row_to_expert = p.row_to_expert;
  work->row_probs = p.row_probs;
  work->tokens_per_expert = p.tokens_per_expert;
  work->expert_offsets = p.expert_offsets;
  work->overflow = p.overflow;
  work->rowmap = p.rowmap;
  work->counts = routing.ints;
  work->totals = routing.ints + kMaxBlocks * p.num_experts;
}

void describe_rows(const pmo_permute_params& p, FusedWork* work) {
  const RowArray rows = rows_of(p), scales = scales_of(p);
  work->x = rows.source;
  work->rows = rows.target;
  work->scale = scales.source;
  work->row_scales = scales.target;
  work->x_stride = rows.source_stride;
  work->row_bytes = static_cast<int32_t>(rows.row_bytes);
  work->scale_bytes = static_cast<int32_t>(scales.row_bytes);
  work->scale_stride = scales.source_stride;
  work->fill_rows = rows.fill;
  work->fill_scales = scales.fill;
  work->first_row = static_cast<int32_t>(p.first_row);
  work->rows_end = p.rows_end;
}

template <typename Params>
void set_sizes(const Params& p, FusedSizes* sizes) {
  sizes->num_tokens = p.num_tokens;
  sizes->topk = p.topk;
  sizes->num_rows = p.num_rows;
}

}  // namespace

bool fused_routes(const pmo_route_params& p) {
  return p.topk >= 1 && p.topk <= kWarpSize && p.num_tokens >= 1 && p.num_experts <= kMaxFusedExperts &&
         p.num_tokens * p.topk + p.num_experts * p.padding_alignment <= kMaxIndex;
}

int64_t fused_workspace_ints(int64_t num_experts) { return num_experts <= kMaxFusedExperts ? (kMaxBlocks + 1) * num_experts : 0; }

bool fused_moves(const pmo_permute_params& p) {
  const RowArray rows = rows_of(p), scales = scales_of(p);
  if (rows.row_bytes == 0 || rows.row_bytes > kMaxIndex || p.num_tokens < 1 || p.topk < 1 || p.num_rows < 1) return false;
  // a stage holds a token's scales whole
  return widest_access(rows, p.num_tokens) == 16 && scales.row_bytes <= 16384 && widest_access(scales, p.num_tokens) == 16;
}

int launch_fused(const FusedRouting* routing, const pmo_permute_params* permute, cudaStream_t stream) {
  FusedWork work = {};
  FusedSizes sizes;
  if (routing != nullptr) {
    describe_routing(*routing, &work);
    set_sizes(*routing->params, &sizes);
    sizes.num_experts = routing->params->num_experts;
    sizes.has_slot_to_row = routing->slot_to_row != nullptr;
  }
  if (permute != nullptr) {
    describe_rows(*permute, &work);
    set_sizes(*permute, &sizes);
    sizes.row_bytes = work.row_bytes;
    sizes.scale_bytes = work.scale_bytes;
    sizes.fill = work.fill_rows || work.fill_scales;
  }
  work.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  work.topk = static_cast<int32_t>(sizes.topk);
  work.num_rows = static_cast<int32_t>(sizes.num_rows);
  if (routing != nullptr) {
    const FewSlotsPlan few = plan_few_slots(sizes, routing->params->padding_alignment);
    if (few.fits) {
      work.slot_to_row = routing->params->slot_to_row;  // not the workspace, which may hold the ids
      return launch_few_slots(work, few, stream);
    }
  } else {
    work.slot_to_row = const_cast<int32_t*>(permute->slot_to_row);
    work.row_to_token = const_cast<int32_t*>(permute->row_to_token);
  }
  int device = 0;
  DeviceLimits limits;
  if (const int status = current_device(&device, &limits)) return status;
  const FusedPlan plan = plan_fused(limits, sizes);
  if (!plan.fits) return kNotLaunched;
  work.counts_everything = plan.counts_everything;
  work.cleaned_in_shared = plan.cleaned_in_shared;
  work.pieces_per_token = static_cast<int32_t>(plan.pieces_per_token);
  work.piece_bytes = static_cast<int32_t>(plan.piece_bytes);
  work.pieces_per_stage = static_cast<int32_t>(plan.pieces_per_stage);
  work.num_stages = static_cast<int32_t>(plan.num_stages);
  const int64_t most_shared = shared_of_kernel(limits);
  return routing != nullptr ? launch_move<true>(plan, device, most_shared, work, stream)
                            : launch_move<false>(plan, device, most_shared, work, stream);
}

}  // namespace cuda
}  // namespace pmo
