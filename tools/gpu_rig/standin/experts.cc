// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMMs of pmo/grouped.h as loops, for the stand-in for a GPU, which reports compute capability 9.0. Rows of no expert
// are neither read nor written.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/checks.h"
#include "common/ids.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "pmo/grouped.h"
#include "pmo/grouped_rows.h"
#include "pmo/layer.h"

namespace {

float sigmoid(float value) { return 1.0f / (1.0f + std::exp(-value)); }

using pmo::cpu::BFloat16Rows;
using pmo::cpu::Float16Rows;

template <typename Rows>
struct Product {
  const pmo_grouped_product_params& p;

  static float load(const void* array, int64_t place) { return Rows::load(static_cast<const uint16_t*>(array)[place]); }
  static void store(void* array, int64_t place, float value) { static_cast<uint16_t*>(array)[place] = Rows::store(value); }
  static float rounded(float value) { return Rows::load(Rows::store(value)); }

  float sum(int64_t expert, int64_t row, int64_t column) const {
    float sum = 0.0f;
    const int64_t source = p.gathers != 0 ? p.row_to_token[row] : row - p.first_row;
    if (source < 0 || source >= p.num_sources) return sum;
    for (int64_t i = 0; i < p.inner; ++i) {
      const int64_t place = p.transpose ? (expert * p.outer + column) * p.inner + i : (expert * p.inner + i) * p.outer + column;
      sum += load(p.x, source * p.x_row_stride + i) * load(p.matrix, place);
    }
    return sum;
  }

  float weight_of(int64_t row) const {
    if (p.weights == nullptr || p.slot_to_row == nullptr) return p.weights == nullptr ? 1.0f : p.weights[row];
    const int64_t first = p.row_to_token[row] * p.topk;
    for (int64_t slot = first; slot >= 0 && slot < first + p.topk; ++slot) {
      if (p.slot_to_row[slot] == row) return p.weights[slot];
    }
    return 0.0f;
  }

  void plain(int64_t expert, int64_t row) const {
    const float weight = weight_of(row);
    for (int64_t i = 0; i < p.width; ++i) store(p.out, row * p.width + i, weight * sum(expert, row, p.first_column + i));
  }

  void gated(int64_t expert, int64_t row) const {
    for (int64_t i = 0; i < p.width; ++i) {
      const float gate = rounded(sum(expert, row, i)), up = rounded(sum(expert, row, p.width + i));
      if (p.hidden != nullptr) {
        store(p.hidden, row * 2 * p.width + i, gate);
        store(p.hidden, row * 2 * p.width + p.width + i, up);
      }
      store(p.out, row * p.width + i, gate * sigmoid(gate) * up);
    }
  }

  void gradient(int64_t expert, int64_t row) const {
    const int64_t tiles = (p.width + 127) / 128;
    const bool is_live = p.row_to_token == nullptr || p.row_to_token[row] >= 0;
    const float weight = !is_live ? 0.0f : p.weights == nullptr ? 1.0f : p.weights[row];
    std::vector<float> parts(static_cast<size_t>(tiles), 0.0f);
    for (int64_t i = 0; i < p.width; ++i) {
      const int64_t at_gate = row * 2 * p.width + i, at_up = at_gate + p.width;
      const float gate = is_live ? load(p.hidden, at_gate) : 0.0f, up = is_live ? load(p.hidden, at_up) : 0.0f;
      const float d_scaled = is_live ? rounded(sum(expert, row, i)) : 0.0f, share = sigmoid(gate), silu = gate * share;
      const float act = rounded(silu * up);
      parts[static_cast<size_t>(i / 128)] += act * d_scaled;
      store(p.hidden, at_gate, d_scaled * weight * up * (share + silu * (1.0f - share)));
      store(p.hidden, at_up, d_scaled * weight * silu);
      store(p.out, row * p.width + i, act * weight);
    }
    if (p.d_weights != nullptr) std::copy(parts.begin(), parts.end(), p.d_weights + row * tiles);
  }

  // All rows of an expert follow each other.
  int run_few_rows() const {
    if (p.matrix_scales != nullptr) return pmo::fail(PMO_INTERNAL, "the stand-in for a GPU reads no codes of few rows");
    int64_t row = 0;
    for (int64_t expert = 0; expert < p.num_experts; ++expert) {
      if (p.offsets != nullptr) row = pmo::id_at(p.offsets, p.offsets_kind, expert);
      const int64_t end = row + pmo::id_at(p.sizes, p.sizes_kind, expert);
      for (; row < end; ++row) p.result == PMO_GROUPED_PLAIN ? plain(expert, row) : gated(expert, row);
    }
    return PMO_OK;
  }

  int run() const {
    if (p.tile_rows == PMO_GROUPED_FEW_ROWS) return run_few_rows();
    for (int64_t expert = 0; expert < p.num_experts; ++expert) {
      for (int32_t tile = std::max(p.tiles[expert], p.window[0]); tile < std::min(p.tiles[expert + 1], p.window[1]); ++tile) {
        const int64_t begin = p.first[expert] + int64_t{tile - p.tiles[expert]} * p.tile_rows;
        for (int64_t row = begin; row < std::min<int64_t>(begin + p.tile_rows, p.stop[expert]); ++row) {
          if (p.result == PMO_GROUPED_PLAIN) plain(expert, row);
          if (p.result == PMO_GROUPED_GATED) gated(expert, row);
          if (p.result == PMO_GROUPED_GRADIENT) gradient(expert, row);
        }
      }
    }
    return PMO_OK;
  }
};

template <typename Rows>
int outer(const pmo_grouped_outer_params& p) {
  const auto *left = static_cast<const uint16_t*>(p.p), *right = static_cast<const uint16_t*>(p.q);
  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    for (int64_t i = 0; i < p.p_columns; ++i) {
      for (int64_t j = 0; j < p.q_columns; ++j) {
        float sum = 0.0f;
        for (int64_t row = p.first[expert]; row < p.stop[expert]; ++row) {
          const int64_t source = p.gathered == PMO_GROUPED_GATHERS_NONE ? row : p.row_to_token[row];
          if (p.gathered != PMO_GROUPED_GATHERS_NONE && (source < 0 || source >= p.num_sources)) continue;
          const int64_t of_p = p.gathered == PMO_GROUPED_GATHERS_P ? source : row;
          const int64_t of_q = p.gathered == PMO_GROUPED_GATHERS_Q ? source : row;
          sum += Rows::load(left[of_p * p.p_row_stride + i]) * Rows::load(right[of_q * p.q_row_stride + j]);
        }
        const int64_t place = (expert * p.out_rows + p.first_p + i) * p.out_columns + p.first_q + j;
        auto* const to = static_cast<uint16_t*>(p.out) + place;
        if (p.accumulation == PMO_GROUPED_ADDS_FLOAT32) {
          static_cast<float*>(p.out)[place] += sum;
        } else {
          *to = Rows::store(p.accumulation == PMO_GROUPED_ADDS ? Rows::load(*to) + sum : sum);
        }
      }
    }
  }
  return PMO_OK;
}

}  // namespace

extern "C" {

int32_t pmo_grouped_product_cuda_is_built(void) { return 1; }
int32_t pmo_grouped_capability_cuda(void) { return 90; }
void pmo_gpu_facts_cuda(int32_t* num_sms, int32_t* memory_gbps) {
  *num_sms = 132;
  *memory_gbps = 3352;
}

int pmo_grouped_product_cuda(const pmo_grouped_product_params* params, void*) {
  if (const int status = pmo::check_grouped_product(*params)) return status;
  if (params->num_rows == 0) return PMO_OK;
  return params->dtype == PMO_BFLOAT16 ? Product<BFloat16Rows>{*params}.run() : Product<Float16Rows>{*params}.run();
}

int pmo_grouped_outer_cuda(const pmo_grouped_outer_params* params, void*) {
  if (const int status = pmo::check_grouped_outer(*params)) return status;
  return params->dtype == PMO_BFLOAT16 ? outer<BFloat16Rows>(*params) : outer<Float16Rows>(*params);
}

}  // extern "C"
