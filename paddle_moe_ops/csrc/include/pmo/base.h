// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Common parts of the C core: status codes, element types, the error text, the CPU threads.
//
// Conventions of the ABI: one plain struct per operator that begins with its own size, raw pointers, int64 sizes, strides in
// elements. No call allocates memory: call the _workspace_bytes query first. No exception crosses the boundary. The only state is the
// CPU thread pool, the limit of the instruction set, cached properties of each GPU, and the thread-local text of the
// last error. `stream` is a cudaStream_t for the *_cuda entry points and must be NULL for the *_cpu ones.
#pragma once

#include <stdint.h>

#define PMO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pmo_status {
  PMO_OK = 0,
  PMO_INVALID_ARGUMENT = 1,  // a size, pointer or enum of the params struct is unusable
  PMO_INVALID_DATA = 2,      // a check that the caller asked for found bad values in an array
  PMO_INTERNAL = 3,          // the machine failed (no memory for a thread's scratch)
} pmo_status;

typedef enum pmo_dtype {
  PMO_FLOAT32 = 0,
  PMO_FLOAT16 = 1,
  PMO_BFLOAT16 = 2,
  PMO_FLOAT8_E4M3FN = 3,
  PMO_FLOAT8_E5M2 = 4,
  PMO_INT32 = 5,
} pmo_dtype;

// Bits of the `checks` field: checks of the data. A check that is off costs nothing; the bad value then counts as -1.
typedef enum pmo_check {
  PMO_CHECK_RANGE = 1,       // expert ids outside [-1, E), rows outside [-1, N), more than topk experts in a mask row
  PMO_CHECK_DUPLICATES = 2,  // an expert twice in a token's slots, a row twice in a rowmap
  PMO_CHECK_NAN = 4,         // NaN among the probabilities of routed slots
  PMO_CHECK_OVERFLOW = 8,    // a static buffer too small for the routed rows
  PMO_CHECK_COUNTS = 16,     // tokens_per_expert differs from the routed rows
} pmo_check;

// Text of the last failure on this thread. It begins with the argument's name; valid until the next failure on this thread.
PMO_API const char* pmo_last_error(void);

// Threads of the CPU operators when a params struct says 0. A value < 1 restores the default: the cores this process may use, but
// no more than the quota of its control group grants. The quota is read once.
PMO_API void pmo_set_num_threads(int32_t num_threads);
PMO_API int32_t pmo_num_threads(void);

// Instruction sets of the CPU operators; each includes those before it. Results are the same bits on all of them.
typedef enum pmo_cpu_isa {
  PMO_CPU_GENERIC = 0,  // the target that the library was compiled for
  PMO_CPU_AVX2 = 1,     // with FMA and F16C
  PMO_CPU_AVX512 = 2,   // F, BW and VL
} pmo_cpu_isa;

// Limits the instruction set of the CPU operators from the next call on. A value beyond the last one removes the limit.
PMO_API void pmo_set_max_cpu_isa(int32_t isa);

// The instruction set in use: the best one within the limit that this processor supports.
PMO_API int32_t pmo_used_cpu_isa(void);

#ifdef __cplusplus
}
#endif
