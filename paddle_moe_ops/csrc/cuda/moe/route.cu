// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing in several launches: a stable counting sort of slots by expert, without atomics on positions.
//
// Up to 32 slots per token and 1024 experts the fused kernel (fused.cu) writes the maps in one launch. This file serves all other
// sizes, and the counts and checks of pmo_route_count_cuda. The slots, in flat order, are cut into tiles of whole tokens; one
// warp owns a tile. Passes:
//   1. clean: a thread per slot (a warp per token for a mask) writes the cleaned id, -1 = the slot has no row
//   2. count: a warp per tile counts its experts
//   3. scan:  a warp per expert computes exclusive prefix sums over the tiles; one CTA scans the padded segments
//   4. place: a warp per tile assigns rows, 32 slots at a time; slots with equal experts in a warp rank by lane (match_any), so
//     rows follow the flat slot order for any schedule
//   5. sort:  a thread per slot finds its position among the token's rows
// Passes 1 to 3 belong to pmo_route_count_cuda, 4 and 5 to pmo_route_cuda.
//
// Workspace: pmo_route_findings, int32 [T, K] cleaned ids, int64 [tiles, E] counts, int64 [E + 1] starts, and the counters of the
// fused kernel.
//
// Memory-bound: ids read once, cleaned ids written once and read three times, maps written once; [tiles, E] counts twice.
#include <climits>

#include "common/checks.h"
#include "common/ids.h"
#include "common/padding.h"
#include "cuda/moe/findings.cuh"
#include "cuda/moe/fused.h"
#include "cuda/warp.cuh"
#include "pmo/permute.h"
#include "pmo/route.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMinSlotsPerTile = 256;
constexpr int64_t kMaxTiles = 2048;
constexpr int kScanThreads = 1024;

// Tiles of slots and pointers into the workspace; passed to kernels by value.
struct RouteTiles {
  int64_t num_tokens, topk, num_experts, tokens_per_tile, num_tiles;
  pmo_route_findings* findings;
  int32_t* ids;     // [T, K]
  int64_t* before;  // [tiles, E] counts of the tile, then of all tiles before it, then (while placing) of the next slot
  int64_t* starts;  // [E + 1] padded, not clamped
  int32_t* fused_ints;
  int64_t bytes;

  explicit RouteTiles(const pmo_route_params& p) : num_tokens(p.num_tokens), topk(p.topk), num_experts(p.num_experts) {
    const int64_t slots = num_tokens * topk;
    int64_t slots_per_tile = divide_up(slots, kMaxTiles);
    if (slots_per_tile < kMinSlotsPerTile) slots_per_tile = kMinSlotsPerTile;
    tokens_per_tile = topk == 0 ? 1 : divide_up(slots_per_tile, topk);
    num_tiles = divide_up(num_tokens, tokens_per_tile);
    if (num_tiles == 0) num_tiles = 1;
    Workspace workspace(p.workspace);
    findings = workspace.take<pmo_route_findings>(1);
    ids = workspace.take<int32_t>(slots);
    before = workspace.take<int64_t>(num_tiles * num_experts);
    starts = workspace.take<int64_t>(num_experts + 1);
    fused_ints = workspace.take<int32_t>(fused_workspace_ints(num_experts));
    bytes = workspace.used();
  }

  __device__ int64_t tile_begin(int64_t tile) const { return tile * tokens_per_tile * topk; }
  __device__ int64_t tile_end(int64_t tile) const {
    const int64_t end = (tile + 1) * tokens_per_tile * topk;
    const int64_t slots = num_tokens * topk;
    return end < slots ? end : slots;
  }
};

__global__ void reset_findings(pmo_route_findings* findings) { *findings = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0, PMO_NOWHERE}; }

template <typename Id>
__global__ void clean_ids(RouteTiles tiles, const Id* ids, const float* probs, bool first_only) {
  const int64_t slots = tiles.num_tokens * tiles.topk;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += int64_t{gridDim.x} * kThreads) {
    const int64_t id = ids[slot];
    int32_t cleaned = -1;
    if (id >= 0 && id < tiles.num_experts) {
      cleaned = static_cast<int32_t>(id);
      if (first_only) {
        for (int64_t earlier = slot / tiles.topk * tiles.topk; earlier < slot; ++earlier) {
          if (ids[earlier] != id) continue;
          cleaned = -1;
          note_first(&tiles.findings->duplicate_place, slot);
          break;
        }
      }
      if (cleaned >= 0 && probs != nullptr && isnan(probs[slot])) note_first(&tiles.findings->nan_place, slot);
    } else if (id != -1) {
      note_first(&tiles.findings->bad_place, slot);
    }
    tiles.ids[slot] = cleaned;
  }
}

// A warp per token: lanes test 32 experts at a time and rank the set ones by ballot.
__global__ void clean_mask(RouteTiles tiles, const uint8_t* mask, const float* probs) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t token = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; token < tiles.num_tokens;
       token += int64_t{gridDim.x} * kWarps) {
    int32_t* ids = tiles.ids + token * tiles.topk;
    int64_t set = 0;
    for (int64_t begin = 0; begin < tiles.num_experts; begin += kWarpSize) {
      const int64_t expert = begin + lane;
      const int64_t flat = token * tiles.num_experts + expert;
      const bool is_set = expert < tiles.num_experts && mask[flat] != 0;
      const unsigned lanes = __ballot_sync(kAllLanes, is_set);
      const int64_t rank = set + __popc(lanes & ((1u << lane) - 1));
      if (is_set && rank < tiles.topk) {
        ids[rank] = static_cast<int32_t>(expert);
        if (probs != nullptr && isnan(probs[flat])) note_first(&tiles.findings->nan_place, flat);
      }
      set += __popc(lanes);
    }
    for (int64_t slot = set + lane; slot < tiles.topk; slot += kWarpSize) ids[slot] = -1;
    if (lane == 0 && set > tiles.topk) note_first(&tiles.findings->bad_place, token);
  }
}

// Adds the values at the places that the cleaning found; one thread.
template <typename Id>
__global__ void complete_findings(RouteTiles tiles, const Id* ids) {
  pmo_route_findings& found = *tiles.findings;
  if (found.bad_place != PMO_NOWHERE) found.bad_value = ids[found.bad_place];
  if (found.duplicate_place != PMO_NOWHERE) {
    found.duplicate_expert = ids[found.duplicate_place];
    found.duplicate_first = found.duplicate_place / tiles.topk * tiles.topk;
    while (ids[found.duplicate_first] != found.duplicate_expert) ++found.duplicate_first;
  }
}

__global__ void complete_mask_findings(RouteTiles tiles, const uint8_t* mask) {
  pmo_route_findings& found = *tiles.findings;
  if (found.bad_place == PMO_NOWHERE) return;
  found.bad_value = 0;
  for (int64_t expert = 0; expert < tiles.num_experts; ++expert) {
    found.bad_value += mask[found.bad_place * tiles.num_experts + expert] != 0;
  }
}

// Calls visit(slot, expert, rank) for every slot of the warp's tile; rank = counter[expert] plus the slots of this expert before
// it in the tile. The lanes of a warp see each other's updates of the counter.
template <typename Visit>
__device__ void walk_tile(const RouteTiles& tiles, int64_t tile, int64_t* counter, Visit visit) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t end = tiles.tile_end(tile);
  for (int64_t begin = tiles.tile_begin(tile); begin < end; begin += kWarpSize) {
    const int64_t slot = begin + lane;
    const int32_t expert = slot < end ? tiles.ids[slot] : -1;
    const unsigned peers = __match_any_sync(kAllLanes, expert);
    const unsigned before = peers & ((1u << lane) - 1);
    int64_t base = 0;
    if (expert >= 0) base = counter[expert];
    __syncwarp();
    if (expert >= 0 && before == 0) counter[expert] = base + __popc(peers);
    __syncwarp();
    if (slot < end) visit(slot, expert, base + __popc(before));
  }
}

__global__ void count_tiles(RouteTiles tiles) {
  for (int64_t tile = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; tile < tiles.num_tiles;
       tile += int64_t{gridDim.x} * kWarps) {
    walk_tile(tiles, tile, tiles.before + tile * tiles.num_experts, [](int64_t, int32_t, int64_t) {});
  }
}

// Exclusive prefix sums of counts over the tiles, a warp per expert. Loads of the next 32 tiles overlap the scan of the current
// ones.
__global__ void scan_tiles(RouteTiles tiles, int32_t* routed_per_expert) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t experts = tiles.num_experts;
  for (int64_t expert = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; expert < experts;
       expert += int64_t{gridDim.x} * kWarps) {
    const auto count_of = [&](int64_t tile) { return tile < tiles.num_tiles ? tiles.before[tile * experts + expert] : 0; };
    int64_t total = 0, next = count_of(lane);
    for (int64_t tile = lane; tile < tiles.num_tiles + lane; tile += kWarpSize) {
      const int64_t count = next;
      next = count_of(tile + kWarpSize);
      int64_t inclusive = count;
      for (int step = 1; step < kWarpSize; step *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      if (tile < tiles.num_tiles) tiles.before[tile * experts + expert] = total + inclusive - count;
      total += __shfl_sync(kAllLanes, inclusive, kWarpSize - 1);
    }
    if (lane == 0) routed_per_expert[expert] = static_cast<int32_t>(total);
  }
}

// Scan of the padded totals by one CTA; a thread has a contiguous range of experts.
__global__ void scan_experts(RouteTiles tiles, int64_t padding_alignment, const int32_t* routed_per_expert) {
  __shared__ int64_t partial[kScanThreads];
  const int64_t experts = tiles.num_experts;
  const int64_t per_thread = divide_up(experts, kScanThreads);
  const int64_t begin = min(experts, threadIdx.x * per_thread);
  const int64_t end = min(experts, begin + per_thread);
  const auto padded = [&](int64_t expert) { return segment_rows(int64_t{routed_per_expert[expert]}, padding_alignment); };
  int64_t sum = 0;
  for (int64_t expert = begin; expert < end; ++expert) sum += padded(expert);
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < kScanThreads; step *= 2) {
    const int64_t add = threadIdx.x >= step ? partial[threadIdx.x - step] : 0;
    __syncthreads();
    partial[threadIdx.x] += add;
    __syncthreads();
  }
  int64_t row = partial[threadIdx.x] - sum;
  for (int64_t expert = begin; expert < end; ++expert) {
    tiles.starts[expert] = row;
    row += padded(expert);
  }
  if (threadIdx.x == kScanThreads - 1) tiles.starts[experts] = partial[kScanThreads - 1];
}

__global__ void clamp_experts(RouteTiles tiles, int64_t num_rows, const int32_t* routed_per_expert, int32_t* tokens_per_expert,
                              int32_t* expert_offsets) {
  for (int64_t expert = blockIdx.x * int64_t{kThreads} + threadIdx.x; expert <= tiles.num_experts;
       expert += int64_t{gridDim.x} * kThreads) {
    const int64_t start = tiles.starts[expert];
    if (expert_offsets != nullptr) expert_offsets[expert] = static_cast<int32_t>(within_buffer(start, num_rows));
    if (tokens_per_expert == nullptr || expert == tiles.num_experts) continue;
    tokens_per_expert[expert] = static_cast<int32_t>(rows_inside(start, int64_t{routed_per_expert[expert]}, num_rows));
  }
}

// Number of slots beyond the end of the buffer: routed rows minus rows inside. One CTA, a fixed tree.
__global__ void count_overflow(RouteTiles tiles, int64_t num_rows, const int32_t* routed_per_expert, int32_t* overflow) {
  __shared__ int64_t partial[kThreads];
  int64_t dropped = 0;
  for (int64_t expert = threadIdx.x; expert < tiles.num_experts; expert += kThreads) {
    const int64_t routed = routed_per_expert[expert];
    dropped += routed - rows_inside(tiles.starts[expert], routed, num_rows);
  }
  partial[threadIdx.x] = dropped;
  __syncthreads();
  for (int width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) *overflow = static_cast<int32_t>(partial[0]);
}

struct PlaceOutputs {
  int64_t num_rows;
  const float* probs;
  bool mask;
  int32_t *slot_to_row, *row_to_token, *row_to_slot, *row_to_expert, *rowmap;
  float* row_probs;
};

__global__ void place_tiles(RouteTiles tiles, PlaceOutputs out) {
  for (int64_t tile = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; tile < tiles.num_tiles;
       tile += int64_t{gridDim.x} * kWarps) {
    walk_tile(tiles, tile, tiles.before + tile * tiles.num_experts, [&](int64_t slot, int32_t expert, int64_t rank) {
      const int64_t row = expert >= 0 ? tiles.starts[expert] + rank : -1;
      const bool placed = expert >= 0 && row < out.num_rows;
      // The rows overwrite the cleaned ids, for the sort.
      tiles.ids[slot] = placed ? static_cast<int32_t>(row) : -1;
      if (out.slot_to_row != nullptr) out.slot_to_row[slot] = placed ? static_cast<int32_t>(row) : -1;
      if (!placed) return;
      const int64_t token = slot / tiles.topk;
      if (out.row_to_token != nullptr) out.row_to_token[row] = static_cast<int32_t>(token);
      if (out.row_to_slot != nullptr) out.row_to_slot[row] = static_cast<int32_t>(slot);
      if (out.row_to_expert != nullptr) out.row_to_expert[row] = expert;
      if (out.row_probs != nullptr) out.row_probs[row] = out.probs[out.mask ? token * tiles.num_experts + expert : slot];
      // several slots with one expert: the last row, the highest one
      if (out.rowmap != nullptr) atomicMax(&out.rowmap[token * tiles.num_experts + expert], static_cast<int32_t>(row));
    });
  }
}

// Rows ascending, then -1: each slot counts the entries that precede it.
__global__ void sort_token_rows(RouteTiles tiles, int32_t* token_rows) {
  const int64_t slots = tiles.num_tokens * tiles.topk;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += int64_t{gridDim.x} * kThreads) {
    const int64_t begin = slot / tiles.topk * tiles.topk;
    const int32_t row = tiles.ids[slot];
    int64_t place = 0;
    for (int64_t other = begin; other < begin + tiles.topk; ++other) {
      const int32_t other_row = tiles.ids[other];
      place += row >= 0 ? (other_row >= 0 && other_row < row) : (other_row >= 0 || other < slot);
    }
    token_rows[begin + place] = row;
  }
}

int check_workspace(const pmo_route_params& p, const RouteTiles& tiles) {
  PMO_REQUIRE(p.workspace != nullptr && reinterpret_cast<uintptr_t>(p.workspace) % 8 == 0 && p.workspace_bytes >= tiles.bytes,
              "workspace", "8-byte aligned and as large as pmo_route_cuda_workspace_bytes says");
  return PMO_OK;
}

template <typename Id>
int launch_clean_ids(const pmo_route_params& p, const Id* ids, const RouteTiles& tiles, cudaStream_t stream) {
  const bool first_only = p.duplicates == PMO_DUPLICATES_FIRST;
  const Grid grid = {grid_for(p.num_tokens * p.topk, kThreads), kThreads};
  const int status = launch("clean_ids", clean_ids<Id>, grid, stream, tiles, ids, p.probs, first_only);
  if (status != PMO_OK || p.checks == 0) return status;
  return launch("complete_findings", complete_findings<Id>, {1, 1}, stream, tiles, ids);
}

int launch_clean_mask(const pmo_route_params& p, const RouteTiles& tiles, cudaStream_t stream) {
  const uint8_t* mask = static_cast<const uint8_t*>(p.routing);
  const int status = launch("clean_mask", clean_mask, {grid_for(p.num_tokens, kWarps), kThreads}, stream, tiles, mask, p.probs);
  if (status != PMO_OK || p.checks == 0) return status;
  return launch("complete_mask_findings", complete_mask_findings, {1, 1}, stream, tiles, mask);
}

// Writes cleaned ids to the workspace: -1 for slots without a row.
int clean(const pmo_route_params& p, const RouteTiles& tiles, cudaStream_t stream) {
  if (const int status = launch("reset_findings", reset_findings, {1, 1}, stream, tiles.findings)) return status;
  if (p.num_tokens * p.topk == 0) return PMO_OK;
  if (p.routing_kind == PMO_ROUTING_MASK) return launch_clean_mask(p, tiles, stream);
  return with_ids(p.routing, p.routing_kind, [&](const auto* ids) { return launch_clean_ids(p, ids, tiles, stream); });
}

int count(const pmo_route_params& p, cudaStream_t stream) {
  if (const int status = check_route_sizes(p)) return status;
  if (const int status = check_routing_arrays(p)) return status;
  const RouteTiles tiles(p);
  if (const int status = check_workspace(p, tiles)) return status;
  if (const int status = clean(p, tiles, stream)) return status;
  PMO_CUDA(cudaMemsetAsync(tiles.before, 0, tiles.num_tiles * tiles.num_experts * sizeof(int64_t), stream));
  const Grid for_tiles = {grid_for(tiles.num_tiles, kWarps), kThreads};
  if (const int status = launch("count_tiles", count_tiles, for_tiles, stream, tiles)) return status;
  const Grid for_experts = {grid_for(tiles.num_experts, kWarps), kThreads};
  if (const int status = launch("scan_tiles", scan_tiles, for_experts, stream, tiles, p.routed_per_expert)) return status;
  return launch("scan_experts", scan_experts, {1, kScanThreads}, stream, tiles, p.padding_alignment, p.routed_per_expert);
}

// One launch, with the rows of `permute` if it is given. `cleaned`: ids are those in the workspace, otherwise the caller's.
int route_fused(const pmo_route_params& p, const RouteTiles& tiles, bool cleaned, const pmo_permute_params* permute,
                cudaStream_t stream) {
  // CTAs read each other's ids while they write rows, so cleaned ids and rows must not share memory.
  const bool may_use_ids = !cleaned || p.num_tokens * p.topk > kMaxSlotsReadByAll;
  const FusedRouting routing = {&p, cleaned ? tiles.ids : nullptr,
                                p.slot_to_row != nullptr ? p.slot_to_row
                                : may_use_ids            ? tiles.ids
                                                         : nullptr,
                                tiles.fused_ints};
  return launch_fused(&routing, permute, stream);
}

int route(const pmo_route_params& p, cudaStream_t stream) {
  if (const int status = check_route_sizes(p)) return status;
  if (const int status = check_route_outputs(p)) return status;
  PMO_REQUIRE_ARRAY(p.routed_per_expert, p.num_experts, "routed_per_expert");
  const RouteTiles tiles(p);
  if (const int status = check_workspace(p, tiles)) return status;
  if (fused_routes(p)) {
    const int status = route_fused(p, tiles, true, nullptr, stream);
    if (status != kNotLaunched) return status;
  }
  const Grid for_experts = {grid_for(p.num_experts + 1, kThreads), kThreads};
  if (const int status = launch("clamp_experts", clamp_experts, for_experts, stream, tiles, p.num_rows, p.routed_per_expert,
                                p.tokens_per_expert, p.expert_offsets)) {
    return status;
  }
  if (p.overflow != nullptr) {
    const int status =
        launch("count_overflow", count_overflow, {1, kThreads}, stream, tiles, p.num_rows, p.routed_per_expert, p.overflow);
    if (status != PMO_OK) return status;
  }
  // -1 in every map, 0.0 in the probabilities: rows that place_tiles does not write are padding
  const size_t row_map_bytes = p.num_rows * sizeof(int32_t);
  for (int32_t* map : {p.row_to_token, p.row_to_slot, p.row_to_expert}) {
    if (map != nullptr && p.num_rows > 0) PMO_CUDA(cudaMemsetAsync(map, 0xFF, row_map_bytes, stream));
  }
  if (p.row_probs != nullptr && p.num_rows > 0) PMO_CUDA(cudaMemsetAsync(p.row_probs, 0, row_map_bytes, stream));
  if (p.num_tokens == 0) return PMO_OK;
  if (p.rowmap != nullptr) {
    PMO_CUDA(cudaMemsetAsync(p.rowmap, 0xFF, p.num_tokens * p.num_experts * sizeof(int32_t), stream));
  }
  if (p.topk == 0) return PMO_OK;
  const PlaceOutputs outputs = {p.num_rows,      p.probs,        p.routing_kind == PMO_ROUTING_MASK,
                                p.slot_to_row,   p.row_to_token, p.row_to_slot,
                                p.row_to_expert, p.rowmap,       p.row_probs};
  const Grid for_tiles = {grid_for(tiles.num_tiles, kWarps), kThreads};
  const int status = launch("place_tiles", place_tiles, for_tiles, stream, tiles, outputs);
  if (status != PMO_OK || p.token_rows == nullptr) return status;
  const Grid for_slots = {grid_for(p.num_tokens * p.topk, kThreads), kThreads};
  return launch("sort_token_rows", sort_token_rows, for_slots, stream, tiles, p.token_rows);
}

int route_permute(const pmo_route_params& p, const pmo_permute_params* permute, cudaStream_t stream) {
  if (const int status = check_route_sizes(p)) return status;
  if (const int status = check_routing_arrays(p)) return status;
  if (const int status = check_route_outputs(p)) return status;
  if (permute != nullptr) {
    if (const int status = check_route_permute(p, *permute)) return status;
  }
  if (fused_routes(p)) {
    const RouteTiles tiles(p);
    if (const int status = check_workspace(p, tiles)) return status;
    const bool mask = p.routing_kind == PMO_ROUTING_MASK;
    if (mask) {
      if (const int status = clean(p, tiles, stream)) return status;
    }
    const bool together = permute != nullptr && fused_moves(*permute);
    int status = together ? route_fused(p, tiles, mask, permute, stream) : kNotLaunched;
    if (status != kNotLaunched) return status;
    status = route_fused(p, tiles, mask, nullptr, stream);
    if (status == PMO_OK) return permute == nullptr ? PMO_OK : pmo_permute_cuda(permute, stream);
    if (status != kNotLaunched) return status;
  }
  if (const int status = count(p, stream)) return status;
  if (const int status = route(p, stream)) return status;
  return permute == nullptr ? PMO_OK : pmo_permute_cuda(permute, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int64_t pmo_route_cuda_workspace_bytes(const pmo_route_params* params) {
  if (params == nullptr || pmo::check_route_sizes(*params) != PMO_OK) return 0;
  pmo_route_params sizes_only = *params;
  sizes_only.workspace = nullptr;
  return pmo::cuda::RouteTiles(sizes_only).bytes;
}

extern "C" int pmo_route_count_cuda(const pmo_route_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::count);
}

extern "C" int pmo_route_cuda(const pmo_route_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::route);
}

extern "C" int pmo_route_permute_cuda(const pmo_route_params* route, const pmo_permute_params* permute, void* stream) {
  return pmo::cuda::run_cuda(route, stream, [&](const pmo_route_params& p, cudaStream_t cuda_stream) {
    return pmo::cuda::route_permute(p, permute, cuda_stream);
  });
}
