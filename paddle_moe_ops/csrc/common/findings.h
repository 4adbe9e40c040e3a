// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What pmo_route_report is made of, for the CPU operators, which report as they go.
#pragma once

#include "pmo/route.h"

namespace pmo {

// The first bad value, then wrong counts, as far as p.checks asks.
int report_findings(const pmo_route_params& p, const pmo_route_findings& found, const int32_t* routed_per_expert);

// Slots that find the buffer of p.num_rows rows full.
int report_overflow(const pmo_route_params& p, const int32_t* routed_per_expert);

}  // namespace pmo
