# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a separate process, with chosen modules missing and a chosen environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import paddle_moe_ops

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("OMP_NUM_THREADS",)


def run_python(
    code: str, *, missing: Iterable[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `code`; importing a module named in `missing` raises ImportError, as if it were not installed.

    Variables that the package reads are taken from `env` alone, not from this process.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and not name.startswith("PADDLE_MOE_OPS_")
    }
    block = f"import sys\nfor name in {list(missing)!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        env={**inherited, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


def copy_without_library(folder: Path) -> None:
    """Copies the package into `folder` as it is before it is built; a process started there imports the copy."""
    package = Path(paddle_moe_ops.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("_C*", "_build_info.json"))


def run_module(module: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m`` with a module and these arguments; `options` as in `run_python`."""
    code = f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\nsys.argv[1:] = {list(arguments)!r}\n"
    return run_python(code + f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)", **options)


def run_command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m paddle_moe_ops`` with these arguments; `options` as in `run_python`."""
    code = f"import runpy, sys\nsys.argv[1:] = {list(arguments)!r}\n"
    return run_python(code + "runpy.run_module('paddle_moe_ops', run_name='__main__', alter_sys=True)", **options)
