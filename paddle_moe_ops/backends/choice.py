# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Which calls run on Triton without being asked to; docs/backends.md has the measurements behind the table."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from paddle import Tensor

from .choice_table import MEASURED

__all__ = ["TRITON", "TRITON_RULE", "Range", "triton_is_faster"]

TRITON_RULE = "in dygraph only, chosen by itself for the calls that docs/backends.md lists"


class Range(NamedTuple):
    """Calls whose first tensor [rows, H] has rows of at most ``row_bytes``, and ``at_least`` bytes in all."""

    row_bytes: int
    at_least: int


# By operator and dtype of the first tensor.
TRITON = {call: Range(*sizes) for call, sizes in MEASURED.items()}


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def triton_is_faster(operator: str, like: Tensor) -> bool:
    """Whether the measurements say so for a call whose first tensor is ``like``."""
    found = TRITON.get((operator, _name(like.dtype))) if TRITON else None
    if found is None:
        return False
    row_bytes = like.shape[1] * like.element_size()
    return row_bytes <= found.row_bytes and like.shape[0] * row_bytes >= found.at_least
