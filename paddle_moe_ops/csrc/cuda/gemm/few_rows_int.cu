// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM for experts with few rows and matrices of integer codes, sm_90a: the GEMM of few_rows.cu on the values of the matrix,
// code * scale rounded to the dtype of x, with the same bits. Values exist in registers only.
//
//   matrix  int8 codes [E, N, K], or int4 codes [E, N, K / 2]; scales float32 [E, N], or [E, N, ceil(K / 128)]
//   plain   out [M, width] = weights[r] * Y
//   gated   out [M, n] = silu(gate) * up of the halves of Y
//
// Tiles, prologue and overlap: few_rows.cuh; three shapes of CTAs by the mean of rows of an expert (Shape). Up to 8: 16 rows and 128 columns
// of W, with two or three CTAs per SM: one converts codes while another waits. Then 64 or 96 rows and 256 columns, so that fewer CTAs
// read the same rows and convert the same codes. Warp-specialised, a pipeline of stages of 128 along K:
//   8 or 16 warps  consumers: codes from shared memory to values in the registers of operand A, MMAs with the tile's rows rounded up to
//     8 or a multiple of 16, epilogue. A warp has 16 columns of W; with SwiGLU 8 gates and their ups, so that a lane has both.
//   one warp       loads codes by TMA in boxes of 64 columns
//   one warp       copies rows of X by cp.async, 16 bytes a lane; gathers token rows if row_to_token is given
//
// MMAs: few rows take mma.sync, so that a warp waits for no other; more rows wgmma, which reads X once for 64 columns.
//
// Order of K: the sum of an MMA does not depend on the order of its 16 elements. With mma.sync a lane takes four neighbouring codes
// and the four elements of X beside them; wgmma reads X in order.
//
// Work: 2 M K N FLOPs, and 5 (int8) or 6 (int4) instructions for four values, 17 or 18 if the packed form can't hold their scale
// (Scale). Bytes: the codes of experts that have rows once from memory; X once per column tile, from the L2.
#include "common/matrix_layout.h"
#include "cuda/gemm/few_rows.cuh"
#include "cuda/ptx/mma.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kIntTileK = 128;
constexpr int kPairWarps = 2 * kWarpgroupThreads / kWarpSize;  // consumers of two boxes of 64 columns

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
  static constexpr int kBlocksPerSm = kTileRows == 16 ? (kBits == 8 ? 2 : 3) : 1;  // by shared memory
  static constexpr int kStages = kTileRows == 16 ? 4 : (kTileRows == 64 ? 4 : 3) + (kBits == 8 ? 0 : 1);
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

// Two codes as 16-bit elements. In an element of T whose upper bits are 0, the lower eight are a linear number: subnormal, or with the
// exponent after that of the subnormal ones, in the same units. A code's bits with the sign flipped are unsigned there, so one packed
// fused multiply-add yields (bits - offset) * scale, exactly rounded.
template <typename T>
struct Packed {
  using Pair = __nv_bfloat162;
  static constexpr float kUnits = 0x1p127f, kTimes = 0x1p6f;  // their product is 1 over the unit
};

template <>
struct Packed<__half> {
  using Pair = __half2;
  static constexpr float kUnits = 0x1p24f, kTimes = 1.0f;
};

// (word & mask) ^ flipped in one instruction; the compiler splits it if both are constants.
__device__ inline uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t flipped) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(made) : "r"(word), "r"(mask), "r"(flipped));
  return made;
}

// Four bytes of a (0 to 3) and b (4 to 7); 8 + i is a byte of the sign bits of byte i.
__device__ inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t made;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "r"(selector));
  return made;
}

// Scale of a matrix column in a K step. In a pair of int4 codes the even one is in bits 3 to 6, the odd one in bits 4 to 7.
template <int kBits, typename T>
struct Scale {
  static constexpr float kEven = kBits == 8 ? 1.0f : 0x1p-3f, kOdd = kBits == 8 ? 1.0f : 0x1p-4f;
  static constexpr float kOffset = kBits == 8 ? 128.0f : 8.0f;

  float value;
  uint32_t factor, offset;  // of the packed form
  bool is_packed;           // both are exact

  __device__ explicit Scale(float given) : value(given) {
    const float even = given * (kEven * Packed<T>::kUnits) * Packed<T>::kTimes;
    const float odd = given * (kOdd * Packed<T>::kUnits) * Packed<T>::kTimes;
    factor = Pair<T>::pack(even, odd);
    offset = Pair<T>::pack(-kOffset * given, -kOffset * given);
    // The difference of two infinities is NaN.
    is_packed = Pair<T>::unpack(factor).x - even == 0.0f && Pair<T>::unpack(offset).x == -kOffset * given;
  }

  // Values of two codes in linear bits.
  template <bool kPacked>
  __device__ uint32_t times(uint32_t bits) const {
    if constexpr (kPacked) {
      using Both = typename Packed<T>::Pair;
      const Both made = __hfma2(reinterpret_cast<const Both&>(bits), reinterpret_cast<const Both&>(factor),
                                reinterpret_cast<const Both&>(offset));
      return reinterpret_cast<const uint32_t&>(made);
    } else {
      return Pair<T>::pack(__fmul_rn(code_of<kBits == 8 ? 23 : 20>(bits, 0x7640), value),
                           __fmul_rn(code_of<kBits == 8 ? 23 : 19>(bits, 0x7642), value));
    }
  }

 private:
  // A code in float32: its bits become the last bits of 2^kPower, where they have the code's place.
  template <int kPower>
  static __device__ float code_of(uint32_t bits, uint32_t selector) {
    constexpr uint32_t kMagic = (127 + kPower) << 23;
    static_assert(kMagic % (1 << 16) == 0, "bits are in the low byte");
    return __uint_as_float(__byte_perm(bits, kMagic, selector)) - (kOffset + (1 << kPower));
  }
};

// Mainloop of a consumer warp.
template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
struct Mainloop {
  static constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;
  static constexpr int kToHalf = kGated ? kBoxOfCodes<kBits> : 8 * kRowBytes<kBits>;
  using Of = Shape<kBits, kTileRows>;
  using ScaleOf = Scale<kBits, T>;
  using Accumulators = float[kTileRows / 2];

  const FewRowsParams& p;
  typename Of::Shared& shared;
  const typename Of::Stages& stages;
  const int pair, warp;  // of the CTA, and of the pair
  typename Of::State state = {};

  // Box of the warp's columns, and column `row` of the first eight in it; the others, half 1, are kToHalf bytes further.
  __device__ int box() const { return kGated ? 0 : warp / 4; }
  __device__ int column(int row) const { return (kGated ? 8 * warp : warp % 4 * 16) + row; }

  // d = W^T X^T of the warp's 16 columns and the tile's rows, rounded up to kRows.
  template <int kRows>
  __device__ void run(Accumulators& d, const SwapAbTile& tile) {
    const float* scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_box = column(threadIdx.x % kWarpSize / 4) + (kGated ? 0 : 8 * half);
      const int at = min(box_column<kEpilogue>(p, tile, kGated ? half : box()) + in_box, p.outer - 1);
      scales[half] = p.matrix_scales + (int64_t{tile.expert} * p.outer + at) * (kGrouped ? p.k_blocks : 1);
    }
    ScaleOf scale[2] = {ScaleOf(__ldg(scales[0])), ScaleOf(__ldg(scales[1]))};
    bool is_packed = are_packed(scale);
#pragma unroll
    for (float& each : d) each = 0.0f;
#pragma unroll 1
    for (int step = 0; step < p.k_blocks; ++step) {
      float next[2];
      if constexpr (kGrouped) {
        const int following = min(step + 1, p.k_blocks - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) next[half] = __ldg(scales[half] + following);
      }
      mbarrier_wait_parity(&shared.full[state.stage], state.phase);
      if constexpr (kRows > kMostOfWarps<kBits>) {
        multiply_by_warpgroup<kRows>(d, scale, is_packed);
      } else if (is_packed) {
        multiply_by_warp<kRows, true>(d, scale);
      } else {
        multiply_by_warp<kRows, false>(d, scale);
      }
      __syncwarp();
      if (elect_sync()) mbarrier_arrive(&shared.empty[state.stage]);
      state.advance();
      if constexpr (kGrouped) {
#pragma unroll
        for (int half = 0; half < 2; ++half) scale[half] = ScaleOf(next[half]);
        is_packed = are_packed(scale);
      }
    }
  }

 private:
  static constexpr int kParts = kIntTileK / 32;  // of a stage

  // Codes of a part: a word of each half. int8: four codes in the first 16 of K, then in the others. int4: all eight codes.
  using Codes = uint32_t[kBits / 2];

  // Operand A of a part: in 16 of K, then in the others.
  struct Values {
    uint32_t a[2][4];
  };

  // True if the packed form suits all scales of the warp.
  __device__ static bool are_packed(const ScaleOf (&scale)[2]) {
    return __all_sync(kAllLanes, scale[0].is_packed && scale[1].is_packed);
  }

  __device__ uint32_t matrix() const { return stages.matrix(state.stage) + pair * Of::kPairBytes + box() * kBoxOfCodes<kBits>; }

  // All MMAs of a stage by mma.sync.
  template <int kRows, bool kPacked>
  __device__ void multiply_by_warp(Accumulators& d, const ScaleOf (&scale)[2]) const {
    // Chunks of X are swizzled in pairs.
    const int lane = threadIdx.x % kWarpSize, row = lane / 4, quad = lane % 4;
    const uint32_t rows = stages.rows(state.stage) + row * 128 + (quad / 2 ^ row % 4 * 2) * 16 + quad % 2 * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Codes codes;
      load_neighbours(part, codes);
      Values values;
      convert<kPacked>(values, codes, scale);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 b = ld_shared_v2((rows ^ (part % 2 * 64 + i * 32)) + part / 2 * (kTileRows * 128) + n * 8 * 128);
          mma_m16n8k16<T>(d, 4 * n, values.a[i], b.x, b.y);
        }
      }
    }
  }

  // All MMAs of a stage by wgmma. Warps of a warpgroup may differ in is_packed.
  template <int kRows>
  __device__ void multiply_by_warpgroup(Accumulators& d, const ScaleOf (&scale)[2], bool is_packed) const {
    fence_proxy_async();
    Values values[2];
    Codes codes[2];
    load_in_order(0, codes[0]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Values& made = values[part % 2];
      if (part + 1 < kParts) load_in_order(part + 1, codes[(part + 1) % 2]);
      if (is_packed) {
        convert<true>(made, codes[part % 2], scale);
      } else {
        convert<false>(made, codes[part % 2], scale);
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

  // Codes 4 (l % 4) to 4 (l % 4) + 3 of 16.
  __device__ void load_neighbours(int part, Codes& codes) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t first = matrix();
    if constexpr (kBits == 8) {  // 128-byte swizzle
      const int matrix = lane / 8, row = lane % 8;
      const uint32_t at = first + matrix % 2 * kToHalf + column(row) * kRowBytes<kBits> + (matrix / 2 ^ row) * 16;
      ldmatrix_x4(at ^ part * 32, codes);
    } else {  // 64-byte swizzle
      const int row = lane / 4;
      const uint32_t at = (first + column(row) * kRowBytes<kBits> + row / 2 * 16 + lane % 4 * 2) ^ part * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[half] = __byte_perm(ld_shared_u16(at + half * kToHalf), ld_shared_u16(at + half * kToHalf + 8), 0x5410);
      }
    }
  }

  // Codes 2 (l % 4) and the next one of 16, and those 8 further.
  __device__ void load_in_order(int part, Codes& codes) const {
    const int lane = threadIdx.x % kWarpSize, row = lane / 4, quad = lane % 4;
    const uint32_t first = matrix() + column(row) * kRowBytes<kBits>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kBits == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t at = ((first + row * 16 + 2 * quad) ^ (part * 32 + i * 16)) + half * kToHalf;
          codes[2 * i + half] = __byte_perm(ld_shared_u16(at), ld_shared_u16(at + 8), 0x5410);
        }
      } else {
        const uint4 chunk = ld_shared_v4(((first + row / 2 * 16) ^ part * 16) + half * kToHalf);
        const uint32_t selector = 0x40 + 0x11 * quad;  // bytes l % 4 and l % 4 + 4 of eight
        codes[half] = __byte_perm(__byte_perm(chunk.x, chunk.y, selector), __byte_perm(chunk.z, chunk.w, selector), 0x5410);
      }
    }
  }

  template <bool kPacked>
  __device__ static void convert(Values& values, const Codes& codes, const ScaleOf (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t bits[4];  // two codes each, in linear bits
      if constexpr (kBits == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t flipped = codes[2 * i + half] ^ 0x80808080;
          bits[2 * i] = __byte_perm(flipped, 0, 0x4140);
          bits[2 * i + 1] = __byte_perm(flipped, 0, 0x4342);
        }
      } else {  // bytes of zeros from sign bits of the even codes' bytes
        const uint32_t word = codes[half];
        const uint32_t even = and_xor(word << 3, 0x78787878, 0x40404040), odd = and_xor(word, 0xF0F0F0F0, 0x80808080);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = permute_bytes(even, odd, 0x8480 + 0x0101 * i);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values.a[i][half] = scale[half].template times<kPacked>(bits[2 * i]);
        values.a[i][2 + half] = scale[half].template times<kPacked>(bits[2 * i + 1]);
      }
    }
  }
};

// Epilogue of a pair of warpgroups: each writes its columns to buffers of the pair. `warpgroup` is 0 or 1.
template <pmo_grouped_result kEpilogue, int kTileRows, typename T, typename Stages>
__device__ inline void store_int_tile(const FewRowsParams& p, const float (&d)[kTileRows / 2], const SwapAbTile& tile,
                                      const TileRowWeights& weights, const Stages& stages, int pair, int warpgroup, int& which) {
  constexpr bool kGated = kEpilogue == PMO_GROUPED_GATED;
  const SubtileLane lane;
  const int quad = threadIdx.x % 4 * 2, warp = threadIdx.x % kWarpgroupThreads / kWarpSize, in_warp = threadIdx.x % kWarpSize;
#pragma unroll
  for (int subtile = 0; subtile < kTileRows / kSubtileRows; ++subtile) {
    if (subtile * kSubtileRows >= tile.rows) break;
    const uint32_t buffer = stages.buffer(which, 2 * pair + (kGated ? 0 : warpgroup));
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
      bar_sync(1 + pair, kPairWarps * kWarpSize);
    } else {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = subtile * 8 + 2 * i;
        const float first = weights.of(subtile, i / 2 * 8 + quad), second = weights.of(subtile, i / 2 * 8 + quad + 1);
        word[i] = Pair<T>::pack(d[at] * first, d[at + 1] * second);
      }
      stmatrix_x4_trans(buffer + lane.to_write, word);
      bar_sync(1 + 2 * pair + warpgroup, kWarpgroupThreads);
    }
    const int row = subtile * kSubtileRows + lane.row, column = tile.column + (kGated ? 0 : 64 * warpgroup) + lane.column;
    const bool stores = !kGated || subtile % 2 == warpgroup;
    if (stores && row < tile.rows && column < p.width) {
      store_from_subtile<T>(p.out, p.width, tile.row + row, column, buffer + lane.to_read);
    }
    which ^= 1;  // all warps have read this buffer when they meet at the barrier of the next one
  }
}

template <pmo_grouped_result kEpilogue, int kBits, int kTileRows, bool kGrouped, typename T>
__device__ inline void consume_codes(const FewRowsParams& p, typename Shape<kBits, kTileRows>::Shared& shared,
                                     const typename Shape<kBits, kTileRows>::Stages& stages, int warp) {
  const int pair = warp / kPairWarps, in_pair = warp % kPairWarps;
  Mainloop<kEpilogue, kBits, kTileRows, kGrouped, T> mainloop = {p, shared, stages, pair, in_pair};
  int which = 0;
  for_each_tile<kTileRows>(p, shared, Shape<kBits, kTileRows>::template kColumns<kEpilogue>, [&](SwapAbTile tile) {
    tile.column += pair * kFewRowsColumns<kEpilogue>;
    const TileRowWeights weights = few_row_weights<kEpilogue>(p, tile);
    float d[kTileRows / 2];
    run_rounded<kTileRows, 8>(mainloop, d, tile);
    store_int_tile<kEpilogue, kTileRows, T>(p, d, tile, weights, stages, pair, in_pair / 4, which);
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
                                                          kMostOfWarps<kBits>);
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
