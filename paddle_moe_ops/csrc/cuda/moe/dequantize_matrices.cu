// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dequantize_matrices: the values of the codes of expert matrices (pmo/matrices.h), code * scale, rounded once.
//
// A CTA of 256 threads per stored row, in a grid-stride loop over the rows of all matrices: neighbouring threads have neighbouring
// columns, so loads of codes and stores are coalesced. Memory-bound: E D N (bytes of a code + itemsize).
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

constexpr int kThreads = 256;

template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    dequantize_matrices(const __grid_constant__ pmo_dequantize_matrices_params p, const __grid_constant__ MatrixLayout layout) {
  const bool is_packed = is_int4(p.format), packs_columns = is_packed && p.transpose != 0;
  const int columns = static_cast<int>(layout.columns), scale_width = static_cast<int>(layout.scale_width);
  for (int64_t i = blockIdx.x; i < p.num_matrices * layout.rows; i += gridDim.x) {
    const int64_t matrix = i / layout.rows, row = i - matrix * layout.rows;
    const int64_t code_row = matrix * layout.code_rows + (is_packed && !packs_columns ? row / 2 : row);
    const auto* codes = static_cast<const uint8_t*>(p.codes) + code_row * layout.code_columns;
    const float* scales = p.scales + (matrix * layout.scale_rows + row / layout.scale_height) * layout.scale_columns;
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += kThreads) {
      const uint8_t code = __ldg(codes + (packs_columns ? column / 2 : column));
      float value;
      if (is_packed) {
        value = static_cast<float>(int4_of(code, (packs_columns ? column : row) % 2 != 0));
      } else {
        value = p.format == PMO_MATRIX_INT8 ? static_cast<float>(static_cast<int8_t>(code)) : float8_value(code);
      }
      const auto rounded = Rows::store(__fmul_rn(value, __ldg(scales + column / scale_width)));
      if (p.widens != 0) {
        static_cast<float*>(p.out)[i * columns + column] = Rows::load(rounded);
      } else {
        static_cast<typename Rows::Element*>(p.out)[i * columns + column] = rounded;
      }
    }
  }
}

int dequantize(const pmo_dequantize_matrices_params& p, cudaStream_t stream) {
  if (const int status = check_dequantize_matrices(p)) return status;
  const MatrixLayout layout(p.format, p.inner, p.outer, p.transpose != 0);
  const int64_t count = p.num_matrices * layout.rows;
  if (count == 0 || layout.columns == 0) return PMO_OK;
  const Grid grid = {grid_for(count, 1), kThreads};
  return with_rows(p.dtype, [&](auto rows) {
    return launch("dequantize_matrices", dequantize_matrices<decltype(rows)>, grid, stream, p, layout);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_dequantize_matrices_cuda(const pmo_dequantize_matrices_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::dequantize);
}
