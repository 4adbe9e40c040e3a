// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// paddle_quantize on the CPU, in tiles of 128 x 128 elements, as float32 in thread-local memory. Threads own rows of tiles. Bytes
// moved: M * N * itemsize, and M * N for each form.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/paddle_float8.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

#include "cpu/float_bits.h"

#include "cpu/float8_codes.h"

constexpr int64_t kSide = kGroupColumns;

struct E4M3 {
  static int32_t code(float value) { return to_e4m3(value); }
};

struct E5M2 {
  static int32_t code(float value) { return to_e5m2(value); }
};

// A part of x: elements [row + i, column + j], `rows` x `columns` of them, and 0 beyond.
struct Tile {
  int64_t row, column, rows, columns;
  std::vector<float> values = std::vector<float>(kSide * kSide);

  template <typename Rows>
  void load(const typename Rows::Element* x, int64_t stride) {
    std::fill(values.begin(), values.end(), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      const auto* from = x + (row + i) * stride + column;
      for (int64_t j = 0; j < columns; ++j) values[i * kSide + j] = Rows::load(from[j]);
    }
  }
};

// Largest magnitude of `count` values at distances of `step`, NaN left out.
float amax_of(const float* values, int64_t count, int64_t step) {
  float amax = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i * step]);
    amax = magnitude > amax ? magnitude : amax;  // never for NaN
  }
  return amax;
}

// Codes and scales of a tile in one form of the result, whose lines are `stride` codes apart.
template <typename Format>
void write_form(const PaddleRule& rule, bool blocks, const Tile& tile, bool transposed, uint8_t* codes, int64_t stride,
                const PaddleScales& scales) {
  const int64_t height = transposed ? tile.columns : tile.rows, width = transposed ? tile.rows : tile.columns;
  const int64_t first = transposed ? tile.column : tile.row, start = transposed ? tile.row : tile.column;
  const int64_t line_step = transposed ? 1 : kSide, item_step = transposed ? kSide : 1;
  float multiplier = blocks ? rule.multiplier(amax_of(tile.values.data(), kSide * kSide, 1)) : 0.0f;
  if (blocks && !scales.packed) scales.store(first / kSide, start / kSide, 1.0f / multiplier);
  for (int64_t line = 0; line < height; ++line) {
    const float* values = tile.values.data() + line * line_step;
    if (!blocks) multiplier = rule.multiplier(amax_of(values, width, item_step));
    if (!blocks || scales.packed) scales.store(first + line, start / kSide, 1.0f / multiplier);
    uint8_t* to = codes + (first + line) * stride + start;
    for (int64_t i = 0; i < width; ++i) to[i] = static_cast<uint8_t>(Format::code(values[i * item_step] * multiplier));
  }
}

template <typename Rows, typename Format>
void quantize_tiles(const pmo_paddle_quantize_params& p, int64_t begin, int64_t end) {
  const PaddleRule rule = paddle_rule(p);
  const PaddleScales straight = paddle_scales(p, p.scales, p.num_rows, p.num_columns);
  const PaddleScales transposed = paddle_scales(p, p.transposed_scales, p.num_columns, p.num_rows);
  Tile tile;
  for (tile.row = begin * kSide; tile.row < std::min(end * kSide, p.num_rows); tile.row += kSide) {
    tile.rows = std::min(p.num_rows - tile.row, kSide);
    for (tile.column = 0; tile.column < p.num_columns; tile.column += kSide) {
      tile.columns = std::min(p.num_columns - tile.column, kSide);
      tile.load<Rows>(static_cast<const typename Rows::Element*>(p.x), p.num_columns);
      if (p.codes != nullptr) {
        write_form<Format>(rule, p.blocks != 0, tile, false, static_cast<uint8_t*>(p.codes), p.num_columns, straight);
      }
      if (p.transposed_codes != nullptr) {
        auto* codes = static_cast<uint8_t*>(p.transposed_codes);
        write_form<Format>(rule, p.blocks != 0, tile, true, codes, p.num_rows, transposed);
      }
    }
  }
}

int quantize(const pmo_paddle_quantize_params& p) {
  if (const int status = check_paddle_quantize(p)) return status;
  if (p.num_rows == 0 || p.num_columns == 0) return PMO_OK;
  const int64_t bytes = p.num_rows * p.num_columns * (dtype_size(p.dtype) + 2);
  return with_rows(p.dtype, [&](auto rows) {
    using Rows = decltype(rows);
    const auto run = p.codes_dtype == PMO_FLOAT8_E5M2 ? quantize_tiles<Rows, E5M2> : quantize_tiles<Rows, E4M3>;
    parallel_ranges(divide_up(p.num_rows, kSide), bytes, p.num_threads, [&](int64_t begin, int64_t end) { run(p, begin, end); });
    return static_cast<int>(PMO_OK);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_paddle_quantize_cpu(const pmo_paddle_quantize_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::quantize);
}
