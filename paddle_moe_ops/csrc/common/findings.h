// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Parts of pmo_route_report, for the CPU operators, which report as they go.
#pragma once

#include "pmo/route.h"

namespace pmo {

// Error for the first bad value, then for wrong counts, as p.checks selects.
int report_findings(const pmo_route_params& p, const pmo_route_findings& found, const int32_t* routed_per_expert);

// Error if slots exceed the buffer of p.num_rows rows.
int report_overflow(const pmo_route_params& p, const int32_t* routed_per_expert);

}  // namespace pmo
