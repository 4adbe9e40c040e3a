// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// cuBLAS, loaded on the first use: the toolkit that builds the rig may lack it. Declared as in cuBLAS's documentation.
#include "blas.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <cstdio>
#include <cstdlib>

namespace rig {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kTransposed = 1, kAsStored = 0;  // cublasOperation_t
constexpr int kCompute32F = 68;                // cublasComputeType_t
constexpr int kDefaultAlgorithm = -1;          // cublasGemmAlgo_t

struct Blas {
  using Handle = void*;

  int (*create)(Handle*);
  int (*set_stream)(Handle, cudaStream_t);
  int (*set_workspace)(Handle, void*, size_t);
  int (*gemm)(Handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, cudaDataType a_type,
              int lda, long long stride_a, const void* b, cudaDataType b_type, int ldb, long long stride_b, const void* beta,
              void* c, cudaDataType c_type, int ldc, long long stride_c, int batch, int compute_type, int algorithm);
  Handle handle = nullptr;  // null if cuBLAS is missing
  void* workspace = nullptr;

  Blas() {
    const char* name = std::getenv("RIG_CUBLAS");
    void* library = name == nullptr ? nullptr : dlopen(name, RTLD_NOW);
    if (library == nullptr) {
      if (name != nullptr) std::fprintf(stderr, "cuda_rig: %s\n", dlerror());
      return;
    }
    const auto find = [&](auto* function, const char* symbol) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
      return *function != nullptr;
    };
    if (!find(&create, "cublasCreate_v2") || !find(&set_stream, "cublasSetStream_v2") ||
        !find(&set_workspace, "cublasSetWorkspace_v2") || !find(&gemm, "cublasGemmStridedBatchedEx")) {
      return;
    }
    if (cudaMalloc(&workspace, kWorkspaceBytes) != cudaSuccess || create(&handle) != 0) handle = nullptr;
  }
};

}  // namespace

bool RunGemm(const Gemm& gemm, void* stream) {
  static Blas blas;
  if (blas.handle == nullptr) return false;
  const float one = 1.0f, zero = 0.0f;
  const cudaDataType type = gemm.is_bfloat16 ? CUDA_R_16BF : CUDA_R_32F;
  const int m = static_cast<int>(gemm.m), n = static_cast<int>(gemm.n), k = static_cast<int>(gemm.k);
  // cuBLAS has columns first: it computes C^T = B^T A^T
  if (blas.set_stream(blas.handle, static_cast<cudaStream_t>(stream)) != 0) return false;
  if (blas.set_workspace(blas.handle, blas.workspace, kWorkspaceBytes) != 0) return false;
  return blas.gemm(blas.handle, gemm.transpose_b ? kTransposed : kAsStored, gemm.transpose_a ? kTransposed : kAsStored, n, m, k,
                   &one, gemm.b, type, gemm.transpose_b ? k : n, gemm.k * gemm.n, gemm.a, type, gemm.transpose_a ? m : k,
                   gemm.m * gemm.k, &zero, gemm.c, type, n, gemm.m * gemm.n, static_cast<int>(gemm.batch), kCompute32F,
                   kDefaultAlgorithm) == 0;
}

}  // namespace rig
