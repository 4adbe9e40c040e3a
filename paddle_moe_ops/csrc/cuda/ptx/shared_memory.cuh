// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Shared-memory accesses: 16-byte ld.shared and st.shared, ldmatrix, stmatrix, and stores to another CTA of the cluster (sm_90a).
//
// ldmatrix and stmatrix move four 8 x 8 matrices of 16-bit elements. Lane l holds two elements of matrix i in word[i], row l / 4
// and columns l % 4 * 2 and l % 4 * 2 + 1. Lane 8 i + r passes the address of row r of matrix i; with .trans it is the address of
// column r.
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

__device__ inline uint4 ld_shared_v4(uint32_t source) {
  uint4 got;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
               : "r"(source)
               : "memory");
  return got;
}

__device__ inline uint2 ld_shared_v2(uint32_t source) {
  uint2 got;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(got.x), "=r"(got.y) : "r"(source) : "memory");
  return got;
}

__device__ inline uint32_t ld_shared_u16(uint32_t source) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(source) : "memory");
  return value;
}

__device__ inline void st_shared_v4(uint32_t target, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ inline float2 ld_shared_f32x2(uint32_t source) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(source));
  return pair;
}

__device__ inline void st_shared_f32x2(uint32_t target, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(pair.x), "f"(pair.y) : "memory");
}

__device__ inline float ld_shared_f32(uint32_t source) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(source));
  return value;
}

__device__ inline void st_shared_f32(uint32_t target, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"(value) : "memory");
}

// Stores to the same shared address of CTA `rank` of the cluster.
__device__ inline void st_shared_cluster(const volatile int* target, int value, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "st.shared::cluster.b32 [remote], %1;\n"
      "}" ::"r"(smem_address(const_cast<const int*>(target))),
      "r"(value), "r"(rank)
      : "memory");
}

__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

__device__ inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// Two matrices; lanes 16 to 31 pass any address.
__device__ inline void stmatrix_x2_trans(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second)
               : "memory");
}

__device__ inline void ldmatrix_x4(uint32_t address, uint32_t (&word)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

// Inverse of stmatrix_x4_trans: the same addresses, the same words.
__device__ inline void ldmatrix_x4_trans(uint32_t address, uint32_t (&word)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
