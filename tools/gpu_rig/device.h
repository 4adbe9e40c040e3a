// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Interface between the parts of a custom-device plug-in. There are two devices: "cuda_rig" (cuda_device.cc,
// nccl_collectives.cc), and "stub_rig" of tests/distributed. They share the kernels (host_kernels.cc).
#pragma once

#include <cstddef>

#include "paddle/phi/backends/device_ext.h"

namespace rig {

// The name of the device.
extern const char kDeviceType[];

// Copies between the host and the device after earlier work of the stream, and waits for the copy.
C_Status CopyToHost(void* host, const void* device, size_t bytes, void* stream);
C_Status CopyToDevice(void* device, const void* host, size_t bytes, void* stream);

// Sets the function pointers of the collectives.
void SetCollectives(C_DeviceInterface* device);

}  // namespace rig
