// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dequantize_matrices: the values of the codes of expert matrices (pmo/matrices.h), code * scale, rounded once.
//
// A warp per stored row, in a grid-stride loop over the rows of all matrices. A lane takes eight neighbouring columns, with 8 bytes of
// codes, or one column where a row is no multiple of eight. If int4 codes are transposed, four lanes read the same 16 bytes.
// Memory-bound: E D N (bytes of a code + itemsize).
#include <cstdint>

#include "common/checks.h"
#include "common/matrix_layout.h"
#include "cuda/float8.cuh"
#include "cuda/launch.h"
#include "cuda/vectors.cuh"
#include "pmo/matrices.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize, kWide = 8;

// kCount elements as one access reads or writes them.
template <typename T, int kCount>
union Elements {
  Vector<kCount * sizeof(T)> access;
  T each[kCount];
};

// Codes of kWidth columns from `column` on as numbers. `row` is that of the values.
template <int kWidth>
__device__ inline void load_codes(const pmo_dequantize_matrices_params& p, const uint8_t* codes, int64_t row, int column,
                                  float (&values)[kWidth]) {
  if (is_int4(p.format) && p.transpose != 0) {  // eight columns from a multiple of eight on are in every second byte
    const uint8_t* const first = codes + byte_of_int4(column);
    const bool is_high = is_high_int4(column);
    if constexpr (kWidth == 1) {
      values[0] = static_cast<float>(int4_of(__ldg(first), is_high));
    } else {
      Elements<uint8_t, 2 * kWidth> bytes;
      const int in_pair = column / 16 % 2;
      bytes.access = __ldg(reinterpret_cast<const decltype(bytes.access)*>(first - in_pair));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[i] = static_cast<float>(int4_of(in_pair != 0 ? bytes.each[2 * i + 1] : bytes.each[2 * i], is_high));
      }
    }
    return;
  }
  Elements<uint8_t, kWidth> bytes;
  bytes.access = __ldg(reinterpret_cast<const decltype(bytes.access)*>(codes + column));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const uint8_t code = bytes.each[i];
    values[i] = is_int4(p.format)             ? static_cast<float>(int4_of(code, is_high_int4(row)))
                : p.format == PMO_MATRIX_INT8 ? static_cast<float>(static_cast<int8_t>(code))
                                              : float8_value(code);
  }
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads)
    dequantize_matrices(const __grid_constant__ pmo_dequantize_matrices_params p, const __grid_constant__ MatrixLayout layout) {
  using Element = typename Rows::Element;
  const bool packs_rows = is_int4(p.format) && p.transpose == 0;
  const int columns = static_cast<int>(layout.columns), scale_width = static_cast<int>(layout.scale_width);
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; i < p.num_matrices * layout.rows; i += stride) {
    const int64_t matrix = i / layout.rows, row = i - matrix * layout.rows;
    const int64_t code_row = matrix * layout.code_rows + (packs_rows ? byte_of_int4(row) : row);
    const auto* codes = static_cast<const uint8_t*>(p.codes) + code_row * layout.code_columns;
    const float* scales = p.scales + (matrix * layout.scale_rows + row / layout.scale_height) * layout.scale_columns;
    for (int column = threadIdx.x % kWarpSize * kWidth; column < columns; column += kWarpSize * kWidth) {
      float values[kWidth];
      load_codes(p, codes, row, column, values);
      const float* const first = scales + column / scale_width;  // of all columns, unless each has its own
      Elements<Element, kWidth> rounded;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        rounded.each[j] = Rows::store(__fmul_rn(values[j], __ldg(first + (scale_width == 1 ? j : 0))));
      }
      const int64_t at = i * columns + column;
      if (p.widens == 0) {
        *reinterpret_cast<decltype(rounded.access)*>(static_cast<Element*>(p.out) + at) = rounded.access;
        continue;
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) static_cast<float*>(p.out)[at + j] = Rows::load(rounded.each[j]);
    }
  }
}

int dequantize(const pmo_dequantize_matrices_params& p, cudaStream_t stream) {
  if (const int status = check_dequantize_matrices(p)) return status;
  const MatrixLayout layout(p.format, p.inner, p.outer, p.transpose != 0);
  const int64_t count = p.num_matrices * layout.rows;
  if (count == 0 || layout.columns == 0) return PMO_OK;
  const Grid grid = {grid_for(count, kWarps), kThreads};
  // Rows begin at multiples of 8 or 16 bytes of codes and of 16 bytes of values.
  const uintptr_t codes_of_access = is_int4(p.format) && p.transpose != 0 ? address(p.codes) : address(p.codes) * 2;
  const bool is_wide = layout.columns % kWide == 0 && widest_access({codes_of_access, address(p.out)}) == 16;
  return with_rows(p.dtype, [&](auto rows) {
    using Rows = decltype(rows);
    const auto run = [&](auto* kernel) { return launch("dequantize_matrices", kernel, grid, stream, p, layout); };
    if constexpr (sizeof(typename Rows::Element) == 2) {
      if (is_wide) return run(dequantize_matrices<Rows, kWide>);
    }
    return run(dequantize_matrices<Rows, 1>);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_dequantize_matrices_cuda(const pmo_dequantize_matrices_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::dequantize);
}
