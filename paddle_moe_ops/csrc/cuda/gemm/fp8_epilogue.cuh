// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Epilogues of the float8 grouped GEMM (fp8.cu): plain, SwiGLU and dSwiGLU, with quantisation of results to float8_e4m3fn.
//
// wgmma layout: a lane has two rows, and two of every eight columns of each. The 128 columns that share a scale are half a tile,
// so the quad of lanes that holds a row finds its scale by two shuffles. Results are rounded to bfloat16 before they are
// quantised.
#pragma once

#include "cuda/float8.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace pmo {
namespace cuda {

constexpr int kScaleGroup = 128;

struct Fp8Params {
  GroupedGemmParams grouped;
  const float *row_scales, *matrix_scales;
  uint8_t* codes;
  float* scales;
  float amax_min;
  int num_sources, k_blocks, column_blocks;
  uint8_t* hidden_codes;
  float* hidden_scales;
};

#ifdef PMO_SM90A

using Bfloat16Pair = Pair<__nv_bfloat16>;

// Scale of elements spread over a quad of lanes; `amax` is the maximum of the lane's own.
__device__ inline float quad_scale(float amax, float amax_min) {
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  return float8_scale(amax, amax_min);
}

// Scale of 128 elements of a row, 32 of each lane of a quad in words of two.
template <int kWords>
__device__ inline float scale_of_words(const uint32_t (&word)[kWords], float amax_min) {
  static_assert(kWords == 16, "a quarter of 128 numbers");
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float2 both = Bfloat16Pair::unpack(word[i]);
    amax = fmaxf(amax, fmaxf(fabsf(both.x), fabsf(both.y)));  // fmaxf ignores NaN
  }
  return quad_scale(amax, amax_min);
}

// The same for a lane's 32 accumulators from kFirst on, rounded to bfloat16. Rounding is monotonic, so the maximum is taken
// before it.
template <int kFirst>
__device__ inline float scale_of_accumulators(const float (&d)[128], int half, float amax_min) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = kFirst + 4 * i + 2 * half;
    amax = fmaxf(amax, fmaxf(fabsf(d[at]), fabsf(d[at + 1])));
  }
  return quad_scale(__bfloat162float(__float2bfloat16_rn(amax)), amax_min);
}

__device__ inline uint32_t codes_of_pair(uint32_t word, float inverse) {
  const float2 both = Bfloat16Pair::unpack(word);
  return float8_pair(both.x, both.y, inverse);
}

// Dequantises two codes; float16 represents every e4m3 value.
__device__ inline uint32_t pair_of_codes(uint32_t codes, float scale) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const float2 both = __half22float2(raw);
  return Bfloat16Pair::pack(__fmul_rn(both.x, scale), __fmul_rn(both.y, scale));
}

// Stores the codes of 64 elements of a row, 16 of each lane of a quad. Word i of lane q has columns 8 i + 2 q.
__device__ inline void store_64_codes(uint8_t* target, const uint32_t* word, float inverse, bool is_live) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = codes_of_pair(word[2 * i], inverse) | codes_of_pair(word[2 * i + 1], inverse) << 16;
  transpose_in_quad(pairs);  // low halves: columns 16 q + 2 i; high halves: 8 columns further
  const uint4 codes = {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
                       __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
  if (is_live) *reinterpret_cast<uint4*>(target + threadIdx.x % 4 * 16) = codes;
}

// Stores the codes and the scale of 128 elements of a row, in words as above.
__device__ inline void store_interleaved_codes(const Fp8Params& p, const uint32_t (&word)[16], int row, int column, int columns,
                                               bool is_live) {
  const float scale = scale_of_words(word, p.amax_min), inverse = __frcp_rn(scale);
  const int lane = threadIdx.x % 4;
  uint8_t* target = p.codes + int64_t{row} * columns + column;
#pragma unroll
  for (int block = 0; block < 2; ++block) store_64_codes(target + 64 * block, word + 8 * block, inverse, is_live);
  if (is_live && lane == 0) p.scales[int64_t{row} * (columns / kScaleGroup) + column / kScaleGroup] = scale;
}

// Stores the codes and the scale of 128 elements of a row. Words 4 i to 4 i + 3 of lane q have eight columns from 32 i + 8 q on.
__device__ inline void store_consecutive_codes(const Fp8Params& p, const uint32_t (&word)[16], int row, int column, int columns,
                                               bool is_live) {
  const float scale = scale_of_words(word, p.amax_min), inverse = __frcp_rn(scale);
  const int lane = threadIdx.x % 4;
  uint8_t* target = p.codes + int64_t{row} * columns + column + 8 * lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = codes_of_pair(word[4 * i], inverse) | codes_of_pair(word[4 * i + 1], inverse) << 16;
    const uint32_t high = codes_of_pair(word[4 * i + 2], inverse) | codes_of_pair(word[4 * i + 3], inverse) << 16;
    if (is_live) *reinterpret_cast<uint2*>(target + 32 * i) = make_uint2(low, high);
  }
  if (is_live && lane == 0) p.scales[int64_t{row} * (columns / kScaleGroup) + column / kScaleGroup] = scale;
}

// Stores 64 columns of a row in bfloat16, 16 bytes a lane. Each lane of a quad has two of every eight columns.
__device__ inline void store_64_columns(void* row, int column, const uint32_t* word, bool is_live) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t words[4] = {word[4 * part], word[4 * part + 1], word[4 * part + 2], word[4 * part + 3]};
    transpose_in_quad(words);
    if (is_live) store_8_columns(row, column + 32 * part + threadIdx.x % 4 * 8, words);
  }
}

// Codes and scales of a row of hidden.
__device__ inline uint8_t* hidden_codes_of(const Fp8Params& p, int row) {
  return p.hidden_codes + int64_t{row} * 2 * p.grouped.width;
}
__device__ inline float* hidden_scales_of(const Fp8Params& p, int row) {
  return p.hidden_scales + int64_t{row} * (2 * p.grouped.width / kScaleGroup);
}

// SwiGLU epilogue of one row of a lane. Gates are in the first half of the accumulators, ups in the second.
template <bool kFp8Hidden>
__device__ inline void store_swiglu_row(const Fp8Params& p, const float (&d)[128], const GroupedTile& tile, int row, int half) {
  const bool is_live = row < tile.end;
  const int width = p.grouped.width;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(p.grouped.hidden) + int64_t{row} * 2 * width;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.grouped.out) + int64_t{row} * width;
  float gate_scale = 0.0f, up_scale = 0.0f;  // reciprocals of scales
  if constexpr (kFp8Hidden) {
    const float gates = scale_of_accumulators<0>(d, half, p.amax_min), ups = scale_of_accumulators<64>(d, half, p.amax_min);
    gate_scale = __frcp_rn(gates);
    up_scale = __frcp_rn(ups);
    if (is_live && threadIdx.x % 4 == 0) {
      float* scales = hidden_scales_of(p, row) + tile.column / kScaleGroup;
      scales[0] = gates;
      scales[width / kScaleGroup] = ups;
    }
  }
  uint32_t act[16];
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    uint32_t gate[8], up[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (8 * block + i) * 4 + 2 * half;
      gate[i] = Bfloat16Pair::pack(d[at], d[at + 1]);
      up[i] = Bfloat16Pair::pack(d[at + 64], d[at + 65]);
      const float2 g = Bfloat16Pair::unpack(gate[i]), u = Bfloat16Pair::unpack(up[i]);
      act[8 * block + i] = Bfloat16Pair::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
    }
    if constexpr (kFp8Hidden) {
      uint8_t* codes = hidden_codes_of(p, row) + tile.column + 64 * block;
      store_64_codes(codes, gate, gate_scale, is_live);
      store_64_codes(codes + width, up, up_scale, is_live);
    } else if (p.grouped.hidden != nullptr) {
      store_64_columns(hidden, tile.column + 64 * block, gate, is_live);
      store_64_columns(hidden + width, tile.column + 64 * block, up, is_live);
    }
    if (p.grouped.out != nullptr) store_64_columns(out, tile.column + 64 * block, act + 8 * block, is_live);
  }
  if (p.codes != nullptr) store_interleaved_codes(p, act, row, tile.column, width, is_live);
}

// A lane's share of 64 columns of a row of hidden: twice eight gates and their ups.
struct HiddenBlock {
  uint4 gates[2], ups[2];

  __device__ void load(const void* gate, int64_t up_offset, int columns_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gates[i] = ups[i] = make_uint4(0, 0, 0, 0);
      const char* at = static_cast<const char*>(gate) + 64 * i;
      if (32 * i < columns_left) {
        gates[i] = *reinterpret_cast<const uint4*>(at);
        ups[i] = *reinterpret_cast<const uint4*>(at + up_offset);
      }
    }
  }
};

// dswiglu_pair for two columns of a row; adds their dot product with act to `sum`.
__device__ inline void dswiglu_pair_of_row(uint32_t& gates, uint32_t& ups, float low, float high, float weight, float& sum,
                                           uint32_t& scaled) {
  const float2 act = dswiglu_pair<__nv_bfloat16>(gates, ups, low, high, make_float2(weight, weight), scaled);
  sum = fmaf(act.y, high, fmaf(act.x, low, sum));
}

// A lane's share of 128 columns of a row of hidden: four times eight gates and their ups.
template <bool kFp8Hidden>
struct HiddenRow {
  HiddenBlock blocks[2];

  __device__ void load(const Fp8Params& p, int row, int column, bool found) {
    const int64_t up_offset = int64_t{p.grouped.width} * 2;
    const __nv_bfloat16* hidden = static_cast<const __nv_bfloat16*>(p.grouped.hidden) + row * up_offset;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int at = column + 64 * block;
      blocks[block].load(hidden + at, up_offset, found ? p.grouped.width - at : 0);
    }
  }

  __device__ void words(int part, uint32_t* gates, uint32_t* ups) const {
    const uint4 gate = blocks[part / 2].gates[part % 2], up = blocks[part / 2].ups[part % 2];
    const uint32_t gate_words[4] = {gate.x, gate.y, gate.z, gate.w}, up_words[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gates[i] = gate_words[i];
      ups[i] = up_words[i];
    }
  }
};

template <>
struct HiddenRow<true> {
  uint2 gates[4], ups[4];
  float gate_scale, up_scale;  // scales

  // No loads through the read-only cache: the codes of the gradient may overwrite these.
  __device__ void load(const Fp8Params& p, int row, int column, bool found) {
    const int width = p.grouped.width;
    const uint8_t* codes = hidden_codes_of(p, row) + column;
    const float* scales = hidden_scales_of(p, row) + column / kScaleGroup;
    gate_scale = found ? scales[0] : 0.0f;
    up_scale = found ? scales[width / kScaleGroup] : 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      gates[part] = found ? *reinterpret_cast<const uint2*>(codes + 32 * part) : make_uint2(0, 0);
      ups[part] = found ? *reinterpret_cast<const uint2*>(codes + width + 32 * part) : make_uint2(0, 0);
    }
  }

  __device__ void words(int part, uint32_t* to_gates, uint32_t* to_ups) const {
    unpack(gates[part], gate_scale, to_gates);
    unpack(ups[part], up_scale, to_ups);
  }

  static __device__ void unpack(uint2 codes, float scale, uint32_t* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pair_of_codes((i < 2 ? codes.x : codes.y) >> i % 2 * 16 & 0xFFFF, scale);
  }
};

// A lane's accumulators of one pass and four groups of eight columns, two of each. The passes, two rows x two halves of a tile,
// are a real loop, so that its code stays in the instruction caches. Registers can't be indexed by a loop variable, so a switch
// moves them.
struct PassAccumulators {
  uint32_t low[4], high[4];

  __device__ PassAccumulators(const float (&d)[128], int pass, int part) {
    switch (pass) {
      case 0:
        move<0>(d, part);
        break;
      case 1:
        move<1>(d, part);
        break;
      case 2:
        move<2>(d, part);
        break;
      default:
        move<3>(d, part);
    }
  }

 private:
  template <int kPass>
  __device__ void move(const float (&d)[128], int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = kPass % 2 * 64 + (4 * part + i) * 4 + kPass / 2 * 2;
      low[i] = __float_as_uint(d[at]);
      high[i] = __float_as_uint(d[at + 1]);
      asm volatile("" : "+r"(low[i]), "+r"(high[i]));  // register fence: moved here, not selected at each use
    }
  }
};

// dSwiGLU of 128 columns of a row, in place of hidden. The results stay in registers until their scale is known.
template <bool kFp8Hidden>
__device__ inline void store_dswiglu_row(const Fp8Params& p, const float (&d)[128], int pass, int first_column, int row,
                                         bool is_live, bool found, float weight) {
  const GroupedGemmParams& g = p.grouped;
  const int lane_column = threadIdx.x % 4 * 8;
  const int64_t up_offset = int64_t{g.width} * 2;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(g.hidden) + row * up_offset;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(g.out) + int64_t{row} * g.width;
  uint32_t gates[16], ups[16];
  float sum = 0.0f;
  HiddenRow<kFp8Hidden> old;
  old.load(p, row, first_column + lane_column, found);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    // The lanes of a quad exchange accumulators: from two of every eight columns to eight consecutive columns each.
    uint32_t scaled[4];
    PassAccumulators d_act(d, pass, part);
    transpose_in_quad(d_act.low);
    transpose_in_quad(d_act.high);
    old.words(part, gates + 4 * part, ups + 4 * part);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float from_low = found ? __uint_as_float(d_act.low[i]) : 0.0f;
      const float from_high = found ? __uint_as_float(d_act.high[i]) : 0.0f;
      dswiglu_pair_of_row(gates[4 * part + i], ups[4 * part + i], from_low, from_high, weight, sum, scaled[i]);
    }
    const int column = first_column + 32 * part + lane_column;
    if (is_live) {
      const int at = 4 * part;
      *reinterpret_cast<uint4*>(hidden + column) = make_uint4(gates[at], gates[at + 1], gates[at + 2], gates[at + 3]);
      *reinterpret_cast<uint4*>(hidden + g.width + column) = make_uint4(ups[at], ups[at + 1], ups[at + 2], ups[at + 3]);
      store_8_columns(out, column, scaled);
    }
  }
  if (g.d_weights != nullptr) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
    if (is_live && threadIdx.x % 4 == 0) {
      g.d_weights[int64_t{row} * (g.width / kScaleGroup) + first_column / kScaleGroup] = sum;
    }
  }
  if (p.codes != nullptr) {
    store_consecutive_codes(p, gates, row, first_column, 2 * g.width, is_live);
    store_consecutive_codes(p, ups, row, g.width + first_column, 2 * g.width, is_live);
  }
}

// Epilogue of a lane's accumulators, which are in rows `row` and `row` + 8.
template <pmo_grouped_result kEpilogue, bool kFp8Hidden>
__device__ inline void epilogue_fp8(const Fp8Params& p, const float (&d)[128], const GroupedTile& tile, int row) {
  if constexpr (kEpilogue == PMO_GROUPED_GRADIENT) {
#pragma unroll 1
    for (int pass = 0; pass < 4; ++pass) {
      const int of_row = row + pass / 2 * 8, column = tile.column + pass % 2 * kTileColumns;
      if (column >= p.grouped.width) continue;
      const bool is_live = of_row < tile.end;
      const bool found = is_live && (p.grouped.row_to_token == nullptr || __ldg(p.grouped.row_to_token + of_row) >= 0);
      const float weight = !found ? 0.0f : p.grouped.weights == nullptr ? 1.0f : __ldg(p.grouped.weights + of_row);
      store_dswiglu_row<kFp8Hidden>(p, d, pass, column, of_row, is_live, found, weight);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_row = row + 8 * half;
      if constexpr (kEpilogue == PMO_GROUPED_PLAIN) {
        store_plain_row<__nv_bfloat16>(p.grouped, d, tile, of_row, half, 0);
        const GroupedTile next = {tile.expert, tile.row, tile.end, tile.column + kTileColumns};
        store_plain_row<__nv_bfloat16>(p.grouped, d, next, of_row, half, 64);
      } else {
        store_swiglu_row<kFp8Hidden>(p, d, tile, of_row, half);
      }
    }
  }
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
