# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows and operands of the grouped GEMMs, and the comparison of a kernel with its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..reference.cases import assert_same_bits
from .binding import Core
from .gemms_in_numpy import ORACLES
from .guards import MakeOutput, guarded_outputs
from .layer_problems import without_sign_of_zero
from .operators.grouped_gemm import SWAP_AB, ExpertRows
from .operators.grouped_rows import Tables, grouped_tables
from .structs import Params

__all__ = [
    "EXPERTS_AT_LIMITS",
    "ROWS",
    "GemmCase",
    "Make",
    "assert_like_oracle",
    "assert_near_oracle",
    "integers",
    "rows_of_many",
    "tables_of",
    "tokens_of",
]

Make = Callable[[MakeOutput], Params]


class GemmCase(NamedTuple):
    """Rows of experts, K and columns of the result."""

    rows: ExpertRows
    inner: int = 136
    width: int = 200


ROWS = {
    "several tiles of an expert": GemmCase(ExpertRows([170, 1, 0, 161, 320])),
    "a few rows": GemmCase(ExpertRows([3, 0, 1, 7]), 24, 8),
    "whole tiles": GemmCase(ExpertRows([160, 128, 640]), 128, 256),
    "wide results": GemmCase(ExpertRows([41, 129]), 72, 384),
    "gaps between experts, and rows after them": GemmCase(ExpertRows([7, 0, 60, 31], [0, 16, 32, 112], 200)),
    "rows of no expert only": GemmCase(ExpertRows([0, 0], num_rows=40), 24, 16),
    "no rows": GemmCase(ExpertRows([0, 0, 0]), 24, 16),
    "more tiles than CTAs": GemmCase(ExpertRows([(7 * expert) % 150 for expert in range(700)]), 24, 40),
}


# On both sides of the limits of kernels: a warp's or a CTA's threads, the tables in shared memory, the maximum.
EXPERTS_AT_LIMITS = (255, 256, 257, 1023, 1024, 1025, 1026, 1027, 2047, 2048, 2049, 65535, 65536)


def rows_of_many(experts: int) -> ExpertRows:
    """A few rows of many experts, up to the last one."""
    sizes = [(11 * expert) % 29 if expert % 50 < 3 or experts < 1100 else 0 for expert in range(experts)]
    return ExpertRows([*sizes[:-1], 5])


def tables_of(
    core: Core, rows: ExpertRows, tile_rows: int = SWAP_AB, num_chunks: int = 0, chunk_rows: int = 0
) -> Tables:
    sizes, starts = (np.array(each, np.int32) for each in (rows.sizes, rows.starts))
    return grouped_tables(core, sizes, starts, rows.total, [tile_rows], num_chunks, chunk_rows)[0]


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike, share: float = 1.0) -> NDArray:
    """Integers of two bits, whose sums are exact; ``share`` of them are drawn, the others are zeros."""
    return (rng.integers(-2, 3, shape) * (rng.random(shape) < share)).astype(dtype)


def tokens_of(rng: np.random.Generator, num_rows: int, num_tokens: int) -> NDArray:
    """The token of each row; some rows have none, by a negative number or one that is too large."""
    tokens = rng.integers(-1, num_tokens + 1, num_rows).astype(np.int32)
    tokens[::7] = 1 << 30
    return tokens


def assert_like_oracle(core: Core, operator: str, make: Make, launches: int = 1) -> dict[str, NDArray]:
    """Run an operator and its oracle on poisoned results of their own: all bits are equal, those of poison included.

    Signs of zeros may differ in sums. Counters are zeros after the launch.

    Args:
        core: the core.
        operator: name of the operator.
        make: returns params; their results are made by its argument.
        launches: number of launches, each compared with the oracle.

    Returns:
        the arrays of the last launch.
    """
    oracle: Callable[[Any], None] = ORACLES[operator][0]
    with guarded_outputs() as output:
        due = make(output)
        oracle(due)
        for _ in range(launches):
            params = make(output)
            core.run(operator, params)
            for name, array in params.arrays.items():
                assert_same_bits(without_sign_of_zero(array), without_sign_of_zero(due.arrays[name]))
            if "counters" in params.arrays:
                assert not params.arrays["counters"].any()
    return params.arrays


def assert_near_oracle(core: Core, operator: str, make: Make, error: float) -> None:
    """Run an operator and its oracle: results of a 16-bit or 32-bit float differ by at most ``error`` of the norm."""
    oracle: Callable[[Any], None] = ORACLES[operator][0]
    with guarded_outputs() as output:
        params, due = make(output), make(output)
        oracle(due)
        core.run(operator, params)
    for name in {"out", "hidden", "d_weights"} & params.arrays.keys():
        got, expected = (each.arrays[name].astype(np.float64) for each in (params, due))
        assert np.linalg.norm(got - expected) <= error * np.linalg.norm(expected), name
