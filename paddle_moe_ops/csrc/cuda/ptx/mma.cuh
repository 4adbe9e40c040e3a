// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// mma.sync: synchronous MMAs of a warp, all operands in registers. On sm_90a their sums have the bits of wgmma's, in any order of the
// 16 elements along K.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// d[kFirst ...] += A B of m16 n8 k16, float16 or bfloat16. Words of lane l: A in rows l / 4 (a[0], a[2]) and 8 further (a[1], a[3]),
// B in column l / 4 (first, second), each two elements along K: l % 4 * 2 and the next (a[0], a[1], first), and those 8 further. d: row
// l / 4 and row l / 4 + 8, columns l % 4 * 2 and the next.
template <typename T, int kCount>
__device__ inline void mma_m16n8k16(float (&d)[kCount], int at, const uint32_t (&a)[4], uint32_t first, uint32_t second) {
  // clang-format off
#define PMO_MMA(TYPE) \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second))
  // clang-format on
  if constexpr (std::is_same_v<T, __half>) {
    PMO_MMA("f16");
  } else {
    PMO_MMA("bf16");
  }
#undef PMO_MMA
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
