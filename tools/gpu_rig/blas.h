// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace rig {

// A batch of row-major GEMMs: C [m, n] = A [m, k] B [k, n], with A and B stored transposed if so named.
struct Gemm {
  const void *a, *b;
  void* c;
  bool is_bfloat16;  // otherwise float32
  bool transpose_a, transpose_b;
  int64_t m, n, k, batch;
};

// Runs it by cuBLAS. Returns false if there is no cuBLAS: the environment variable RIG_CUBLAS names its library.
bool RunGemm(const Gemm& gemm, void* stream);

}  // namespace rig
