# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a separate process, with chosen modules missing and a chosen environment.

A new process needs more than a second for Paddle. So programs may run in forks of one that has imported it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import paddle_moe_ops
from tests.forks import Server

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("OMP_NUM_THREADS",)
TIMEOUT_S = 600


_server = Server("paddle")


def run_python(
    code: str, *, missing: Iterable[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `code`; importing a module named in `missing` raises ImportError, as if it were not installed.

    Variables that the package reads are taken from `env` alone, not from this process.
    """
    block = f"import sys\nfor name in {list(missing)!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        env=_environment(env or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_forked(
    code: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fork of a process that has imported Paddle and nothing else; `env` as in `run_python`.

    With a plug-in, Paddle starts CUDA when it is imported, which no fork can use; then a new process runs it.
    """
    if "CUSTOM_DEVICE_ROOT" in os.environ:
        return run_python(code, env=env, cwd=cwd)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        files = [out.fileno(), errors.fileno()]
        arguments = "import sys\n" + code, str(cwd or Path.cwd())
        process = _server.fork(_environment(env or {}), ("tests.forks", "run_code"), arguments, files)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess("a fork", status, out.read(), errors.read())


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and not name.startswith("PADDLE_MOE_OPS_")
    }
    return {**inherited, **changes}


def copy_without_library(folder: Path) -> None:
    """Copies the package into `folder` as it is before it is built; a process started there imports the copy."""
    package = Path(paddle_moe_ops.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("_C*", "_build_info.json"))


def run_module(module: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m`` with a module and these arguments: in a fork, unless `fresh` or modules are `missing`."""
    code = f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    return _run_module(code, module, arguments, **options)


def run_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m paddle_moe_ops`` with these arguments: in a fork, unless `fresh` or modules are `missing`."""
    return _run_module("import runpy, sys\n", "paddle_moe_ops", arguments, **options)


def _run_module(
    code: str,
    module: str,
    arguments: tuple[str, ...],
    *,
    missing: Iterable[str] = (),
    fresh: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    code += f"sys.argv[1:] = {list(arguments)!r}\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return run_python(code, missing=missing, **options) if fresh or missing else run_forked(code, **options)
