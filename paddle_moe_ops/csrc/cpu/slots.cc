// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Values per slot and per row, and the cleaning of a user's rowmap.
#include <algorithm>
#include <string>

#include "common/checks.h"
#include "common/ids.h"
#include "common/status.h"
#include "cpu/pool.h"
#include "pmo/route.h"

namespace pmo {
namespace cpu {
namespace {

int64_t expert_id(const pmo_clean_rowmap_params& p, int64_t slot) { return id_at(p.ids, p.ids_kind, slot); }

// The row of every slot of a token, by its expert id, and the row's value.
void rows_of_slots(const pmo_clean_rowmap_params& p, int64_t token, bool has_repeats) {
  for (int64_t k = 0; k < p.topk; ++k) {
    const int64_t slot = token * p.topk + k;
    const int64_t expert = expert_id(p, slot);
    int32_t row = -1;
    if (expert >= 0 && expert < p.num_experts) {
      const int32_t entry = p.rowmap[token * p.num_experts + expert];
      if (entry >= 0 && entry < p.num_rows && p.row_to_token[entry] == token) {
        // if a token names the row more than once, its lowest expert owns it
        const int32_t* map = p.rowmap + token * p.num_experts;
        if (!has_repeats || std::find(map, map + expert, entry) == map + expert) row = entry;
      }
    }
    if (row >= 0 && p.duplicates == PMO_DUPLICATES_FIRST) {
      for (int64_t earlier = 0; earlier < k; ++earlier) {
        if (expert_id(p, token * p.topk + earlier) == expert) row = -1;
      }
    }
    if (p.slot_to_row != nullptr) p.slot_to_row[slot] = row;
    if (p.slot_values != nullptr) p.slot_values[slot] = row >= 0 ? p.row_values[row] : 0.0f;
  }
}

// One serial pass. A parallel one would need a second pass to find the first token that names a row. It reads T * E * 4 bytes,
// while the sum that follows reads N * H elements.
int clean_rowmap(const pmo_clean_rowmap_params& p) {
  if (const int status = check_clean_rowmap(p)) return status;
  pmo_rowmap_findings found = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0};
  const bool by_id = (p.slot_to_row != nullptr || p.slot_values != nullptr) && p.ids != nullptr;
  const bool by_expert = p.slot_to_row != nullptr && p.ids == nullptr && p.topk == p.num_experts;
  for (int64_t slot = 0; slot < (by_id ? p.num_tokens * p.topk : 0); ++slot) {
    const int64_t id = expert_id(p, slot);
    if (id >= -1 && id < p.num_experts) continue;
    found.bad_id_place = slot;
    found.bad_id = id;
    break;
  }
  for (int32_t* map : {p.row_to_token, p.row_to_slot, p.row_to_expert}) {
    if (map != nullptr) std::fill(map, map + p.num_rows, -1);
  }
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    int32_t* kept = p.token_rows + token * p.num_experts;
    int64_t num_kept = 0;
    for (int64_t flat = token * p.num_experts; flat < (token + 1) * p.num_experts; ++flat) {
      const int32_t row = p.rowmap[flat];
      if (by_expert) p.slot_to_row[flat] = -1;
      if (row == -1) continue;
      if (row < 0 || row >= p.num_rows) {
        if (found.bad_row_place == PMO_NOWHERE) {
          found.bad_row_place = flat;
          found.bad_row = row;
        }
      } else if (p.row_to_token[row] >= 0) {
        if (found.repeat_place == PMO_NOWHERE) {
          found.repeat_place = flat;
          found.repeat_row = row;
        }
      } else {
        p.row_to_token[row] = static_cast<int32_t>(token);
        if (p.row_to_slot != nullptr) p.row_to_slot[row] = static_cast<int32_t>(flat);
        if (p.row_to_expert != nullptr) p.row_to_expert[row] = static_cast<int32_t>(flat - token * p.num_experts);
        if (by_expert) p.slot_to_row[flat] = row;
        kept[num_kept++] = row;
      }
    }
    // a map that becomes part of a plan is defined throughout
    std::fill(kept + num_kept, kept + (by_expert ? p.num_experts : std::min(num_kept + 1, p.num_experts)), -1);
  }
  const bool has_repeats = found.repeat_place != PMO_NOWHERE;
  if (has_repeats) found.repeat_first = std::find(p.rowmap, p.rowmap + found.repeat_place, found.repeat_row) - p.rowmap;
  if (const int status = pmo_clean_rowmap_report(&p, &found)) return status;
  if (by_id) {
    parallel_ranges(p.num_tokens, p.num_tokens * p.topk * 12, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) rows_of_slots(p, token, has_repeats);
    });
  }
  return PMO_OK;
}

// Calls visit(row, value index) for every slot of the tokens [begin, end) that has a row.
template <typename Visit>
void visit_slots(const pmo_slots_params& p, int64_t begin, int64_t end, Visit visit) {
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
      const int32_t row = p.slot_to_row[slot];
      if (row < 0 || row >= p.num_rows) continue;
      if (p.num_experts == 0) {
        visit(row, slot);
        continue;
      }
      const int32_t expert = p.row_to_expert[row];
      if (expert >= 0 && expert < p.num_experts) visit(row, token * p.num_experts + expert);
    }
  }
}

int gather_slots(const pmo_slots_params& p) {
  if (const int status = check_slots(p)) return status;
  const int64_t columns = p.num_experts == 0 ? p.topk : p.num_experts;
  parallel_ranges(p.num_tokens, p.num_tokens * (p.topk + columns) * 8, p.num_threads, [&](int64_t begin, int64_t end) {
    std::fill(p.slot_values + begin * columns, p.slot_values + end * columns, 0.0f);
    visit_slots(p, begin, end, [&](int64_t row, int64_t value) { p.slot_values[value] = p.row_values[row]; });
  });
  return PMO_OK;
}

int scatter_slots(const pmo_slots_params& p) {
  if (const int status = check_slots(p)) return status;
  if (p.accumulate == 0) std::fill(p.row_values, p.row_values + p.num_rows, 0.0f);
  parallel_ranges(p.num_tokens, p.num_tokens * p.topk * 12, p.num_threads, [&](int64_t begin, int64_t end) {
    if (p.accumulate == 0) {  // -0.0 is the neutral element: a single value keeps its sign
      visit_slots(p, begin, end, [&](int64_t row, int64_t) { p.row_values[row] = -0.0f; });
    }
    visit_slots(p, begin, end, [&](int64_t row, int64_t value) { p.row_values[row] += p.slot_values[value]; });
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_clean_rowmap_cpu(const pmo_clean_rowmap_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::clean_rowmap);
}

extern "C" int pmo_gather_slots_cpu(const pmo_slots_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::gather_slots);
}

extern "C" int pmo_scatter_slots_cpu(const pmo_slots_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::scatter_slots);
}
