# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The arrays of the interpreted kernels notice a write beyond either end."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from .interpreter import NumpyArray, NumpyDevice

# Memory of the host.
pytestmark = pytest.mark.cpu_only


class Kernel:
    """Stands for a kernel that writes one byte at a distance from its array."""

    def __init__(self, distance: int) -> None:
        def wrong_kernel() -> None: ...

        self.fn, self.distance = wrong_kernel, distance

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda pointer: ctypes.memset(pointer.data_ptr() + self.distance, 7, 1)


def launched(distance: int, *, given: bool) -> NumpyArray:
    device = NumpyDevice()
    array = device.array(np.zeros(3, np.int32), offset=4) if given else device.empty([3], "int32")
    device.launch(Kernel(distance), 1, ("*int32",), [array.data_ptr()], (), 1)
    return array


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("distance", [-256, -1, 12, 200])
def test_a_write_outside_of_an_array_raises(distance, given):
    with pytest.raises(ValueError, match="wrong_kernel: written outside of an array of 12 bytes"):
        launched(distance, given=given)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("distance", [0, 11])
def test_a_write_inside_of_an_array_is_taken(distance, given):
    assert launched(distance, given=given).values.view(np.uint8)[distance] == 7
