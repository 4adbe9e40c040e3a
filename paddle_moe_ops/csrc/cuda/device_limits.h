// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Limits of a GPU, and values that are kept per GPU. Plain C++, so that launches can be planned, and plans tested, without a GPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace pmo {
namespace cuda {

constexpr int kWarpSize = 32;
constexpr int kOldestCapability = 80;         // 10 * major + minor
constexpr int kMultiprocessorThreads = 1536;  // at least, on every GPU of that capability or a newer one
constexpr int kMultiprocessorRegisters = 65536;

struct DeviceLimits {
  int major = 0;  // of the compute capability
  int multiprocessors = 0;
  int shared_per_block = 0;  // largest dynamic shared memory of a CTA, bytes
  int shared_per_multiprocessor = 0;
  int threads_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
};

// A value per device. The first caller determines it while others wait.
template <typename Value>
class OncePerDevice {
 public:
  // find(Value*) returns a status; after a failure the next caller tries again.
  template <typename Find>
  int get(int device, Value* value, Find find) {
    if (device < 0 || device >= kKeptDevices) return find(value);
    Entry& entry = entries_[device];
    if (!entry.found.load(std::memory_order_acquire)) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!entry.found.load(std::memory_order_relaxed)) {
        if (const int status = find(&entry.value)) return status;
        entry.found.store(true, std::memory_order_release);
      }
    }
    *value = entry.value;
    return 0;
  }

 private:
  static constexpr int kKeptDevices = 64;

  struct Entry {
    Value value = {};
    std::atomic<bool> found{false};
  };
  Entry entries_[kKeptDevices];
  std::mutex mutex_;
};

}  // namespace cuda
}  // namespace pmo
