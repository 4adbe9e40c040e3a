// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The memory layout of the scales of pmo_quantize_*, and their minimum.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"
#include "pmo/quantize.h"

namespace pmo {

constexpr int64_t kGroupColumns = PMO_QUANTIZE_GROUP;
constexpr int64_t kPackedScales = 4;     // in a word, with ue8m0
constexpr int64_t kColumnAlignment = 4;  // rows of a column-major layout are rounded up to a multiple
constexpr float kAmaxMin = 0x1p-100f;    // least amax_min that kernels accept; layers take it, since gradients may be small

// Counts and steps in words of 4 bytes: word w of row r is at r * row_step + w * word_step.
struct ScaleLayout {
  int64_t groups;  // of a row
  int64_t words;   // of a row
  int64_t row_step;
  int64_t word_step;
  int64_t rows;  // including the unused ones at the end

  template <typename Params>
  explicit ScaleLayout(const Params& p) : groups(divide_up(p.hidden, kGroupColumns)) {
    words = p.ue8m0 != 0 ? divide_up(groups, kPackedScales) : groups;
    const bool by_column = p.scale_layout == PMO_SCALES_BY_COLUMN;
    rows = by_column ? round_up(p.num_rows, kColumnAlignment) : p.num_rows;
    row_step = by_column ? 1 : words;
    word_step = by_column ? rows : 1;
  }
};

// True if rows follow a map; without one, row t is token t.
inline bool has_row_map(const pmo_quantize_params& p) { return p.slot_to_row != nullptr || p.num_tokens * p.topk == 0; }

}  // namespace pmo
