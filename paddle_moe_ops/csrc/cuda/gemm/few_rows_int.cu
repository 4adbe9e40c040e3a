// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows and matrices of integer codes, sm_90a: the GEMM of few_rows.cu on the values of the matrix,
// code * scale rounded to the dtype of x, with the same bits. Values exist in registers only.
//
//   matrix  int8 codes [E, N, K], or int4 codes uint8 [E, N, K / 2] (pmo/matrices.h); scales float32 [E, N], or
//           [E, N, ceil(K / 128)]
//   plain   out [M, width] = weights[r] * Y
//   gated   out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles, prologue and overlap: few_rows.cuh; three shapes of CTAs by the mean of rows of an expert (Shape). Up to 8: 16 rows and 128
// columns of W, with two (int8) or four CTAs per SM: one converts codes while another waits. Then 64 or 96 rows and 256 columns, so
// that fewer CTAs read the same rows and convert the same codes. Warp-specialised, a pipeline of stages of 128 along K:
//   4 to 16 warps  consumers: codes from shared memory to values in the registers of operand A, MMAs with the tile's rows rounded up to
//     8 or a multiple of 16, epilogue. A set of 16 columns of W is 8 gates and their ups with SwiGLU, so that a lane has both. A warp
//     has one set, or two of int4 codes in tiles of 16 rows: they share loads of X.
//   one warp       loads codes by TMA in boxes of 64 columns
//   one warp       copies rows of X by cp.async, 16 bytes a lane; gathers token rows if row_to_token is given
//
// MMAs: few rows take mma.sync, so that a warp waits for no other; more rows wgmma, which reads X once for 64 columns.
//
// Order of K: int4 codes are stored in the order in which lanes take them. int8 codes are in order, and the sum of an MMA does not
// depend on the order of its 16 elements: with mma.sync a lane takes four neighbouring codes and the same four elements of X.
//
// Work: 2 M K N FLOPs, and 5 (int8) or 4.5 (int4) instructions for four values, 2 more if their scale is large, and about 17 if T
// can't represent it (Scale). Bytes: the codes of experts that have rows once from memory; X once per column tile, from the L2.
#include "common/matrix_layout.h"
#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/int_codes.cuh"
#include "cuda/ptx/mma.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kIntTileK = 128;

template <int kBits>
constexpr int kRowBytes = kIntTileK * kBits / 8;  // of a column of the matrix in a stage
template <int kBits>
constexpr int kBoxOfCodes = 64 * kRowBytes<kBits>;
template <int kBits>
constexpr int kMostOfWarps = kBits == 8 ? 32 : 16;  // rows of a tile that uses mma.sync

// CTA with tiles of up to kTileRows rows, 16, 64 or 96, and kBoxPairs times two boxes of codes of kBits bits.
template <int kBits, int kTileRows>
struct Shape {
  static constexpr int kBoxPairs = kTileRows == 16 ? 1 : 2;
  static constexpr int kBlocksPerSm = kTileRows == 16 ? (kBits == 8 ? 2 : 4) : 1;  // by shared memory
  static constexpr int kStages = kTileRows == 16 ? (kBits == 8 ? 4 : 3) : (kTileRows == 64 ? 4 : 3) + (kBits == 8 ? 0 : 1);
  static constexpr int kSets = kBits == 4 && kTileRows == 16 ? 2 : 1;           // of 16 columns, of a warp
  static constexpr int kPairWarps = 2 * kWarpgroupThreads / kWarpSize / kSets;  // consumers of two boxes of 64 columns
  static constexpr int kConsumerWarps = kBoxPairs * kPairWarps, kWarps = kConsumerWarps + 2, kThreads = kWarps * kWarpSize;
  static constexpr int kPairBytes = 2 * kBoxOfCodes<kBits>;
  template <pmo_grouped_result kEpilogue>
  static constexpr int kColumns = kBoxPairs * kFewRowsColumns<kEpilogue>;
  using Stages = FewRowsStages<kStages, kBoxPairs * kPairBytes, kTileRows * kIntTileK * 2, kBoxPairs>;
#ifdef PMO_SM90A
  using Shared = FewRowsShared<kStages, kWarps>;
  using State = PipelineState<kStages>;
#endif
};

#ifdef PMO_SM90A

template <pmo_grouped_result kEpilogue, int kBits, int kTileRows>
__device__ inline void load_codes(const FewRowsParams& p, typename Shape<kBits, kTileRows>::Shared& shared,
                                  const typename Shape<kBits, kTileRows>::Stages& stages) {
  using Of = Shape<kBits, kTileRows>;
  typename Of::State state;
  for_each_tile<kTileRows>(p, shared, Of::template kColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    for (int step = 0; step < p.k_blocks; ++step) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &shared.full[state.stage];
        mbarrier_arrive_expect_tx(full, Of::kBoxPairs * Of::kPairBytes);
#pragma unroll
        for (int box = 0; box < 2 * Of::kBoxPairs; ++box) {
          const int column = box_column<kEpilogue>(p, tile, box % 2) + box / 2 * kFewRowsColumns<kEpilogue>;
          tma_load_3d(stages.matrix(state.stage) + box * kBoxOfCodes<kBits>, &p.matrix, full, step * kRowBytes<kBits>, column,
                      tile.expert);
        }
      }
      state.advance();
    }
  });
}

// Mainloop of a consumer warp.
template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
struct Mainloop {
  static constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;
  static constexpr int kToHalf = kGated ? kBoxOfCodes<kBits> : 8 * kRowBytes<kBits>;
  using Of = Shape<kBits, kTileRows>;
  using ScaleOf = Scale<kBits, T>;
  static constexpr int kSets = Of::kSets;
  using OfSet = float[kTileRows / 2];
  using Accumulators = OfSet[kSets];
  using Scales = ScaleOf[kSets][2];

  const FewRowsParams& p;
  typename Of::Shared& shared;
  const typename Of::Stages& stages;
  const int pair, warp;  // of the CTA, and of the pair
  typename Of::State state = {};

  // Box of a set's columns, and column `row` of the first eight in it; the others, half 1, are kToHalf bytes further.
  __device__ int box(int set) const { return kGated ? 0 : (warp + 4 * set) / 4; }
  __device__ int column(int set, int row) const { return (kGated ? 8 * (warp + 4 * set) : warp % 4 * 16) + row; }

  // d = W^T X^T of the warp's columns and the tile's rows, rounded up to kRows.
  template <int kRows>
  __device__ void run(Accumulators& d, const SwapAbTile& tile) {
    const float* scales[kSets][2];
    Scales scale;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int in_box = column(set, threadIdx.x % kWarpSize / 4) + (kGated ? 0 : 8 * half);
        const int at = min(box_column<kEpilogue>(p, tile, kGated ? half : box(set)) + in_box, p.outer - 1);
        scales[set][half] = p.matrix_scales + (int64_t{tile.expert} * p.outer + at) * (kGrouped ? p.k_blocks : 1);
        scale[set][half] = ScaleOf(__ldg(scales[set][half]));
      }
#pragma unroll
      for (float& each : d[set]) each = 0.0f;
    }
    Arithmetic arithmetic = arithmetic_of(scale);
#pragma unroll 1
    for (int step = 0; step < p.k_blocks; ++step) {
      float next[kSets][2];
      if constexpr (kGrouped) {
        const int following = min(step + 1, p.k_blocks - 1);
#pragma unroll
        for (int i = 0; i < 2 * kSets; ++i) next[i / 2][i % 2] = __ldg(scales[i / 2][i % 2] + following);
      }
      mbarrier_wait_parity(&shared.full[state.stage], state.phase);
      if constexpr (kRows > kMostOfWarps<kBits>) {
        multiply_by_warpgroup<kRows>(d[0], scale[0], arithmetic);
      } else if (arithmetic == kPlain) {
        multiply_by_warp<kRows, kPlain>(d, scale);
      } else if (arithmetic == kReduced) {
        multiply_by_warp<kRows, kReduced>(d, scale);
      } else {
        multiply_by_warp<kRows, kFloat32>(d, scale);
      }
      __syncwarp();
      if (elect_sync()) mbarrier_arrive(&shared.empty[state.stage]);
      state.advance();
      if constexpr (kGrouped) {
#pragma unroll
        for (int i = 0; i < 2 * kSets; ++i) scale[i / 2][i % 2] = ScaleOf(next[i / 2][i % 2]);
        arithmetic = arithmetic_of(scale);
      }
    }
  }

 private:
  static constexpr int kParts = kIntTileK / 32;  // of a stage
  static constexpr int kPartsOfLoad = 8 / kBits;

  // Codes of one ldmatrix: words of both halves of 16 of K, and of the next 16 (int8), or of 32 of K, and of the next 32 (int4).
  using Codes = uint32_t[4];

  // Operand A of a part: in 16 of K, then in the others.
  struct Values {
    uint32_t a[2][4];
  };

  // Arithmetic that suits all scales of the warp.
  __device__ static Arithmetic arithmetic_of(const Scales& scale) {
    bool is_plain = true, is_packed = true;
#pragma unroll
    for (int i = 0; i < 2 * kSets; ++i) {
      is_plain &= scale[i / 2][i % 2].arithmetic == kPlain;
      is_packed &= scale[i / 2][i % 2].arithmetic != kFloat32;
    }
    if (__all_sync(kAllLanes, is_plain)) return kPlain;
    return __all_sync(kAllLanes, is_packed) ? kReduced : kFloat32;
  }

  __device__ uint32_t matrix(int set) const {
    return stages.matrix(state.stage) + pair * Of::kPairBytes + box(set) * kBoxOfCodes<kBits>;
  }

  // All MMAs of a stage by mma.sync.
  template <int kRows, Arithmetic kArithmetic>
  __device__ void multiply_by_warp(Accumulators& d, const Scales& scale) const {
    Codes codes[kSets];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Values values[kSets];
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        if (part % kPartsOfLoad == 0) load_codes(set, part, codes[set]);
        convert<kArithmetic>(values[set], codes[set], part, scale[set]);
      }
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        uint32_t b[4];
        load_rows(part, n, b);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
#pragma unroll
          for (int set = 0; set < kSets; ++set) mma_m16n8k16<T>(d[set], 4 * n, values[set].a[i / 2], b[i], b[i + 1]);
        }
      }
    }
  }

  // All MMAs of a stage by wgmma. Warps of a warpgroup may differ in their arithmetic.
  template <int kRows>
  __device__ void multiply_by_warpgroup(OfSet& d, const ScaleOf (&scale)[2], Arithmetic arithmetic) const {
    fence_proxy_async();
    Values values[2];
    Codes codes[2];
    load_in_order(0, codes[0]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Values& made = values[part % 2];
      const Codes& from = codes[part / kPartsOfLoad % 2];
      const int next = part / kPartsOfLoad + 1;
      if (part % kPartsOfLoad == 0 && next * kPartsOfLoad < kParts) load_in_order(next * kPartsOfLoad, codes[next % 2]);
      if (arithmetic == kPlain) {
        convert<kPlain>(made, from, part, scale);
      } else if (arithmetic == kReduced) {
        convert<kReduced>(made, from, part, scale);
      } else {
        convert<kFloat32>(made, from, part, scale);
      }
      // Boxes of 64 columns of X.
      const uint64_t b = smem_descriptor(stages.rows(state.stage) + part / 2 * (kTileRows * 128), 0, 1024) + part % 2 * (64 >> 4);
      wgmma_fence();
      wgmma_m64k16_values<kRows, T>(d, made.a[0], b);
      wgmma_m64k16_values<kRows, T>(d, made.a[1], b + (32 >> 4));
      wgmma_commit_group();
      if (part > 0) wgmma_wait_group<1>();  // the MMAs that read the other values
    }
    wgmma_wait_group<0>();
    register_fence(d);
  }

  // Rows 8n to 8n + 7 of X of a part, as operand B of its two MMAs.
  __device__ void load_rows(int part, int n, uint32_t (&b)[4]) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t first = stages.rows(state.stage);
    const int offset = part / 2 * (kTileRows * 128) + n * 8 * 128;  // a constant of loads
    // int8: four neighbours; chunks are swizzled in pairs.
    if constexpr (kBits == 8) {
      const int row = lane / 4, quad = lane % 4;
      const uint32_t at = first + row * 128 + (quad / 2 ^ row % 4 * 2) * 16 + quad % 2 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 each = ld_shared_v2((at ^ (part % 2 * 64 + i * 32)) + offset);
        b[2 * i] = each.x;
        b[2 * i + 1] = each.y;
      }
    } else {
      const int chunk = lane / 8, row = lane % 8;
      ldmatrix_x4(((first + row * 128 + (chunk ^ row) * 16) ^ part % 2 * 64) + offset, b);
    }
  }

  // int8: codes 4 (l % 4) to 4 (l % 4) + 3 of 16. int4: the lane's eight codes of 32.
  __device__ void load_codes(int set, int part, Codes& codes) const {
    const int lane = threadIdx.x % kWarpSize, row = lane % 8, half = lane / 8 % 2, second = lane / 16;
    const uint32_t first = matrix(set) + half * kToHalf + column(set, row) * kRowBytes<kBits>;
    if constexpr (kBits == 8) {  // 128-byte swizzle
      ldmatrix_x4((first + (second ^ row) * 16) ^ part * 32, codes);
    } else {  // 64-byte swizzle
      ldmatrix_x4((first + (second ^ row / 2) * 16) ^ part * 16, codes);
    }
  }

  // int8: codes 2 (l % 4) and the next one of 16, and those 8 further. int4: the lane's eight codes of 32.
  __device__ void load_in_order(int part, Codes& codes) const {
    if constexpr (kBits == 4) {
      load_codes(0, part, codes);
    } else {
      const int lane = threadIdx.x % kWarpSize, row = lane / 4, quad = lane % 4;
      const uint32_t first = matrix(0) + column(0, row) * kRowBytes<kBits> + row * 16 + 2 * quad;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = (first ^ (part * 32 + i * 16)) + half * kToHalf;
          codes[2 * i + half] = __byte_perm(ld_shared_u16(at), ld_shared_u16(at + 8), 0x5410);
        }
      }
    }
  }

  template <Arithmetic kArithmetic>
  __device__ static void convert(Values& values, const Codes& codes, int part, const ScaleOf (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kBits == 8) {
          const uint32_t flipped = codes[2 * i + half] ^ 0x80808080;
          values.a[i][half] = scale[half].template times<kArithmetic, false>(__byte_perm(flipped, 0, 0x4140));
          values.a[i][2 + half] = scale[half].template times<kArithmetic, false>(__byte_perm(flipped, 0, 0x4342));
        } else {
          const uint32_t word = codes[part % 2 * 2 + half] >> 8 * i;
          values.a[i][half] = scale[half].template times<kArithmetic, false>(and_xor(word, 0x000F000F, 0x00080008));
          values.a[i][2 + half] = scale[half].template times<kArithmetic, true>(and_xor(word, 0x00F000F0, 0x00800080));
        }
      }
    }
  }
};

// Epilogue of a pair's warps: each writes its columns to buffers of the pair. `warpgroup` is 0 or 1.
template <pmo_grouped_result kEpilogue, int kTileRows, int kSets, typename T, typename Stages>
__device__ inline void store_int_tile(const FewRowsParams& p, const float (&d)[kSets][kTileRows / 2], const SwapAbTile& tile,
                                      const TileRowWeights& weights, const Stages& stages, int pair, int warpgroup, int& which) {
  constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;
  constexpr int kPairThreads = 2 * kWarpgroupThreads / kSets;
  const SubtileLane lane;
  const int quad = threadIdx.x % 4 * 2, warp = threadIdx.x % kWarpgroupThreads / kWarpSize, in_warp = threadIdx.x % kWarpSize;
#pragma unroll
  for (int subtile = 0; subtile < kTileRows / kSubtileRows; ++subtile) {
    if (subtile * kSubtileRows >= tile.rows) break;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int half = warpgroup + set;  // of the pair's columns
      const uint32_t buffer = stages.buffer(which, 2 * pair + (kGated ? 0 : half));
      if constexpr (kGated) {
        uint32_t word[2];  // eight columns of rows 0 to 7, and of rows 8 to 15
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = subtile * 8 + 4 * i;
          const float2 gate = Pair<T>::unpack(Pair<T>::pack(d[set][at], d[set][at + 1])),
                       up = Pair<T>::unpack(Pair<T>::pack(d[set][at + 2], d[set][at + 3]));
          word[i] = Pair<T>::pack(gate.x * sigmoid(gate.x) * up.x, gate.y * sigmoid(gate.y) * up.y);
        }
        const int chunk = 4 * half + warp, target_row = in_warp % 16;
        stmatrix_x2_trans(buffer + target_row * 128 + (chunk ^ target_row % 8) * 16, word[0], word[1]);
      } else {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = subtile * 8 + 2 * i;
          const float first = weights.of(subtile, i / 2 * 8 + quad), second = weights.of(subtile, i / 2 * 8 + quad + 1);
          word[i] = Pair<T>::pack(d[set][at] * first, d[set][at + 1] * second);
        }
        stmatrix_x4_trans(buffer + lane.to_write, word);
      }
    }
    if constexpr (kGated) {
      bar_sync(1 + pair, kPairThreads);
    } else {
      bar_sync(1 + 2 * pair + warpgroup, kWarpgroupThreads);
    }
    const int row = subtile * kSubtileRows + lane.row;
#pragma unroll
    for (int set = 0; set < (kGated ? 1 : kSets); ++set) {
      const int half = warpgroup + set, column = tile.column + (kGated ? 0 : 64 * half) + lane.column;
      const bool stores = !kGated || kSets == 2 || subtile % 2 == warpgroup;
      if (stores && row < tile.rows && column < p.width) {
        store_from_subtile<T>(p.out, p.width, tile.row + row, column,
                              stages.buffer(which, 2 * pair + (kGated ? 0 : half)) + lane.to_read);
      }
    }
    which ^= 1;  // all warps have read this buffer when they meet at the barrier of the next one
  }
}

template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
__device__ inline void consume_codes(const FewRowsParams& p, typename Shape<kBits, kTileRows>::Shared& shared,
                                     const typename Shape<kBits, kTileRows>::Stages& stages, int warp) {
  using Of = Shape<kBits, kTileRows>;
  const int pair = warp / Of::kPairWarps, in_pair = warp % Of::kPairWarps;
  Mainloop<kEpilogue, kBits, kTileRows, kGrouped, T> mainloop = {p, shared, stages, pair, in_pair};
  int which = 0;
  for_each_tile<kTileRows>(p, shared, Shape<kBits, kTileRows>::template kColumns<kEpilogue>, [&](SwapAbTile tile) {
    tile.column += pair * kFewRowsColumns<kEpilogue>;
    const TileRowWeights weights = few_row_weights<kEpilogue>(p, tile);
    float d[Of::kSets][kTileRows / 2];
    run_rounded<kTileRows, 8>(mainloop, d, tile);
    store_int_tile<kEpilogue, kTileRows, Of::kSets, T>(p, d, tile, weights, stages, pair, in_pair / 4, which);
  });
}

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
__global__ void __launch_bounds__(Shape<kBits, kTileRows>::kThreads, Shape<kBits, kTileRows>::kBlocksPerSm)
    grouped_gemm_few_rows_int(const __grid_constant__ FewRowsParams p) {
#ifdef PMO_SM90A
  using Of = Shape<kBits, kTileRows>;
  extern __shared__ uint8_t dynamic[];
  __shared__ typename Of::Shared shared;
  start_few_rows(p, shared, 1 + kWarpSize, Of::kConsumerWarps, kTileRows);
  const typename Of::Stages stages(dynamic);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (warp < Of::kConsumerWarps) {
    consume_codes<kEpilogue, kBits, kTileRows, kGrouped, T>(p, shared, stages, warp);
  } else if (warp == Of::kConsumerWarps) {
    load_codes<kEpilogue, kBits, kTileRows>(p, shared, stages);
  } else {
    wait_for_previous_kernel();
    copy_rows<kIntTileK / kTileK, Of::kStages, kTileRows>(p, shared, stages, Of::template kColumns<kEpilogue>,
                                                          kBits == 8 ? kMostOfWarps<kBits> : 0);
  }
#endif
}

template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
int launch_shape(const pmo_grouped_product_params& p, FewRowsParams params, cudaStream_t stream) {
  using Of = Shape<kBits, kTileRows>;
  static SharedMemoryLimit limit;
  params.column_tiles = static_cast<int>(divide_up(p.width, int64_t{Of::template kColumns<kEpilogue>}));
  return launch_few_rows(p, params, grouped_gemm_few_rows_int<kEpilogue, kBits, kTileRows, kGrouped, T>, Of::kThreads,
                         Of::Stages::kSharedBytes, limit, stream, Of::kBlocksPerSm, kTileRows);
}

template <pmo_grouped_result kEpilogue, int kBits, bool kGrouped, typename T>
int launch_few_rows_int(const pmo_grouped_product_params& p, const FewRowsParams& params, cudaStream_t stream) {
  const auto at_most = [&](int64_t mean_rows) { return p.num_rows <= mean_rows * p.num_experts; };
  if (at_most(8)) return launch_shape<kEpilogue, kBits, 16, kGrouped, T>(p, params, stream);
  return at_most(56) ? launch_shape<kEpilogue, kBits, 64, kGrouped, T>(p, params, stream)
                     : launch_shape<kEpilogue, kBits, 96, kGrouped, T>(p, params, stream);
}

}  // namespace

int few_rows_int(const pmo_grouped_product_params& p, FewRowsParams params, cudaStream_t stream) {
  const int64_t row_bytes = is_int4(p.matrix_format) ? p.inner / 2 : p.inner;
  const Tensor matrix = {p.matrix,
                         3,
                         {row_bytes, p.outer, p.num_experts},
                         {row_bytes, row_bytes * p.outer},
                         {is_int4(p.matrix_format) ? kRowBytes<4> : kRowBytes<8>, 64, 1}};
  const CUtensorMapSwizzle swizzle = is_int4(p.matrix_format) ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  if (const int status =
          encode(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, &params.matrix, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, swizzle)) {
    return status;
  }
  const auto run = [&](auto epilogue, auto element) {
    using T = decltype(element);
    if (p.matrix_format == PMO_MATRIX_INT8) return launch_few_rows_int<epilogue(), 8, false, T>(p, params, stream);
    return p.matrix_format == PMO_MATRIX_INT4 ? launch_few_rows_int<epilogue(), 4, false, T>(p, params, stream)
                                              : launch_few_rows_int<epilogue(), 4, true, T>(p, params, stream);
  };
  const auto of_dtype = [&](auto epilogue) {
    return p.dtype == PMO_BFLOAT16 ? run(epilogue, __nv_bfloat16()) : run(epilogue, __half());
  };
  return p.result == PMO_GROUPED_GATED ? of_dtype(std::integral_constant<pmo_grouped_result, PMO_GROUPED_GATED>())
                                       : of_dtype(std::integral_constant<pmo_grouped_result, PMO_GROUPED_PLAIN>());
}

}  // namespace cuda
}  // namespace pmo
