// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// TransformerEngine's row_id_map on the CPU; threads own contiguous token ranges.
#include "pmo/row_id_map.h"

#include <algorithm>

#include "common/checks.h"
#include "common/padding.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

void write_line(const pmo_row_id_map_params& p, int64_t token) {
  const int64_t experts = p.num_experts;
  int32_t* rows = p.row_id_map + token * (2 * experts + 1);
  std::fill(rows, rows + 2 * experts, -1);
  int64_t count = 0;
  for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk && count < experts; ++slot) {
    const int32_t row = p.token_rows[slot];
    if (row < 0 || row >= p.num_rows) continue;
    const int32_t expert = p.row_to_expert[row];
    if (expert < 0 || expert >= experts) continue;
    rows[count] = unpadded_row(row, p.pad_offsets, expert);
    rows[experts + count] = expert;
    ++count;
  }
  std::reverse(rows, rows + count);
  std::reverse(rows + experts, rows + experts + count);
  rows[2 * experts] = static_cast<int32_t>(count);
}

void read_line(const pmo_row_id_map_params& p, int64_t token) {
  const int64_t experts = p.num_experts;
  const int32_t* rows = p.row_id_map + token * (2 * experts + 1);
  int32_t* line = p.rowmap + token * experts;
  std::fill(line, line + experts, -1);
  for (int64_t entry = std::clamp<int64_t>(rows[2 * experts], 0, experts) - 1; entry >= 0; --entry) {
    const int32_t expert = rows[experts + entry];
    if (expert >= 0 && expert < experts) line[expert] = padded_row(rows[entry], p.pad_offsets, expert);
  }
}

template <typename Line>
int each_line(const pmo_row_id_map_params& p, int status, Line line) {
  if (status != PMO_OK) return status;
  parallel_ranges(p.num_tokens, p.num_tokens * p.num_experts * 12, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) line(p, token);
  });
  return PMO_OK;
}

int make_row_id_map(const pmo_row_id_map_params& p) { return each_line(p, check_make_row_id_map(p), write_line); }

int read_row_id_map(const pmo_row_id_map_params& p) { return each_line(p, check_read_row_id_map(p), read_line); }

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_make_row_id_map_cpu(const pmo_row_id_map_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::make_row_id_map);
}

extern "C" int pmo_read_row_id_map_cpu(const pmo_row_id_map_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::read_row_id_map);
}
