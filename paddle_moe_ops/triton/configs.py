# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How work is cut into programs. From our own sweep on an H200, which `benchmarks/sweeps/triton_configs.py` repeats.

There is no tuning while a program runs: a call takes the same kernel on every machine and every run.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FEW_TOKENS", "Config", "backward_config", "permute_config", "unpermute_config"]


class Config(NamedTuple):
    """What one program takes.

    Attributes:
        block_bytes: Bytes of a row.
        warps: Warps that share them.
        slots: Rows of a token (of the backward pass alone; the others take all of them).
    """

    block_bytes: int
    warps: int
    slots: int = 8


# Up to so many tokens a program of the backward pass takes a single row, so that there are programs enough.
FEW_TOKENS = 512
_PROGRAMS_TO_FILL = 1024


def permute_config(row_bytes: int, num_tokens: int) -> Config:
    """Of `permute`, for rows of so many bytes."""
    if num_tokens * -(-row_bytes // 4096) < _PROGRAMS_TO_FILL:
        return Config(2048, 4)
    return Config(8192, 4) if row_bytes > 4096 else Config(4096, 4)


def unpermute_config(row_bytes: int, num_tokens: int) -> Config:
    """Of `unpermute`."""
    if num_tokens * -(-row_bytes // 2048) < _PROGRAMS_TO_FILL // 2:
        return Config(512, 1)
    return Config(2048, 4)


def backward_config(num_tokens: int) -> Config:
    """Of `unpermute_backward`. Block and warps are the same for all: the order of a dot product hangs on them."""
    return Config(2048, 4, 1 if num_tokens <= FEW_TOKENS else 8)
