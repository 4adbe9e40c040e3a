// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Routing on the CPU: a stable counting sort of slots by expert.
//
// The tokens are cut into contiguous chunks whose number depends on T * K alone. Counting fills one histogram per chunk and a
// cleaned copy of the ids. A serial scan over [chunks, E] converts the histograms to each chunk's first row per expert. Then
// every chunk places its slots in order. Positions are those of a serial pass for any number of threads.
//
// Workspace: int64 [chunks, E] histograms, then int32 [T, K] cleaned ids (-1 = the slot has no row).
// Bytes moved: ids 2 * T * K * 4 (read, cleaned), maps 2 * T * K * 4, row maps 4 * N * 4, rowmap T * E * 4.
#include "pmo/route.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/findings.h"
#include "common/ids.h"
#include "common/padding.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

constexpr int64_t kSlotsPerChunk = 16384;
constexpr int64_t kMaxRouteChunks = 64;
constexpr pmo_route_findings kNothingFound = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0, PMO_NOWHERE};

// The chunks of tokens, and the workspace.
struct RouteChunks {
  int64_t num_chunks;
  int64_t* first_row;  // [num_chunks, E]: the histogram, after the scan the chunk's first row
  int32_t* ids;        // [T, K]

  explicit RouteChunks(const pmo_route_params& p)
      : num_chunks(count_chunks(p)),
        first_row(static_cast<int64_t*>(p.workspace)),
        ids(reinterpret_cast<int32_t*>(first_row + num_chunks * p.num_experts)) {}

  static int64_t count_chunks(const pmo_route_params& p) {
    const int64_t chunks = p.num_tokens * p.topk / kSlotsPerChunk + 1;
    return std::min(std::min(chunks, kMaxRouteChunks), std::max<int64_t>(p.num_tokens, 1));
  }

  int64_t begin(const pmo_route_params& p, int64_t chunk) const { return p.num_tokens * chunk / num_chunks; }
};

int64_t workspace_bytes(const pmo_route_params& p) {
  return RouteChunks::count_chunks(p) * p.num_experts * static_cast<int64_t>(sizeof(int64_t)) +
         p.num_tokens * p.topk * static_cast<int64_t>(sizeof(int32_t));
}

int check_workspace(const pmo_route_params& p) {
  PMO_REQUIRE(p.workspace != nullptr && reinterpret_cast<uintptr_t>(p.workspace) % alignof(int64_t) == 0 &&
                  p.workspace_bytes >= workspace_bytes(p),
              "workspace", "8-byte aligned and as large as pmo_route_cpu_workspace_bytes says");
  return PMO_OK;
}

template <typename Id>
void note_duplicate(const Id* ids, int64_t slot, int64_t topk, pmo_route_findings* found) {
  found->duplicate_place = slot;
  found->duplicate_expert = ids[slot];
  found->duplicate_first = slot / topk * topk;
  while (ids[found->duplicate_first] != ids[slot]) ++found->duplicate_first;
}

// Counts one chunk of [T, K] ids and writes their cleaned copy.
template <typename Id>
void count_ids(const pmo_route_params& p, const Id* ids, int64_t begin, int64_t end, int64_t* histogram, int32_t* cleaned,
               pmo_route_findings* found) {
  const bool first_only = p.duplicates == PMO_DUPLICATES_FIRST && p.topk > 1;
  std::vector<int32_t> last_token(first_only ? static_cast<size_t>(p.num_experts) : 0, -1);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
      const int64_t id = ids[slot];
      cleaned[slot] = -1;
      if (id < 0 || id >= p.num_experts) {
        if (id != -1 && found->bad_place == PMO_NOWHERE) {
          found->bad_place = slot;
          found->bad_value = id;
        }
        continue;
      }
      if (first_only) {
        if (last_token[id] == token) {
          if (found->duplicate_place == PMO_NOWHERE) note_duplicate(ids, slot, p.topk, found);
          continue;
        }
        last_token[id] = static_cast<int32_t>(token);
      }
      cleaned[slot] = static_cast<int32_t>(id);
      ++histogram[id];
      if (p.probs != nullptr && found->nan_place == PMO_NOWHERE && std::isnan(p.probs[slot])) found->nan_place = slot;
    }
  }
}

void count_mask(const pmo_route_params& p, int64_t begin, int64_t end, int64_t* histogram, int32_t* cleaned,
                pmo_route_findings* found) {
  const uint8_t* mask = static_cast<const uint8_t*>(p.routing);
  for (int64_t token = begin; token < end; ++token) {
    int64_t used = 0;
    int64_t set = 0;
    for (int64_t expert = 0; expert < p.num_experts; ++expert) {
      const int64_t flat = token * p.num_experts + expert;
      if (mask[flat] == 0) continue;
      ++set;
      if (used == p.topk) continue;
      cleaned[token * p.topk + used++] = static_cast<int32_t>(expert);
      ++histogram[expert];
      if (p.probs != nullptr && found->nan_place == PMO_NOWHERE && std::isnan(p.probs[flat])) found->nan_place = flat;
    }
    if (set > p.topk && found->bad_place == PMO_NOWHERE) {
      found->bad_place = token;
      found->bad_value = set;
    }
    std::fill(cleaned + token * p.topk + used, cleaned + (token + 1) * p.topk, -1);
  }
}

void count_chunk(const pmo_route_params& p, const RouteChunks& chunks, int64_t chunk, pmo_route_findings* found) {
  const int64_t begin = chunks.begin(p, chunk);
  const int64_t end = chunks.begin(p, chunk + 1);
  // Thread-local while counting: with few experts the histograms of several chunks share one cache line.
  std::vector<int64_t> histogram(static_cast<size_t>(p.num_experts));
  if (p.routing_kind == PMO_ROUTING_MASK) {
    count_mask(p, begin, end, histogram.data(), chunks.ids, found);
  } else {
    with_ids(p.routing, p.routing_kind,
             [&](const auto* ids) { count_ids(p, ids, begin, end, histogram.data(), chunks.ids, found); });
  }
  std::copy(histogram.begin(), histogram.end(), chunks.first_row + chunk * p.num_experts);
}

// Chunks follow the tokens, so the first finding of each kind is that of the first chunk with one.
pmo_route_findings first_findings(const std::vector<pmo_route_findings>& chunks) {
  pmo_route_findings first = kNothingFound;
  for (const pmo_route_findings& chunk : chunks) {
    if (first.bad_place == PMO_NOWHERE) {
      first.bad_place = chunk.bad_place;
      first.bad_value = chunk.bad_value;
    }
    if (first.duplicate_place == PMO_NOWHERE) {
      first.duplicate_place = chunk.duplicate_place;
      first.duplicate_expert = chunk.duplicate_expert;
      first.duplicate_first = chunk.duplicate_first;
    }
    if (first.nan_place == PMO_NOWHERE) first.nan_place = chunk.nan_place;
  }
  return first;
}

int count(const pmo_route_params& p) {
  if (const int status = check_route_sizes(p)) return status;
  if (const int status = check_workspace(p)) return status;
  if (const int status = check_routing_arrays(p)) return status;
  const RouteChunks chunks(p);
  std::vector<pmo_route_findings> found(static_cast<size_t>(chunks.num_chunks), kNothingFound);
  const int threads = static_cast<int>(std::min<int64_t>(resolve_threads(p.num_threads), chunks.num_chunks));
  parallel_for(chunks.num_chunks, threads, [&](int64_t chunk) { count_chunk(p, chunks, chunk, &found[chunk]); });

  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    int64_t total = 0;
    for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) total += chunks.first_row[chunk * p.num_experts + expert];
    p.routed_per_expert[expert] = static_cast<int32_t>(total);
  }
  return report_findings(p, first_findings(found), p.routed_per_expert);
}

// Turns histograms into first rows, writes the per-expert outputs and marks the padding rows.
void scan(const pmo_route_params& p, const RouteChunks& chunks) {
  const int64_t rows = each_segment(p.num_experts, p.padding_alignment, [&](int64_t expert, int64_t start) {
    int64_t row = start;
    for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) {
      int64_t& entry = chunks.first_row[chunk * p.num_experts + expert];
      const int64_t count = entry;
      entry = row;
      row += count;
    }
    const int64_t routed = row - start, padding = segment_rows(routed, p.padding_alignment) - routed;
    if (p.tokens_per_expert != nullptr) {
      p.tokens_per_expert[expert] = static_cast<int32_t>(rows_inside(start, routed, p.num_rows));
    }
    if (p.expert_offsets != nullptr) p.expert_offsets[expert] = static_cast<int32_t>(within_buffer(start, p.num_rows));
    mark_padding(p, within_buffer(row, p.num_rows), rows_inside(row, padding, p.num_rows));
    return routed;
  });
  const int64_t end = within_buffer(rows, p.num_rows);
  if (p.expert_offsets != nullptr) p.expert_offsets[p.num_experts] = static_cast<int32_t>(end);
  mark_padding(p, end, p.num_rows - end);
}

// Assigns rows to the slots of the tokens [begin, end); returns the number of slots beyond the buffer.
int64_t place(const pmo_route_params& p, int64_t begin, int64_t end, const int32_t* ids, int64_t* next_row) {
  const bool mask = p.routing_kind == PMO_ROUTING_MASK;
  int64_t dropped = 0;
  for (int64_t token = begin; token < end; ++token) {
    int32_t* rowmap = p.rowmap == nullptr ? nullptr : p.rowmap + token * p.num_experts;
    if (rowmap != nullptr) std::fill(rowmap, rowmap + p.num_experts, -1);
    int32_t* sorted = p.token_rows == nullptr ? nullptr : p.token_rows + token * p.topk;
    int64_t num_sorted = 0;
    for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
      const int32_t expert = ids[slot];
      int32_t row = -1;
      if (expert >= 0) {
        const int64_t next = next_row[expert]++;
        if (next < p.num_rows) {
          row = static_cast<int32_t>(next);
        } else {
          ++dropped;
        }
      }
      if (p.slot_to_row != nullptr) p.slot_to_row[slot] = row;
      if (row < 0) continue;
      if (p.row_to_token != nullptr) p.row_to_token[row] = static_cast<int32_t>(token);
      if (p.row_to_slot != nullptr) p.row_to_slot[row] = static_cast<int32_t>(slot);
      if (p.row_to_expert != nullptr) p.row_to_expert[row] = expert;
      if (p.row_probs != nullptr) p.row_probs[row] = p.probs[mask ? token * p.num_experts + expert : slot];
      if (rowmap != nullptr) rowmap[expert] = row;
      if (sorted != nullptr) {
        int64_t place = num_sorted++;
        for (; place > 0 && sorted[place - 1] > row; --place) sorted[place] = sorted[place - 1];
        sorted[place] = row;
      }
    }
    if (sorted != nullptr) std::fill(sorted + num_sorted, sorted + p.topk, -1);
  }
  return dropped;
}

int route(const pmo_route_params& p) {
  if (const int status = check_route_sizes(p)) return status;
  if (const int status = check_workspace(p)) return status;
  if (const int status = check_route_outputs(p)) return status;
  if (const int status = report_overflow(p, p.routed_per_expert)) return status;

  const RouteChunks chunks(p);
  scan(p, chunks);
  std::vector<int64_t> dropped(static_cast<size_t>(chunks.num_chunks));
  const int threads = static_cast<int>(std::min<int64_t>(resolve_threads(p.num_threads), chunks.num_chunks));
  parallel_for(chunks.num_chunks, threads, [&](int64_t chunk) {
    const int64_t* first_row = chunks.first_row + chunk * p.num_experts;
    std::vector<int64_t> next_row(first_row, first_row + p.num_experts);  // thread-local, as above
    dropped[chunk] = place(p, chunks.begin(p, chunk), chunks.begin(p, chunk + 1), chunks.ids, next_row.data());
  });
  if (p.overflow != nullptr) {
    int64_t total = 0;
    for (const int64_t chunk : dropped) total += chunk;
    *p.overflow = static_cast<int32_t>(total);
  }
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int64_t pmo_route_cpu_workspace_bytes(const pmo_route_params* params) {
  if (params == nullptr || pmo::check_route_sizes(*params) != PMO_OK) return 0;
  return pmo::cpu::workspace_bytes(*params);
}

extern "C" int pmo_route_count_cpu(const pmo_route_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::count);
}

extern "C" int pmo_route_cpu(const pmo_route_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::route);
}
