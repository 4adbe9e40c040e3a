# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the groups of rows of a grouped GEMM, on numbers in host memory."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, NoReturn

from paddle import Tensor

__all__ = ["check_plan_groups", "host_segments"]


class Names(NamedTuple):
    """The names that an error text uses for groups of rows."""

    function: str
    sizes: str
    offsets: str
    rows: str


_OF_GEMM = Names("grouped_gemm", "m_sizes", "expert_offsets", "X")
_OF_MLP = Names("moe_mlp", "plan.tokens_per_expert", "plan.expert_offsets", "the plan")


def check_plan_groups(plan: Any) -> None:
    """Check the groups of rows of a plan for `moe_mlp`."""
    host_segments(plan.num_rows, plan.tokens_per_expert, plan.expert_offsets, _OF_MLP)


def host_segments(
    num_rows: int, m_sizes: list[int] | Tensor, expert_offsets: list[int] | Tensor | None, names: Names = _OF_GEMM
) -> list[int]:
    """Split the rows of a grouped GEMM: numbers of rows of no group, group 0, no group, group 1, ... no group.

    Raises:
        ValueError: a negative number; groups that overlap or end after row ``num_rows``.
    """
    sizes = _host_numbers(names.function, names.sizes, m_sizes)
    if expert_offsets is None:
        offsets = list(itertools.accumulate(sizes, initial=0))
        if offsets[-1] > num_rows:
            expected = f"sizes that add up to at most {num_rows}, the rows of {names.rows}"
            _refuse(names.function, names.sizes, expected, f"{sizes}, which add up to {offsets[-1]}")
    else:
        offsets = _host_numbers(names.function, names.offsets, expert_offsets)
        if offsets[-1] > num_rows:
            expected = f"at most {num_rows}, the rows of {names.rows}"
            _refuse(names.function, f"{names.offsets}[{len(sizes)}]", expected, offsets[-1])
    segments, end = [], 0
    for expert, (first, size, next_first) in enumerate(zip(offsets[:-1], sizes, offsets[1:], strict=True)):
        segments += [first - end, size]
        end = first + size
        if end > next_first:
            expected = f"at least {end}, the end of group {expert}"
            _refuse(names.function, f"{names.offsets}[{expert + 1}]", expected, next_first)
    return [*segments, num_rows - end]


def _host_numbers(function: str, argument: str, numbers: list[int] | Tensor) -> list[int]:
    """Return the numbers as a list, and check those of a tensor; lists have been checked."""
    if isinstance(numbers, list):
        return numbers
    found = numbers.tolist()
    for i, number in enumerate(found):
        if not 0 <= number < 2**31:
            _refuse(function, f"{argument}[{i}]", f"from 0 to {2**31 - 1}", number)
    return found


def _refuse(function: str, argument: str, expected: str, given: object) -> NoReturn:
    raise ValueError(f"{function}: {argument} must be {expected}, but got {given}")
