# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Which calls run on Triton without being asked to; docs/backends.md has the measurements behind the table."""

from __future__ import annotations

from typing import NamedTuple

from paddle import Tensor

__all__ = ["TRITON_RULE", "triton_is_faster"]

TRITON_RULE = "in dygraph only, chosen by itself for the calls that docs/backends.md lists"


class _Range(NamedTuple):
    """Calls whose first tensor is of a dtype and has so many bytes."""

    dtype: str
    at_least: int
    below: int


# An entry must be faster by more than 5 % in every measured shape of its range, launch overhead in dygraph included.
_TRITON: dict[str, tuple[_Range, ...]] = {}


def triton_is_faster(operator: str, like: Tensor) -> bool:
    """Whether the measurements say so for a call whose first tensor is ``like``."""
    ranges = _TRITON.get(operator, ())
    if not ranges:
        return False
    dtype, size = str(like.dtype).rpartition(".")[2], like.size * like.element_size()
    return any(each.dtype == dtype and each.at_least <= size < each.below for each in ranges)
