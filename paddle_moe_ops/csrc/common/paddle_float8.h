// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The rule, the scale layouts and the SwiGLU arithmetic of pmo/paddle_float8.h, with the same bits on hosts and GPUs.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/scales.h"
#include "common/scoring.h"
#include "pmo/paddle_float8.h"

namespace pmo {

constexpr float kE4M3Largest = 448.0f, kE5M2Largest = 57344.0f;

struct PaddleRule {
  float largest, epsilon, overflow;
  bool pow2;

  PMO_ANYWHERE float multiplier(float amax) const {
    amax = amax < epsilon ? epsilon : amax;
    if (!(amax > 0.0f)) return 1.0f;
    float found = largest / amax;
    found = found > FLT_MAX ? overflow : found;
    return pow2 ? float_of(bits_of(found) & static_cast<uint32_t>(kInfinityBits)) : found;
  }
};

// The scales of a form: `lines` rows of codes or of blocks, with `groups` scales each.
struct PaddleScales {
  void* data;
  int64_t lines, groups;
  bool packed, by_column;

  // Words of a line.
  PMO_ANYWHERE int64_t words() const { return packed ? divide_up(groups, kPackedScales) : groups; }

  // Stores the scale of a group; the last group of a packed line clears the unused bytes of its word.
  PMO_ANYWHERE void store(int64_t line, int64_t group, float scale) const {
    if (!packed) {
      static_cast<float*>(data)[place(line, group)] = scale;
      return;
    }
    uint8_t* bytes = static_cast<uint8_t*>(data) + place(line, group / kPackedScales) * kPackedScales;
    bytes[group % kPackedScales] = static_cast<uint8_t>(bits_of(scale) >> 23);
    if (group + 1 < groups) return;
    for (int64_t unused = group % kPackedScales + 1; unused < kPackedScales; ++unused) bytes[unused] = 0;
  }

 private:
  PMO_ANYWHERE int64_t place(int64_t line, int64_t word) const { return by_column ? word * lines + line : line * words() + word; }
};

// The scales of a form whose codes have `rows` rows of `columns`.
inline PaddleScales paddle_scales(const pmo_paddle_quantize_params& p, void* data, int64_t rows, int64_t columns) {
  const bool packed = p.ue8m0 != 0, per_block = p.blocks != 0 && !packed;
  return {data, per_block ? divide_up(rows, kGroupColumns) : rows, divide_up(columns, kGroupColumns), packed,
          p.scales_by_column != 0};
}

inline PaddleRule paddle_rule(const pmo_paddle_quantize_params& p) {
  const float largest = p.codes_dtype == PMO_FLOAT8_E5M2 ? kE5M2Largest : kE4M3Largest;
  return {largest, p.epsilon, p.overflow, p.pow2 != 0};
}

inline PaddleRule paddle_rule(const pmo_paddle_swiglu_params& p) { return {kE4M3Largest, 0.0f, FLT_MAX, p.pow2 != 0}; }

PMO_ANYWHERE inline float weighted_swiglu(float gate, float up, float prob) { return gate * sigmoid(gate) * up * prob; }

// The gradients of an element of SwiGLU times a probability, its output, and the term of the probability's gradient.
struct SwigluGradient {
  float d_gate, d_up, out, term;

  PMO_ANYWHERE SwigluGradient(float gate, float up, float d_out, float prob) {
    const float share = sigmoid(gate), silu = gate * share, product = silu * up, weighted = d_out * prob;
    d_gate = weighted * up * (share * (1.0f + gate - silu));
    d_up = weighted * silu;
    out = product * prob;
    term = d_out * product;
  }
};

constexpr int kSwigluColumns = 8;  // neighbouring columns that are added to one partial sum
constexpr int kSwigluPartials = 128;

}  // namespace pmo
