// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A Paddle custom-device plug-in that presents NVIDIA GPUs to the CPU build of Paddle as CustomPlace("cuda_rig", i): device
// memory, copies, streams and events through the CUDA runtime. Compiled custom ops and Triton kernels run on the device memory
// directly. Paddle's own operators run on the CPU (host_kernels.cc), and collectives over NCCL (nccl_collectives.cc). Put the
// built library (see the Makefile) in a folder and set CUSTOM_DEVICE_ROOT to that folder before importing paddle.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "device.h"

namespace {

C_Status Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return C_SUCCESS;
  std::fprintf(stderr, "cuda_rig: %s: %s\n", what, cudaGetErrorString(status));
  return C_ERROR;
}
#define RIG_RETURN(call) return Check((call), #call)
#define RIG_TRY(call) \
  if (C_Status rig_status = Check((call), #call); rig_status != C_SUCCESS) return rig_status

cudaStream_t Stream(C_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Event(C_Event event) { return reinterpret_cast<cudaEvent_t>(event); }

C_Status Initialize() { return C_SUCCESS; }
C_Status Finalize() { return C_SUCCESS; }
C_Status DeinitDevice(const C_Device) { return C_SUCCESS; }
C_Status SetDevice(const C_Device device) { RIG_RETURN(cudaSetDevice(device->id)); }
C_Status GetDevice(const C_Device device) { RIG_RETURN(cudaGetDevice(&device->id)); }

// The interface has no priority. The first stream of a process is that of the operators. Side streams have the highest
// priority.
C_Status CreateStream(const C_Device device, C_Stream* stream) {
  static std::atomic<bool> is_first{true};
  RIG_TRY(cudaSetDevice(device->id));
  int lowest, highest;
  RIG_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t created;
  RIG_TRY(cudaStreamCreateWithPriority(&created, cudaStreamDefault, is_first.exchange(false) ? lowest : highest));
  *stream = reinterpret_cast<C_Stream>(created);
  return C_SUCCESS;
}
C_Status DestroyStream(const C_Device, C_Stream s) { RIG_RETURN(cudaStreamDestroy(Stream(s))); }
C_Status QueryStream(const C_Device, C_Stream s) { return cudaStreamQuery(Stream(s)) == cudaSuccess ? C_SUCCESS : C_FAILED; }
C_Status AddCallback(const C_Device device, C_Stream s, C_Callback callback, void* user_data) {
  RIG_TRY(cudaStreamSynchronize(Stream(s)));
  C_Status status;
  callback(device, s, user_data, &status);
  return status;
}

C_Status CreateEvent(const C_Device device, C_Event* event) {
  RIG_TRY(cudaSetDevice(device->id));
  cudaEvent_t created;
  RIG_TRY(cudaEventCreate(&created));
  *event = reinterpret_cast<C_Event>(created);
  return C_SUCCESS;
}
C_Status RecordEvent(const C_Device, C_Stream s, C_Event e) { RIG_RETURN(cudaEventRecord(Event(e), Stream(s))); }
C_Status DestroyEvent(const C_Device, C_Event e) { RIG_RETURN(cudaEventDestroy(Event(e))); }
C_Status QueryEvent(const C_Device, C_Event e) { return cudaEventQuery(Event(e)) == cudaSuccess ? C_SUCCESS : C_FAILED; }
C_Status SyncDevice(const C_Device) { RIG_RETURN(cudaDeviceSynchronize()); }
C_Status SyncStream(const C_Device, C_Stream s) { RIG_RETURN(cudaStreamSynchronize(Stream(s))); }
C_Status SyncEvent(const C_Device, C_Event e) { RIG_RETURN(cudaEventSynchronize(Event(e))); }
C_Status StreamWaitEvent(const C_Device, C_Stream s, C_Event e) { RIG_RETURN(cudaStreamWaitEvent(Stream(s), Event(e), 0)); }

C_Status Allocate(const C_Device device, void** ptr, size_t size) {
  RIG_TRY(cudaSetDevice(device->id));
  RIG_RETURN(cudaMalloc(ptr, size));
}
C_Status Deallocate(const C_Device, void* ptr, size_t) { RIG_RETURN(cudaFree(ptr)); }
C_Status Memset(const C_Device, void* ptr, unsigned char value, size_t size) { RIG_RETURN(cudaMemset(ptr, value, size)); }
C_Status HostAllocate(const C_Device, void** ptr, size_t size) { RIG_RETURN(cudaMallocHost(ptr, size)); }
C_Status HostDeallocate(const C_Device, void* ptr, size_t) { RIG_RETURN(cudaFreeHost(ptr)); }

template <cudaMemcpyKind kind>
C_Status Copy(const C_Device, void* dst, const void* src, size_t size) {
  RIG_TRY(cudaDeviceSynchronize());
  RIG_RETURN(cudaMemcpy(dst, src, size, kind));
}
C_Status CopyOnDeviceAsync(const C_Device, C_Stream s, void* dst, const void* src, size_t size) {
  RIG_RETURN(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToDevice, Stream(s)));
}
// Paddle's executor copies to and from the host on streams of its own, which do not wait for the operators' streams.
template <cudaMemcpyKind kind>
C_Status CopyAndWait(const C_Device device, C_Stream, void* dst, const void* src, size_t size) {
  return Copy<kind>(device, dst, src, size);
}

C_Status DeviceCount(size_t* count) {
  int found = 0;
  RIG_TRY(cudaGetDeviceCount(&found));
  *count = found;
  return C_SUCCESS;
}
C_Status DeviceList(size_t* devices) {
  size_t count = 0;
  RIG_TRY(static_cast<cudaError_t>(DeviceCount(&count) == C_SUCCESS ? cudaSuccess : cudaErrorUnknown));
  for (size_t i = 0; i < count; ++i) devices[i] = i;
  return C_SUCCESS;
}
C_Status MemoryStats(const C_Device device, size_t* total, size_t* free) {
  RIG_TRY(cudaSetDevice(device->id));
  RIG_RETURN(cudaMemGetInfo(free, total));
}
template <size_t value>
C_Status Constant(const C_Device, size_t* out) {
  *out = value;
  return C_SUCCESS;
}
C_Status ComputeCapability(const C_Device device, size_t* capability) {
  cudaDeviceProp properties;
  RIG_TRY(cudaGetDeviceProperties(&properties, device->id));
  *capability = properties.major * 10 + properties.minor;
  return C_SUCCESS;
}
C_Status Supported(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

C_Status CopyOnStream(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, void* stream) {
  RIG_TRY(cudaMemcpyAsync(target, source, bytes, kind, static_cast<cudaStream_t>(stream)));
  RIG_RETURN(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

}  // namespace

namespace rig {

const char kDeviceType[] = "cuda_rig";

C_Status CopyToHost(void* host, const void* device, size_t bytes, void* stream) {
  return CopyOnStream(host, device, bytes, cudaMemcpyDeviceToHost, stream);
}
C_Status CopyToDevice(void* device, const void* host, size_t bytes, void* stream) {
  return CopyOnStream(device, host, bytes, cudaMemcpyHostToDevice, stream);
}

}  // namespace rig

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(rig::kDeviceType);
  C_DeviceInterface* device = params->interface;
  std::memset(device, 0, sizeof(C_DeviceInterface));
  device->size = sizeof(C_DeviceInterface);

  device->initialize = Initialize;
  device->finalize = Finalize;
  device->init_device = SetDevice;
  device->deinit_device = DeinitDevice;
  device->set_device = SetDevice;
  device->get_device = GetDevice;
  device->get_device_count = DeviceCount;
  device->get_device_list = DeviceList;

  device->create_stream = CreateStream;
  device->destroy_stream = DestroyStream;
  device->query_stream = QueryStream;
  device->stream_add_callback = AddCallback;
  device->create_event = CreateEvent;
  device->record_event = RecordEvent;
  device->destroy_event = DestroyEvent;
  device->query_event = QueryEvent;
  device->synchronize_device = SyncDevice;
  device->synchronize_stream = SyncStream;
  device->synchronize_event = SyncEvent;
  device->stream_wait_event = StreamWaitEvent;

  device->device_memory_allocate = Allocate;
  device->device_memory_deallocate = Deallocate;
  device->device_memory_set = Memset;
  device->host_memory_allocate = HostAllocate;
  device->host_memory_deallocate = HostDeallocate;
  device->memory_copy_h2d = Copy<cudaMemcpyHostToDevice>;
  device->memory_copy_d2h = Copy<cudaMemcpyDeviceToHost>;
  device->memory_copy_d2d = Copy<cudaMemcpyDeviceToDevice>;
  device->async_memory_copy_h2d = CopyAndWait<cudaMemcpyHostToDevice>;
  device->async_memory_copy_d2h = CopyAndWait<cudaMemcpyDeviceToHost>;
  device->async_memory_copy_d2d = CopyOnDeviceAsync;

  device->device_memory_stats = MemoryStats;
  device->device_min_chunk_size = Constant<512>;
  device->device_max_chunk_size = Constant<(size_t{64} << 30)>;
  device->device_max_alloc_size = Constant<(size_t{64} << 30)>;
  device->get_compute_capability = ComputeCapability;
  device->get_runtime_version = Constant<CUDART_VERSION>;
  device->get_driver_version = Constant<CUDART_VERSION>;
  device->is_float16_supported = Supported;
  device->is_bfloat16_supported = Supported;

  rig::SetCollectives(device);
}
