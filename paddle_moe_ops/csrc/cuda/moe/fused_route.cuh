// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing part of the fused kernel (fused.cu): maps of a CTA's tokens.
#pragma once

#include <cstdint>

#include "cuda/moe/fused.cuh"

namespace pmo {
namespace cuda {

// Shared memory after the stages, routing_scratch_ints() int32 values; E experts.
struct RoutingScratch {
  int32_t* starts;     // [E + 1] first row of each segment, not clamped
  int32_t* padding;    // [E + 2] padding rows before each segment; the last entry counts those after all segments too
  int32_t* totals;     // [E]
  int32_t* before;     // [E] slots of earlier tokens, then the next row (if counts_everything)
  int32_t* histogram;  // [warps, E] slots, then the next row (unless counts_everything)
  int32_t* slots;      // of the CTA's tokens: cleaned ids (if cleaned_in_shared) or ascending rows (if counts_everything)

  __device__ RoutingScratch(int32_t* memory, const FusedWork& work) {
    const int32_t experts = work.num_experts;
    starts = memory;
    padding = starts + experts + 1;
    totals = padding + experts + 2;
    before = totals + experts;
    histogram = before + experts;
    slots = work.counts_everything ? histogram : histogram + experts * kFusedWarps;
  }
};

// A lane's position in a chunk of slots. A warp processes whole tokens, as many as fit its lanes, so that comparisons between the
// slots of a token stay within the warp.
struct Lane {
  int lane;
  int tokens_per_chunk;
  int token, k;  // token within the chunk, slot within the token
  bool used;
  unsigned earlier;           // lanes below
  unsigned of_token;          // lanes of the same token
  unsigned earlier_of_token;  // lanes of the same token below
  int expert_bits;            // bits that distinguish experts

  __device__ Lane(int topk, int num_experts) {
    lane = threadIdx.x % kWarpSize;
    tokens_per_chunk = kWarpSize / topk;
    token = lane / topk;
    k = lane - token * topk;
    used = token < tokens_per_chunk;
    earlier = (1u << lane) - 1;
    of_token = (kAllLanes >> (kWarpSize - topk)) << (lane - k);
    earlier_of_token = earlier & of_token;
    expert_bits = num_experts == 1 ? 0 : 32 - __clz(num_experts - 1);
  }
};

// Expert of a 32-bit id, or `none` if it is out of range.
__device__ inline int32_t expert_of(const FusedWork& work, uint32_t id, int32_t none) {
  return id < static_cast<uint32_t>(work.num_experts) ? static_cast<int32_t>(id) : none;
}

// Expert of a slot, without 64-bit arithmetic (unlike id_at in common/ids.h): the upper word of a 64-bit id of an expert is 0.
__device__ inline int32_t load_expert(const FusedWork& work, int32_t slot, int32_t none = -1) {
  const auto* word = static_cast<const uint32_t*>(work.ids) + (static_cast<int64_t>(slot) << work.ids_are_64_bit);
  const uint32_t low = __ldg(word), high = work.ids_are_64_bit ? __ldg(word + 1) : 0;
  return high == 0 ? expert_of(work, low, none) : none;
}

// Expert and probability of a lane's slot.
struct LoadedSlot {
  int32_t expert = -1;
  float prob = 0.0f;
};

// Calls visit(token, slot) for tokens [begin, end), chunk by chunk in ascending order, by all lanes of the warp. `slot` is the
// result of load(token), or the default for lanes without a slot. Loads run kChunksAhead chunks ahead. The visit is compiled once
// and loops are not unrolled: instructions come from memory, too, and a small kernel starts sooner.
template <typename Load, typename Visit>
__device__ inline void walk_slots(const Lane& me, int32_t begin, int32_t end, int32_t step, Load load, Visit visit) {
  LoadedSlot slots[kChunksAhead];
#pragma unroll
  for (int i = 0; i < kChunksAhead; ++i) {
    const int32_t token = begin + i * step + me.token;
    if (me.used && token < end) slots[i] = load(token);
  }
#pragma unroll 1
  for (int32_t chunk = begin; chunk < end; chunk += step) {
    const LoadedSlot slot = slots[0];
#pragma unroll
    for (int i = 0; i + 1 < kChunksAhead; ++i) slots[i] = slots[i + 1];
    slots[kChunksAhead - 1] = {};
    const int32_t token = chunk + kChunksAhead * step + me.token;
    if (me.used && token < end) slots[kChunksAhead - 1] = load(token);
    visit(chunk + me.token, slot);
  }
}

// Mask of lanes whose slot names the same expert; `bits` bits distinguish experts.
__device__ inline unsigned same_expert(int32_t expert, int bits) {
  unsigned same = __ballot_sync(kAllLanes, expert >= 0);
#pragma unroll 1
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = (expert >> bit & 1) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// The expert, or -1 if an earlier slot of the token names it.
__device__ inline int32_t without_repeats(const Lane& me, const FusedWork& work, int32_t expert) {
  if (!work.first_only) return expert;
  const unsigned same = same_expert(expert, me.expert_bits);
  return (same & me.earlier_of_token) != 0 ? -1 : expert;
}

// Masks of lanes whose slot names the same expert and a smaller one.
struct Peers {
  unsigned same, smaller;

  __device__ Peers(int32_t expert, int bits) : same(__ballot_sync(kAllLanes, expert >= 0)), smaller(0) {
#pragma unroll 1
    for (int bit = bits - 1; bit >= 0; --bit) {
      const bool set = (expert >> bit & 1) != 0;
      const unsigned lanes = __ballot_sync(kAllLanes, set);
      if (set) smaller |= same & ~lanes;
      same &= set ? lanes : ~lanes;
    }
  }
};

// Inclusive prefix sum over the CTA of two 32-bit values in one word; `total` receives the sum.
__device__ inline uint64_t scan_block(uint64_t value, uint64_t* warp_sums, uint64_t* total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = value;
  sync_routing();
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kFusedWarps; ++i) {
    const uint64_t warp_sum = warp_sums[i];
    if (i < warp) value += warp_sum;
    sum += warp_sum;
  }
  *total = sum;
  return value;
}

// Tokens [begin, end) of a warp: whole chunks, warps in slot order.
struct WarpRange {
  int32_t begin, end;
  __device__ WarpRange(int32_t begin, int32_t end) : begin(begin), end(end) {}
  __device__ WarpRange(int32_t first, int32_t last, int tokens_per_chunk) {
    const int32_t chunks = divide_up(last - first, tokens_per_chunk);
    const int32_t per_warp = divide_up(chunks, kFusedWarps) * tokens_per_chunk;
    begin = min(last, first + static_cast<int32_t>(threadIdx.x / kWarpSize) * per_warp);
    end = min(last, begin + per_warp);
  }
};

// Adds 1 to the expert's counter in shared memory for every lane with `counts`; all lanes take part. If all lanes name one
// expert, one lane adds the sum. The 1 is hidden from the compiler: an atomic increment by a known 1 becomes an instruction that
// serialises distinct addresses of a warp.
__device__ inline void count_slots(int32_t* counters, int32_t expert, bool counts) {
  const unsigned counting = __ballot_sync(kAllLanes, counts);
  if (!counts) return;
  int same;
  __match_all_sync(counting, expert, &same);
  int32_t amount = same ? __popc(counting) : 1;
  asm volatile("" : "+r"(amount));
  const bool leads = (counting & ((1u << threadIdx.x % kWarpSize) - 1)) == 0;
  if (!same || leads) atomicAdd(&counters[expert], amount);
}

// Few slots: totals and the counts of slots before this CTA, from all ids. Integer sums do not depend on the order of additions.
__device__ inline void count_everything(const FusedWork& work, const Share& share, const Lane& me,
                                        const RoutingScratch& scratch) {
  const int32_t step = me.tokens_per_chunk * kFusedWarps;
  walk_slots(
      me, static_cast<int32_t>(threadIdx.x) / kWarpSize * me.tokens_per_chunk, work.num_tokens, step,
      [&](int32_t token) { return LoadedSlot{load_expert(work, token * work.topk + me.k), 0.0f}; },
      [&](int32_t token, const LoadedSlot& slot) {
        const int32_t expert = without_repeats(me, work, slot.expert);
        count_slots(scratch.totals, expert, expert >= 0);
        count_slots(scratch.before, expert, expert >= 0 && token < share.first_token);
      });
}

// Prefetch of a slot's probability: it is needed once the row is known, when nothing hides its latency.
__device__ inline void prefetch_prob(const FusedWork& work, int32_t slot) {
  if (work.row_probs != nullptr && !work.probs_by_expert) asm volatile("prefetch.global.L1 [%0];" ::"l"(work.probs + slot));
}

// Counts this CTA's slots: cleaned ids into `cleaned`, counts per warp into the histogram.
__device__ inline void count_own(const FusedWork& work, const Share& share, const Lane& me, const WarpRange& range,
                                 const RoutingScratch& scratch, int32_t* cleaned) {
  int32_t* histogram = scratch.histogram + threadIdx.x / kWarpSize * work.num_experts;
  walk_slots(
      me, range.begin, range.end, me.tokens_per_chunk,
      [&](int32_t token) { return LoadedSlot{load_expert(work, token * work.topk + me.k), 0.0f}; },
      [&](int32_t token, const LoadedSlot& slot) {
        unsigned same = same_expert(slot.expert, me.expert_bits);
        const int32_t expert = work.first_only && (same & me.earlier_of_token) != 0 ? -1 : slot.expert;
        same &= __ballot_sync(kAllLanes, expert >= 0);
        if (expert >= 0 && (same & me.earlier) == 0) histogram[expert] += __popc(same);
        __syncwarp();
        if (!me.used || token >= range.end) return;
        cleaned[(token - share.first_token) * work.topk + me.k] = expert;
        prefetch_prob(work, token * work.topk + me.k);
      });
}

// Computes the rows of this CTA's slots and writes all maps; next_row [E] belongs to the warp.
__device__ inline void place_own(const FusedWork& work, const Share& share, const Lane& me, const WarpRange& range,
                                 int32_t* next_row, const int32_t* cleaned, int32_t* local_rows) {
  const auto load = [&](int32_t token) {
    const int32_t slot = token * work.topk + me.k;
    LoadedSlot loaded;
    loaded.expert = cleaned == nullptr ? load_expert(work, slot) : cleaned[slot - share.first_token * work.topk];
    if (work.row_probs == nullptr) return loaded;
    if (!work.probs_by_expert) {
      loaded.prob = __ldg(work.probs + slot);
    } else if (loaded.expert >= 0) {
      loaded.prob = __ldg(work.probs + int64_t{token} * work.num_experts + loaded.expert);
    }
    return loaded;
  };
  walk_slots(me, range.begin, range.end, me.tokens_per_chunk, load, [&](int32_t token, const LoadedSlot& loaded) {
    int32_t expert = loaded.expert;
    if (cleaned == nullptr) expert = without_repeats(me, work, expert);
    const Peers peers(expert, me.expert_bits);
    int32_t row = -1;
    if (expert >= 0) row = next_row[expert] + __popc(peers.same & me.earlier);
    __syncwarp();
    if (expert >= 0 && (peers.same & me.earlier) == 0) next_row[expert] = row + __popc(peers.same);
    __syncwarp();
    if (row >= work.num_rows) row = -1;
    // ascending rows, which are ascending experts, then slots without a row in slot order
    const unsigned kept = __ballot_sync(kAllLanes, row >= 0) & me.of_token;
    const int32_t place = row >= 0 ? __popc(kept & (peers.smaller | (peers.same & me.earlier)))
                                   : __popc(kept) + __popc(me.earlier_of_token & ~kept);
    if (!me.used || token >= range.end) return;
    const int32_t first_slot = token * work.topk, slot = first_slot + me.k;
    if (local_rows != nullptr) local_rows[(token - share.first_token) * work.topk + place] = row;
    if (token < share.owned_from) return;
    if (work.slot_to_row != nullptr) work.slot_to_row[slot] = row;
    if (work.token_rows != nullptr) work.token_rows[first_slot + place] = row;
    if (row < 0) return;
    if (work.row_to_token != nullptr) work.row_to_token[row] = token;
    if (work.row_to_slot != nullptr) work.row_to_slot[row] = slot;
    if (work.row_to_expert != nullptr) work.row_to_expert[row] = expert;
    if (work.row_probs != nullptr) work.row_probs[row] = loaded.prob;
    if (work.rowmap == nullptr) return;
    const int64_t pair = int64_t{token} * work.num_experts + expert;
    if (work.first_only) {
      work.rowmap[pair] = row;
    } else {  // several slots with one expert: the last row, the highest one
      atomicMax(&work.rowmap[pair], row);
    }
  });
}

// Exclusive prefix sums of one expert's counts over all CTAs; by a warp.
__device__ inline void scan_expert(const FusedWork& work, int32_t expert) {
  const int lane = threadIdx.x % kWarpSize;
  const int blocks = static_cast<int>(gridDim.x);
  const int per_lane = divide_up(blocks, kWarpSize);
  const int begin = lane * per_lane;
  int32_t* counts = work.counts + int64_t{expert} * blocks;
  int32_t values[kMaxPerLane];
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) values[i] = i < per_lane && begin + i < blocks ? __ldcg(counts + begin + i) : 0;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) sum += values[i];
  const int32_t inclusive = inclusive_sum_over_warp(sum);
  int32_t before = inclusive - sum;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    if (i < per_lane && begin + i < blocks) __stcg(counts + begin + i, before);
    before += values[i];
  }
  if (lane == kWarpSize - 1) __stcg(&work.totals[expert], inclusive);
}

// First row of each segment and padding rows before it, from the totals.
__device__ inline void scan_segments(const FusedWork& work, const RoutingScratch& scratch, uint64_t* warp_sums) {
  const int experts = work.num_experts;
  const int per_thread = divide_up(experts, kFusedThreads);
  const int begin = min(experts, static_cast<int>(threadIdx.x) * per_thread), end = min(experts, begin + per_thread);
  uint64_t sum = 0, all;  // rows in the upper half, slots in the lower
#pragma unroll 1
  for (int expert = begin; expert < end; ++expert) {
    const int32_t routed = scratch.totals[expert];
    sum += (static_cast<uint64_t>(segment_rows(routed, work.padding_alignment)) << 32) + routed;
  }
  const uint64_t before = scan_block(sum, warp_sums, &all) - sum;
  int32_t row = static_cast<int32_t>(before >> 32), slots = static_cast<int32_t>(before);
#pragma unroll 1
  for (int expert = begin; expert < end; ++expert) {
    const int32_t routed = scratch.totals[expert];
    scratch.starts[expert] = row;
    scratch.padding[expert] = row - slots;
    row += segment_rows(routed, work.padding_alignment);
    slots += routed;
  }
  if (threadIdx.x == 0) {
    const int32_t rows = static_cast<int32_t>(all >> 32), padding = rows - static_cast<int32_t>(all);
    scratch.starts[experts] = rows;
    scratch.padding[experts] = padding;
    scratch.padding[experts + 1] = padding + max(0, work.num_rows - rows);
  }
  sync_routing();
}

// Writes counts per expert and the overflow; by one CTA.
__device__ inline void write_counts(const FusedWork& work, const RoutingScratch& scratch, int32_t* dropped) {
  if (threadIdx.x == 0) *dropped = 0;
  sync_routing();
#pragma unroll 1
  for (int expert = threadIdx.x; expert <= work.num_experts; expert += kFusedThreads) {
    const int32_t start = scratch.starts[expert];
    if (work.expert_offsets != nullptr) work.expert_offsets[expert] = within_buffer(start, work.num_rows);
    if (expert == work.num_experts) break;
    const int32_t routed = scratch.totals[expert];
    const int32_t inside = rows_inside(start, routed, work.num_rows);
    work.routed_per_expert[expert] = routed;
    if (work.tokens_per_expert != nullptr) work.tokens_per_expert[expert] = inside;
    atomicAdd(dropped, routed - inside);
  }
  sync_routing();
  if (threadIdx.x == 0 && work.overflow != nullptr) *work.overflow = *dropped;
}

// Row number of the i-th padding row, by binary search; it may lie beyond the buffer.
__device__ inline int64_t padding_row(const FusedWork& work, const RoutingScratch& scratch, int32_t i) {
  int low = 0, high = work.num_experts;  // the last segment with padding[segment] <= i; E: rows after all segments
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (scratch.padding[middle] <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int32_t routed = low < work.num_experts ? scratch.totals[low] : 0;
  return int64_t{scratch.starts[low]} + routed + (i - scratch.padding[low]);
}

// Padding rows: a thread per row writes the maps, a warp per row zeroes the data.
__device__ inline void write_padding(const FusedWork& work, const RoutingScratch& scratch) {
  const int32_t padding_rows = scratch.padding[work.num_experts + 1];
#pragma unroll 1
  for (int64_t i = int64_t{threadIdx.x} * gridDim.x + blockIdx.x; i < padding_rows; i += int64_t{gridDim.x} * kFusedThreads) {
    const int64_t row = padding_row(work, scratch, static_cast<int32_t>(i));
    if (row < work.num_rows) mark_padding(work, row, 1);
  }
  if (!work.fill_rows && !work.fill_scales) return;
  const int64_t warp = int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (int64_t i = warp; i < padding_rows; i += int64_t{gridDim.x} * kFusedWarps) {
    const int64_t row = padding_row(work, scratch, static_cast<int32_t>(i));
    if (row < work.num_rows) zero_padding_row(work, row);
  }
}

}  // namespace cuda
}  // namespace pmo
