// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The CPU thread pool.
//
// parallel_for distributes task numbers over the calling thread and sleeping workers, in an undefined assignment. A task may
// depend on its number only: results are then the same for any number of threads.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>

namespace pmo {
namespace cpu {

// Number of threads for an operator: `requested`, or the process default if that is 0.
int resolve_threads(int32_t requested);

using TaskFunction = void (*)(void* context, int64_t task);

void run_tasks(int64_t num_tasks, int num_threads, TaskFunction function, void* context);

// Runs body(task) for every task in [0, num_tasks) under IEEE float rules (no flush to zero). The first exception that a task
// throws is rethrown here once all tasks have run.
template <typename Body>
void parallel_for(int64_t num_tasks, int num_threads, Body body) {
  struct Call {
    Body& body;
    std::mutex mutex;
    std::exception_ptr error;
  } call = {body, {}, nullptr};
  const TaskFunction run = [](void* context, int64_t task) {
    Call& current = *static_cast<Call*>(context);
    try {
      current.body(task);
    } catch (...) {
      std::lock_guard<std::mutex> lock(current.mutex);
      if (!current.error) current.error = std::current_exception();
    }
  };
  run_tasks(num_tasks, num_threads, run, &call);
  if (call.error) std::rethrow_exception(call.error);
}

// Work that moves at most this many bytes, such as 512 rows of 4 KiB, stays on the calling thread. paddle/pages.cc populates the
// pages of such an output in advance. (A huge page has the same size by coincidence.)
constexpr int64_t kOneThreadBytes = int64_t{2} << 20;

// Splits [0, size) into contiguous ranges that move about `bytes` in all, and runs body(begin, end) for each. Small work wakes no
// thread; larger work wakes at most one thread per MiB.
template <typename Body>
void parallel_ranges(int64_t size, int64_t bytes, int32_t requested_threads, Body body) {
  constexpr int64_t kBytesPerThread = int64_t{1} << 20;
  constexpr int64_t kTasksPerThread = 4;  // so that the others do not wait for a thread that starts late or is interrupted
  const int64_t max_threads = bytes <= kOneThreadBytes ? 1 : bytes / kBytesPerThread;
  int64_t threads = max_threads == 1 ? 1 : resolve_threads(requested_threads);
  if (threads > max_threads) threads = max_threads;
  int64_t tasks = threads == 1 ? 1 : threads * kTasksPerThread;
  if (tasks > size) tasks = size;
  parallel_for(tasks, static_cast<int>(threads), [&](int64_t task) {
    // size * task fits: sizes are below 2^47 (addressable rows) and tasks below 2^12
    body(size * task / tasks, size * (task + 1) / tasks);
  });
}

}  // namespace cpu
}  // namespace pmo
