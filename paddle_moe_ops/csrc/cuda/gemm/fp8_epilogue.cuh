// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of the float8 product become results; see grouped_float8.cu.
//
// A lane has of each of two rows, and of every eight columns, two. The 128 columns that share a scale are those of half a tile, so the
// four lanes that have a row find its scale with two exchanges. What is rounded to bfloat16 is quantised from there.
#pragma once

#include "cuda/float8.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace pmo {
namespace cuda {

constexpr int kGroupOfScale = 128;

struct Float8Arguments {
  GroupedArguments grouped;
  const float *row_scales, *matrix_scales;
  uint8_t* codes;
  float* scales;
  float amax_min;
  int num_sources, depth_blocks, column_blocks;
  uint8_t* hidden_codes;
  float* hidden_scales;
};

#ifdef PMO_HOPPER_CODE

using Bfloat16Pair = Pair<__nv_bfloat16>;

// The scale of numbers of which each of four lanes has some, with their largest magnitude.
__device__ inline float scale_of_lanes(float amax, float amax_min) {
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  return float8_scale(amax, amax_min);
}

// The scale of 128 numbers of a row, of which each of four lanes has 32 in words of two.
template <int kWords>
__device__ inline float scale_in_quad(const uint32_t (&word)[kWords], float amax_min) {
  static_assert(kWords == 16, "a quarter of 128 numbers");
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float2 both = Bfloat16Pair::unpack(word[i]);
    amax = fmaxf(amax, fmaxf(fabsf(both.x), fabsf(both.y)));  // of a number and NaN, the number
  }
  return scale_of_lanes(amax, amax_min);
}

// As above of a lane's 32 sums from kFirst on, once they are rounded. Rounding keeps the order, so the largest may be found before.
template <int kFirst>
__device__ inline float scale_of_sums(const float (&d)[128], int half, float amax_min) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = kFirst + 4 * i + 2 * half;
    amax = fmaxf(amax, fmaxf(fabsf(d[at]), fabsf(d[at + 1])));
  }
  return scale_of_lanes(__bfloat162float(__float2bfloat16_rn(amax)), amax_min);
}

__device__ inline uint32_t codes_of_pair(uint32_t word, float inverse) {
  const float2 both = Bfloat16Pair::unpack(word);
  return float8_pair(both.x, both.y, inverse);
}

// The way back; a half holds the number of every code.
__device__ inline uint32_t pair_of_codes(uint32_t codes, float scale) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const float2 both = __half22float2(raw);
  return Bfloat16Pair::pack(__fmul_rn(both.x, scale), __fmul_rn(both.y, scale));
}

// Codes of 64 numbers of a row, 16 of each of four lanes. Word i of lane q has columns 8 i + 2 q.
__device__ inline void store_64_codes(uint8_t* target, const uint32_t* word, float inverse, bool is_live) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = codes_of_pair(word[2 * i], inverse) | codes_of_pair(word[2 * i + 1], inverse) << 16;
  turn_in_quad(pairs);  // low halves: columns 16 q + 2 i; high halves: those 8 further
  const uint4 codes = {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
                       __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
  if (is_live) *reinterpret_cast<uint4*>(target + threadIdx.x % 4 * 16) = codes;
}

// Codes and the scale of 128 numbers of a row, in words as above.
__device__ inline void store_interleaved_codes(const Float8Arguments& p, const uint32_t (&word)[16], int row, int column,
                                               int columns, bool is_live) {
  const float scale = scale_in_quad(word, p.amax_min), inverse = __frcp_rn(scale);
  const int lane = threadIdx.x % 4;
  uint8_t* target = p.codes + int64_t{row} * columns + column;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) store_64_codes(target + 64 * piece, word + 8 * piece, inverse, is_live);
  if (is_live && lane == 0) p.scales[int64_t{row} * (columns / kGroupOfScale) + column / kGroupOfScale] = scale;
}

// Codes and the scale of 128 numbers of a row. Words 4 i to 4 i + 3 of lane q of four have eight columns from 32 i + 8 q on.
__device__ inline void store_eights_of_codes(const Float8Arguments& p, const uint32_t (&word)[16], int row, int column,
                                             int columns, bool is_live) {
  const float scale = scale_in_quad(word, p.amax_min), inverse = __frcp_rn(scale);
  const int lane = threadIdx.x % 4;
  uint8_t* target = p.codes + int64_t{row} * columns + column + 8 * lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = codes_of_pair(word[4 * i], inverse) | codes_of_pair(word[4 * i + 1], inverse) << 16;
    const uint32_t high = codes_of_pair(word[4 * i + 2], inverse) | codes_of_pair(word[4 * i + 3], inverse) << 16;
    if (is_live) *reinterpret_cast<uint2*>(target + 32 * i) = make_uint2(low, high);
  }
  if (is_live && lane == 0) p.scales[int64_t{row} * (columns / kGroupOfScale) + column / kGroupOfScale] = scale;
}

// Stores 64 columns of a row, of which each of four lanes has two of every eight, in 16 bytes a lane.
__device__ inline void store_64(void* row, int column, const uint32_t* word, bool is_live) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t turned[4] = {word[4 * part], word[4 * part + 1], word[4 * part + 2], word[4 * part + 3]};
    turn_in_quad(turned);
    if (is_live) store_eight(row, column + 32 * part + threadIdx.x % 4 * 8, turned);
  }
}

// Where the codes of a row of hidden begin, and their scales.
__device__ inline uint8_t* hidden_codes_of(const Float8Arguments& p, int row) {
  return p.hidden_codes + int64_t{row} * 2 * p.grouped.width;
}
__device__ inline float* hidden_scales_of(const Float8Arguments& p, int row) {
  return p.hidden_scales + int64_t{row} * (2 * p.grouped.width / kGroupOfScale);
}

// Gates are in the first half of the sums, what they gate in the second.
template <bool kKeepsCodes>
__device__ inline void store_gated_float8(const Float8Arguments& p, const float (&d)[128], const GroupedPlace& place, int row,
                                          int half) {
  const bool is_live = row < place.end;
  const int width = p.grouped.width;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(p.grouped.hidden) + int64_t{row} * 2 * width;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.grouped.out) + int64_t{row} * width;
  float of_gates = 0.0f, of_ups = 0.0f;  // the inverses of scales
  if constexpr (kKeepsCodes) {
    const float gates = scale_of_sums<0>(d, half, p.amax_min), ups = scale_of_sums<64>(d, half, p.amax_min);
    of_gates = __frcp_rn(gates);
    of_ups = __frcp_rn(ups);
    if (is_live && threadIdx.x % 4 == 0) {
      float* scales = hidden_scales_of(p, row) + place.column / kGroupOfScale;
      scales[0] = gates;
      scales[width / kGroupOfScale] = ups;
    }
  }
  uint32_t act[16];
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint32_t gate[8], up[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (8 * piece + i) * 4 + 2 * half;
      gate[i] = Bfloat16Pair::pack(d[at], d[at + 1]);
      up[i] = Bfloat16Pair::pack(d[at + 64], d[at + 65]);
      const float2 g = Bfloat16Pair::unpack(gate[i]), u = Bfloat16Pair::unpack(up[i]);
      act[8 * piece + i] = Bfloat16Pair::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
    }
    if constexpr (kKeepsCodes) {
      uint8_t* codes = hidden_codes_of(p, row) + place.column + 64 * piece;
      store_64_codes(codes, gate, of_gates, is_live);
      store_64_codes(codes + width, up, of_ups, is_live);
    } else if (p.grouped.hidden != nullptr) {
      store_64(hidden, place.column + 64 * piece, gate, is_live);
      store_64(hidden + width, place.column + 64 * piece, up, is_live);
    }
    if (p.grouped.out != nullptr) store_64(out, place.column + 64 * piece, act + 8 * piece, is_live);
  }
  if (p.codes != nullptr) store_interleaved_codes(p, act, row, place.column, width, is_live);
}

// Of 64 columns of a row of hidden, a lane's two times eight: the gates, and what they gate.
struct HiddenPiece {
  uint4 gates[2], ups[2];

  __device__ void load(const void* gate, int64_t to_up, int columns_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gates[i] = ups[i] = make_uint4(0, 0, 0, 0);
      const char* at = static_cast<const char*>(gate) + 64 * i;
      if (32 * i < columns_left) {
        gates[i] = *reinterpret_cast<const uint4*>(at);
        ups[i] = *reinterpret_cast<const uint4*>(at + to_up);
      }
    }
  }
};

// `gradient_of_two` of two columns of a row; the dot product is added to `sum`.
__device__ inline void gradient_of_pair(uint32_t& gates, uint32_t& ups, float low, float high, float weight, float& sum,
                                        uint32_t& scaled) {
  const float2 act = gradient_of_two<__nv_bfloat16>(gates, ups, low, high, make_float2(weight, weight), scaled);
  sum = fmaf(act.y, high, fmaf(act.x, low, sum));
}

// Of 128 columns of a row of hidden, a lane's four times eight: the gates, and what they gate.
template <bool kKeepsCodes>
struct HiddenRow {
  HiddenPiece pieces[2];

  __device__ void load(const Float8Arguments& p, int row, int column, bool found) {
    const int64_t to_up = int64_t{p.grouped.width} * 2;
    const __nv_bfloat16* hidden = static_cast<const __nv_bfloat16*>(p.grouped.hidden) + row * to_up;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const int at = column + 64 * piece;
      pieces[piece].load(hidden + at, to_up, found ? p.grouped.width - at : 0);
    }
  }

  __device__ void words(int part, uint32_t* gates, uint32_t* ups) const {
    const uint4 gate = pieces[part / 2].gates[part % 2], up = pieces[part / 2].ups[part % 2];
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
  float of_gates, of_ups;  // scales

  // No load through the read-only cache: the codes of the gradient may be stored over these.
  __device__ void load(const Float8Arguments& p, int row, int column, bool found) {
    const int width = p.grouped.width;
    const uint8_t* codes = hidden_codes_of(p, row) + column;
    const float* scales = hidden_scales_of(p, row) + column / kGroupOfScale;
    of_gates = found ? scales[0] : 0.0f;
    of_ups = found ? scales[width / kGroupOfScale] : 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      gates[part] = found ? *reinterpret_cast<const uint2*>(codes + 32 * part) : make_uint2(0, 0);
      ups[part] = found ? *reinterpret_cast<const uint2*>(codes + width + 32 * part) : make_uint2(0, 0);
    }
  }

  __device__ void words(int part, uint32_t* to_gates, uint32_t* to_ups) const {
    unpack(gates[part], of_gates, to_gates);
    unpack(ups[part], of_ups, to_ups);
  }

  static __device__ void unpack(uint2 codes, float scale, uint32_t* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pair_of_codes((i < 2 ? codes.x : codes.y) >> i % 2 * 16 & 0xFFFF, scale);
  }
};

// Of a lane's sums, the two in each of four groups of eight columns. Passes are the two rows of each half of a tile, in a loop, whose code
// stays in the caches of the multiprocessor. Registers can't be indexed, so sums are moved by a jump.
struct SumsOfPass {
  uint32_t low[4], high[4];

  __device__ SumsOfPass(const float (&d)[128], int pass, int part) {
    switch (pass) {
      case 0:
        take<0>(d, part);
        break;
      case 1:
        take<1>(d, part);
        break;
      case 2:
        take<2>(d, part);
        break;
      default:
        take<3>(d, part);
    }
  }

 private:
  template <int kPass>
  __device__ void take(const float (&d)[128], int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = kPass % 2 * 64 + (4 * part + i) * 4 + kPass / 2 * 2;
      low[i] = __float_as_uint(d[at]);
      high[i] = __float_as_uint(d[at + 1]);
      asm volatile("" : "+r"(low[i]), "+r"(high[i]));  // moved here, not chosen where they are used
    }
  }
};

// SwiGLU's gradient of 128 columns of a row, in place of hidden; its numbers are kept until their scale is known.
template <bool kKeepsCodes>
__device__ inline void store_gradient_float8(const Float8Arguments& p, const float (&d)[128], int pass, int first_column, int row,
                                             bool is_live, bool found, float weight) {
  const GroupedArguments& g = p.grouped;
  const int lane_column = threadIdx.x % 4 * 8;
  const int64_t to_up = int64_t{g.width} * 2;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(g.hidden) + row * to_up;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(g.out) + int64_t{row} * g.width;
  uint32_t gates[16], ups[16];
  float sum = 0.0f;
  HiddenRow<kKeepsCodes> old;
  old.load(p, row, first_column + lane_column, found);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    // Of the sums, each lane of a quad has two of every eight columns; now each gets eight that follow each other.
    uint32_t scaled[4];
    SumsOfPass sums(d, pass, part);
    turn_in_quad(sums.low);
    turn_in_quad(sums.high);
    old.words(part, gates + 4 * part, ups + 4 * part);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float from_low = found ? __uint_as_float(sums.low[i]) : 0.0f;
      const float from_high = found ? __uint_as_float(sums.high[i]) : 0.0f;
      gradient_of_pair(gates[4 * part + i], ups[4 * part + i], from_low, from_high, weight, sum, scaled[i]);
    }
    const int column = first_column + 32 * part + lane_column;
    if (is_live) {
      const int at = 4 * part;
      *reinterpret_cast<uint4*>(hidden + column) = make_uint4(gates[at], gates[at + 1], gates[at + 2], gates[at + 3]);
      *reinterpret_cast<uint4*>(hidden + g.width + column) = make_uint4(ups[at], ups[at + 1], ups[at + 2], ups[at + 3]);
      store_eight(out, column, scaled);
    }
  }
  if (g.d_weights != nullptr) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
    if (is_live && threadIdx.x % 4 == 0) {
      g.d_weights[int64_t{row} * (g.width / kGroupOfScale) + first_column / kGroupOfScale] = sum;
    }
  }
  if (p.codes != nullptr) {
    store_eights_of_codes(p, gates, row, first_column, 2 * g.width, is_live);
    store_eights_of_codes(p, ups, row, g.width + first_column, 2 * g.width, is_live);
  }
}

// Of a lane's sums, which are in rows `row` and `row` + 8.
template <pmo_grouped_result kResult, bool kKeepsCodes>
__device__ inline void store_float8(const Float8Arguments& p, const float (&d)[128], const GroupedPlace& place, int row) {
  if constexpr (kResult == PMO_GROUPED_GRADIENT) {
#pragma unroll 1
    for (int pass = 0; pass < 4; ++pass) {
      const int of_row = row + pass / 2 * 8, column = place.column + pass % 2 * kTileColumns;
      if (column >= p.grouped.width) continue;
      const bool is_live = of_row < place.end;
      const bool found = is_live && (p.grouped.row_to_token == nullptr || __ldg(p.grouped.row_to_token + of_row) >= 0);
      const float weight = !found ? 0.0f : p.grouped.weights == nullptr ? 1.0f : __ldg(p.grouped.weights + of_row);
      store_gradient_float8<kKeepsCodes>(p, d, pass, column, of_row, is_live, found, weight);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_row = row + 8 * half;
      if constexpr (kResult == PMO_GROUPED_PLAIN) {
        store_plain<__nv_bfloat16>(p.grouped, d, place, of_row, half, 0);
        const GroupedPlace next = {place.expert, place.row, place.end, place.column + kTileColumns};
        store_plain<__nv_bfloat16>(p.grouped, d, next, of_row, half, 64);
      } else {
        store_gated_float8<kKeepsCodes>(p, d, place, of_row, half);
      }
    }
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
