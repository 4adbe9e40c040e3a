// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A stand-in for the CUDA runtime, for tests of a launch's host code: it has devices, errors and limits of kernels, and
// runs nothing.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <utility>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxThreadsPerMultiProcessor,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxRegistersPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization };

using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative, programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace fake {

constexpr int kSharedByDefault = 48 << 10;

inline thread_local int device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t lost = cudaSuccess;  // what every call says once a kernel went wrong
inline std::map<cudaDeviceAttr, int> attributes;
inline int attributes_read = 0, limits_set = 0, launches = 0;
inline std::map<std::pair<const void*, int>, int> shared_limits;
inline std::function<cudaError_t()> before_launch;  // may fail the launch

inline cudaError_t done(cudaError_t error) {
  if (error == cudaSuccess) error = lost;
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace fake

inline cudaError_t cudaPeekAtLastError() { return fake::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(fake::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default:
      return "another error";
  }
}
inline cudaError_t cudaGetDevice(int* device) { return *device = fake::device, fake::done(cudaSuccess); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  ++fake::attributes_read;
  return *value = fake::attributes[attribute], fake::done(cudaSuccess);
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  ++fake::limits_set;
  return fake::shared_limits[{kernel, fake::device}] = bytes, fake::done(cudaSuccess);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&...) {
  if (fake::lost != cudaSuccess) return fake::done(fake::lost);
  if (fake::before_launch) {
    const cudaError_t error = fake::before_launch();
    if (error != cudaSuccess) return fake::done(error);
  }
  const dim3 &blocks = config->gridDim, &threads = config->blockDim;
  if (blocks.x == 0 || blocks.x > 0x7FFFFFFFu || blocks.y > 65535 || blocks.z > 65535 ||
      threads.x * threads.y * threads.z > 1024) {
    return fake::done(cudaErrorInvalidConfiguration);
  }
  const auto found = fake::shared_limits.find({reinterpret_cast<const void*>(kernel), fake::device});
  const size_t limit = found == fake::shared_limits.end() ? fake::kSharedByDefault : found->second;
  if (config->dynamicSmemBytes > limit) return fake::done(cudaErrorInvalidValue);
  ++fake::launches;
  return fake::done(cudaSuccess);
}
