// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Writing rows past the caches.
//
// A plain store reads the line that it overwrites, and evicts other data from the cache. Non-temporal stores do neither. But an output
// that stays in the cache is there for the next reader, and is up to twice as fast to write. So only calls that move more bytes than the
// cache keeps stream: little of their output would be left in it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "cpu/row_kernels.h"
#include "pmo/base.h"

// Moved bytes beyond which a call streams; a negative number restores what the machine's last-level cache says. Not part of the
// public interface: for tests and for measurements.
extern "C" PMO_API void pmo_cpu_set_streaming_bytes(int64_t bytes);

namespace pmo {
namespace cpu {

// Whether a call that moves this many bytes moves more than the caches keep.
bool beyond_caches(int64_t bytes);

// Writes rows of an output in one of the two ways. Each task makes its own: the destructor orders the streamed rows of the task's thread
// before anything that the thread stores later.
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

  // Whether a kernel may stream to contiguous rows: they consist of whole lines.
  bool streams_whole(const char* rows, int64_t row_bytes) const {
    return streams_ && (reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(row_bytes)) % kLineBytes == 0;
  }

 private:
  const bool streams_;
  void (*const copy_)(const void*, int64_t, const RowList&, const Targets&, bool);
};

}  // namespace cpu
}  // namespace pmo
