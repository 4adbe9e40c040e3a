# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations of the grouped GEMM and wgrad by GPU and sizes, measured by `benchmarks/sweeps/grouped_gemm.py`.

Nothing is autotuned at run time: a call launches the same kernel in every run.
"""

from __future__ import annotations

from typing import NamedTuple

from ..launch.allocator import ALLOCATOR
from ..launch.device import cdiv, next_power_of_2
from .types import Gpu

__all__ = ["GemmConfig", "gated_config", "gemm_config", "wgrad_config"]

_LARGE = (9, 10)  # compute capabilities with 228 KB of shared memory per SM; 12.x has 100 KB, as 8.6 and 8.9


class GemmConfig(NamedTuple):
    """A configuration of a GEMM kernel.

    Attributes:
        block_m: rows of an output tile.
        block_n: columns of an output tile.
        block_k: K elements per mainloop step.
        group_m: row tiles per group of the swizzled tile order, which share columns of W in L2.
        num_stages: stages of the software pipeline.
        num_warps: warps of a program.
        programs_per_sm: programs per SM of a persistent launch; 0: one program per tile.
        tma: whether TMA loads operands where that is possible.
        max_flat_k: longest K for one flat loop over all tiles of a program, which overlaps a tile's first loads with
            the previous epilogue. With a longer K, epilogues are too rare to pay for the registers of that loop.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_stages: int
    num_warps: int
    programs_per_sm: int
    tma: bool
    max_flat_k: int = 0

    def grid(self, gpu: Gpu, tiles: int) -> int:
        """Programs of a launch for at most ``tiles`` tiles."""
        return min(tiles, self.programs_per_sm * gpu.num_sms) if self.programs_per_sm else tiles

    def fitting(self, rows: int, columns: int) -> GemmConfig:
        """The configuration with tiles no larger than an output of this size needs, at least 16 for tensor cores."""
        limits = [max(16, next_power_of_2(size)) for size in (rows, columns)]
        return self._replace(block_m=min(self.block_m, limits[0]), block_n=min(self.block_n, limits[1]))


def _is_small(gpu: Gpu) -> bool:
    return gpu.capability // 10 not in _LARGE


_MAX_FLAT_K = 1536

# Before Hopper, and on later GPUs whose shared memory is too small for the TMA configurations.
_SMALL = GemmConfig(128, 128, 32, 8, 4, 4, 2, False)


def gemm_config(gpu: Gpu, num_rows: int, num_experts: int, inner: int, outer: int) -> GemmConfig:
    """Configuration of a GEMM with M rows, K = ``inner`` and N = ``outer``, on average M / E rows per group."""
    mean = cdiv(num_rows, num_experts)
    if _is_small(gpu):
        return _SMALL.fitting(mean, outer)
    tma = ALLOCATOR is not None
    if mean <= 64:
        return GemmConfig(64, 128, 64, 8, 4, 4, 2, tma).fitting(mean, outer)
    stages = 4 if inner <= 256 else 3
    return GemmConfig(128, 256, 64, 8, stages, 8, 1, tma, _MAX_FLAT_K).fitting(mean, outer)


def gated_config(gpu: Gpu, num_rows: int, num_experts: int, outer: int) -> GemmConfig:
    """Configuration of a GEMM with SwiGLU epilogue: a program holds two accumulators, gate and up, of N columns."""
    mean = cdiv(num_rows, num_experts)
    if _is_small(gpu):
        return _SMALL._replace(block_n=64).fitting(mean, outer)
    tma = ALLOCATOR is not None
    if mean <= 64:
        return GemmConfig(64, 64, 64, 8, 4, 4, 2, tma).fitting(mean, outer)
    return GemmConfig(128, 128, 64, 8, 4, 8, 1, tma).fitting(mean, outer)


def wgrad_config(gpu: Gpu, rows: int, columns: int) -> GemmConfig:
    """Configuration of wgrad for matrices of this size."""
    if _is_small(gpu):
        return _SMALL.fitting(rows, columns)
    return GemmConfig(128, 256, 64, 8, 3, 8, 1, ALLOCATOR is not None).fitting(rows, columns)
