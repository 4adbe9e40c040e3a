# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that only tests launch."""

import triton
import triton.language as tl


@triton.jit
def slow_copy_kernel(source, target, size, rounds, BLOCK: tl.constexpr):
    """One program: target = source, each block after ``rounds`` dependent steps that almost never change it."""
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        value = tl.load(source + index, mask=index < size, other=0)
        state = value
        for _ in range(rounds):
            state = state * 1664525 + 1013904223
        tl.store(target + index, tl.where(state == 123456789, 0, value), mask=index < size)
