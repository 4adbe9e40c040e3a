// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The host's side of a launch: grids, errors, workspaces. Includes no device code, so that tests compile it with a CUDA runtime of their
// own.
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

// What a launch or any other call returns when an earlier kernel failed. The GPU's context is lost then: every later call returns it too.
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

// Clears the thread's last error if it is the one given. An error that other code left stays.
inline void forget(cudaError_t error) {
  if (cudaPeekAtLastError() == error) cudaGetLastError();
}

// The status of a call that returned `error`.
inline int cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return PMO_OK;
  forget(error);
  std::string text = std::string("CUDA: ") + what + ": ";
  if (is_of_earlier_work(error)) text += "kernels launched before failed: ";
  text += cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) text += capability_text();
  return fail(PMO_INTERNAL, text);
}

// The limits of the current device, and its number.
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

// An attribute of kernels of one kind, which is set once on each device and stays.
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

// Kernels of one kind may have `bytes` of dynamic shared memory on a device from now on. Set once and as high as it will ever be needed:
// set to what each launch needs, another thread could lower it between this and the launch.
class SharedMemoryLimit : KernelAttribute<cudaFuncAttributeMaxDynamicSharedMemorySize> {
 public:
  template <typename... Parameters>
  int raise(void (*kernel)(Parameters...), int device, int bytes) {
    return set(kernel, device, bytes);
  }
};

// The shape of a launch. In a cooperative one all blocks are resident and may wait for each other.
struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  bool cooperative = false;
};

// Launches, and returns the error of this launch alone: that of <<<>>> can only be asked for together with what others left.
template <typename... Parameters, typename... Arguments>
cudaError_t try_launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = grid.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
int launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, Arguments&&... arguments) {
  return cuda_status(try_launch(kernel, grid, stream, std::forward<Arguments>(arguments)...), name);
}

// Blocks for a loop over `items` with a grid stride: enough to cover them, at most `limit`.
inline unsigned grid_for(int64_t items, int64_t items_per_block, int64_t limit = int64_t{1} << 20) {
  const int64_t blocks = divide_up(items, items_per_block);
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

constexpr int64_t kMaxBlocksOfGrid = INT32_MAX;

// Calls run(first, count) for ranges of [0, tokens), for kernels without a loop over a grid's stride: one range, unless the blocks of all
// tokens are too many for a grid. Also calls it for no tokens, once. `warps_of_token` is at most the warps of such a grid, in which
// `other_blocks` have no token.
template <typename Run>
int in_grids(int64_t tokens, int64_t warps_of_token, int64_t warps_of_block, Run run, int64_t other_blocks = 0) {
  const int64_t most = (kMaxBlocksOfGrid - other_blocks) * warps_of_block / warps_of_token;
  for (int64_t first = 0;; first += most) {
    const int64_t rest = tokens - first;
    if (const int status = run(first, rest < most ? rest : most)) return status;
    if (rest <= most) return PMO_OK;
  }
}

// What every *_cuda entry point does around its body.
template <typename Params, typename Body>
int run_cuda(const Params* params, void* stream, Body body) noexcept {
  if (params == nullptr) return fail(PMO_INVALID_ARGUMENT, "params must be given");
  return guarded([&] { return body(*params, static_cast<cudaStream_t>(stream)); });
}

// Hands out aligned pieces of a workspace; with a null base it only adds up their sizes.
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

// Returns from the calling function when a CUDA call failed.
#define PMO_CUDA(call)                                                                       \
  do {                                                                                       \
    if (const int pmo_status_ = ::pmo::cuda::cuda_status((call), #call)) return pmo_status_; \
  } while (0)
