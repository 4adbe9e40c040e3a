# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.kernels``: speed of the operators, compared with peers and with memory ceilings.

`operators` has a file for each operator. `shapes` says what they are measured on, `problem` routes it with the oracle,
`inputs` holds it, `run` checks and times, `results` keeps JSON lines, `targets` and `report` read them. `device` is the
interface of a device; `cuda` and `cpu` implement it.
"""

from __future__ import annotations

from .cli import main

__all__ = ["main"]
