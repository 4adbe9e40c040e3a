// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Host side of a launch: grids, errors, workspaces. Contains no device code, so that tests compile it with a CUDA runtime of
// their own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "common/arithmetic.h"
#include "common/status.h"
#include "cuda/device_limits.h"

namespace pmo {
namespace cuda {

// True for errors of earlier kernels, which any later call reports. The CUDA context is lost: every later call returns the same
// error.
inline bool is_of_earlier_work(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

// "; the kernels need compute capability 8.0 or newer, but this GPU has 7.5"
inline std::string capability_text() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return "";
  }
  const auto dotted = [](int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); };
  return "; the kernels need compute capability " + dotted(kOldestCapability) + " or newer, but this GPU has " +
         dotted(10 * major + minor);
}

// Clears the thread's last error if it is `error`. Another one, left by other code, stays.
inline void forget(cudaError_t error) {
  if (cudaPeekAtLastError() == error) cudaGetLastError();
}

// Status of a CUDA call that returned `error`.
inline int cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return PMO_OK;
  forget(error);
  std::string text = std::string("CUDA: ") + what + ": ";
  if (is_of_earlier_work(error)) text += "kernels launched before failed: ";
  text += cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) text += capability_text();
  return fail(PMO_INTERNAL, text);
}

// Index and limits of the current device.
inline int current_device(int* device, DeviceLimits* limits) {
  static OncePerDevice<DeviceLimits> known;
  if (const int status = cuda_status(cudaGetDevice(device), "cudaGetDevice")) return status;
  return known.get(*device, limits, [&](DeviceLimits* found) {
    const std::pair<int*, cudaDeviceAttr> wanted[] = {
        {&found->major, cudaDevAttrComputeCapabilityMajor},
        {&found->multiprocessors, cudaDevAttrMultiProcessorCount},
        {&found->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {&found->shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
        {&found->threads_per_multiprocessor, cudaDevAttrMaxThreadsPerMultiProcessor},
        {&found->registers_per_multiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor},
    };
    for (const auto& each : wanted) {
      const cudaError_t error = cudaDeviceGetAttribute(each.first, each.second, *device);
      if (const int status = cuda_status(error, "cudaDeviceGetAttribute")) return status;
    }
    return static_cast<int>(PMO_OK);
  });
}

// A kernel attribute that is set once per device.
template <cudaFuncAttribute kAttribute>
class KernelAttribute {
 public:
  template <typename... Parameters>
  int set(void (*kernel)(Parameters...), int device, int value) {
    bool found = false;
    return is_set_.get(device, &found, [&](bool* is_set) {
      *is_set = true;
      return cuda_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), kAttribute, value), "cudaFuncSetAttribute");
    });
  }

 private:
  OncePerDevice<bool> is_set_;
};

// Limit of a kernel's dynamic shared memory on a device. It is set once, to the largest value that any launch needs: if each
// launch set its own, another thread could lower it before the launch.
class SharedMemoryLimit : KernelAttribute<cudaFuncAttributeMaxDynamicSharedMemorySize> {
 public:
  template <typename... Parameters>
  int raise(void (*kernel)(Parameters...), int device, int bytes) {
    return set(kernel, device, bytes);
  }
};

// Launch configuration. In a cooperative launch all CTAs are resident and may synchronise. A kernel that `overlaps` may start before
// the previous one ends (cuda/ptx/dependent_launch.cuh).
struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  bool cooperative = false, overlaps = false;
};

// Launches, and returns the error of this launch alone. With <<<>>> it would be mixed with errors that other code left.
template <typename... Parameters, typename... Arguments>
cudaError_t try_launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = grid.cooperative ? cudaLaunchAttributeCooperative : cudaLaunchAttributeProgrammaticStreamSerialization;
  if (grid.cooperative) {
    attribute.val.cooperative = 1;
  } else {
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = grid.cooperative || grid.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
int launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, Arguments&&... arguments) {
  return cuda_status(try_launch(kernel, grid, stream, std::forward<Arguments>(arguments)...), name);
}

// CTAs of a grid-stride loop over `items`: enough to cover them, at most `limit`.
inline unsigned grid_for(int64_t items, int64_t items_per_block, int64_t limit = int64_t{1} << 20) {
  const int64_t blocks = divide_up(items, items_per_block);
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

constexpr int64_t kMaxBlocksOfGrid = INT32_MAX;

// Calls run(first, count) for ranges of [0, tokens), for kernels without a grid-stride loop: one range unless the CTAs of all
// tokens exceed a grid. Calls it once for no tokens. A grid has `other_blocks` CTAs without tokens; `warps_of_token` is at most
// the number of its other warps.
template <typename Run>
int in_grids(int64_t tokens, int64_t warps_of_token, int64_t warps_of_block, Run run, int64_t other_blocks = 0) {
  const int64_t most = (kMaxBlocksOfGrid - other_blocks) * warps_of_block / warps_of_token;
  for (int64_t first = 0;; first += most) {
    const int64_t rest = tokens - first;
    if (const int status = run(first, rest < most ? rest : most)) return status;
    if (rest <= most) return PMO_OK;
  }
}

// Common frame of the *_cuda entry points: checks the pointer, turns exceptions into a status.
template <typename Params, typename Body>
int run_cuda(const Params* params, void* stream, Body body) noexcept {
  if (params == nullptr) return fail(PMO_INVALID_ARGUMENT, "params must be given");
  return guarded([&] { return body(*params, static_cast<cudaStream_t>(stream)); });
}

// Bump allocator over a workspace, 256-byte aligned; with a null base it only adds up sizes.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(piece);
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace cuda
}  // namespace pmo

// Returns from the calling function if a CUDA call fails.
#define PMO_CUDA(call)                                                                       \
  do {                                                                                       \
    if (const int pmo_status_ = ::pmo::cuda::cuda_status((call), #call)) return pmo_status_; \
  } while (0)
