// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Where things are in the regions of pmo/ranks.h, on hosts and GPUs.
#pragma once

#include <cstdint>

#include "common/arithmetic.h"
#include "common/ids.h"
#include "pmo/ranks.h"

namespace pmo {

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

// The rank of a slot's expert, -1 if it has none.
PMO_ANYWHERE inline int32_t rank_of_slot(const pmo_rank_plan_params& p, int64_t slot) {
  const int64_t id = id_at(p.ids, p.ids_kind, slot);
  return id >= 0 && id < p.num_ranks * p.experts_per_rank ? static_cast<int32_t>(id / p.experts_per_rank) : -1;
}

// How many of a token's slots are at a rank.
PMO_ANYWHERE inline int32_t slots_at_rank(const pmo_rank_plan_params& p, int64_t token, int32_t rank) {
  int32_t slots = 0;
  for (int64_t k = 0; k < p.topk; ++k) slots += rank_of_slot(p, token * p.topk + k) == rank;
  return slots;
}

// Columns of token_rows.
PMO_ANYWHERE inline int64_t most_rows(int64_t num_ranks, int64_t topk) { return num_ranks < topk ? num_ranks : topk; }

// Records a token as number `place` of a region.
PMO_ANYWHERE inline void record(const pmo_rank_plan_params& p, int64_t token, int64_t rank, int64_t place) {
  const Records records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk);
  for (int64_t k = 0; k < p.topk; ++k) {
    const int64_t id = id_at(p.ids, p.ids_kind, token * p.topk + k);
    records.ids[place * p.topk + k] = id >= 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : -1;
    records.probs[place * p.topk + k] = p.probs[token * p.topk + k];
  }
}

// Element `slot` of what arrived, [P * S, K]: its id and probability, and with a row's first its row.
PMO_ANYWHERE inline void read_record(const pmo_rank_records_params& p, int64_t slot) {
  const int64_t of_region = p.rows_per_rank * p.topk;
  const int64_t place = slot % of_region;
  const Records records(p.records, p.region_bytes, slot / of_region, p.rows_per_rank, p.topk);
  const bool is_token = place / p.topk < *records.count;
  const int64_t id = is_token ? int64_t{records.ids[place]} - p.first_expert : -1;
  if (place % p.topk == 0) p.rows[slot / p.topk] = is_token ? static_cast<int32_t>(slot / p.topk) : -1;
  const bool here = id >= 0 && id < p.num_experts;
  p.ids[slot] = here ? static_cast<int32_t>(id) : -1;
  p.probs[slot] = here ? records.probs[place] : 0.0f;
}

// The value of a slot [T, K].
PMO_ANYWHERE inline float value_of_slot(const pmo_rank_values_params& p, int64_t slot) {
  const int64_t id = id_at(p.ids, p.ids_kind, slot), token = slot / p.topk, columns = most_rows(p.num_ranks, p.topk);
  if (id < 0 || id >= p.num_ranks * p.experts_per_rank) return 0.0f;
  const int64_t first = id / p.experts_per_rank * p.rows_per_rank;
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t place = p.token_rows[token * columns + column] - first;
    if (place < 0 || place >= p.rows_per_rank) continue;
    const char* region = static_cast<const char*>(p.window) + id / p.experts_per_rank * p.region_bytes;
    return reinterpret_cast<const float*>(region)[place * p.topk + slot % p.topk];
  }
  return 0.0f;
}

}  // namespace pmo
