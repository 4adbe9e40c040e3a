// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Weighted SwiGLU with float8 codes, and its gradients, on the CPU: threads own ranges of rows (pmo/paddle_float8.h).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/checks.h"
#include "common/paddle_float8.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

#include "cpu/float8_codes.h"

using Rows = BFloat16Rows;

void quantize_row(const pmo_paddle_swiglu_params& p, const PaddleRule& rule, int64_t row) {
  const auto* gates = static_cast<const uint16_t*>(p.x) + row * 2 * p.width;
  const float prob = p.probs == nullptr ? 1.0f : p.probs[row];
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * p.width;
  float* scales = p.scales + row * divide_up(p.width, kGroupColumns);
  for (int64_t first = 0; first < p.width; first += kGroupColumns) {
    const int64_t count = std::min(p.width - first, kGroupColumns);
    float values[kGroupColumns], amax = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      values[i] = weighted_swiglu(Rows::load(gates[first + i]), Rows::load(gates[p.width + first + i]), prob);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float magnitude = std::fabs(values[i]);
      amax = magnitude > amax ? magnitude : amax;  // never for NaN
    }
    const float multiplier = rule.multiplier(amax);
    for (int64_t i = 0; i < count; ++i) codes[first + i] = static_cast<uint8_t>(to_e4m3(values[i] * multiplier));
    scales[first / kGroupColumns] = 1.0f / multiplier;
  }
}

int quantize(const pmo_paddle_swiglu_params& p) {
  if (const int status = check_paddle_swiglu(p)) return status;
  if (p.num_rows == 0 || p.width == 0) return PMO_OK;
  const PaddleRule rule = paddle_rule(p);
  parallel_ranges(p.num_rows, p.num_rows * p.width * 5, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row(p, rule, row);
  });
  return PMO_OK;
}

void differentiate_row(const pmo_paddle_swiglu_backward_params& p, int64_t row) {
  const auto* gates = static_cast<const uint16_t*>(p.x) + row * 2 * p.width;
  const auto* d_out = static_cast<const uint16_t*>(p.d_out) + row * p.width;
  auto* d_gates = static_cast<uint16_t*>(p.d_x) + row * 2 * p.width;
  auto* out = static_cast<uint16_t*>(p.out) + row * p.width;
  std::array<float, kSwigluPartials> partial = {};
  for (int64_t first = 0; first < p.width; first += kSwigluColumns) {
    const int64_t end = std::min(first + kSwigluColumns, p.width);
    float& sum = partial[first / kSwigluColumns % kSwigluPartials];
    for (int64_t i = first; i < end; ++i) {
      const SwigluGradient found(Rows::load(gates[i]), Rows::load(gates[p.width + i]), Rows::load(d_out[i]), p.probs[row]);
      d_gates[i] = Rows::store(found.d_gate);
      d_gates[p.width + i] = Rows::store(found.d_up);
      out[i] = Rows::store(found.out);
      sum += found.term;
    }
  }
  for (int half = kSwigluPartials / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  p.d_probs[row] = partial[0];
}

int differentiate(const pmo_paddle_swiglu_backward_params& p) {
  if (const int status = check_paddle_swiglu_backward(p)) return status;
  parallel_ranges(p.num_rows, p.num_rows * p.width * 10, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) differentiate_row(p, row);
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_paddle_swiglu_cpu(const pmo_paddle_swiglu_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::quantize);
}

extern "C" int pmo_paddle_swiglu_backward_cpu(const pmo_paddle_swiglu_backward_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::differentiate);
}
