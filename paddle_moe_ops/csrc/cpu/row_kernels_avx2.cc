// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Row kernels for AVX2 with FMA.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/row_kernels.h"
#include "pmo/base.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace pmo {
namespace cpu {
namespace {
#include "cpu/row_kernels_body.h"
}  // namespace

const RowKernels* row_kernels_avx2(int32_t dtype) { return kernels_for(dtype); }

}  // namespace cpu
}  // namespace pmo
#pragma GCC pop_options

#else

namespace pmo {
namespace cpu {
const RowKernels* row_kernels_avx2(int32_t) { return nullptr; }
}  // namespace cpu
}  // namespace pmo

#endif
