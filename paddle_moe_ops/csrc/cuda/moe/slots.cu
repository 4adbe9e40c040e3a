// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Cleaning of a user's rowmap, and values per slot and per row.
//
// clean_rowmap, up to four launches:
//   1. reset: a thread per row clears its bid and its maps
//   2. bid: a thread per entry of the rowmap bids for the entry's row with its flat index; the lowest bid wins (atomicMin, so the
//      outcome does not depend on the order)
//   3. keep_winners: 8, 16 or 32 lanes per token compact the entries that won, in expert order; then a thread per slot looks up
//      its row and the row's value
//   4. complete_findings, only for checks: one thread adds the bad values
// Workspace: pmo_rowmap_findings, then int64 [N] winning indices.
//
// gather: slot_values[slot] = row_values[slot_to_row[slot]], a thread per slot. scatter: the inverse sum, a thread per token.
//
// Memory-bound: clean_rowmap reads the rowmap twice, 4 T E bytes each, and moves 8 N bytes of bids.
#include "common/checks.h"
#include "common/ids.h"
#include "cuda/moe/findings.cuh"
#include "cuda/warp.cuh"
#include "pmo/route.h"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// The workspace: findings, and the winning entry of each row.
struct Bids {
  pmo_rowmap_findings* findings;
  unsigned long long* owner;  // [N] flat index of the entry that has the row
  int64_t bytes;

  explicit Bids(const pmo_clean_rowmap_params& p) {
    Workspace workspace(p.workspace);
    findings = workspace.take<pmo_rowmap_findings>(1);
    owner = workspace.take<unsigned long long>(p.num_rows);
    bytes = workspace.used();
  }
};

__device__ int64_t expert_id(const pmo_clean_rowmap_params& p, int64_t slot) { return id_at(p.ids, p.ids_kind, slot); }

__global__ void reset(pmo_clean_rowmap_params p, Bids bids) {
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (first == 0) *bids.findings = {PMO_NOWHERE, 0, PMO_NOWHERE, 0, PMO_NOWHERE, 0, 0};
  for (int64_t row = first; row < p.num_rows; row += int64_t{gridDim.x} * kThreads) {
    bids.owner[row] = ~0ull;
    p.row_to_token[row] = -1;
    if (p.row_to_slot != nullptr) p.row_to_slot[row] = -1;
    if (p.row_to_expert != nullptr) p.row_to_expert[row] = -1;
  }
}

__device__ bool is_row(const pmo_clean_rowmap_params& p, int32_t row) { return row >= 0 && row < p.num_rows; }

__global__ void bid(pmo_clean_rowmap_params p, Bids bids) {
  const int64_t entries = p.num_tokens * p.num_experts;
  for (int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x; flat < entries; flat += int64_t{gridDim.x} * kThreads) {
    const int32_t row = p.rowmap[flat];
    if (is_row(p, row)) {
      atomicMin(&bids.owner[row], static_cast<unsigned long long>(flat));
    } else if (row != -1) {
      note_first(&bids.findings->bad_row_place, flat);
    }
  }
}

// Row of an entry if the entry won it, else -1.
__device__ int32_t winning_row(const pmo_clean_rowmap_params& p, const Bids& bids, int64_t flat) {
  const int32_t row = p.rowmap[flat];
  return is_row(p, row) && bids.owner[row] == static_cast<unsigned long long>(flat) ? row : -1;
}

// kLanes neighbouring lanes of a warp that share a token.
template <int kLanes>
struct TokenLanes {
  int lane = static_cast<int>(threadIdx.x % kLanes);
  unsigned all = (kAllLanes >> (kWarpSize - kLanes)) << (threadIdx.x % kWarpSize - lane);

  __device__ unsigned ballot(bool vote) const { return __ballot_sync(kAllLanes, vote) & all; }
  __device__ unsigned before() const { return (1u << threadIdx.x % kWarpSize) - 1; }
};

// Row of a slot: that of its expert's winning entry, -1 if there is none.
__device__ int32_t row_of_slot(const pmo_clean_rowmap_params& p, const Bids& bids, int64_t slot) {
  const int64_t expert = expert_id(p, slot);
  if (expert < 0 || expert >= p.num_experts) {
    if (expert != -1) note_first(&bids.findings->bad_id_place, slot);
    return -1;
  }
  const int64_t token = static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.topk);  // T * K < 2^31
  if (p.duplicates == PMO_DUPLICATES_FIRST) {
    for (int64_t earlier = token * p.topk; earlier < slot; ++earlier) {
      if (expert_id(p, earlier) == expert) return -1;
    }
  }
  return winning_row(p, bids, token * p.num_experts + expert);
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads) keep_winners(pmo_clean_rowmap_params p, Bids bids) {
  const TokenLanes<kLanes> me;
  const bool by_expert = p.slot_to_row != nullptr && p.ids == nullptr && p.topk == p.num_experts;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kLanes),
                own = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / kLanes;
  for (int64_t token = own; token - own < p.num_tokens; token += step) {  // the same number of iterations for all lanes of a warp
    const bool is_token = token < p.num_tokens;
    int64_t kept = 0;
    for (int64_t begin = 0; begin < p.num_experts; begin += kLanes) {
      const int64_t expert = begin + me.lane, flat = token * p.num_experts + expert;
      const bool is_entry = is_token && expert < p.num_experts;
      const int32_t row = is_entry ? winning_row(p, bids, flat) : -1;
      if (is_entry && row < 0 && is_row(p, p.rowmap[flat])) note_first(&bids.findings->repeat_place, flat);
      if (is_entry && by_expert) p.slot_to_row[flat] = row;
      const unsigned won = me.ballot(row >= 0);
      if (row >= 0) {
        p.token_rows[token * p.num_experts + kept + __popc(won & me.before())] = row;
        p.row_to_token[row] = static_cast<int32_t>(token);
        if (p.row_to_slot != nullptr) p.row_to_slot[row] = static_cast<int32_t>(flat);
        if (p.row_to_expert != nullptr) p.row_to_expert[row] = static_cast<int32_t>(expert);
      }
      kept += __popc(won);
    }
    const int64_t end = by_expert ? p.num_experts : min(kept + 1, p.num_experts);  // a plan's map is defined in all columns
    for (int64_t place = kept + me.lane; is_token && place < end; place += kLanes)
      p.token_rows[token * p.num_experts + place] = -1;
  }
  if (by_expert || (p.slot_to_row == nullptr && p.slot_values == nullptr)) return;
  const int64_t slots = p.num_tokens * p.topk, threads = int64_t{gridDim.x} * kThreads;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += threads) {
    const int32_t row = row_of_slot(p, bids, slot);
    if (p.slot_to_row != nullptr) p.slot_to_row[slot] = row;
    if (p.slot_values != nullptr) p.slot_values[slot] = row >= 0 ? p.row_values[row] : 0.0f;
  }
}

// Adds the values at the places found; one thread.
__global__ void complete_findings(pmo_clean_rowmap_params p, Bids bids) {
  pmo_rowmap_findings& found = *bids.findings;
  if (found.bad_id_place != PMO_NOWHERE) found.bad_id = expert_id(p, found.bad_id_place);
  if (found.bad_row_place != PMO_NOWHERE) found.bad_row = p.rowmap[found.bad_row_place];
  if (found.repeat_place != PMO_NOWHERE) {
    found.repeat_row = p.rowmap[found.repeat_place];
    found.repeat_first = static_cast<int64_t>(bids.owner[found.repeat_row]);
  }
}

int clean_rowmap(const pmo_clean_rowmap_params& p, cudaStream_t stream) {
  if (const int status = check_clean_rowmap(p)) return status;
  const Bids bids(p);
  PMO_REQUIRE(p.workspace != nullptr && reinterpret_cast<uintptr_t>(p.workspace) % 8 == 0 && p.workspace_bytes >= bids.bytes,
              "workspace", "8-byte aligned and as large as pmo_clean_rowmap_cuda_workspace_bytes says");
  const Grid for_rows = {grid_for(p.num_rows + 1, kThreads), kThreads};
  if (const int status = launch("reset", reset, for_rows, stream, p, bids)) return status;
  if (p.num_tokens == 0) return PMO_OK;
  const Grid for_entries = {grid_for(p.num_tokens * p.num_experts, kThreads), kThreads};
  if (const int status = launch("bid", bid, for_entries, stream, p, bids)) return status;
  const auto keep = [&](auto* kernel, int lanes) {
    const Grid grid = {grid_for(p.num_tokens, kThreads / lanes), kThreads};
    return launch("keep_winners", kernel, grid, stream, p, bids);
  };
  const int status = p.num_experts <= 8    ? keep(keep_winners<8>, 8)
                     : p.num_experts <= 16 ? keep(keep_winners<16>, 16)
                                           : keep(keep_winners<kWarpSize>, kWarpSize);
  if (status != PMO_OK || p.checks == 0) return status;
  return launch("complete_findings", complete_findings, {1, 1}, stream, p, bids);
}

// Index of a slot's value, or -1.
__device__ int64_t value_place(const pmo_slots_params& p, int64_t slot, int64_t row) {
  if (p.num_experts == 0) return slot;
  const int32_t expert = p.row_to_expert[row];
  return expert >= 0 && expert < p.num_experts ? slot / p.topk * p.num_experts + expert : -1;
}

__global__ void gather(pmo_slots_params p) {
  const int64_t slots = p.num_tokens * p.topk;
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < slots; slot += int64_t{gridDim.x} * kThreads) {
    const int64_t row = p.slot_to_row[slot];
    const bool has_row = row >= 0 && row < p.num_rows;
    if (p.num_experts == 0) {
      p.slot_values[slot] = has_row ? p.row_values[row] : 0.0f;
      continue;
    }
    const int64_t place = has_row ? value_place(p, slot, row) : -1;
    if (place >= 0) p.slot_values[place] = p.row_values[row];
  }
}

// A thread per token: only slots of one token may share a row, and their values are added in slot order.
__global__ void scatter(pmo_slots_params p) {
  for (int64_t token = blockIdx.x * int64_t{kThreads} + threadIdx.x; token < p.num_tokens;
       token += int64_t{gridDim.x} * kThreads) {
    for (int pass = p.accumulate != 0 ? 1 : 0; pass < 2; ++pass) {
      for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
        const int64_t row = p.slot_to_row[slot];
        if (row < 0 || row >= p.num_rows) continue;
        const int64_t place = value_place(p, slot, row);
        if (place < 0) continue;
        // -0.0 is the neutral element: a single value keeps its sign
        p.row_values[row] = pass == 0 ? -0.0f : __fadd_rn(p.row_values[row], p.slot_values[place]);
      }
    }
  }
}

int gather_slots(const pmo_slots_params& p, cudaStream_t stream) {
  if (const int status = check_slots(p)) return status;
  const int64_t values = p.num_tokens * (p.num_experts == 0 ? p.topk : p.num_experts);
  if (values == 0) return PMO_OK;
  if (p.num_experts > 0) PMO_CUDA(cudaMemsetAsync(p.slot_values, 0, values * sizeof(float), stream));
  if (p.topk == 0) return PMO_OK;
  return launch("gather", gather, {grid_for(p.num_tokens * p.topk, kThreads), kThreads}, stream, p);
}

int scatter_slots(const pmo_slots_params& p, cudaStream_t stream) {
  if (const int status = check_slots(p)) return status;
  if (p.accumulate == 0 && p.num_rows > 0) PMO_CUDA(cudaMemsetAsync(p.row_values, 0, p.num_rows * sizeof(float), stream));
  if (p.num_tokens * p.topk == 0) return PMO_OK;
  return launch("scatter", scatter, {grid_for(p.num_tokens, kThreads), kThreads}, stream, p);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int64_t pmo_clean_rowmap_cuda_workspace_bytes(const pmo_clean_rowmap_params* params) {
  if (params == nullptr || params->num_rows < 0 || params->num_rows > pmo::kMaxIndex) return 0;
  pmo_clean_rowmap_params sizes_only = *params;
  sizes_only.workspace = nullptr;
  return pmo::cuda::Bids(sizes_only).bytes;
}

extern "C" int pmo_clean_rowmap_cuda(const pmo_clean_rowmap_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::clean_rowmap);
}

extern "C" int pmo_gather_slots_cuda(const pmo_slots_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::gather_slots);
}

extern "C" int pmo_scatter_slots_cuda(const pmo_slots_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::scatter_slots);
}
