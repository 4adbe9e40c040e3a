// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Ping-pong grouped GEMM for sm_90a, 16-bit inputs, float32 accumulators: out[r] = weights[r] * x[r] W_e for each row r of each
// expert e.
//
//   x        [num_sources, K] row-major, 16-byte aligned, x_row_stride a multiple of 8
//   matrix   [E, K, N] or, with transpose, [E, N, K], row-major, 16-byte aligned
//   out      [M, width] row-major: columns first_column to first_column + width - 1 of the result
//
// For short K, with which a tile of swap_ab.cu takes about as long to store as to compute. Also for longer K with many rows, if
// tiles of 192 columns fit or memory is fast.
//
// Tiles: 128 rows of one expert x 128 or 192 columns, as the tables of pmo/grouped.h list them. Persistent kernel with a static
// tile scheduler: CTA b computes tiles b, b + gridDim.x, ... in bands that share columns of the matrix in the L2.
//
// Warp-specialised, a pipeline of kStages stages of 64 along K. Warp 0 of the producer warpgroup loads X in one box of 128 rows
// and W in boxes of 64 columns by TMA, with 128-byte swizzle; TMA fills K beyond its end with zeros. The two consumer warpgroups
// compute alternate tiles, each a whole one: two m64 MMAs with N = the tile's columns.
//
// Overlap: while one consumer runs a mainloop, the other runs the epilogue of the previous tile. Named barriers hand the mainloop
// over. Loads run up to kStages K steps ahead and across tiles.
//
// Work: 2 M K N FLOPs. Bytes: W and X once from memory and, per tile, from the L2; the results once.
#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/few_rows.h"
#include "cuda/gemm/swap_ab.h"
#include "cuda/gemm/tensor_map.h"

namespace pmo {
namespace cuda {
namespace {

// Tiles have 128 columns or 192; the wider ones read operands less often.
constexpr int kWideTileColumns = PMO_GROUPED_WIDE_COLUMNS;
constexpr int kBytesOfA = kTileRows * kTileK * 2;

template <int kColumns>
constexpr int kStageBytes = kBytesOfA + kColumns * kTileK * 2;
template <int kColumns>
constexpr int kStages = kColumns == kTileColumns ? 6 : 5;
template <int kColumns>
constexpr int kSharedBytes =
    kStages<kColumns> * kStageBytes<kColumns> + 1024 + kTableBytes;  // the first stage is aligned to 1024 bytes

#ifdef PMO_SM90A

constexpr int kBandRows = 8;                // rows of tiles in a band, which share columns of the matrix in the L2
constexpr int kMaxStepsForEarlyArrive = 4;  // K steps

template <int kColumns>
using State = PipelineState<kStages<kColumns>>;
template <int kColumns>
using Pipeline = SmemPipeline<kStages<kColumns>, kStageBytes<kColumns>, kBytesOfA>;

// Coordinates of tile `tile_index` of the launch, by all lanes of a warp.
template <int kColumns>
__device__ inline GroupedTile tile_at(const GroupedGemmParams& p, const ExpertTables& tables, int tile_index, int first_tile,
                                      int last_tile) {
  const BandedTile at(tile_index, last_tile - first_tile, p.column_tiles, kBandRows);
  const int row_tile = first_tile + at.row;
  int expert = 0;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && tables.tiles[1 + lane] <= row_tile;
    expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int row = tables.first[expert] + (row_tile - tables.tiles[expert]) * kTileRows;
  return {expert, row, tables.stop[expert], at.column * kColumns};
}

// Load warp: TMA loads of all tiles of the CTA.
template <bool kTransposed, int kColumns>
__device__ inline void load_tiles(const GroupedGemmParams& p, const ExpertTables& tables, const Pipeline<kColumns>& pipeline,
                                  int first_tile, int last_tile) {
  const int tiles = (last_tile - first_tile) * p.column_tiles, steps = (p.inner + kTileK - 1) / kTileK;
  State<kColumns> state;
  for (int tile_index = blockIdx.x; tile_index < tiles; tile_index += gridDim.x) {
    const GroupedTile tile = tile_at<kColumns>(p, tables, tile_index, first_tile, last_tile);
    const int column = p.first_column + tile.column;
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait_parity(&pipeline.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &pipeline.full[state.stage];
        const uint32_t b = pipeline.b(state.stage);
        const int k_offset = step * kTileK;
        mbarrier_arrive_expect_tx(full, kStageBytes<kColumns>);
        tma_load_2d(pipeline.a(state.stage), &p.rows, full, k_offset, tile.row - p.first_row);
#pragma unroll
        for (int box = 0; box < kColumns / 64; ++box) {
          const int at_column = column + 64 * box;
          tma_load_3d(b + box * kBoxBytes, &p.matrix, full, kTransposed ? k_offset : at_column,
                      kTransposed ? at_column : k_offset, tile.expert);
        }
      }
      state.advance();
    }
  }
}

// Mainloop: d = X W for a tile. Returns the last stage, whose MMAs are still in flight and which the caller releases.
template <bool kTransB, int kColumns, typename T>
__device__ inline int mainloop(float (&d)[kColumns], const Pipeline<kColumns>& pipeline, State<kColumns>& state, int steps) {
  const bool arrives = threadIdx.x % kWarpSize == 0;
  int last_stage = 0;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait_parity(&pipeline.full[state.stage], state.phase);
    wgmma_fence();
    const uint64_t a = smem_descriptor(pipeline.a(state.stage), kBoxBytes, 1024),
                   b = smem_descriptor(pipeline.b(state.stage), kBoxBytes, 1024);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      // 16 elements along K: 32 bytes of a row if K-major, 16 rows of 128 bytes if MN-major.
      const uint64_t at_a = a + k * (32 >> 4), at_b = b + k * ((kTransB ? 2048 : 32) >> 4);
      wgmma_m64k16<kColumns, 0, false, kTransB, T>(d, at_a, at_b, step > 0 || k > 0);
      wgmma_m64k16<kColumns, kColumns / 2, false, kTransB, T>(d, at_a + (kBoxBytes >> 4), at_b, step > 0 || k > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (step > 0 && arrives) mbarrier_arrive(&pipeline.empty[last_stage]);
    last_stage = state.stage;
    state.advance();
  }
  return last_stage;
}

// Consumer warpgroup: mainloop and epilogue of every second tile of the CTA.
template <bool kTransposed, int kColumns, typename T>
__device__ inline void consume_tiles(const GroupedGemmParams& p, const ExpertTables& tables, const Pipeline<kColumns>& pipeline,
                                     int first_tile, int last_tile) {
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int consumer = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
  const int row_of_thread = threadIdx.x % kWarpgroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
  const int tiles = (last_tile - first_tile) * p.column_tiles, steps = (p.inner + kTileK - 1) / kTileK;
  State<kColumns> state;
  state.advance_by(consumer * steps);
  // Order barriers: an mbarrier tells only even phases from odd ones, so a consumer waits for its stages after the other one has
  // seen its own full.
  constexpr int kOrderBarrier = 1;
  if (consumer == 1) bar_arrive(kOrderBarrier, 2 * kWarpgroupThreads);
  for (int tile_index = blockIdx.x + consumer * gridDim.x; tile_index < tiles; tile_index += 2 * gridDim.x) {
    const GroupedTile tile = tile_at<kColumns>(p, tables, tile_index, first_tile, last_tile);
    float d[kColumns];  // the first MMAs overwrite it
    register_fence(d);
    bar_sync(kOrderBarrier + consumer, 2 * kWarpgroupThreads);
    const int last_stage = mainloop<!kTransposed, kColumns, T>(d, pipeline, state, steps);
    // With few K steps the other consumer's MMAs should follow immediately. With more, handing over early took longer.
    if (steps <= kMaxStepsForEarlyArrive) bar_arrive(kOrderBarrier + 1 - consumer, 2 * kWarpgroupThreads);
    wgmma_wait_group<0>();
    register_fence(d);
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&pipeline.empty[last_stage]);
    if (steps > kMaxStepsForEarlyArrive) bar_arrive(kOrderBarrier + 1 - consumer, 2 * kWarpgroupThreads);
    state.advance_by(steps);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_plain_row<T, kColumns>(p, d, tile, tile.row + row_of_thread + 64 * block + 8 * half, half, kColumns / 2 * block);
      }
    }
  }
}

#endif  // PMO_SM90A

template <bool kTransposed, int kColumns, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_gemm_pingpong(const __grid_constant__ GroupedGemmParams p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages<kColumns>], empty[kStages<kColumns>];
  const ExpertTables tables = load_tables(p, reinterpret_cast<int32_t*>(shared + kSharedBytes<kColumns> - kTableBytes));
  const Pipeline<kColumns> pipeline = init_pipeline<Pipeline<kColumns>>(shared, full, empty);
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1);
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < kWarpSize) load_tiles<kTransposed, kColumns>(p, tables, pipeline, first_tile, last_tile);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume_tiles<kTransposed, kColumns, T>(p, tables, pipeline, first_tile, last_tile);
  }
#endif
}

template <bool kTransposed, int kColumns, typename T>
int launch_pingpong(const pmo_grouped_product_params& p, const GroupedGemmParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  auto* kernel = grouped_gemm_pingpong<kTransposed, kColumns, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes<kColumns>)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kTileRows}) + p.num_experts;
  const int64_t blocks = std::min<int64_t>(row_tiles * params.column_tiles, limits.multiprocessors);
  const Grid grid = {static_cast<unsigned>(blocks), kBlockThreads, kSharedBytes<kColumns>};
  return launch("grouped_product", kernel, grid, stream, params);
}

int grouped_gemm(const pmo_grouped_product_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_product(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  if (p.tile_rows == PMO_GROUPED_TURNED_ROWS) return swap_ab_gemm(p, stream);
  if (p.tile_rows == PMO_GROUPED_FEW_ROWS) return few_rows_gemm(p, stream);
  const bool is_wide = p.tile_columns == kWideTileColumns;
  GroupedGemmParams a = gemm_params_of(p, is_wide ? kWideTileColumns : kTileColumns);
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16;
  const Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.x_row_stride}, {kTileK, kTileRows}};
  if (const int status = encode(rows, is_bfloat16, &a.rows)) return status;
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileK, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  if (const int status = encode(matrix, is_bfloat16, &a.matrix)) return status;
  return dispatch_layout<PMO_GROUPED_PLAIN>(p, [&](auto, auto is_transposed, auto element) {
    using T = decltype(element);
    return is_wide ? launch_pingpong<is_transposed(), kWideTileColumns, T>(p, a, stream)
                   : launch_pingpong<is_transposed(), kTileColumns, T>(p, a, stream);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int32_t pmo_grouped_product_cuda_is_built(void) { return CUDART_VERSION >= 12000; }

extern "C" int pmo_grouped_product_cuda(const pmo_grouped_product_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::grouped_gemm);
}
