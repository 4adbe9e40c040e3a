// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Products of each expert's float8 rows and its float8 matrix on Hopper's tensor cores; results are those that pmo/grouped.h describes.
//
// A block stays for the whole launch and makes tiles of the list that pmo/grouped.h describes, which are handed out in bands: 128 rows of
// one expert and 256 columns. It has three warpgroups. The first finds the places of tiles, and loads 128 of the contraction at a time,
// through the copy engine, into a ring of kStages stages, in rows of 128 bytes that are swizzled, with zeros after the end. The other two multiply 64 rows each, first with 128
// of the columns, then with the other 128: the products of a stage are added up in the tensor cores, whose sums are short of bits,
// and then multiplied by their scales and added to sums in float32. While one warpgroup does that, the other keeps the tensor cores busy.
// Both have sums of their own and meet nowhere, so one can also store the results of a tile while the other still multiplies. Two blocks
// of a cluster take tiles that follow each other down a column: where both are of one expert, each loads half of the columns for both.
//
//   gated     the tile has 128 columns of gates and 128 of what they gate, so that a lane has both of each
//   gradient  the 128 columns that share a scale are half a tile
//
// Scales are read a stage ahead. Moved: the matrix and the rows once from memory and, per tile, from the L2; the results once, and hidden
// once more in a gradient.
#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/fp8_epilogue.cuh"
#include "cuda/gemm/pipeline.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/tma.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kStages = 4;
constexpr int kDepth = 128, kColumns = 256;
constexpr int kBytesOfRows = kTileRows * kDepth, kBytesOfStage = kBytesOfRows + kColumns * kDepth;
constexpr int kSharedBytes = kStages * kBytesOfStage + 1024 + kTableBytes;  // stages begin at a multiple of 1024

template <pmo_grouped_result kResult>
constexpr int kResultColumns = kResult == PMO_GROUPED_GATED ? kColumns / 2 : kColumns;

constexpr int kCluster = 2;  // blocks, of as many multiprocessors

#ifdef PMO_HOPPER_CODE

constexpr int kBand = 16;                   // rows of tiles that share their columns in the L2
constexpr int kBytesOfHalf = 128 * kDepth;  // of a stage's columns

using Ring = RingOf<kStages>;

struct Stages {
  uint32_t first;
  uint64_t *full, *empty;

  __device__ uint32_t rows(int stage) const { return first + stage * kBytesOfStage; }
  __device__ uint32_t columns(int stage) const { return rows(stage) + kBytesOfRows; }
};

// Where a tile is, and whether the other block of a cluster has rows of the same expert in the same columns.
struct Float8Place : GroupedPlace {
  bool shares_matrix;
};

using Float8Places = PlacesOf<Float8Place, 2>;

// The number of a cluster's next tile, from the first block to the second. Both barriers synchronise at cluster scope: a plain remote arrive
// at `read` can overtake the load of `tile`, and the first block then overwrites a number that the second has not read.
struct HandedTile {
  uint64_t sent, read;
  volatile int tile;
};

// A tile, found by the whole warp. The blocks of a cluster have tiles that follow each other down a column. Where there is one tile
// left for two of them, both make it, and the second keeps nothing.
__device__ inline Float8Place place_of(const GroupedArguments& p, const Tables& tables, int tile, int first_tile, int last_tile,
                                       int columns) {
  const int rank = blockIdx.x % kCluster, height = (last_tile - first_tile + kCluster - 1) / kCluster;
  const TilePlace place(tile, height, p.column_tiles, kBand / kCluster);
  const int first_of_cluster = first_tile + place.row * kCluster, wanted = first_of_cluster + rank;
  const int row_tile = min(wanted, last_tile - 1);
  int expert = 0;
  for (int begin = 0; begin < p.num_experts; begin += kWarpSize) {
    const int lane = begin + threadIdx.x % kWarpSize;
    const bool has_ended = lane < p.num_experts && tables.tiles[1 + lane] <= row_tile;
    expert += __popc(__ballot_sync(kAllLanes, has_ended));
  }
  const int row = tables.first[expert] + (row_tile - tables.tiles[expert]) * kTileRows;
  const int end = wanted == row_tile ? tables.stop[expert] : 0;
  const bool shares = tables.tiles[expert] <= first_of_cluster && first_of_cluster + kCluster <= tables.tiles[expert + 1];
  return {{expert, row, end, place.column * columns}, shares};
}

// The first column of the second half of a tile.
template <pmo_grouped_result kResult>
__device__ inline int second_half(const GroupedArguments& p, int column) {
  return column + (kResult == PMO_GROUPED_GATED ? p.to_up : kColumns / 2);
}

// The work of the warp that finds places. That of the first block of a cluster asks for tiles, and tells the second.
template <pmo_grouped_result kResult>
__device__ inline void find_places(const GroupedArguments& p, const Tables& tables, Float8Places& places, HandedTile& handed) {
  const int first_tile = __ldg(p.window), last_tile = __ldg(p.window + 1), clusters = gridDim.x / kCluster;
  const int tiles = (last_tile - first_tile + kCluster - 1) / kCluster * p.column_tiles;
  const bool is_first = threadIdx.x % kWarpSize == 0, asks = blockIdx.x % kCluster == 0;
  Float8Places::Ring ring;
  uint32_t phase = 0;
  for (int tile = blockIdx.x / kCluster;; ring.advance(), phase ^= 1) {
    Float8Place place = {{kNoTile, 0, 0, 0}, false};
    if (tile < tiles) place = place_of(p, tables, tile, first_tile, last_tile, kResultColumns<kResult>);
    places.wait_for_room(ring);
    if (is_first) places.give(ring, place);
    if (tile >= tiles) break;
    if (is_first) {
      if (asks) {
        tile = p.counter.next(clusters);
        wait_for_cluster(&handed.read, phase ^ 1);
        store_at(&handed.tile, tile, 1);
        release_at(&handed.sent, 1);
      } else {
        wait_for_cluster(&handed.sent, phase);
        tile = handed.tile;
        release_at(&handed.read, 0);
      }
    }
    tile = __shfl_sync(kAllLanes, tile, 0);
  }
  if (asks && is_first) p.counter.leave(clusters);
}

// The work of the warp that loads.
template <pmo_grouped_result kResult>
__device__ inline void load_tiles(const GroupedArguments& p, const Stages& stages, Float8Places& places) {
  const int steps = (p.inner + kDepth - 1) / kDepth, rank = blockIdx.x % kCluster;
  Ring ring;
  Float8Places::Ring at;
  for (Float8Place place = places.take(at); place.expert != kNoTile; place = places.take(at)) {
    const int column = p.first_column + place.column, next = second_half<kResult>(p, column);
    for (int step = 0; step < steps; ++step) {
      wait(&stages.empty[ring.stage], ring.phase ^ 1);
      if (is_elected()) {
        uint64_t* full = &stages.full[ring.stage];
        const uint32_t columns = stages.columns(ring.stage);
        const int depth = step * kDepth;
        arrive_expecting(full, kBytesOfStage);
        load_box(stages.rows(ring.stage), &p.rows, full, depth, place.row - p.first_row);
        if (place.shares_matrix) {
          load_box_to_all(columns + rank * kBytesOfHalf, &p.matrix, full, depth, rank == 0 ? column : next, place.expert, 0b11);
        } else {
          load_box(columns, &p.matrix, full, depth, column, place.expert);
          load_box(columns + kBytesOfHalf, &p.matrix, full, depth, next, place.expert);
        }
      }
      ring.advance();
    }
  }
}

// Where a thread finds the scales of its two rows and of both halves of a tile, and those of one stage.
struct ScalesOfStage {
  float row[2], half[2];
};

struct ScaleReader {
  const float *row[2], *half[2];

  __device__ ScalesOfStage load(int step) const {
    return {{__ldg(row[0] + step), __ldg(row[1] + step)}, {__ldg(half[0] + step), __ldg(half[1] + step)}};
  }
};

template <pmo_grouped_result kResult>
__device__ inline ScaleReader scales_of(const Float8Arguments& p, const GroupedPlace& place, int row) {
  const GroupedArguments& g = p.grouped;
  ScaleReader made;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int source = min(row + 8 * i - g.first_row, p.num_sources - 1);  // rows after the last may have any scale
    made.row[i] = p.row_scales + int64_t{source} * p.depth_blocks;
    const int column = g.first_column + place.column, half = i == 0 ? column : second_half<kResult>(g, column);
    const int block = min(half / kGroupOfScale, p.column_blocks - 1);  // and so may columns
    made.half[i] = p.matrix_scales + (int64_t{place.expert} * p.column_blocks + block) * p.depth_blocks;
  }
  return made;
}

// d += the products of a stage's rows and half of its columns, in `part`, times their scales.
template <int kFirst>
__device__ inline void add_products(float (&d)[128], const float (&part)[64], const ScalesOfStage& scales) {
  const float scale = scales.half[kFirst / 64];
  const float of_row[2] = {__fmul_rn(scales.row[0], scale), __fmul_rn(scales.row[1], scale)};
#pragma unroll
  for (int i = 0; i < 64; ++i) d[kFirst + i] = fmaf(part[i], of_row[i / 2 % 2], d[kFirst + i]);
}

__device__ inline void multiply_stage(float (&part)[64], uint32_t rows, uint32_t columns) {
  products_begin();
  const uint64_t a = describe(rows, 0, 1024), b = describe(columns, 0, 1024);
  constexpr int kNext = 32 >> 4;  // 32 numbers of a row are 32 bytes
  multiply_float8<true>(part, a, b);
#pragma unroll
  for (int k = 1; k < kDepth / 32; ++k) multiply_float8<false>(part, a + k * kNext, b + k * kNext);
  products_commit();
  products_wait<0>();
  hold(part);
}

// The work of a warpgroup that multiplies: 64 rows of every tile of the block.
template <pmo_grouped_result kResult, bool kKeepsCodes>
__device__ inline void make_tiles(const Float8Arguments& p, const Stages& stages, Float8Places& places) {
  const GroupedArguments& g = p.grouped;
  const int turn = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0) - 1;  // the compiler can see that all lanes have the same
  const int row_of_thread = 64 * turn + threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
  const bool signals = threadIdx.x % kWarpSize < kCluster;  // each to a block of the cluster
  const int steps = (g.inner + kDepth - 1) / kDepth;
  Ring ring;
  Float8Places::Ring at;
  float part[64] = {};
  for (GroupedPlace place = places.take(at); place.expert != kNoTile; place = places.take(at)) {
    const int row = place.row + row_of_thread;
    const ScaleReader reader = scales_of<kResult>(p, place, row);
    float d[128] = {};
    ScalesOfStage next = reader.load(0);
    for (int step = 0; step < steps; ++step) {
      const ScalesOfStage scales = next;
      next = reader.load(min(step + 1, steps - 1));
      const uint32_t rows = stages.rows(ring.stage) + turn * (kBytesOfRows / 2), columns = stages.columns(ring.stage);
      wait(&stages.full[ring.stage], ring.phase);
      multiply_stage(part, rows, columns);
      add_products<0>(d, part, scales);
      multiply_stage(part, rows, columns + kBytesOfHalf);
      if (signals) arrive_at(&stages.empty[ring.stage], threadIdx.x % kWarpSize);
      add_products<64>(d, part, scales);
      ring.advance();
    }
    store_float8<kResult, kKeepsCodes>(p, d, place, row);
  }
}

#endif  // PMO_HOPPER_CODE

// Older architectures, where kernels are empty, do not know of clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PMO_CLUSTER(blocks)
#else
#define PMO_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

// kKeepsCodes: hidden is kept in float8.
template <pmo_grouped_result kResult, bool kKeepsCodes>
__global__ void PMO_CLUSTER(kCluster) __launch_bounds__(kBlockThreads, 1)
    grouped_float8(const __grid_constant__ Float8Arguments p) {
#ifdef PMO_HOPPER_CODE
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Float8Places places;
  __shared__ HandedTile handed;
  const Tables tables = hold_tables(p.grouped, reinterpret_cast<int32_t*>(shared + kSharedBytes - kTableBytes));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], kCluster * 2 * kWarpgroup / kWarpSize);
    }
    places.init(1 + 2 * kWarpgroup / kWarpSize);
    init_barrier(&handed.sent, 1);
    init_barrier(&handed.read, 1);
    fence_barrier_init();
  }
  __syncthreads();
  meet_cluster();
  const Stages stages = {(shared_address(shared) + 1023) / 1024 * 1024, full, empty};
  if (threadIdx.x < kWarpgroup) {
    give_registers<kRegistersToLoad>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == 0) load_tiles<kResult>(p.grouped, stages, places);
    if (warp == 1) find_places<kResult>(p.grouped, tables, places, handed);
  } else {
    take_registers<kRegistersToMultiply>();
    make_tiles<kResult, kKeepsCodes>(p, stages, places);
  }
  meet_cluster();  // none may end while the other sends to its memory
#endif
}

template <pmo_grouped_result kResult, bool kKeepsCodes>
int launch_product(const pmo_grouped_float8_params& p, const Float8Arguments& arguments, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_float8", &device, &limits)) return status;
  auto* kernel = grouped_float8<kResult, kKeepsCodes>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int64_t row_tiles = divide_up(std::min(p.num_rows, p.window_rows), int64_t{kTileRows}) + p.num_experts;
  const int64_t clusters = divide_up(row_tiles, int64_t{kCluster}) * arguments.grouped.column_tiles;
  const int64_t blocks = kCluster * std::min<int64_t>(clusters, limits.multiprocessors / kCluster);
  const Grid grid = {static_cast<unsigned>(blocks), kBlockThreads, kSharedBytes};
  return launch("grouped_float8", kernel, grid, stream, arguments);
}

int product(const pmo_grouped_float8_params& p, cudaStream_t stream) {
  if (const int status = check_grouped_float8(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  Float8Arguments a = {};
  a.grouped = arguments_of(p, p.result == PMO_GROUPED_GATED ? kColumns / 2 : kColumns);
  a.grouped.counter = {p.counters};
  const Tensor rows = {p.x, 2, {p.inner, p.num_sources}, {p.inner}, {kDepth, kTileRows}};
  if (const int status = encode(rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &a.grouped.rows)) return status;
  const Tensor matrix = {p.matrix, 3, {p.inner, p.outer, p.num_experts}, {p.inner, p.inner * p.outer}, {kDepth, kColumns / 2, 1}};
  if (const int status = encode(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &a.grouped.matrix)) return status;
  a.row_scales = p.x_scales;
  a.matrix_scales = p.matrix_scales;
  a.codes = static_cast<uint8_t*>(p.codes);
  a.scales = p.scales;
  a.hidden_codes = static_cast<uint8_t*>(p.hidden_codes);
  a.hidden_scales = p.hidden_scales;
  a.amax_min = p.amax_min;
  a.num_sources = static_cast<int>(p.num_sources);
  a.depth_blocks = static_cast<int>(divide_up(p.inner, int64_t{kDepth}));
  a.column_blocks = static_cast<int>(divide_up(p.outer, int64_t{kGroupOfScale}));
  const bool keeps_codes = p.hidden_codes != nullptr;
  switch (p.result) {
    case PMO_GROUPED_GATED:
      return keeps_codes ? launch_product<PMO_GROUPED_GATED, true>(p, a, stream)
                         : launch_product<PMO_GROUPED_GATED, false>(p, a, stream);
    case PMO_GROUPED_GRADIENT:
      return keeps_codes ? launch_product<PMO_GROUPED_GRADIENT, true>(p, a, stream)
                         : launch_product<PMO_GROUPED_GRADIENT, false>(p, a, stream);
    default:
      return launch_product<PMO_GROUPED_PLAIN, false>(p, a, stream);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_grouped_float8_cuda(const pmo_grouped_float8_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::product);
}
