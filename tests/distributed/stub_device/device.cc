// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A Paddle custom-device plug-in for tests of paddle.distributed without a GPU: CustomPlace("stub_rig", i) is memory of the host,
// and everything is done when its call returns, so streams and events have nothing to do. Collectives go between processes
// (collectives.cc), and operators of Paddle's own run on the CPU (tools/gpu_rig/host_kernels.cc).
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace {

constexpr size_t kDevices = 8;
constexpr size_t kMemory = size_t{1} << 40;

thread_local int current_device = 0;

template <typename... Arguments>
C_Status Nothing(Arguments...) {
  return C_SUCCESS;
}
template <typename Handle>
C_Status Create(const C_Device, Handle* handle) {
  *handle = reinterpret_cast<Handle>(new char);
  return C_SUCCESS;
}
template <typename Handle>
C_Status Destroy(const C_Device, Handle handle) {
  delete reinterpret_cast<char*>(handle);
  return C_SUCCESS;
}

C_Status SetDevice(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}
C_Status GetDevice(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}
C_Status DeviceCount(size_t* count) {
  *count = kDevices;
  return C_SUCCESS;
}
C_Status DeviceList(size_t* devices) {
  for (size_t i = 0; i < kDevices; ++i) devices[i] = i;
  return C_SUCCESS;
}
C_Status AddCallback(const C_Device device, C_Stream stream, C_Callback callback, void* user_data) {
  C_Status status;
  callback(device, stream, user_data, &status);
  return status;
}

C_Status Allocate(const C_Device, void** ptr, size_t size) {
  *ptr = std::malloc(size);
  return *ptr ? C_SUCCESS : C_FAILED;
}
C_Status Deallocate(const C_Device, void* ptr, size_t) {
  std::free(ptr);
  return C_SUCCESS;
}
C_Status Memset(const C_Device, void* ptr, unsigned char value, size_t size) {
  std::memset(ptr, value, size);
  return C_SUCCESS;
}
C_Status Copy(const C_Device, void* dst, const void* src, size_t size) {
  std::memmove(dst, src, size);
  return C_SUCCESS;
}
C_Status CopyOnStream(const C_Device device, C_Stream, void* dst, const void* src, size_t size) {
  return Copy(device, dst, src, size);
}

C_Status MemoryStats(const C_Device, size_t* total, size_t* free) {
  *total = *free = kMemory;
  return C_SUCCESS;
}
template <size_t value>
C_Status Constant(const C_Device, size_t* out) {
  *out = value;
  return C_SUCCESS;
}
C_Status Supported(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

}  // namespace

namespace rig {

const char kDeviceType[] = "stub_rig";

C_Status CopyToHost(void* host, const void* device, size_t bytes, void*) { return Copy(nullptr, host, device, bytes); }
C_Status CopyToDevice(void* device, const void* host, size_t bytes, void*) { return Copy(nullptr, device, host, bytes); }

}  // namespace rig

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(rig::kDeviceType);
  C_DeviceInterface* device = params->interface;
  std::memset(device, 0, sizeof(C_DeviceInterface));
  device->size = sizeof(C_DeviceInterface);

  device->initialize = Nothing;
  device->finalize = Nothing;
  device->init_device = SetDevice;
  device->deinit_device = Nothing;
  device->set_device = SetDevice;
  device->get_device = GetDevice;
  device->get_device_count = DeviceCount;
  device->get_device_list = DeviceList;

  device->create_stream = Create<C_Stream>;
  device->destroy_stream = Destroy<C_Stream>;
  device->query_stream = Nothing;
  device->stream_add_callback = AddCallback;
  device->create_event = Create<C_Event>;
  device->record_event = Nothing;
  device->destroy_event = Destroy<C_Event>;
  device->query_event = Nothing;
  device->synchronize_device = Nothing;
  device->synchronize_stream = Nothing;
  device->synchronize_event = Nothing;
  device->stream_wait_event = Nothing;

  device->device_memory_allocate = Allocate;
  device->device_memory_deallocate = Deallocate;
  device->device_memory_set = Memset;
  device->host_memory_allocate = Allocate;
  device->host_memory_deallocate = Deallocate;
  device->memory_copy_h2d = Copy;
  device->memory_copy_d2h = Copy;
  device->memory_copy_d2d = Copy;
  device->async_memory_copy_h2d = CopyOnStream;
  device->async_memory_copy_d2h = CopyOnStream;
  device->async_memory_copy_d2d = CopyOnStream;

  device->device_memory_stats = MemoryStats;
  device->device_min_chunk_size = Constant<512>;
  device->device_max_chunk_size = Constant<kMemory>;
  device->device_max_alloc_size = Constant<kMemory>;
  device->get_compute_capability = Constant<0>;
  device->get_runtime_version = Constant<0>;
  device->get_driver_version = Constant<0>;
  device->is_float16_supported = Supported;
  device->is_bfloat16_supported = Supported;

  rig::SetCollectives(device);
}
