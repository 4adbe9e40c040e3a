// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/streaming.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace pmo {
namespace cpu {
namespace {

constexpr int64_t kAssumedCacheBytes = int64_t{32} << 20;  // if the system reports no size

// Only a part of the last-level cache counts: other processes use it too, invisible in a virtual machine. Measured on a Xeon that
// reports 260 MiB, for permuting rows and summing them: plain stores were faster up to 88 MB of rows, streaming from 117 MB on.
int64_t share_of(int64_t cache_bytes) { return cache_bytes / 8 * 3; }

// sysconf reports the caches of x86-64 only; /sys lists those of every architecture whose firmware describes them.
int64_t cache_bytes_in_sys() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    char path[80];
    std::snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) break;
    long long kibibytes = 0;
    if (std::fscanf(file, "%lldK", &kibibytes) == 1 && kibibytes * 1024 > largest) largest = kibibytes * 1024;
    std::fclose(file);
  }
  return largest;
}

int64_t last_level_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long level3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (level3 > 0) return level3;
#endif
  const int64_t largest = cache_bytes_in_sys();
  return largest > 0 ? largest : kAssumedCacheBytes;
}

std::atomic<int64_t> chosen_bytes{-1};

}  // namespace

bool beyond_caches(int64_t bytes) {
  static const int64_t from_machine = share_of(last_level_cache_bytes());
  const int64_t chosen = chosen_bytes.load(std::memory_order_relaxed);
  return bytes > (chosen >= 0 ? chosen : from_machine);
}

}  // namespace cpu
}  // namespace pmo

extern "C" void pmo_cpu_set_streaming_bytes(int64_t bytes) { pmo::cpu::chosen_bytes.store(bytes); }
