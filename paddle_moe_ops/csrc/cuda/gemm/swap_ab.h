// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The grouped product in tiles of PMO_GROUPED_TURNED_ROWS rows.
#pragma once

#include "cuda/launch.h"
#include "pmo/grouped.h"

namespace pmo {
namespace cuda {

// The parameters are checked, and there are rows and columns.
int turned_product(const pmo_grouped_product_params& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
