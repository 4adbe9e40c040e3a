// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Parts that epilogues share: rounding and packing of accumulators, transposes in registers, sigmoid, dSwiGLU, and the plain
// epilogue of GEMMs whose accumulator rows are rows of the result (pingpong.cu, fp8.cu).
//
// wgmma layout: a lane has two rows of a 64-row block, 8 apart, and two of every eight columns. Four lanes exchange words, so
// that each stores 16 bytes of a row.
#pragma once

#include "cuda/gemm/params.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// 4 x 4 transpose of words over the four lanes of a quad: lane q receives word q of each.
__device__ inline void transpose_in_quad(uint32_t (&word)[4]) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(kAllLanes, is_odd ? word[i] : word[i + 1], 1);
    (is_odd ? word[i] : word[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(kAllLanes, is_high ? word[i] : word[i + 2], 2);
    (is_high ? word[i] : word[i + 2]) = received;
  }
}

// Two 16-bit elements in a word.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  // One instruction each; nvcc 13.0 emits three for __bfloat1622float2.
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

// 1 / (1 + e^-value) by the special-function units; subnormal results are flushed to 0.
__device__ inline float sigmoid(float value) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

__device__ inline void store_8_columns(void* row, int column, const uint32_t (&word)[4]) {
  *reinterpret_cast<uint4*>(static_cast<char*>(row) + int64_t{column} * 2) = make_uint4(word[0], word[1], word[2], word[3]);
}

// Plain epilogue of one row: out[row] = weights[row] * accumulators d[first ...], kColumns columns. `half` selects the lane's
// first or second row.
template <typename T, int kColumns = kTileColumns, int kCount>
__device__ inline void store_plain_row(const GroupedGemmParams& p, const float (&d)[kCount], const GroupedTile& tile, int row,
                                       int half, int first) {
  const bool is_live = row < tile.end;
  const float weight = p.weights != nullptr && is_live ? __ldg(p.weights + row) : 1.0f;
  T* target = static_cast<T*>(p.out) + int64_t{row} * p.width;
#pragma unroll
  for (int group = 0; group < kColumns / 32; ++group) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + (4 * group + i) * 4 + 2 * half;
      word[i] = Pair<T>::pack(d[at] * weight, d[at + 1] * weight);
    }
    transpose_in_quad(word);
    const int column = tile.column + 32 * group + threadIdx.x % 4 * 8;
    if (is_live && column < p.width) store_8_columns(target, column, word);
  }
}

// dSwiGLU of two elements: gate, up -> d_gate, d_up in place, from the output gradients `low` and `high` and the weights of their
// rows. `scaled` receives weight * act. Returns act = silu(gate) * up, rounded to T.
template <typename T>
__device__ inline float2 dswiglu_pair(uint32_t& gates, uint32_t& ups, float low, float high, float2 weight, uint32_t& scaled) {
  const float2 gate = Pair<T>::unpack(gates), up = Pair<T>::unpack(ups);
  const float sigmoid_low = sigmoid(gate.x), sigmoid_high = sigmoid(gate.y);
  const float silu_low = gate.x * sigmoid_low, silu_high = gate.y * sigmoid_high;
  const float2 act = Pair<T>::unpack(Pair<T>::pack(silu_low * up.x, silu_high * up.y));
  low *= weight.x;
  high *= weight.y;
  gates = Pair<T>::pack(low * up.x * fmaf(silu_low, 1.0f - sigmoid_low, sigmoid_low),
                        high * up.y * fmaf(silu_high, 1.0f - sigmoid_high, sigmoid_high));
  ups = Pair<T>::pack(low * silu_low, high * silu_high);
  scaled = Pair<T>::pack(act.x * weight.x, act.y * weight.y);
  return act;
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
