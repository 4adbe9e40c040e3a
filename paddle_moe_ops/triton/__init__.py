# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators as Triton kernels: a second implementation, independent of the compiled one.

    ops/        row movement: routing maps, permute, unpermute, chunk sort, quantisation, top-k
    gemm/       grouped GEMM, wgrad, SwiGLU, the fused layer of experts
    launch/     device interface, cache of compiled kernels, launches on tensors of Paddle

Kernels and launchers depend on no framework. They accept any array with data_ptr, shape and a dtype name, and allocate
and launch through a `launch.device.Device`. `launch.paddle_device` implements it for Paddle.
"""
