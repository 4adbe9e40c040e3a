// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows and matrices of integer codes, sm_90a: the GEMM of few_rows.cu on the values of the matrix,
// code * scale rounded to the dtype of x, with the same bits. Values exist in registers only.
//
//   matrix  int8 codes [E, N, K], or int4 codes [E, N, K / 2]; scales float32 [E, N], or [E, N, ceil(K / 128)]
//   plain   out [M, width] = weights[r] * Y
//   gated   out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles, prologue and overlap: few_rows.cuh, with two CTAs per SM: one converts codes while the other waits. Warp-specialised, a
// pipeline of stages of 128 along K:
//   warps 0 to 7  consumers: codes from shared memory to values in the registers of operand A, MMAs of m16n8k16 with the tile's rows
//     rounded up to 8, 16, 32 or 64, epilogue. A warp has 16 columns of W; with SwiGLU 8 gates and their ups, so that a lane has both.
//   warp 8        loads codes by TMA in boxes of 64 columns
//   warp 9        copies rows of X by cp.async, 16 bytes a lane; gathers token rows if row_to_token is given
//
// Order of K: the sum of an MMA does not depend on the order of its 16 elements, so a lane takes four neighbouring codes and the four
// elements of X beside them. wgmma would need all four warps of a warpgroup to have converted their codes.
//
// Work: 2 M K N FLOPs, and some three instructions for a value, five if the dtype of x does not represent its scale. Bytes: the codes
// of experts that have rows once from memory; X once per 128 columns, from the L2.
#include "common/matrix_layout.h"
#include "cuda/gemm/few_rows.cuh"
#include "cuda/ptx/mma.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kIntTileK = 128;
constexpr int kWarpgroups = 2, kConsumerWarps = kWarpgroups * kWarpgroupThreads / kWarpSize;
constexpr int kWarps = kConsumerWarps + 2, kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = 2;

// kBits of a code; kGrouped: one scale per 128 of K, otherwise one per column.
template <int kBits>
constexpr int kRowBytes = kIntTileK * kBits / 8;  // of a column of the matrix in a stage
template <int kBits>
constexpr int kBoxOfCodes = 64 * kRowBytes<kBits>;
template <int kBits>
constexpr int kStages = kBits == 8 ? 3 : 4;
template <int kBits>
using Stages = FewRowsStages<kStages<kBits>, 2 * kBoxOfCodes<kBits>, kFewRows * kIntTileK * 2>;

#ifdef PMO_SM90A

template <int kBits>
using Shared = FewRowsShared<kStages<kBits>, kWarps>;

template <pmo_grouped_result kEpilogue, int kBits>
__device__ inline void load_codes(const FewRowsParams& p, Shared<kBits>& shared, const Stages<kBits>& stages) {
  PipelineState<kStages<kBits>> state;
  for_each_tile(p, shared, kFewRowsColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    for (int step = 0; step < p.k_blocks; ++step) {
      mbarrier_wait_parity(&shared.empty[state.stage], state.phase ^ 1);
      if (elect_sync()) {
        uint64_t* full = &shared.full[state.stage];
        mbarrier_arrive_expect_tx(full, 2 * kBoxOfCodes<kBits>);
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          tma_load_3d(stages.matrix(state.stage) + box * kBoxOfCodes<kBits>, &p.matrix, full, step * kRowBytes<kBits>,
                      box_column<kEpilogue>(p, tile, box), tile.expert);
        }
      }
      state.advance();
    }
  });
}

// Packed arithmetic of two 16-bit elements in a word. kMagic: two elements of 2^7 (bfloat16) or 2^10 (float16), so that the bits of a
// small number can be added to them by a logical or.
template <typename T>
struct Packed {
  using Pair = __nv_bfloat162;
  static constexpr uint32_t kMagic = 0x43004300, kNibbleOffset = 0x43084308;  // 128, 136
};

template <>
struct Packed<__half> {
  using Pair = __half2;
  static constexpr uint32_t kMagic = 0x64006400, kNibbleOffset = 0x64086408;  // 1024, 1032
};

// (word & mask) | magic and (word & mask) ^ magic in one instruction; the compiler splits it if both are constants.
__device__ inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made) : "r"(word), "r"(mask), "r"(magic));
  return made;
}
__device__ inline uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(made) : "r"(word), "r"(mask), "r"(magic));
  return made;
}

template <typename T>
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  using Both = typename Packed<T>::Pair;
  const Both made = __hsub2(reinterpret_cast<const Both&>(a), reinterpret_cast<const Both&>(b));
  return reinterpret_cast<const uint32_t&>(made);
}

// Scale of a matrix column in a K step. is_narrow: the dtype of x represents it, so that packed multiplication rounds once, too.
template <typename T>
struct Scale {
  float value;
  uint32_t pair;

  __device__ explicit Scale(float given) : value(given), pair(Pair<T>::pack(given, given)) {}
  __device__ bool is_narrow() const { return Pair<T>::unpack(pair).x == value; }

  // Values of two codes.
  template <bool kNarrow>
  __device__ uint32_t times(uint32_t codes) const {
    if constexpr (kNarrow) {
      using Both = typename Packed<T>::Pair;
      const Both made = __hmul2(reinterpret_cast<const Both&>(codes), reinterpret_cast<const Both&>(pair));
      return reinterpret_cast<const uint32_t&>(made);
    } else {
      const float2 both = Pair<T>::unpack(codes);
      return Pair<T>::pack(__fmul_rn(both.x, value), __fmul_rn(both.y, value));
    }
  }
};

// Two int8 codes, the bytes `first` and `first` + 1 of a word, as elements of T. Seven bits of a code and the magic are one element; its
// sign bit and the magic are 2^7 or 2^8 (bfloat16), 2^10 or 2^10 + 2^7 (float16). Their difference is the code.
template <typename T>
__device__ inline uint32_t codes_of_int8(uint32_t word, int first) {
  const uint32_t apart = __byte_perm(word, 0, first == 0 ? 0x4140 : 0x4342);
  return subtract_pairs<T>(and_or(apart, 0x007F007F, Packed<T>::kMagic), and_or(apart, 0x00800080, Packed<T>::kMagic));
}

// Two int4 codes, bits 0 to 3 and 16 to 19 of a word. Flipping their sign bits adds 8.
template <typename T>
__device__ inline uint32_t codes_of_int4(uint32_t nibbles) {
  return subtract_pairs<T>(and_xor(nibbles, 0x000F000F, Packed<T>::kNibbleOffset), Packed<T>::kNibbleOffset);
}

// Mainloop of a consumer warp.
template <pmo_grouped_result kEpilogue, int kBits, bool kGrouped, typename T>
struct Mainloop {
  static constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;

  const FewRowsParams& p;
  Shared<kBits>& shared;
  const Stages<kBits>& stages;
  const int warp;
  PipelineState<kStages<kBits>> state = {};

  // Box of the warp's columns 0 to 7 (half 0) and 8 to 15 (half 1), and column `row` of them in it.
  __device__ int box_of(int half) const { return kGated ? half : warp / 4; }
  __device__ int column_of(int half, int row) const { return kGated ? 8 * warp + row : warp % 4 * 16 + 8 * half + row; }

  // d = W^T X^T of the warp's 16 columns and 8 kTiles rows.
  template <int kTiles>
  __device__ void run(float (&d)[kFewRowsAccumulators / 2], const SwapAbTile& tile) {
    const float* scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = box_column<kEpilogue>(p, tile, box_of(half)) + column_of(half, threadIdx.x % kWarpSize / 4);
      scales[half] = p.matrix_scales + (int64_t{tile.expert} * p.outer + min(at, p.outer - 1)) * (kGrouped ? p.k_blocks : 1);
    }
    float next[2] = {__ldg(scales[0]), __ldg(scales[1])};
#pragma unroll
    for (float& each : d) each = 0.0f;
#pragma unroll 1
    for (int step = 0; step < p.k_blocks; ++step) {
      const Scale<T> scale[2] = {Scale<T>(next[0]), Scale<T>(next[1])};
      if constexpr (kGrouped) {
        const int following = min(step + 1, p.k_blocks - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) next[half] = __ldg(scales[half] + following);
      }
      mbarrier_wait_parity(&shared.full[state.stage], state.phase);
      if (__all_sync(kAllLanes, scale[0].is_narrow() && scale[1].is_narrow())) {
        multiply<kTiles, true>(d, scale);
      } else {
        multiply<kTiles, false>(d, scale);
      }
      __syncwarp();
      if (elect_sync()) mbarrier_arrive(&shared.empty[state.stage]);
      state.advance();
    }
  }

 private:
  // All MMAs of a stage, 32 of K at a time.
  template <int kTiles, bool kNarrow>
  __device__ void multiply(float (&d)[kFewRowsAccumulators / 2], const Scale<T> (&scale)[2]) const {
    const int lane = threadIdx.x % kWarpSize, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int k = 0; k < kIntTileK / 16; k += 2) {
      uint32_t codes[4];  // of both halves in the first 16 of K, then in the others
      load_codes_of(k, codes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        values_of<kNarrow>(a, 0, codes[2 * i], scale[0]);
        values_of<kNarrow>(a, 1, codes[2 * i + 1], scale[1]);
        // Rows of 128 bytes, their chunks swizzled in pairs.
        const int chunk = (2 * ((k + i) % 4) + quad / 2) ^ row % 4 * 2;
        const uint32_t rows = stages.rows(state.stage) + (k + i) / 4 * (kFewRows * 128) + row * 128 + chunk * 16 + quad % 2 * 8;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint2 b = ld_shared_v2(rows + n * 8 * 128);
          if constexpr (kBits == 8) {
            mma_m16n8k16<T>(d, 4 * n, a, b.x, b.y);
          } else {
            mma_m16n8k16<T>(d, 4 * n, a, __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.x, b.y, 0x7632));
          }
        }
      }
    }
  }

  // Four codes of each half from 16 k + 4 (l % 4) on, and 16 further: a word of int8, or 16 bits of int4.
  __device__ void load_codes_of(int k, uint32_t (&codes)[4]) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t base = stages.matrix(state.stage);
    if constexpr (kBits == 8) {
      const int matrix = lane / 8, row = lane % 8, half = matrix % 2;
      const uint32_t column = base + box_of(half) * kBoxOfCodes<kBits> + column_of(half, row) * kRowBytes<kBits>;
      ldmatrix_x4(column + ((k + matrix / 2) ^ row) * 16, codes);  // 128-byte swizzle
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4;
        const uint32_t column = base + box_of(half) * kBoxOfCodes<kBits> + column_of(half, row) * kRowBytes<kBits>;
        const uint32_t chunk = column + (k / 2 ^ row / 2) * 16 + lane % 4 * 2;  // 64-byte swizzle
        codes[half] = ld_shared_u16(chunk);
        codes[2 + half] = ld_shared_u16(chunk + 8);
      }
    }
  }

  // Words `half` and `half` + 2 of operand A. int4: the first has the even codes, the second the odd ones.
  template <bool kNarrow>
  __device__ static void values_of(uint32_t (&a)[4], int half, uint32_t codes, const Scale<T>& scale) {
    if constexpr (kBits == 8) {
      a[half] = scale.template times<kNarrow>(codes_of_int8<T>(codes, 0));
      a[2 + half] = scale.template times<kNarrow>(codes_of_int8<T>(codes, 2));
    } else {
      const uint32_t apart = __byte_perm(codes, 0, 0x4140);
      a[half] = scale.template times<kNarrow>(codes_of_int4<T>(apart));
      a[2 + half] = scale.template times<kNarrow>(codes_of_int4<T>(apart >> 4));
    }
  }
};

// Epilogue of all consumer warps: each writes its columns to the buffers. `warpgroup` is 0 in the first four, else 1.
template <pmo_grouped_result kEpilogue, typename T, typename Stages>
__device__ inline void store_int_tile(const FewRowsParams& p, const float (&d)[kFewRowsAccumulators / 2], const SwapAbTile& tile,
                                      const TileRowWeights& weights, const Stages& stages, int warpgroup, int& which) {
  constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;
  const SubtileLane lane;
  const int quad = threadIdx.x % 4 * 2, warp = threadIdx.x % kWarpgroupThreads / kWarpSize, in_warp = threadIdx.x % kWarpSize;
#pragma unroll
  for (int subtile = 0; subtile < kFewRows / kSubtileRows; ++subtile) {
    if (subtile * kSubtileRows >= tile.rows) break;
    const uint32_t buffer = stages.buffer(which, kGated ? 0 : warpgroup);
    if constexpr (kGated) {
      uint32_t word[2];  // eight columns of rows 0 to 7, and of rows 8 to 15
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = subtile * 8 + 4 * i;
        const float2 gate = Pair<T>::unpack(Pair<T>::pack(d[at], d[at + 1])),
                     up = Pair<T>::unpack(Pair<T>::pack(d[at + 2], d[at + 3]));
        word[i] = Pair<T>::pack(gate.x * sigmoid(gate.x) * up.x, gate.y * sigmoid(gate.y) * up.y);
      }
      const int chunk = 4 * warpgroup + warp, target_row = in_warp % 16;
      stmatrix_x2_trans(buffer + target_row * 128 + (chunk ^ target_row % 8) * 16, word[0], word[1]);
      bar_sync(1, kWarpgroups * kWarpgroupThreads);
    } else {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = subtile * 8 + 2 * i;
        const float first = weights.of(subtile, i / 2 * 8 + quad), second = weights.of(subtile, i / 2 * 8 + quad + 1);
        word[i] = Pair<T>::pack(d[at] * first, d[at + 1] * second);
      }
      stmatrix_x4_trans(buffer + lane.to_write, word);
      bar_sync(1 + warpgroup, kWarpgroupThreads);
    }
    const int row = subtile * kSubtileRows + lane.row, column = tile.column + (kGated ? 0 : 64 * warpgroup) + lane.column;
    const bool stores = !kGated || subtile % kWarpgroups == warpgroup;
    if (stores && row < tile.rows && column < p.width) {
      store_from_subtile<T>(p.out, p.width, tile.row + row, column, buffer + lane.to_read);
    }
    which ^= 1;  // all warps have read this buffer when they meet at the barrier of the next one
  }
}

template <pmo_grouped_result kEpilogue, int kBits, bool kGrouped, typename T>
__device__ inline void consume_codes(const FewRowsParams& p, Shared<kBits>& shared, const Stages<kBits>& stages, int warp) {
  Mainloop<kEpilogue, kBits, kGrouped, T> mainloop = {p, shared, stages, warp};
  int which = 0;
  for_each_tile(p, shared, kFewRowsColumns<kEpilogue>, [&](const SwapAbTile& tile) {
    const TileRowWeights weights = few_row_weights<kEpilogue>(p, tile);
    float d[kFewRowsAccumulators / 2];
    if (tile.rows <= 8) {
      mainloop.template run<1>(d, tile);
    } else if (tile.rows <= 16) {
      mainloop.template run<2>(d, tile);
    } else if (tile.rows <= 32) {
      mainloop.template run<4>(d, tile);
    } else {
      mainloop.template run<8>(d, tile);
    }
    store_int_tile<kEpilogue, T>(p, d, tile, weights, stages, warp / 4, which);
  });
}

#endif  // PMO_SM90A

template <pmo_grouped_result kEpilogue, int kBits, bool kGrouped, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) grouped_gemm_few_rows_int(const __grid_constant__ FewRowsParams p) {
#ifdef PMO_SM90A
  extern __shared__ uint8_t dynamic[];
  __shared__ Shared<kBits> shared;
  start_few_rows(p, shared, 1 + kWarpSize, kConsumerWarps);
  const Stages<kBits> stages(dynamic);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (warp < kConsumerWarps) {
    consume_codes<kEpilogue, kBits, kGrouped, T>(p, shared, stages, warp);
  } else if (warp == kConsumerWarps) {
    load_codes<kEpilogue, kBits>(p, shared, stages);
  } else {
    wait_for_previous_kernel();
    copy_rows<kIntTileK / kTileK, RowSwizzle::kPairs, kStages<kBits>>(p, shared, stages, kFewRowsColumns<kEpilogue>);
  }
#endif
}

template <pmo_grouped_result kEpilogue, int kBits, bool kGrouped, typename T>
int launch_few_rows_int(const pmo_grouped_product_params& p, const FewRowsParams& params, cudaStream_t stream) {
  static SharedMemoryLimit limit;
  return launch_few_rows(p, params, grouped_gemm_few_rows_int<kEpilogue, kBits, kGrouped, T>, kThreads,
                         Stages<kBits>::kSharedBytes, limit, stream, kBlocksPerSm);
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
