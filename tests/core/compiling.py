# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles small C++ helpers of tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.bare_package import ROOT

CSRC = ROOT / "paddle_moe_ops" / "csrc"


def row_kernel_objects() -> list[str]:
    """The row kernels of every instruction set, as `make core` compiled them."""
    objects = sorted(str(path) for path in (ROOT / "build" / "core" / "cpu").glob("row_kernels_*.o"))
    assert objects, "`make core` builds what is compared here"
    return objects


def compile_cpp(target: Path, code: str, *arguments: str) -> Path:
    """Compiles C++ to `target`; a failure shows the compiler's words."""
    source = target.with_suffix(".cc")
    source.write_text(code, encoding="utf-8")
    command = [os.environ.get("CXX", "g++"), "-std=c++17", str(source), *arguments, "-o", str(target)]
    run_clean(command)
    return target


def run_clean(command: list[str]) -> str:
    """Runs a command without a preloaded sanitizer, which is meant for the tests alone, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"
    return done.stdout
