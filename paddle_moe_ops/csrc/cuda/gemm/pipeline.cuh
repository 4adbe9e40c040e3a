// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Shared-memory pipeline of the warp-specialised GEMM kernels for sm_90a: kStages stages, each with a full and an empty mbarrier.
//
// Producers wait for a stage's empty mbarrier, load the operands of one K step into it and complete its full mbarrier. Consumers
// wait for the full mbarrier, run the MMAs of the K step and arrive at the empty one. A CTA has one producer warpgroup and two
// consumer warpgroups, plus one more warpgroup in kernels that gather.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {

constexpr int kWarpgroupThreads = 128;
constexpr int kBlockThreads = 3 * kWarpgroupThreads;
constexpr int kBoxBytes = 64 * 128;  // of a TMA box: 64 rows of 128 bytes, 128-byte swizzle

#ifdef PMO_SM90A

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Position of a warp or a warpgroup in a pipeline: the stage of its next step, and the parity of that stage's phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance_by(int steps) {
    stage += steps;
    phase ^= stage / kStages & 1;
    stage %= kStages;
  }

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Stages of kBytes bytes from shared address `first` on, a multiple of 1024 as 128-byte swizzle requires. A stage holds operand
// A, kBytesOfA bytes, then operand B.
template <int kStages, int kBytes, int kBytesOfA>
struct SmemPipeline {
  uint32_t first;
  uint64_t *full, *empty;

  __device__ uint32_t a(int stage) const { return first + stage * kBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kBytesOfA; }
};

// Called by all threads of the CTA; synchronises them. `full_arrivals` arrivals complete a full mbarrier. One arrival of each
// warp of `consumer_warpgroups` warpgroups completes an empty one.
template <typename Pipeline, int kStages>
__device__ inline Pipeline init_pipeline(uint8_t* shared, uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                         int full_arrivals = 1, int consumer_warpgroups = 1) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], full_arrivals);
      mbarrier_init(&empty[stage], consumer_warpgroups * kWarpgroupThreads / kWarpSize);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  return {(smem_address(shared) + 1023) / 1024 * 1024, full, empty};
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
