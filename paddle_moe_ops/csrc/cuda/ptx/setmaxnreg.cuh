// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Warp specialisation: elect.sync picks one lane, setmaxnreg moves registers between warpgroups (sm_90a).
#pragma once

#include "cuda/ptx/arch.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// True in one lane of the warp; all lanes take part. The compiler knows that one lane issues the TMA copies of such a branch, so
// it emits no loop over lanes.
__device__ inline bool elect_sync() {
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

// Lowers the registers per thread of this warpgroup to kRegisters. All its warps execute it.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Raises them to kRegisters, as soon as other warpgroups have released enough.
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
