// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// PMO_SM90A is defined where the compiler generates code for sm_90a, the only target with TMA, wgmma and setmaxnreg as these
// wrappers use them. For every other target the wrappers are absent and the kernels that use them have empty bodies.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PMO_SM90A 1
#endif

namespace pmo {
namespace cuda {

// Address of a pointer in the shared state space, as PTX instructions take it.
__device__ inline uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

}  // namespace cuda
}  // namespace pmo
