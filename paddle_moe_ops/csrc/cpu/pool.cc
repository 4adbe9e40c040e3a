// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu/quota.h"
#include "pmo/base.h"

namespace pmo {
namespace cpu {
namespace {

constexpr int kMaxThreads = 1024;

// IEEE arithmetic for the life of the object: round to nearest, no flush to zero, exceptions masked. Inference engines switch
// flush-to-zero on for their threads, which would change the sums of subnormal rows.
class IeeeFloatScope {
 public:
#if defined(__x86_64__)
  IeeeFloatScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~IeeeFloatScope() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  IeeeFloatScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeFloatScope() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
  IeeeFloatScope(const IeeeFloatScope&) = delete;
  IeeeFloatScope& operator=(const IeeeFloatScope&) = delete;
};

class Pool {
 public:
  void run(int64_t num_tasks, int num_threads, TaskFunction function, void* context) {
    std::unique_lock<std::mutex> owner(owner_, std::defer_lock);
    // A second Python thread that calls while the workers are busy does its own work alone.
    if (num_threads <= 1 || num_tasks <= 1 || !owner.try_lock()) {
      IeeeFloatScope ieee;
      for (int64_t task = 0; task < num_tasks; ++task) function(context, task);
      return;
    }
    grow(num_threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      function_ = function;
      context_ = context;
      num_tasks_ = num_tasks;
      next_task_.store(0, std::memory_order_relaxed);
      open_places_ = num_threads - 1;
    }
    for (int worker = 1; worker < num_threads; ++worker) wake_.notify_one();  // only workers that find an open place
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    open_places_ = 0;  // a worker that wakes only now finds nothing to join
    idle_.wait(lock, [this] { return active_workers_ == 0; });
  }

 private:
  void grow(int num_workers) {
    while (num_workers_ < num_workers) {
      try {
        std::thread([this] { worker_loop(); }).detach();
      } catch (const std::system_error&) {
        return;  // the system creates no more threads: the existing ones do the work
      }
      ++num_workers_;
    }
  }

  void worker_loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return open_places_ > 0; });
      --open_places_;
      ++active_workers_;
      lock.unlock();
      work();
      lock.lock();
      if (--active_workers_ == 0) idle_.notify_one();
    }
  }

  void work() {
    IeeeFloatScope ieee;
    for (;;) {
      const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) return;
      function_(context_, task);
    }
  }

  std::mutex owner_;  // held by the thread whose job runs; also guards num_workers_
  int num_workers_ = 0;

  std::mutex mutex_;  // guards all below except the task counter
  std::condition_variable wake_, idle_;
  int open_places_ = 0;
  int active_workers_ = 0;
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_task_{0};
};

// The pool is never destroyed: its workers sleep until the process ends. A forked child has no workers and maybe a locked mutex,
// so it drops the parent's pool and creates its own at the first call.
std::atomic<Pool*> current_pool{nullptr};
std::atomic<int32_t> default_threads{0};

const int at_fork_registered = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });

Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  Pool* created = new Pool;
  if (current_pool.compare_exchange_strong(existing, created)) return *created;
  delete created;  // another thread was first
  return *existing;
}

int visible_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

// A process may see more cores than its quota grants. Threads beyond the quota would only compete for its time.
int available_cores() {
  static const int quota = cores_of_quota();  // read once: reading takes as long as a small operator
  const int cores = visible_cores();
  return quota > 0 && quota < cores ? quota : cores;
}

}  // namespace

int resolve_threads(int32_t requested) { return requested > 0 ? std::min(requested, kMaxThreads) : pmo_num_threads(); }

void run_tasks(int64_t num_tasks, int num_threads, TaskFunction function, void* context) {
  static_cast<void>(at_fork_registered);
  pool().run(num_tasks, num_threads, function, context);
}

}  // namespace cpu
}  // namespace pmo

extern "C" void pmo_set_num_threads(int32_t num_threads) { pmo::cpu::default_threads.store(num_threads > 0 ? num_threads : 0); }

extern "C" int32_t pmo_num_threads(void) {
  const int32_t chosen = pmo::cpu::default_threads.load();
  return std::min(chosen > 0 ? chosen : pmo::cpu::available_cores(), pmo::cpu::kMaxThreads);
}
