// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// permute on the CPU: every source row is read once and written to each of its rows.
//
// Threads own contiguous token ranges, so reads stream; a row belongs to one slot, hence to one thread. Padding rows are zeroed in
// a second pass over contiguous row ranges. Bytes moved: (T + N) * (H + S) elements.
#include "pmo/permute.h"

#include "common/checks.h"
#include "common/status.h"
#include "cpu/padding.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

// One array of rows to move: the tokens or their scales.
struct Strip {
  const char* source;
  int64_t source_stride;  // bytes
  char* target;           // NULL: nothing to move
  int64_t row_bytes;
};

void move_token(const Strip& strip, const pmo_permute_params& p, int64_t token, const RowWriter& writer) {
  const char* source = strip.source + token * strip.source_stride;
  const void* following = source + strip.source_stride;
  const RowList next = {&following, token + 1 < p.num_tokens ? 1 : 0};
  if (token + kTokensAhead < p.num_tokens) prefetch_beginning(source + kTokensAhead * strip.source_stride, strip.row_bytes);
  TargetBatches targets([&](const Targets& batch) { writer.copy(batch, source, strip.row_bytes, next); });
  for (int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
    const int32_t row = p.slot_to_row[slot];
    if (row >= 0 && row < p.num_rows) targets.add(strip.target + row * strip.row_bytes);
  }
  targets.finish();
}

void zero_padding(const Strip& strip, const pmo_permute_params& p) {
  zero_rows_without_token(strip.target, strip.row_bytes, p.num_rows, p.row_to_token, p.num_threads);
}

int permute(const pmo_permute_params& p) {
  if (const int status = check_permute(p)) return status;
  const int64_t itemsize = dtype_size(p.dtype);
  const Strip rows = {static_cast<const char*>(p.x), p.x_row_stride * itemsize, static_cast<char*>(p.rows), p.hidden * itemsize};
  const int64_t scale_itemsize = dtype_size(p.scale_dtype);
  const Strip scales = {static_cast<const char*>(p.scale), p.scale_row_stride * scale_itemsize, static_cast<char*>(p.row_scales),
                        p.scale_cols * scale_itemsize};
  const bool move_rows = rows.target != nullptr && rows.row_bytes > 0;
  const bool move_scales = scales.target != nullptr && scales.row_bytes > 0;
  if (!move_rows && !move_scales) return PMO_OK;

  const int64_t bytes = (p.num_rows + p.num_tokens) * ((move_rows ? rows.row_bytes : 0) + (move_scales ? scales.row_bytes : 0));
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    for (int64_t token = begin; token < end; ++token) {
      if (move_rows) move_token(rows, p, token, writer);
      if (move_scales) move_token(scales, p, token, writer);
    }
  });
  if (move_rows && (p.fill & PMO_FILL_ROWS) != 0) zero_padding(rows, p);
  if (move_scales && (p.fill & PMO_FILL_SCALES) != 0) zero_padding(scales, p);
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_permute_cpu(const pmo_permute_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::permute);
}
