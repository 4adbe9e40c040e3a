// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped wgrad for sm_90a, 16-bit inputs, float32 accumulators: out[e] = P_e^T Q_e, the sum of p[r]^T q[r] over the rows r of
// expert e, rounded once; with accumulation, out[e] += P_e^T Q_e.
//
//   p [M, p_columns], q [M, q_columns] row-major, strides multiples of 8; one of the two may be gathered from token rows
//   out [E, out_rows, out_columns] row-major; the result is the block from (first_p, first_q) on, and zeros for experts
//     without rows.
//
// K of this GEMM is an expert's number of rows, possibly 0. Both operands are MN-major, as they lie in memory.
//
// Tiles: 128 columns of operand A x 256 columns of operand B. A is p or q, whichever wastes less at the borders; if it is q,
// results are transposed as they are stored. Persistent kernel with a dynamic tile scheduler: tiles are handed out expert by
// expert, in bands.
//
// Warp-specialised, a pipeline of stages of 32 rows (wgrad_producer.cuh). In the producer warpgroup one warp per
// operand loads by TMA and one schedules tiles; a gathered operand A is copied by two warps with cp.async instead. Each consumer
// warpgroup owns 64 of the 128 columns of A: m64n256k16 MMAs, then the epilogue (wgrad_epilogue.cuh).
//
// Rows after an expert's last one belong to the next expert or to none, and may be NaN. The last K step of a tile runs only the
// MMAs that it has rows for, 16 rows each. Rows up to the next multiple of 16 are zeroed in shared memory first, in both
// operands.
//
// Overlap: loads run up to all stages ahead and across tiles; TMA stores overlap the next mainloop. The conversion of
// the accumulators does not overlap this warpgroup's mainloop, so it contains nothing else:
// * another warp computes the coordinates of the next tile, which are popped while the last MMAs run
// * the first MMAs of a tile overwrite the accumulators
// * results have shared memory of their own
//
// Work: 2 M p_columns q_columns FLOPs. Bytes: both operands once from memory and, per tile, from the L2; the results once, with
// the L2 policy evict_first since operands need the L2.
#include <algorithm>
#include <utility>

#include "common/checks.h"
#include "cuda/gemm/wgrad_epilogue.cuh"

namespace pmo {
namespace cuda {
namespace {

#ifdef PMO_SM90A

// Issues the MMAs of the first 16 * kMmas rows of a K step: d += A^T B, or d = A^T B in a tile's first step.
template <int kMmas, typename T>
__device__ inline void mma_step(float (&d)[128], uint32_t stage_a, uint32_t stage_b, bool is_first) {
  const uint64_t a = smem_descriptor(stage_a, kStageBoxBytes, 1024), b = smem_descriptor(stage_b, kStageBoxBytes, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kMmas; ++k) {
    constexpr int kNext = kMmaK * 128 >> 4;
    wgmma_m64k16<kColumnsB, 0, true, true, T>(d, a + k * kNext, b + k * kNext, k > 0 || !is_first);
  }
  wgmma_commit_group();
}

// Mainloop: d = A^T B for the 64 columns of A from byte `from_a` of a stage on. Returns the last stage, whose MMAs are still in
// flight and which the caller releases. `barrier` is a named barrier of the warpgroup. The first MMAs overlap `beside`.
template <bool kGather, typename T, int kStages, typename Function>
__device__ inline int mainloop(float (&d)[128], const WgradPipeline<kStages>& pipeline, PipelineState<kStages>& state, int rows,
                               int from_a, int barrier, const Function& beside) {
  const bool arrives = threadIdx.x % kWarpSize == 0;
  int last = 0;
  for (int left = rows; left > 0; left -= kWgradTileK) {
    mbarrier_wait_parity(&pipeline.full[state.stage], state.phase);
    if (kGather) fence_proxy_async();
    if (left < kWgradTileK && left % kMmaK != 0) zero_stage_tail(pipeline.a(state.stage), left, barrier);
    const uint32_t a = pipeline.a(state.stage) + from_a, b = pipeline.b(state.stage);
    if (left > kMmaK) {
      mma_step<2, T>(d, a, b, left == rows);
    } else {
      mma_step<1, T>(d, a, b, left == rows);
    }
    if (left == rows) beside();
    wgmma_wait_group<1>();
    if (left != rows && arrives) mbarrier_arrive(&pipeline.empty[last]);
    last = state.stage;
    state.advance();
  }
  return last;
}

// Consumer warpgroup: mainloop and epilogue of 64 columns of A of every tile of the CTA.
template <bool kGather, int kAccumulation, typename T, int kStages>
__device__ inline void consume_tiles(const WgradParams& a, const WgradPipeline<kStages>& pipeline, WgradQueue& queue,
                                     uint64_t* sums_loaded) {
  constexpr int kConsumerBarrier = 3;
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int number = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const uint32_t buffer = pipeline.a(kStages) + number * WgradShared<kAccumulation>::kEpilogueBytes;
  constexpr bool kAddsFloat32 = kAccumulation == PMO_GROUPED_ADDS_FLOAT32;
  WgradSums sums = {buffer, sums_loaded + number, 0};
  PipelineState<kStages> state;
  WgradQueue::State at;
  WgradTile next = queue.pop(at);
  while (next.expert != kNoMoreTiles) {
    WgradTile tile = next;
    tile.column_a += 64 * number;
    float d[128];  // the first MMAs overwrite it
    register_fence(d);
    const int last = mainloop<kGather, T>(d, pipeline, state, tile.rows, number * kStageBoxBytes, kConsumerBarrier + number, [&] {
      if constexpr (kAddsFloat32) sums.load(a, tile);
    });
    next = queue.pop(at);
    wgmma_wait_group<0>();
    register_fence(d);
    if (tile.rows > 0 && threadIdx.x % kWarpSize == 0) mbarrier_arrive(&pipeline.empty[last]);
    if constexpr (kAddsFloat32) {
      if (tile.rows > 0) sums.add(a, d, tile, kConsumerBarrier + number);
    } else if constexpr (kAccumulation == PMO_GROUPED_ADDS) {
      add_wgrad<T>(a, d, tile);
    } else {
      epilogue_wgrad<T>(a, d, tile, buffer, kConsumerBarrier + number);
    }
  }
  cp_async_bulk_wait_group_read();
}

#endif  // PMO_SM90A

template <bool kGather, int kAccumulation, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_wgrad(const __grid_constant__ WgradParams a) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t shared[];
  constexpr int kStages = WgradShared<kAccumulation>::kStages;
  using Pipeline = WgradPipeline<kStages>;
  __shared__ uint64_t full[kStages], empty[kStages], sums_loaded[2];
  __shared__ WgradQueue queue;
  if (threadIdx.x == 0) {
    queue.init(2 * kWarpgroupThreads / kWarpSize + 1 + (kGather ? kGatherThreads / kWarpSize : 1));
    for (uint64_t& loaded : sums_loaded) mbarrier_init(&loaded, kWarpgroupThreads / kWarpSize);
  }
  const Pipeline pipeline = init_pipeline<Pipeline>(shared, full, empty, 1 + (kGather ? kGatherThreads : 1), 2);
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<kGather ? kGatherRegisters : kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_boxes<kBoxesA, kStageBoxes, kStages>(a, pipeline, queue);
    if (warp == 1) schedule_tiles(a, queue);
    if constexpr (kGather) {
      __shared__ TokenTable sources;
      if (warp >= 2) gather_rows<kStages>(a, pipeline, queue, sources);
    } else {
      if (warp == 2) load_boxes<0, kBoxesA, kStages>(a, pipeline, queue);
    }
  } else {
    setmaxnreg_inc<kGather ? kGatherConsumerRegisters : kConsumerRegisters>();
    consume_tiles<kGather, kAccumulation, T, kStages>(a, pipeline, queue, sums_loaded);
  }
#endif
}

template <bool kGather, int kAccumulation, typename T>
int launch_wgrad(const WgradParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  constexpr int kBytes = WgradShared<kAccumulation>::kBytes;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_outer", &device, &limits)) return status;
  auto* kernel = grouped_wgrad<kGather, kAccumulation, T>;
  if (const int status = limit.raise(kernel, device, kBytes)) return status;
  const int tiles = params.num_experts * params.a_tiles * params.b_tiles;
  const Grid grid = {static_cast<unsigned>(std::min(tiles, limits.multiprocessors)), kBlockThreads, kBytes};
  return launch("grouped_outer", kernel, grid, stream, params);
}

template <bool kGather, int kAccumulation>
int launch_of_dtype(const WgradParams& a, bool is_bfloat16, cudaStream_t stream) {
  return is_bfloat16 ? launch_wgrad<kGather, kAccumulation, __nv_bfloat16>(a, stream)
                     : launch_wgrad<kGather, kAccumulation, __half>(a, stream);
}

template <bool kGather>
int launch_of_accumulation(const WgradParams& a, int32_t accumulation, bool is_bfloat16, cudaStream_t stream) {
  if (accumulation == PMO_GROUPED_OVERWRITES) return launch_of_dtype<kGather, PMO_GROUPED_OVERWRITES>(a, is_bfloat16, stream);
  if (accumulation == PMO_GROUPED_ADDS) return launch_of_dtype<kGather, PMO_GROUPED_ADDS>(a, is_bfloat16, stream);
  return launch_of_dtype<kGather, PMO_GROUPED_ADDS_FLOAT32>(a, is_bfloat16, stream);
}

// Size of the result in whole tiles, if tiles have kColumnsB columns of the operand with `wide` columns.
int64_t padded_size(int64_t wide, int64_t other) {
  return divide_up(wide, int64_t{kColumnsB}) * kColumnsB * divide_up(other, int64_t{kColumnsA}) * kColumnsA;
}

int wgrad(const pmo_grouped_outer_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_outer(p)) return status;
  if (p.p_columns == 0 || p.q_columns == 0) return PMO_OK;
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16, gathers = p.gathered != PMO_GROUPED_GATHERS_NONE;
  struct Operand {
    const void* rows;
    int64_t columns, row_stride;
  };
  Operand column_a = {p.p, p.p_columns, p.p_row_stride}, column_b = {p.q, p.q_columns, p.q_row_stride};
  WgradParams a = {};
  const bool p_wastes_less = padded_size(p.p_columns, p.q_columns) < padded_size(p.q_columns, p.p_columns);
  a.transposed_out = gathers ? p.gathered == PMO_GROUPED_GATHERS_Q : p_wastes_less;
  if (a.transposed_out) std::swap(column_a, column_b);
  const auto encode_rows = [&](const Operand& of, CUtensorMap* map) {
    return encode({of.rows, 2, {of.columns, p.num_rows}, {of.row_stride}, {64, kWgradTileK}}, is_bfloat16, map);
  };
  if (p.num_rows > 0) {
    if (const int status = gathers ? PMO_OK : encode_rows(column_a, &a.a)) return status;
    if (const int status = encode_rows(column_b, &a.b)) return status;
  }
  a.gathered = {column_a.rows, p.row_to_token, static_cast<uint32_t>(column_a.row_stride * 2), static_cast<int>(p.num_sources)};
  a.columns_a = static_cast<int>(column_a.columns);
  a.columns_b = static_cast<int>(column_b.columns);
  const WgradResults results = {p.out,     p.num_experts, p.out_rows,  p.out_columns,  p.first_p,
                                p.first_q, p.p_columns,   p.q_columns, p.accumulation, is_bfloat16};
  if (const int status = results.set(&a)) return status;
  a.first = p.first;
  a.stop = p.stop;
  a.num_rows = static_cast<int>(p.num_rows);
  a.num_experts = static_cast<int>(p.num_experts);
  a.a_tiles = static_cast<int>(divide_up(column_a.columns, int64_t{kColumnsA}));
  a.b_tiles = static_cast<int>(divide_up(column_b.columns, int64_t{kColumnsB}));
  a.scheduler = {p.counters};
  return gathers ? launch_of_accumulation<true>(a, p.accumulation, is_bfloat16, stream)
                 : launch_of_accumulation<false>(a, p.accumulation, is_bfloat16, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::wgrad);
}
