# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The environment report of ``python -m paddle_moe_ops env``: what is installed, what runs, what is missing.

No part depends on another, so the report works without Paddle or any other package.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from paddle_moe_ops import _build_check, _env
from paddle_moe_ops._version import __version__

MEMORY_OF_MACHINE = Path("/proc/meminfo")
# Distribution names; Paddle has one per kind of build.
DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "ml_dtypes", "triton", "torch")


def available_memory() -> int:
    """Bytes of free memory of this machine."""
    lines = MEMORY_OF_MACHINE.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def num_threads() -> int:
    """Return the number of threads of the CPU operators: the requested one, or the limit of cores and quotas."""
    return ctypes.CDLL(str(_build_check.library())).pmo_num_threads()


def used_cpu_isa() -> str:
    """Return the instruction set of the CPU operators, one of `_env.CPU_ISAS`."""
    return _env.CPU_ISAS[ctypes.CDLL(str(_build_check.library())).pmo_used_cpu_isa()]


def collect() -> dict[str, Any]:
    """The report as JSON-compatible data; None for missing parts."""
    values = _env.values()
    return {
        "paddle_moe_ops": {"version": __version__, "location": str(Path(__file__).parent)},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "packages": {name: _installed_version(name) for name in DISTRIBUTIONS},
        "paddle": {**_paddle(), "problem": _build_check.paddle_problem()},
        "compiled_library": _compiled_library(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "variables": [{**variable._asdict(), "value": values[variable.name]} for variable in _env.VARIABLES],
    }


def as_text(report: dict[str, Any]) -> str:
    """The report for people, one fact per line."""
    package, python, cpu = report["paddle_moe_ops"], report["python"], report["cpu"]
    paddle, library = report["paddle"], report["compiled_library"]
    lines = [
        ("paddle_moe_ops", f"{package['version']} in {package['location']}"),
        ("python", f"{python['version']} on {python['platform']}"),
    ]
    lines += [(name, version or "not installed") for name, version in report["packages"].items()]
    if paddle["error"]:
        lines.append(("running Paddle", f"none: {paddle['error']}"))
    else:
        kind = f"CUDA {paddle['cuda']}" if paddle["cuda"] else "CPU build"
        lines.append(("running Paddle", f"{paddle['version']}, commit {paddle['commit'][:10]}, {kind}"))
    where = f"loads, in {library['location']}"
    lines.append(("compiled library", where if library["loads"] else f"does not load: {library['reason']}"))
    if library["loads"]:
        lines += [("  instruction set", library["cpu_isa"]), ("  threads", library["threads"])]
    build = library["build"]
    if build:
        lines += [
            ("  commit", build.get("commit") or "unknown: it was not built in a checkout"),
            ("  built for", f"Paddle {build['paddle_version']}, commit {build['paddle_commit'][:10]}"),
            ("  compiler", f"{build['compiler']}, {' '.join(build['cxx_flags'])}"),
            ("  CUDA", f"{'on' if build['cuda'] else 'off'}: {build['cuda_reason']}"),
        ]
    lines.append(("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['usable_cores']} usable here"))
    lines += [("GPU", gpu) for gpu in report["gpus"] or ["none (nvidia-smi lists none)"]]
    width = max(len(variable["name"]) for variable in report["variables"])
    text = [paddle["problem"], ""] if paddle["problem"] else []
    text += [f"{name:<{width}}  {value}" for name, value in lines]
    text += ["", "environment variables"]
    for variable in report["variables"]:
        value = "not set" if variable["value"] is None else repr(variable["value"])
        text += [f"{variable['name']:<{width}}  {value}", f"{'':<{width}}  {variable['help']}"]
    return "\n".join(text)


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _paddle() -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns about tools that only its builds need
            import paddle
    except (ImportError, OSError) as error:
        return {"version": None, "commit": None, "cuda": None, "error": str(error)}
    return {
        "version": paddle.version.full_version,
        "commit": paddle.version.commit,
        "cuda": paddle.version.cuda() if paddle.is_compiled_with_cuda() else None,
        "error": None,
    }


def _compiled_library() -> dict[str, Any]:
    reason, isa, threads = _build_check.paddle_problem(), None, None
    if reason is None:
        from paddle_moe_ops.backends import compiled

        reason = compiled.backend.unavailable()
        if reason is None:
            isa, threads = used_cpu_isa(), num_threads()
    return {
        "loads": reason is None,
        "reason": reason,
        "location": str(_build_check.library().parent),
        "cpu_isa": isa,
        "threads": threads,
        "build": _build_check.build_info(),
    }


def _cpu() -> dict[str, Any]:
    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {"model": cpu_model(), "cores": cores, "usable_cores": usable}


def cpu_model() -> str:
    """The processor's name as the system reports it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Name, driver and memory of each NVIDIA GPU; empty if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.strip().splitlines()
