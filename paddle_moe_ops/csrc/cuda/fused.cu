// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing and permutation in one launch.
//
// Blocks: two per multiprocessor at most, all resident at once (a cooperative launch wherever they wait for each other). Each owns a
// contiguous range of tokens, or of pieces of rows when there are fewer tokens than blocks.
//
// Routing, a stable counting sort of slots by expert without atomics on positions: a block counts its slots, the blocks exchange
// counts through [blocks, E] in global memory with two waits, and every block then knows where the rows of its slots begin. With few
// slots every block counts them all and no block waits. Ranks within a block follow from __match_any_sync over whole tokens.
//
// Moving: a block stages source rows in shared memory by bulk copies, as many as fit (about 110 KiB), and writes each to its rows: long
// rows by bulk copies again, short ones by ordinary stores, if one stage holds all of them. The first stage is on its way while the
// routing runs. Between stages all blocks wait for each other: memory that changes between reading and writing loses time, so the whole
// GPU reads at one time and writes at another (docs/kernel_notes.md). Where that does not pay, move_pieces (permute.cu) moves the rows.
//
// Bytes moved: (T + N) * (H + S) elements; ids read once (by every block, if they are few), maps written once.
#include "cuda/fused.cuh"

#include <cooperative_groups.h>

#include <algorithm>

#include "common/status.h"
#include "cuda/fused.h"
#include "cuda/fused_move.cuh"
#include "cuda/fused_route.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 2;
// Without rows, and with so many slots that blocks are busy with them.
constexpr int kRoutingBlocks = kMultiprocessorThreads < 3 * kBlockThreads ? kBlocksPerMultiprocessor : 3;
constexpr int64_t kManySlots = int64_t{1} << 20;
constexpr int64_t kMaxLocalSlots = 2048;   // of one block, when it keeps its rows in shared memory
constexpr int64_t kBulkStoreBytes = 4608;  // rows from here on leave by bulk copies
constexpr int64_t kMinPieceBytes = 1024;
constexpr int64_t kManyBytes = int64_t{200} << 20;
constexpr int64_t kFewRows = 4;  // per token: fewer do not make up for blocks that wait for each other

enum class Move { kNone, kThreads, kBulk };

// What blocks that count for each other do until each knows its slots' first rows; leaves totals and `before`.
__device__ void count_together(const FusedWork& work, const Share& share, const Lane& me, const WarpRange& range,
                               const RoutingScratch& scratch, int32_t* cleaned) {
  const auto grid = cooperative_groups::this_grid();
  const int experts = work.num_experts, blocks = static_cast<int>(gridDim.x);
  count_own(work, share, me, range, scratch, cleaned);
  sync_routing();
  // each warp's first slot of every expert within the block, and the block's counts
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

// All maps of the block's tokens, by the threads that route.
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
    if (warp == 0) {  // one warp: a block has few tokens
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

// Where the rows of a block's tokens stand after route_own.
__device__ TokenRows routed_rows(const FusedWork& work, const Share& share, int32_t* memory) {
  if (work.counts_everything) return {RoutingScratch(memory, work).slots, share.first_token};
  return {work.token_rows != nullptr ? work.token_rows : work.slot_to_row, 0};
}

template <bool kRoute, Move kMove>
__global__ void __launch_bounds__(kBlockThreads, kMove == Move::kNone ? kRoutingBlocks : kBlocksPerMultiprocessor)
    fused(const __grid_constant__ FusedWork work, int32_t stage_bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barrier;
  __shared__ uint64_t warp_sums[kFusedWarps];
  __shared__ int32_t dropped;
  const Share share(work);
  const bool loader = threadIdx.x >= kFusedThreads;
  int32_t* scratch = reinterpret_cast<int32_t*>(shared + stage_bytes);

  TokenRows token_rows = {work.slot_to_row, 0};
  if (kRoute && !loader) {
    route_own(work, share, scratch, warp_sums, &dropped);
  } else if (kRoute && !work.counts_everything) {
    // Rows on their way would slow down the few bytes that the blocks exchange: they start when every block knows the counts.
    cooperative_groups::this_grid().sync();
    cooperative_groups::this_grid().sync();
  }
  if (kMove != Move::kNone && loader) {
    if (threadIdx.x == kFusedThreads) init_load_barrier(&barrier);
    __syncwarp();
    load_stage(work, Stage(work, share, 0, shared), &barrier);
  } else if (!kRoute && (work.fill_rows || work.fill_scales)) {
    zero_rows_without_token(work);
  }
  __syncthreads();
  if (kRoute) token_rows = routed_rows(work, share, scratch);
  if constexpr (kMove != Move::kNone) move_stages<kMove == Move::kBulk>(work, share, shared, token_rows, &barrier);
}

struct Device {
  int multiprocessors = 0, major = 0, shared_bytes = 0, shared_per_block = 0;

  int query() {
    int device = 0;
    PMO_CUDA(cudaGetDevice(&device));
    PMO_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    PMO_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    PMO_CUDA(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    PMO_CUDA(cudaDeviceGetAttribute(&shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return PMO_OK;
  }
  int blocks(int per_multiprocessor) const { return std::min(kMaxBlocks, multiprocessors * per_multiprocessor); }
  // dynamic shared memory of a block when kBlocksPerMultiprocessor of them share a multiprocessor; 1 KiB per block is the system's
  int64_t shared_for_block() const {
    return std::min<int64_t>(shared_per_block, shared_bytes / kBlocksPerMultiprocessor - 1024) - 256;
  }
};

template <typename Kernel>
int launch(Kernel kernel, int blocks, int64_t shared, bool cooperative, const FusedWork& work, int64_t stage_bytes,
           cudaStream_t stream) {
  PMO_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cooperative ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, work, static_cast<int32_t>(stage_bytes));
  if (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported) {
    cudaGetLastError();  // the caller has another way
    return kNotLaunched;
  }
  return cuda_status(error, "the fused kernel");
}

template <bool kRoute>
int launch_move(Move move, int blocks, int64_t shared, bool cooperative, const FusedWork& work, int64_t stage_bytes,
                cudaStream_t stream) {
  switch (move) {
    case Move::kBulk:
      return launch(fused<kRoute, Move::kBulk>, blocks, shared, cooperative, work, stage_bytes, stream);
    case Move::kThreads:
      return launch(fused<true, Move::kThreads>, blocks, shared, cooperative, work, stage_bytes, stream);
    default:
      return launch(fused<true, Move::kNone>, blocks, shared, cooperative, work, stage_bytes, stream);
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
  work->counts_everything = p.num_tokens * p.topk <= kFusedSharedReads;
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

// Bytes of a row, and 0 where it is not moved.
int64_t row_bytes_of(const pmo_permute_params& p) { return p.rows == nullptr ? 0 : p.hidden * dtype_size(p.dtype); }
int64_t scale_bytes_of(const pmo_permute_params& p) {
  return p.row_scales == nullptr ? 0 : p.scale_cols * dtype_size(p.scale_dtype);
}

void describe_rows(const pmo_permute_params& p, FusedWork* work) {
  work->x = static_cast<const char*>(p.x);
  work->rows = static_cast<char*>(p.rows);
  work->scale = static_cast<const char*>(p.scale);
  work->row_scales = static_cast<char*>(p.row_scales);
  work->x_stride = p.x_row_stride * dtype_size(p.dtype);
  work->row_bytes = static_cast<int32_t>(row_bytes_of(p));
  work->scale_bytes = static_cast<int32_t>(scale_bytes_of(p));
  work->scale_stride = work->scale_bytes == 0 ? 0 : p.scale_row_stride * dtype_size(p.scale_dtype);
  work->fill_rows = (p.fill & PMO_FILL_ROWS) != 0;
  work->fill_scales = work->scale_bytes > 0 && (p.fill & PMO_FILL_SCALES) != 0;
}

}  // namespace

bool fused_routes(const pmo_route_params& p) {
  return p.topk >= 1 && p.topk <= kWarpSize && p.num_tokens >= 1 && p.num_experts <= kMaxFusedExperts &&
         p.num_tokens * p.topk + p.num_experts * p.padding_alignment <= kMaxIndex;
}

int64_t fused_workspace_ints(int64_t num_experts) { return num_experts <= kMaxFusedExperts ? (kMaxBlocks + 1) * num_experts : 0; }

bool fused_moves(const pmo_permute_params& p) {
  const int64_t row_bytes = row_bytes_of(p), scale_bytes = scale_bytes_of(p);
  if (row_bytes == 0 || row_bytes > kMaxIndex || p.num_tokens < 1 || p.topk < 1 || p.num_rows < 1) return false;
  const uintptr_t stride = p.num_tokens > 1 ? static_cast<uintptr_t>(p.x_row_stride * dtype_size(p.dtype)) : 0;
  if (widest_access({address(p.x), address(p.rows), static_cast<uintptr_t>(row_bytes), stride}) < 16) return false;
  if (scale_bytes == 0) return true;
  const uintptr_t scale_stride = p.num_tokens > 1 ? static_cast<uintptr_t>(p.scale_row_stride * dtype_size(p.scale_dtype)) : 0;
  // a token's scales are staged whole
  return scale_bytes <= 16384 &&
         widest_access({address(p.scale), address(p.row_scales), static_cast<uintptr_t>(scale_bytes), scale_stride}) == 16;
}

int launch_fused(const FusedRouting* routing, const pmo_permute_params* permute, cudaStream_t stream) {
  FusedWork work = {};
  work.pieces_per_token = 1;
  work.num_stages = 1;
  if (routing != nullptr) {
    work.num_tokens = static_cast<int32_t>(routing->params->num_tokens);
    work.topk = static_cast<int32_t>(routing->params->topk);
    work.num_rows = static_cast<int32_t>(routing->params->num_rows);
    describe_routing(*routing, &work);
  }
  if (permute != nullptr) describe_rows(*permute, &work);
  if (routing != nullptr && has_few_slots(work)) {
    work.slot_to_row = routing->params->slot_to_row;  // not the workspace, where the ids may be
    return launch_few_slots(work, stream);
  }
  Device device;
  if (const int status = device.query()) return status;
  if (permute != nullptr && device.major < 9) return kNotLaunched;
  Move move = Move::kNone;
  bool few_rows = false;
  if (permute != nullptr) {
    work.num_tokens = static_cast<int32_t>(permute->num_tokens);
    work.topk = static_cast<int32_t>(permute->topk);
    work.num_rows = static_cast<int32_t>(permute->num_rows);
    if (routing == nullptr) {
      work.slot_to_row = const_cast<int32_t*>(permute->slot_to_row);
      work.row_to_token = const_cast<int32_t*>(permute->row_to_token);
    }
    move = work.row_bytes >= kBulkStoreBytes ? Move::kBulk : Move::kThreads;
    // What loses to move_pieces (permute.cu)
    few_rows = work.num_rows < kFewRows * work.num_tokens;
    const bool small = (int64_t{work.num_tokens} + work.num_rows) * work.row_bytes < kManyBytes;
    if (routing == nullptr && (move == Move::kThreads || few_rows || small)) return kNotLaunched;
  }

  const bool many_slots = permute == nullptr && device.major >= 8 && int64_t{work.num_tokens} * work.topk >= kManySlots;
  int blocks = device.blocks(many_slots ? kRoutingBlocks : kBlocksPerMultiprocessor);
  const int64_t slots_of_block = (int64_t{work.num_tokens} / blocks + 2) * work.topk;
  if (slots_of_block > kMaxLocalSlots) work.counts_everything = false;  // many tokens for few blocks
  work.cleaned_in_shared = routing != nullptr && !work.counts_everything && slots_of_block <= kMaxLocalSlots;
  const int64_t local_slots = work.counts_everything || work.cleaned_in_shared ? slots_of_block : 0;
  // Few tokens: cut rows, so that every multiprocessor has some of the work.
  const int64_t most = std::max<int64_t>(1, work.row_bytes / kMinPieceBytes);
  int64_t pieces_per_token = std::max<int64_t>(1, std::min<int64_t>(blocks / work.num_tokens, most));
  if (routing != nullptr && !work.counts_everything) pieces_per_token = 1;  // blocks that count for each other share no token
  const bool fill = work.fill_rows || work.fill_scales;
  const int64_t scratch_bytes =
      routing == nullptr ? 0 : RoutingScratch::ints(work.num_experts, work.counts_everything, local_slots) * 4;
  int64_t stage_bytes = 0;
  if (permute != nullptr) {
    const int64_t room = (device.shared_for_block() - scratch_bytes) / 128 * 128;
    // rows longer than half a stage are cut as well
    while ((work.row_bytes + pieces_per_token - 1) / pieces_per_token + 16 + work.scale_bytes > room / 2) ++pieces_per_token;
    const int64_t piece_bytes = (work.row_bytes / pieces_per_token + 15) / 16 * 16;
    pieces_per_token = (work.row_bytes + piece_bytes - 1) / piece_bytes;
    work.piece_bytes = static_cast<int32_t>(piece_bytes);
    const int64_t pieces = work.num_tokens * pieces_per_token;
    if (!fill) blocks = static_cast<int>(std::min<int64_t>(blocks, pieces));
    const int64_t per_block = (pieces + blocks - 1) / blocks;
    const int64_t fits = room / (piece_bytes + work.scale_bytes);
    const int64_t stages = (per_block + fits - 1) / fits;
    if (pieces + per_block > kMaxIndex) return kNotLaunched;
    if (stages > 1 && (move == Move::kThreads || few_rows)) return kNotLaunched;
    work.num_stages = static_cast<int32_t>(stages);
    work.pieces_per_stage = static_cast<int32_t>((per_block + stages - 1) / stages);
    stage_bytes = (work.pieces_per_stage * (piece_bytes + work.scale_bytes) + 127) / 128 * 128;
  } else {
    blocks = static_cast<int>(std::min<int64_t>(blocks, work.num_tokens));
  }
  work.pieces_per_token = static_cast<int32_t>(pieces_per_token);
  if (routing != nullptr && !work.counts_everything && work.slot_to_row == nullptr) return kNotLaunched;
  // Blocks that share a token cannot count it between them.
  if (routing != nullptr && !work.counts_everything && pieces_per_token > 1) return kNotLaunched;
  const int64_t shared = stage_bytes + scratch_bytes;
  const bool cooperative = (routing != nullptr && !work.counts_everything) || work.num_stages > 1;
  return routing != nullptr ? launch_move<true>(move, blocks, shared, cooperative, work, stage_bytes, stream)
                            : launch_move<false>(move, blocks, shared, cooperative, work, stage_bytes, stream);
}

}  // namespace cuda
}  // namespace pmo
