# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operators for any array library; `tensors` and `cpu_arrays` allocate them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.reference.quantization import quantize_1x128

from .problem import Problem

__all__ = ["Inputs", "pieces"]

_ORACLE_ELEMENTS = 1 << 22  # at a time, of each thread


def pieces(count: int, width: int, elements: int) -> list[slice]:
    """Slices of ``count`` rows of ``width`` columns, each with about ``elements`` elements to keep temporaries
    small."""
    step = max(1, elements // max(width, 1))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Inputs(ABC):
    """Inputs of a problem as arrays of one library, made when they are first asked for and the same in every run.

    Arrays of the problem and of the oracle's plan have their names there: ``ids``, ``gating``, ``slot_to_row`` and so
    on. An operator that is given maps therefore does not depend on another one under test.

    Attributes:
        x: bfloat16 [T, H], the tokens.
        x_fp8: float8_e4m3fn [T, H].
        scale: float32 [T, S], one for each 128 columns of x_fp8.
        rows: bfloat16 [M, H], the experts' results.
        d_out: bfloat16 [T, H], the gradient of the summed rows.
    """

    x: Any
    x_fp8: Any
    scale: Any
    rows: Any
    d_out: Any

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._quantized: dict[bool, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        """An array of the problem, which is then kept."""
        if name.startswith("_") or name == "problem":
            raise AttributeError(name)
        array = self.from_numpy(self.problem.array(name))
        setattr(self, name, array)
        return array

    @abstractmethod
    def empty(self, *shape: int, dtype: Any = "int32") -> Any:
        """An output, or a workspace; ``dtype`` is a name, or a type of the library."""

    @abstractmethod
    def from_numpy(self, array: NDArray) -> Any:
        """The same array in this library."""

    @abstractmethod
    def to_numpy(self, array: Any) -> NDArray:
        """An array of this library for the oracle."""

    def quantized(self, ue8m0: bool) -> tuple[Any, Any]:
        """The oracle's codes [T, H] and scales by row of x."""
        if ue8m0 not in self._quantized:
            count, width = self.x.shape
            parts = [self.to_numpy(self.x[tokens]) for tokens in pieces(count, width, _ORACLE_ELEMENTS)]
            with ThreadPoolExecutor() as pool:  # NumPy lets go of the interpreter; one thread would take a minute
                made = list(pool.map(lambda part: quantize_1x128(part, ue8m0=ue8m0), parts))
            codes, scales = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
            self._quantized[ue8m0] = self.from_numpy(codes), self.from_numpy(scales)
        return self._quantized[ue8m0]
