// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Tokens of rows of pmo_index_add_*.
#pragma once

#include "common/ids.h"
#include "pmo/index_add.h"

namespace pmo {

// Line of out that a row is added to, or -1.
template <typename Id>
PMO_ANYWHERE inline int64_t line_of(const pmo_index_add_params& p, const Id* row_to_token, int64_t row) {
  const int64_t token = row_to_token[row];
  return token >= p.first_token && token - p.first_token < p.num_tokens ? token - p.first_token : -1;
}

}  // namespace pmo
