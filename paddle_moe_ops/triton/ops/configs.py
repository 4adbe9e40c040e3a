# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How work is cut into programs. From our own sweep on an H200, which `benchmarks/sweeps/triton_configs.py` repeats.

There is no tuning while a program runs: a call takes the same kernel on every machine and every run.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Config", "backward_config", "permute_config", "rows_at_once", "unpermute_config"]

_MOST_AT_ONCE = 8


class Config(NamedTuple):
    """What one program takes.

    Attributes:
        block_bytes: bytes of a row.
        warps: warps that share them.
    """

    block_bytes: int
    warps: int


_PROGRAMS_TO_FILL = 1024


def rows_at_once(row_slots: int, num_rows: int, num_tokens: int) -> int:
    """Rows of a token that are moved together: about as many as a token has on average, at most eight.

    More would cost instructions for rows that are not there, which is what a sparse routing is limited by.
    """
    mean = -(-num_rows // max(num_tokens, 1))
    return min(row_slots, _MOST_AT_ONCE, 1 << max(mean - 1, 0).bit_length())


def permute_config(row_bytes: int, num_tokens: int) -> Config:
    """Of `permute`, for rows of so many bytes."""
    if num_tokens * -(-row_bytes // 4096) < _PROGRAMS_TO_FILL:
        return Config(2048, 2)
    return Config(4096, 4 if row_bytes > 4096 else 2)


def unpermute_config(row_bytes: int, num_tokens: int) -> Config:
    """Of `unpermute`."""
    if num_tokens * -(-row_bytes // 2048) < _PROGRAMS_TO_FILL // 2:
        return Config(2048, 4)
    return Config(1024, 2)


def backward_config() -> Config:
    """Of `unpermute_backward`: the same for all sizes, since the order of a dot product depends on it."""
    return Config(2048, 2)
