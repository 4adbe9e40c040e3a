// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for the build's own target, and the choice among the variants.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/row_kernels.h"
#include "pmo/base.h"

namespace pmo {
namespace cpu {
namespace {
#include "cpu/row_kernels_body.h"

using Variant = const RowKernels* (*)(int32_t);

Variant choose_variant() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 =
      fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && row_kernels_avx512(PMO_FLOAT32) != nullptr) return row_kernels_avx512;
  if (fma && row_kernels_avx2(PMO_FLOAT32) != nullptr) return row_kernels_avx2;
#endif
  return row_kernels_generic;
}

}  // namespace

const RowKernels* row_kernels_generic(int32_t dtype) { return kernels_for(dtype); }

const RowKernels& row_kernels(int32_t dtype) {
  static const Variant variant = choose_variant();
  return *variant(dtype);
}

}  // namespace cpu
}  // namespace pmo
