# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a GPU that heuristics depend on, from the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .types import Gpu

__all__ = ["gpu_at"]

# Arrays in host memory belong to Triton's interpreter: few programs with several tiles each.
_INTERPRETED = Gpu(80, 3)
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...


@functools.cache
def _library() -> Any:
    """The CUDA driver, or None if it is missing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


@functools.cache
def _facts(ordinal: int) -> Gpu:
    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        status = _library().cuDeviceGetAttribute(ctypes.byref(value), number, ordinal)
        if status:
            raise RuntimeError(f"the CUDA driver must answer 0, but its status is {status}")
        return value.value

    return Gpu(10 * attribute(_MAJOR) + attribute(_MINOR), attribute(_MULTIPROCESSORS))


def gpu_at(address: int) -> Gpu:
    """The GPU whose memory contains an address."""
    library, ordinal = _library(), ctypes.c_int(0)
    if library is None or library.cuPointerGetAttribute(
        ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address)
    ):
        return _INTERPRETED
    return _facts(ordinal.value)
