# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of this processor that the row kernels are written for."""

from __future__ import annotations

import platform
from pathlib import Path


def available() -> list[str]:
    """The ISAs of this processor among "generic", "avx2" and "avx512", from /proc/cpuinfo."""
    isas = ["generic"]
    if platform.machine() != "x86_64":
        return isas
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if {"avx2", "fma", "f16c"} <= flags:
        isas.append("avx2")
        if {"avx512f", "avx512bw", "avx512vl"} <= flags:
            isas.append("avx512")
    return isas
