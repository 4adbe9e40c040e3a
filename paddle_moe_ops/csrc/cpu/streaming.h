// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Writing rows with non-temporal stores.
//
// A plain store reads the line that it overwrites, and evicts other data from the cache. Non-temporal stores do neither. But an
// output that stays in the cache is faster to read next, and up to twice as fast to write. So only calls that move more bytes
// than the cache keeps stream: little of their output would stay cached.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "cpu/row_kernels.h"
#include "pmo/base.h"

// Moved bytes beyond which a call streams; a negative number restores the default, a share of the last-level cache. Not part of
// the public interface: for tests and measurements.
extern "C" PMO_API void pmo_cpu_set_streaming_bytes(int64_t bytes);

namespace pmo {
namespace cpu {

// True if a call that moves this many bytes exceeds the caches.
bool beyond_caches(int64_t bytes);

// A writer of output rows, by plain or non-temporal stores. Each task creates its own: the destructor orders the task's streamed
// rows before later stores of its thread.
class RowWriter {
 public:
  explicit RowWriter(bool streams) : streams_(streams), copy_(row_kernels(PMO_FLOAT32).copy) {}
  ~RowWriter() {
#if defined(__x86_64__)
    if (streams_) _mm_sfence();
#endif
  }
  RowWriter(const RowWriter&) = delete;
  RowWriter& operator=(const RowWriter&) = delete;

  // `targets` and `next` as for the row kernels.
  void copy(const Targets& targets, const char* from, int64_t bytes, const RowList& next = {nullptr, 0}) const {
    copy_(from, bytes, next, targets, streams_);
  }
  void copy(char* to, const char* from, int64_t bytes, const RowList& next = {nullptr, 0}) const {
    Targets target;
    target.add(to);
    copy(target, from, bytes, next);
  }

  // True if a kernel may stream to contiguous rows: they consist of whole lines.
  bool streams_whole(const char* rows, int64_t row_bytes) const {
    return streams_ && (reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(row_bytes)) % kLineBytes == 0;
  }

 private:
  const bool streams_;
  void (*const copy_)(const void*, int64_t, const RowList&, const Targets&, bool);
};

}  // namespace cpu
}  // namespace pmo
