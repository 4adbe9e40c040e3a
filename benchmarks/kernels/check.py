# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing outputs with the oracle's, in the memory that holds them and at any size.

An operator says how each of its outputs is compared, in the terms of a `Check`. Outputs that it does not mention are
maps, which are compared with the oracle's. Rows that are copied are compared with a gather by the oracle's map.
Numbers whose order of additions is free are compared with float64 within `testing.tolerances`. `tensor_check` and
`cpu_check` say how arrays of their library are handled, and where the expected sums and scaled rows come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.testing.tolerances import Tolerance

from .device import BITS
from .inputs import Inputs, pieces

__all__ = ["Check", "Compare"]


class Check(ABC):
    """Comparisons of arrays of one library. Each returns the first difference as a text, or None.

    Attributes:
        inputs: Inputs of the operator.
        exactness: Comparison of sums: `device.BITS`, FLOAT32_SUMS or BFLOAT16_SUMS.
    """

    chunk_elements: int  # that are compared at a time

    def __init__(self, inputs: Inputs, exactness: str = BITS) -> None:
        self.inputs = inputs
        self.exactness = exactness

    @abstractmethod
    def bits(self, array: Any) -> Any:
        """A contiguous array as integers of the same size."""

    @abstractmethod
    def places(self, index: Any) -> Any:
        """An int32 index that rows can be taken by, with 0 instead of -1."""

    @abstractmethod
    def wide(self, array: Any) -> Any:
        """An array as float64."""

    @abstractmethod
    def nonzero(self, mask: Any) -> Any:
        """The indices at which a mask is true, one in each row."""

    @abstractmethod
    def sums(self, tokens: slice, weighted: bool) -> tuple[Any, Any]:
        """The sums of some tokens' rows by the oracle's rule, and the sums of the absolute values of their terms."""

    @abstractmethod
    def scaled(self, rows: slice) -> Any:
        """Some rows of the gradient of a weighted sum: d_out[t] times the row's weight; zeros without a token."""

    def unlike_sampled_sums(self, actual: Any, weighted: bool) -> str | None:
        """Compare some sums with the oracle itself, since `sums` only repeats its arithmetic."""
        return None

    def unlike_sampled_rows(self, actual: Any) -> str | None:
        """The same for `scaled`."""
        return None

    def chunks(self, count: int, width: int) -> list[slice]:
        return pieces(count, width, self.chunk_elements)

    def unlike(self, name: str, actual: Any, dtype: Any, shape: tuple[int, ...]) -> str | None:
        """Compare the type and the shape."""
        if (actual.dtype, tuple(actual.shape)) == (dtype, tuple(shape)):
            return None
        return f"{name}: {actual.dtype} {list(actual.shape)} instead of {dtype} {list(shape)}"

    def unequal(self, name: str, actual: Any, expected: Any, offset: int = 0) -> str | None:
        """Compare bits; ``offset`` is the place of the first row in the whole array."""
        wrong = self.unlike(name, actual, expected.dtype, expected.shape)
        if wrong:
            return wrong
        differs = self.bits(actual) != self.bits(expected)
        if not differs.any():
            return None
        place = self.nonzero(differs)[0].tolist()
        got, due = (value[tuple(place)].item() for value in (actual, expected))
        if place:
            place[0] += offset
        return f"{name}: {got!r} instead of {due!r} at {place}, one of {int(differs.sum())} that differ"

    def unlike_array(self, name: str, actual: Any, expected: NDArray) -> str | None:
        """Compare with an array of the oracle."""
        return self.unequal(name, actual, self.inputs.from_numpy(expected))

    def too_far(
        self, name: str, actual: Any, expected: Any, magnitude: Any, tolerance: Tolerance, offset: int = 0
    ) -> str | None:
        """Compare within a tolerance, which NaN never is."""
        got, due = self.wide(actual), self.wide(expected)
        allowed = tolerance.of_result * abs(due) + tolerance.of_magnitude * self.wide(magnitude) + tolerance.absolute
        excess = abs(got - due) / allowed
        if 0 in excess.shape or excess.max() <= 1:  # NaN is not
            return None
        place = tuple(map(int, np.unravel_index(int(excess.argmax()), tuple(excess.shape))))
        text = f"{got[place].item()!r} instead of {due[place].item()!r}"
        where = [place[0] + offset, *place[1:]]
        return f"{name}: {text} at {where}, {excess[place].item():.3g} times the allowed error"

    def gathered(self, name: str, actual: Any, source: Any, index: Any = None, padding: bool = True) -> str | None:
        """Compare with rows of ``source`` by ``index``, or by the oracle's map from rows to tokens.

        Rows without a token are compared with zeros, or not at all if ``padding`` is false.
        """
        index = self.inputs.row_to_token if index is None else index
        wrong = self.unlike(name, actual, source.dtype, (len(index), source.shape[1]))
        if wrong:
            return wrong
        source_bits = self.bits(source)
        for rows in self.chunks(*actual.shape):
            got, empty = actual[rows], index[rows] < 0
            expected = source_bits[self.places(index[rows])]
            expected[empty] = 0 if padding else self.bits(got)[empty]
            found = self.unequal(name, got, expected.view(source.dtype), rows.start)
            if found:
                return found
        return None


# Compares one output of an operation, which has this name.
Compare = Callable[[Check, Any, str, Any], "str | None"]
