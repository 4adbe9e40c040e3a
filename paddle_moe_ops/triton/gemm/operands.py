# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of GEMM launches: pointer types, vector width, and whether TMA can load them."""

from __future__ import annotations

import contextlib

from ..launch.allocator import ALLOCATOR, scratch_memory
from ..launch.device import Array, Device, address, vector_elements
from .configs import GemmConfig
from .types import Rows

__all__ = ["POINTERS", "descriptor_memory", "suits_tma", "vector_of"]

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}


def descriptor_memory(device: Device, used: bool) -> contextlib.AbstractContextManager:
    """Memory for tensor descriptors if the launch builds them; otherwise an empty context."""
    return scratch_memory(device) if used else contextlib.nullcontext()


def suits_tma(config: GemmConfig, vector: int) -> bool:
    """True if TMA can load operands: the configuration asks for it, Triton has it, and rows are aligned to 16 bytes."""
    return config.tma and ALLOCATOR is not None and vector > 1


def vector_of(item: int, *operands: Rows | Array) -> int:
    """Elements per 16-byte access if all operands are aligned for it, otherwise 1."""
    numbers = []
    for each in operands:
        if isinstance(each, Rows):
            numbers += [each.address(item), each.stride * item, each.width * item]
        else:
            numbers += [address(each), each.shape[-1] * item]
    return vector_elements(item, *numbers)
