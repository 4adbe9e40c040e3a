// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Facts about the current GPU for the heuristics of csrc/layer, read once per device: a query of the clock rate takes some 0.7 ms.
#include "cuda/launch.h"
#include "pmo/layer.h"

namespace pmo {
namespace cuda {
namespace {

struct GpuFacts {
  int32_t num_sms = 0, memory_gbps = 0;
};

GpuFacts gpu_facts() {
  static OncePerDevice<GpuFacts> known;
  GpuFacts facts;
  int device = 0;
  if (cuda_status(cudaGetDevice(&device), "cudaGetDevice") != PMO_OK) return facts;
  known.get(device, &facts, [&](GpuFacts* found) {
    int clock_khz = 0, bus_bits = 0;
    const std::pair<int*, cudaDeviceAttr> wanted[] = {{&found->num_sms, cudaDevAttrMultiProcessorCount},
                                                      {&clock_khz, cudaDevAttrMemoryClockRate},
                                                      {&bus_bits, cudaDevAttrGlobalMemoryBusWidth}};
    for (const auto& each : wanted) {
      const cudaError_t error = cudaDeviceGetAttribute(each.first, each.second, device);
      if (error != cudaSuccess) forget(error);
    }
    found->memory_gbps = static_cast<int32_t>(2 * int64_t{clock_khz} * bus_bits / 8000000);  // two transfers per clock
    return static_cast<int>(PMO_OK);
  });
  return facts;
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" void pmo_gpu_facts_cuda(int32_t* num_sms, int32_t* memory_gbps) {
  const pmo::cuda::GpuFacts facts = pmo::cuda::gpu_facts();
  *num_sms = facts.num_sms;
  *memory_gbps = facts.memory_gbps;
}
