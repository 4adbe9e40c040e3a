// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Epilogues of the swap-AB grouped GEMM (swap_ab.cu) with plain results and with SwiGLU.
//
// Accumulators hold result^T: an accumulator row is a column of the result. stmatrix.trans writes them to shared memory as
// subtiles of 16 rows x 64 columns of the result, from which TMA stores whole lines. TMA stores of two subtiles overlap the
// conversion of the next two. A last subtile with fewer than 16 rows of the expert is stored by the lanes, since TMA would
// overwrite rows of the next expert.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/swap_ab_pipeline.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// Weights of a tile's rows, spread over the lanes of a warp: lane l holds those of rows l, l + 32, ...
struct TileRowWeights {
  float held[kSwapAbRows / kWarpSize];

  // weight_of(row) is called for rows of the tile.
  template <typename Weight>
  __device__ TileRowWeights(const SwapAbTile& tile, Weight weight_of) {
#pragma unroll
    for (int i = 0; i < kSwapAbRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + threadIdx.x % kWarpSize;
      held[i] = row < tile.rows ? weight_of(tile.row + row) : 1.0f;
    }
  }

  // Weight of row `row` of a subtile; by all lanes.
  __device__ float of(int subtile, int row) const {
    return __shfl_sync(kAllLanes, held[subtile / 2], subtile % 2 * kSubtileRows + row);
  }
};

// Offsets of a lane in a subtile: to_write for stmatrix and ldmatrix, to_read for its 16 bytes of row `row` from column `column`
// on.
struct SubtileLane {
  uint32_t to_write, to_read;
  int row, column;

  __device__ SubtileLane() {
    const int thread = threadIdx.x % kWarpgroupThreads, lane = thread % kWarpSize, warp = thread / kWarpSize;
    // A warp has 16 columns: lanes 0 to 7 and 16 to 23 pass addresses of rows of the first eight, the others of the last eight.
    const int chunk = 2 * warp + lane / 8 % 2;
    to_write = (lane / 16 * 8 + lane % 8) * 128 + (chunk ^ lane % 8) * 16;
    row = thread / 8;
    column = thread % 8 * 8;
    to_read = row * 128 + (thread % 8 ^ row % 8) * 16;
  }
};

// Stores a lane's 8 columns of a row of a subtile to global memory.
template <typename T>
__device__ inline void store_from_subtile(void* target, int64_t width, int64_t row, int column, uint32_t source) {
  const uint4 got = ld_shared_v4(source);
  *reinterpret_cast<uint4*>(static_cast<T*>(target) + row * width + column) = got;
}

// TMA stores of 64 columns by one lane: one subtile, or two if has_two. store_hidden stores gates and then ups.
__device__ inline void store_out(const SwapAbParams& p, uint32_t source, int column, int row, bool has_two) {
  tma_store_3d(has_two ? &p.out_32 : &p.out_16, source, column, row, 0);
}
__device__ inline void store_hidden(const SwapAbParams& p, uint32_t source, int column, int row, bool has_two) {
  if (has_two) {
    tma_store_3d(&p.hidden_32, source, column, row, 0);
  } else {
    tma_store_3d(&p.hidden_16, source, column, row, 0);
    tma_store_3d(&p.hidden_16, source + kSubtilePairBytes, column, row, 1);
  }
}

// Staging of a warpgroup's subtiles for TMA stores, two subtiles of kKinds results (64 columns each) at a time, in kBuffers
// buffers. They lie in the warpgroup's half of the matrix in the mainloop's last stage, and continue in its epilogue buffer. Warp
// i stores kind i.
template <int kKinds>
struct SubtileBuffers {
  static constexpr int kInStage = 2 * 64 * 128 / kSubtileBytes, kSubtiles = kInStage + kEpilogueBytes / kSubtileBytes;
  static constexpr int kBuffers = kSubtiles / (2 * kKinds);
  static_assert(kBuffers >= 2, "two subtiles are written while TMA reads the two before");
  uint32_t in_stage, buffer;
  int warp;  // of the warpgroup

  __device__ uint32_t address(int subtile, int kind) const {
    const int i = (subtile / 2 % kBuffers * kKinds + kind) * 2 + subtile % 2;
    return i < kInStage ? in_stage + i * kSubtileBytes : buffer + (i - kInStage) * kSubtileBytes;
  }

  // Issues the TMA stores of two subtiles that all lanes have written: store(first row, whether both are whole) in the first
  // `kinds` warps. After its barrier every warp may write the next buffer: the stores that read it before have finished reading.
  template <typename Store>
  __device__ void send(int barrier, int subtile, const SwapAbTile& tile, int kinds, Store store) const {
    fence_proxy_async();
    if (elect_sync()) cp_async_bulk_wait_group_read<kBuffers - 2>();
    bar_sync(barrier, kWarpgroupThreads);
    const int rows = tile.rows - subtile * kSubtileRows;
    if (elect_sync()) {
      if (warp < kinds && rows >= kSubtileRows) store(tile.row + subtile * kSubtileRows, rows >= 2 * kSubtileRows);
      cp_async_bulk_commit_group();
    }
  }
};

// out = weights[r] * accumulators: 128 columns of a warpgroup, from `column` on. `barrier` is a named barrier of the warpgroup.
template <typename T>
__device__ inline void epilogue_plain(const SwapAbParams& p, const float (&d)[kSwapAbAccumulators], const SwapAbTile& tile,
                                      const TileRowWeights& weights, int column, const SubtileBuffers<2>& buffers, int barrier) {
  const SubtileLane lane;
  const int quad = threadIdx.x % 4 * 2, first_column = column + 64 * buffers.warp;
  const int blocks = column + 64 < p.width ? 2 : column < p.width ? 1 : 0;
#pragma unroll
  for (int first = 0; first < kSwapAbRows / kSubtileRows; first += 2) {
    if (first * kSubtileRows >= tile.rows) break;
#pragma unroll
    for (int subtile = first; subtile < first + 2; ++subtile) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[i] = weights.of(subtile, i / 2 * 8 + quad + i % 2);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = block * kSwapAbAccumulators / 2 + subtile * 8 + 2 * i;
          word[i] = Pair<T>::pack(d[at] * weight[i / 2 * 2], d[at + 1] * weight[i / 2 * 2 + 1]);
        }
        stmatrix_x4_trans(buffers.address(subtile, block) + lane.to_write, word);
      }
    }
    buffers.send(barrier, first, tile, blocks,
                 [&](int row, bool has_two) { store_out(p, buffers.address(first, buffers.warp), first_column, row, has_two); });
  }
  if (tile.rows % kSubtileRows == 0) return;
  const int subtile = tile.rows / kSubtileRows;
  for (int block = 0; block < blocks; ++block) {
    const int at = column + 64 * block + lane.column;
    if (lane.row >= tile.rows % kSubtileRows || at >= p.width) break;
    store_from_subtile<T>(p.out, p.width, tile.row + subtile * kSubtileRows + lane.row, at,
                          buffers.address(subtile, block) + lane.to_read);
  }
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
}

// out = silu(gate) * up, from gate and up rounded to T; hidden = gate and up, if it is kept. The first half of a lane's
// accumulators are gates of 64 columns, the second half their ups.
template <typename T>
__device__ inline void epilogue_swiglu(const SwapAbParams& p, const float (&d)[kSwapAbAccumulators], const SwapAbTile& tile,
                                       int column, const SubtileBuffers<3>& buffers, int barrier) {
  const SubtileLane lane;
  const bool keeps_hidden = p.hidden != nullptr;
  const int kinds = column >= p.width ? 0 : keeps_hidden ? 2 : 1;
#pragma unroll
  for (int first = 0; first < kSwapAbRows / kSubtileRows; first += 2) {
    if (first * kSubtileRows >= tile.rows) break;
#pragma unroll
    for (int subtile = first; subtile < first + 2; ++subtile) {
      uint32_t gate[4], up[4], act[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = subtile * 8 + 2 * i;
        gate[i] = Pair<T>::pack(d[at], d[at + 1]);
        up[i] = Pair<T>::pack(d[at + kSwapAbAccumulators / 2], d[at + kSwapAbAccumulators / 2 + 1]);
        const float2 g = Pair<T>::unpack(gate[i]), u = Pair<T>::unpack(up[i]);
        act[i] = Pair<T>::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
      }
      stmatrix_x4_trans(buffers.address(subtile, 0) + lane.to_write, act);
      if (keeps_hidden) {
        stmatrix_x4_trans(buffers.address(subtile, 1) + lane.to_write, gate);
        stmatrix_x4_trans(buffers.address(subtile, 2) + lane.to_write, up);
      }
    }
    buffers.send(barrier, first, tile, kinds, [&](int row, bool has_two) {
      if (buffers.warp == 0) {
        store_out(p, buffers.address(first, 0), column, row, has_two);
      } else {
        store_hidden(p, buffers.address(first, 1), column, row, has_two);
      }
    });
  }
  if (tile.rows % kSubtileRows == 0) return;
  const int subtile = tile.rows / kSubtileRows, at = column + lane.column;
  const int64_t row = tile.row + subtile * kSubtileRows + lane.row, width = int64_t{p.width} * 2;
  if (lane.row < tile.rows % kSubtileRows && at < p.width) {
    store_from_subtile<T>(p.out, p.width, row, at, buffers.address(subtile, 0) + lane.to_read);
    if (keeps_hidden) {
      store_from_subtile<T>(p.hidden, width, row, at, buffers.address(subtile, 1) + lane.to_read);
      store_from_subtile<T>(p.hidden, width, row, at + p.width, buffers.address(subtile, 2) + lane.to_read);
    }
  }
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
