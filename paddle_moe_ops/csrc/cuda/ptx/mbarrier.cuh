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

#endif  // PMO_HOPPER_CODE

}  // namespace cuda
}  // namespace pmo
