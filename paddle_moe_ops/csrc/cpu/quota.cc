// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "cpu/quota.h"

#include <cinttypes>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <fstream>

namespace pmo {
namespace cpu {
namespace {

// The lower of two limits; 0 means no limit.
int lower(int a, int b) { return a == 0 || (b != 0 && b < a) ? b : a; }

int rounded_up(int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return 0;
  const int64_t cores = quota / period + (quota % period != 0 ? 1 : 0);
  return cores < INT_MAX ? static_cast<int>(cores) : INT_MAX;
}

// The first line of a file; empty if there is no file.
std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Limit from "QUOTA PERIOD" in microseconds, such as "200000 100000"; "max 100000": no limit.
int limit_of_version_2(const std::string& group) {
  int64_t quota = 0, period = 0;
  const std::string line = first_line(group + "/cpu.max");
  return std::sscanf(line.c_str(), "%" SCNd64 " %" SCNd64, &quota, &period) == 2 ? rounded_up(quota, period) : 0;
}

// Limit from one file per number; a quota of -1: no limit.
int limit_of_version_1(const std::string& group) {
  int64_t quota = 0, period = 0;
  const std::string lines = first_line(group + "/cpu.cfs_quota_us") + " " + first_line(group + "/cpu.cfs_period_us");
  return std::sscanf(lines.c_str(), "%" SCNd64 " %" SCNd64, &quota, &period) == 2 ? rounded_up(quota, period) : 0;
}

// The lowest limit of a group and the groups above it, up to the mount point. A container may see only its own group there, yet
// know it by its path on the host, so folders that do not exist are skipped.
template <typename Limit>
int lowest_limit(const std::string& mount, std::string group, Limit limit) {
  int lowest = 0;
  for (;;) {
    lowest = lower(lowest, limit(mount + group));
    const size_t end = group.rfind('/');
    if (end == std::string::npos) return lowest;
    group.erase(end);
  }
}

// True if a comma-separated list of names contains "cpu".
bool names_cpu(const std::string& controllers) { return ("," + controllers + ",").find(",cpu,") != std::string::npos; }

}  // namespace

int cores_of_quota(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  int lowest = 0;
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:/group
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty()) {  // version 2, which is mounted elsewhere if version 1 exists too
      lowest = lower(lowest, lowest_limit(mounts, group, limit_of_version_2));
      lowest = lower(lowest, lowest_limit(mounts + "/unified", group, limit_of_version_2));
    } else if (names_cpu(controllers)) {  // mounted as all of its controllers, or as this one
      lowest = lower(lowest, lowest_limit(mounts + "/" + controllers, group, limit_of_version_1));
      lowest = lower(lowest, lowest_limit(mounts + "/cpu", group, limit_of_version_1));
    }
  }
  return lowest;
}

}  // namespace cpu
}  // namespace pmo
