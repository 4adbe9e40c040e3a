// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Mainloop of the float8 GEMM kernels with block scales (fp8.cu, fp8_wgrad.cu), and the state that a cluster of two CTAs shares.
//
// A stage holds 128 of K, K-major with 128-byte swizzle: 128 rows of operand A, then 256 rows of operand B in two halves. Each
// consumer warpgroup owns 64 rows of A: m64n128k32 MMAs with the first half of B, then with the other.
//
// Promotion: the tensor core's accumulators have too few bits for the whole K loop. After each stage they are multiplied by both
// scales and added to float32 accumulators in registers. While one consumer promotes or runs its epilogue, the other one keeps
// the tensor cores busy; they share no barrier. Scales are loaded one stage ahead.
#pragma once

#include "cuda/gemm/scheduler.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace pmo {
namespace cuda {

constexpr int kFp8TileK = 128, kFp8Columns = 256;
constexpr int kFp8BytesOfHalf = kFp8Columns / 2 * kFp8TileK;  // of a stage's operand B
constexpr int kFp8BytesOfA = 128 * kFp8TileK;
constexpr int kFp8StageBytes = kFp8BytesOfA + 2 * kFp8BytesOfHalf;
constexpr int kClusterSize = 2;  // CTAs

// Architectures before sm_90, where kernels are empty, have no clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PMO_CLUSTER(blocks)
#else
#define PMO_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

#ifdef PMO_SM90A

template <int kStages>
using Fp8Pipeline = SmemPipeline<kStages, kFp8StageBytes, kFp8BytesOfA>;

// Index of the cluster's next tile, from CTA 0 to CTA 1. Both mbarriers synchronise at cluster scope: a plain remote arrive at
// `read` can overtake the load of `tile`, and CTA 0 would then overwrite an index that CTA 1 has not read.
struct ClusterTile {
  uint64_t sent, read;
  volatile int tile;

  // True if this CTA requests tiles from the scheduler.
  static __device__ bool requests() { return blockIdx.x % kClusterSize == 0; }

  __device__ void init() {
    mbarrier_init(&sent, 1);
    mbarrier_init(&read, 1);
  }

  // Called by one lane of the scheduler warp of each CTA: the next tile of both. `phase` alternates from 0 on.
  __device__ int next(const TileScheduler& scheduler, int clusters, uint32_t phase) {
    if (requests()) {
      const int index = scheduler.next_tile(clusters);
      mbarrier_wait_parity_acquire_cluster(&read, phase ^ 1);
      st_shared_cluster(&tile, index, 1);
      mbarrier_arrive_release_cluster(&sent, 1);
      return index;
    }
    mbarrier_wait_parity_acquire_cluster(&sent, phase);
    const int index = tile;
    mbarrier_arrive_release_cluster(&read, 0);
    return index;
  }
};

// Scales of one stage: of a thread's two rows of A, and of both halves of B.
struct StageScales {
  float row[2], half[2];
};

// Promotion: d += scales * the accumulators of one stage and one half of B.
template <int kFirst>
__device__ inline void promote_accumulators(float (&d)[128], const float (&partial)[64], const StageScales& scales) {
  const float scale = scales.half[kFirst / 64];
  const float of_row[2] = {__fmul_rn(scales.row[0], scale), __fmul_rn(scales.row[1], scale)};
#pragma unroll
  for (int i = 0; i < 64; ++i) d[kFirst + i] = fmaf(partial[i], of_row[i / 2 % 2], d[kFirst + i]);
}

// All MMAs of one stage and one half of B; returns after they have completed.
__device__ inline void wgmma_stage(float (&partial)[64], uint32_t rows, uint32_t columns) {
  wgmma_fence();
  const uint64_t a = smem_descriptor(rows, 0, 1024), b = smem_descriptor(columns, 0, 1024);
  constexpr int kNext = 32 >> 4;  // 32 bytes along K
  wgmma_m64k32_e4m3<128, 0, 0>(partial, a, b);
#pragma unroll
  for (int k = 1; k < kFp8TileK / 32; ++k) wgmma_m64k32_e4m3<128, 0, 1>(partial, a + k * kNext, b + k * kNext);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  register_fence(partial);
}

// Mainloop of consumer warpgroup `consumer`: adds `steps` > 0 stages to d. reader.load(step) returns the StageScales of a K step.
// `partial` is room for the tensor core's accumulators.
template <int kStages, typename ScaleReader>
__device__ inline void fp8_mainloop(float (&d)[128], float (&partial)[64], const Fp8Pipeline<kStages>& pipeline,
                                    PipelineState<kStages>& state, int steps, const ScaleReader& reader, int consumer) {
  const bool arrives = threadIdx.x % kWarpSize < kClusterSize;  // lane i arrives at CTA i
  StageScales next = reader.load(0);
  for (int step = 0; step < steps; ++step) {
    const StageScales scales = next;
    next = reader.load(min(step + 1, steps - 1));
    const uint32_t rows = pipeline.a(state.stage) + consumer * (kFp8BytesOfA / 2), columns = pipeline.b(state.stage);
    mbarrier_wait_parity(&pipeline.full[state.stage], state.phase);
    wgmma_stage(partial, rows, columns);
    promote_accumulators<0>(d, partial, scales);
    wgmma_stage(partial, rows, columns + kFp8BytesOfHalf);
    if (arrives) mbarrier_arrive_remote(&pipeline.empty[state.stage], threadIdx.x % kWarpSize);
    promote_accumulators<64>(d, partial, scales);
    state.advance();
  }
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
