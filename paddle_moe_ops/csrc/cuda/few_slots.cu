// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing of few slots, with or without their rows, in one launch of blocks that need nothing from each other.
//
// The first block counts the slots of every expert. Every other block has a part of one token's row: it loads the part into registers, and
// while that is on its way finds the token's rows by comparing its experts with all ids, which it keeps in shared memory: the row of a slot
// is the number of slots with a smaller expert, and of those before it with the same one. That is (T * K)^2 comparisons in all, and no
// histogram, scan or barrier between blocks, which is why segments must not be padded. The block of a row's first part writes the token's
// maps and scales. Rows behind the last segment are shared out over all blocks.
//
// Loops are rolled up where they can be, and the usual case is a kernel of its own: at these sizes the time that instructions take to
// arrive shows.
//
// Bytes moved: (T + N) * (H + S) elements; ids are read by every block, from the L2.
#include <algorithm>

#include "cuda/fused.cuh"
#include "cuda/fused_route.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int32_t kFewSlots = 4096;
constexpr int kFewTopk = 8;
constexpr int kFewThreads = 256;
constexpr int kFewHeld = 4;           // accesses of a row that a thread holds
constexpr int kFewBlocks = 256;       // to aim at
constexpr int32_t kNone = 1 << 20;    // behind all experts
constexpr int32_t kPaddingRows = 32;  // of a block, about

// A token's ids as they are given, in 32-bit words of which a wide id has two.
struct TokenIds {
  int32_t expert[kFewTopk];

  __device__ TokenIds(const FusedWork& work, int32_t first, bool whole) {
    const int wide = work.ids_are_64_bit ? 1 : 0;
    const auto* word = static_cast<const int32_t*>(work.ids) + (static_cast<int64_t>(first) << wide);
    if (whole) {
      const auto* half = reinterpret_cast<const Vector16*>(word);
      const Vector16 halves[2] = {half[0], half[1]};
      memcpy(expert, halves, sizeof(expert));
#pragma unroll
      for (int k = 0; k < kFewTopk; ++k) expert[k] = known(work, expert[k]);
      return;
    }
#pragma unroll
    for (int k = 0; k < kFewTopk; ++k, word += 1 + wide) {
      expert[k] = kNone;
      if (k < work.topk) expert[k] = wide != 0 && __ldg(word + 1) != 0 ? kNone : known(work, __ldg(word));
    }
  }
  static __device__ int32_t known(const FusedWork& work, int32_t id) {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(work.num_experts) ? id : kNone;
  }
};

// All ids into shared memory, kNone for a slot that has no expert or repeats one of its token; a thread takes a token.
template <bool kCommon>
__device__ void load_all_experts(const FusedWork& work, int32_t* experts) {
  const bool full = work.topk == kFewTopk;
  const bool whole = kCommon || (full && !work.ids_are_64_bit && reinterpret_cast<uintptr_t>(work.ids) % 16 == 0);
#pragma unroll 1
  for (int32_t token = threadIdx.x; token < work.num_tokens; token += blockDim.x) {
    const int32_t first = token * work.topk;
    TokenIds ids(work, first, whole);
    if (work.first_only) {
#pragma unroll
      for (int k = kFewTopk - 1; k > 0; --k) {
#pragma unroll
        for (int other = 0; other < k; ++other) {
          if (ids.expert[other] == ids.expert[k]) ids.expert[k] = kNone;
        }
      }
    }
    if (full) {
      Vector16 halves[2];
      memcpy(halves, ids.expert, sizeof(halves));
      auto* half = reinterpret_cast<Vector16*>(experts + first);
      half[0] = halves[0];
      half[1] = halves[1];
      continue;
    }
#pragma unroll
    for (int k = 0; k < kFewTopk; ++k) {
      if (k < work.topk) experts[first + k] = ids.expert[k];
    }
  }
}

// The counts of all experts, by one block.
__device__ void write_all_counts(const FusedWork& work, const int32_t* experts, int32_t* counts) {
#pragma unroll 1
  for (int expert = threadIdx.x; expert < work.num_experts; expert += blockDim.x) counts[expert] = 0;
  __syncthreads();
  const int32_t slots = work.num_tokens * work.topk;
#pragma unroll 1
  for (int32_t first = 0; first < slots; first += blockDim.x) {
    const int32_t slot = first + threadIdx.x, expert = slot < slots ? experts[slot] : kNone;
    count_slots(counts, expert, expert != kNone);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  int32_t rows = 0;  // of the experts before
#pragma unroll 1
  for (int first = 0; first < work.num_experts; first += kWarpSize) {
    const int expert = first + threadIdx.x;
    const int32_t routed = expert < work.num_experts ? counts[expert] : 0;
    const int32_t end = rows + inclusive_sum_over_warp(routed);
    const int32_t start = min(end - routed, work.num_rows);
    if (expert < work.num_experts) {
      work.routed_per_expert[expert] = routed;
      if (work.tokens_per_expert != nullptr) work.tokens_per_expert[expert] = min(end, work.num_rows) - start;
      if (work.expert_offsets != nullptr) work.expert_offsets[expert] = start;
    }
    rows = __shfl_sync(kAllLanes, end, kWarpSize - 1);
  }
  if (threadIdx.x != 0) return;
  if (work.expert_offsets != nullptr) work.expert_offsets[work.num_experts] = min(rows, work.num_rows);
  if (work.overflow != nullptr) *work.overflow = rows - min(rows, work.num_rows);
}

// What one token's slots wrote about themselves, a lane per slot; rows [K] as they are in slot order, -1 for a slot without one.
__device__ void write_token_maps(const FusedWork& work, int32_t token, const int32_t* experts, const int32_t* rows, float prob) {
  const int k = threadIdx.x;
  if (k >= work.topk) return;
  const int32_t slot = token * work.topk + k, row = rows[k];
  // ascending rows, then the slots without one in slot order
  const auto key = [&](int of) { return rows[of] >= 0 ? static_cast<uint32_t>(rows[of]) : 0x80000000u + of; };
  int32_t place = 0;
#pragma unroll 1
  for (int other = 0; other < work.topk; ++other) place += key(other) < key(k);
  if (work.slot_to_row != nullptr) work.slot_to_row[slot] = row;
  if (work.token_rows != nullptr) work.token_rows[token * work.topk + place] = row;
  if (row < 0) return;
  if (work.row_to_token != nullptr) work.row_to_token[row] = token;
  if (work.row_to_slot != nullptr) work.row_to_slot[row] = slot;
  if (work.row_to_expert != nullptr) work.row_to_expert[row] = experts[k];
  if (work.row_probs != nullptr) work.row_probs[row] = prob;
}

// The lane's slot of a token: the probability that goes with it.
__device__ float load_prob(const FusedWork& work, int32_t token) {
  const int k = threadIdx.x;
  if (work.row_probs == nullptr || k >= work.topk || token >= work.num_tokens) return 0.0f;
  const int32_t slot = token * work.topk + k;
  if (!work.probs_by_expert) return __ldg(work.probs + slot);
  const int32_t expert = load_expert(work, slot);
  return expert < 0 ? 0.0f : __ldg(work.probs + int64_t{token} * work.num_experts + expert);
}

// What most calls have: eight slots a token, narrow ids that can be loaded at once, and probabilities by slot.
bool is_common(const FusedWork& work) {
  return work.topk == kFewTopk && !work.ids_are_64_bit && reinterpret_cast<uintptr_t>(work.ids) % 16 == 0 &&
         !work.probs_by_expert;
}

// The same work, with what is_common found known to the compiler.
__device__ FusedWork common_work(FusedWork work, bool has_scales) {
  work.topk = kFewTopk;
  work.ids_are_64_bit = work.probs_by_expert = false;
  if (!has_scales) {
    work.scale_bytes = 0;
    work.fill_scales = false;
  }
  return work;
}

template <bool kCommon, bool kHasScales>
__global__ void __launch_bounds__(kFewThreads, 4) few_slots(const __grid_constant__ FusedWork given, int32_t parts) {
  const FusedWork work = kCommon ? common_work(given, kHasScales) : given;
  __shared__ __align__(16) int32_t experts[kFewSlots];
  __shared__ int32_t counts[kMaxFusedExperts];
  __shared__ int32_t sums[kFewTopk + 1][kFewThreads / kWarpSize];
  __shared__ int32_t rows[kFewTopk + 1];  // of the token's slots, and the number of all
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int32_t job = static_cast<int32_t>(blockIdx.x) - 1, token = job < 0 ? 0 : job / parts, part = job - token * parts;
  const bool has_token = job >= 0 && token < work.num_tokens;  // otherwise counts, or only padding
  const int32_t accesses = has_token ? work.row_bytes / 16 : 0, scales = has_token && part == 0 ? work.scale_bytes / 16 : 0;
  const int32_t first = (accesses + parts - 1) / parts * part + threadIdx.x;
  const int32_t last = min(accesses, (accesses + parts - 1) / parts * (part + 1));
  const auto* source = reinterpret_cast<const Vector16*>(work.x + token * work.x_stride);
  const auto* scale = reinterpret_cast<const Vector16*>(work.scale + token * work.scale_stride);
  Vector16 held[kFewHeld], held_scale = {};
#pragma unroll
  for (int i = 0; i < kFewHeld; ++i) {
    if (first + i * static_cast<int32_t>(blockDim.x) < last) held[i] = source[first + i * blockDim.x];
  }
  if (threadIdx.x < scales) held_scale = scale[threadIdx.x];
  const float prob = has_token && part == 0 && warp == 0 ? load_prob(work, token) : 0.0f;
  load_all_experts<kCommon>(work, experts);
  __syncthreads();
  if (job < 0) {
    write_all_counts(work, experts, counts);
    return;
  }

  const int32_t slots = work.num_tokens * work.topk, own_slot = has_token ? token * work.topk : slots;
  int32_t own[kFewTopk], before[kFewTopk] = {}, all = 0;
#pragma unroll
  for (int k = 0; k < kFewTopk; ++k) own[k] = has_token && k < work.topk ? experts[own_slot + k] : kNone;
#pragma unroll 1
  for (int32_t slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const int32_t expert = experts[slot], bound = expert - (slot < own_slot ? 1 : 0);
    all += expert != kNone;
#pragma unroll
    for (int k = 0; k < kFewTopk; ++k) before[k] += bound < own[k];
  }
#pragma unroll
  for (int k = 0; k < kFewTopk; ++k) {
    const int32_t sum = sum_over_warp(before[k]);
    if (lane == k) sums[k][warp] = sum;
  }
  all = sum_over_warp(all);
  if (lane == kFewTopk) sums[kFewTopk][warp] = all;
  __syncthreads();
  if (threadIdx.x <= kFewTopk) {
    const int k = threadIdx.x;
    int32_t row = 0;
#pragma unroll 1
    for (int i = 0; i < warps; ++i) row += sums[k][i];
    if (k < kFewTopk) {
      const int32_t expert = has_token && k < work.topk ? experts[own_slot + k] : kNone;
#pragma unroll 1
      for (int other = 0; other < k; ++other) row += expert != kNone && experts[own_slot + other] == expert;
      if (expert == kNone || row >= work.num_rows) row = -1;
    }
    rows[k] = row;
  }
  __syncthreads();

#pragma unroll 1
  for (int k = 0; k < work.topk; ++k) {
    const int64_t row = rows[k];
    if (row < 0) continue;
    auto* target = reinterpret_cast<Vector16*>(work.rows + row * work.row_bytes) + first;
#pragma unroll
    for (int i = 0; i < kFewHeld; ++i) {
      if (first + i * static_cast<int32_t>(blockDim.x) < last) target[i * blockDim.x] = held[i];
    }
    auto* row_scale = reinterpret_cast<Vector16*>(work.row_scales + row * work.scale_bytes);
    if (threadIdx.x < scales) row_scale[threadIdx.x] = held_scale;
#pragma unroll 1
    for (int32_t i = threadIdx.x + blockDim.x; i < scales; i += blockDim.x) row_scale[i] = scale[i];
  }
  if (has_token && part == 0) {
    if (warp == 0) write_token_maps(work, token, experts + own_slot, rows, prob);
    if (work.rowmap != nullptr) {
#pragma unroll 1
      for (int32_t expert = threadIdx.x; expert < work.num_experts; expert += blockDim.x) {
        int32_t row = -1;  // a token that names the expert in several slots leaves its last row, the highest one
#pragma unroll 1
        for (int k = 0; k < work.topk; ++k) {
          if (experts[own_slot + k] == expert) row = max(row, rows[k]);
        }
        work.rowmap[int64_t{token} * work.num_experts + expert] = row;
      }
    }
  }
#pragma unroll 1
  for (int32_t row = rows[kFewTopk] + warp * (gridDim.x - 1) + job; row < work.num_rows; row += warps * (gridDim.x - 1)) {
    if (lane == 0) write_padding_maps(work, row);
    zero_padding_row(work, row);
  }
}

}  // namespace

bool has_few_slots(const FusedWork& work) {
  return work.padding_alignment == 1 && work.topk <= kFewTopk && work.num_experts <= kMaxFusedExperts &&
         int64_t{work.num_tokens} * work.topk <= kFewSlots;
}

int launch_few_slots(const FusedWork& work, cudaStream_t stream) {
  // Every block looks at all ids: small ones where there are few, and then more of them.
  const int threads = work.num_tokens <= kFewThreads / 2 ? kFewThreads / 2 : kFewThreads;
  const int32_t accesses = work.row_bytes / 16;
  const int64_t wanted = (int64_t{work.num_tokens} * accesses + threads * kFewBlocks - 1) / (threads * kFewBlocks);
  const int held = static_cast<int>(std::min<int64_t>(std::max<int64_t>(wanted, 1), kFewHeld));
  const int parts = std::max(1, (accesses + held * threads - 1) / (held * threads));
  const int padding_blocks = std::min(kFewBlocks, work.num_rows / kPaddingRows);
  const int blocks = 1 + std::max(work.num_tokens * parts, padding_blocks);
  if (!is_common(work)) {
    few_slots<false, true><<<blocks, threads, 0, stream>>>(work, parts);
  } else if (work.scale_bytes > 0) {
    few_slots<true, true><<<blocks, threads, 0, stream>>>(work, parts);
  } else {
    few_slots<true, false><<<blocks, threads, 0, stream>>>(work, parts);
  }
  PMO_CUDA_LAUNCHED("few_slots");
  return PMO_OK;
}

}  // namespace cuda
}  // namespace pmo
