// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Segments of a permuted buffer: rows of each expert and padding rows, the same on every backend.
//
// The buffer is a sequence of segments, one per expert: the rows routed to the expert, then padding up to a multiple of the
// alignment. Rows after the last segment are padding as well. A buffer may be too small: rows at or beyond its end are dropped.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"
#include "pmo/permute.h"

namespace pmo {

// Length of the segment of an expert with `routed` rows. Without padding there is no division, which is slow on GPUs.
template <typename Index>
PMO_ANYWHERE constexpr Index segment_rows(Index routed, Index padding_alignment) {
  return padding_alignment == 1 ? routed : round_up(routed, padding_alignment);
}

// A row, or the end of the buffer if the row lies beyond it.
template <typename Index>
PMO_ANYWHERE constexpr Index within_buffer(Index row, Index num_rows) {
  return row < num_rows ? row : num_rows;
}

// Number of rows inside the buffer among `count` rows from `start` on.
template <typename Index>
PMO_ANYWHERE constexpr Index rows_inside(Index start, Index count, Index num_rows) {
  return within_buffer(start + count, num_rows) - within_buffer(start, num_rows);
}

// Calls segment(expert, start) for each expert, which returns the rows routed to it. Returns the first row after all segments.
template <typename Segment>
int64_t each_segment(int64_t num_experts, int64_t padding_alignment, Segment segment) {
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t routed = segment(expert, start);
    start += segment_rows(routed, padding_alignment);
  }
  return start;
}

// True for the row_to_token entry of a padding row.
PMO_ANYWHERE constexpr bool is_padding(int64_t token) { return token < 0; }

// Writes the map entries of `count` padding rows. `Maps` has the fields of pmo_route_params.
template <typename Maps>
PMO_ANYWHERE void mark_padding(const Maps& maps, int64_t first, int64_t count) {
  const auto fill = [&](auto* map, auto value) {
    for (int64_t i = 0; map != nullptr && i < count; ++i) map[first + i] = value;
  };
  fill(maps.row_to_token, -1);
  fill(maps.row_to_slot, -1);
  fill(maps.row_to_expert, -1);
  fill(maps.row_probs, 0.0f);
}

// True if the padding of `part` is to be zeroed. `Params` are those of permute or quantize.
template <typename Params>
PMO_ANYWHERE bool fills(const Params& p, pmo_fill part) {
  return (p.fill & part) != 0;
}

// A row of a row_id_map in a padded buffer; INT32_MAX, which is beyond every buffer, if it would overflow.
PMO_ANYWHERE inline int32_t padded_row(int32_t row, const int32_t* pad_offsets, int32_t expert) {
  if (row < 0 || pad_offsets == nullptr) return row;
  const int64_t padded = int64_t{row} + pad_offsets[expert];
  return padded >= 0 && padded < INT32_MAX ? static_cast<int32_t>(padded) : INT32_MAX;
}

// A row of a padded buffer in a row_id_map.
PMO_ANYWHERE inline int32_t unpadded_row(int32_t row, const int32_t* pad_offsets, int32_t expert) {
  return pad_offsets == nullptr ? row : static_cast<int32_t>(int64_t{row} - pad_offsets[expert]);
}

}  // namespace pmo
