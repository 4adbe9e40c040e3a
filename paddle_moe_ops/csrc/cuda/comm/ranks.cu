// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Plan, records, values and barrier of expert parallelism between GPUs that map each other's memory; pmo/ranks.h defines the
// regions.
//
// * plan: a lane per slot, up to 32 lanes per token, two launches. count_tokens counts the tokens of a CTA for each rank.
//   place_tokens sums the counts of earlier CTAs, ranks its own tokens by ballots, writes maps to local memory and records to the
//   other ranks, and counts the tokens of each expert by atomic additions, in shared memory first. Bytes moved: ids are read twice
//   (P times as often with more than 32 slots), maps written once, and 8 K bytes to another GPU for each of the token's rows.
// * records: arrived records -> ids and probabilities of the arrived rows, a thread per slot.
// * put: values of rows -> the region at each rank, a thread per access of up to 16 bytes. take: the arrived regions -> one array,
//   by a 2-D copy. get: the value of each slot from the region of its row's rank, a thread per slot.
// * rows: the place of each row of a plan in the regions, a thread per row.
// * barrier: one CTA, as cuda/comm/meeting.cuh describes it.
// * spoil: fills data with 0xFF bytes if the ranks' codes differ; all CTAs read the codes.
//
// All but plan and barrier are memory-bound.
#include "pmo/ranks.h"

#include <algorithm>

#include "common/checks.h"
#include "common/regions.h"
#include "cuda/comm/meeting.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPlanThreads = 256;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
constexpr int kRanksAtOnce = kPlanWarps;      // ranks per pass: each warp sums the counts of earlier CTAs for one rank
constexpr int64_t kMaxCountedExperts = 4096;  // experts; up to here a CTA counts their tokens in shared memory

// Grid of the plan. A token has as many lanes of a warp as slots, rounded up to a power of two, at most 32.
struct PlanBlocks {
  int lanes;
  int64_t tokens, blocks;  // tokens per CTA
  int32_t* counts;         // [P, CTAs] tokens of the CTA that go to the rank

  explicit PlanBlocks(const pmo_rank_plan_params& p) : lanes(1) {
    while (lanes < p.topk && lanes < kWarpSize) lanes *= 2;
    tokens = kPlanThreads / lanes;
    blocks = divide_up(p.num_tokens, tokens);
    counts = static_cast<int32_t*>(p.workspace);
  }
  int64_t bytes(const pmo_rank_plan_params& p) const { return blocks * p.num_ranks * static_cast<int64_t>(sizeof(int32_t)); }
};

// A lane of a token, with slots slot, slot + lanes, ...
class TokenLane {
 public:
  __device__ TokenLane(const pmo_rank_plan_params& p, const PlanBlocks& plan)
      : token(blockIdx.x * plan.tokens + threadIdx.x / plan.lanes), slot(threadIdx.x % plan.lanes), p_(p), lanes_(plan.lanes) {
    begin_ = static_cast<int>(threadIdx.x) % kWarpSize / lanes_ * lanes_;
    mine_ = (lanes_ == kWarpSize ? kAllLanes : (1u << lanes_) - 1) << begin_;
    if (token < p.num_tokens && slot < p.topk) rank_ = rank_of_slot(p, token * p.topk + slot);
  }

  const int64_t token;
  const int64_t slot;

  __device__ bool is_first() const { return slot == 0; }

  // Tokens of this warp that go to a rank, as a mask of their first lanes. Called by all lanes of the warp.
  __device__ unsigned going(int64_t rank) const {
    bool has = rank_ == rank;
    each_more([&](int64_t k) { has |= rank_of_slot(p_, token * p_.topk + k) == rank; });
    const unsigned slots = __ballot_sync(kAllLanes, has);
    return __ballot_sync(kAllLanes, is_first() && (slots & mine_) != 0);
  }
  __device__ bool is_among(unsigned tokens) const { return (tokens >> begin_ & 1) != 0; }
  __device__ int before(unsigned tokens) const { return __popc(tokens & ((1u << begin_) - 1)); }

  // Expert of the lane's first slot, or -1 if it is none or an earlier slot of the token names it. Called by all lanes of the
  // warp.
  __device__ int64_t first_expert() const {
    const bool is_slot = token < p_.num_tokens && slot < p_.topk;
    const int64_t id = is_slot ? id_at(p_.ids, p_.ids_kind, token * p_.topk + slot) : -1;
    const int64_t expert = id >= 0 && id < p_.num_ranks * p_.experts_per_rank ? id : -1;
    // Experts fit 32 bits; the upper word tells tokens apart.
    const auto number = static_cast<unsigned long long>(begin_) << 32 | static_cast<uint32_t>(expert);
    const unsigned same = __match_any_sync(kAllLanes, number);
    return __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x) % kWarpSize ? expert : -1;
  }

  // Calls visit(slot) for the lane's slots: all, or all but the first.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    if (token < p_.num_tokens && slot < p_.topk) visit(slot);
    each_more(visit);
  }
  template <class Visit>
  __device__ void each_more(const Visit& visit) const {
    if (token >= p_.num_tokens) return;
    for (int64_t k = slot + lanes_; k < p_.topk; k += lanes_) visit(k);
  }

 private:
  const pmo_rank_plan_params& p_;
  const int lanes_;
  int begin_;          // the token's first lane
  unsigned mine_;      // the token's lanes
  int32_t rank_ = -1;  // of the first slot
};

__global__ void __launch_bounds__(kPlanThreads) count_tokens(const __grid_constant__ pmo_rank_plan_params p, PlanBlocks plan) {
  __shared__ int32_t of_warps[kRanksAtOnce][kPlanWarps];
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.dropped = 0;
  for (int64_t expert = blockIdx.x * int64_t{kPlanThreads} + threadIdx.x; expert < p.num_ranks * p.experts_per_rank;
       expert += int64_t{gridDim.x} * kPlanThreads) {
    p.routed[expert] = 0;
  }
  const TokenLane lane(p, plan);
  const int warp = threadIdx.x / kWarpSize;
  for (int64_t begin = 0; begin < p.num_ranks; begin += kRanksAtOnce) {
    for (int i = 0; i < kRanksAtOnce && begin + i < p.num_ranks; ++i) {
      const unsigned goes = lane.going(begin + i);
      if (threadIdx.x % kWarpSize == 0) of_warps[i][warp] = __popc(goes);
    }
    __syncthreads();
    if (threadIdx.x < kRanksAtOnce && begin + threadIdx.x < p.num_ranks) {
      int32_t count = 0;
      for (int i = 0; i < kPlanWarps; ++i) count += of_warps[threadIdx.x][i];
      plan.counts[(begin + threadIdx.x) * plan.blocks + blockIdx.x] = count;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kPlanThreads) place_tokens(const __grid_constant__ pmo_rank_plan_params p, PlanBlocks plan) {
  __shared__ int32_t before_block[kRanksAtOnce], of_warps[kRanksAtOnce][kPlanWarps];
  extern __shared__ int32_t of_experts[];  // this CTA's tokens of each expert
  const int64_t columns = max_rows_per_token(p.num_ranks, p.topk), experts = p.num_ranks * p.experts_per_rank;
  const int warp = threadIdx.x / kWarpSize;
  const bool counts_here = experts <= kMaxCountedExperts;
  if (counts_here) {
    for (int64_t expert = threadIdx.x; expert < experts; expert += kPlanThreads) of_experts[expert] = 0;
    __syncthreads();
  }
  const TokenLane lane(p, plan);
  const auto count_expert = [&](int64_t expert) {  // integer sums do not depend on the order
    if (expert >= 0) atomicAdd((counts_here ? of_experts : p.routed) + expert, 1);
  };
  count_expert(lane.first_expert());
  lane.each_more([&](int64_t k) { count_expert(first_choice(p, lane.token, k)); });
  int32_t* const rows = p.token_rows + lane.token * columns;
  int64_t rows_written = 0;
  for (int64_t begin = 0; begin < p.num_ranks; begin += kRanksAtOnce) {
    unsigned going[kRanksAtOnce];
#pragma unroll
    for (int i = 0; i < kRanksAtOnce; ++i) {
      if (begin + i >= p.num_ranks) break;
      going[i] = lane.going(begin + i);
      if (threadIdx.x % kWarpSize == 0) of_warps[i][warp] = __popc(going[i]);
    }
    if (const int64_t rank = begin + warp; rank < p.num_ranks) {
      int32_t sum = 0;
#pragma unroll 8
      for (int64_t block = threadIdx.x % kWarpSize; block < blockIdx.x; block += kWarpSize) {
        sum += plan.counts[rank * plan.blocks + block];
      }
      sum = sum_over_warp(sum);
      if (threadIdx.x % kWarpSize == 0) before_block[warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRanksAtOnce; ++i) {
      const int64_t rank = begin + i;
      if (rank >= p.num_ranks) break;
      int32_t place = before_block[i] + lane.before(going[i]);
      for (int other = 0; other < warp; ++other) place += of_warps[i][other];
      if (lane.is_among(going[i])) {
        if (place < p.capacity) {
          const int64_t row = rank * p.rows_per_rank + place;
          if (lane.is_first()) {
            rows[rows_written++] = static_cast<int32_t>(row);
            if (p.row_to_token != nullptr) p.row_to_token[row] = static_cast<int32_t>(lane.token);
          }
          lane.each([&](int64_t k) { record_slot(p, lane.token, k, rank, place); });
        } else if (lane.is_first()) {
          atomicAdd(p.dropped, slots_at_rank(p, lane.token, rank));
        }
      }
      if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
        int64_t all = before_block[i];
        for (int each = 0; each < kPlanWarps; ++each) all += of_warps[i][each];
        *Records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk).count = static_cast<int32_t>(min(all, p.capacity));
      }
    }
    __syncthreads();
  }
  for (int64_t expert = threadIdx.x; expert < (counts_here ? experts : 0); expert += kPlanThreads) {
    if (of_experts[expert] > 0) atomicAdd(p.routed + expert, of_experts[expert]);
  }
  if (lane.token < p.num_tokens && lane.is_first()) {
    for (; rows_written < columns; ++rows_written) rows[rows_written] = -1;
  }
}

// Plan without tokens or slots.
__global__ void clear_counts(const __grid_constant__ pmo_rank_plan_params p) {
  if (threadIdx.x == 0) *p.dropped = 0;
  for (int64_t expert = threadIdx.x; expert < p.num_ranks * p.experts_per_rank; expert += kPlanThreads) p.routed[expert] = 0;
  for (int64_t rank = threadIdx.x; rank < p.num_ranks; rank += kPlanThreads) {
    *Records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk).count = 0;
  }
}

int plan(const pmo_rank_plan_params& p, cudaStream_t stream) {
  if (const int status = check_rank_plan(p)) return status;
  const PlanBlocks blocks(p);
  PMO_REQUIRE(
      blocks.blocks == 0 || (is_aligned(blocks.counts) && blocks.counts != nullptr && p.workspace_bytes >= blocks.bytes(p)),
      "workspace", "4-byte aligned and as large as pmo_rank_plan_cuda_workspace_bytes says");
  const int64_t rows = p.num_ranks * p.rows_per_rank;
  if (rows > 0 && p.row_to_token != nullptr) PMO_CUDA(cudaMemsetAsync(p.row_to_token, 0xFF, rows * sizeof(int32_t), stream));
  if (p.num_tokens * p.topk == 0) return launch("clear_counts", clear_counts, {1, kPlanThreads}, stream, p);
  Grid grid = {static_cast<unsigned>(blocks.blocks), kPlanThreads};
  if (const int status = launch("count_tokens", count_tokens, grid, stream, p, blocks)) return status;
  const int64_t experts = p.num_ranks * p.experts_per_rank;
  if (experts <= kMaxCountedExperts) grid.shared_bytes = experts * sizeof(int32_t);
  return launch("place_tokens", place_tokens, grid, stream, p, blocks);
}

__global__ void read_records(const __grid_constant__ pmo_rank_records_params p) {
  const int64_t slots = p.num_ranks * p.rows_per_rank * p.topk;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += int64_t{gridDim.x} * kThreads) {
    read_record(p, slot);
  }
}

int records(const pmo_rank_records_params& p, cudaStream_t stream) {
  if (const int status = check_rank_records(p)) return status;
  const int64_t slots = p.num_ranks * p.rows_per_rank * p.topk;
  if (slots == 0) return PMO_OK;
  return launch("read_records", read_records, {grid_for(slots, kThreads), kThreads}, stream, p);
}

template <int kBytes>
__global__ void put_values(const __grid_constant__ pmo_rank_values_params p) {
  using Access = Vector<kBytes>;
  const int64_t accesses = p.rows_per_rank * p.topk * kValueBytes / kBytes;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < accesses * p.num_ranks; i += int64_t{gridDim.x} * kThreads) {
    const int64_t rank = i / accesses;
    auto* region = reinterpret_cast<Access*>(static_cast<char*>(p.window) + rank * p.region_bytes);
    region[i - rank * accesses] = static_cast<const Access*>(p.row_values)[i];
  }
}

// A kernel, since cudaMemcpy2DAsync to another GPU took 14 us.
int put(const pmo_rank_values_params& p, cudaStream_t stream) {
  if (const int status = check_rank_put(p)) return status;
  const int64_t bytes = p.rows_per_rank * p.topk * kValueBytes;
  if (bytes == 0) return PMO_OK;
  constexpr int kWide = 16;
  const bool is_wide = widest_access({address(p.window), address(p.row_values), static_cast<uintptr_t>(p.region_bytes),
                                      static_cast<uintptr_t>(bytes)}) == kWide;
  const Grid grid = {grid_for(p.num_ranks * bytes / (is_wide ? kWide : kValueBytes), kThreads), kThreads};
  return launch("put_values", is_wide ? put_values<kWide> : put_values<kValueBytes>, grid, stream, p);
}

int take(const pmo_rank_values_params& p, cudaStream_t stream) {
  if (const int status = check_rank_take(p)) return status;
  const size_t bytes = p.rows_per_rank * p.topk * kValueBytes;
  if (bytes == 0) return PMO_OK;
  PMO_CUDA(
      cudaMemcpy2DAsync(p.slot_values, bytes, p.window, p.region_bytes, bytes, p.num_ranks, cudaMemcpyDeviceToDevice, stream));
  return PMO_OK;
}

__global__ void get_values(const __grid_constant__ pmo_rank_values_params p) {
  const int64_t slots = p.num_tokens * p.topk;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += int64_t{gridDim.x} * kThreads) {
    static_cast<float*>(p.slot_values)[slot] = value_of_slot(p, slot);
  }
}

int get(const pmo_rank_values_params& p, cudaStream_t stream) {
  if (const int status = check_rank_get(p)) return status;
  const int64_t slots = p.num_tokens * p.topk;
  if (slots == 0) return PMO_OK;
  return launch("get_values", get_values, {grid_for(slots, kThreads), kThreads}, stream, p);
}

__global__ void place_rows(const __grid_constant__ pmo_rank_rows_params p) {
  for (int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x; row < p.num_rows; row += int64_t{gridDim.x} * kThreads) {
    p.places[row] = place_of_row(p, row);
  }
}

int rows(const pmo_rank_rows_params& p, cudaStream_t stream) {
  if (const int status = check_rank_rows(p)) return status;
  if (p.num_rows == 0) return PMO_OK;
  return launch("place_rows", place_rows, {grid_for(p.num_rows, kThreads), kThreads}, stream, p);
}

__global__ void wait_for_ranks(const __grid_constant__ pmo_rank_barrier_params p, const __grid_constant__ Call own) {
  const int rank = static_cast<int>(threadIdx.x);
  if (p.forward_calls != nullptr && __syncthreads_or(!runs_backward(p, rank))) {
    mark(p, p.forward_calls, PMO_GRADIENT_MODES_DIFFER);
    return;
  }
  const uint32_t round = next_round(p);
  signal(p, own, round, rank);  // after the writes of earlier kernels
  wait_for(p, round, rank);
  if (__syncthreads_or(is_in_another_call(p, own, round, rank, p.calls))) mark(p, p.calls, PMO_CALLS_DIFFER);
  if (threadIdx.x == 0) p.state[0] = static_cast<int32_t>(round);
}

int barrier(const pmo_rank_barrier_params& p, cudaStream_t stream) {
  if (const int status = check_rank_barrier(p)) return status;
  return launch("wait_for_ranks", wait_for_ranks, {1, static_cast<unsigned>(p.num_ranks)}, stream, p, Call(p));
}

__global__ void spoil_data(const __grid_constant__ pmo_rank_spoil_params p) {
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < p.num_ranks; rank += kThreads) differs |= p.codes[rank] != p.code;
  if (!__syncthreads_or(differs)) return;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.data_bytes; i += int64_t{gridDim.x} * kThreads) {
    static_cast<unsigned char*>(p.data)[i] = 0xFF;
  }
}

// Few CTAs: almost always the codes agree and the kernel returns.
int spoil(const pmo_rank_spoil_params& p, cudaStream_t stream) {
  if (const int status = check_rank_spoil(p)) return status;
  if (p.data_bytes == 0) return PMO_OK;
  constexpr int64_t kMaxBlocks = 128;
  const auto blocks = static_cast<unsigned>(std::min(divide_up(p.data_bytes, int64_t{kThreads}), kMaxBlocks));
  return launch("spoil_data", spoil_data, {blocks, kThreads}, stream, p);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int64_t pmo_rank_plan_cuda_workspace_bytes(const pmo_rank_plan_params* params) {
  return params == nullptr ? 0 : pmo::cuda::PlanBlocks(*params).bytes(*params);
}

extern "C" int pmo_rank_plan_cuda(const pmo_rank_plan_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::plan);
}

extern "C" int pmo_rank_records_cuda(const pmo_rank_records_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::records);
}

extern "C" int pmo_rank_put_cuda(const pmo_rank_values_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::put);
}

extern "C" int pmo_rank_take_cuda(const pmo_rank_values_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::take);
}

extern "C" int pmo_rank_get_cuda(const pmo_rank_values_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::get);
}

extern "C" int pmo_rank_rows_cuda(const pmo_rank_rows_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::rows);
}

extern "C" int pmo_rank_barrier_cuda(const pmo_rank_barrier_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::barrier);
}

extern "C" int pmo_rank_spoil_cuda(const pmo_rank_spoil_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::spoil);
}
