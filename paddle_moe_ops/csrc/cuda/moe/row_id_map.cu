// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// TransformerEngine's row_id_map [T, 2E + 1] (pmo/row_id_map.h), made from a plan and read back into a rowmap. A warp per token,
// 32 entries at a time.
//
// Memory-bound: make reads 4 T K bytes and writes 4 T (2E + 1); read reads the used entries and writes 4 T E.
#include "pmo/row_id_map.h"

#include "common/checks.h"
#include "common/padding.h"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

__device__ int64_t first_token() { return blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize; }

// The lane's entry of token_rows, from entry `begin` on: its row and expert, and the mask of lanes with a row.
struct Entries {
  int32_t row = -1, expert = -1;
  unsigned used;

  __device__ Entries(const pmo_row_id_map_params& p, int64_t token, int64_t begin) {
    const int64_t entry = begin + threadIdx.x % kWarpSize;
    if (entry < p.topk) row = p.token_rows[token * p.topk + entry];
    if (row >= 0 && row < p.num_rows) expert = p.row_to_expert[row];
    used = __ballot_sync(kAllLanes, expert >= 0 && expert < p.num_experts);
  }
};

__global__ void make_lines(pmo_row_id_map_params p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t experts = p.num_experts;
  for (int64_t token = first_token(); token < p.num_tokens; token += int64_t{gridDim.x} * kWarps) {
    int32_t* line = p.row_id_map + token * (2 * experts + 1);
    int64_t count = 0;
    for (int64_t begin = 0; begin < p.topk; begin += kWarpSize) count += __popc(Entries(p, token, begin).used);
    count = min(count, experts);
    int64_t rank = 0;
    for (int64_t begin = 0; begin < p.topk; begin += kWarpSize) {
      const Entries entries(p, token, begin);  // from the L1
      const int64_t place = count - 1 - rank - __popc(entries.used & ((1u << lane) - 1));
      if ((entries.used >> lane & 1) != 0 && place >= 0) {
        line[place] = unpadded_row(entries.row, p.pad_offsets, entries.expert);
        line[experts + place] = entries.expert;
      }
      rank += __popc(entries.used);
    }
    for (int64_t place = count + lane; place < experts; place += kWarpSize) line[place] = line[experts + place] = -1;
    if (lane == 0) line[2 * experts] = static_cast<int32_t>(count);
  }
}

// Processes entries from the last 32 to the first. If several name one expert, the first one is written last and stays.
__global__ void read_lines(pmo_row_id_map_params p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t experts = p.num_experts;
  for (int64_t token = first_token(); token < p.num_tokens; token += int64_t{gridDim.x} * kWarps) {
    const int32_t* rows = p.row_id_map + token * (2 * experts + 1);
    int32_t* line = p.rowmap + token * experts;
    for (int64_t expert = lane; expert < experts; expert += kWarpSize) line[expert] = -1;
    const int64_t count = min(int64_t{max(rows[2 * experts], 0)}, experts);
    for (int64_t begin = (count - 1) / kWarpSize * kWarpSize; begin >= 0 && count > 0; begin -= kWarpSize) {
      __syncwarp();  // orders the overwrites of other lanes
      const int64_t entry = begin + lane;
      const int32_t expert = entry < count ? rows[experts + entry] : -1;
      const unsigned same = __match_any_sync(kAllLanes, expert);
      if (expert >= 0 && expert < experts && lane == __ffs(same) - 1) {
        line[expert] = padded_row(rows[entry], p.pad_offsets, expert);
      }
    }
  }
}

int make_row_id_map(const pmo_row_id_map_params& p, cudaStream_t stream) {
  if (const int status = check_make_row_id_map(p)) return status;
  if (p.num_tokens == 0) return PMO_OK;
  return launch("make_lines", make_lines, {grid_for(p.num_tokens, kWarps), kThreads}, stream, p);
}

int read_row_id_map(const pmo_row_id_map_params& p, cudaStream_t stream) {
  if (const int status = check_read_row_id_map(p)) return status;
  if (p.num_tokens == 0) return PMO_OK;
  return launch("read_lines", read_lines, {grid_for(p.num_tokens, kWarps), kThreads}, stream, p);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_make_row_id_map_cuda(const pmo_row_id_map_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::make_row_id_map);
}

extern "C" int pmo_read_row_id_map_cuda(const pmo_row_id_map_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::read_row_id_map);
}
