// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for sm_90a with float8_e4m3fn inputs and block scales: Y[r] = sum over K blocks b of s_x[r, b] s_w[e, n / 128, b]
// (X_b W_b^T)[r, n].
//
//   x        codes [num_sources, K] and scales float32 [num_sources, ceil(K / 128)]: one scale per row and 128 columns
//   matrix   codes [E, N, K] and scales float32 [E, ceil(N / 128), ceil(K / 128)]: one scale per 128 x 128 block; all row-major,
//     K contiguous
//   plain    out bfloat16 [M, width] = weights[r] * Y
//   gated    hidden (bfloat16 or float8 codes with scales, optional), out = silu(gate) * up (bfloat16, optional), its codes and
//     scales (optional)
//   gradient Y is d_act: hidden becomes its gradient, out = weights[r] * act, codes and scales of the new hidden (optional),
//     d_weights partial dot products
//
// Tiles: 128 rows of one expert x 256 columns of the matrix (SwiGLU: 128 gates and their 128 ups, so that a lane has both of
// each). Persistent kernel with a dynamic tile scheduler in bands of 16 rows of tiles. Clusters of two CTAs take two tiles that
// follow each other down a column: if both are of one expert, each CTA loads half of the matrix columns by TMA multicast for
// both.
//
// Warp-specialised, a pipeline of kStages stages of 128 along K. In the producer warpgroup, warp 0 loads by TMA with 128-byte
// swizzle (zeros beyond K) and warp 1 schedules tiles. Each consumer warpgroup owns 64 rows of the tile: m64n128k32 MMAs for 128
// columns, then for the other 128.
//
// fp8_mainloop.cuh has the mainloop and its promotion. Operands are loaded up to kStages stages ahead and across tiles.
//
// Work: 2 M K N FLOPs. Bytes: matrix and rows once from memory and, per tile, from the L2; the results once; hidden once more for
// dSwiGLU.
#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/fp8_epilogue.cuh"
#include "cuda/gemm/fp8_mainloop.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/shared_memory.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kStages = 4;
constexpr int kSharedBytes = kStages * kFp8StageBytes + 1024 + kTableBytes;  // the first stage is aligned to 1024 bytes

template <pmo_grouped_result kEpilogue>
constexpr int kResultColumns = kEpilogue == PMO_GROUPED_GATED ? kFp8Columns / 2 : kFp8Columns;

#ifdef PMO_SM90A

constexpr int kBandRows = 16;  // rows of tiles in a band, which share columns of the matrix in the L2

using State = PipelineState<kStages>;
using Pipeline = Fp8Pipeline<kStages>;

// Coordinates of a tile, and whether the other CTA of the cluster has rows of the same expert in the same columns.
struct Fp8Tile : GroupedTile {
  bool shares_matrix;
};

using Fp8Queue = TileQueue<Fp8Tile, 2>;

// Coordinates of tile `tile_index` of this cluster, by all lanes of a warp. The CTAs of a cluster have tiles that follow each
// other down a column. If one tile is left for both, both compute it and CTA 1 stores nothing (end = 0).
__device__ inline Fp8Tile tile_at(const GroupedGemmParams& p, const ExpertTables& tables, int tile_index, int first_tile,
                                  int last_tile, int columns) {
  const int rank = blockIdx.x % kClusterSize, height = (last_tile - first_tile + kClusterSize - 1) / kClusterSize;
  const BandedTile at(tile_index, height, p.column_tiles, kBandRows / kClusterSize);
  const int first_of_cluster = first_tile + at.row * kClusterSize, wanted = first_of_cluster + rank;
  const int row_tile = min(wanted, last_tile - 1);
  int expert = 0;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && tables.tiles[1 + lane] <= row_tile;
    expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int row = tables.first[expert] + (row_tile - tables.tiles[expert]) * kTileRows;
  const int end = wanted == row_tile ? tables.stop[expert] : 0;
  const bool shares = tables.tiles[expert] <= first_of_cluster && first_of_cluster + kClusterSize <= tables.tiles[expert + 1];
  return {{expert, row, end, at.column * columns}, shares};
}

// First matrix column of the second half of a tile.
template <pmo_grouped_result kEpilogue>
__device__ inline int second_half_column(const GroupedGemmParams& p, int column) {
  return column + (kEpilogue == PMO_GROUPED_GATED ? p.up_offset : kFp8Columns / 2);
}

// Scheduler warp. CTA 0 of the cluster requests tile indices and passes them to CTA 1.
template <pmo_grouped_result kEpilogue>
__device__ inline void schedule_tiles(const GroupedGemmParams& p, const ExpertTables& tables, Fp8Queue& queue,
                                      ClusterTile& cluster_tile) {
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1), clusters = gridDim.x / kClusterSize;
  const int tiles = (last_tile - first_tile + kClusterSize - 1) / kClusterSize * p.column_tiles;
  const bool is_first = threadIdx.x % kWarpSize == 0;
  Fp8Queue::State state;
  uint32_t phase = 0;
  for (int tile_index = blockIdx.x / kClusterSize;; state.advance(), phase ^= 1) {
    Fp8Tile tile = {{kNoMoreTiles, 0, 0, 0}, false};
    if (tile_index < tiles) tile = tile_at(p, tables, tile_index, first_tile, last_tile, kResultColumns<kEpilogue>);
    queue.producer_acquire(state);
    if (is_first) queue.push(state, tile);
    if (tile_index >= tiles) break;
    if (is_first) tile_index = cluster_tile.next(p.scheduler, clusters, phase);
    tile_index = __shfl_sync(kAllLanes, tile_index, 0);
  }
  if (is_first && ClusterTile::requests()) p.scheduler.finish(clusters);
}

// Load warp: TMA loads of all tiles of the CTA.
template <pmo_grouped_result kEpilogue>
__device__ inline void load_tiles(const GroupedGemmParams& p, const Pipeline& pipeline, Fp8Queue& queue) {
  const int steps = (p.inner + kFp8TileK - 1) / kFp8TileK, rank = blockIdx.x % kClusterSize;
  State state;
  Fp8Queue::State at;
  for (Fp8Tile tile = queue.pop(at); tile.expert != kNoMoreTiles; tile = queue.pop(at)) {
    const int column = p.first_column + tile.column, next = second_half_column<kEpilogue>(p, column);
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait_parity(&pipeline.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &pipeline.full[state.stage];
        const uint32_t columns = pipeline.b(state.stage);
        const int k_offset = step * kFp8TileK;
        mbarrier_arrive_expect_tx(full, kFp8StageBytes);
        tma_load_2d(pipeline.a(state.stage), &p.rows, full, k_offset, tile.row - p.first_row);
        if (tile.shares_matrix) {
          tma_load_3d_multicast(columns + rank * kFp8BytesOfHalf, &p.matrix, full, k_offset, rank == 0 ? column : next,
                                tile.expert, 0b11);
        } else {
          tma_load_3d(columns, &p.matrix, full, k_offset, column, tile.expert);
          tma_load_3d(columns + kFp8BytesOfHalf, &p.matrix, full, k_offset, next, tile.expert);
        }
      }
      state.advance();
    }
  }
}

// Addresses of these scales for K block 0.
struct ScaleReader {
  const float *row[2], *half[2];

  __device__ StageScales load(int step) const {
    return {{__ldg(row[0] + step), __ldg(row[1] + step)}, {__ldg(half[0] + step), __ldg(half[1] + step)}};
  }
};

template <pmo_grouped_result kEpilogue>
__device__ inline ScaleReader scale_reader(const Fp8Params& p, const GroupedTile& tile, int row) {
  const GroupedGemmParams& g = p.grouped;
  ScaleReader reader;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int source = min(row + 8 * i - g.first_row, p.num_sources - 1);  // rows beyond the last have any scale
    reader.row[i] = p.row_scales + int64_t{source} * p.k_blocks;
    const int column = g.first_column + tile.column, half = i == 0 ? column : second_half_column<kEpilogue>(g, column);
    const int block = min(half / kScaleGroup, p.column_blocks - 1);  // columns beyond the last, too
    reader.half[i] = p.matrix_scales + (int64_t{tile.expert} * p.column_blocks + block) * p.k_blocks;
  }
  return reader;
}

// Consumer warpgroup: mainloop and epilogue of 64 rows of every tile of the CTA.
template <pmo_grouped_result kEpilogue, bool kFp8Hidden>
__device__ inline void consume_tiles(const Fp8Params& p, const Pipeline& pipeline, Fp8Queue& queue) {
  const GroupedGemmParams& g = p.grouped;
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int consumer = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const int row_of_thread = 64 * consumer + threadIdx.x % kWarpgroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
  const int steps = (g.inner + kFp8TileK - 1) / kFp8TileK;
  State state;
  Fp8Queue::State at;
  float partial[64] = {};
  for (GroupedTile tile = queue.pop(at); tile.expert != kNoMoreTiles; tile = queue.pop(at)) {
    const int row = tile.row + row_of_thread;
    float d[128] = {};
    fp8_mainloop(d, partial, pipeline, state, steps, scale_reader<kEpilogue>(p, tile, row), consumer);
    epilogue_fp8<kEpilogue, kFp8Hidden>(p, d, tile, row);
  }
}

#endif  // PMO_SM90A

// kFp8Hidden: hidden is kept as float8 codes and scales.
template <pmo_grouped_result kEpilogue, bool kFp8Hidden>
__global__ void PMO_CLUSTER(kClusterSize) __launch_bounds__(kBlockThreads, 1)
    grouped_gemm_fp8(const __grid_constant__ Fp8Params p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Fp8Queue queue;
  __shared__ ClusterTile cluster_tile;
  const ExpertTables tables = load_tables(p.grouped, reinterpret_cast<int32_t*>(shared + kSharedBytes - kTableBytes));
  if (threadIdx.x == 0) {
    queue.init(1 + 2 * kWarpgroupThreads / kWarpSize);
    cluster_tile.init();
  }
  const Pipeline pipeline = init_pipeline<Pipeline>(shared, full, empty, 1, 2 * kClusterSize);
  barrier_cluster_sync();
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_tiles<kEpilogue>(p.grouped, pipeline, queue);
    if (warp == 1) schedule_tiles<kEpilogue>(p.grouped, tables, queue, cluster_tile);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume_tiles<kEpilogue, kFp8Hidden>(p, pipeline, queue);
  }
  barrier_cluster_sync();  // a CTA exits only after the other has sent to its shared memory
#endif
}

template <pmo_grouped_result kEpilogue, bool kFp8Hidden>
int launch_fp8(const pmo_grouped_float8_params& p, const Fp8Params& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_float8", &device, &limits)) return status;
  auto* kernel = grouped_gemm_fp8<kEpilogue, kFp8Hidden>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kTileRows}) + p.num_experts;
  const int64_t clusters = divide_up(row_tiles, int64_t{kClusterSize}) * params.grouped.column_tiles;
  const int64_t blocks = kClusterSize * std::min<int64_t>(clusters, limits.multiprocessors / kClusterSize);
  const Grid grid = {static_cast<unsigned>(blocks), kBlockThreads, kSharedBytes};
  return launch("grouped_float8", kernel, grid, stream, params);
}

int fp8_gemm(const pmo_grouped_float8_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_float8(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  Fp8Params a = {};
  a.grouped = gemm_params_of(p, p.result == PMO_GROUPED_GATED ? kFp8Columns / 2 : kFp8Columns);
  a.grouped.scheduler = {p.counters};
  const Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.inner}, {kFp8TileK, kTileRows}};
  if (const int status = encode(rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &a.grouped.rows)) return status;
  const Tensor matrix = {
      p.matrix, 3, {p.inner, p.outer, p.num_experts}, {p.inner, p.inner * p.outer}, {kFp8TileK, kFp8Columns / 2, 1}};
  if (const int status = encode(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &a.grouped.matrix)) return status;
  a.row_scales = p.x_scales;
  a.matrix_scales = p.matrix_scales;
  a.codes = static_cast<uint8_t*>(p.codes);
  a.scales = p.scales;
  a.hidden_codes = static_cast<uint8_t*>(p.hidden_codes);
  a.hidden_scales = p.hidden_scales;
  a.amax_min = p.amax_min;
  a.num_sources = static_cast<int>(p.num_sources);
  a.k_blocks = static_cast<int>(divide_up(p.inner, int64_t{kFp8TileK}));
  a.column_blocks = static_cast<int>(divide_up(p.outer, int64_t{kScaleGroup}));
  const bool keeps_codes = p.hidden_codes != nullptr;
  switch (p.result) {
    case PMO_GROUPED_GATED:
      return keeps_codes ? launch_fp8<PMO_GROUPED_GATED, true>(p, a, stream) : launch_fp8<PMO_GROUPED_GATED, false>(p, a, stream);
    case PMO_GROUPED_GRADIENT:
      return keeps_codes ? launch_fp8<PMO_GROUPED_GRADIENT, true>(p, a, stream)
                         : launch_fp8<PMO_GROUPED_GRADIENT, false>(p, a, stream);
    default:
      return launch_fp8<PMO_GROUPED_PLAIN, false>(p, a, stream);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_float8_cuda(const pmo_grouped_float8_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::fp8_gemm);
}
