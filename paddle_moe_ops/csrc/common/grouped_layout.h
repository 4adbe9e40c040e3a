// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Places in the tables of pmo_grouped_tables_*, in int32 entries from the first one of a tile height.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"

namespace pmo {

struct GroupedLayout {
  int64_t num_experts, num_chunks;

  PMO_ANYWHERE constexpr int64_t stop() const { return num_experts; }
  PMO_ANYWHERE constexpr int64_t tiles() const { return 2 * num_experts; }
  PMO_ANYWHERE constexpr int64_t window() const { return 3 * num_experts + 1; }
  PMO_ANYWHERE constexpr int64_t window_of_all_rows() const { return window() + num_chunks + 1; }
  PMO_ANYWHERE constexpr int64_t counters() const { return window() + num_chunks + 3; }
  PMO_ANYWHERE constexpr int64_t size() const { return counters() + 2; }  // of a height
};

}  // namespace pmo
