// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The router's top-k and its gradient: gating logits [T, E] -> ids and weights [T, K], optionally scores [T, E]. A warp per
// token, four warps per CTA, one launch. Nothing overlaps within a warp; other warps of the SM hide its latency.
//
// Forward: lane l has the experts l, l + 32, ... and computes a key for each, an integer in the order of choice
// (common/scoring.h). Keys are in registers for few experts without groups (choose_few_experts), else in shared memory, or in the
// workspace if the keys of a CTA do not fit. The best experts are found one per round: the warp reduces the maximum over its
// lanes' best candidates, and the winning lane advances to its next. Groups are ranked the same way, by several lanes per group
// if there are few. Weights are computed again from the logits of the chosen experts, which is faster than keeping scores next to
// the keys.
//
// Backward: recomputes the softmax from the logits, then the gradients of all experts, then adds those of the chosen ones.
//
// Memory-bound: T E elements and T K ids and weights, with scores T E elements more; the gradient reads and writes T E elements.
// A token's logits are read three times, all but the first from the L1.
#include "pmo/topk.h"

#include "common/checks.h"
#include "common/scoring.h"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

static_assert(kScoreLanes == kWarpSize, "a sum's lanes are those of a warp");

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int64_t kSharedBytes = 48 << 10;     // dynamic shared memory of any CTA, without an attribute
constexpr int64_t kWorkspaceBlocks = 1 << 10;  // CTAs; enough to fill a GPU

__device__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }

__device__ int64_t warp_id() { return blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; }

__device__ float warp_max(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ uint64_t warp_max(uint64_t candidate) {
  const auto key = static_cast<uint32_t>(candidate >> 32);
  const uint32_t highest = max_over_warp(key);
  return uint64_t{highest} << 32 | max_over_warp(key == highest ? static_cast<uint32_t>(candidate) : 0u);
}

// Sum of term(i) for i in [0, count), by all lanes of a warp, in the order of common/scoring.h.
template <typename Term>
__device__ float lane_sum(int32_t count, Term term) {
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t i = lane_id(); i < count; i += kWarpSize) sum += term(i);
  return sum_over_warp_by_halves(sum);
}

template <typename Rows>
__device__ float element(const void* array, int64_t place) {
  return Rows::load(static_cast<const typename Rows::Element*>(array)[place]);
}

template <typename Rows>
__device__ void put(void* array, int64_t place, float value) {
  static_cast<typename Rows::Element*>(array)[place] = Rows::store(value);
}

template <typename Rows>
__device__ float rounded(float value) {
  return Rows::load(Rows::store(value));
}

// Scoring function of a token: sigmoid, or softmax with its maximum and the sum of exponentials. Both are quotients of the same
// form, so one copy of the code serves both: a launch fetches its code from memory.
struct Scoring {
  bool use_sigmoid;
  float highest = 0.0f, sum = 1.0f;

  __device__ float exponential(float logit) const { return exp_minus(use_sigmoid ? logit : highest - logit); }

  // Score of a logit with a known exponential.
  __device__ float quotient(float logit, float exponential) const {
    const float over = use_sigmoid && !signbit(logit) ? 1.0f : exponential;
    return over / (use_sigmoid ? 1.0f + exponential : sum);
  }

  __device__ float operator()(float logit) const { return quotient(logit, exponential(logit)); }

  // Computes maximum and sum over logit(i), i in [0, count), by all lanes of a warp.
  template <typename Logit>
  __device__ void run_over(int32_t count, Logit logit) {
    if (use_sigmoid) return;
    highest = -INFINITY;
#pragma unroll 4
    for (int32_t i = lane_id(); i < count; i += kWarpSize) highest = fmaxf(highest, logit(i));
    highest = warp_max(highest);
    sum = lane_sum(count, [&](int32_t i) { return exp_minus(highest - logit(i)); });
  }
};

// Index of a key in shared memory. One word in 33 is padding, so that lanes of a warp and of several groups access distinct
// banks.
__host__ __device__ constexpr int64_t word_of(int64_t place) { return place + place / kWarpSize; }

// Keys in memory, one per place (expert or group). Key 0 is never chosen.
struct Keys {
  uint32_t* words;
  int32_t count;

  __device__ uint32_t& at(int32_t place) const { return words[word_of(place)]; }

  // Highest candidate below `limit` among places first, first + step, ... below `end`; 0: none.
  __device__ uint64_t highest_below(uint64_t limit, int32_t first, int32_t end, int32_t step) const {
    uint64_t best = 0;
#pragma unroll 4
    for (int32_t place = first; place < end; place += step) {
      const uint32_t key = at(place);
      const uint64_t other = candidate(key, place);
      if (key != 0 && other < limit && other > best) best = other;
    }
    return best;
  }

  // Calls visit(rank, candidate) for the `wanted` highest candidates in descending order, by all lanes of a warp. A lane reads
  // only its own keys.
  template <typename Visit>
  __device__ void each_highest(int32_t wanted, Visit visit) const {
    uint64_t best = highest_below(~uint64_t{0}, lane_id(), count, kWarpSize);
#pragma unroll 1
    for (int32_t rank = 0; rank < wanted; ++rank) {
      const uint64_t winner = warp_max(best);
      visit(rank, winner);
      if (best == winner) best = highest_below(winner, lane_id(), count, kWarpSize);
    }
  }
};

// Sets the keys of experts outside the best topk_groups groups to 0.
__device__ void keep_groups(const pmo_topk_params& p, const Keys& experts, const Keys& groups) {
  const int32_t size = experts.count / groups.count;
  const auto summed = static_cast<int32_t>(min(p.scores_per_group, int64_t{size}));
  int32_t lanes = kWarpSize;  // lanes per group, a power of two
  while (lanes > 1 && lanes * groups.count > kWarpSize) lanes /= 2;
  const int32_t part = lane_id() % lanes;
  __syncwarp();  // orders the reads of keys of other lanes
#pragma unroll 1
  for (int32_t first = 0; first < groups.count; first += kWarpSize / lanes) {
    const int32_t group = first + lane_id() / lanes;
    const int32_t begin = group * size, end = group < groups.count ? begin + size : begin;
    uint64_t best = ~uint64_t{0};
    float sum = 0.0f;
#pragma unroll 1
    for (int32_t rank = 0; rank < summed; ++rank) {
      best = experts.highest_below(best, begin + part, end, lanes);
      for (int32_t step = lanes / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, step));
      const float value = value_of(static_cast<uint32_t>(best >> 32));
      sum = rank == 0 ? value : sum + value;
    }
    if (part == 0 && group < groups.count) groups.at(group) = key_of(sum);
  }
  __syncwarp();
  uint64_t last = 0;
  groups.each_highest(static_cast<int32_t>(p.topk_groups), [&](int32_t, uint64_t winner) { last = winner; });
  for (int32_t expert = lane_id(); expert < experts.count; expert += kWarpSize) {
    const int32_t group = expert / size;
    if (candidate(groups.at(group), group) < last) experts.at(expert) = 0;
  }
}

// Key of an expert; stores its score if p.scores is given.
template <typename Rows>
__device__ uint32_t scored_key(const pmo_topk_params& p, const Scoring& scoring, int64_t token, int32_t expert, float logit) {
  float value = logit;
  if (p.pre_act != 0 || p.scores != nullptr) {
    const float score = rounded<Rows>(scoring(logit));
    if (p.scores != nullptr) put<Rows>(p.scores, token * p.num_experts + expert, score);
    if (p.pre_act != 0) value = score;
  }
  return key_of(p.correction_bias == nullptr ? value : value + p.correction_bias[expert]);
}

template <typename Rows, bool kShared>
__global__ void __launch_bounds__(kThreads) choose_experts(pmo_topk_params p, int64_t words_of_warp) {
  extern __shared__ uint32_t shared_words[];
  uint32_t* words = kShared ? shared_words + threadIdx.x / kWarpSize * words_of_warp
                            : static_cast<uint32_t*>(p.workspace) + warp_id() * words_of_warp;
  const auto num_experts = static_cast<int32_t>(p.num_experts), topk = static_cast<int32_t>(p.topk);
  const Keys experts = {words, num_experts};
  const Keys groups = {words + word_of(num_experts), static_cast<int32_t>(p.num_groups)};
  const bool pre_act = p.pre_act != 0, scores_all = pre_act || p.scores != nullptr;
  const int lane = lane_id();
#pragma unroll 1
  for (int64_t token = warp_id(); token < p.num_tokens; token += int64_t{gridDim.x} * kWarps) {
    const auto logit = [&](int64_t expert) { return element<Rows>(p.gating, token * p.gating_row_stride + expert); };
    Scoring scoring = {p.use_sigmoid != 0};
    if (scores_all) scoring.run_over(num_experts, logit);
    __syncwarp();  // before the keys of the previous token are overwritten
#pragma unroll 4
    for (int32_t expert = lane; expert < num_experts; expert += kWarpSize) {
      experts.at(expert) = scored_key<Rows>(p, scoring, token, expert, logit(expert));
    }
    if (p.topk_groups < p.num_groups) keep_groups(p, experts, groups);

    // From here on lane k % 32 handles slot k.
    const int64_t first_slot = token * topk;
    int32_t chosen = 0;
    experts.each_highest(topk, [&](int32_t rank, uint64_t winner) {
      const int32_t slot = rank - rank % kWarpSize + lane;
      if (slot == rank) chosen = static_cast<int32_t>(place_of(winner));
      const bool is_last = rank % kWarpSize == kWarpSize - 1 || rank + 1 == topk;
      if (is_last && slot <= rank) p.ids[first_slot + slot] = chosen;
    });
    const auto chosen_logit = [&](int32_t k) { return logit(topk <= kWarpSize ? chosen : p.ids[first_slot + k]); };
    if (!pre_act) scoring.run_over(topk, chosen_logit);
    const auto score = [&](int32_t k) { return rounded<Rows>(scoring(chosen_logit(k))); };
    const float divisor = p.renormalize == 0 ? 1.0f : divisor_of(rounded<Rows>(lane_sum(topk, score)));
    for (int32_t k = lane; k < topk; k += kWarpSize) {
      put<Rows>(p.weights, first_slot + k, score(k) / divisor * p.scaling_factor);
    }
  }
}

// The same without group limits, for up to 32 * kKeys experts and 32 slots: logits and keys stay in registers. A lane sorts its
// keys once, so a round takes one warp reduction, or two if keys are equal. H200, T 16384, E 64, K 8: 16.2 us; with keys in
// shared memory 33.6 us. T 4096, E 128: 10.0 us; with a search among eight keys in each round 11.9 us.
template <typename Rows, int kKeys>
__global__ void __launch_bounds__(kThreads) choose_few_experts(pmo_topk_params p) {
  const auto num_experts = static_cast<int32_t>(p.num_experts), topk = static_cast<int32_t>(p.topk);
  const bool pre_act = p.pre_act != 0;
  const int lane = lane_id();
  const int64_t token = warp_id();
  if (token >= p.num_tokens) return;
  const auto is_expert = [&](int i) { return i * kWarpSize + lane < num_experts; };
  const auto logit = [&](int64_t expert) { return element<Rows>(p.gating, token * p.gating_row_stride + expert); };
  // Logits, then selection values; the loads of both arrays are in flight together.
  float values[kKeys], bias[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    values[i] = is_expert(i) ? logit(i * kWarpSize + lane) : -INFINITY;
    bias[i] = p.correction_bias != nullptr && is_expert(i) ? p.correction_bias[i * kWarpSize + lane] : 0.0f;
  }
  Scoring scoring = {p.use_sigmoid != 0};
  if (pre_act || p.scores != nullptr) {
    if (!scoring.use_sigmoid) {
      scoring.highest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) scoring.highest = fmaxf(scoring.highest, values[i]);
      scoring.highest = warp_max(scoring.highest);
    }
    float exponentials[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) exponentials[i] = scoring.exponential(values[i]);
    if (!scoring.use_sigmoid) {
      scoring.sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) scoring.sum += is_expert(i) ? exponentials[i] : 0.0f;
      scoring.sum = sum_over_warp_by_halves(scoring.sum);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float score = rounded<Rows>(scoring.quotient(values[i], exponentials[i]));
      if (pre_act) values[i] = score;
      if (p.scores != nullptr && is_expert(i)) put<Rows>(p.scores, token * num_experts + i * kWarpSize + lane, score);
    }
  }
  uint32_t keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) keys[i] = is_expert(i) ? key_of(values[i] + bias[i]) : 0;

  // Odd-even sort of the lane's candidates in descending order; of equal keys the lower expert first.
  int32_t places[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) places[i] = i * kWarpSize + lane;
#pragma unroll
  for (int round = 0; round < kKeys; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < kKeys; i += 2) {
      if (keys[i + 1] > keys[i]) {
        const uint32_t key = keys[i];
        const int32_t place = places[i];
        keys[i] = keys[i + 1], places[i] = places[i + 1];
        keys[i + 1] = key, places[i + 1] = place;
      }
    }
  }

  int32_t chosen = 0;  // lane k handles slot k
#pragma unroll 1
  for (int32_t slot = 0; slot < topk; ++slot) {
    const uint32_t highest = max_over_warp(keys[0]);
    bool wins = keys[0] == highest;
    unsigned winners = __ballot_sync(kAllLanes, wins);
    if ((winners & (winners - 1)) != 0) {  // equal keys: the lower expert wins
      const uint32_t lowest = ~max_over_warp(wins ? ~static_cast<uint32_t>(places[0]) : 0u);
      wins = static_cast<uint32_t>(places[0]) == lowest;
      winners = __ballot_sync(kAllLanes, wins);
    }
    const int32_t winner = __shfl_sync(kAllLanes, places[0], __ffs(winners) - 1);
    if (lane == slot) chosen = winner;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (!wins) break;
      keys[i] = i + 1 < kKeys ? keys[i + 1] : 0;
      places[i] = i + 1 < kKeys ? places[i + 1] : places[i];
    }
  }
  const bool is_slot = lane < topk;
  const int64_t own_slot = token * topk + lane;
  if (is_slot) p.ids[own_slot] = chosen;
  const float own = is_slot ? logit(chosen) : -INFINITY;
  if (!pre_act && !scoring.use_sigmoid) scoring.highest = warp_max(own);
  const float exponential = scoring.exponential(own);
  if (!pre_act && !scoring.use_sigmoid) scoring.sum = sum_over_warp_by_halves(is_slot ? exponential : 0.0f);
  const float score = rounded<Rows>(scoring.quotient(own, exponential));
  const auto total = [&] { return rounded<Rows>(sum_over_warp_by_halves(is_slot ? score : 0.0f)); };
  const float divisor = p.renormalize == 0 ? 1.0f : divisor_of(total());
  if (is_slot) put<Rows>(p.weights, own_slot, score / divisor * p.scaling_factor);
}

template <typename Rows>
__global__ void __launch_bounds__(kThreads) differentiate(pmo_topk_backward_params p) {
  const auto num_experts = static_cast<int32_t>(p.num_experts), topk = static_cast<int32_t>(p.topk);
  const bool use_sigmoid = p.use_sigmoid != 0, pre_act = p.pre_act != 0;
  const bool scores_all = pre_act || p.d_scores != nullptr;
  const int lane = lane_id();
#pragma unroll 1
  for (int64_t token = warp_id(); token < p.num_tokens; token += int64_t{gridDim.x} * kWarps) {
    const int64_t first = token * num_experts, first_slot = token * topk;
    const auto logit = [&](int64_t expert) { return element<Rows>(p.gating, token * p.gating_row_stride + expert); };
    const auto d_score = [&](int64_t i) { return p.d_scores == nullptr ? 0.0f : element<Rows>(p.d_scores, first + i); };
    const auto is_expert = [&](int64_t id) { return id >= 0 && id < num_experts; };
    const auto chosen_logit = [&](int32_t k) {
      const int64_t id = p.ids[first_slot + k];
      return is_expert(id) ? logit(id) : -INFINITY;
    };
    Scoring scoring = {use_sigmoid}, of_chosen = {use_sigmoid};
    if (scores_all) scoring.run_over(num_experts, logit);
    if (pre_act) {
      of_chosen = scoring;
    } else {
      of_chosen.run_over(topk, chosen_logit);
    }
    const auto weight = [&](int32_t k) { return of_chosen(chosen_logit(k)); };

    // Gradient of a weight before the division by the divisor, without the part that all slots share.
    float divisor = 1.0f, through_sum = 0.0f;
    const auto d_weight = [&](int32_t k) {
      float gradient = 0.0f;
      if (p.d_weights != nullptr && is_expert(p.ids[first_slot + k])) {
        gradient = element<Rows>(p.d_weights, first_slot + k) * p.scaling_factor;
      }
      return gradient - through_sum;
    };
    const auto product = [&](int32_t k) { return d_weight(k) * (weight(k) / divisor); };
    if (p.renormalize != 0 && p.d_weights != nullptr) {
      divisor = divisor_of(lane_sum(topk, weight));
      // Computed from the quotients, so that a single weight, which is 1, has a gradient of exactly 0.
      through_sum = lane_sum(topk, product);
    }

    const float of_weights = use_sigmoid ? 0.0f : lane_sum(topk, product);
    float dot = 0.0f;
    if (!use_sigmoid && p.d_scores != nullptr) {
      dot = lane_sum(num_experts, [&](int32_t i) { return d_score(i) * scoring(logit(i)); });
    }
    if (pre_act) dot += of_weights;
    // Gradient of an expert's logit from the gradient of its score among all experts.
    const auto through_score = [&](int64_t i, float d) {
      if (use_sigmoid) return d * sigmoid_slope(logit(i));
      return scores_all ? scoring(logit(i)) * (d - dot) : 0.0f;
    };
#pragma unroll 4
    for (int32_t i = lane; i < num_experts; i += kWarpSize) put<Rows>(p.d_gating, first + i, through_score(i, d_score(i)));
    __syncwarp();  // chosen experts are written a second time
    for (int32_t k = lane; k < topk; k += kWarpSize) {
      const int64_t id = p.ids[first_slot + k];
      if (!is_expert(id)) continue;
      float own = use_sigmoid ? d_weight(k) * (sigmoid_slope(logit(id)) / divisor) : product(k);
      if (!use_sigmoid && !pre_act) own -= weight(k) * of_weights;
      put<Rows>(p.d_gating, first + id, through_score(id, d_score(id)) + own);
    }
  }
}

int64_t words_of_warp(const pmo_topk_params& p) { return word_of(p.num_experts) + word_of(p.num_groups) + 1; }

bool fits_shared(const pmo_topk_params& p) {
  return kWarps * words_of_warp(p) * static_cast<int64_t>(sizeof(uint32_t)) <= kSharedBytes;
}

unsigned workspace_blocks(const pmo_topk_params& p) { return grid_for(p.num_tokens, kWarps, kWorkspaceBlocks); }

int64_t workspace_bytes(const pmo_topk_params& p) {
  return fits_shared(p) ? 0 : workspace_blocks(p) * kWarps * words_of_warp(p) * static_cast<int64_t>(sizeof(uint32_t));
}

int topk(const pmo_topk_params& p, cudaStream_t stream) {
  if (const int status = check_topk(p)) return status;
  const int64_t needed = workspace_bytes(p);
  PMO_REQUIRE(
      needed == 0 || (p.workspace != nullptr && address(p.workspace) % sizeof(uint32_t) == 0 && p.workspace_bytes >= needed),
      "workspace", "4-byte aligned and as large as pmo_topk_cuda_workspace_bytes says");
  if (p.num_tokens == 0) return PMO_OK;
  const int64_t words = words_of_warp(p);
  return with_rows(p.dtype, [&](auto rows) -> int {
    using Rows = decltype(rows);
    const bool is_small = p.topk <= kWarpSize && p.topk_groups == p.num_groups && p.num_tokens <= INT32_MAX;
    const auto start = [&](auto* kernel, unsigned blocks, auto... rest) {
      return launch("choose_experts", kernel, {blocks, kThreads}, stream, p, rest...);
    };
    if (is_small && p.num_experts <= 64) {
      return start(choose_few_experts<Rows, 2>, grid_for(p.num_tokens, kWarps, kMaxBlocksOfGrid));
    }
    if (is_small && p.num_experts <= 128) {
      return start(choose_few_experts<Rows, 4>, grid_for(p.num_tokens, kWarps, kMaxBlocksOfGrid));
    }
    if (is_small && p.num_experts <= 256) {
      return start(choose_few_experts<Rows, 8>, grid_for(p.num_tokens, kWarps, kMaxBlocksOfGrid));
    }
    if (needed > 0) return start(choose_experts<Rows, false>, workspace_blocks(p), words);
    const size_t bytes = kWarps * static_cast<size_t>(words) * sizeof(uint32_t);
    const Grid grid = {grid_for(p.num_tokens, kWarps), kThreads, bytes};
    return launch("choose_experts", choose_experts<Rows, true>, grid, stream, p, words);
  });
}

int topk_backward(const pmo_topk_backward_params& p, cudaStream_t stream) {
  if (const int status = check_topk_backward(p)) return status;
  if (p.num_tokens == 0) return PMO_OK;
  return with_rows(p.dtype, [&](auto rows) -> int {
    return launch("differentiate", differentiate<decltype(rows)>, {grid_for(p.num_tokens, kWarps), kThreads}, stream, p);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_topk_cuda(const pmo_topk_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::topk);
}

extern "C" int64_t pmo_topk_cuda_workspace_bytes(const pmo_topk_params* params) {
  return params == nullptr || pmo::check_topk(*params) != 0 ? 0 : pmo::cuda::workspace_bytes(*params);
}

extern "C" int pmo_topk_backward_cuda(const pmo_topk_backward_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::topk_backward);
}
