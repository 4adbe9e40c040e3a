// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The parts of Paddle's C++ API that operators use. paddle/extension.h adds passes of Paddle's compiler, whose templates each
// source would instantiate again.
#pragma once

#include "paddle/common/ddim.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"
#include "paddle/phi/api/include/tensor_utils.h"
