// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Expert parallelism on the CPU, between processes of one machine.
#include "pmo/ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/checks.h"
#include "common/regions.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

// One serial pass: rows follow ascending token, and the exchanged rows are larger by far.
int plan(const pmo_rank_plan_params& p) {
  if (const int status = check_rank_plan(p)) return status;
  const int64_t columns = max_rows_per_token(p.num_ranks, p.topk);
  std::vector<int32_t> counts(p.num_ranks, 0);
  if (p.row_to_token != nullptr) std::fill(p.row_to_token, p.row_to_token + p.num_ranks * p.rows_per_rank, -1);
  std::fill(p.routed, p.routed + p.num_ranks * p.experts_per_rank, 0);
  int32_t dropped = 0;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    int32_t* rows = p.token_rows + token * columns;
    int32_t* const end = rows + columns;
    for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
      const int32_t slots = slots_at_rank(p, token, rank);
      if (slots == 0) continue;
      const int64_t place = counts[rank]++;
      if (place >= p.capacity) {
        dropped += slots;
        continue;
      }
      const int64_t row = rank * p.rows_per_rank + place;
      *rows++ = static_cast<int32_t>(row);
      if (p.row_to_token != nullptr) p.row_to_token[row] = static_cast<int32_t>(token);
      for (int64_t k = 0; k < p.topk; ++k) record_slot(p, token, k, rank, place);
    }
    std::fill(rows, end, -1);
    for (int64_t k = 0; k < p.topk; ++k) {
      const int64_t expert = first_choice(p, token, k);
      if (expert >= 0) ++p.routed[expert];
    }
  }
  for (int64_t rank = 0; rank < p.num_ranks; ++rank) {
    *Records(p.records, p.region_bytes, rank, p.rows_per_rank, p.topk).count =
        static_cast<int32_t>(std::min<int64_t>(counts[rank], p.capacity));
  }
  *p.dropped = dropped;
  return PMO_OK;
}

int records(const pmo_rank_records_params& p) {
  if (const int status = check_rank_records(p)) return status;
  const int64_t slots = p.num_ranks * p.rows_per_rank * p.topk;
  parallel_ranges(slots, slots * 16, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) read_record(p, slot);
  });
  return PMO_OK;
}

int put(const pmo_rank_values_params& p) {
  if (const int status = check_rank_put(p)) return status;
  const int64_t count = p.rows_per_rank * p.topk;
  for (int64_t rank = 0; rank < (count == 0 ? 0 : p.num_ranks); ++rank) {
    std::memcpy(static_cast<char*>(p.window) + rank * p.region_bytes,
                static_cast<const char*>(p.row_values) + rank * count * kValueBytes, count * kValueBytes);
  }
  return PMO_OK;
}

int take(const pmo_rank_values_params& p) {
  if (const int status = check_rank_take(p)) return status;
  const int64_t count = p.rows_per_rank * p.topk;
  for (int64_t rank = 0; rank < (count == 0 ? 0 : p.num_ranks); ++rank) {
    std::memcpy(static_cast<char*>(p.slot_values) + rank * count * kValueBytes,
                static_cast<const char*>(p.window) + rank * p.region_bytes, count * kValueBytes);
  }
  return PMO_OK;
}

int get(const pmo_rank_values_params& p) {
  if (const int status = check_rank_get(p)) return status;
  const int64_t slots = p.num_tokens * p.topk;
  parallel_ranges(slots, slots * 16, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) static_cast<float*>(p.slot_values)[slot] = value_of_slot(p, slot);
  });
  return PMO_OK;
}

int rows(const pmo_rank_rows_params& p) {
  if (const int status = check_rank_rows(p)) return status;
  parallel_ranges(p.num_rows, p.num_rows * 24, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) p.places[row] = place_of_row(p, row);
  });
  return PMO_OK;
}

constexpr int64_t kCallBytes = PMO_CALL_WORDS * sizeof(int32_t);

// Marks the state, and reports the calls of all ranks unless others were reported before.
void mark(const pmo_rank_barrier_params& p, const int32_t* calls, int32_t reason) {
  p.state[1] = 1;
  if (p.report[0] != 0) return;
  std::memcpy(p.report + 1, calls, p.num_ranks * kCallBytes);
  p.report[0] = reason;
}

int barrier(const pmo_rank_barrier_params& p) {
  if (const int status = check_rank_barrier(p)) return status;
  const auto counter = [&](const void* regions, int64_t rank) {
    return reinterpret_cast<uint32_t*>(const_cast<char*>(static_cast<const char*>(regions)) + rank * p.region_bytes);
  };
  for (int64_t rank = 0; rank < (p.forward_calls == nullptr ? 0 : p.num_ranks); ++rank) {
    if (runs_backward(p, rank)) continue;
    mark(p, p.forward_calls, PMO_GRADIENT_MODES_DIFFER);
    return PMO_OK;
  }
  const uint32_t turn = static_cast<uint32_t>(p.state[0]) + 1;
  p.state[0] = static_cast<int32_t>(turn);
  for (int64_t rank = 0; rank < p.num_ranks; ++rank) {
    std::memcpy(call_word(p.peers, p.region_bytes, rank, turn, 0), p.call, kCallBytes);
    __atomic_store_n(counter(p.peers, rank), turn, __ATOMIC_RELEASE);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(p.timeout_ms);
  for (int64_t rank = 0; rank < p.num_ranks; ++rank) {
    while (static_cast<int32_t>(__atomic_load_n(counter(p.arrived, rank), __ATOMIC_ACQUIRE) - turn) < 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        return fail(PMO_INTERNAL, "rank " + std::to_string(rank) + " of the group did not answer");
      }
      std::this_thread::yield();
    }
  }
  bool differ = false;
  for (int64_t rank = 0; rank < p.num_ranks; ++rank) {
    int32_t* const call = p.calls + rank * PMO_CALL_WORDS;
    std::memcpy(call, call_word(p.arrived, p.region_bytes, rank, turn, 0), kCallBytes);
    differ |= !std::equal(call, call + PMO_CALL_WORDS - 1, p.call);
  }
  if (differ) mark(p, p.calls, PMO_CALLS_DIFFER);
  return PMO_OK;
}

int spoil(const pmo_rank_spoil_params& p) {
  if (const int status = check_rank_spoil(p)) return status;
  const bool differ = std::any_of(p.codes, p.codes + p.num_ranks, [&](int64_t code) { return code != p.code; });
  if (differ && p.data_bytes > 0) std::memset(p.data, 0xFF, p.data_bytes);
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_rank_plan_cpu(const pmo_rank_plan_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::plan);
}

extern "C" int pmo_rank_records_cpu(const pmo_rank_records_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::records);
}

extern "C" int pmo_rank_put_cpu(const pmo_rank_values_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::put);
}

extern "C" int pmo_rank_take_cpu(const pmo_rank_values_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::take);
}

extern "C" int pmo_rank_get_cpu(const pmo_rank_values_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::get);
}

extern "C" int pmo_rank_rows_cpu(const pmo_rank_rows_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::rows);
}

extern "C" int pmo_rank_barrier_cpu(const pmo_rank_barrier_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::barrier);
}

extern "C" int pmo_rank_spoil_cpu(const pmo_rank_spoil_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::spoil);
}
