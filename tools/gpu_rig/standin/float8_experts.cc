// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped float8 GEMMs of pmo/grouped_float8.h as loops, for the stand-in for a GPU. Rows of no expert are neither read nor
// written.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/arithmetic.h"
#include "common/checks.h"
#include "cpu/float_rows.h"
#include "cpu/row_kernels.h"
#include "pmo/grouped_float8.h"

namespace {

using pmo::cpu::BFloat16Rows;

constexpr int64_t kGroup = 128;

int64_t groups_in(int64_t size) { return pmo::divide_up(size, kGroup); }

// The value of a code, decoded by the CPU core.
float value_of(uint8_t code) {
  const float one = 1.0f;
  float value;
  pmo::cpu::row_kernels(PMO_FLOAT32).dequantize(&code, &one, 1, false, &value);
  return value;
}

const std::vector<float>& values() {
  static const std::vector<float> all = [] {
    std::vector<float> made;
    for (int code = 0; code < 256; ++code) made.push_back(value_of(static_cast<uint8_t>(code)));
    return made;
  }();
  return all;
}

struct Product {
  const pmo_grouped_float8_params& p;

  static float load(const void* array, int64_t place) { return BFloat16Rows::load(static_cast<const uint16_t*>(array)[place]); }
  static void store(void* array, int64_t place, float value) {
    static_cast<uint16_t*>(array)[place] = BFloat16Rows::store(value);
  }
  static float rounded(float value) { return BFloat16Rows::load(BFloat16Rows::store(value)); }

  float sum(int64_t expert, int64_t row, int64_t column) const {
    const int64_t depth = groups_in(p.inner), source = row - p.first_row;
    const auto* x = static_cast<const uint8_t*>(p.x) + source * p.inner;
    const auto* matrix = static_cast<const uint8_t*>(p.matrix) + (expert * p.outer + column) * p.inner;
    const float* x_scales = p.x_scales + source * depth;
    const float* matrix_scales = p.matrix_scales + (expert * groups_in(p.outer) + column / kGroup) * depth;
    float sum = 0.0f;
    for (int64_t group = 0; group < depth; ++group) {
      float part = 0.0f;
      for (int64_t i = group * kGroup; i < std::min(p.inner, (group + 1) * kGroup); ++i)
        part += values()[x[i]] * values()[matrix[i]];
      sum = std::fma(part, x_scales[group] * matrix_scales[group], sum);
    }
    return sum;
  }

  // Stores codes and scales of a row; the number of columns is a multiple of 128.
  void quantize(const std::vector<uint16_t>& numbers, int64_t row, void* codes, float* scales) const {
    if (codes == nullptr) return;
    const auto columns = static_cast<int64_t>(numbers.size());
    pmo::cpu::row_kernels(PMO_BFLOAT16)
        .quantize(numbers.data(), columns, p.amax_min, false, static_cast<uint8_t*>(codes) + row * columns,
                  scales + row * groups_in(columns));
  }

  void plain(int64_t expert, int64_t row) const {
    const float weight = p.weights == nullptr ? 1.0f : p.weights[row];
    for (int64_t i = 0; i < p.width; ++i) store(p.out, row * p.width + i, weight * sum(expert, row, p.first_column + i));
  }

  void gated(int64_t expert, int64_t row) const {
    std::vector<uint16_t> act(static_cast<size_t>(p.width)), hidden(static_cast<size_t>(2 * p.width));
    for (int64_t i = 0; i < p.width; ++i) {
      const float gate = rounded(sum(expert, row, i)), up = rounded(sum(expert, row, p.width + i));
      store(hidden.data(), i, gate);
      store(hidden.data(), p.width + i, up);
      store(act.data(), i, gate / (1.0f + std::exp(-gate)) * up);
      if (p.out != nullptr) static_cast<uint16_t*>(p.out)[row * p.width + i] = act[static_cast<size_t>(i)];
    }
    if (p.hidden != nullptr) std::copy(hidden.begin(), hidden.end(), static_cast<uint16_t*>(p.hidden) + row * 2 * p.width);
    quantize(act, row, p.codes, p.scales);
    quantize(hidden, row, p.hidden_codes, p.hidden_scales);
  }

  void gradient(int64_t expert, int64_t row) const {
    const int64_t tiles = p.width / kGroup;
    const bool is_live = p.row_to_token == nullptr || p.row_to_token[row] >= 0;
    const float weight = !is_live ? 0.0f : p.weights == nullptr ? 1.0f : p.weights[row];
    std::vector<float> parts(static_cast<size_t>(tiles), 0.0f);
    auto* hidden = static_cast<uint16_t*>(p.hidden) + row * 2 * p.width;
    if (p.hidden_codes != nullptr) {
      for (int64_t i = 0; i < 2 * p.width; ++i) {
        const float scale = p.hidden_scales[row * groups_in(2 * p.width) + i / kGroup];
        store(hidden, i, values()[static_cast<const uint8_t*>(p.hidden_codes)[row * 2 * p.width + i]] * scale);
      }
    }
    for (int64_t i = 0; i < p.width; ++i) {
      const float gate = is_live ? load(hidden, i) : 0.0f, up = is_live ? load(hidden, p.width + i) : 0.0f;
      const float d_scaled = is_live ? sum(expert, row, i) : 0.0f, share = 1.0f / (1.0f + std::exp(-gate)), silu = gate * share;
      const float act = rounded(silu * up);
      parts[static_cast<size_t>(i / kGroup)] += act * d_scaled;
      store(hidden, i, d_scaled * weight * up * (share + silu * (1.0f - share)));
      store(hidden, p.width + i, d_scaled * weight * silu);
      store(p.out, row * p.width + i, act * weight);
    }
    if (p.d_weights != nullptr) std::copy(parts.begin(), parts.end(), p.d_weights + row * tiles);
    quantize({hidden, hidden + 2 * p.width}, row, p.codes, p.scales);
  }

  int run() const {
    for (int64_t expert = 0; expert < p.num_experts; ++expert) {
      for (int32_t tile = std::max(p.tiles[expert], p.window[0]); tile < std::min(p.tiles[expert + 1], p.window[1]); ++tile) {
        const int64_t begin = p.first[expert] + int64_t{tile - p.tiles[expert]} * PMO_GROUPED_TILE_ROWS;
        for (int64_t row = begin; row < std::min<int64_t>(begin + PMO_GROUPED_TILE_ROWS, p.stop[expert]); ++row) {
          if (p.result == PMO_GROUPED_PLAIN) plain(expert, row);
          if (p.result == PMO_GROUPED_GATED) gated(expert, row);
          if (p.result == PMO_GROUPED_GRADIENT) gradient(expert, row);
        }
      }
    }
    return PMO_OK;
  }
};

// The float32 sum of a wgrad, in ascending order of row blocks.
float wgrad_sum(const pmo_grouped_outer_float8_params& p, int64_t expert, int64_t column_a, int64_t column_b) {
  float sum = 0.0f;
  for (int64_t block = p.tiles[expert]; block < std::min<int64_t>(p.tiles[expert + 1], p.num_blocks); ++block) {
    const auto* const a = static_cast<const uint8_t*>(p.a) + (block * p.a_columns + column_a) * kGroup;
    const auto* const b = static_cast<const uint8_t*>(p.b) + (block * p.b_columns + column_b) * kGroup;
    float part = 0.0f;
    for (int64_t row = 0; row < kGroup; ++row) part += values()[a[row]] * values()[b[row]];
    sum += part * (p.a_scales[block * p.a_columns + column_a] * p.b_scales[block * groups_in(p.b_columns) + column_b / kGroup]);
  }
  return sum;
}

int wgrad(const pmo_grouped_outer_float8_params& p) {
  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    for (int64_t column_a = 0; column_a < p.a_columns; ++column_a) {
      for (int64_t column_b = 0; column_b < p.b_columns; ++column_b) {
        const int64_t row = p.first_row + (p.transpose ? column_b : column_a);
        const int64_t place = (expert * p.out_rows + row) * p.out_columns + p.first_column + (p.transpose ? column_a : column_b);
        const float sum = wgrad_sum(p, expert, column_a, column_b);
        if (p.accumulation == PMO_GROUPED_ADDS_FLOAT32) {
          static_cast<float*>(p.out)[place] += sum;
        } else {
          auto* const out = static_cast<uint16_t*>(p.out) + place;
          *out = BFloat16Rows::store(p.accumulation == PMO_GROUPED_ADDS ? BFloat16Rows::load(*out) + sum : sum);
        }
      }
    }
  }
  return PMO_OK;
}

}  // namespace

extern "C" {

int pmo_grouped_outer_float8_cuda(const pmo_grouped_outer_float8_params* params, void*) {
  if (const int status = pmo::check_grouped_outer_float8(*params)) return status;
  return wgrad(*params);
}

int pmo_grouped_float8_cuda(const pmo_grouped_float8_params* params, void*) {
  if (const int status = pmo::check_grouped_float8(*params)) return status;
  return params->num_rows == 0 ? static_cast<int>(PMO_OK) : Product{*params}.run();
}

}  // extern "C"
