// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The pages behind new outputs in CPU memory.
#pragma once

#include "paddle/device.h"

namespace pmo {
namespace binding {

// Before an output is first written: asks the system for large pages behind it, and for all pages of a small one at once. Changes
// nothing that the output holds.
void prepare_pages(const Target& target, const paddle::Tensor& output);

}  // namespace binding
}  // namespace pmo
