// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dequantize: out [N, H] = code * scale (pmo/quantize.h), rounded once.
//
// A CTA of 256 threads per row; a thread loads 16 neighbouring codes in one access, which share a scale, and steps through the row
// in a loop. The load of the scale overlaps that of the codes; other CTAs of the SM hide the rest of the latency.
//
// Memory-bound: reads N (H + 4 C) bytes, C scales per row, and writes N H elements.
#include <cstdint>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/scales.h"
#include "cuda/float8.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"
#include "pmo/quantize.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadColumns = 16;

__device__ float scale_at(const pmo_dequantize_params& p, const ScaleLayout& layout, int64_t row, int64_t group) {
  const int64_t word = p.ue8m0 != 0 ? group / kPackedScales : group;
  uint32_t bits = __ldg(static_cast<const uint32_t*>(p.scales) + row * layout.row_step + word * layout.word_step);
  if (p.ue8m0 != 0) bits = (bits >> (8 * (group % kPackedScales)) & 0xFFu) << 23;
  return __uint_as_float(bits);
}

template <typename Rows, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows(const __grid_constant__ pmo_dequantize_params p, const __grid_constant__ ScaleLayout layout) {
  using Element = typename Rows::Element;
  constexpr int kWidth = kVectors ? 16 / sizeof(Element) : 1;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const uint8_t* codes = static_cast<const uint8_t*>(p.codes) + row * p.codes_row_stride;
    Element* out = static_cast<Element*>(p.out) + row * p.hidden;
#pragma unroll 1
    for (int64_t column = int64_t{threadIdx.x} * kThreadColumns; column < p.hidden; column += kThreads * kThreadColumns) {
      const float scale = scale_at(p, layout, row, column / kGroupColumns);
      uint32_t words[kThreadColumns / 4] = {};
      if constexpr (kVectors) {
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(codes + column));
        memcpy(words, &loaded, sizeof(words));
      } else {
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
          if (column + i < p.hidden) words[i / 4] |= uint32_t{codes[column + i]} << (8 * (i % 4));
        }
      }
#pragma unroll
      for (int i = 0; i < kThreadColumns; i += kWidth) {
        Elements<Rows, kWidth> elements;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          elements.values[j] = __fmul_rn(float8_value(words[(i + j) / 4] >> (8 * ((i + j) % 4)) & 0xFFu), scale);
        }
        if (column + i < p.hidden) elements.store(out + column, i / kWidth);
      }
    }
  }
}

template <typename Rows>
int launch_rows(const pmo_dequantize_params& p, bool vectors, cudaStream_t stream) {
  const auto kernel = vectors ? dequantize_rows<Rows, true> : dequantize_rows<Rows, false>;
  return launch("dequantize_rows", kernel, {grid_for(p.num_rows, 1), kThreads}, stream, p, ScaleLayout(p));
}

int dequantize(const pmo_dequantize_params& p, cudaStream_t stream) {
  if (const int status = check_dequantize(p)) return status;
  if (p.hidden == 0 || p.num_rows == 0) return PMO_OK;
  PMO_REQUIRE(address(p.out) % dtype_size(p.dtype) == 0, "out", "aligned to its element size");
  const uintptr_t stride = p.num_rows > 1 ? static_cast<uintptr_t>(p.codes_row_stride) : 0;
  const bool vectors = widest_access({address(p.codes), stride, address(p.out)}) == 16 && p.hidden % kThreadColumns == 0;
  return with_rows(p.dtype, [&](auto rows) { return launch_rows<decltype(rows)>(p, vectors, stream); });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_dequantize_cuda(const pmo_dequantize_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::dequantize);
}
