// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// samples: a thread per sample, in a grid-stride loop. Each CTA whose samples differ sets `changed` and fills all scales, so
// CTAs do not wait for each other. Almost always none differs, and each sample costs one 32-byte sector.
#include <cstdint>

#include "common/checks.h"
#include "cuda/launch.h"
#include "pmo/samples.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 256;

template <typename Item>
__global__ void __launch_bounds__(kThreads) samples(const __grid_constant__ pmo_samples_params p) {
  const auto* values = static_cast<const Item*>(p.values);
  auto* kept = static_cast<Item*>(p.samples);
  bool differs = false;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.num_samples; i += int64_t{gridDim.x} * kThreads) {
    const Item value = values[i * p.step];
    if (p.changed == nullptr) {
      kept[i] = value;
    } else {
      differs |= kept[i] != value;
    }
  }
  if (!__syncthreads_or(differs)) return;
  for (int64_t i = threadIdx.x; i < p.num_scales; i += kThreads) p.scales[i] = __int_as_float(0x7FC00000);
  if (threadIdx.x == 0) {
    *static_cast<volatile int32_t*>(p.changed) = 1;
    __threadfence_system();  // the host may read it before this grid ends
  }
}

int run(const pmo_samples_params& p, cudaStream_t stream) {
  if (const int status = check_samples(p)) return status;
  if (p.num_samples == 0) return PMO_OK;
  const Grid grid = {grid_for(p.num_samples, kThreads, kMaxBlocks), kThreads};
  return launch("samples", p.item_size == 2 ? samples<uint16_t> : samples<uint32_t>, grid, stream, p);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_samples_cuda(const pmo_samples_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::run);
}
