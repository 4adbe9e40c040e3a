// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The barrier of the ranks inside a kernel (pmo_rank_barrier_params): a thread per rank stores this rank's call and counter there
// (st.release.sys), waits for those of the other rank (ld.acquire.sys) and compares the calls.
#pragma once

#include <algorithm>
#include <cstdio>

#include "common/regions.h"
#include "cuda/ptx/memory_order.cuh"

namespace pmo {
namespace cuda {

// The call of this rank, passed by value.
struct Call {
  int32_t words[PMO_CALL_WORDS];

  explicit Call(const pmo_rank_barrier_params& p) { std::copy(p.call, p.call + PMO_CALL_WORDS, words); }
};

// Marks the state and reports the calls of all ranks, unless an earlier report exists. Called by all threads of a CTA, of which
// the first ones have a rank each.
__device__ inline void mark(const pmo_rank_barrier_params& p, const int32_t* calls, int32_t reason) {
  const bool is_first = *static_cast<volatile int32_t*>(p.report) == 0;
  __syncthreads();
  if (is_first && threadIdx.x < p.num_ranks) {
    for (int i = 0; i < PMO_CALL_WORDS; ++i) {
      const int word = static_cast<int>(threadIdx.x) * PMO_CALL_WORDS + i;
      p.report[1 + word] = calls[word];
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  p.state[1] = 1;
  if (is_first) *static_cast<volatile int32_t*>(p.report) = reason;
}

// Number of the barrier that comes next.
__device__ inline uint32_t next_round(const pmo_rank_barrier_params& p) {
  return static_cast<uint32_t>(*static_cast<volatile int32_t*>(p.state)) + 1;
}

// Tells a rank that this one has arrived. Earlier writes of the thread, and those that it has observed, are visible there.
__device__ inline void signal(const pmo_rank_barrier_params& p, const Call& own, uint32_t round, int rank) {
#pragma unroll
  for (int i = 0; i < PMO_CALL_WORDS; ++i) *call_word(p.peers, p.region_bytes, rank, round, i) = own.words[i];
  __threadfence_system();
  st_release_sys(reinterpret_cast<uint32_t*>(static_cast<char*>(p.peers) + rank * p.region_bytes), round);
}

// Waits for a rank.
__device__ inline void wait_for(const pmo_rank_barrier_params& p, uint32_t round, int rank) {
  const auto* arrived = reinterpret_cast<const uint32_t*>(static_cast<const char*>(p.arrived) + rank * p.region_bytes);
  const uint64_t begin = globaltimer(), most = static_cast<uint64_t>(p.timeout_ms) * 1000000;
  while (static_cast<int32_t>(ld_acquire_sys(arrived) - round) < 0) {
    if (globaltimer() - begin > most) {
      printf("paddle_moe_ops: ExpertParallel: rank %d of the group did not answer\n", rank);
      __trap();
    }
    __nanosleep(40);
  }
}

// True if a rank that has arrived is in another call. Its call is stored in `calls`, unless that is null.
__device__ inline bool is_in_another_call(const pmo_rank_barrier_params& p, const Call& own, uint32_t round, int rank,
                                          int32_t* calls) {
  bool differs = false;
#pragma unroll
  for (int i = 0; i < PMO_CALL_WORDS; ++i) {
    const int32_t word = *static_cast<volatile int32_t*>(call_word(p.arrived, p.region_bytes, rank, round, i));
    if (calls != nullptr) calls[rank * PMO_CALL_WORDS + i] = word;
    differs |= i + 1 < PMO_CALL_WORDS && word != own.words[i];
  }
  return differs;
}

}  // namespace cuda
}  // namespace pmo
