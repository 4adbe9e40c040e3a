// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Expert parallelism between GPUs that reach each other's memory; the layout of regions is in pmo/ranks.h.
//
// plan: blocks of 128 tokens, a thread each. A first launch counts the tokens of a block for each rank; the second one adds up what the
// blocks before have, ranks its own tokens by ballots, writes maps here and records at the other ranks, and counts the tokens of each
// expert by atomic additions, in shared memory first. Bytes moved: ids are read twice (P times as often with more than 64 ranks), maps written once, and 8 * K bytes to another GPU for each of the token's rows.
// barrier: one block, a thread for each rank, which tells it and waits for it.
#include "pmo/ranks.h"

#include <cstdio>

#include "common/checks.h"
#include "common/regions.h"
#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMostCounted = 4096;  // experts whose tokens a block counts in shared memory

struct PlanBlocks {
  int64_t blocks;
  int32_t* counts;  // [blocks, P] tokens of the block that go to the rank

  explicit PlanBlocks(const pmo_rank_plan_params& p) : blocks(divide_up(p.num_tokens, int64_t{kThreads})) {
    counts = static_cast<int32_t*>(p.workspace);
  }
  int64_t bytes(const pmo_rank_plan_params& p) const { return blocks * p.num_ranks * static_cast<int64_t>(sizeof(int32_t)); }
};

// Which ranks a token goes to: a bit for each of up to 64, so that its ids are read once.
class Ranks {
 public:
  __device__ Ranks(const pmo_rank_plan_params& p, int64_t token) : p_(p), token_(token) {
    if (token >= p.num_tokens || p.num_ranks > 64) return;
    for (int64_t k = 0; k < p.topk; ++k) {
      const int32_t rank = rank_of_slot(p, token * p.topk + k);
      if (rank >= 0) bits_ |= uint64_t{1} << rank;
    }
  }

  __device__ bool has(int32_t rank) const {
    if (token_ >= p_.num_tokens) return false;
    return p_.num_ranks > 64 ? slots_at_rank(p_, token_, rank) > 0 : (bits_ >> rank & 1) != 0;
  }

 private:
  const pmo_rank_plan_params& p_;
  const int64_t token_;
  uint64_t bits_ = 0;
};

__global__ void __launch_bounds__(kThreads) count_tokens(const __grid_constant__ pmo_rank_plan_params p, PlanBlocks plan) {
  const int64_t token = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.dropped = 0;
  for (int64_t expert = token; expert < p.num_ranks * p.experts_per_rank; expert += int64_t{gridDim.x} * kThreads) {
    p.routed[expert] = 0;
  }
  const Ranks ranks(p, token);
  for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
    const int count = __syncthreads_count(ranks.has(rank));
    if (threadIdx.x == 0) plan.counts[blockIdx.x * p.num_ranks + rank] = count;
  }
}

__global__ void __launch_bounds__(kThreads) place_tokens(const __grid_constant__ pmo_rank_plan_params p, PlanBlocks plan) {
  __shared__ int32_t before_block, of_warps[kWarps];
  extern __shared__ int32_t of_experts[];  // this block's tokens of each expert, with up to kMostCounted experts
  const int64_t token = blockIdx.x * int64_t{kThreads} + threadIdx.x, columns = most_rows(p.num_ranks, p.topk);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  int32_t* rows = p.token_rows + token * columns;
  int64_t made = 0;
  const int64_t experts = p.num_ranks * p.experts_per_rank;
  const bool counts_here = experts <= kMostCounted;
  if (counts_here) {
    for (int64_t expert = threadIdx.x; expert < experts; expert += kThreads) of_experts[expert] = 0;
    __syncthreads();
  }
  for (int64_t k = 0; k < (token < p.num_tokens ? p.topk : 0); ++k) {
    const int64_t expert = first_choice(p, token, k);
    if (expert < 0) continue;
    if (counts_here) {  // integers: any order
      atomicAdd(of_experts + expert, 1);
    } else {
      atomicAdd(p.routed + expert, 1);
    }
  }
  const Ranks ranks(p, token);
  for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
    if (warp == 0) {
      int32_t sum = 0;
      for (int64_t block = lane; block < blockIdx.x; block += kWarpSize) sum += plan.counts[block * p.num_ranks + rank];
      sum = sum_over_warp(sum);
      if (lane == 0) before_block = sum;
    }
    const bool has = ranks.has(rank);
    const unsigned goes = __ballot_sync(kAllLanes, has);
    if (lane == 0) of_warps[warp] = __popc(goes);
    __syncthreads();
    int32_t place = before_block + __popc(goes & ((1u << lane) - 1));
    for (int other = 0; other < warp; ++other) place += of_warps[other];
    if (has && place < p.capacity) {
      const int64_t row = rank * p.rows_per_rank + place;
      rows[made++] = static_cast<int32_t>(row);
      if (p.row_to_token != nullptr) p.row_to_token[row] = static_cast<int32_t>(token);
      record(p, token, rank, place);
    } else if (has) {
      atomicAdd(p.dropped, slots_at_rank(p, token, rank));
    }
    if (is_last && threadIdx.x == kThreads - 1) {
      const int64_t all = int64_t{place} + has;
      *Records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk).count = static_cast<int32_t>(min(all, p.capacity));
    }
    __syncthreads();
  }
  for (int64_t expert = threadIdx.x; expert < (counts_here ? experts : 0); expert += kThreads) {
    if (of_experts[expert] > 0) atomicAdd(p.routed + expert, of_experts[expert]);
  }
  if (token >= p.num_tokens) return;
  for (; made < columns; ++made) rows[made] = -1;
}

// No token goes anywhere.
__global__ void clear_counts(const __grid_constant__ pmo_rank_plan_params p) {
  if (threadIdx.x == 0) *p.dropped = 0;
  for (int64_t expert = threadIdx.x; expert < p.num_ranks * p.experts_per_rank; expert += kThreads) p.routed[expert] = 0;
  for (int64_t rank = threadIdx.x; rank < p.num_ranks; rank += kThreads) {
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
  if (p.num_tokens * p.topk == 0) return launch("clear_counts", clear_counts, {1, kThreads}, stream, p);
  Grid grid = {static_cast<unsigned>(blocks.blocks), kThreads};
  if (const int status = launch("count_tokens", count_tokens, grid, stream, p, blocks)) return status;
  const int64_t experts = p.num_ranks * p.experts_per_rank;
  if (experts <= kMostCounted) grid.shared_bytes = experts * sizeof(int32_t);
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

// By a kernel: the driver's copy of two dimensions to another GPU took 14 us.
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

__device__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_for_ranks(const __grid_constant__ pmo_rank_barrier_params p) {
  const int64_t region = int64_t{threadIdx.x} * p.region_bytes;
  const uint32_t turn = static_cast<uint32_t>(p.state[0]) + 1;
  __threadfence_system();  // what kernels before this one wrote
  store_release(reinterpret_cast<uint32_t*>(static_cast<char*>(p.peers) + region), turn);
  const auto* arrived = reinterpret_cast<const uint32_t*>(static_cast<const char*>(p.arrived) + region);
  const uint64_t begin = nanoseconds(), most = static_cast<uint64_t>(p.timeout_ms) * 1000000;
  while (static_cast<int32_t>(load_acquire(arrived) - turn) < 0) {
    if (nanoseconds() - begin > most) {
      printf("paddle_moe_ops: ExpertParallel: rank %d of the group did not answer\n", static_cast<int>(threadIdx.x));
      __trap();
    }
    __nanosleep(40);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.state[0] = static_cast<int32_t>(turn);
}

int barrier(const pmo_rank_barrier_params& p, cudaStream_t stream) {
  if (const int status = check_rank_barrier(p)) return status;
  return launch("wait_for_ranks", wait_for_ranks, {1, static_cast<unsigned>(p.num_ranks)}, stream, p);
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
