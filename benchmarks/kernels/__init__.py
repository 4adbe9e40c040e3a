# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.kernels``: how fast the operators are, beside others and beside what memory allows.

`shapes` says what is measured, `problem` routes it with the oracle, `run` checks and times, `model` knows the bytes
that must move, `results` keeps JSON lines, `targets` and `report` read them. `device` is what a device must offer;
`cuda` is the one for NVIDIA GPUs.
"""

from __future__ import annotations

from .cli import main

__all__ = ["main"]
