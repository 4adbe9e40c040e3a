// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Fake quantisation by 128 x 128 blocks: out = dequantize(quantize(x)) in float32, with one float8_e4m3fn scale per block.
// Memory-bound.
//
//   x [E, A, B] contiguous, float32, float16 or bfloat16   out float32 [E, A, B]
//
// For GPUs without float8 MMAs, whose GEMMs take far longer than this kernel. A CTA of 256 threads processes one block per
// iteration; a thread has every second element of a column. x is read twice. Bytes moved: E A B (itemsize + 4).
#include <cstdint>

#include "common/checks.h"
#include "cuda/float8.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kSide = 128;
constexpr int kThreads = 2 * kSide;

template <typename Rows>
__global__ void __launch_bounds__(kThreads) near_blocks(pmo_near_blocks_params p, int64_t heights, int64_t widths) {
  __shared__ uint32_t highest;
  const auto* x = static_cast<const typename Rows::Element*>(p.x);
  for (int64_t block = blockIdx.x; block < p.num_matrices * heights * widths; block += gridDim.x) {
    const int64_t row = block / widths % heights * kSide, column = block % widths * kSide + threadIdx.x % kSide;
    const int64_t end = column < p.num_columns ? min(row + kSide, p.num_rows) : 0;
    const int64_t first = row + threadIdx.x / kSide, matrix = block / (heights * widths) * p.num_rows;
    float amax = 0.0f;
    for (int64_t i = first; i < end; i += 2) {
      amax = fmaxf(amax, fabsf(Rows::load(x[(matrix + i) * p.num_columns + column])));  // fmaxf ignores NaN
    }
    if (threadIdx.x == 0) highest = 0;
    __syncthreads();
    atomicMax(&highest, __float_as_uint(amax));  // bits of non-negative floats have the order of the values
    __syncthreads();
    const float scale = float8_scale(__uint_as_float(highest), p.amax_min), inverse = __frcp_rn(scale);
    __syncthreads();  // before `highest` is overwritten
    for (int64_t i = first; i < end; i += 2) {
      const int64_t place = (matrix + i) * p.num_columns + column;
      const uint32_t code = float8_pair(Rows::load(x[place]), 0.0f, inverse) & 0xFFu;
      p.out[place] = __fmul_rn(float8_value(code), scale);
    }
  }
}

int run_near_blocks(const pmo_near_blocks_params& p, cudaStream_t stream) {
  if (const int status = check_near_blocks(p)) return status;
  const int64_t heights = divide_up(p.num_rows, int64_t{kSide}), widths = divide_up(p.num_columns, int64_t{kSide});
  const int64_t blocks = p.num_matrices * heights * widths;
  if (blocks == 0) return PMO_OK;
  return with_rows(p.dtype, [&](auto rows) {
    return launch("near_blocks", near_blocks<decltype(rows)>, {grid_for(blocks, 1), kThreads}, stream, p, heights, widths);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_near_blocks_cuda(const pmo_near_blocks_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run_near_blocks);
}
