// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Fused route and permute for few slots (up to 768 tokens, or 576 without rows; 8 slots each): one launch without communication
// between CTAs. Segments must not be padded.
//
// CTA 0 counts the slots of every expert. Every other CTA has a part of one token's row: it loads the part into registers and
// meanwhile computes the token's rows. For this it keeps the experts of all slots in shared memory, 16 bits each, eight per
// token: the row of a slot is the number of slots with a smaller expert, plus the number of earlier slots with the same one. That
// is T * T * 64 comparisons in all, two per instruction, instead of a histogram, a scan and grid barriers. The CTA of a row's
// first part also writes the token's maps and scales. All CTAs but the first zero the rows after the last segment.
//
// Latency-bound: at these sizes the time to fetch instructions matters, so loops are not unrolled where possible and the usual
// case has a kernel of its own.
//
// Bytes moved: (T + N) (H + S) elements; every CTA reads the ids from the L2.
#include "cuda/moe/fused.cuh"
#include "cuda/moe/fused_route.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int32_t kNone = 1 << 14;   // no expert: greater than all experts, in a bit that no expert has
constexpr uint32_t kBoth = 0x10001;  // 1 in both halves of a word

static_assert(kMaxFusedExperts <= kNone, "half of a word holds an expert");

// Experts of a token's slots, two per word.
struct alignas(16) Experts {
  uint32_t words[kFewWords];
};

// Per signed half: a + b clamped to [0, 1].
__device__ uint32_t add_up_to_one(uint32_t a, uint32_t b) {
#if CUDART_VERSION >= 12000
  return __viaddmin_s16x2_relu(a, b, kBoth);
#else
  return __vmaxs2(__vmins2(__vadd2(a, b), kBoth), 0);
#endif
}

// A token's experts, kNone for a slot without one. `whole` loads eight 32-bit ids by two vector accesses.
struct TokenIds {
  int32_t expert[kFewTopk];

  __device__ TokenIds(const FusedWork& work, int32_t first, bool whole) {
    if (whole) {
      const auto* half = reinterpret_cast<const Vector16*>(static_cast<const int32_t*>(work.ids) + first);
      const Vector16 halves[2] = {half[0], half[1]};
      memcpy(expert, halves, sizeof(expert));
#pragma unroll
      for (int k = 0; k < kFewTopk; ++k) expert[k] = expert_of(work, expert[k], kNone);
      return;
    }
#pragma unroll
    for (int k = 0; k < kFewTopk; ++k) expert[k] = k < work.topk ? load_expert(work, first + k, kNone) : kNone;
  }
};

// Stores the experts of all slots in shared memory, kNone for a slot without one or with one that its token named before. A
// thread per token.
template <bool kCommon>
__device__ void load_all_experts(const FusedWork& work, Experts* experts) {
  const bool whole =
      kCommon || (work.topk == kFewTopk && !work.ids_are_64_bit && reinterpret_cast<uintptr_t>(work.ids) % 16 == 0);
#pragma unroll 1
  for (int32_t token = threadIdx.x; token < work.num_tokens; token += blockDim.x) {
    TokenIds ids(work, token * work.topk, whole);
    if (work.first_only) {
#pragma unroll
      for (int k = kFewTopk - 1; k > 0; --k) {
#pragma unroll
        for (int other = 0; other < k; ++other) {
          if (ids.expert[other] == ids.expert[k]) ids.expert[k] = kNone;
        }
      }
    }
    Experts packed;
#pragma unroll
    for (int i = 0; i < kFewWords; ++i) packed.words[i] = ids.expert[2 * i] + ids.expert[2 * i + 1] * (kBoth - 1);
    experts[token] = packed;
  }
}

// Counts of all experts, by one CTA.
__device__ void write_all_counts(const FusedWork& work, const int16_t* experts, int32_t* counts) {
#pragma unroll 1
  for (int expert = threadIdx.x; expert < work.num_experts; expert += blockDim.x) counts[expert] = 0;
  __syncthreads();
  const int32_t slots = work.num_tokens * kFewTopk;
#pragma unroll 1
  for (int32_t first = 0; first < slots; first += blockDim.x) {
    const int32_t slot = first + threadIdx.x, expert = slot < slots ? experts[slot] : kNone;
    count_slots(counts, expert, expert != kNone);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  int32_t rows = 0;  // of earlier experts
#pragma unroll 1
  for (int first = 0; first < work.num_experts; first += kWarpSize) {
    const int expert = first + threadIdx.x;
    const int32_t routed = expert < work.num_experts ? counts[expert] : 0;
    const int32_t end = rows + inclusive_sum_over_warp(routed);
    const int32_t start = end - routed;
    if (expert < work.num_experts) {
      work.routed_per_expert[expert] = routed;
      if (work.tokens_per_expert != nullptr) work.tokens_per_expert[expert] = rows_inside(start, routed, work.num_rows);
      if (work.expert_offsets != nullptr) work.expert_offsets[expert] = within_buffer(start, work.num_rows);
    }
    rows = __shfl_sync(kAllLanes, end, kWarpSize - 1);
  }
  if (threadIdx.x != 0) return;
  if (work.expert_offsets != nullptr) work.expert_offsets[work.num_experts] = within_buffer(rows, work.num_rows);
  if (work.overflow != nullptr) *work.overflow = rows - within_buffer(rows, work.num_rows);
}

// Writes the maps of one token, a lane per slot; rows [K] are in slot order, -1 for a slot without a row.
__device__ void write_token_maps(const FusedWork& work, int32_t token, const int16_t* experts, const int32_t* rows, float prob) {
  const int k = threadIdx.x;
  if (k >= work.topk) return;
  const int32_t slot = token * work.topk + k, row = rows[k];
  // ascending rows, then slots without a row in slot order
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

// Probability of the lane's slot of a token.
__device__ float load_prob(const FusedWork& work, int32_t token) {
  const int k = threadIdx.x;
  if (work.row_probs == nullptr || k >= work.topk || token >= work.num_tokens) return 0.0f;
  const int32_t slot = token * work.topk + k;
  if (!work.probs_by_expert) return __ldg(work.probs + slot);
  const int32_t expert = load_expert(work, slot);
  return expert < 0 ? 0.0f : __ldg(work.probs + int64_t{token} * work.num_experts + expert);
}

// True for the usual case: eight slots per token, 32-bit ids aligned for vector loads, probabilities by slot.
bool is_common(const FusedWork& work) {
  return work.topk == kFewTopk && !work.ids_are_64_bit && reinterpret_cast<uintptr_t>(work.ids) % 16 == 0 &&
         !work.probs_by_expert;
}

// The same work with the facts of is_common as compile-time constants.
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
  __shared__ __align__(16) Experts experts[kFewTokens];
  __shared__ int32_t counts[kMaxFusedExperts];
  __shared__ uint32_t sums[kFewWords + 1][kFewThreads / kWarpSize];
  __shared__ int32_t rows[kFewTopk + 1];  // of the token's slots; [kFewTopk]: number of all routed slots
  start_next_kernel();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int32_t job = static_cast<int32_t>(blockIdx.x) - 1, token = job < 0 ? 0 : job / parts, part = job - token * parts;
  const bool has_token = job >= 0 && token < work.num_tokens;  // other CTAs count, or only zero padding
  const int32_t accesses = has_token ? work.row_bytes / 16 : 0, scales = has_token && part == 0 ? work.scale_bytes / 16 : 0;
  const int32_t first = divide_up(accesses, parts) * part + threadIdx.x;
  const int32_t last = min(accesses, divide_up(accesses, parts) * (part + 1));
  const auto* source = reinterpret_cast<const Vector16*>(work.x + token * work.x_stride);
  const auto* scale = reinterpret_cast<const Vector16*>(work.scale + token * work.scale_stride);
  Vector16 values[kFewAccesses], scale_value = {};
#pragma unroll
  for (int i = 0; i < kFewAccesses; ++i) {
    if (first + i * static_cast<int32_t>(blockDim.x) < last) values[i] = source[first + i * blockDim.x];
  }
  if (threadIdx.x < scales) scale_value = scale[threadIdx.x];
  const float prob = has_token && part == 0 && warp == 0 ? load_prob(work, token) : 0.0f;
  load_all_experts<kCommon>(work, experts);
  __syncthreads();
  if (job < 0) {
    write_all_counts(work, reinterpret_cast<const int16_t*>(experts), counts);
    return;
  }

  // own - kBase + (kBase - other), clamped to [0, 1], tells whether one expert is greater than another, in both halves of a word.
  // No half overflows or borrows from the other.
  constexpr uint32_t kBase = 0x6000 * kBoth, kMinusBase = 0xA000 * kBoth;
  uint32_t own[kFewWords], before[kFewWords] = {}, all = 0;
#pragma unroll
  for (int i = 0; i < kFewWords; ++i) own[i] = (has_token ? experts[token].words[i] : kNone * kBoth) + kMinusBase;
  const uint32_t* words = experts->words;
#pragma unroll 1
  for (int32_t place = threadIdx.x; place < work.num_tokens * kFewWords; place += blockDim.x) {
    const uint32_t word = words[place];
    all += 2 - __popc(word & kNone * kBoth);
    const uint32_t distances =
        (place < token * kFewWords ? kBase + kBoth : kBase) - word;  // equal experts count in earlier slots
#pragma unroll
    for (const uint32_t half : {0x1010u, 0x3232u}) {
      const uint32_t distance = __byte_perm(distances, 0, half);
#pragma unroll
      for (int i = 0; i < kFewWords; ++i) before[i] += add_up_to_one(own[i], distance);
    }
  }
#pragma unroll
  for (int i = 0; i < kFewWords; ++i) {
    const uint32_t sum = sum_over_warp(before[i]);
    if (lane == i) sums[i][warp] = sum;
  }
  all = sum_over_warp(all);
  if (lane == kFewWords) sums[kFewWords][warp] = all;
  __syncthreads();
  const auto* own_experts = reinterpret_cast<const int16_t*>(experts + (has_token ? token : 0));
  if (threadIdx.x <= kFewTopk) {
    const int k = threadIdx.x;
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < warps; ++i) sum += sums[k / 2][i];
    auto row = static_cast<int32_t>(sum);
    if (k < kFewTopk) {
      const int32_t expert = has_token ? own_experts[k] : kNone;
      row = static_cast<int32_t>(k % 2 == 0 ? sum & 0xFFFF : sum >> 16);
#pragma unroll 1
      for (int other = 0; other < k; ++other) row += expert != kNone && own_experts[other] == expert;
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
    for (int i = 0; i < kFewAccesses; ++i) {
      if (first + i * static_cast<int32_t>(blockDim.x) < last) target[i * blockDim.x] = values[i];
    }
    auto* row_scale = reinterpret_cast<Vector16*>(work.row_scales + row * work.scale_bytes);
    if (threadIdx.x < scales) row_scale[threadIdx.x] = scale_value;
#pragma unroll 1
    for (int32_t i = threadIdx.x + blockDim.x; i < scales; i += blockDim.x) row_scale[i] = scale[i];
  }
  if (has_token && part == 0) {
    if (warp == 0) write_token_maps(work, token, own_experts, rows, prob);
    if (work.rowmap != nullptr) {
#pragma unroll 1
      for (int32_t expert = threadIdx.x; expert < work.num_experts; expert += blockDim.x) {
        int32_t row = -1;  // several slots with one expert: the last row, the highest one
#pragma unroll 1
        for (int k = 0; k < work.topk; ++k) {
          if (own_experts[k] == expert) row = max(row, rows[k]);
        }
        work.rowmap[int64_t{token} * work.num_experts + expert] = row;
      }
    }
  }
#pragma unroll 1
  for (int32_t row = rows[kFewTopk] + warp * (gridDim.x - 1) + job; row < work.num_rows; row += warps * (gridDim.x - 1)) {
    if (lane == 0) mark_padding(work, row, 1);
    zero_padding_row(work, row);
  }
}

}  // namespace

int launch_few_slots(const FusedWork& work, const FewSlotsPlan& plan, cudaStream_t stream) {
  const auto kernel = !is_common(work)       ? few_slots<false, true>
                      : work.scale_bytes > 0 ? few_slots<true, true>
                                             : few_slots<true, false>;
  const Grid grid = {static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.threads)};
  return launch("few_slots", kernel, grid, stream, work, plan.parts);
}

}  // namespace cuda
}  // namespace pmo
