# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How the grouped product is cut, by GPU and sizes; `benchmarks/sweeps/grouped_gemm.py` measures the choices.

There is no tuning while a program runs: a call takes the same kernel in every run.
"""

from __future__ import annotations

from typing import NamedTuple

from ..launch.allocator import ALLOCATOR
from ..launch.device import blocks, next_power_of_2
from .types import Gpu

__all__ = ["GemmConfig", "gated_config", "product_config", "weight_gradient_config"]

_LARGE = (9, 10)  # compute capabilities of 228 KB of shared memory a multiprocessor: 12.x has 100 again, as 8.6 and 8.9


class GemmConfig(NamedTuple):
    """One way to cut a product.

    Attributes:
        rows: rows of a tile of the result.
        columns: columns of a tile of the result.
        depth: of the contraction, how much is multiplied at once.
        band: tiles of rows that share their columns in the L2.
        stages: blocks of operands on their way at a time.
        warps: of a program.
        programs: on each multiprocessor; 0: a program for every tile that there may be.
        tma: whether operands come through tensor descriptors where that is possible.
        flat_depth: the longest contraction whose tiles load ahead of one another: for more of them their number counts
            less than the registers which that takes.
    """

    rows: int
    columns: int
    depth: int
    band: int
    stages: int
    warps: int
    programs: int
    tma: bool
    flat_depth: int = 0

    def grid(self, gpu: Gpu, tiles: int) -> int:
        """Programs of a launch for at most so many tiles."""
        return min(tiles, self.programs * gpu.multiprocessors) if self.programs else tiles

    def fitting(self, rows: int, columns: int) -> GemmConfig:
        """With tiles no larger than a result of this size needs; 16 is the least that tensor cores take."""
        least = [max(16, next_power_of_2(size)) for size in (rows, columns)]
        return self._replace(rows=min(self.rows, least[0]), columns=min(self.columns, least[1]))


def _is_small(gpu: Gpu) -> bool:
    return gpu.capability // 10 not in _LARGE


_FLAT_DEPTH = 1536

# On GPUs before Hopper, and after it where blocks for descriptors do not fit.
_SMALL = GemmConfig(128, 128, 32, 8, 4, 4, 2, False)


def product_config(gpu: Gpu, num_rows: int, num_experts: int, inner: int, outer: int) -> GemmConfig:
    """Of a product with M rows, D terms a sum and N columns, on average M / E rows a group."""
    mean = blocks(num_rows, num_experts)
    if _is_small(gpu):
        return _SMALL.fitting(mean, outer)
    tma = ALLOCATOR is not None
    if mean <= 64:
        return GemmConfig(64, 128, 64, 8, 4, 4, 2, tma).fitting(mean, outer)
    stages = 4 if inner <= 256 else 3
    return GemmConfig(128, 256, 64, 8, stages, 8, 1, tma, _FLAT_DEPTH).fitting(mean, outer)


def gated_config(gpu: Gpu, num_rows: int, num_experts: int, outer: int) -> GemmConfig:
    """Of a product whose programs hold two tiles, of gates and of what they gate, N columns each."""
    mean = blocks(num_rows, num_experts)
    if _is_small(gpu):
        return _SMALL._replace(columns=64).fitting(mean, outer)
    tma = ALLOCATOR is not None
    if mean <= 64:
        return GemmConfig(64, 64, 64, 8, 4, 4, 2, tma).fitting(mean, outer)
    return GemmConfig(128, 128, 64, 8, 4, 8, 1, tma).fitting(mean, outer)


def weight_gradient_config(gpu: Gpu, rows: int, columns: int) -> GemmConfig:
    """Of gradients of this size."""
    if _is_small(gpu):
        return _SMALL.fitting(rows, columns)
    return GemmConfig(128, 256, 64, 8, 3, 8, 1, ALLOCATOR is not None).fitting(rows, columns)
