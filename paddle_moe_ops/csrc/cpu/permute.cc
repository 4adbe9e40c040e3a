// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute on the CPU: every source row is read once and written to each of its rows.
//
// Threads own contiguous token ranges, so reads stream; a row belongs to one slot, hence to one thread. Padding rows are zeroed in
// a second pass over contiguous row ranges. Bytes moved: (T + N) * (H + S) elements.
#include "pmo/permute.h"

#include <algorithm>

#include "common/checks.h"
#include "common/row_array.h"
#include "common/status.h"
#include "cpu/padding.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

void move_token(const RowArray& array, const pmo_permute_params& p, int64_t token, const RowWriter& writer) {
  const char* source = array.source + token * array.source_stride;
  const void* following = source + array.source_stride;
  const RowList next = {&following, token + 1 < p.num_tokens ? 1 : 0};
  if (token + kPrefetchTokens < p.num_tokens) prefetch_beginning(source + kPrefetchTokens * array.source_stride, array.row_bytes);
  TargetBatches targets([&](const Targets& batch) { writer.copy(batch, source, array.row_bytes, next); });
  for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
    const int64_t row = p.slot_to_row[slot] - p.first_row;
    if (row >= 0 && row < p.num_rows) targets.add(array.target + row * array.row_bytes);
  }
  targets.finish();
}

void zero_padding(const RowArray& array, const pmo_permute_params& p) {
  const int64_t end = p.rows_end == nullptr ? p.num_rows : std::clamp<int64_t>(*p.rows_end - p.first_row, 0, p.num_rows);
  zero_padding_rows(array.target, array.row_bytes, end, p.row_to_token, p.num_threads);
}

int permute(const pmo_permute_params& p) {
  if (const int status = check_permute(p)) return status;
  const RowArray rows = rows_of(p), scales = scales_of(p);
  const int64_t bytes = (p.num_rows + p.num_tokens) * (rows.row_bytes + scales.row_bytes);
  if (rows.row_bytes + scales.row_bytes == 0) return PMO_OK;

  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    for (int64_t token = begin; token < end; ++token) {
      if (rows.row_bytes > 0) move_token(rows, p, token, writer);
      if (scales.row_bytes > 0) move_token(scales, p, token, writer);
    }
  });
  if (rows.fill) zero_padding(rows, p);
  if (scales.fill) zero_padding(scales, p);
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_permute_cpu(const pmo_permute_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::permute);
}
