// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Zeroing the rows that belong to no token, for permute and for the gradient of unpermute.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/padding.h"
#include "cpu/pool.h"
#include "cpu/streaming.h"

namespace pmo {
namespace cpu {

inline void zero_padding_rows(char* rows, int64_t row_bytes, int64_t num_rows, const int32_t* row_to_token, int32_t num_threads) {
  // Estimated from the mean share of padding; only the number of threads depends on it.
  const int64_t bytes = num_rows * static_cast<int64_t>(sizeof(int32_t)) + num_rows / 8 * row_bytes;
  const bool streams = beyond_caches(num_rows * row_bytes);
  const std::vector<char> zeros(streams ? static_cast<size_t>(row_bytes) : 0);
  parallel_ranges(num_rows, bytes, num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    for (int64_t row = begin; row < end; ++row) {
      if (!is_padding(row_to_token[row])) continue;
      char* target = rows + row * row_bytes;
      if (streams) {
        writer.copy(target, zeros.data(), row_bytes);
      } else {
        std::memset(target, 0, row_bytes);
      }
    }
  });
}

}  // namespace cpu
}  // namespace pmo
