// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Entry of the grouped GEMM for few rows (few_rows.cu).
#pragma once

#include "cuda/launch.h"
#include "pmo/grouped.h"

namespace pmo {
namespace cuda {

// Launches for params with tile_rows = PMO_GROUPED_TURNED_ROWS. They are checked, and num_rows and width are positive.
int few_rows_gemm(const pmo_grouped_product_params& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace pmo
