// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows and float8 operands, sm_90a: the GEMM of fp8.cu as Y_e^T = W_e X_e^T, with the same bits,
// where reading the matrices takes the time. Rows of X are bfloat16 and quantised inside the kernel, by groups of 128 columns.
//
//   matrix  codes [E, N, K] and scales float32 [E, ceil(N / 128), ceil(K / 128)]
//   plain   out [M, width] = weights[r] * Y
//   gated   out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles, prologue and overlap: few_rows.cuh. Experts with up to 8 rows on average have tiles of up to 16 rows and two CTAs per SM;
// others 64 rows and one CTA. Warp-specialised, a pipeline of kStages stages of 128 along K:
//   warps 0 to 3  consumers: two m64 MMAs with N = the tile's rows rounded up to 16; promotion; epilogue
//   other warps   one per stage: loads W by TMA in boxes of 64 columns, quantises rows of X and stores their codes and scales to
//     shared memory; gathers token rows if row_to_token is given. Eight lanes read the 128 columns of a row.
//
// Promotion: as in fp8.cu, the accumulators of each stage are multiplied by both scales and added to float32 accumulators.
//
// Overlap: all stages are loaded and quantised at the same time, across tiles.
//
// Work: 2 M K N FLOPs. Bytes: the codes of experts that have rows once from memory; X in bfloat16 once per 128 columns, from the L2.
#include "cuda/float8.cuh"
#include "cuda/gemm/few_rows.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kFp8TileK = 128, kConsumerWarps = kWarpgroupThreads / kWarpSize;

template <int kTileRows>
constexpr int kBlocksPerSm = kTileRows == kFewRows ? 1 : 2;
template <int kTileRows>
constexpr int kStages = kTileRows == kFewRows ? 8 : 5;
template <int kTileRows>
constexpr int kWarps = kConsumerWarps + kStages<kTileRows>;
// Limits registers to 128 where one CTA runs per SM, for a CTA of the next kernel on the same SM.
template <int kTileRows>
constexpr int kBoundThreads = kTileRows == kFewRows ? 512 : kWarps<kTileRows> * kWarpSize;

constexpr int64_t kMinPrefetchedInner = 4096;

template <int kTileRows>
using Stages = FewRowsStages<kStages<kTileRows>, 2 * kBoxBytes, kTileRows * kFp8TileK>;

#ifdef PMO_SM90A

template <int kTileRows>
struct Shared : FewRowsShared<kStages<kTileRows>, kWarps<kTileRows>> {
  float row_scales[kStages<kTileRows>][kTileRows];
};

constexpr int kLaneColumns = 16, kRowLanes = kFp8TileK / kLaneColumns, kPassRows = kWarpSize / kRowLanes;
constexpr int kFillRegisters = 104, kMmaRegisters = 168;
constexpr int kPasses = 4;  // of rows whose loads are in flight together: kSubtileRows rows

// 16 columns of each of up to 16 rows of a tile, as a lane of a producer warp holds them.
struct LoadedRows {
  uint4 words[kPasses][2];

  // source[i] is the lane's row in pass i, of passes with one of `rows` rows; `column` is the first of the K step.
  __device__ void load(const FewRowsParams& p, const uint32_t* source, int rows, int column) {
    const int lane_column = column + threadIdx.x % kRowLanes * kLaneColumns;
    const char* const from = p.source.first_row(lane_column * 2);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (kPassRows * i >= rows) break;
      words[i][0] = words[i][1] = make_uint4(0, 0, 0, 0);
      if (source[i] == GatheredRows::kNone || lane_column >= p.inner) continue;
      const auto* row = reinterpret_cast<const uint4*>(from + uint64_t{source[i]} * p.source.row_bytes);
      words[i][0] = row[0];
      words[i][1] = row[1];
    }
  }

  // Stores codes, with 128-byte swizzle, and scales to shared memory. Results of rows after `rows` are not stored.
  __device__ void quantize(const FewRowsParams& p, int rows, uint32_t codes, float* scales) const {
    const int chunk = threadIdx.x % kRowLanes, first_row = threadIdx.x % kWarpSize / kRowLanes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (kPassRows * i >= rows) break;
      float values[kLaneColumns];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 raw = words[i][half];
        const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 both = Pair<__nv_bfloat16>::unpack(pairs[j]);
          values[8 * half + 2 * j] = both.x;
          values[8 * half + 2 * j + 1] = both.y;
        }
      }
      const float scale = float8_group_scale<kRowLanes>(values, p.amax_min);
      uint32_t packed[kLaneColumns / 4];
      float8_codes(values, __frcp_rn(scale), packed);
      const int row = first_row + kPassRows * i;
      st_shared_v4(codes + row * kFp8TileK + (chunk ^ row % 8) * 16, packed[0], packed[1], packed[2], packed[3]);
      if (chunk == 0) scales[row] = scale;
    }
  }
};

// Producer warp of stage `stage`. Rows of its next K step are loaded before the stage is empty, but after the first loads of W.
template <pmo_grouped_result kEpilogue, int kTileRows>
__device__ inline void fill_stage(const FewRowsParams& p, Shared<kTileRows>& shared, const Stages<kTileRows>& stages, int stage) {
  const int first_row = threadIdx.x % kWarpSize / kRowLanes;
  uint64_t* const full = &shared.full[stage];
  int step = stage;  // the stage's next K step, counted from the tile's first one
  uint32_t phase = 0;
  bool is_first = true;
  for_each_tile<kTileRows>(p, shared, kFewRowsColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    uint32_t source[kTileRows / kPassRows];
    bool has_sources = false;
    LoadedRows rows;
    const auto load = [&](int k_step) {
      if (!has_sources) {
#pragma unroll
        for (int i = 0; i < kTileRows / kPassRows; ++i) source[i] = source_of(p, tile, first_row + kPassRows * i);
        has_sources = true;
      }
      rows.load(p, source, tile.rows, k_step * kFp8TileK);
    };
    for (; step < p.k_blocks; step += kStages<kTileRows>) {
      if (!is_first) load(step);
      mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);
      phase ^= 1;
      if (elect_sync()) {
        mbarrier_arrive_expect_tx(full, 2 * kBoxBytes);
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          tma_load_3d(stages.matrix(stage) + box * kBoxBytes, &p.matrix, full, step * kFp8TileK,
                      box_column<kEpilogue>(p, tile, box), tile.expert);
        }
      }
      if (is_first) {
        wait_for_previous_kernel();
        load(step);
        is_first = false;
      }
#pragma unroll
      for (int first = 0; first < kTileRows; first += kSubtileRows) {
        if (first >= tile.rows) break;
        if (first > 0) rows.load(p, source + first / kPassRows, tile.rows - first, step * kFp8TileK);
        rows.quantize(p, tile.rows - first, stages.rows(stage) + first * kFp8TileK, shared.row_scales[stage] + first);
      }
      fence_proxy_async();
      __syncwarp();
      if (elect_sync()) mbarrier_arrive(full);
    }
    step -= p.k_blocks;
  });
  if (is_first) wait_for_previous_kernel();
}

template <pmo_grouped_result kEpilogue, int kTileRows>
struct Mainloop {
  static constexpr int kHalf = kTileRows / 2;
  const FewRowsParams& p;
  Shared<kTileRows>& shared;
  const Stages<kTileRows>& stages;
  PipelineState<kStages<kTileRows>> state = {};

  template <int kN>
  __device__ void run(float (&d)[kTileRows], const SwapAbTile& tile) {
    const float* of_box[2];  // scales of the matrix in both boxes
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const int block = min(box_column<kEpilogue>(p, tile, box) / kFp8TileK, p.column_blocks - 1);  // columns beyond the last
      of_box[box] = p.matrix_scales + (int64_t{tile.expert} * p.column_blocks + block) * p.k_blocks;
    }
    const int quad = threadIdx.x % 4 * 2;
    float partial[kN], next[2] = {__ldg(of_box[0]), __ldg(of_box[1])};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = d[kHalf + i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < p.k_blocks; ++step) {
      const float scale[2] = {next[0], next[1]};
      const int following = min(step + 1, p.k_blocks - 1);
#pragma unroll
      for (int box = 0; box < 2; ++box) next[box] = __ldg(of_box[box] + following);
      mbarrier_wait_parity(&shared.full[state.stage], state.phase);
      wgmma_fence();
      multiply<kN>(partial);
      wgmma_commit_group();
      float of_row[kN / 4];  // scales of the lane's rows: 8 i + quad and the next one
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const float2 pair = ld_shared_f32x2(smem_address(&shared.row_scales[state.stage][8 * i + quad]));
        of_row[2 * i] = pair.x;
        of_row[2 * i + 1] = pair.y;
      }
      wgmma_wait_group<0>();
      register_fence(partial);
      register_fence(of_row);  // read before the stage is released
      if (elect_sync()) mbarrier_arrive(&shared.empty[state.stage]);
      state.advance();
#pragma unroll
      for (int box = 0; box < 2; ++box) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          const int at = box * kHalf + i;
          d[at] = fmaf(partial[box * kN / 2 + i], __fmul_rn(of_row[i / 4 * 2 + i % 2], scale[box]), d[at]);
        }
      }
    }
  }

 private:
  // All MMAs of a stage.
  template <int kN>
  __device__ void multiply(float (&partial)[kN]) {
    constexpr int kNext = 32 >> 4;  // 32 bytes along K
    const uint64_t a = smem_descriptor(stages.matrix(state.stage), 0, 1024);
    const uint64_t other = a + (kBoxBytes >> 4), b = smem_descriptor(stages.rows(state.stage), 0, 1024);
    wgmma_m64k32_e4m3<kN, 0, 0>(partial, a, b);
    wgmma_m64k32_e4m3<kN, kN / 2, 0>(partial, other, b);
#pragma unroll
    for (int k = 1; k < kFp8TileK / 32; ++k) {
      wgmma_m64k32_e4m3<kN, 0, 1>(partial, a + k * kNext, b + k * kNext);
      wgmma_m64k32_e4m3<kN, kN / 2, 1>(partial, other + k * kNext, b + k * kNext);
    }
  }
};

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, int kTileRows>
__global__ void __launch_bounds__(kBoundThreads<kTileRows>, kBlocksPerSm<kTileRows>)
    grouped_gemm_few_rows_fp8(const __grid_constant__ FewRowsParams p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t dynamic[];
  __shared__ Shared<kTileRows> shared;
  start_few_rows(p, shared, 2, kConsumerWarps, kTileRows);
  const Stages<kTileRows> stages(dynamic);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (warp < kConsumerWarps) {
    if constexpr (kTileRows == kFewRows) setmaxnreg_inc<kMmaRegisters>();
    consume_tiles<kEpilogue, kTileRows, __nv_bfloat16>(p, shared, stages, Mainloop<kEpilogue, kTileRows>{p, shared, stages});
  } else {
    if constexpr (kTileRows == kFewRows) setmaxnreg_dec<kFillRegisters>();
    fill_stage<kEpilogue, kTileRows>(p, shared, stages, warp - kConsumerWarps);
  }
#endif
}

template <pmo_grouped_result kEpilogue, int kTileRows>
int launch_shape(const pmo_grouped_product_params& p, const FewRowsParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  return launch_few_rows(p, params, grouped_gemm_few_rows_fp8<kEpilogue, kTileRows>, kWarps<kTileRows> * kWarpSize,
                         Stages<kTileRows>::kSharedBytes, limit, stream, kBlocksPerSm<kTileRows>, kTileRows);
}

template <pmo_grouped_result kEpilogue>
int launch_few_rows_fp8(const pmo_grouped_product_params& p, const FewRowsParams& params, cudaStream_t stream) {
  return p.num_rows <= 8 * p.num_experts ? launch_shape<kEpilogue, 16>(p, params, stream)
                                         : launch_shape<kEpilogue, kFewRows>(p, params, stream);
}

}  // namespace

int few_rows_fp8(const pmo_grouped_product_params& p, FewRowsParams params, cudaStream_t stream) {
  const Tensor matrix = {p.matrix, 3, {p.inner, p.outer, p.num_experts}, {p.inner, p.inner * p.outer}, {kFp8TileK, 64, 1}};
  // A promotion to 256 bytes also prefetches the lines of the next K step, which helps where they lie far from other rows of a box.
  const CUtensorMapL2promotion promotion =
      p.inner >= kMinPrefetchedInner ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  if (const int status = encode(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &params.matrix, promotion)) return status;
  return p.result == PMO_GROUPED_GATED ? launch_few_rows_fp8<PMO_GROUPED_GATED>(p, params, stream)
                                       : launch_few_rows_fp8<PMO_GROUPED_PLAIN>(p, params, stream);
}

}  // namespace cuda
}  // namespace pmo
