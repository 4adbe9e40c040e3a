// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Products of Hopper's tensor cores whose second operand has a multiple of 16 columns, up to 160, or 192 or 256.
#pragma once

#include <type_traits>

#include "cuda/ptx/mbarrier.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_HOPPER_CODE

// d[kFirst ...] += a b, or = a b unless it adds: 64 x kColumns numbers of a warpgroup from operands of depth 16. kTurnedA, kTurnedB: rows of
// that operand in shared memory are the contraction. Of lane l of warp w, d[kFirst + 4 i + 2 h + j] is in row 16 w + l / 4 + 8 h and column
// 8 i + l % 4 * 2 + j.
// clang-format off
#define PMO_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PMO_NAMES_32 PMO_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PMO_NAMES_48 PMO_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PMO_NAMES_64 PMO_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PMO_NAMES_80 PMO_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PMO_NAMES_96 PMO_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PMO_NAMES_112 PMO_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PMO_NAMES_128 PMO_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PMO_NAMES_144 PMO_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PMO_NAMES_160 PMO_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PMO_NAMES_192 PMO_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PMO_NAMES_256 PMO_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PMO_8(at) "+f"(d[kFirst + at + 0]), "+f"(d[kFirst + at + 1]), "+f"(d[kFirst + at + 2]), "+f"(d[kFirst + at + 3]), "+f"(d[kFirst + at + 4]), "+f"(d[kFirst + at + 5]), "+f"(d[kFirst + at + 6]), "+f"(d[kFirst + at + 7])
#define PMO_SUMS_16 PMO_8(0)
#define PMO_SUMS_32 PMO_SUMS_16, PMO_8(8)
#define PMO_SUMS_48 PMO_SUMS_32, PMO_8(16)
#define PMO_SUMS_64 PMO_SUMS_48, PMO_8(24)
#define PMO_SUMS_80 PMO_SUMS_64, PMO_8(32)
#define PMO_SUMS_96 PMO_SUMS_80, PMO_8(40)
#define PMO_SUMS_112 PMO_SUMS_96, PMO_8(48)
#define PMO_SUMS_128 PMO_SUMS_112, PMO_8(56)
#define PMO_SUMS_144 PMO_SUMS_128, PMO_8(64)
#define PMO_SUMS_160 PMO_SUMS_144, PMO_8(72)
#define PMO_SUMS_192 PMO_SUMS_160, PMO_8(80), PMO_8(88)
#define PMO_SUMS_256 PMO_SUMS_192, PMO_8(96), PMO_8(104), PMO_8(112), PMO_8(120)
#define PMO_MULTIPLY(COLUMNS, TYPE, A, B, TURNED_A, TURNED_B, ADDS) \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #ADDS ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PMO_NAMES_##COLUMNS \
               "}, %" #A ", %" #B ", adds, 1, 1, %" #TURNED_A ", %" #TURNED_B ";\n}" \
               : PMO_SUMS_##COLUMNS : "l"(a), "l"(b), "n"(kTurnedA), "n"(kTurnedB), "r"(static_cast<int>(adds)))
#define PMO_COLUMNS(COLUMNS, A, B, TURNED_A, TURNED_B, ADDS) \
  if constexpr (kColumns == COLUMNS) { \
    if constexpr (std::is_same_v<T, __half>) { \
      PMO_MULTIPLY(COLUMNS, "f16", A, B, TURNED_A, TURNED_B, ADDS); \
    } else { \
      PMO_MULTIPLY(COLUMNS, "bf16", A, B, TURNED_A, TURNED_B, ADDS); \
    } \
  }
// clang-format on

template <int kColumns, int kFirst, int kTurnedA, int kTurnedB, typename T, int kCount>
__device__ inline void multiply_columns(float (&d)[kCount], uint64_t a, uint64_t b, bool adds) {
  static_assert(kColumns % 16 == 0 && (kColumns <= 160 || kColumns == 192 || kColumns == 256) && kFirst + kColumns / 2 <= kCount);
  PMO_COLUMNS(16, 8, 9, 10, 11, 12)
  PMO_COLUMNS(32, 16, 17, 18, 19, 20)
  PMO_COLUMNS(48, 24, 25, 26, 27, 28)
  PMO_COLUMNS(64, 32, 33, 34, 35, 36)
  PMO_COLUMNS(80, 40, 41, 42, 43, 44)
  PMO_COLUMNS(96, 48, 49, 50, 51, 52)
  PMO_COLUMNS(112, 56, 57, 58, 59, 60)
  PMO_COLUMNS(128, 64, 65, 66, 67, 68)
  PMO_COLUMNS(144, 72, 73, 74, 75, 76)
  PMO_COLUMNS(160, 80, 81, 82, 83, 84)
  PMO_COLUMNS(192, 96, 97, 98, 99, 100)
  PMO_COLUMNS(256, 128, 129, 130, 131, 132)
}

#undef PMO_COLUMNS
#undef PMO_MULTIPLY
#undef PMO_8
#undef PMO_NAMES_16
#undef PMO_SUMS_16
#undef PMO_NAMES_32
#undef PMO_SUMS_32
#undef PMO_NAMES_48
#undef PMO_SUMS_48
#undef PMO_NAMES_64
#undef PMO_SUMS_64
#undef PMO_NAMES_80
#undef PMO_SUMS_80
#undef PMO_NAMES_96
#undef PMO_SUMS_96
#undef PMO_NAMES_112
#undef PMO_SUMS_112
#undef PMO_NAMES_128
#undef PMO_SUMS_128
#undef PMO_NAMES_144
#undef PMO_SUMS_144
#undef PMO_NAMES_160
#undef PMO_SUMS_160
#undef PMO_NAMES_192
#undef PMO_SUMS_192
#undef PMO_NAMES_256
#undef PMO_SUMS_256

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
