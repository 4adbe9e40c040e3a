# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Does the compiled library fit the Paddle that runs? setup.py records what it was built with, this compares.

Paddle promises nothing about its C++ interface from one minor version to the next, and a library loaded into
another version may crash instead of failing, so the comparison comes before the library is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BUILD_INFO = Path(__file__).with_name("_build_info.json")
REBUILD = (
    "install paddle_moe_ops again in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."
)


def build_info() -> dict[str, Any] | None:
    """What setup.py recorded about the compiled library, or None when the package was not built."""
    try:
        return json.loads(BUILD_INFO.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def mismatch() -> str | None:
    """Why the compiled library must not be loaded into the Paddle of this process, and what to do, or None.

    Raises:
        ImportError: Paddle cannot be imported.
    """
    import paddle

    return compare(
        build_info(), paddle.version.full_version, paddle.version.commit, bool(paddle.is_compiled_with_cuda())
    )


def compare(info: dict[str, Any] | None, version: str, commit: str, with_cuda: bool) -> str | None:
    """The rule behind `mismatch`.

    Args:
        info: what `build_info` returned.
        version: full version of the running Paddle, such as ``3.3.1``.
        commit: its commit.
        with_cuda: whether it is compiled with CUDA.

    Returns:
        None when the library fits, else the reason and what to do.
    """
    if info is None:
        return f"the package was not built: {BUILD_INFO.name} is missing; {REBUILD}"
    built_version, built_commit = info["paddle_version"], info["paddle_commit"]
    if _minor(built_version) != _minor(version):
        return f"it was built for Paddle {built_version}, but Paddle {version} is running; {REBUILD}"
    # Releases of one minor version share an interface. Builds that share a number but not the commit are
    # development builds, which share nothing.
    if built_version == version and built_commit != commit:
        return (
            f"it was built for Paddle {built_version} of commit {built_commit[:10]}, "
            f"but commit {commit[:10]} is running; {REBUILD}"
        )
    if info["cuda"] and not with_cuda:
        return f"it was built with CUDA, but this Paddle ({version}) is a CPU build; {REBUILD}"
    return None


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
