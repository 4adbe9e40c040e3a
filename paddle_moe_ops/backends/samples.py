# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Samples of matrices, to find writes without a host synchronisation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import paddle
from paddle import Tensor

from . import compiled

__all__ = ["DeviceSamples"]

_NUM_SAMPLES = 1 << 14


class DeviceSamples:
    """Up to 16384 elements of each of some matrices, which their device compares with later values.

    If one differs, the scales of the matrices' codes become NaN, and with them all results of these codes.
    """

    def __init__(self, like: Tensor) -> None:
        """Allocate a word in host memory that the device of ``like`` writes to."""
        (self._word,) = compiled.direct("host_words", like, 1)
        self._changed = (ctypes.c_int32 * 1).from_address(self._word.data_ptr())
        self._taken: list[Tensor] = []

    def have_changed(self) -> bool:
        """True if a comparison that the device has finished found another value."""
        return self._changed[0] != 0

    def take(self, *matrices: Tensor) -> None:
        """Copy samples of the matrices."""
        places = _flat_with_steps(matrices)
        self._taken = [
            compiled.direct("take_samples", each, min(each.size, _NUM_SAMPLES), step)[0] for each, step in places
        ]

    def compare(self, matrices: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> None:
        """Compare samples of the matrices; ``scales`` of each matrix become NaN if one of its samples differs."""
        places = zip(_flat_with_steps(matrices), self._taken, scales, strict=True)
        for (each, step), taken, of_codes in places:
            compiled.direct("compare_samples", each, step, taken, self._word, of_codes)


def _flat_with_steps(matrices: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, int]]:
    """Contiguous views of the matrices' memory, and the elements from one sample to the next: an odd number."""
    for each in matrices:
        flat = each if each.is_contiguous() else paddle.as_strided(each, [each.size], [1])
        step = max(each.size // _NUM_SAMPLES, 1)
        yield flat, step - (step % 2 == 0)
