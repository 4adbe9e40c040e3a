// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Fake quantisation by 128 x 128 blocks on the CPU. Each row of a block is quantised with the block's amax as `amax_min`, then
// dequantised. Threads own rows of blocks. Bytes moved: E * A * B * (2 itemsize + 4).
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/checks.h"
#include "common/dtypes.h"
#include "common/scales.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cpu {
namespace {

constexpr int64_t kSide = kGroupColumns;

// The part of a matrix that shares a scale.
struct Block {
  int64_t place, rows, columns;  // place: index of its first element
};

template <typename Rows>
void fake_quantize_block(const pmo_near_blocks_params& p, const Block& block) {
  const auto* x = static_cast<const typename Rows::Element*>(p.x) + block.place;
  float amax = p.amax_min;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t i = 0; i < block.columns; ++i) {
      const float magnitude = std::fabs(Rows::load(x[row * p.num_columns + i]));
      amax = magnitude > amax ? magnitude : amax;  // never for NaN
    }
  }
  amax = std::min(amax, FLT_MAX);
  const auto quantize = row_kernels(p.dtype).quantize;
  const auto dequantize = row_kernels(PMO_FLOAT32).dequantize;
  for (int64_t row = 0; row < block.rows; ++row) {
    uint8_t codes[kSide];
    float scale;
    quantize(x + row * p.num_columns, block.columns, amax, false, codes, &scale);
    dequantize(codes, &scale, block.columns, false, p.out + block.place + row * p.num_columns);
  }
}

int fake_quantize_blocks(const pmo_near_blocks_params& p) {
  if (const int status = check_near_blocks(p)) return status;
  const int64_t heights = divide_up(p.num_rows, kSide), size = p.num_rows * p.num_columns;
  const int64_t bytes = p.num_matrices * size * (2 * dtype_size(p.dtype) + int64_t{sizeof(float)});
  return with_rows(p.dtype, [&](auto rows) {
    parallel_ranges(p.num_matrices * heights, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i % heights * kSide, height = std::min(p.num_rows - row, kSide);
        for (int64_t column = 0; column < p.num_columns; column += kSide) {
          const int64_t place = i / heights * size + row * p.num_columns + column;
          fake_quantize_block<decltype(rows)>(p, {place, height, std::min(p.num_columns - column, kSide)});
        }
      }
    });
    return static_cast<int>(PMO_OK);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_near_blocks_cpu(const pmo_near_blocks_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::fake_quantize_blocks);
}
