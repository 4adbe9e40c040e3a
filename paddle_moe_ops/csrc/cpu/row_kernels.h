// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Arithmetic on whole rows, compiled once per instruction set and chosen at run time.
//
// Every variant gives the same bits: sums follow the order of pmo_unpermute, the dot product the 16 lanes and the tree of
// pmo_unpermute_backward, and fused multiply-adds are written as such (never left to the compiler's contraction).
#pragma once

#include <cstdint>

namespace pmo {
namespace cpu {

struct RowKernels {
  // out[H] = sum over `count` >= 1 rows; weights NULL = plain. At most one rounding to the row type, at the end.
  void (*sum)(const void* const* rows, const float* weights, int64_t count, int64_t hidden, void* out);
  // out[H] = weight * in[H]
  void (*scale)(const void* in, float weight, int64_t hidden, void* out);
  // sum of a[j] * b[j]
  float (*dot)(const void* a, const void* b, int64_t hidden);
};

// The fastest variant that this processor runs, for PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16 rows.
const RowKernels& row_kernels(int32_t dtype);

// The variants, one translation unit each; NULL where the build target has no such instruction set.
const RowKernels* row_kernels_generic(int32_t dtype);
const RowKernels* row_kernels_avx2(int32_t dtype);
const RowKernels* row_kernels_avx512(int32_t dtype);

}  // namespace cpu
}  // namespace pmo
