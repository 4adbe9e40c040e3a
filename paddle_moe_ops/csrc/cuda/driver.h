// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Functions of the CUDA driver, looked up at run time: this library is not linked with libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace pmo {
namespace cuda {

// The driver function `name` with the signature of CUDA `version`, or null if the driver is older.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace cuda
}  // namespace pmo
