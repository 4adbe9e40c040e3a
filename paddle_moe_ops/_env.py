# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the package; only csrc/paddle/direct.cc reads one (PADDLE_MOE_OPS_BACKEND) elsewhere.

Every function reads the environment when it is called: a later change applies from the next call.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable: its name and one line of help."""

    name: str
    help: str


BACKEND, VALIDATE = "PADDLE_MOE_OPS_BACKEND", "PADDLE_MOE_OPS_VALIDATE"
environment = os.environ  # for modules that every call enters

VARIABLES = (
    Variable(BACKEND, "the backend of operators: compiled, triton, paddle or reference (default: automatic)"),
    Variable(VALIDATE, "1 checks ids, probabilities and maps, 0 does not (default: on the CPU)"),
    Variable(
        "PADDLE_MOE_OPS_NUM_THREADS",
        "CPU threads (default: OMP_NUM_THREADS, else one per core, within a container's CPU quota)",
    ),
    Variable(
        "PADDLE_MOE_OPS_MAX_CPU_ISA",
        "the best instruction set of the CPU operators: generic, avx2 or auto, all that the CPU has (default: auto)",
    ),
    Variable("PADDLE_MOE_OPS_CUDA", "when building: 1 compiles the CUDA sources, 0 does not (default: automatic)"),
    Variable("PADDLE_MOE_OPS_LOCAL_VERSION", "when building: the end of a wheel's version (default: automatic)"),
    Variable("PADDLE_MOE_OPS_CORE_OBJECTS", "when building: a folder of core objects to link (default: none)"),
)


def backend() -> str | None:
    """The backend named by PADDLE_MOE_OPS_BACKEND, or None; the choice of a backend checks the name."""
    return os.environ.get(BACKEND) or None


def validate_default() -> bool | None:
    """The meaning of ``validate=None``: True or False by PADDLE_MOE_OPS_VALIDATE, None if it is not set.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(VALIDATE)
    if not value:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{VALIDATE} must be 0 or 1, but got {value!r}")
    return value == "1"


def num_threads() -> int | None:
    """The number of CPU threads that the user asked for, or None: the operators then use one per core.

    They use fewer if a container's CPU quota is below all cores (csrc/cpu/quota.h).

    PADDLE_MOE_OPS_NUM_THREADS comes first, then OMP_NUM_THREADS. ``import paddle`` writes OMP_NUM_THREADS=1 if the
    variable was not set or not a plain number; such a 1 does not count. A child process of one that has imported Paddle
    inherits the 1, and it counts in the child.

    Raises:
        ValueError: PADDLE_MOE_OPS_NUM_THREADS is not a positive integer.
    """
    value = os.environ.get("PADDLE_MOE_OPS_NUM_THREADS")
    if value:
        threads = _positive_int(value)
        if threads is None:
            raise ValueError(f"PADDLE_MOE_OPS_NUM_THREADS must be a positive integer, but got {value!r}")
        return threads
    value = os.environ.get("OMP_NUM_THREADS")
    if value == "1":
        value = _omp_num_threads_before_paddle()
    # OpenMP allows one number per nesting level ("4,2"); the first is the outermost.
    return _positive_int(value.split(",")[0]) if value else None


# Instruction sets of the CPU operators, in the order of pmo_cpu_isa in csrc/include/pmo/base.h.
CPU_ISAS = ("generic", "avx2", "avx512")


def max_cpu_isa() -> int:
    """The best instruction set that CPU operators may use by PADDLE_MOE_OPS_MAX_CPU_ISA, as an index of `CPU_ISAS`.

    A processor that lacks it uses the best of those before it.

    Raises:
        ValueError: the variable is none of auto, avx2 and generic.
    """
    value = os.environ.get("PADDLE_MOE_OPS_MAX_CPU_ISA") or "auto"
    if value == "auto":
        return len(CPU_ISAS) - 1
    if value not in ("avx2", "generic"):
        raise ValueError(f"PADDLE_MOE_OPS_MAX_CPU_ISA must be auto, avx2 or generic, but got {value!r}")
    return CPU_ISAS.index(value)


def check_cpu_settings() -> None:
    """Check the variables that are read when the compiled library is loaded.

    Raises:
        ValueError: one of them has a bad value.
    """
    num_threads()
    max_cpu_isa()


def values() -> dict[str, str | None]:
    """The value of every variable of the package, None if it is not set."""
    return {variable.name: os.environ.get(variable.name) for variable in VARIABLES}


def _positive_int(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _omp_num_threads_before_paddle() -> str | None:
    """OMP_NUM_THREADS as the user set it, for a process whose variable reads 1 now."""
    start = _environment_at_start()
    if start is not None:
        return start.get("OMP_NUM_THREADS")
    # Without that record, a 1 in a process that has imported Paddle is more likely Paddle's than the user's.
    return None if "paddle" in sys.modules else "1"


@functools.cache
def _environment_at_start() -> dict[str, str] | None:
    """The environment this process was started with, which cannot change; None if it cannot be read."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    entries = (entry.partition("=") for entry in os.fsdecode(block).split("\0") if entry)
    return {name: value for name, _, value in entries}
