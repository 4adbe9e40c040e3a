// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Layout of the regions of pmo/ranks.h, for the host and the GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/arithmetic.h"
#include "common/ids.h"
#include "pmo/ranks.h"

namespace pmo {

constexpr int64_t kValueBytes = 4;  // of a value in a region

// A region of records.
struct Records {
  int32_t* count;
  int32_t* ids;  // [S, K]
  float* probs;  // [S, K]

  PMO_ANYWHERE Records(const void* regions, int64_t region_bytes, int64_t rank, int64_t rows_per_rank, int64_t topk) {
    char* begin = const_cast<char*>(static_cast<const char*>(regions)) + rank * region_bytes;
    count = reinterpret_cast<int32_t*>(begin);
    ids = reinterpret_cast<int32_t*>(begin + PMO_RECORDS_HEADER);
    probs = reinterpret_cast<float*>(ids + rows_per_rank * topk);
  }
};

// True if ranks are in different calls.
PMO_ANYWHERE inline bool is_marked(const int32_t* mark) { return mark != nullptr && *mark != 0; }

// The rank of a slot's expert, -1 if it has none. Experts fit 32 bits, in which a GPU divides fast.
template <class Params>
PMO_ANYWHERE inline int32_t rank_of_slot(const Params& p, int64_t slot) {
  const int64_t id = id_at(p.ids, p.ids_kind, slot);
  if (id < 0 || id >= p.num_ranks * p.experts_per_rank) return -1;
  return static_cast<int32_t>(static_cast<uint32_t>(id) / static_cast<uint32_t>(p.experts_per_rank));
}

// Number of a token's slots at a rank.
PMO_ANYWHERE inline int32_t slots_at_rank(const pmo_rank_plan_params& p, int64_t token, int32_t rank) {
  int32_t slots = 0;
  for (int64_t k = 0; k < p.topk; ++k) slots += rank_of_slot(p, token * p.topk + k) == rank;
  return slots;
}

// Expert of a slot, or -1 if it is no expert or an earlier slot of the token names it.
PMO_ANYWHERE inline int64_t first_choice(const pmo_rank_plan_params& p, int64_t token, int64_t k) {
  const int64_t id = id_at(p.ids, p.ids_kind, token * p.topk + k);
  if (id < 0 || id >= p.num_ranks * p.experts_per_rank) return -1;
  for (int64_t before = 0; before < k; ++before) {
    if (id_at(p.ids, p.ids_kind, token * p.topk + before) == id) return -1;
  }
  return id;
}

// Columns of token_rows.
PMO_ANYWHERE inline int64_t max_rows_per_token(int64_t num_ranks, int64_t topk) { return num_ranks < topk ? num_ranks : topk; }

// Records a slot of the token that is number `place` of a region, which may be on another GPU.
PMO_ANYWHERE inline void record_slot(const pmo_rank_plan_params& p, int64_t token, int64_t k, int64_t rank, int64_t place) {
  const Records records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk);
  const int64_t id = id_at(p.ids, p.ids_kind, token * p.topk + k);
  records.ids[place * p.topk + k] = id >= 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : -1;
  records.probs[place * p.topk + k] = p.probs[token * p.topk + k];
}

// Reads element `slot` of the received records [P * S, K]: its id and probability, and the row with the row's first slot.
PMO_ANYWHERE inline void read_record(const pmo_rank_records_params& p, int64_t slot) {
  // Slots fit 32 bits, in which a GPU divides fast.
  const auto topk = static_cast<uint32_t>(p.topk), number = static_cast<uint32_t>(slot);
  const uint32_t row = number / topk, rank = row / static_cast<uint32_t>(p.rows_per_rank);
  const uint32_t row_of_rank = row - rank * static_cast<uint32_t>(p.rows_per_rank), k = number - row * topk;
  const Records records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk);
  const int64_t place = int64_t{row_of_rank} * p.topk + k;
  // All three loads are in flight together. Values after the last record are undefined.
  const int32_t count = *records.count, stored = records.ids[place];
  const float prob = records.probs[place];
  const bool is_token = row_of_rank < static_cast<uint32_t>(count);
  const int64_t id = is_token ? int64_t{stored} - p.first_expert : -1;
  if (k == 0) p.rows[row] = is_token ? static_cast<int32_t>(row) : -1;
  const bool here = id >= 0 && id < p.num_experts;
  p.ids[slot] = here ? static_cast<int32_t>(id) : -1;
  p.probs[slot] = is_marked(p.mark) ? NAN : here ? prob : 0.0f;
}

// Index within the region of the row of a slot's token at `rank`, the rank of the slot's expert; -1 if there is none.
template <class Params>
PMO_ANYWHERE inline int64_t place_of_slot(const Params& p, int64_t slot, int32_t rank) {
  const int64_t token = slot / p.topk, columns = max_rows_per_token(p.num_ranks, p.topk);
  if (rank < 0) return -1;
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t place = p.token_rows[token * columns + column] - rank * p.rows_per_rank;
    if (place >= 0 && place < p.rows_per_rank) return place;
  }
  return -1;
}

// The value of a slot [T, K].
PMO_ANYWHERE inline float value_of_slot(const pmo_rank_values_params& p, int64_t slot) {
  if (is_marked(p.mark)) return NAN;
  const int32_t rank = rank_of_slot(p, slot);
  const int64_t place = place_of_slot(p, slot, rank);
  if (place < 0) return 0.0f;
  const char* region = static_cast<const char*>(p.window) + rank * p.region_bytes;
  return reinterpret_cast<const float*>(region)[place * p.topk + slot % p.topk];
}

// Position of a row of the plan.
PMO_ANYWHERE inline int32_t place_of_row(const pmo_rank_rows_params& p, int64_t row) {
  const int64_t slot = p.row_to_slot[row];
  const int32_t rank = slot < 0 || slot >= p.num_tokens * p.topk ? -1 : rank_of_slot(p, slot);
  const int64_t place = rank < 0 ? -1 : place_of_slot(p, slot, rank);
  return place < 0 ? -1 : static_cast<int32_t>((rank * p.rows_per_rank + place) * p.topk + slot % p.topk);
}

// True if the receiver fetches row i of a region. Fetched rows are evenly spaced among the others.
PMO_ANYWHERE inline bool is_fetched(uint32_t i, int64_t fetched) {
  const auto every = static_cast<uint32_t>(fetched);
  return i % PMO_FETCHED_PERIOD * every % PMO_FETCHED_PERIOD < every;
}

// True if a rank runs the backward pass that a barrier belongs to.
PMO_ANYWHERE inline bool runs_backward(const pmo_rank_barrier_params& p, int64_t rank) {
  return (p.forward_calls[rank * PMO_CALL_WORDS + PMO_CALL_WORDS - 1] & p.gradient) != 0;
}

// Word `i` of the call in a region of the barrier. A region has room for two calls, by the parity of the round: a rank may be one
// round ahead.
PMO_ANYWHERE inline int32_t* call_word(const void* regions, int64_t region_bytes, int64_t rank, uint32_t round, int i) {
  char* region = const_cast<char*>(static_cast<const char*>(regions)) + rank * region_bytes;
  return reinterpret_cast<int32_t*>(region + 64) + round % 2 * PMO_CALL_WORDS + i;
}

// A received line of an exchange of few tokens. This rank's own records are read where it wrote them.
struct ArrivedLine {
  int64_t rank, place;
  Records records;
  bool is_recorded;

  PMO_ANYWHERE ArrivedLine(const pmo_rank_dispatch_params& p, int64_t line)
      : rank(static_cast<uint32_t>(line) / static_cast<uint32_t>(p.plan.capacity)),
        place(line - rank * p.plan.capacity),
        records(rank == p.rank ? p.plan.records : p.arrived_records, p.plan.region_bytes, rank, p.plan.rows_per_rank,
                p.plan.topk),
        is_recorded(place < *records.count) {}

  // Expert of slot k, counted from the first one of this rank, or -1.
  PMO_ANYWHERE int32_t id(const pmo_rank_dispatch_params& p, int64_t k) const {
    const int64_t id = is_recorded ? records.ids[place * p.plan.topk + k] - p.rank * p.plan.experts_per_rank : -1;
    return id >= 0 && id < p.plan.experts_per_rank ? static_cast<int32_t>(id) : -1;
  }
  PMO_ANYWHERE float prob(const pmo_rank_dispatch_params& p, int64_t k) const { return records.probs[place * p.plan.topk + k]; }
  PMO_ANYWHERE int64_t row(const pmo_rank_dispatch_params& p) const { return rank * p.plan.rows_per_rank + place; }
};

// Params that send the tokens of a dispatch by its token_rows.
inline pmo_rank_send_params sent_tokens(const pmo_rank_dispatch_params& p) {
  pmo_rank_send_params send = {};
  send.struct_size = sizeof send;
  send.num_tokens = p.plan.num_tokens;
  send.max_rows_per_token = max_rows_per_token(p.plan.num_ranks, p.plan.topk);
  send.num_ranks = p.plan.num_ranks;
  send.rank = p.rank;
  send.rows_per_rank = p.plan.rows_per_rank;
  send.hidden = p.hidden;
  send.x = p.x;
  send.x_row_stride = p.x_row_stride;
  send.token_rows = p.plan.token_rows;
  send.arrived = p.arrived;
  send.peers = p.peers;
  send.own = p.tokens;
  send.own_rows_per_rank = p.plan.capacity;
  send.dtype = p.dtype;
  send.num_threads = p.num_threads;
  return send;
}

// Rank and index within the region of an existing row of a symmetric buffer.
struct RegionRow {
  uint32_t rank, place;

  template <class Params>
  PMO_ANYWHERE RegionRow(const Params& p, int32_t row) {
    const auto rows = static_cast<uint32_t>(p.rows_per_rank), number = static_cast<uint32_t>(row);
    rank = number / rows;
    place = number - rank * rows;
  }
};

// Row of `own` of a row of this rank itself, -1 if there is none.
template <class Params>
PMO_ANYWHERE inline int64_t own_row(const Params& p, const RegionRow& at) {
  return at.place < p.own_rows_per_rank ? at.rank * p.own_rows_per_rank + at.place : -1;
}

// True if a row of the regions, or of this rank's own rows, has this number.
template <class Params>
PMO_ANYWHERE inline bool is_received(const Params& p, int32_t row) {
  if (row < 0 || row >= p.num_ranks * p.rows_per_rank) return false;
  const RegionRow at(p, row);
  return at.rank != p.rank || own_row(p, at) >= 0;
}

// Address to which rank_send stores a row; null: the row is not stored.
PMO_ANYWHERE inline char* sent_to(const pmo_rank_send_params& p, int32_t row, int64_t row_bytes) {
  if (row < 0 || row >= p.num_ranks * p.rows_per_rank) return nullptr;
  const RegionRow at(p, row);
  if (at.rank == p.rank) {
    const int64_t own = own_row(p, at);
    return p.own == nullptr || own < 0 ? nullptr : static_cast<char*>(p.own) + own * row_bytes;
  }
  return static_cast<char*>(is_fetched(at.place, p.fetched) ? p.arrived : p.peers) + row * row_bytes;
}

// Address from which rank_receive loads a received row; null: the output already contains it.
PMO_ANYWHERE inline const char* received_from(const pmo_rank_receive_params& p, int32_t row, int64_t row_bytes,
                                              int64_t own_stride) {
  const RegionRow at(p, row);
  if (at.rank == p.rank) {
    return p.own == nullptr ? nullptr : static_cast<const char*>(p.own) + own_row(p, at) * own_stride;
  }
  return static_cast<const char*>(is_fetched(at.place, p.fetched) ? p.peers : p.arrived) + row * row_bytes;
}

}  // namespace pmo
