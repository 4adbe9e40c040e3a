// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Hopper's own instructions (sm_90a): barriers in shared memory, the copy engine, products of warpgroups. For other architectures they
// are not there, and kernels that use them are empty.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PMO_HOPPER_CODE 1
#endif

namespace pmo {
namespace cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#ifdef PMO_HOPPER_CODE

__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the barrier wait for so many bytes of the copy engine.
__device__ inline void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

#define PMO_WAIT(ORDER)                    \
  asm volatile(                            \
      "{\n"                                \
      ".reg .pred done;\n"                 \
      "again:\n"                           \
      "mbarrier.try_wait.parity" ORDER     \
      ".shared::cta.b64 done, [%0], %1;\n" \
      "@done bra ready;\n"                 \
      "bra again;\n"                       \
      "ready:\n"                           \
      "}" ::"r"(shared_address(barrier)),  \
      "r"(parity)                          \
      : "memory")

__device__ inline void wait(uint64_t* barrier, uint32_t parity) { PMO_WAIT(""); }

// The same for what other blocks of the cluster wrote before they arrived.
__device__ inline void wait_for_cluster(uint64_t* barrier, uint32_t parity) { PMO_WAIT(".acquire.cluster"); }

#undef PMO_WAIT

// A box of a tensor to shared memory by the copy engine, which gives zeros for what lies outside the tensor.
__device__ inline void load_box(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

__device__ inline void load_box(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// A box of shared memory to a tensor by the copy engine, which leaves out what lies outside the tensor. Whoever wrote the box has called
// `fence_async_proxy` since. The thread that stores boxes commits them, and waits until the shared memory may be written again.
// `store_box_past_l2` lets the L2 give up the box first.
__device__ inline void store_box_past_l2(const CUtensorMap* map, uint32_t source, int x, int y, int z) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
               "r"(source), "r"(x), "r"(y), "r"(z), "l"(policy)
               : "memory");
}
__device__ inline void store_box(const CUtensorMap* map, uint32_t source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(source), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending = 0>
__device__ inline void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 16 bytes to shared memory, or zeros. `arrive_after_copies` arrives at a barrier once all that this thread has copied so far is there.
__device__ inline void copy_16_bytes(uint32_t target, const void* source, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(is_there ? 16 : 0) : "memory");
}
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// What this thread wrote to shared memory, or knows that others wrote, is there for the copy engine and the tensor cores.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_16_bytes(uint32_t target, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Stores four matrices of 8 x 8 numbers of 16 bits. Of matrix i, lane l holds two in word[i], row l / 4 and column l % 4 * 2, and lane
// 8 i + r the address of row r.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

// The same matrices turned: lanes have addresses of what are columns in their words.
__device__ inline void store_turned_matrices(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// Loads the matrices that `store_turned_matrices` stores, from the same addresses to the same words.
__device__ inline void load_turned_matrices(uint32_t address, uint32_t (&word)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

// One of the block's 15 numbered barriers for `threads` of it: waits for the others, or only tells them.
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void tell(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// True in one lane of a warp, all of whose lanes take part. Where boxes are loaded by such a lane, the compiler needs no loop over lanes.
__device__ inline bool is_elected() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Describes an operand in shared memory, in rows of 128 bytes swizzled by 128 bytes. `to_next_8_rows` and `to_next_64` are bytes:
// between groups of 8 rows, and between pieces of 64 columns where the columns are not those of the contraction.
__device__ inline uint64_t describe(uint32_t address, uint32_t to_next_64, uint32_t to_next_8_rows) {
  return uint64_t{(address & 0x3FFFFu) >> 4} | uint64_t{to_next_64 >> 4} << 16 | uint64_t{to_next_8_rows >> 4} << 32 |
         uint64_t{1} << 62;
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[kFirst ...] += a b: 64 x 128 numbers of a warpgroup from operands of depth 16, or 64 x 256 by `multiply_wide`, which adds only if it is
// told to. kTurnedA, kTurnedB: rows of that operand in shared memory are the contraction. Of lane l of warp w, d[kFirst + 4 i + 2 h + j] is
// in row 16 w + l / 4 + 8 h and column 8 i + l % 4 * 2 + j.
// clang-format off
#define PMO_8_SUMS(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PMO_64_SUMS(i) \
  PMO_8_SUMS(i), PMO_8_SUMS(i + 8), PMO_8_SUMS(i + 16), PMO_8_SUMS(i + 24), PMO_8_SUMS(i + 32), PMO_8_SUMS(i + 40), \
  PMO_8_SUMS(i + 48), PMO_8_SUMS(i + 56)
#define PMO_64_NAMES \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PMO_128_NAMES PMO_64_NAMES ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PMO_MULTIPLY(TYPE, a, b) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" PMO_64_NAMES "}, %64, %65, 1, 1, 1, 0, %66;" \
      : PMO_64_SUMS(kFirst) : "l"(a), "l"(b), "n"(kTurnedB))
#define PMO_MULTIPLY_WIDE(TYPE, a, b, adds) \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" PMO_128_NAMES "}, %128, %129, adds, 1, 1, %131, %132;\n}" \
      : PMO_64_SUMS(0), PMO_64_SUMS(64) : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kTurnedA), "n"(kTurnedB))
// clang-format on

template <int kFirst, int kTurnedB>
__device__ inline void multiply(float (&d)[128], uint64_t a, uint64_t b, __nv_bfloat16) {
  PMO_MULTIPLY("bf16", a, b);
}

template <int kFirst, int kTurnedB>
__device__ inline void multiply(float (&d)[128], uint64_t a, uint64_t b, __half) {
  PMO_MULTIPLY("f16", a, b);
}

template <int kTurnedB, int kTurnedA>
__device__ inline void multiply_wide(float (&d)[128], uint64_t a, uint64_t b, bool adds, __nv_bfloat16) {
  PMO_MULTIPLY_WIDE("bf16", a, b, adds);
}

template <int kTurnedB, int kTurnedA>
__device__ inline void multiply_wide(float (&d)[128], uint64_t a, uint64_t b, bool adds, __half) {
  PMO_MULTIPLY_WIDE("f16", a, b, adds);
}

#undef PMO_8_SUMS
#undef PMO_64_SUMS
#undef PMO_64_NAMES
#undef PMO_128_NAMES
#undef PMO_MULTIPLY
#undef PMO_MULTIPLY_WIDE

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
