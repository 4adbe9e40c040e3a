// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A contiguous copy of a matrix with any strides.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// CUDA only: on the CPU Paddle's own copy serves. target[i, j] = source[i * row_stride + j * column_stride].
typedef struct pmo_copy_strided_params {
  int64_t struct_size;
  int64_t num_rows;
  int64_t num_columns;
  int64_t row_stride;  // elements
  int64_t column_stride;
  int64_t itemsize;    // 1, 2, 4 or 8 bytes
  const void* source;  // aligned to itemsize
  void* target;        // contiguous
} pmo_copy_strided_params;

PMO_API int pmo_copy_strided_cuda(const pmo_copy_strided_params* params, void* stream);

#ifdef __cplusplus
}
#endif
