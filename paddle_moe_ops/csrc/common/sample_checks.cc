// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "common/checks.h"

namespace pmo {

int check_samples(const pmo_samples_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_samples_params of this library");
  PMO_REQUIRE(p.num_samples >= 0 && p.num_samples <= INT32_MAX, "num_samples", "in [0, 2^31)");
  PMO_REQUIRE(p.step >= 1 && p.step <= INT32_MAX, "step", "in [1, 2^31)");
  PMO_REQUIRE(p.item_size == 2 || p.item_size == 4, "item_size", "2 or 4");
  PMO_REQUIRE(p.num_scales >= 0 && p.num_scales <= INT32_MAX, "num_scales", "in [0, 2^31)");
  const auto is_array = [&](const void* array) {
    return p.num_samples == 0 || (array != nullptr && reinterpret_cast<uintptr_t>(array) % p.item_size == 0);
  };
  PMO_REQUIRE(is_array(p.values), "values", "an array aligned to its element size");
  PMO_REQUIRE(is_array(p.samples), "samples", "an array aligned to its element size");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.changed, "changed");
  PMO_REQUIRE_ARRAY(p.scales, p.num_scales, "scales");
  return PMO_OK;
}

}  // namespace pmo
