// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Tiles, stages and shared memory of the swap-AB grouped GEMM (swap_ab.cu).
//
// Dynamic shared memory: kSwapAbStages stages, then an epilogue buffer for each consumer warpgroup. A stage of the mainloop holds
// 64 x 256 elements of the expert's matrix, in four boxes of 64 columns, and 64 columns of up to 160 rows of X. In a dSwiGLU
// tile, the stages after those of the mainloop hold 32 rows of hidden (kHiddenBytes: gates and ups of 256 columns) and the act of
// these rows, half as large.
#pragma once

#include "cuda/gemm/gather.cuh"
#include "cuda/gemm/params.cuh"

namespace pmo {
namespace cuda {

constexpr int kSwapAbRows = PMO_GROUPED_TURNED_ROWS, kSwapAbColumns = 256;  // of a tile; SwiGLU: 128 gates and their 128 ups
constexpr int kSwapAbAccumulators = kSwapAbRows;                            // of a lane: two m64 MMAs of N = kSwapAbRows
constexpr int kSwapAbStages = 4;

// Epilogue subtile: 16 rows x 64 columns of the result, in rows of 128 bytes with 128-byte swizzle. A TMA store takes two
// subtiles or one.
constexpr int kSubtileRows = 16, kSubtileBytes = kSubtileRows * 128, kSubtilePairBytes = 2 * kSubtileBytes;
constexpr int kEpilogueBytes = 4 * kSubtileBytes;                             // of a consumer warpgroup's buffer
constexpr int kDotsOfSubtile = kWarpgroupThreads / kWarpSize * kSubtileRows;  // partial dot products: one per row and warp
constexpr int kHiddenBytes = 8 * kSubtilePairBytes;  // of a stage: gates and ups of four 64-column blocks, 32 rows

constexpr int kMatrixBytes = kSwapAbColumns * kTileK * 2;
constexpr int kSwapAbStageBytes = kMatrixBytes + kSwapAbRows * kTileK * 2;
constexpr int kSwapAbSharedBytes =
    kSwapAbStages * kSwapAbStageBytes + 2 * kEpilogueBytes + 1024;  // the first stage is aligned to 1024 bytes

static_assert(kHiddenBytes + kHiddenBytes / 2 <= kSwapAbStageBytes, "hidden and act fit a stage");

// Columns of the result that a tile yields.
template <pmo_grouped_result kEpilogue>
constexpr int kResultColumns = kEpilogue == PMO_GROUPED_GATED ? kSwapAbColumns / 2 : kSwapAbColumns;

// The tensor map `rows` loads boxes of 32 rows, rows_16 of 16. Maps of hidden and out have boxes of two subtiles (32 rows) or one
// (16). The last coordinate of hidden's three tells gates (0) from ups (1).
struct SwapAbParams : GroupedGemmParams {
  CUtensorMap rows_16, hidden_32, hidden_16, out_32, out_16;
  GatheredRows gathered;
};

// Coordinates of a tile: its expert, its first row, its number of rows (0 after the last tile), its first column.
struct alignas(16) SwapAbTile {
  int expert, row, rows, column;
};

#ifdef PMO_SM90A

constexpr int kConsumerWarps = 2 * kWarpgroupThreads / kWarpSize;
constexpr int kGatherRows = kWarpgroupThreads / 8;  // rows per pass of the gather warpgroup: eight lanes copy 128 bytes of a row

// Facts about the rows of a dSwiGLU tile, in shared memory: weights, and which rows have a token. There are kTileFactsSlots
// slots: the scheduler warp fills that of tile t after both consumer warpgroups have popped tile t - 2.
constexpr int kTileFactsSlots = 4;

struct alignas(16) TileFacts {
  float weights[kSwapAbRows];  // 0 for a row without a token
  uint32_t has_token[kSwapAbRows / kWarpSize];
  bool all_have_token;

  // Called by one warp. Rows after the tile's last one count as rows with a token: their results are not stored.
  __device__ void fill(const GroupedGemmParams& p, const SwapAbTile& tile) {
    const int lane = threadIdx.x % kWarpSize;
    bool all = true;
#pragma unroll
    for (int i = 0; i < kSwapAbRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + lane;
      const bool is_row = row < tile.rows;
      const bool is_token = !is_row || p.row_to_token == nullptr || __ldg(p.row_to_token + tile.row + row) >= 0;
      weights[row] = !is_token ? 0.0f : is_row && p.weights != nullptr ? __ldg(p.weights + tile.row + row) : 1.0f;
      const uint32_t tokens = __ballot_sync(kAllLanes, is_token);
      if (lane == 0) has_token[i] = tokens;
      all = all && tokens == kAllLanes;
    }
    if (lane == 0) all_have_token = all;
    __syncwarp();
  }

  // 16 bits of ones or zeros for each of rows `row` and `row` + 1; `row` is even.
  __device__ uint32_t mask(int row) const {
    const uint32_t bits = has_token[row / kWarpSize] >> row % kWarpSize;
    return (bits & 1 ? 0x0000FFFFu : 0) | (bits & 2 ? 0xFFFF0000u : 0);
  }
};

static_assert(4 * kDotsOfSubtile * 4 <= kEpilogueBytes / 2, "dot products of two stages fit half of a buffer");
static_assert(kTileFactsSlots * sizeof(TileFacts) <= kEpilogueBytes / 2, "facts about tiles fit the other half");

// Internal linkage, here and in swap_ab_producer.cuh: nvcc 13.0 inlines into the dSwiGLU kernels differently with external
// linkage.
namespace {

using SwapAbState = PipelineState<kSwapAbStages>;
using SwapAbQueue = TileQueue<SwapAbTile, 2>;

// Static shared memory of a CTA.
struct SwapAbShared {
  uint64_t full[kSwapAbStages], empty[kSwapAbStages];
  uint64_t tile_request;  // mbarrier: from the load warp to the scheduler warp
  SwapAbQueue queue;
  uint32_t sources[kGatherRows][kSwapAbRows / kGatherRows];  // tokens that a tile gathers: row 16 i + r is [r][i]
};

// Shared addresses of the parts of stages and of the epilogue buffers.
struct SwapAbPipeline {
  uint32_t first;

  __device__ uint32_t matrix(int stage) const { return first + stage * kSwapAbStageBytes; }
  __device__ uint32_t rows(int stage) const { return matrix(stage) + kMatrixBytes; }
  __device__ uint32_t hidden(int stage, int block) const { return matrix(stage) + block * 2 * kSubtilePairBytes; }
  __device__ uint32_t act(int stage, int block) const { return matrix(stage) + kHiddenBytes + block * kSubtilePairBytes; }
  __device__ uint32_t epilogue_buffer(int warpgroup) const { return matrix(kSwapAbStages) + warpgroup * kEpilogueBytes; }
  // dSwiGLU stores its results from the stages, so the epilogue buffers hold partial dot products and facts about tiles.
  __device__ float* dots(int warpgroup) const { return static_cast<float*>(pointer(epilogue_buffer(warpgroup))); }
  __device__ TileFacts& facts(int tile_count) const {
    return static_cast<TileFacts*>(pointer(epilogue_buffer(0) + kEpilogueBytes / 2))[tile_count % kTileFactsSlots];
  }

 private:
  __device__ static void* pointer(uint32_t address) {
    extern __shared__ uint8_t dynamic[];
    return dynamic + (address - smem_address(dynamic));
  }
};

template <bool kGather>
__device__ inline void init_barriers(SwapAbShared& shared) {
  if (threadIdx.x == 0) {
    for (uint64_t& each : shared.full) mbarrier_init(&each, kGather ? 1 + kWarpgroupThreads : 1);
    for (uint64_t& each : shared.empty) mbarrier_init(&each, kConsumerWarps);
    shared.queue.init(kConsumerWarps + 1 + (kGather ? kWarpgroupThreads / kWarpSize : 0));
    mbarrier_init(&shared.tile_request, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
}

}  // namespace

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
