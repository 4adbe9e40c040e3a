// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// wgmma: asynchronous MMAs of a warpgroup, A and B in shared memory, float32 accumulators in registers (sm_90a).
//
// Order of a K step: wgmma_fence, MMAs, wgmma_commit_group; then wgmma_wait_group before the accumulators or the operands' stage
// are touched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups of MMAs are in flight.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Register fence: the compiler moves no access to the accumulators across it.
template <int kCount>
__device__ inline void register_fence(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Matrix descriptor of an operand in rows of 128 bytes with 128-byte swizzle. `stride_offset` is the number of bytes between
// groups of 8 rows. `leading_offset` is the number of bytes between boxes of 64 columns of an MN-major operand; a K-major operand
// does not use it.
__device__ inline uint64_t smem_descriptor(uint32_t address, uint32_t leading_offset, uint32_t stride_offset) {
  return uint64_t{(address & 0x3FFFFu) >> 4} | uint64_t{leading_offset >> 4} << 16 | uint64_t{stride_offset >> 4} << 32 |
         uint64_t{1} << 62;
}

// wgmma.mma_async m64 n<kN> k16 for float16 or bfloat16: d[kFirst ...] = A B, plus d if scale_d. kTransA, kTransB: that operand
// is MN-major in shared memory. Accumulator layout: d[kFirst + 4 i + 2 h + j] of lane l of warp w is row 16 w + l / 4 + 8 h,
// column 8 i + l % 4 * 2 + j.
//
// kN is a multiple of 16 up to 160, or 192 or 256. Each N needs its own list of registers, hence the macros.
// clang-format off
#define PMO_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PMO_REGISTERS_32 PMO_REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PMO_REGISTERS_48 PMO_REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PMO_REGISTERS_64 PMO_REGISTERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PMO_REGISTERS_80 PMO_REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PMO_REGISTERS_96 PMO_REGISTERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PMO_REGISTERS_112 PMO_REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PMO_REGISTERS_128 PMO_REGISTERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PMO_REGISTERS_144 PMO_REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PMO_REGISTERS_160 PMO_REGISTERS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PMO_REGISTERS_192 PMO_REGISTERS_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PMO_REGISTERS_256 PMO_REGISTERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PMO_8(at) "+f"(d[kFirst + at + 0]), "+f"(d[kFirst + at + 1]), "+f"(d[kFirst + at + 2]), "+f"(d[kFirst + at + 3]), "+f"(d[kFirst + at + 4]), "+f"(d[kFirst + at + 5]), "+f"(d[kFirst + at + 6]), "+f"(d[kFirst + at + 7])
#define PMO_ACCUMULATORS_16 PMO_8(0)
#define PMO_ACCUMULATORS_32 PMO_ACCUMULATORS_16, PMO_8(8)
#define PMO_ACCUMULATORS_48 PMO_ACCUMULATORS_32, PMO_8(16)
#define PMO_ACCUMULATORS_64 PMO_ACCUMULATORS_48, PMO_8(24)
#define PMO_ACCUMULATORS_80 PMO_ACCUMULATORS_64, PMO_8(32)
#define PMO_ACCUMULATORS_96 PMO_ACCUMULATORS_80, PMO_8(40)
#define PMO_ACCUMULATORS_112 PMO_ACCUMULATORS_96, PMO_8(48)
#define PMO_ACCUMULATORS_128 PMO_ACCUMULATORS_112, PMO_8(56)
#define PMO_ACCUMULATORS_144 PMO_ACCUMULATORS_128, PMO_8(64)
#define PMO_ACCUMULATORS_160 PMO_ACCUMULATORS_144, PMO_8(72)
#define PMO_ACCUMULATORS_192 PMO_ACCUMULATORS_160, PMO_8(80), PMO_8(88)
#define PMO_ACCUMULATORS_256 PMO_ACCUMULATORS_192, PMO_8(96), PMO_8(104), PMO_8(112), PMO_8(120)
#define PMO_WGMMA(N, TYPE, A, B, TRANS_A, TRANS_B, SCALE_D) \
  asm volatile("{\n.reg .pred scale_d;\nsetp.ne.b32 scale_d, %" #SCALE_D ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PMO_REGISTERS_##N \
               "}, %" #A ", %" #B ", scale_d, 1, 1, %" #TRANS_A ", %" #TRANS_B ";\n}" \
               : PMO_ACCUMULATORS_##N : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB), "r"(static_cast<int>(scale_d)))
#define PMO_WGMMA_N(WGMMA, N, ...) \
  if constexpr (kN == N) { \
    if constexpr (std::is_same_v<T, __half>) { \
      WGMMA(N, "f16", __VA_ARGS__); \
    } else { \
      WGMMA(N, "bf16", __VA_ARGS__); \
    } \
  }
// clang-format on

template <int kN, int kFirst, int kTransA, int kTransB, typename T, int kCount>
__device__ inline void wgmma_m64k16(float (&d)[kCount], uint64_t a, uint64_t b, bool scale_d) {
  static_assert(kN % 16 == 0 && (kN <= 160 || kN == 192 || kN == 256) && kFirst + kN / 2 <= kCount);
  PMO_WGMMA_N(PMO_WGMMA, 16, 8, 9, 10, 11, 12)
  PMO_WGMMA_N(PMO_WGMMA, 32, 16, 17, 18, 19, 20)
  PMO_WGMMA_N(PMO_WGMMA, 48, 24, 25, 26, 27, 28)
  PMO_WGMMA_N(PMO_WGMMA, 64, 32, 33, 34, 35, 36)
  PMO_WGMMA_N(PMO_WGMMA, 80, 40, 41, 42, 43, 44)
  PMO_WGMMA_N(PMO_WGMMA, 96, 48, 49, 50, 51, 52)
  PMO_WGMMA_N(PMO_WGMMA, 112, 56, 57, 58, 59, 60)
  PMO_WGMMA_N(PMO_WGMMA, 128, 64, 65, 66, 67, 68)
  PMO_WGMMA_N(PMO_WGMMA, 144, 72, 73, 74, 75, 76)
  PMO_WGMMA_N(PMO_WGMMA, 160, 80, 81, 82, 83, 84)
  PMO_WGMMA_N(PMO_WGMMA, 192, 96, 97, 98, 99, 100)
  PMO_WGMMA_N(PMO_WGMMA, 256, 128, 129, 130, 131, 132)
}

#undef PMO_WGMMA

// wgmma.mma_async m64 n<kN> k16 with operand A in registers and K-major B in shared memory: d += A B. Words of lane l of warp w: rows
// 16 w + l / 4 (a[0], a[2]) and 8 further (a[1], a[3]), elements l % 4 * 2 and the next one along K (a[0], a[1]), and those 8 further.
// kN is a multiple of 16 from 32 to 96.
// clang-format off
#define PMO_WGMMA_VALUES(N, TYPE, A0, A1, A2, A3, B) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PMO_REGISTERS_##N \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;" \
               : PMO_ACCUMULATORS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

template <int kN, typename T, int kCount>
__device__ inline void wgmma_m64k16_values(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN % 16 == 0 && kN >= 32 && kN <= 96 && kN / 2 <= kCount);
  constexpr int kFirst = 0;
  PMO_WGMMA_N(PMO_WGMMA_VALUES, 32, 16, 17, 18, 19, 20)
  PMO_WGMMA_N(PMO_WGMMA_VALUES, 48, 24, 25, 26, 27, 28)
  PMO_WGMMA_N(PMO_WGMMA_VALUES, 64, 32, 33, 34, 35, 36)
  PMO_WGMMA_N(PMO_WGMMA_VALUES, 80, 40, 41, 42, 43, 44)
  PMO_WGMMA_N(PMO_WGMMA_VALUES, 96, 48, 49, 50, 51, 52)
}

#undef PMO_WGMMA_VALUES
#undef PMO_WGMMA_N

// wgmma.mma_async m64 n<kN> k32 for float8_e4m3fn, both operands K-major: d[kFirst ...] = A B, plus d if kScaleD is 1. Accumulator
// layout as above. kN is 16, 32, 48, 64 or 128.
// clang-format off
#define PMO_WGMMA_E4M3(N, A, B, SCALE_D) \
  if constexpr (kN == N) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PMO_REGISTERS_##N "}, %" #A ", %" #B ", %" #SCALE_D ", 1, 1;" \
                 : PMO_ACCUMULATORS_##N : "l"(a), "l"(b), "n"(kScaleD)); \
  }
// clang-format on

template <int kN, int kFirst, int kScaleD, int kCount>
__device__ inline void wgmma_m64k32_e4m3(float (&d)[kCount], uint64_t a, uint64_t b) {
  static_assert((kN % 16 == 0 && kN <= 64) || kN == 128);
  static_assert(kFirst + kN / 2 <= kCount);
  PMO_WGMMA_E4M3(16, 8, 9, 10)
  PMO_WGMMA_E4M3(32, 16, 17, 18)
  PMO_WGMMA_E4M3(48, 24, 25, 26)
  PMO_WGMMA_E4M3(64, 32, 33, 34)
  PMO_WGMMA_E4M3(128, 64, 65, 66)
}

#undef PMO_WGMMA_E4M3
#undef PMO_8
#undef PMO_REGISTERS_16
#undef PMO_ACCUMULATORS_16
#undef PMO_REGISTERS_32
#undef PMO_ACCUMULATORS_32
#undef PMO_REGISTERS_48
#undef PMO_ACCUMULATORS_48
#undef PMO_REGISTERS_64
#undef PMO_ACCUMULATORS_64
#undef PMO_REGISTERS_80
#undef PMO_ACCUMULATORS_80
#undef PMO_REGISTERS_96
#undef PMO_ACCUMULATORS_96
#undef PMO_REGISTERS_112
#undef PMO_ACCUMULATORS_112
#undef PMO_REGISTERS_128
#undef PMO_ACCUMULATORS_128
#undef PMO_REGISTERS_144
#undef PMO_ACCUMULATORS_144
#undef PMO_REGISTERS_160
#undef PMO_ACCUMULATORS_160
#undef PMO_REGISTERS_192
#undef PMO_ACCUMULATORS_192
#undef PMO_REGISTERS_256
#undef PMO_ACCUMULATORS_256

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
