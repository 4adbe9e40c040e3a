// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Plain products of each expert's rows and its matrix on Hopper's tensor cores, for contractions so short that a tile of grouped_turned.cu
// takes about as long to store as to multiply, and for longer ones of many rows where tiles of 192 columns fit or memory is fast.
//
// A block stays for the whole launch and takes every gridDim.x-th tile of the list that pmo/grouped.h describes: 128 rows of one expert
// and 128 or 192 columns. It has three warpgroups. The first loads: rows and matrix come through the copy engine, 64 of the contraction at a
// time, into a ring of kStages stages, in pieces of 64 rows of 128 bytes that are swizzled, with zeros after its end. The other two take
// turns: while one multiplies a tile, the other turns the sums of the tile before it into results.
//
// Moved: the matrix and the rows once from memory and, per tile, from the L2; the results once.
#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/pipeline.cuh"
#include "cuda/gemm/swap_ab.h"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/wgmma.cuh"

namespace pmo {
namespace cuda {
namespace {

// Tiles have 128 columns, or 192, with which operands are read less often.
constexpr int kWideColumns = PMO_GROUPED_WIDE_COLUMNS;

template <int kColumns>
constexpr int kBytes = kBytesA + kColumns * kTileDepth * 2;  // of a stage
template <int kColumns>
constexpr int kStages = kColumns == kTileColumns ? 6 : 5;
template <int kColumns>
constexpr int kSharedBytes = kStages<kColumns> * kBytes<kColumns> + 1024 + kTableBytes;  // stages begin at a multiple of 1024

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 8;      // rows of tiles that share their columns in the L2
constexpr int kFewSteps = 4;  // of a tile

template <int kColumns>
using Ring = RingOf<kStages<kColumns>>;
template <int kColumns>
using Stages = StagesOf<kStages<kColumns>, kBytes<kColumns>>;

// The expert and the rows of a tile, found by the whole warp.
template <int kColumns>
__device__ inline GroupedPlace place_of(const GroupedArguments& p, const Tables& tables, int tile, int first_tile,
                                        int last_tile) {
  const TilePlace place(tile, last_tile - first_tile, p.column_tiles, kBand);
  const int row_tile = first_tile + place.row;
  int expert = 0;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && tables.tiles[1 + lane] <= row_tile;
    expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int row = tables.first[expert] + (row_tile - tables.tiles[expert]) * kTileRows;
  return {expert, row, tables.stop[expert], place.column * kColumns};
}

// The work of the warp that loads.
template <bool kTransposed, int kColumns>
__device__ inline void load_tiles(const GroupedArguments& p, const Tables& tables, const Stages<kColumns>& stages, int first_tile,
                                  int last_tile) {
  const int tiles = (last_tile - first_tile) * p.column_tiles, steps = (p.inner + kTileDepth - 1) / kTileDepth;
  Ring<kColumns> ring;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const GroupedPlace place = place_of<kColumns>(p, tables, tile, first_tile, last_tile);
    const int column = p.first_column + place.column;
    for (int step = 0; step < steps; ++step) {
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      if (is_elected()) {
        uint64_t* full = &stages.full[ring.stage];
        const uint32_t b = stages.b(ring.stage);
        const int depth = step * kTileDepth;
        arrive_expecting(full, kBytes<kColumns>);
        load_box(stages.a(ring.stage), &p.rows, full, depth, place.row - p.first_row);
#pragma unroll
        for (int piece = 0; piece < kColumns / 64; ++piece) {
          const int at_column = column + 64 * piece;
          load_box(b + piece * kPieceBytes, &p.matrix, full, kTransposed ? depth : at_column, kTransposed ? at_column : depth,
                   place.expert);
        }
      }
      ring.advance();
    }
  }
}

// d = the product of a tile's rows and columns, stage by stage. The products of the last stage are still running after the call; returns it.
template <bool kTurned, int kColumns, typename T>
__device__ inline int multiply_tile(float (&d)[kColumns], const Stages<kColumns>& stages, Ring<kColumns>& ring, int steps) {
  const bool signals = threadIdx.x % kWarpSize == 0;
  int last = 0;
  for (int step = 0; step < steps; ++step) {
    wait(&stages.full[ring.stage], ring.phase);
    products_begin();
    const uint64_t a = describe(stages.a(ring.stage), kPieceBytes, 1024), b = describe(stages.b(ring.stage), kPieceBytes, 1024);
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
      // 16 numbers of a row are 32 bytes; 16 rows, where they are the contraction, are 2048.
      const uint64_t at_a = a + k * (32 >> 4), at_b = b + k * ((kTurned ? 2048 : 32) >> 4);
      multiply_columns<kColumns, 0, false, kTurned, T>(d, at_a, at_b, step > 0 || k > 0);
      multiply_columns<kColumns, kColumns / 2, false, kTurned, T>(d, at_a + (kPieceBytes >> 4), at_b, step > 0 || k > 0);
    }
    products_commit();
    products_wait<1>();
    if (step > 0 && signals) arrive(&stages.empty[last]);
    last = ring.stage;
    ring.advance();
  }
  return last;
}

// The work of a warpgroup that multiplies: every second tile of the block.
template <bool kTransposed, int kColumns, typename T>
__device__ inline void make_tiles(const GroupedArguments& p, const Tables& tables, const Stages<kColumns>& stages, int first_tile,
                                  int last_tile) {
  const int turn = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const int row_of_thread = threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
  const int tiles = (last_tile - first_tile) * p.column_tiles, steps = (p.inner + kTileDepth - 1) / kTileDepth;
  Ring<kColumns> ring;
  ring.skip(turn * steps);
  // A stage's barrier tells odd phases from even ones only, so no warpgroup may wait for stages before the other has seen its own filled.
  constexpr int kTurn = 1;
  if (turn == 1) tell(kTurn, 2 * kWarpgroup);
  for (int tile = blockIdx.x + turn * gridDim.x; tile < tiles; tile += 2 * gridDim.x) {
    const GroupedPlace place = place_of<kColumns>(p, tables, tile, first_tile, last_tile);
    float d[kColumns];  // the first products give it its values
    hold(d);
    meet(kTurn + turn, 2 * kWarpgroup);
    const int last = multiply_tile<!kTransposed, kColumns, T>(d, stages, ring, steps);
    // With few steps it matters that the other warpgroup's products follow at once. With more, that took longer.
    if (steps <= kFewSteps) tell(kTurn + 1 - turn, 2 * kWarpgroup);
    products_wait<0>();
    hold(d);
    if (threadIdx.x % kWarpSize == 0) arrive(&stages.empty[last]);
    if (steps > kFewSteps) tell(kTurn + 1 - turn, 2 * kWarpgroup);
    ring.skip(steps);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_plain<T, kColumns>(p, d, place, place.row + row_of_thread + 64 * block + 8 * half, half, kColumns / 2 * block);
      }
    }
  }
}

#endif  // PMO_HOPPER_CODE

template <bool kTransposed, int kColumns, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1) grouped_product(const __grid_constant__ GroupedArguments p) {
#ifdef PMO_HOPPER_CODE
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages<kColumns>], empty[kStages<kColumns>];
  const Tables tables = hold_tables(p, reinterpret_cast<int32_t*>(shared + kSharedBytes<kColumns> - kTableBytes));
  const Stages<kColumns> stages = make_stages<kStages<kColumns>, kBytes<kColumns>>(shared, full, empty);
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1);
  if (threadIdx.x < kWarpgroup) {
    give_registers<kRegistersToLoad>();
    if (threadIdx.x < kWarpSize) load_tiles<kTransposed, kColumns>(p, tables, stages, first_tile, last_tile);
  } else {
    take_registers<kRegistersToMultiply>();
    make_tiles<kTransposed, kColumns, T>(p, tables, stages, first_tile, last_tile);
  }
#endif
}

template <bool kTransposed, int kColumns, typename T>
int launch_product(const pmo_grouped_product_params& p, const GroupedArguments& arguments, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  auto* kernel = grouped_product<kTransposed, kColumns, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes<kColumns>)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kTileRows}) + p.num_experts;
  const int64_t blocks = std::min<int64_t>(row_tiles * arguments.column_tiles, limits.multiprocessors);
  const Grid grid = {static_cast<unsigned>(blocks), kBlockThreads, kSharedBytes<kColumns>};
  return launch("grouped_product", kernel, grid, stream, arguments);
}

int product(const pmo_grouped_product_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_product(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  if (p.tile_rows == PMO_GROUPED_TURNED_ROWS) return turned_product(p, stream);
  const bool is_wide = p.tile_columns == kWideColumns;
  GroupedArguments a = arguments_of(p, is_wide ? kWideColumns : kTileColumns);
  const bool is_bfloat16 = p.dtype == PMO_BFLOAT16;
  const Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.x_row_stride}, {kTileDepth, kTileRows}};
  if (const int status = encode(rows, is_bfloat16, &a.rows)) return status;
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileDepth, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  if (const int status = encode(matrix, is_bfloat16, &a.matrix)) return status;
  return with_result<PMO_GROUPED_PLAIN>(p, [&](auto, auto is_transposed, auto element) {
    using T = decltype(element);
    return is_wide ? launch_product<is_transposed(), kWideColumns, T>(p, a, stream)
                   : launch_product<is_transposed(), kTileColumns, T>(p, a, stream);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int32_t pmo_grouped_product_cuda_is_built(void) { return CUDART_VERSION >= 12000; }

extern "C" int pmo_grouped_product_cuda(const pmo_grouped_product_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::product);
}
