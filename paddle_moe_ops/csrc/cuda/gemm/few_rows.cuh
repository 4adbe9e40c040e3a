// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Parts that the grouped GEMMs for few rows share (few_rows.cu, few_rows_fp8.cu, few_rows_int.cu): parameters, tiles, prologue,
// epilogue and launch.
//
// Tiles: up to 64 rows of one expert x 128 columns of W (SwiGLU: 64 gates and their 64 ups), so that one token's experts fill the
// GPU. Each CTA finds the rows of experts from sizes and offsets in its prologue: no launch prepares tables. CTA b computes tiles b,
// b + gridDim.x, ..., expert by expert.
//
// Overlap: the launch may start while the previous one ends (cuda/ptx/dependent_launch.cuh). With `only_x_is_new`, the first loads of
// W precede the wait for X.
#pragma once

#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/expert_ranges.cuh"
#include "cuda/gemm/few_rows.h"
#include "cuda/gemm/swap_ab_epilogue.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace pmo {
namespace cuda {

constexpr int kFewRows = PMO_GROUPED_FEW_ROWS;          // of a tile
constexpr int kFewRowsBufferBytes = 2 * kSubtileBytes;  // subtiles of 16 rows x 64 columns, of both boxes

template <pmo_grouped_result kEpilogue>
constexpr int kFewRowsColumns = kEpilogue == PMO_GROUPED_GATED ? 64 : 128;  // of the result, per tile

// Weights of rows, or of slots [T, K] if `slot_to_row` is given.
struct RowWeights {
  const float* weights;  // may be null: 1
  const int32_t *slot_to_row, *row_to_token;
  int num_tokens, topk;

  __device__ float of(int row) const {
    if (weights == nullptr) return 1.0f;
    if (slot_to_row == nullptr) return __ldg(weights + row);
    const int token = __ldg(row_to_token + row);
    if (token < 0 || token >= num_tokens) return 0.0f;
    const int64_t first = int64_t{token} * topk;
    int found = -1;  // a token's slots have different rows
#pragma unroll 4
    for (int k = 0; k < topk; ++k) found = __ldg(slot_to_row + first + k) == row ? k : found;
    return found < 0 ? 0.0f : __ldg(weights + first + found);
  }
};

struct FewRowsParams {
  CUtensorMap matrix;
  GatheredRows source;  // row_to_token may be null
  const void *sizes, *offsets;
  RowWeights weights;
  const float* matrix_scales;
  void* out;
  int32_t sizes_kind, offsets_kind;
  int num_rows, num_experts, inner, first_column, width;
  int up_offset;  // columns from a gate to its up projection in the matrix
  int column_tiles;
  int outer, k_blocks, column_blocks;  // columns of the matrix, and blocks of 128 along its sides
  float amax_min;
  bool only_x_is_new;
};

// Shared memory of kStages stages: kBoxPairs times two boxes of 64 columns of W with kMatrixBytes in all, then kRowsBytes of X; after
// them two buffers of the epilogue for each two boxes. The first stage is aligned to 1024 bytes.
template <int kStages, int kMatrixBytes, int kRowsBytes, int kBoxPairs = 1>
struct FewRowsStages {
  static constexpr int kBytes = kMatrixBytes + kRowsBytes, kBufferBytes = kBoxPairs * kFewRowsBufferBytes;
  static constexpr int kSharedBytes = kStages * kBytes + 2 * kBufferBytes + 1024;
  uint32_t base;

#ifdef PMO_SM90A
  __device__ explicit FewRowsStages(const uint8_t* dynamic) : base((smem_address(dynamic) + 1023) / 1024 * 1024) {}
  __device__ uint32_t matrix(int stage) const { return base + stage * kBytes; }
  __device__ uint32_t rows(int stage) const { return matrix(stage) + kMatrixBytes; }
  __device__ uint32_t buffer(int which, int box) const {
    return base + kStages * kBytes + which * kBufferBytes + box * kSubtileBytes;
  }
#endif
};

#ifdef PMO_SM90A

template <int kStages, int kWarps>
struct FewRowsShared {
  uint64_t full[kStages], empty[kStages];
  int64_t of_warps[kWarps];
  int32_t first[PMO_GROUPED_MAX_FEW_EXPERTS], stop[PMO_GROUPED_MAX_FEW_EXPERTS], tiles[PMO_GROUPED_MAX_FEW_EXPERTS + 1];
};

// Prologue of a CTA: barriers, dependent launches, and the rows of experts. All threads call it.
template <int kStages, int kWarps>
__device__ inline void start_few_rows(const FewRowsParams& p, FewRowsShared<kStages, kWarps>& shared, int full_arrivals,
                                      int consumer_warps, int tile_rows = kFewRows) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.matrix);
    for (uint64_t& each : shared.full) mbarrier_init(&each, full_arrivals);
    for (uint64_t& each : shared.empty) mbarrier_init(&each, consumer_warps);
    fence_mbarrier_init();
  }
  if (!p.only_x_is_new) wait_for_previous_kernel();
  // From here on all kernels but the previous one have completed, so that the next one may read what they made.
  if (threadIdx.x == 0) start_next_kernel();
  const auto store = [&](int expert, int32_t first, int32_t stop, int32_t tiles) {
    shared.first[expert] = first;
    shared.stop[expert] = stop;
    shared.tiles[expert] = tiles;
  };
  const int32_t tiles = expert_ranges(p, tile_rows, shared.of_warps, store);
  if (threadIdx.x == 0) shared.tiles[p.num_experts] = tiles;
  __syncthreads();
}

// Calls visit(tile) for each tile of the CTA, of up to kTileRows rows and `tile_columns` columns of the result.
template <int kTileRows = kFewRows, typename Shared, typename Visit>
__device__ inline void for_each_tile(const FewRowsParams& p, const Shared& shared, int tile_columns, Visit visit) {
  const int end = shared.tiles[p.num_experts] * p.column_tiles;
#pragma unroll 1
  for (int index = blockIdx.x; index < end; index += gridDim.x) {
    const int row_tile = index / p.column_tiles;
    int low = 0, high = p.num_experts;  // the last expert whose tiles begin here or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tiles[middle] <= row_tile ? low : high) = middle;
    }
    const int row = shared.first[low] + (row_tile - shared.tiles[low]) * kTileRows;
    visit(SwapAbTile{low, row, min(shared.stop[low] - row, kTileRows), (index - row_tile * p.column_tiles) * tile_columns});
  }
}

// Matrix column of box `box` of a tile.
template <pmo_grouped_result kEpilogue>
__device__ inline int box_column(const FewRowsParams& p, const SwapAbTile& tile, int box) {
  return p.first_column + tile.column + box * (kEpilogue == PMO_GROUPED_GATED ? p.up_offset : 64);
}

// Source of row `row` of a tile: a row of x, or GatheredRows::kNone after the tile's last row and for rows without a token.
__device__ inline uint32_t source_of(const FewRowsParams& p, const SwapAbTile& tile, int row) {
  if (row >= tile.rows) return GatheredRows::kNone;
  return p.source.row_to_token != nullptr ? p.source.source_of(tile.row + row) : tile.row + row;
}

// Copies the rows of all tiles by one warp, in K steps of kBoxes boxes of 64 columns: eight lanes copy 128 bytes of a row, and the
// warp passes over the tile's rows four at a time. Tiles have `tile_columns` columns of the result. Chunks of 16 bytes have TMA's
// 128-byte swizzle; in tiles of up to `paired_rows` rows pairs of chunks are swizzled, for loads of 8 bytes by lane.
template <int kBoxes, int kStages, int kTileRows = kFewRows, typename Shared, typename Stages>
__device__ inline void copy_rows(const FewRowsParams& p, Shared& shared, const Stages& stages, int tile_columns,
                                 int paired_rows = 0) {
  const int lane = threadIdx.x % kWarpSize, chunk = lane % 8, first_row = lane / 8;
  PipelineState<kStages> state;
  for_each_tile<kTileRows>(p, shared, tile_columns, [&](const SwapAbTile& tile) {
    uint32_t source[kTileRows / 4];
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) source[i] = source_of(p, tile, first_row + 4 * i);
    const bool is_paired = tile.rows <= paired_rows;
    const int swizzled[2] = {(chunk ^ (is_paired ? 2 * first_row : first_row)) * 16,  // of even passes
                             (chunk ^ (is_paired ? 2 * first_row : first_row + 4)) * 16};
    for (int k_offset = 0; k_offset < p.inner; k_offset += kBoxes * kTileK) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int column = k_offset + box * kTileK + chunk * 8;
        const char* const from = p.source.first_row(column * 2);
        const uint32_t target = stages.rows(state.stage) + box * (kTileRows * 128) + first_row * 128;
#pragma unroll
        for (int i = 0; i < kTileRows / 4; i += 2) {
          if (4 * i >= tile.rows) break;
          p.source.template copy<2>(&source[i], from, column < p.inner,
                                    [&](int each) { return target + (i + each) * 4 * 128 + swizzled[each]; });
        }
      }
      cp_async_mbarrier_arrive_noinc(&shared.full[state.stage]);
      state.advance();
    }
  });
}

// Results of a subtile's 16 rows, in the words that stmatrix takes: SwiGLU of both halves of d, or the half of box `box`.
template <pmo_grouped_result kEpilogue, typename T, int kTileRows>
__device__ inline void results_of(const float (&d)[kTileRows], int subtile, int box, const float (&weight)[4],
                                  uint32_t (&word)[4]) {
  constexpr int kHalf = kTileRows / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = subtile * 8 + 2 * i;
    if constexpr (kEpilogue == PMO_GROUPED_GATED) {
      const float2 gate = Pair<T>::unpack(Pair<T>::pack(d[at], d[at + 1]));
      const float2 up = Pair<T>::unpack(Pair<T>::pack(d[at + kHalf], d[at + 1 + kHalf]));
      word[i] = Pair<T>::pack(gate.x * sigmoid(gate.x) * up.x, gate.y * sigmoid(gate.y) * up.y);
    } else {
      const int here = at + box * kHalf;
      word[i] = Pair<T>::pack(d[here] * weight[i / 2 * 2], d[here + 1] * weight[i / 2 * 2 + 1]);
    }
  }
}

// Weights of a tile's rows: 1 unless the result is plain.
template <pmo_grouped_result kEpilogue>
__device__ inline TileRowWeights few_row_weights(const FewRowsParams& p, const SwapAbTile& tile) {
  return TileRowWeights(tile, [&](int row) { return kEpilogue == PMO_GROUPED_PLAIN ? p.weights.of(row) : 1.0f; });
}

// Epilogue of a consumer warpgroup that has both boxes of a tile, in the halves of d. `which` is the buffer of the next subtile.
template <pmo_grouped_result kEpilogue, typename T, int kTileRows, typename Stages>
__device__ inline void store_tile(const FewRowsParams& p, const float (&d)[kTileRows], const SwapAbTile& tile,
                                  const TileRowWeights& weights, const SubtileLane& lane, const Stages& stages, int& which) {
  constexpr int kBoxes = kFewRowsColumns<kEpilogue> / 64;  // of results
  const int quad = threadIdx.x % 4 * 2;
#pragma unroll
  for (int subtile = 0; subtile < kTileRows / kSubtileRows; ++subtile) {
    if (subtile * kSubtileRows >= tile.rows) break;
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = weights.of(subtile, i / 2 * 8 + quad + i % 2);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      uint32_t word[4];
      results_of<kEpilogue, T>(d, subtile, box, weight, word);
      stmatrix_x4_trans(stages.buffer(which, box) + lane.to_write, word);
    }
    bar_sync(1, kWarpgroupThreads);
    const int row = subtile * kSubtileRows + lane.row;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int column = tile.column + 64 * box + lane.column;
      if (row >= tile.rows || column >= p.width) continue;
      store_from_subtile<T>(p.out, p.width, tile.row + row, column, stages.buffer(which, box) + lane.to_read);
    }
    which ^= 1;  // all warps have read this buffer when they meet at the barrier of the next one
  }
}

// mainloop.run<kN>(d, tile) with the tile's rows rounded up to kN, which is the first one, 8 or 16, or a multiple of 16.
template <int kTileRows, int kN, typename Mainloop, typename Accumulators>
__device__ inline void run_rounded(Mainloop& mainloop, Accumulators& d, const SwapAbTile& tile) {
  if constexpr (kN < kTileRows) {
    if (tile.rows > kN) return run_rounded<kTileRows, kN + (kN < 16 ? 8 : 16)>(mainloop, d, tile);
  }
  mainloop.template run<kN>(d, tile);
}

// Consumer warpgroup that has both boxes of a tile. `mainloop` has run<kN>(d, tile), which computes d = W^T X^T of the tile's 128
// columns and kN rows, and releases its stages.
template <pmo_grouped_result kEpilogue, int kTileRows, typename T, typename Shared, typename Stages, typename Mainloop>
__device__ inline void consume_tiles(const FewRowsParams& p, const Shared& shared, const Stages& stages, Mainloop mainloop) {
  const SubtileLane lane;
  int which = 0;
  for_each_tile<kTileRows>(p, shared, kFewRowsColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    const TileRowWeights weights = few_row_weights<kEpilogue>(p, tile);
    float d[kTileRows];
    run_rounded<kTileRows, kSubtileRows>(mainloop, d, tile);
    store_tile<kEpilogue, T>(p, d, tile, weights, lane, stages, which);
  });
}

#endif  // PMO_SM90A

template <typename Kernel>
int launch_few_rows(const pmo_grouped_product_params& p, const FewRowsParams& params, Kernel* kernel, int threads,
                    int shared_bytes, SharedMemoryLimit& limit, cudaStream_t stream, int blocks_per_sm = 1,
                    int tile_rows = kFewRows) {
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  if (const int status = limit.raise(kernel, device, shared_bytes)) return status;
  const int64_t row_tiles = std::min(p.num_rows, p.num_rows / tile_rows + p.num_experts);
  const int64_t blocks = std::min<int64_t>(row_tiles * params.column_tiles, int64_t{limits.multiprocessors} * blocks_per_sm);
  const Grid grid = {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), false,
                     true};
  return launch("grouped_product", kernel, grid, stream, params);
}

// Launches of the kernels for float8 and for integer codes; `params` lacks the tensor map.
int few_rows_int(const pmo_grouped_product_params& p, FewRowsParams params, cudaStream_t stream);
int few_rows_fp8(const pmo_grouped_product_params& p, FewRowsParams params, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
