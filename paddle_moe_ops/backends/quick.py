# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the compiled library checks by itself and runs at once, or declines.

The checks of the public functions and the choice of a backend take several times as long as the operator on a few
tokens. A call that asks for nothing out of the ordinary goes here first: the functions return their output, or None
wherever those checks might have something to say: an argument that is no dense tensor, a gradient that is wanted,
PADDLE_MOE_OPS_BACKEND, shapes that do not fit. They are not told of `use_backend`; the caller asks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paddle import Tensor

NAMES = ("permute", "unpermute", "unpermute_weighted")


def _declines(*_: Any) -> Tensor | None:
    return None


# (x, slot_to_row, token_rows, row_to_token) -> rows; padding rows are zeros
permute = _declines
# (rows, token_rows, row_to_token) -> sums
unpermute = _declines
# (rows, probs, token_rows, row_to_token, row_to_slot) -> sums
unpermute_weighted = _declines


def connect(library: ModuleType) -> None:
    """Put the functions of the compiled library here."""
    for name in NAMES:
        globals()[name] = getattr(library, f"quick_{name}")
