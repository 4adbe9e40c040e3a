// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of the float8 product become results; see grouped_float8.cu.
//
// A lane has of each of two rows, and of every eight columns, two. The 128 columns that share a scale are those of half a tile, so the
// four lanes that have a row find its scale with two exchanges. What is rounded to bfloat16 is quantised from there.
#pragma once

#include "cuda/float8.cuh"
#include "cuda/grouped_results.cuh"

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
};

#ifdef PMO_HOPPER_CODE

using Bfloat16Pair = Pair<__nv_bfloat16>;

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
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  return float8_scale(amax, amax_min);
}

__device__ inline uint32_t codes_of_pair(uint32_t word, float inverse) {
  const float2 both = Bfloat16Pair::unpack(word);
  return float8_pair(both.x, both.y, inverse);
}

// Codes and the scale of 128 numbers of a row. Word i of lane q of four has columns 8 i + 2 q.
__device__ inline void store_interleaved_codes(const Float8Arguments& p, const uint32_t (&word)[16], int row, int column,
                                               int columns, bool is_live) {
  const float scale = scale_in_quad(word, p.amax_min), inverse = __frcp_rn(scale);
  const int lane = threadIdx.x % 4;
  uint8_t* target = p.codes + int64_t{row} * columns + column + 16 * lane;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * piece + 2 * i;
      pairs[i] = codes_of_pair(word[at], inverse) | codes_of_pair(word[at + 1], inverse) << 16;
    }
    turn_in_quad(pairs);  // low halves: columns 16 q + 2 i; high halves: those 8 further
    const uint4 codes = {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
                         __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
    if (is_live) *reinterpret_cast<uint4*>(target + 64 * piece) = codes;
  }
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

// Gates are in the first half of the sums, what they gate in the second.
__device__ inline void store_gated_float8(const Float8Arguments& p, const float (&d)[128], const GroupedPlace& place, int row,
                                          int half) {
  const bool is_live = row < place.end;
  const int width = p.grouped.width;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(p.grouped.hidden) + int64_t{row} * 2 * width;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.grouped.out) + int64_t{row} * width;
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
    if (p.grouped.hidden != nullptr) {
      store_64(hidden, place.column + 64 * piece, gate, is_live);
      store_64(hidden + width, place.column + 64 * piece, up, is_live);
    }
    if (p.grouped.out != nullptr) store_64(out, place.column + 64 * piece, act + 8 * piece, is_live);
  }
  if (p.codes != nullptr) store_interleaved_codes(p, act, row, place.column, width, is_live);
}

// As in grouped_results.cuh, for 128 columns of one row; their new hidden numbers are kept until their scale is known.
template <int kFirst>
__device__ inline void store_gradient_float8(const Float8Arguments& p, const float (&d)[128], int first_column, int row, int half,
                                             bool is_live, bool found, float weight) {
  const GroupedArguments& g = p.grouped;
  const int lane_column = threadIdx.x % 4 * 8;
  const int64_t to_up = int64_t{g.width} * 2;
  __nv_bfloat16* hidden = static_cast<__nv_bfloat16*>(g.hidden) + row * to_up;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(g.out) + int64_t{row} * g.width;
  uint32_t gates[16], ups[16];
  float sum = 0.0f;
  HiddenPiece pieces[2];
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const int column = first_column + 64 * piece + lane_column;
    pieces[piece].load(hidden + column, to_up, found ? g.width - column : 0);
  }
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    // Of the sums, each lane of a quad has two of every eight columns; now each gets eight that follow each other.
    uint32_t low[4], high[4], scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = kFirst + (4 * part + i) * 4 + 2 * half;
      low[i] = __float_as_uint(d[at]);
      high[i] = __float_as_uint(d[at + 1]);
    }
    turn_in_quad(low);
    turn_in_quad(high);
    const uint4 gate = pieces[part / 2].gates[part % 2], up = pieces[part / 2].ups[part % 2];
    const uint32_t gate_words[4] = {gate.x, gate.y, gate.z, gate.w}, up_words[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float from_low = found ? __uint_as_float(low[i]) : 0.0f, from_high = found ? __uint_as_float(high[i]) : 0.0f;
      gates[4 * part + i] = gate_words[i];
      ups[4 * part + i] = up_words[i];
      gradient_of_pair<__nv_bfloat16>(gates[4 * part + i], ups[4 * part + i], from_low, from_high, weight, sum, scaled[i]);
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
template <pmo_grouped_result kResult>
__device__ inline void store_float8(const Float8Arguments& p, const float (&d)[128], const GroupedPlace& place, int row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_row = row + 8 * half;
    if constexpr (kResult == PMO_GROUPED_PLAIN) {
      store_plain<__nv_bfloat16>(p.grouped, d, place, of_row, half, 0);
      const GroupedPlace next = {place.expert, place.row, place.end, place.column + kTileColumns};
      store_plain<__nv_bfloat16>(p.grouped, d, next, of_row, half, 64);
    } else if constexpr (kResult == PMO_GROUPED_GATED) {
      store_gated_float8(p, d, place, of_row, half);
    } else {
      const bool is_live = of_row < place.end;
      const bool found = is_live && (p.grouped.row_to_token == nullptr || __ldg(p.grouped.row_to_token + of_row) >= 0);
      const float weight = !found ? 0.0f : p.grouped.weights == nullptr ? 1.0f : __ldg(p.grouped.weights + of_row);
      store_gradient_float8<0>(p, d, place.column, of_row, half, is_live, found, weight);
      if (place.column + kTileColumns < p.grouped.width) {
        store_gradient_float8<64>(p, d, place.column + kTileColumns, of_row, half, is_live, found, weight);
      }
    }
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
