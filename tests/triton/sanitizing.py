# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks each address of an interpreted kernel against AddressSanitizer's shadow memory.

Triton's interpreter loads and stores in a library that is not instrumented. Shadow memory has a byte for 8 bytes of
memory: 0 if all 8 are allocated, 1 to 7 if only the first ones are, negative if none is. `make asan-triton` preloads
AddressSanitizer. Otherwise nothing is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IS_PRELOADED", "check_addresses", "checked_accesses"]

IS_PRELOADED = hasattr(ctypes.CDLL(None), "__asan_address_is_poisoned")
_SHADOW_OFFSET, _SHADOW_SHIFT = 0x7FFF8000, 3  # on x86-64 Linux


def check_addresses(what: str, addresses: NDArray[np.uint64], mask: NDArray[np.bool_], size: int) -> None:
    """Raises IndexError if an access touches bytes that are not allocated.

    Args:
        what: the access, named in the error.
        addresses: one for each element.
        mask: true for elements that are accessed.
        size: bytes of an element: 1, 2, 4 or 8.
    """
    chosen = np.unique(addresses[np.broadcast_to(mask, addresses.shape).astype(bool)])
    if not len(chosen):
        return
    if chosen[0] < 1 << 16:
        raise IndexError(f"{what} at {chosen[0]:#x}, a null pointer")
    if (chosen % np.uint64(size)).any():
        raise IndexError(f"{what} of {size} bytes at an address that is not a multiple")
    blocks = chosen >> np.uint64(_SHADOW_SHIFT)
    # One view from the first shadow byte to the last: the host maps only pages that are read.
    view = (ctypes.c_int8 * int(blocks[-1] - blocks[0] + 1)).from_address(_SHADOW_OFFSET + int(blocks[0]))
    shadow = np.ctypeslib.as_array(view)[blocks - blocks[0]].astype(np.int64)
    ends = (chosen & np.uint64(7)).astype(np.int64) + size
    bad = (shadow != 0) & (ends > shadow)
    if bad.any():
        index = int(np.argmax(bad))
        raise IndexError(f"{what} of {size} bytes at {chosen[index]:#x}, shadow byte {shadow[index] & 0xFF:#04x}")


@contextlib.contextmanager
def checked_accesses(kernel: str) -> Iterator[None]:
    """Lets the interpreter check the addresses of loads, stores and atomic operations."""
    if not IS_PRELOADED:
        yield
        return
    from triton.runtime import interpreter

    plain = interpreter._interpreter

    class Checked:
        @staticmethod
        def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
            check_addresses(f"{kernel}: load", addresses, mask, np.dtype(dtype).itemsize)
            return plain.load(addresses, mask, other, dtype)

        @staticmethod
        def store(addresses: Any, values: Any, mask: Any) -> Any:
            check_addresses(f"{kernel}: store", addresses, mask, values.dtype.itemsize)
            return plain.store(addresses, values, mask)

        @staticmethod
        def atomic_rmw(operation: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
            check_addresses(f"{kernel}: atomic", addresses, mask, values.dtype.itemsize)
            return plain.atomic_rmw(operation, addresses, values, mask, order)

        @staticmethod
        def atomic_cas(addresses: Any, expected: Any, values: Any, order: Any) -> Any:
            check_addresses(f"{kernel}: atomic", addresses, np.array(True), values.dtype.itemsize)
            return plain.atomic_cas(addresses, expected, values, order)

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

    interpreter._interpreter = Checked()
    try:
        yield
    finally:
        interpreter._interpreter = plain
