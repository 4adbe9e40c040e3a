// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Processor time that Linux control groups grant. Containers limit their processes by it and may expose more cores.
#pragma once

#include <string>

namespace pmo {
namespace cpu {

// Number of cores whose time this process may use, rounded up; 0: no limit. It is the minimum over its control group and the
// groups above it, of version 2 or 1. `root` is prepended to every path.
int cores_of_quota(const std::string& root = "");

}  // namespace cpu
}  // namespace pmo
