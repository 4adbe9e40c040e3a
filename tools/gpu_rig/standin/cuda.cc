// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A stand-in for the GPU, so that the rig runs where there is none: a CUDA runtime whose device memory is host memory (and holds garbage
// at first), and entry points of the CUDA core that run the CPU's. What it shows is whether Paddle finds everything it needs on the
// device `cuda_rig`; nothing about kernels, streams or races. Checks of data find nothing.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "pmo/permute.h"
#include "pmo/quantize.h"
#include "pmo/route.h"
#include "pmo/row_id_map.h"
#include "pmo/sort_chunks.h"
#include "pmo/topk.h"

namespace {

constexpr int64_t kFindingsBytes = 256;

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes / 256 + 1) * 256);
  std::memset(*pointer, 0xA5, bytes);
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

// The caller looks for findings at the begin of the workspace; the CPU gets what is behind them.
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

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
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
cudaError_t cudaMemset(void* target, int value, size_t bytes) { return std::memset(target, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  return std::memset(target, value, bytes), cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return allocate(reinterpret_cast<void**>(stream), 1); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return release(stream); }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return allocate(reinterpret_cast<void**>(event), 1); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return release(event); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

int64_t pmo_clean_rowmap_cuda_workspace_bytes(const pmo_clean_rowmap_params*) { return kFindingsBytes; }
int64_t pmo_quantize_cuda_workspace_bytes(const pmo_quantize_params*) { return 0; }
int64_t pmo_route_cuda_workspace_bytes(const pmo_route_params* params) {
  return pmo_route_cpu_workspace_bytes(params) + kFindingsBytes;
}
int64_t pmo_sort_chunks_cuda_workspace_bytes(const pmo_sort_chunks_params*) { return 0; }
int64_t pmo_topk_cuda_workspace_bytes(const pmo_topk_params*) { return 0; }

int pmo_clean_rowmap_cuda(const pmo_clean_rowmap_params* params, void*) {
  pmo_clean_rowmap_params unchecked = *params;
  unchecked.checks = 0;
  *static_cast<pmo_rowmap_findings*>(params->workspace) = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0};
  return pmo_clean_rowmap_cpu(&unchecked, nullptr);
}
int pmo_route_count_cuda(const pmo_route_params* params, void*) {
  const pmo_route_params moved = without_checks(*params);
  return pmo_route_count_cpu(&moved, nullptr);
}
int pmo_route_permute_cuda(const pmo_route_params* route, const pmo_permute_params* permute, void*) {
  const pmo_route_params moved = without_checks(*route);
  return pmo_route_permute_cpu(&moved, permute, nullptr);
}

#define RUN_ON_CPU(operation, Params) \
  int pmo_##operation##_cuda(const Params* params, void*) { return pmo_##operation##_cpu(params, nullptr); }
RUN_ON_CPU(dequantize, pmo_dequantize_params)
RUN_ON_CPU(gather_slots, pmo_slots_params)
RUN_ON_CPU(make_row_id_map, pmo_row_id_map_params)
RUN_ON_CPU(permute, pmo_permute_params)
RUN_ON_CPU(quantize, pmo_quantize_params)
RUN_ON_CPU(read_row_id_map, pmo_row_id_map_params)
RUN_ON_CPU(scatter_slots, pmo_slots_params)
RUN_ON_CPU(sort_chunks, pmo_sort_chunks_params)
RUN_ON_CPU(topk, pmo_topk_params)
RUN_ON_CPU(topk_backward, pmo_topk_backward_params)
RUN_ON_CPU(unpermute, pmo_unpermute_params)
RUN_ON_CPU(unpermute_backward, pmo_unpermute_backward_params)

}  // extern "C"
