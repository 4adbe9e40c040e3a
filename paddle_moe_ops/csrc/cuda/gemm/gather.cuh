// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Gather of token rows by cp.async, for GEMM operands that TMA can't load: row r of the operand is row row_to_token[r] of x.
#pragma once

#include "cuda/ptx/cp_async.cuh"

namespace pmo {
namespace cuda {

struct GatheredRows {
  const void* x;
  const int32_t* row_to_token;
  uint32_t row_bytes;  // stride of x
  int num_sources;     // rows of x

#ifdef PMO_SM90A
  static constexpr uint32_t kNone = 0xFFFFFFFFu;  // a row of zeros

  __device__ uint32_t source_of(int row) const {
    const auto token = static_cast<uint32_t>(__ldg(row_to_token + row));
    return token < static_cast<uint32_t>(num_sources) ? token : kNone;
  }

  // Address of the lane's bytes in row 0 of x. The register fence keeps it in registers: one instruction then yields the address
  // in any row.
  __device__ const char* first_row(int byte) const {
    const char* first = static_cast<const char*>(x) + byte;
    asm volatile("" : "+l"(first));
    return first;
  }

  // Copies 16 bytes of each of kCount rows to the shared addresses target_of(0), target_of(1), ...; `first` is the address in row
  // 0. Rows that are kNone, and all rows if not is_inside, are zeros.
  template <int kCount, typename TargetOf>
  __device__ void copy(const uint32_t* sources, const char* first, bool is_inside, TargetOf target_of) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      cp_async_16_zfill(target_of(i), first + uint64_t{sources[i]} * row_bytes, is_inside && sources[i] != kNone);
    }
  }
#endif
};

}  // namespace cuda
}  // namespace pmo
