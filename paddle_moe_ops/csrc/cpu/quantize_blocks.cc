// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Block quantisation of matrices on the CPU. Each row of a 128 x 128 block is quantised with the block's amax as `amax_min`.
// Threads own rows of blocks. Bytes moved: E * A * B * (2 itemsize + 1, or + 3 with both forms).
#include <algorithm>
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
  int64_t matrix, row, column, rows, columns;
};

template <typename Rows>
void quantize_block(const pmo_quantize_blocks_params& p, const Block& block) {
  const int64_t place = (block.matrix * p.num_rows + block.row) * p.num_columns + block.column;
  const auto* x = static_cast<const typename Rows::Element*>(p.x) + place;
  const float amax = amax_of<Rows>(x, p.num_columns, block.rows, block.columns, p.amax_min);
  const int64_t heights = divide_up(p.num_rows, kSide), widths = divide_up(p.num_columns, kSide);
  const int64_t high = block.row / kSide, wide = block.column / kSide;
  const auto quantize = row_kernels(p.dtype).quantize;
  float scale = 0.0f;
  for (int64_t row = 0; row < block.rows; ++row) {
    uint8_t codes[kSide];
    quantize(x + row * p.num_columns, block.columns, amax, false, codes, &scale);
    if (p.codes != nullptr) {
      std::copy(codes, codes + block.columns, static_cast<uint8_t*>(p.codes) + place + row * p.num_columns);
    }
    if (p.turned_codes == nullptr) continue;
    auto* turned = static_cast<uint8_t*>(p.turned_codes) + (block.matrix * p.num_columns + block.column) * p.num_rows + block.row;
    for (int64_t i = 0; i < block.columns; ++i) turned[i * p.num_rows + row] = codes[i];
  }
  if (p.codes != nullptr) p.scales[(block.matrix * heights + high) * widths + wide] = scale;
  if (p.turned_codes != nullptr) p.turned_scales[(block.matrix * widths + wide) * heights + high] = scale;
}

int quantize_blocks(const pmo_quantize_blocks_params& p) {
  if (const int status = check_quantize_blocks(p)) return status;
  const int64_t heights = divide_up(p.num_rows, kSide);
  const int64_t bytes = p.num_matrices * p.num_rows * p.num_columns * (2 * dtype_size(p.dtype) + 1);
  return with_rows(p.dtype, [&](auto rows) {
    parallel_ranges(p.num_matrices * heights, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i % heights * kSide, height = std::min(p.num_rows - row, kSide);
        for (int64_t column = 0; column < p.num_columns; column += kSide) {
          quantize_block<decltype(rows)>(p, {i / heights, row, column, height, std::min(p.num_columns - column, kSide)});
        }
      }
    });
    return static_cast<int>(PMO_OK);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_quantize_blocks_cpu(const pmo_quantize_blocks_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::quantize_blocks);
}
