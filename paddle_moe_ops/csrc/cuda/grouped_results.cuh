// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How the sums of a tile of the grouped product become results; see grouped_product.cu.
//
// A lane has two rows of each of the tile's two blocks of 64 and, of every eight columns, two. Four lanes exchange words, so that each
// stores 16 bytes of a row, and both halves of a line of memory are stored one right after the other. Lines of `hidden` are read whole
// before they are overwritten: to read half a line that was just written in the other half takes several times as long.
#pragma once

#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "pmo/grouped.h"

namespace pmo {
namespace cuda {

constexpr int kTileRows = PMO_GROUPED_TILE_ROWS, kTileColumns = 128, kTileDepth = 64;
constexpr int kGatedColumns = kTileColumns / 2;

struct GroupedArguments {
  CUtensorMap rows, matrix;
  const int32_t* row_to_token;
  const float* weights;
  const int32_t *first, *stop, *tiles, *window;
  void *out, *hidden;
  float* d_weights;
  int num_experts, inner, first_column, width, to_up, first_row, column_tiles;
};

// Where a tile is: its expert, its first row, the end of the expert's rows, its first column.
struct GroupedPlace {
  int expert, row, end, column;
};

#ifdef PMO_HOPPER_CODE

// Turns four words of each of the four lanes of a quad: lane q gets word q of each.
__device__ inline void turn_in_quad(uint32_t (&word)[4]) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, is_odd ? word[i] : word[i + 1], 1);
    (is_odd ? word[i] : word[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, is_high ? word[i] : word[i + 2], 2);
    (is_high ? word[i] : word[i + 2]) = got;
  }
}

// Pairs of numbers in words.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  // An instruction for each; nvcc 13.0 takes three for __bfloat1622float2.
  static __device__ float2 unpack(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  }
};

template <>
struct Pair<__half> {
  static __device__ uint32_t pack(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  static __device__ float2 unpack(uint32_t word) { return __half22float2(reinterpret_cast<const __half2&>(word)); }
};

// 1 / (1 + e^-value) by the units for special functions; what is too small for a normal number counts as 0.
__device__ inline float sigmoid(float value) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

__device__ inline void store_eight(void* row, int column, const uint32_t (&word)[4]) {
  *reinterpret_cast<uint4*>(static_cast<char*>(row) + int64_t{column} * 2) = make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T>
__device__ inline void store_plain(const GroupedArguments& p, const float (&d)[128], const GroupedPlace& place, int row, int half,
                                   int first) {
  const bool is_live = row < place.end;
  const float weight = p.weights != nullptr && is_live ? __ldg(p.weights + row) : 1.0f;
  T* target = static_cast<T*>(p.out) + int64_t{row} * p.width;
#pragma unroll
  for (int group = 0; group < kTileColumns / 32; ++group) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + (4 * group + i) * 4 + 2 * half;
      word[i] = Pair<T>::pack(d[at] * weight, d[at + 1] * weight);
    }
    turn_in_quad(word);
    const int column = place.column + 32 * group + threadIdx.x % 4 * 8;
    if (is_live && column < p.width) store_eight(target, column, word);
  }
}

template <typename T>
__device__ inline void store_gated(const GroupedArguments& p, const float (&d)[128], const GroupedPlace& place, int row, int half,
                                   int first) {
  const bool is_live = row < place.end;
  T* target = static_cast<T*>(p.out) + int64_t{row} * p.width;
  T* hidden = static_cast<T*>(p.hidden) + int64_t{row} * 2 * p.width;
#pragma unroll
  for (int piece = 0; piece < kGatedColumns / 64; ++piece) {
    uint32_t gate[2][4], up[2][4], act[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + (8 * piece + 4 * part + i) * 4 + 2 * half;
        gate[part][i] = Pair<T>::pack(d[at], d[at + 1]);
        up[part][i] = Pair<T>::pack(d[at + 32], d[at + 33]);
        const float2 g = Pair<T>::unpack(gate[part][i]), u = Pair<T>::unpack(up[part][i]);
        act[part][i] = Pair<T>::pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
      }
      turn_in_quad(act[part]);
      if (p.hidden != nullptr) {
        turn_in_quad(gate[part]);
        turn_in_quad(up[part]);
      }
    }
    // Both halves of a line of memory together.
    const int column = place.column + 64 * piece + threadIdx.x % 4 * 8;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (is_live && column + 32 * part < p.width) store_eight(target, column + 32 * part, act[part]);
    }
    if (p.hidden == nullptr) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (is_live && column + 32 * part < p.width) store_eight(hidden, column + 32 * part, gate[part]);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (is_live && column + 32 * part < p.width) store_eight(hidden + p.width, column + 32 * part, up[part]);
    }
  }
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

// The results of two numbers from their sums, in `low` and `high`, and from the weights of their rows. Returns SwiGLU.
template <typename T>
__device__ inline float2 gradient_of_two(uint32_t& gates, uint32_t& ups, float low, float high, float2 weight, uint32_t& scaled) {
  const float2 gate = Pair<T>::unpack(gates), up = Pair<T>::unpack(ups);
  const float share_low = sigmoid(gate.x), share_high = sigmoid(gate.y);
  const float silu_low = gate.x * share_low, silu_high = gate.y * share_high;
  const float2 act = Pair<T>::unpack(Pair<T>::pack(silu_low * up.x, silu_high * up.y));
  low *= weight.x;
  high *= weight.y;
  gates = Pair<T>::pack(low * up.x * fmaf(silu_low, 1.0f - share_low, share_low),
                        high * up.y * fmaf(silu_high, 1.0f - share_high, share_high));
  ups = Pair<T>::pack(low * silu_low, high * silu_high);
  scaled = Pair<T>::pack(act.x * weight.x, act.y * weight.y);
  return act;
}

// The same of two columns of a row; the dot product is added to `sum`.
template <typename T>
__device__ inline void gradient_of_pair(uint32_t& gates, uint32_t& ups, float low, float high, float weight, float& sum,
                                        uint32_t& scaled) {
  const float2 act = gradient_of_two<T>(gates, ups, low, high, make_float2(weight, weight), scaled);
  sum = fmaf(act.y, high, fmaf(act.x, low, sum));
}

template <typename T>
__device__ inline void store_gradient(const GroupedArguments& p, const float (&d)[128], const GroupedPlace& place, int row,
                                      int first) {
  constexpr int kPieces = kTileColumns / 64;
  const int first_column = place.column + threadIdx.x % 4 * 8;
  const int64_t to_up = int64_t{p.width} * 2;
  HiddenPiece next;
  bool has_token = false;
  const auto prefetch = [&](int at) {
    const int of_row = row + at / kPieces * 8, column = first_column + at % kPieces * 64;
    if (at % kPieces == 0) has_token = of_row < place.end && (p.row_to_token == nullptr || __ldg(p.row_to_token + of_row) >= 0);
    next.load(static_cast<T*>(p.hidden) + of_row * to_up + column, to_up, has_token ? p.width - column : 0);
  };
  prefetch(0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_row = row + half * 8;
    const bool is_live = of_row < place.end, found = has_token;
    const float weight = !found ? 0.0f : p.weights == nullptr ? 1.0f : __ldg(p.weights + of_row);
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      HiddenPiece now = next;
      if (half * kPieces + piece + 1 < 2 * kPieces) prefetch(half * kPieces + piece + 1);
      asm volatile("" ::: "memory");  // one piece ahead: more have no registers
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        // Of the sums, each lane of a quad has two of every eight columns; now each gets eight that follow each other.
        uint32_t low[4], high[4], scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = first + (8 * piece + 4 * part + i) * 4 + 2 * half;
          low[i] = __float_as_uint(d[at]);
          high[i] = __float_as_uint(d[at + 1]);
        }
        turn_in_quad(low);
        turn_in_quad(high);
        uint32_t* gates = &now.gates[part].x;
        uint32_t* ups = &now.ups[part].x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float from_low = found ? __uint_as_float(low[i]) : 0.0f, from_high = found ? __uint_as_float(high[i]) : 0.0f;
          gradient_of_pair<T>(gates[i], ups[i], from_low, from_high, weight, sum, scaled[i]);
        }
        const int column = first_column + 64 * piece + 32 * part;
        if (is_live && column < p.width) {
          T* hidden = static_cast<T*>(p.hidden) + of_row * to_up + column;
          *reinterpret_cast<uint4*>(hidden) = now.gates[part];
          *reinterpret_cast<uint4*>(hidden + p.width) = now.ups[part];
          store_eight(static_cast<T*>(p.out) + int64_t{of_row} * p.width, column, scaled);
        }
      }
    }
    if (p.d_weights != nullptr) {
      sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
      if (is_live && threadIdx.x % 4 == 0) {
        p.d_weights[int64_t{of_row} * p.column_tiles + place.column / kTileColumns] = sum;
      }
    }
  }
}

// Of a lane's accumulators those from `first` on, 64 of them, in rows `row` and `row` + 8.
template <pmo_grouped_result kResult, typename T>
__device__ inline void store_block(const GroupedArguments& p, const float (&d)[128], const GroupedPlace& place, int row,
                                   int first) {
  if constexpr (kResult == PMO_GROUPED_GRADIENT) {
    store_gradient<T>(p, d, place, row, first);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kResult == PMO_GROUPED_PLAIN) store_plain<T>(p, d, place, row + 8 * half, half, first);
      if constexpr (kResult == PMO_GROUPED_GATED) store_gated<T>(p, d, place, row + 8 * half, half, first);
    }
  }
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
