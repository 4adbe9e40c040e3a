// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped wgrad for sm_90a with float8_e4m3fn inputs and block scales: out[e] = sum over row blocks b of expert e of
// s_a[b, i] s_b[b, j / 128] (A_b^T B_b)[i, j], or its transpose.
//
//   a    codes [blocks, a_columns, 128] and scales float32 [blocks, a_columns]: one scale per column and 128 rows
//   b    codes [blocks, b_columns, 128] and scales float32 [blocks, ceil(b_columns / 128)]: one scale per 128 x 128 block
//   out  [E, out_rows, out_columns] row-major, bfloat16 or, with accumulation, float32; the result is the block from
//     (first_row, first_column) on, and zeros for experts without rows.
//
// K of this GEMM is an expert's number of rows. A block has 128 of them, and zeros after the expert's last row
// (quantize_columns.cu). It lies K-major, since wgmma takes float8 operands no other way.
//
// Tiles: 128 columns of A x 256 columns of B. Persistent kernel with a dynamic tile scheduler: tiles are handed out expert by
// expert, in bands. Clusters of two CTAs take two tiles that follow each other down a column of tiles: each CTA loads half of
// the columns of B by TMA multicast for both. If one tile is left, CTA 1 multiplies zeros and stores nothing.
//
// Warp-specialised as fp8.cu, with its mainloop (fp8_mainloop.cuh) and the epilogues of wgrad.cu (wgrad_epilogue.cuh), whose
// stores overlap the next mainloop.
//
// Work: 2 * 128 blocks a_columns b_columns FLOPs. Bytes: both operands once from memory and, per tile, from the L2; the results
// once, with the L2 policy evict_first since operands need the L2.
#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/fp8_mainloop.cuh"
#include "cuda/gemm/wgrad_epilogue.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

struct Fp8WgradParams : WgradParams {
  const float *a_scales, *b_scales;
  const int32_t* tiles;
  int num_blocks, b_blocks;
};

// Stages, and boxes of a consumer warpgroup's results.
template <int kAccumulation>
struct Fp8WgradShared {
  static constexpr bool kFloat32 = kAccumulation == PMO_GROUPED_ADDS_FLOAT32;
  static constexpr int kStages = kFloat32 ? 2 : 3;
  static constexpr int kEpilogueBytes = WgradShared<kAccumulation>::kEpilogueBytes;
  static constexpr int kBytes = kStages * kFp8StageBytes + 2 * kEpilogueBytes + 1024;
};

#ifdef PMO_SM90A

// Scheduler warp. CTA 0 of the cluster requests indices of pairs of tiles and passes them to CTA 1. `first` and `rows` of a tile
// count row blocks.
__device__ inline void schedule_tiles(const Fp8WgradParams& a, WgradQueue& queue, ClusterTile& cluster_tile) {
  const int rank = blockIdx.x % kClusterSize, clusters = gridDim.x / kClusterSize;
  const int pairs = (a.a_tiles + kClusterSize - 1) / kClusterSize, of_expert = pairs * a.b_tiles;
  const bool is_first = threadIdx.x % kWarpSize == 0;
  WgradQueue::State state;
  uint32_t phase = 0;
  for (int index = blockIdx.x / kClusterSize;; state.advance(), phase ^= 1) {
    const int expert = index / of_expert;
    WgradTile tile = {kNoMoreTiles, 0, 0, 0, 0};
    if (expert < a.num_experts) {
      const int first = min(__ldg(a.tiles + expert), a.num_blocks), end = min(__ldg(a.tiles + expert + 1), a.num_blocks);
      const BandedTile at(index - expert * of_expert, pairs, a.b_tiles, kBandRows / kClusterSize);
      tile = {expert, first, max(end - first, 0), (at.row * kClusterSize + rank) * kColumnsA, at.column * kColumnsB};
    }
    queue.producer_acquire(state);
    if (is_first) queue.push(state, tile);
    if (tile.expert == kNoMoreTiles) break;
    if (is_first) index = cluster_tile.next(a.scheduler, clusters, phase);
    index = __shfl_sync(kAllLanes, index, 0);
  }
  if (is_first && ClusterTile::requests()) a.scheduler.finish(clusters);
}

// Load warp: TMA loads of all tiles of the CTA.
template <int kStages>
__device__ inline void load_tiles(const Fp8WgradParams& a, const Fp8Pipeline<kStages>& pipeline, WgradQueue& queue) {
  const int rank = blockIdx.x % kClusterSize;
  PipelineState<kStages> state;
  WgradQueue::State at;
  for (WgradTile tile = queue.pop(at); tile.expert != kNoMoreTiles; tile = queue.pop(at)) {
    for (int block = tile.first; block < tile.first + tile.rows; ++block) {
      mbarrier_wait_parity(&pipeline.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &pipeline.full[state.stage];
        mbarrier_arrive_expect_tx(full, kFp8StageBytes);
        tma_load_3d(pipeline.a(state.stage), &a.a, full, 0, tile.column_a, block);
        tma_load_3d_multicast(pipeline.b(state.stage) + rank * kFp8BytesOfHalf, &a.b, full, 0,
                              tile.column_b + rank * (kColumnsB / kClusterSize), block, 0b11);
      }
      state.advance();
    }
  }
}

// Addresses of a thread's scales for the first row block of a tile, and elements from one block to the next.
struct WgradScaleReader {
  const float *row[2], *half[2];
  int row_step, half_step;

  __device__ WgradScaleReader(const Fp8WgradParams& a, const WgradTile& tile) : row_step(a.columns_a), half_step(a.b_blocks) {
    const int of_thread = tile.column_a + threadIdx.x % kWarpgroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // columns beyond the last have any scale
      row[i] = a.a_scales + int64_t{tile.first} * row_step + min(of_thread + 8 * i, a.columns_a - 1);
      half[i] = a.b_scales + int64_t{tile.first} * half_step + min(tile.column_b / PMO_QUANTIZE_GROUP + i, a.b_blocks - 1);
    }
  }

  __device__ StageScales load(int step) const {
    const int64_t of_rows = int64_t{step} * row_step, of_halves = int64_t{step} * half_step;
    return {{__ldg(row[0] + of_rows), __ldg(row[1] + of_rows)}, {__ldg(half[0] + of_halves), __ldg(half[1] + of_halves)}};
  }
};

// Consumer warpgroup: mainloop and epilogue of 64 columns of A of every tile of the CTA.
template <int kAccumulation, int kStages>
__device__ inline void consume_tiles(const Fp8WgradParams& a, const Fp8Pipeline<kStages>& pipeline, WgradQueue& queue,
                                     uint64_t* sums_loaded) {
  using Shared = Fp8WgradShared<kAccumulation>;
  constexpr int kConsumerBarrier = 3;
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int consumer = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const uint32_t buffer = pipeline.a(kStages) + consumer * Shared::kEpilogueBytes;
  WgradSums sums = {buffer, sums_loaded + consumer, 0};
  PipelineState<kStages> state;
  WgradQueue::State at;
  for (WgradTile tile = queue.pop(at); tile.expert != kNoMoreTiles; tile = queue.pop(at)) {
    tile.column_a += 64 * consumer;
    if constexpr (Shared::kFloat32) {
      if (tile.rows > 0) sums.load(a, tile);
    }
    float d[128] = {}, partial[64];  // the first MMAs overwrite `partial`
    register_fence(partial);
    if (tile.rows > 0) fp8_mainloop(d, partial, pipeline, state, tile.rows, WgradScaleReader(a, tile), consumer);
    if constexpr (Shared::kFloat32) {
      if (tile.rows > 0) sums.add(a, d, tile, kConsumerBarrier + consumer);
    } else if constexpr (kAccumulation == PMO_GROUPED_ADDS) {
      add_wgrad<__nv_bfloat16>(a, d, tile);
    } else {
      epilogue_wgrad<__nv_bfloat16>(a, d, tile, buffer, kConsumerBarrier + consumer);
    }
  }
  cp_async_bulk_wait_group_read();
}

#endif  // PMO_SM90A

template <int kAccumulation>
__global__ void PMO_CLUSTER(kClusterSize) __launch_bounds__(kBlockThreads, 1)
    grouped_wgrad_fp8(const __grid_constant__ Fp8WgradParams a) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t shared[];
  constexpr int kStages = Fp8WgradShared<kAccumulation>::kStages;
  using Pipeline = Fp8Pipeline<kStages>;
  __shared__ uint64_t full[kStages], empty[kStages], sums_loaded[2];
  __shared__ WgradQueue queue;
  __shared__ ClusterTile cluster_tile;
  if (threadIdx.x == 0) {
    queue.init(1 + 2 * kWarpgroupThreads / kWarpSize);
    cluster_tile.init();
    for (uint64_t& loaded : sums_loaded) mbarrier_init(&loaded, kWarpgroupThreads / kWarpSize);
  }
  const Pipeline pipeline = init_pipeline<Pipeline>(shared, full, empty, 1, 2 * kClusterSize);
  barrier_cluster_sync();
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_tiles<kStages>(a, pipeline, queue);
    if (warp == 1) schedule_tiles(a, queue, cluster_tile);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume_tiles<kAccumulation, kStages>(a, pipeline, queue, sums_loaded);
  }
  barrier_cluster_sync();  // a CTA exits only after the other has sent to its shared memory
#endif
}

template <int kAccumulation>
int launch_wgrad(const Fp8WgradParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  constexpr int kBytes = Fp8WgradShared<kAccumulation>::kBytes;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_outer_float8", &device, &limits)) return status;
  auto* kernel = grouped_wgrad_fp8<kAccumulation>;
  if (const int status = limit.raise(kernel, device, kBytes)) return status;
  const int pairs = params.num_experts * divide_up(params.a_tiles, kClusterSize) * params.b_tiles;
  const int blocks = kClusterSize * std::min(pairs, limits.multiprocessors / kClusterSize);
  const Grid grid = {static_cast<unsigned>(blocks), kBlockThreads, kBytes};
  return launch("grouped_outer_float8", kernel, grid, stream, params);
}

int wgrad(const pmo_grouped_outer_float8_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_outer_float8(p)) return status;
  if (p.a_columns == 0 || p.b_columns == 0) return PMO_OK;
  Fp8WgradParams a = {};
  a.transposed_out = p.transpose != 0;
  const auto encode_blocks = [&](const void* codes, int64_t columns, CUtensorMap* map) {
    const Tensor blocks = {codes, 3, {kFp8TileK, columns, p.num_blocks}, {kFp8TileK, kFp8TileK * columns}, {kFp8TileK, 128, 1}};
    return encode(blocks, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, map);
  };
  if (p.num_blocks > 0) {
    if (const int status = encode_blocks(p.a, p.a_columns, &a.a)) return status;
    if (const int status = encode_blocks(p.b, p.b_columns, &a.b)) return status;
  }
  a.a_scales = p.a_scales;
  a.b_scales = p.b_scales;
  a.columns_a = static_cast<int>(p.a_columns);
  a.columns_b = static_cast<int>(p.b_columns);
  const int64_t rows = p.transpose ? p.b_columns : p.a_columns, columns = p.transpose ? p.a_columns : p.b_columns;
  const WgradResults results = {p.out,          p.num_experts, p.out_rows, p.out_columns,  p.first_row,
                                p.first_column, rows,          columns,    p.accumulation, true};
  if (const int status = results.set(&a)) return status;
  a.tiles = p.tiles;
  a.num_blocks = static_cast<int>(p.num_blocks);
  a.b_blocks = static_cast<int>(divide_up(p.b_columns, int64_t{PMO_QUANTIZE_GROUP}));
  a.num_experts = static_cast<int>(p.num_experts);
  a.a_tiles = static_cast<int>(divide_up(p.a_columns, int64_t{kColumnsA}));
  a.b_tiles = static_cast<int>(divide_up(p.b_columns, int64_t{kColumnsB}));
  a.scheduler = {p.counters};
  switch (p.accumulation) {
    case PMO_GROUPED_OVERWRITES:
      return launch_wgrad<PMO_GROUPED_OVERWRITES>(a, stream);
    case PMO_GROUPED_ADDS:
      return launch_wgrad<PMO_GROUPED_ADDS>(a, stream);
    default:
      return launch_wgrad<PMO_GROUPED_ADDS_FLOAT32>(a, stream);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_outer_float8_cuda(const pmo_grouped_outer_float8_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::wgrad);
}
