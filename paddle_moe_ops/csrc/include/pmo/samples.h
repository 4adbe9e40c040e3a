// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Samples of an array, to find out on its device whether something has written to it.
#pragma once

#include "pmo/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Elements 0, step, 2 step, ... of an array. Without `changed` they are copied to `samples`. Otherwise they are compared with
// `samples` bit for bit; if one differs, `changed` becomes 1 and all scales NaN.
typedef struct pmo_samples_params {
  int64_t struct_size;
  int64_t num_samples;
  int64_t step;         // in elements, 1 or more
  const void* values;   // (num_samples - 1) * step + 1 or more elements
  void* samples;        // [num_samples]
  int32_t* changed;     // [1] or NULL; may be host memory that the device can write to
  float* scales;        // [num_scales]; only with changed
  int64_t num_scales;   // may be 0
  int32_t item_size;    // bytes of an element: 2 or 4
  int32_t num_threads;  // ignored
} pmo_samples_params;

PMO_API int pmo_samples_cpu(const pmo_samples_params* params, void* stream);
PMO_API int pmo_samples_cuda(const pmo_samples_params* params, void* stream);

#ifdef __cplusplus
}
#endif
