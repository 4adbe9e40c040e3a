// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows, sm_90a: the GEMM of swap_ab.cu, Y_e^T = W_e^T X_e^T, in the same order of K and so with
// the same bits, where reading the matrices takes the time.
//
//   plain  out [M, width] = weights[r] * Y
//   gated  out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles: up to 64 rows of one expert x 128 columns of W (SwiGLU: 64 gates and their 64 ups), so that one token's experts fill the
// GPU. Each CTA finds the rows of experts from sizes and offsets in its prologue: no launch prepares tables. CTA b computes tiles b,
// b + gridDim.x, ..., expert by expert.
//
// Warp-specialised, a pipeline of kStages stages of 64 along K:
//   warps 0 to 3  consumers: two m64 MMAs with N = the tile's rows rounded up to 16; epilogue
//   warp 4        loads W by TMA in boxes of 64 columns
//   warp 5        copies rows of X by cp.async, 16 bytes a lane; gathers token rows if row_to_token is given
//
// Overlap: loads run kStages K steps ahead and across tiles. The launch may start while the previous one ends
// (cuda/ptx/dependent_launch.cuh). With `only_x_is_new`, its first kStages loads of W precede the wait for X.
//
// Work: 2 M K N FLOPs. Bytes: the matrices of experts that have rows once from memory; X once per 128 columns, from the L2.
#include "cuda/gemm/few_rows.h"

#include <algorithm>

#include "common/checks.h"
#include "cuda/gemm/expert_ranges.cuh"
#include "cuda/gemm/swap_ab_epilogue.cuh"
#include "cuda/gemm/tensor_map.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kRows = PMO_GROUPED_FEW_ROWS;
constexpr int kStages = 8;
constexpr int kConsumerWarps = kWarpgroupThreads / kWarpSize, kWarps = kConsumerWarps + 2, kThreads = kWarps * kWarpSize;
constexpr int kStageBytes = 2 * kBoxBytes + kRows * kTileK * 2;
constexpr int kBufferBytes = 2 * kSubtileBytes;                                // subtiles of 16 rows x 64 columns, of both boxes
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kBufferBytes + 1024;  // the first stage is aligned to 1024 bytes

template <pmo_grouped_result kEpilogue>
constexpr int kColumns = kEpilogue == PMO_GROUPED_GATED ? 64 : 128;  // of the result, per tile

struct Params {
  CUtensorMap matrix;
  GatheredRows source;  // row_to_token may be null
  const void *sizes, *offsets;
  const float* weights;
  void* out;
  int32_t sizes_kind, offsets_kind;
  int num_rows, num_experts, inner, first_column, width;
  int up_offset;  // columns from a gate to its up projection in the matrix
  int column_tiles;
  bool only_x_is_new;
};

#ifdef PMO_SM90A

constexpr int kMaxExperts = PMO_GROUPED_MAX_FEW_EXPERTS;
constexpr int kAccumulators = kRows;  // of a lane: two m64 MMAs of N = kRows

struct Shared {
  uint64_t full[kStages], empty[kStages];
  int64_t of_warps[kWarps];
  int32_t first[kMaxExperts], stop[kMaxExperts], tiles[kMaxExperts + 1];
};

using State = PipelineState<kStages>;

struct Stages {
  uint32_t base;

  __device__ uint32_t matrix(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t rows(int stage) const { return matrix(stage) + 2 * kBoxBytes; }
  __device__ uint32_t buffer(int which, int box) const {
    return base + kStages * kStageBytes + which * kBufferBytes + box * kSubtileBytes;
  }
};

// Calls visit(tile) for each tile of the CTA.
template <int kTileColumns, typename Visit>
__device__ inline void for_each_tile(const Params& p, const Shared& shared, Visit visit) {
  const int end = shared.tiles[p.num_experts] * p.column_tiles;
#pragma unroll 1
  for (int index = blockIdx.x; index < end; index += gridDim.x) {
    const int row_tile = index / p.column_tiles;
    int low = 0, high = p.num_experts;  // the last expert whose tiles begin here or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tiles[middle] <= row_tile ? low : high) = middle;
    }
    const int row = shared.first[low] + (row_tile - shared.tiles[low]) * kRows;
    visit(SwapAbTile{low, row, min(shared.stop[low] - row, kRows), (index - row_tile * p.column_tiles) * kTileColumns});
  }
}

template <pmo_grouped_result kEpilogue, bool kTransposed>
__device__ inline void load_matrix(const Params& p, Shared& shared, const Stages& stages) {
  State state;
  for_each_tile<kColumns<kEpilogue>>(p, shared, [&](const SwapAbTile& tile) {
    const int column = p.first_column + tile.column, other = column + (kEpilogue == PMO_GROUPED_GATED ? p.up_offset : 64);
    for (int k_offset = 0; k_offset < p.inner; k_offset += kTileK) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &shared.full[state.stage];
        mbarrier_arrive_expect_tx(full, 2 * kBoxBytes);
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          const int from = box == 0 ? column : other;
          tma_load_3d(stages.matrix(state.stage) + box * kBoxBytes, &p.matrix, full, kTransposed ? k_offset : from,
                      kTransposed ? from : k_offset, tile.expert);
        }
      }
      state.advance();
    }
  });
}

// Eight lanes copy 128 bytes of a row; the warp passes over the tile's rows four at a time.
template <int kTileColumns>
__device__ inline void copy_rows(const Params& p, Shared& shared, const Stages& stages) {
  const int lane = threadIdx.x % kWarpSize, chunk = lane % 8, first_row = lane / 8;
  State state;
  for_each_tile<kTileColumns>(p, shared, [&](const SwapAbTile& tile) {
    uint32_t source[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = first_row + 4 * i;
      source[i] = GatheredRows::kNone;
      if (row >= tile.rows) continue;
      source[i] = p.source.row_to_token != nullptr ? p.source.source_of(tile.row + row) : tile.row + row;
    }
    for (int k_offset = 0; k_offset < p.inner; k_offset += kTileK) {
      const bool is_inside = k_offset + chunk * 8 < p.inner;
      const char* const from = p.source.first_row(k_offset * 2 + chunk * 16);
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      const uint32_t target = stages.rows(state.stage) + first_row * 128;
#pragma unroll
      for (int i = 0; i < kRows / 4; i += 2) {
        if (4 * i >= tile.rows) break;
        p.source.copy<2>(&source[i], from, is_inside, [&](int each) {
          return target + (i + each) * 4 * 128 + (chunk ^ (first_row + 4 * each)) * 16;  // 128-byte swizzle
        });
      }
      cp_async_mbarrier_arrive_noinc(&shared.full[state.stage]);
      state.advance();
    }
  });
}

// d = W^T X^T of the tile's 128 columns and kN rows. Returns the last stage, which the caller releases once its MMAs are done.
template <int kN, bool kTransA, typename T>
__device__ inline int mainloop(float (&d)[kAccumulators], Shared& shared, const Stages& stages, State& state, int inner) {
  const bool arrives = elect_sync();
  register_fence(d);
  int last = 0;
#pragma unroll 1
  for (int k_offset = 0; k_offset < inner; k_offset += kTileK) {
    mbarrier_wait_parity(&shared.full[state.stage], state.phase);
    fence_proxy_async();
    wgmma_fence();
    const uint64_t a = smem_descriptor(stages.matrix(state.stage), kBoxBytes, 1024);
    const uint64_t b = smem_descriptor(stages.rows(state.stage), kBoxBytes, 1024);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      const uint64_t at_a = a + k * ((kTransA ? 2048 : 32) >> 4), at_b = b + k * (32 >> 4);
      wgmma_m64k16<kN, 0, kTransA, false, T>(d, at_a, at_b, k > 0 || k_offset > 0);
      wgmma_m64k16<kN, kAccumulators / 2, kTransA, false, T>(d, at_a + (kBoxBytes >> 4), at_b, k > 0 || k_offset > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (k_offset > 0 && arrives) mbarrier_arrive(&shared.empty[last]);
    last = state.stage;
    state.advance();
  }
  return last;
}

// Results of a subtile's 16 rows, in the words that stmatrix takes: SwiGLU of both halves of d, or the half of box `box`.
template <pmo_grouped_result kEpilogue, typename T>
__device__ inline void results_of(const float (&d)[kAccumulators], int subtile, int box, const float (&weight)[4],
                                  uint32_t (&word)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = subtile * 8 + 2 * i;
    if constexpr (kEpilogue == PMO_GROUPED_GATED) {
      const float2 gate = Pair<T>::unpack(Pair<T>::pack(d[at], d[at + 1]));
      const float2 up = Pair<T>::unpack(Pair<T>::pack(d[at + kAccumulators / 2], d[at + 1 + kAccumulators / 2]));
      word[i] = Pair<T>::pack(gate.x * sigmoid(gate.x) * up.x, gate.y * sigmoid(gate.y) * up.y);
    } else {
      const int here = at + box * kAccumulators / 2;
      word[i] = Pair<T>::pack(d[here] * weight[i / 2 * 2], d[here + 1] * weight[i / 2 * 2 + 1]);
    }
  }
}

template <pmo_grouped_result kEpilogue, bool kTransposed, typename T>
__device__ inline void consume_tiles(const Params& p, Shared& shared, const Stages& stages) {
  constexpr int kBoxes = kColumns<kEpilogue> / 64;  // of results
  const SubtileLane lane;
  const int quad = threadIdx.x % 4 * 2;
  State state;
  int which = 0;  // buffer of the next subtile
  for_each_tile<kColumns<kEpilogue>>(p, shared, [&](const SwapAbTile& tile) {
    const TileRowWeights weights(kEpilogue == PMO_GROUPED_PLAIN ? p.weights : nullptr, tile);
    float d[kAccumulators];
    int last = 0;
    switch ((tile.rows + kSubtileRows - 1) / kSubtileRows) {
      case 1:
        last = mainloop<16, !kTransposed, T>(d, shared, stages, state, p.inner);
        break;
      case 2:
        last = mainloop<32, !kTransposed, T>(d, shared, stages, state, p.inner);
        break;
      case 3:
        last = mainloop<48, !kTransposed, T>(d, shared, stages, state, p.inner);
        break;
      default:
        last = mainloop<64, !kTransposed, T>(d, shared, stages, state, p.inner);
    }
    wgmma_wait_group<0>();
    register_fence(d);
    if (elect_sync()) mbarrier_arrive(&shared.empty[last]);
#pragma unroll
    for (int subtile = 0; subtile < kRows / kSubtileRows; ++subtile) {
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
  });
}

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, bool kTransposed, typename T>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_few_rows(const __grid_constant__ Params p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t dynamic[];
  __shared__ Shared shared;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.matrix);
    for (uint64_t& each : shared.full) mbarrier_init(&each, 1 + kWarpSize);
    for (uint64_t& each : shared.empty) mbarrier_init(&each, kConsumerWarps);
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
  const int32_t tiles = expert_ranges(p, kRows, shared.of_warps, store);
  if (threadIdx.x == 0) shared.tiles[p.num_experts] = tiles;
  __syncthreads();
  const Stages stages = {(smem_address(dynamic) + 1023) / 1024 * 1024};
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (warp < kConsumerWarps) {
    consume_tiles<kEpilogue, kTransposed, T>(p, shared, stages);
  } else if (warp == kConsumerWarps) {
    load_matrix<kEpilogue, kTransposed>(p, shared, stages);
  } else {
    wait_for_previous_kernel();
    copy_rows<kColumns<kEpilogue>>(p, shared, stages);
  }
#endif
}

template <pmo_grouped_result kEpilogue, bool kTransposed, typename T>
int launch_few_rows(const pmo_grouped_product_params& p, const Params& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  int device = 0;
  DeviceLimits limits;
  if (const int status = hopper_limits("grouped_product", &device, &limits)) return status;
  auto* kernel = grouped_gemm_few_rows<kEpilogue, kTransposed, T>;
  if (const int status = limit.raise(kernel, device, kSharedBytes)) return status;
  const int64_t row_tiles = std::min(p.num_rows, p.num_rows / kRows + p.num_experts);
  const int64_t blocks = std::min<int64_t>(row_tiles * params.column_tiles, limits.multiprocessors);
  const Grid grid = {static_cast<unsigned>(blocks), kThreads, kSharedBytes, false, true};
  return launch("grouped_product", kernel, grid, stream, params);
}

}  // namespace

int few_rows_gemm(const pmo_grouped_product_params& p, cudaStream_t stream) {
  const bool is_gated = p.result == PMO_GROUPED_GATED;
  Params a = {};
  a.source = {p.x, p.gathers != 0 ? p.row_to_token : nullptr, static_cast<uint32_t>(p.x_row_stride * 2),
              static_cast<int>(p.num_sources)};
  a.sizes = p.sizes;
  a.offsets = p.offsets;
  a.sizes_kind = p.sizes_kind;
  a.offsets_kind = p.offsets_kind;
  a.weights = p.weights;
  a.out = p.out;
  a.num_rows = static_cast<int>(p.num_rows);
  a.num_experts = static_cast<int>(p.num_experts);
  a.inner = static_cast<int>(p.inner);
  a.first_column = static_cast<int>(p.first_column);
  a.width = static_cast<int>(p.width);
  a.up_offset = static_cast<int>(p.outer / 2);
  a.column_tiles = static_cast<int>(divide_up(p.width, int64_t{is_gated ? 64 : 128}));
  a.only_x_is_new = p.only_x_is_new != 0;
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileK, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  if (const int status = encode(matrix, p.dtype == PMO_BFLOAT16, &a.matrix)) return status;
  const auto run = [&](auto epilogue, auto is_transposed, auto element) {
    return launch_few_rows<epilogue(), is_transposed(), decltype(element)>(p, a, stream);
  };
  return is_gated ? dispatch_layout<PMO_GROUPED_GATED>(p, run) : dispatch_layout<PMO_GROUPED_PLAIN>(p, run);
}

}  // namespace cuda
}  // namespace pmo
