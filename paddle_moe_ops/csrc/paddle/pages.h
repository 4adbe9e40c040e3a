// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The pages behind new outputs in CPU memory.
#pragma once

#include "paddle/device.h"

namespace pmo {
namespace binding {

// Called before an output is first written: requests huge pages for it, and populates all pages of a small one. The contents stay
// the same.
void prepare_pages(const Target& target, const paddle::Tensor& output);

}  // namespace binding
}  // namespace pmo
