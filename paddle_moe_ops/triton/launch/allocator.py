# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Global memory for tensor descriptors that kernels build: Triton calls an allocator at each launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import triton.language as tl

from .device import Device, cdiv

__all__ = ["ALLOCATOR", "scratch_memory"]


def _allocator() -> ContextVar | None:
    """Context variable of Triton's allocator for descriptors; None in versions without descriptors."""
    try:
        from triton.runtime import _allocation
    except ImportError:
        return None
    found = getattr(_allocation, "_allocator", None)
    return found if hasattr(tl, "make_tensor_descriptor") and isinstance(found, ContextVar) else None


ALLOCATOR = _allocator()


@contextlib.contextmanager
def scratch_memory(device: Device) -> Iterator[None]:
    """Allocate memory for the tensor descriptors of launches from ``device``."""
    if ALLOCATOR is None:
        yield
        return
    token = ALLOCATOR.set(lambda size, alignment, stream: device.empty([cdiv(size, 4)], "int32"))
    try:
        yield
    finally:
        ALLOCATOR.reset(token)
