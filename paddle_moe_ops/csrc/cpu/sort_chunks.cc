// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// sort_chunks on the CPU: one copy per chunk and thread.
//
// Threads own contiguous ranges of the rows of the source order. Bytes moved: 2 * R * H elements.
#include "pmo/sort_chunks.h"

#include <algorithm>
#include <vector>

#include "common/chunks.h"
#include "common/dtypes.h"
#include "common/ids.h"
#include "common/status.h"
#include "cpu/pool.h"
#include "cpu/streaming.h"

namespace pmo {
namespace cpu {
namespace {

// Rows [begin, end) of the source order are copied to [to, to + end - begin).
struct Chunk {
  int64_t begin, end, to;
};

// All chunks in source order, then the rows after them.
std::vector<Chunk> placed_chunks(const pmo_sort_chunks_params& p) {
  std::vector<Chunk> chunks(static_cast<size_t>(p.num_chunks) + 1);
  int64_t row = 0;
  for (int64_t i = 0; i < p.num_chunks; ++i) {
    const int64_t size = id_at(p.split_sizes, p.split_sizes_kind, i);
    const int64_t end = row + std::clamp<int64_t>(size, 0, p.num_rows - row);
    chunks[i] = {row, end, -1};
    row = end;
  }
  chunks[p.num_chunks] = {row, p.num_rows, row};
  int64_t to = 0;
  const auto place = [&to](Chunk& chunk) {
    if (chunk.to >= 0) return;
    chunk.to = to;
    to += chunk.end - chunk.begin;
  };
  for (int64_t i = 0; i < p.num_chunks; ++i) {
    const int64_t named = id_at(p.order, p.order_kind, i);
    if (named >= 0 && named < p.num_chunks) place(chunks[named]);
  }
  for (Chunk& chunk : chunks) place(chunk);  // chunks that the order does not name
  return chunks;
}

class Mover {
 public:
  Mover(const pmo_sort_chunks_params& p, bool streams)
      : p_(p), writer_(streams), row_bytes_(p.hidden * dtype_size(p.dtype)), stride_(p.x_row_stride * dtype_size(p.dtype)) {}

  // Rows [begin, end) of a chunk.
  void move(const Chunk& chunk, int64_t begin, int64_t end) const {
    const int64_t count = end - begin, to = chunk.to + begin - chunk.begin;
    const int64_t source = p_.inverse != 0 ? to : begin, target = p_.inverse != 0 ? begin : to;
    if (p_.out != nullptr && row_bytes_ > 0) move_rows(source, target, count);
    if (p_.probs_out != nullptr) std::copy_n(p_.probs + source, count, p_.probs_out + target);
    if (p_.source_to_dest == nullptr) return;
    for (int64_t i = 0; i < count; ++i) p_.source_to_dest[begin + i] = static_cast<int32_t>(to + i);
  }

 private:
  void move_rows(int64_t source, int64_t target, int64_t count) const {
    const char* from = static_cast<const char*>(p_.x) + source * stride_;
    char* to = static_cast<char*>(p_.out) + target * row_bytes_;
    if (stride_ == row_bytes_) {
      writer_.copy(to, from, count * row_bytes_);
      return;
    }
    for (int64_t i = 0; i < count; ++i) writer_.copy(to + i * row_bytes_, from + i * stride_, row_bytes_);
  }

  const pmo_sort_chunks_params& p_;
  const RowWriter writer_;
  const int64_t row_bytes_, stride_;
};

int sort_chunks(const pmo_sort_chunks_params& p) {
  if (const int status = check_sort_chunks(p)) return status;
  if (const int status = report_chunks(p)) return status;
  if (p.num_rows == 0) return PMO_OK;
  const std::vector<Chunk> chunks = placed_chunks(p);
  const int64_t row_bytes = (p.out == nullptr ? 0 : p.hidden * dtype_size(p.dtype)) + (p.probs_out == nullptr ? 0 : 4) +
                            (p.source_to_dest == nullptr ? 0 : 2);
  const int64_t bytes = 2 * p.num_rows * row_bytes;
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_rows, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const Mover mover(p, streams);
    const auto ends_after = [](int64_t row, const Chunk& chunk) { return row < chunk.end; };
    for (auto chunk = std::upper_bound(chunks.begin(), chunks.end(), begin, ends_after); begin < end; ++chunk) {
      const int64_t stop = std::min(end, chunk->end);
      if (stop > begin) mover.move(*chunk, begin, stop);
      begin = stop;
    }
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_sort_chunks_cpu(const pmo_sort_chunks_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::sort_chunks);
}
