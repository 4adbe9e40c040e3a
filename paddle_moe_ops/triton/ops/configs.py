# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and warps of the row-movement kernels, from a sweep on an H200 (`benchmarks/sweeps/triton_configs.py`).

Nothing is autotuned at run time: a call launches the same kernel on every machine and in every run.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Config", "backward_config", "permute_config", "rows_per_round", "unpermute_config"]

_MAX_ROWS_PER_ROUND = 8


class Config(NamedTuple):
    """A launch configuration.

    Attributes:
        block_bytes: bytes of a row that one program processes.
        warps: warps of a program.
    """

    block_bytes: int
    warps: int


_PROGRAMS_TO_FILL_GPU = 1024


def rows_per_round(row_slots: int, num_rows: int, num_tokens: int) -> int:
    """Rows of a token that a program loads or stores per round: about the mean number per token, at most eight.

    A larger round would issue instructions for absent rows, and instruction issue limits sparse routings.
    """
    mean = -(-num_rows // max(num_tokens, 1))
    return min(row_slots, _MAX_ROWS_PER_ROUND, 1 << max(mean - 1, 0).bit_length())


def permute_config(row_bytes: int, num_tokens: int) -> Config:
    """Configuration of `permute` for rows of ``row_bytes`` bytes."""
    if num_tokens * -(-row_bytes // 4096) < _PROGRAMS_TO_FILL_GPU:
        return Config(2048, 2)
    return Config(4096, 4 if row_bytes > 4096 else 2)


def unpermute_config(row_bytes: int, num_tokens: int) -> Config:
    """Configuration of `unpermute`."""
    if num_tokens * -(-row_bytes // 2048) < _PROGRAMS_TO_FILL_GPU // 2:
        return Config(2048, 4)
    return Config(1024, 2)


def backward_config() -> Config:
    """Configuration of `unpermute_backward`; one for all sizes, since it fixes the order of a dot product."""
    return Config(2048, 2)
