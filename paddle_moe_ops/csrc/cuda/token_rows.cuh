// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The rows of a token and their weights, a batch at a time: what unpermute and its gradient have in common.
#pragma once

#include <cstdint>

namespace pmo {
namespace cuda {

constexpr int kRowBatch = 8;  // rows whose loads are issued before the first of them is used

// Position of a row's weight, or -1.
template <typename Params>
__device__ int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : p.weight_index[row];
  return place >= 0 && place < p.num_weights ? place : -1;
}

// Up to kRowBatch usable rows of a token; an entry that is skipped, or lies behind the end, is -1.
struct RowBatch {
  int32_t rows[kRowBatch];
  int usable = 0;
  bool ended = false;  // nothing follows

  template <typename Params>
  __device__ RowBatch(const Params& p, const int32_t* listed, int64_t from) {
    const int64_t limit = p.max_rows_per_token;
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i) rows[i] = from + i < limit ? __ldg(listed + from + i) : -1;
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i) {
      ended = ended || rows[i] == -1;
      if (ended || rows[i] < 0 || rows[i] >= p.num_rows) rows[i] = -1;
      usable += rows[i] >= 0;
    }
    ended = ended || from + kRowBatch >= limit;
  }
};

// Usable rows of a token whose first batch is given, counted up to 2.
template <typename Params>
__device__ int count_to_two(const Params& p, const int32_t* listed, const RowBatch& first) {
  int count = first.usable;
  bool ended = first.ended;
  for (int64_t from = kRowBatch; count < 2 && !ended; from += kRowBatch) {
    const RowBatch batch(p, listed, from);
    count += batch.usable;
    ended = batch.ended;
  }
  return count < 2 ? count : 2;
}

}  // namespace cuda
}  // namespace pmo
