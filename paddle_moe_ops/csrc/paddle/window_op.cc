// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Symmetric buffers (pmo/ranks.h) as tensors that own their memory. The last tensor over it frees it, in any thread, with or
// without Python's lock. Python maps the memory and calls these operators directly, in dygraph only.
#include "paddle/direct.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 creates no tensors over existing memory

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef PMO_WITH_CUDA
#include <cuda_runtime.h>

#include "cuda/driver.h"
#endif

#include <cstring>
#include <memory>

// With PADDLE_WITH_CUDA this header includes those of cuBLAS, cuDNN and others, which no other file needs. The macro changes no
// class that this file uses. The alternative, paddle::from_blob, rejects host memory on a GPUPlace.
#undef PADDLE_WITH_CUDA
#include "paddle/phi/core/dense_tensor.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operators' own

constexpr char kFunction[] = "ExpertParallel";
constexpr char kNoMemory[] = "the window must be memory that ranks share";
constexpr char kNoWords[] = "the number of words must be positive";

void unmap(phi::Allocation* memory) {
#ifdef __linux__
  munmap(memory->ptr(), memory->size());
#endif
}

#ifdef PMO_WITH_CUDA
// Frees memory of a GPU once no kernel uses it. If a kernel has failed or the process ends, the driver frees it with the context.
template <typename Free>
void free_when_idle(const phi::Allocation& memory, Free free) {
  try {
    CurrentDevice current;
    current.set(memory.place().GetDeviceId(), kFunction);
    if (cudaDeviceSynchronize() == cudaSuccess) free();
  } catch (const std::exception&) {  // setting the current device failed
  }
}

void unmap_on_gpu(phi::Allocation* memory) {
  static const auto unmap = pmo::cuda::driver_function<decltype(&cuMemUnmap)>("cuMemUnmap", 10020);
  static const auto free_addresses = pmo::cuda::driver_function<decltype(&cuMemAddressFree)>("cuMemAddressFree", 10020);
  free_when_idle(*memory, [memory] {
    const auto address = reinterpret_cast<CUdeviceptr>(memory->ptr());
    if (unmap == nullptr || free_addresses == nullptr) return;
    if (unmap(address, memory->size()) == CUDA_SUCCESS) free_addresses(address, memory->size());
  });
}

void free_pinned(phi::Allocation* memory) {
  free_when_idle(*memory, [memory] { cudaFreeHost(memory->ptr()); });
}
#endif

// A tensor [rows, columns] that owns its memory.
paddle::Tensor owner_of(void* address, int64_t rows, int64_t columns, paddle::DataType dtype, const paddle::Place& place,
                        phi::Allocation::DeleterFnPtr free) {
  const size_t bytes = static_cast<size_t>(rows * columns) * phi::SizeOf(dtype);
  const auto memory = std::make_shared<phi::Allocation>(address, bytes, free, place);
  const phi::DenseTensorMeta meta(dtype, common::make_ddim({rows, columns}));
  return paddle::Tensor(std::make_shared<phi::DenseTensor>(memory, meta));
}

// A tensor [rows, columns] over mapped memory of the device of `like`, which it unmaps when freed.
Outputs window(const paddle::Tensor& like, int64_t address, int64_t rows, int64_t columns, int dtype) {
  const Target target(kFunction, {&like});
  require(address != 0 && rows > 0 && columns > 0, kFunction, kNoMemory);
  auto free = &unmap;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) free = &unmap_on_gpu;
#endif
  return {owner_of(reinterpret_cast<void*>(address), rows, columns, static_cast<paddle::DataType>(dtype), target.place(), free)};
}

// int32 [1, count] zeros in host memory that the device of `like` can write to.
Outputs host_words(const paddle::Tensor& like, int64_t count) {
  const Target target(kFunction, {&like});
  require(count > 0, kFunction, kNoWords);
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) {
    void* address = nullptr;
    const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
    const cudaError_t error = cudaHostAlloc(&address, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) fail_internally(std::string(kFunction) + ": CUDA: " + cudaGetErrorString(error));
    std::memset(address, 0, bytes);
    return {owner_of(address, 1, count, paddle::DataType::INT32, target.place(), &free_pinned)};
  }
#endif
  return {target.zeros({1, count}, paddle::DataType::INT32)};
}

}  // namespace

PMO_DIRECT(window, window);
PMO_DIRECT(host_words, host_words);

#endif
