// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing and permutation in one call. A call on the CPU has no launch cost, so the three operators run one after another.
#include "common/checks.h"
#include "common/status.h"

extern "C" int pmo_route_permute_cpu(const pmo_route_params* route, const pmo_permute_params* permute, void* stream) {
  if (route != nullptr && permute != nullptr) {
    if (const int status = pmo::check_route_permute(*route, *permute)) return status;
  }
  if (const int status = pmo_route_count_cpu(route, stream)) return status;
  if (const int status = pmo_route_cpu(route, stream)) return status;
  return permute == nullptr ? PMO_OK : pmo_permute_cpu(permute, stream);
}
