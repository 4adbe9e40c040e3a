// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The checks of chunk sorting.
#pragma once

#include "common/status.h"
#include "pmo/sort_chunks.h"

namespace pmo {

constexpr int64_t kMaxSortedChunks = int64_t{1} << 20;

int check_sort_chunks(const pmo_sort_chunks_params& p);

// Checks of p.checks that read split_sizes and order; returns a status.
int report_chunks(const pmo_sort_chunks_params& p);

}  // namespace pmo
