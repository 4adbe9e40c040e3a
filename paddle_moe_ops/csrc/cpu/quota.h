// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// How much processor time the control groups of Linux grant. Containers limit their processes this way; they may see more cores than that.
#pragma once

#include <string>

namespace pmo {
namespace cpu {

// Cores whose time this process may use at most, rounded up: the least of what its control group and those above it allow, of version 2
// or 1. 0: there is no limit. `root` is prepended to every path.
int cores_of_quota(const std::string& root = "");

}  // namespace cpu
}  // namespace pmo
