// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows, sm_90a: the GEMM of swap_ab.cu, Y_e^T = W_e^T X_e^T, in the same order of K and so with
// the same bits, where reading the matrices takes the time.
//
//   plain  out [M, width] = weights[r] * Y
//   gated  out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles, prologue and overlap: few_rows.cuh. Warp-specialised, a pipeline of kStages stages of 64 along K:
//   warps 0 to 3  consumers: two m64 MMAs with N = the tile's rows rounded up to 16; epilogue
//   warp 4        loads W by TMA in boxes of 64 columns
//   warp 5        copies rows of X by cp.async, 16 bytes a lane; gathers token rows if row_to_token is given
//
// Loads run kStages K steps ahead and across tiles.
//
// Work: 2 M K N FLOPs. Bytes: the matrices of experts that have rows once from memory; X once per 128 columns, from the L2.
#include "cuda/gemm/few_rows.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kStages = 8;
constexpr int kConsumerWarps = kWarpgroupThreads / kWarpSize, kWarps = kConsumerWarps + 2, kThreads = kWarps * kWarpSize;

using Stages = FewRowsStages<kStages, 2 * kBoxBytes, kFewRows * kTileK * 2>;

#ifdef PMO_SM90A

using Shared = FewRowsShared<kStages, kWarps>;
using State = PipelineState<kStages>;

template <pmo_grouped_result kEpilogue, bool kTransposed>
__device__ inline void load_matrix(const FewRowsParams& p, Shared& shared, const Stages& stages) {
  State state;
  for_each_tile(p, shared, kFewRowsColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    for (int k_offset = 0; k_offset < p.inner; k_offset += kTileK) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &shared.full[state.stage];
        mbarrier_arrive_expect_tx(full, 2 * kBoxBytes);
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          const int column = box_column<kEpilogue>(p, tile, box);
          tma_load_3d(stages.matrix(state.stage) + box * kBoxBytes, &p.matrix, full, kTransposed ? k_offset : column,
                      kTransposed ? column : k_offset, tile.expert);
        }
      }
      state.advance();
    }
  });
}

template <bool kTransA, typename T>
struct Mainloop {
  Shared& shared;
  const Stages& stages;
  int inner;
  State state = {};

  template <int kN>
  __device__ void run(float (&d)[kFewRows], const SwapAbTile&) {
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
        wgmma_m64k16<kN, kFewRows / 2, kTransA, false, T>(d, at_a + (kBoxBytes >> 4), at_b, k > 0 || k_offset > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (k_offset > 0 && arrives) mbarrier_arrive(&shared.empty[last]);
      last = state.stage;
      state.advance();
    }
    wgmma_wait_group<0>();
    register_fence(d);
    if (elect_sync()) mbarrier_arrive(&shared.empty[last]);
  }
};

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, bool kTransposed, typename T>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_few_rows(const __grid_constant__ FewRowsParams p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t dynamic[];
  __shared__ Shared shared;
  start_few_rows(p, shared, 1 + kWarpSize, kConsumerWarps);
  const Stages stages(dynamic);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (warp < kConsumerWarps) {
    consume_tiles<kEpilogue, kFewRows, T>(p, shared, stages, Mainloop<!kTransposed, T>{shared, stages, p.inner});
  } else if (warp == kConsumerWarps) {
    load_matrix<kEpilogue, kTransposed>(p, shared, stages);
  } else {
    wait_for_previous_kernel();
    copy_rows<1, kStages>(p, shared, stages, kFewRowsColumns<kEpilogue>);
  }
#endif
}

template <pmo_grouped_result kEpilogue, bool kTransposed, typename T>
int launch_few_rows_of(const pmo_grouped_product_params& p, const FewRowsParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  return launch_few_rows(p, params, grouped_gemm_few_rows<kEpilogue, kTransposed, T>, kThreads, Stages::kSharedBytes, limit,
                         stream);
}

// The kernel for matrices of the dtype of x.
int few_rows_plain(const pmo_grouped_product_params& p, FewRowsParams a, cudaStream_t stream) {
  Tensor matrix = {p.matrix, 3, {p.outer, p.inner, p.num_experts}, {p.outer, p.outer * p.inner}, {64, kTileK, 1}};
  if (p.transpose) std::swap(matrix.sizes[0], matrix.sizes[1]);
  matrix.strides[0] = matrix.sizes[0];
  if (const int status = encode(matrix, p.dtype == PMO_BFLOAT16, &a.matrix)) return status;
  const auto run = [&](auto epilogue, auto is_transposed, auto element) {
    return launch_few_rows_of<epilogue(), is_transposed(), decltype(element)>(p, a, stream);
  };
  return p.result == PMO_GROUPED_GATED ? dispatch_layout<PMO_GROUPED_GATED>(p, run) : dispatch_layout<PMO_GROUPED_PLAIN>(p, run);
}

}  // namespace

int few_rows_gemm(const pmo_grouped_product_params& p, cudaStream_t stream) {
  FewRowsParams a = {};
  a.source = {p.x, p.gathers != 0 ? p.row_to_token : nullptr, static_cast<uint32_t>(p.x_row_stride * 2),
              static_cast<int>(p.num_sources)};
  a.sizes = p.sizes;
  a.offsets = p.offsets;
  a.sizes_kind = p.sizes_kind;
  a.offsets_kind = p.offsets_kind;
  a.weights = {p.weights, p.slot_to_row, p.row_to_token, static_cast<int>(p.num_tokens), static_cast<int>(p.topk)};
  a.matrix_scales = p.matrix_scales;
  a.out = p.out;
  a.num_rows = static_cast<int>(p.num_rows);
  a.num_experts = static_cast<int>(p.num_experts);
  a.inner = static_cast<int>(p.inner);
  a.first_column = static_cast<int>(p.first_column);
  a.width = static_cast<int>(p.width);
  a.up_offset = static_cast<int>(p.outer / 2);
  a.column_tiles = static_cast<int>(divide_up(p.width, int64_t{p.result == PMO_GROUPED_GATED ? 64 : 128}));
  a.outer = static_cast<int>(p.outer);
  a.k_blocks = static_cast<int>(divide_up(p.inner, int64_t{PMO_QUANTIZE_GROUP}));
  a.column_blocks = static_cast<int>(divide_up(p.outer, int64_t{PMO_QUANTIZE_GROUP}));
  a.amax_min = p.amax_min;
  a.only_x_is_new = p.only_x_is_new != 0;
  if (p.matrix_scales == nullptr) return few_rows_plain(p, a, stream);
  return p.matrix_format == PMO_MATRIX_FLOAT8_128X128 ? few_rows_fp8(p, a, stream) : few_rows_int(p, a, stream);
}

}  // namespace cuda
}  // namespace pmo
