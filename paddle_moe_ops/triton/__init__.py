# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators as Triton kernels: a second implementation, independent of the compiled one.

Kernels and their launchers know no framework: they work on anything with data_ptr, shape and a name of its dtype, and
get memory and a way to launch from a `launching.Device`. `_runtime` has the one for Paddle.
"""
