# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""oneDNN's abilities on this CPU. In CPU graphs Paddle has no other kernels for its own bfloat16 operators."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

__all__ = ["BFLOAT16_IN_GRAPHS", "takes_bfloat16"]


@functools.cache
def takes_bfloat16() -> bool:
    """Return whether the CPU has AVX-512, which oneDNN needs for bfloat16."""
    return "avx512bw" in Path("/proc/cpuinfo").read_text("utf-8").split()


BFLOAT16_IN_GRAPHS = pytest.mark.skipif(
    not takes_bfloat16(), reason="Paddle's own bfloat16 products in CPU graphs need AVX-512"
)
