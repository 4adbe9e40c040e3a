// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Swap-AB grouped GEMM for sm_90a, 16-bit inputs, float32 accumulators: for each expert e, Y_e = X_e W_e, computed as
// Y_e^T = W_e^T X_e^T.
//
//   x        [num_sources, K] row-major, 16-byte aligned, x_row_stride a multiple of 8
//   matrix   [E, K, N] or, with transpose, [E, N, K], row-major, 16-byte aligned
//   plain    out [M, width] = weights[r] * Y
//   gated    hidden [M, 2 n] = Y (optional), out [M, n] = silu(gate) * up of the halves of Y
//   gradient Y is d_act of weights[r] * silu(gate) * up: hidden becomes its gradient, out [M, n] = weights[r] * act, d_weights
//            partial dot products
//
// W fills wgmma's fixed M = 64; an expert's rows go into N in steps of 16. So an expert's last tile pads at most 15 rows, where
// pingpong.cu may pad 127, and an expert of up to 160 rows reads its matrix once. Forward and dgrad are this GEMM with either
// layout of the matrix.
//
// Tiles: up to 160 rows of one expert x 256 columns of W (SwiGLU: 128 gates and their 128 ups). A launch that covers all tiles
// cuts the rows of an expert evenly; a launch for a chunk of the layer cuts them as the tables say.
//
// Persistent kernel with a dynamic tile scheduler: one CTA per SM requests its next tile kRequestAhead K steps before the end of
// a tile. CTAs that read the same columns of W start one right after the other and find them in the L2; with a static schedule
// (every gridDim.x-th tile) they drift apart, since tiles take different times.
//
// Warp-specialised, a pipeline of kSwapAbStages stages of 64 along K:
//   warpgroup 0     producer (swap_ab_producer.cuh): warp 0 loads W, in boxes of 64 columns, and X, in boxes of 32 and 16 rows,
//                   by TMA; warp 1 schedules tiles
//   warpgroups 1, 2 consumers: each owns 128 columns of the tile, two m64 MMAs with N = the tile's rows rounded up to 16
//   warpgroup 3     only if rows are gathered: copies token rows by cp.async, 16 bytes a lane, and arrives at the stage's full
//                   mbarrier
// TMA fills K beyond its end with zeros. Rows of a box beyond the tile may belong to another expert; their results are not
// stored.
//
// Overlap: loads run up to kSwapAbStages K steps ahead and across tiles. The epilogue of a warpgroup does not overlap its own
// mainloop, so it is short: TMA stores two subtiles of 16 rows while the next two are converted (swap_ab_epilogue.cuh). The
// subtiles lie in the warpgroup's part of the last stage, which is released during the second K step of the next tile. For
// dSwiGLU, the stages after those of the mainloop deliver hidden (swap_ab_epilogue_dswiglu.cuh).
//
// Work: 2 M K N FLOPs. Bytes: W and X once from memory and, per tile, from the L2; the results once; hidden once more for
// dSwiGLU.
#include "cuda/gemm/swap_ab.h"

#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/swap_ab_epilogue_dswiglu.cuh"
#include "cuda/gemm/swap_ab_producer.cuh"
#include "cuda/gemm/tensor_map.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kMaxRowsForL2Prefetch = 256;  // per expert on average: up to here the GEMM is memory-bound

// The gather warpgroup has a warp on each of the SM's four partitions, so that it slows no consumer warp more than the others.
template <bool kGather>
constexpr int kThreads = kBlockThreads + (kGather ? kWarpgroupThreads : 0);

#ifdef PMO_SM90A

constexpr int kGatherRegisters = 40, kGatherConsumerRegisters = 216;

// Stage that a warpgroup has not released, since TMA may still read its subtiles there; negative: none.
constexpr int kNoStage = -1;

// Releases a stage, by the arriving lane of each warp, once TMA has read its subtiles, all but those of the newest kPending bulk
// groups.
template <int kPending>
__device__ inline void release_after_stores(SwapAbShared& shared, int stage) {
  cp_async_bulk_wait_group_read<kPending>();
  mbarrier_arrive(&shared.empty[stage]);
}

// Mainloop: d = W^T X^T for a warpgroup's 128 columns and kRows rows of the tile. Releases `epilogue_stage`, from which TMA
// stores the results of the previous tile, while the MMAs of the second K step run. Returns the last stage, whose MMAs are still
// in flight and which the caller releases. The first MMAs overwrite d, so no accumulator is set to zero.
template <int kRows, bool kTransA, bool kGather, typename T>
__device__ inline int mainloop(float (&d)[kSwapAbAccumulators], SwapAbShared& shared, const SwapAbPipeline& pipeline,
                               SwapAbState& state, int warpgroup, int inner, int epilogue_stage) {
  const bool arrives = elect_sync();
  const int releases_at = inner > kTileK ? kTileK : 0;
  register_fence(d);
  int last = 0;
#pragma unroll 1
  for (int k_offset = 0; k_offset < inner; k_offset += kTileK) {
    mbarrier_wait_parity(&shared.full[state.stage], state.phase);
    if (kGather) fence_proxy_async();
    wgmma_fence();
    const uint64_t a = smem_descriptor(pipeline.matrix(state.stage) + warpgroup * 2 * kBoxBytes, kBoxBytes, 1024);
    const uint64_t b = smem_descriptor(pipeline.rows(state.stage), kBoxBytes, 1024);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      // 16 elements along K: 32 bytes of a row if K-major, 16 rows of 128 bytes if MN-major.
      const uint64_t at_a = a + k * ((kTransA ? 2048 : 32) >> 4), at_b = b + k * (32 >> 4);
      wgmma_m64k16<kRows, 0, kTransA, false, T>(d, at_a, at_b, k > 0 || k_offset > 0);
      wgmma_m64k16<kRows, kSwapAbAccumulators / 2, kTransA, false, T>(d, at_a + (kBoxBytes >> 4), at_b, k > 0 || k_offset > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (k_offset > 0 && arrives) mbarrier_arrive(&shared.empty[last]);
    if (k_offset == releases_at && epilogue_stage != kNoStage && arrives) release_after_stores<0>(shared, epilogue_stage);
    last = state.stage;
    state.advance();
  }
  return last;
}

// dSwiGLU epilogue of a tile, stage by stage of hidden. A stage is released after the next one is computed; returns the last one,
// which is not released. `parity` selects one of two buffers of partial dot products.
template <typename T>
__device__ inline int epilogue_dswiglu(const SwapAbParams& p, const float (&d)[kSwapAbAccumulators], SwapAbShared& shared,
                                       const SwapAbPipeline& pipeline, SwapAbState& state, const SwapAbTile& tile,
                                       const TileFacts& rows, int column, int warpgroup, int& parity) {
  const int barrier = 1 + warpgroup;
  int before = kNoStage;
#pragma unroll 1
  for (int first = 0; first * kSubtileRows < tile.rows; first += 2) {
    float* const dots = pipeline.dots(warpgroup) + parity * 2 * kDotsOfSubtile;
    const uint32_t hidden = pipeline.hidden(state.stage, 2 * warpgroup), act = pipeline.act(state.stage, 2 * warpgroup);
    mbarrier_wait_parity(&shared.full[state.stage], state.phase);
#pragma unroll 1
    for (int i = 0; i < 2 && (first + i) * kSubtileRows < tile.rows; ++i) {
      dswiglu_subtile<T>(d, rows, first + i, p.width - column, hidden + i * kSubtileBytes, act + i * kSubtileBytes,
                         dots + i * kDotsOfSubtile);
    }
    fence_proxy_async();
    bar_sync(barrier, kWarpgroupThreads);
    store_dswiglu_stage<T>(p, tile, first, column, hidden, act, dots);
    if (elect_sync()) {
      cp_async_bulk_commit_group();
      if (before != kNoStage) release_after_stores<1>(shared, before);
    }
    before = state.stage;
    state.advance();
    parity ^= 1;
  }
  if (tile.rows % kSubtileRows != 0) {  // lanes have read the last subtile
    fence_proxy_async();
    bar_sync(barrier, kWarpgroupThreads);
  }
  return before;
}

// Consumer warpgroup: mainloop and epilogue of 128 columns of every tile of the CTA.
template <pmo_grouped_result kEpilogue, bool kTransposed, bool kGather, typename T>
__device__ inline void consume_tiles(const SwapAbParams& p, SwapAbShared& shared, const SwapAbPipeline& pipeline) {
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const int barrier = 1 + warpgroup, warp = __shfl_sync(kAllLanes, threadIdx.x % kWarpgroupThreads / kWarpSize, 0);
  int parity = 0, epilogue_stage = kNoStage, count = 0;
  SwapAbState state;
  SwapAbQueue::State slot;
  for (SwapAbTile next = shared.queue.pop(slot); next.rows > 0; ++count) {
    const SwapAbTile tile = next;
    const float* const of_rows = kEpilogue == PMO_GROUPED_PLAIN ? p.weights : nullptr;
    const TileRowWeights weights(tile, [&](int row) { return of_rows != nullptr ? __ldg(of_rows + row) : 1.0f; });
    float d[kSwapAbAccumulators];
    int last = 0;
#define PMO_SUBTILES(SUBTILES)                                                                                                \
  case SUBTILES:                                                                                                              \
    last = mainloop<SUBTILES * 16, !kTransposed, kGather, T>(d, shared, pipeline, state, warpgroup, p.inner, epilogue_stage); \
    break
    switch ((tile.rows + 15) / 16) {
      PMO_SUBTILES(1);
      PMO_SUBTILES(2);
      PMO_SUBTILES(3);
      PMO_SUBTILES(4);
      PMO_SUBTILES(5);
      PMO_SUBTILES(6);
      PMO_SUBTILES(7);
      PMO_SUBTILES(8);
      PMO_SUBTILES(9);
      default:
        PMO_SUBTILES(10);
    }
#undef PMO_SUBTILES
    // Pops the next tile while the last MMAs run; dSwiGLU has no registers for it and pops later. The tile arrives without
    // further progress of this warpgroup: the load warp requested it before it loaded the stage of these MMAs.
    if (kEpilogue != PMO_GROUPED_GRADIENT) next = shared.queue.pop(slot);
    wgmma_wait_group<0>();
    register_fence(d);
    if (kEpilogue == PMO_GROUPED_GRADIENT && elect_sync()) mbarrier_arrive(&shared.empty[last]);
    const int column = tile.column + warpgroup * kResultColumns<kEpilogue> / 2;
    if constexpr (kEpilogue == PMO_GROUPED_GRADIENT) {
      const TileFacts& rows = pipeline.facts(count);
      epilogue_stage = epilogue_dswiglu<T>(p, d, shared, pipeline, state, tile, rows, column, warpgroup, parity);
    } else {
      const uint32_t in_stage = pipeline.matrix(last) + warpgroup * 2 * kBoxBytes, buffer = pipeline.epilogue_buffer(warpgroup);
      if constexpr (kEpilogue == PMO_GROUPED_GATED) {
        epilogue_swiglu<T>(p, d, tile, column, {in_stage, buffer, warp}, barrier);
      } else {
        epilogue_plain<T>(p, d, tile, weights, column, {in_stage, buffer, warp}, barrier);
      }
      epilogue_stage = last;
    }
    if (kEpilogue == PMO_GROUPED_GRADIENT) next = shared.queue.pop(slot);
  }
  if (elect_sync()) cp_async_bulk_wait_group_read();  // shared memory outlives the stores
}

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, bool kTransposed, bool kGather, typename T>
__global__ void __launch_bounds__(kThreads<kGather>, 1) grouped_gemm_swap_ab(const __grid_constant__ SwapAbParams p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t dynamic[];
  __shared__ SwapAbShared shared;
  init_barriers<kGather>(shared);
  const SwapAbPipeline pipeline = {(smem_address(dynamic) + 1023) / 1024 * 1024};
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_tiles<kEpilogue, kTransposed, kGather>(p, shared, pipeline);
    if (warp == 1) schedule_tiles<kEpilogue>(p, shared, pipeline);
  } else if (kGather && threadIdx.x >= kBlockThreads) {
    setmaxnreg_dec<kGatherRegisters>();
    gather_rows<kEpilogue>(p, shared, pipeline);
  } else {
    setmaxnreg_inc<kGather ? kGatherConsumerRegisters : kConsumerRegisters>();
    consume_tiles<kEpilogue, kTransposed, kGather, T>(p, shared, pipeline);
  }
#endif
}

template <pmo_grouped_result kEpilogue, bool kTransposed, bool kGather, typename T>
int launch_swap_ab(const pmo_grouped_product_params& p, const SwapAbParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  auto* kernel = grouped_gemm_swap_ab<kEpilogue, kTransposed, kGather, T>;
  if (const int status = limit.raise(kernel, device, kSwapAbSharedBytes)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kSwapAbRows}) + p.num_experts;
  const int64_t blocks = std::min<int64_t>(row_tiles * params.column_tiles, limits.multiprocessors);
  const Grid grid = {static_cast<unsigned>(blocks), kThreads<kGather>, kSwapAbSharedBytes};
  return launch("grouped_product", kernel, grid, stream, params);
}

}  // namespace

int swap_ab_gemm(const pmo_grouped_product_params& p, cudaStream_t stream) {
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16;
  SwapAbParams a = {};
  static_cast<GroupedGemmParams&>(a) = gemm_params_of(p, p.result == PMO_GROUPED_GATED ? kSwapAbColumns / 2 : kSwapAbColumns);
  a.scheduler = {p.counters};
  if (p.gathers != 0) {
    a.gathered = {p.x, p.row_to_token, static_cast<uint32_t>(p.x_row_stride * 2), static_cast<int>(p.num_sources)};
  } else {
    Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.x_row_stride}, {kTileK, 2 * kSubtileRows}};
    if (const int status = encode(rows, is_bfloat16, &a.rows)) return status;
    rows.box[1] = kSubtileRows;
    if (const int status = encode(rows, is_bfloat16, &a.rows_16)) return status;
  }
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileK, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  // Memory-bound with few rows per expert: a promotion to 256 bytes prefetches a transposed matrix's lines of the next K step, which
  // saves 2 to 4 % (H200, DeepSeek-V3, ERNIE-21B). Without transpose it would prefetch columns of other tiles, and cost 3 to 7 %.
  const bool prefetches = p.transpose != 0 && p.num_rows <= kMaxRowsForL2Prefetch * p.num_experts;
  const auto promotion = prefetches ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  if (const int status = encode(matrix, is_bfloat16, &a.matrix, promotion)) return status;
  Tensor out = {p.out, 3, {p.width, p.num_rows, 1}, {p.width, p.width}, {64, 2 * kSubtileRows, 1}};
  if (const int status = encode(out, is_bfloat16, &a.out_32)) return status;
  out.box[1] = kSubtileRows;
  if (const int status = encode(out, is_bfloat16, &a.out_16)) return status;
  if (p.hidden != nullptr) {
    Tensor hidden = {p.hidden, 3, {p.width, p.num_rows, 2}, {2 * p.width, p.width}, {64, 2 * kSubtileRows, 2}};
    if (const int status = encode(hidden, is_bfloat16, &a.hidden_32)) return status;
    hidden.box[1] = kSubtileRows, hidden.box[2] = 1;
    if (const int status = encode(hidden, is_bfloat16, &a.hidden_16)) return status;
  }
  return dispatch_epilogue(p, [&](auto epilogue, auto is_transposed, auto element) {
    using T = decltype(element);
    if constexpr (epilogue() != PMO_GROUPED_PLAIN) {
      if (p.gathers != 0) return launch_swap_ab<epilogue(), is_transposed(), true, T>(p, a, stream);
    }
    return launch_swap_ab<epilogue(), is_transposed(), false, T>(p, a, stream);
  });
}

}  // namespace cuda
}  // namespace pmo
