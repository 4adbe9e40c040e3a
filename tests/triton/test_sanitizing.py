# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Under AddressSanitizer, an interpreted kernel that reads or writes outside of an allocation raises."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from .interpreter import NumpyDevice
from .sanitizing import IS_PRELOADED

pytestmark = pytest.mark.cpu_only


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(target + columns, tl.load(source + columns, mask=columns < count), mask=columns < count)


def copied(source: np.ndarray, target: np.ndarray, count: int) -> None:
    arguments = [source.ctypes.data, target.ctypes.data, count]
    NumpyDevice().launch(copy_kernel, 1, ("*fp32", "*fp32", "i32"), arguments, (2048,), 4)


def test_accesses_inside_of_allocations_do_not_raise():
    source, target = np.arange(2045, dtype=np.float32), np.zeros(2045, np.float32)
    copied(source, target, 2045)
    assert (source == target).all()


if IS_PRELOADED:

    @pytest.mark.parametrize(("sizes", "access"), [((2044, 2045), "load"), ((2045, 2044), "store")])
    def test_an_access_outside_raises(sizes, access):
        with pytest.raises(InterpreterError, match=f"copy_kernel: {access} of 4 bytes at 0x[0-9a-f]+, shadow byte 0x"):
            copied(*(np.zeros(size, np.float32) for size in sizes), 2045)
