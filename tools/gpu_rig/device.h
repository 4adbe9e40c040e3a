// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// What the parts of the plug-in know of each other.
#pragma once

#include "paddle/phi/backends/device_ext.h"

namespace rig {

// Fills the slots of the collectives.
void SetCollectives(C_DeviceInterface* device);

}  // namespace rig
