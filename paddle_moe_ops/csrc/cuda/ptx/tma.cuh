// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Products of float8_e4m3fn by Hopper's tensor cores.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_HOPPER_CODE

// As load_box, to the same place in every block of the cluster that has its bit in `blocks`; each block's barrier gets its bytes.
__device__ inline void load_box_to_all(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                                       int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], "
      "[%2], %6;" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

// Arrives at the barrier in the same place of another block of the cluster, or of this one. Orders nothing before it across blocks: for
// stages that wgmma has read, whose completion the thread has waited for.
__device__ inline void arrive_at(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [place];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}

// As `arrive_at`, after all loads and stores of this thread: a release at cluster scope, for which `wait_for_cluster` waits.
__device__ inline void release_at(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [place];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}

// Stores a number in the same place of another block of the cluster.
__device__ inline void store_at(const volatile int* place, int number, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "st.shared::cluster.b32 [place], %1;\n"
      "}" ::"r"(shared_address(const_cast<const int*>(place))),
      "r"(number), "r"(block)
      : "memory");
}

// Waits for all threads of the cluster.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// part = a b, or part += a b unless kBegins: 64 x 128 numbers of a warpgroup from operands of depth 32, both with rows along the
// contraction. Of lane l of warp w, part[4 i + 2 h + j] is in row 16 w + l / 4 + 8 h and column 8 i + l % 4 * 2 + j.
template <bool kBegins>
__device__ inline void multiply_float8(float (&part)[64], uint64_t a, uint64_t b) {
  // clang-format off
#define PMO_EIGHT(i) "+f"(part[i]), "+f"(part[i + 1]), "+f"(part[i + 2]), "+f"(part[i + 3]), \
                     "+f"(part[i + 4]), "+f"(part[i + 5]), "+f"(part[i + 6]), "+f"(part[i + 7])
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, %66, 1, 1;"
      : PMO_EIGHT(0), PMO_EIGHT(8), PMO_EIGHT(16), PMO_EIGHT(24), PMO_EIGHT(32), PMO_EIGHT(40), PMO_EIGHT(48), PMO_EIGHT(56)
      : "l"(a), "l"(b), "n"(kBegins ? 0 : 1));
#undef PMO_EIGHT
  // clang-format on
}

// The compiler moves no sums across this.
__device__ inline void hold(float (&part)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
}

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
