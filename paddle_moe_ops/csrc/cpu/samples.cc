// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Samples on the CPU, on the calling thread: they are a few thousand elements.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/checks.h"
#include "common/status.h"

namespace pmo {
namespace cpu {
namespace {

template <typename Item>
int of_items(const pmo_samples_params& p) {
  const auto* values = static_cast<const Item*>(p.values);
  auto* samples = static_cast<Item*>(p.samples);
  bool differs = false;
  for (int64_t i = 0; i < p.num_samples; ++i) {
    const Item value = values[i * p.step];
    if (p.changed == nullptr) samples[i] = value;
    differs |= samples[i] != value;
  }
  if (!differs) return PMO_OK;
  *p.changed = 1;
  std::fill(p.scales, p.scales + p.num_scales, std::numeric_limits<float>::quiet_NaN());
  return PMO_OK;
}

int samples(const pmo_samples_params& p) {
  if (const int status = check_samples(p)) return status;
  return p.item_size == 2 ? of_items<uint16_t>(p) : of_items<uint32_t>(p);
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_samples_cpu(const pmo_samples_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::samples);
}
