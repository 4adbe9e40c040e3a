# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.kernels``: how fast the operators are, compared with others and with what memory allows.

`operators` has a file for each operator. `shapes` says what they are measured on, `problem` routes it with the oracle,
`inputs` holds it, `run` checks and times, `results` keeps JSON lines, `targets` and `report` read them. `device` is
what a device must offer; `cuda` and `cpu` offer it.
"""

from __future__ import annotations

from .cli import main

__all__ = ["main"]
