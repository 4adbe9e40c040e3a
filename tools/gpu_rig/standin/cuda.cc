// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A stand-in for the GPU, so that the rig runs without one. It is a CUDA runtime whose device memory is host memory (garbage at
// first), with entry points of the CUDA core that call the CPU's.
//
// It shows whether Paddle finds all kernels it needs on the device `cuda_rig` and, with two GPUs, whether the right one is
// current at a launch. It shows nothing about kernels or races, and checks of data find nothing. It also implements the few
// driver functions by which tests change the current GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "common/status.h"
#include "pmo/grouped_float8.h"
#include "pmo/grouped_rows.h"
#include "pmo/index_add.h"
#include "pmo/matrices.h"
#include "pmo/paddle_float8.h"
#include "pmo/permute.h"
#include "pmo/quantize.h"
#include "pmo/ranks.h"
#include "pmo/route.h"
#include "pmo/row_id_map.h"
#include "pmo/samples.h"
#include "pmo/sort_chunks.h"
#include "pmo/topk.h"

namespace {

constexpr int64_t kFindingsBytes = 256;
constexpr int kDevices = 2;

thread_local int current_device = 0;

struct Stream {
  int device;
};

// True if the stream's device is current: a stream accepts kernels from its own device only.
bool is_current(void* stream) { return stream == nullptr || static_cast<Stream*>(stream)->device == current_device; }

int wrong_device(const char* kernel) {
  return pmo::fail(PMO_INTERNAL, std::string("CUDA: ") + kernel + ": another GPU is current than that of the stream");
}

// The context of a device is a number: one more than its own.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1); }

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes / 256 + 1) * 256);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xA5, bytes);
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

// The caller reads findings at the beginning of the workspace; the CPU uses the rest.
pmo_route_params without_checks(const pmo_route_params& params) {
  pmo_route_params moved = params;
  moved.checks = 0;
  *static_cast<pmo_route_findings*>(params.workspace) = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0, PMO_NOWHERE};
  moved.workspace = static_cast<char*>(params.workspace) + kFindingsBytes;
  moved.workspace_bytes -= kFindingsBytes;
  return moved;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) { return *properties = {}, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = size_t{8} << 30;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  return std::memmove(target, source, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memmove(target, source, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t line = 0; line < height; ++line) {
    std::memmove(static_cast<char*>(target) + line * target_pitch, static_cast<const char*>(source) + line * source_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* target, int value, size_t bytes) { return std::memset(target, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  return std::memset(target, value, bytes), cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{current_device});
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) { return *lowest = *highest = 0, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete reinterpret_cast<Stream*>(stream), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return allocate(reinterpret_cast<void**>(event), 1); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return release(event); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = kDevices, CUDA_SUCCESS; }
// Returns no compute capability, so that Triton does not treat the device as a GPU.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return *context = context_of(device), CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) {
  return current_device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1, CUDA_SUCCESS;
}

int64_t pmo_clean_rowmap_cuda_workspace_bytes(const pmo_clean_rowmap_params*) { return kFindingsBytes; }
int64_t pmo_quantize_cuda_workspace_bytes(const pmo_quantize_params*) { return 0; }
int64_t pmo_rank_dispatch_cuda_workspace_bytes(const pmo_rank_dispatch_params*) { return 0; }
int64_t pmo_rank_plan_cuda_workspace_bytes(const pmo_rank_plan_params*) { return 0; }
int64_t pmo_route_cuda_workspace_bytes(const pmo_route_params* params) {
  const int64_t bytes = pmo_route_cpu_workspace_bytes(params);
  return bytes == 0 ? 0 : bytes + kFindingsBytes;  // 0: the sizes are bad
}
int64_t pmo_sort_chunks_cuda_workspace_bytes(const pmo_sort_chunks_params*) { return 0; }
int64_t pmo_topk_cuda_workspace_bytes(const pmo_topk_params*) { return 0; }

int pmo_clean_rowmap_cuda(const pmo_clean_rowmap_params* params, void* stream) {
  if (!is_current(stream)) return wrong_device("clean_rowmap");
  pmo_clean_rowmap_params unchecked = *params;
  unchecked.checks = 0;
  *static_cast<pmo_rowmap_findings*>(params->workspace) = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0};
  return pmo_clean_rowmap_cpu(&unchecked, nullptr);
}
int pmo_route_count_cuda(const pmo_route_params* params, void* stream) {
  if (!is_current(stream)) return wrong_device("route_count");
  const pmo_route_params moved = without_checks(*params);
  return pmo_route_count_cpu(&moved, nullptr);
}
int pmo_route_permute_cuda(const pmo_route_params* route, const pmo_permute_params* permute, void* stream) {
  if (!is_current(stream)) return wrong_device("route_permute");
  const pmo_route_params moved = without_checks(*route);
  return pmo_route_permute_cpu(&moved, permute, nullptr);
}

#define RUN_ON_CPU(operation, Params)                                                              \
  int pmo_##operation##_cuda(const Params* params, void* stream) {                                 \
    return is_current(stream) ? pmo_##operation##_cpu(params, nullptr) : wrong_device(#operation); \
  }
RUN_ON_CPU(dequantize, pmo_dequantize_params)
RUN_ON_CPU(dequantize_matrices, pmo_dequantize_matrices_params)
RUN_ON_CPU(gather_slots, pmo_slots_params)
RUN_ON_CPU(grouped_clear, pmo_grouped_clear_params)
RUN_ON_CPU(grouped_tables, pmo_grouped_tables_params)
RUN_ON_CPU(index_add, pmo_index_add_params)
RUN_ON_CPU(make_row_id_map, pmo_row_id_map_params)
RUN_ON_CPU(paddle_quantize, pmo_paddle_quantize_params)
RUN_ON_CPU(paddle_swiglu, pmo_paddle_swiglu_params)
RUN_ON_CPU(paddle_swiglu_backward, pmo_paddle_swiglu_backward_params)
RUN_ON_CPU(permute, pmo_permute_params)
RUN_ON_CPU(quantize, pmo_quantize_params)
RUN_ON_CPU(quantize_blocks, pmo_quantize_blocks_params)
RUN_ON_CPU(quantize_columns, pmo_quantize_columns_params)
RUN_ON_CPU(rank_barrier, pmo_rank_barrier_params)
RUN_ON_CPU(rank_combine, pmo_rank_combine_params)
RUN_ON_CPU(rank_dispatch, pmo_rank_dispatch_params)
RUN_ON_CPU(rank_get, pmo_rank_values_params)
RUN_ON_CPU(rank_plan, pmo_rank_plan_params)
RUN_ON_CPU(rank_put, pmo_rank_values_params)
RUN_ON_CPU(rank_receive, pmo_rank_receive_params)
RUN_ON_CPU(rank_records, pmo_rank_records_params)
RUN_ON_CPU(rank_rows, pmo_rank_rows_params)
RUN_ON_CPU(rank_send, pmo_rank_send_params)
RUN_ON_CPU(rank_spoil, pmo_rank_spoil_params)
RUN_ON_CPU(rank_take, pmo_rank_values_params)
RUN_ON_CPU(read_row_id_map, pmo_row_id_map_params)
RUN_ON_CPU(row_sums, pmo_row_sums_params)
RUN_ON_CPU(samples, pmo_samples_params)
RUN_ON_CPU(scatter_slots, pmo_slots_params)
RUN_ON_CPU(sort_chunks, pmo_sort_chunks_params)
RUN_ON_CPU(swiglu, pmo_swiglu_params)
RUN_ON_CPU(swiglu_backward, pmo_swiglu_backward_params)
RUN_ON_CPU(topk, pmo_topk_params)
RUN_ON_CPU(topk_backward, pmo_topk_backward_params)
RUN_ON_CPU(unpermute, pmo_unpermute_params)
RUN_ON_CPU(unpermute_backward, pmo_unpermute_backward_params)

}  // extern "C"
