# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Check that the compiled library belongs to this package and fits the running Paddle.

setup.py reads its rules from here and records what it built with; this compares. Paddle promises nothing about its C++
interface from one minor version to the next. A library that is loaded into another version may crash instead of
failing, so the comparison comes first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
LIBRARY_NAME, INFO_NAME = "_C_pd_.so", "_build_info.json"

# The minor versions of Paddle that the tests run on. 3.0 and 3.1 do not compile the bindings.
TESTED_PADDLE = ("3.2", "3.3")
# PyPI's paddlepaddle-gpu is 2.6.
INSTALL_PADDLE = (
    "`pip install --upgrade paddlepaddle`, or for NVIDIA GPUs paddlepaddle-gpu from Paddle's index, as "
    "https://www.paddlepaddle.org.cn/en/install/quick says"
)
INSTALL = "`pip install --no-build-isolation .` in its source folder"
REBUILD = (
    "install paddle_moe_ops again in this environment: "
    "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder"
)


@functools.cache
def paddle_problem() -> str | None:
    """The reason why this package cannot run on this process's Paddle, with the command that helps; or None."""
    needed = f"paddle_moe_ops needs PaddlePaddle {' or '.join(TESTED_PADDLE)}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No ccache found")  # only a build could use it
            import paddle
    except (ImportError, OSError) as error:
        return f"{needed}, which cannot be imported ({error}): {INSTALL_PADDLE}"
    version = paddle.version.full_version
    return f"{needed}, but {version} is installed: {INSTALL_PADDLE}" if is_too_old(version) else None


def is_too_old(version: str) -> bool:
    """True if a version of Paddle is older than those that the tests run on. 0.0.0 is a development build."""
    return (0, 0) < _number(version) < _number(TESTED_PADDLE[0])


def is_untested(version: str) -> bool:
    """True if a version of Paddle is newer than those that the tests run on."""
    return _number(version) == (0, 0) or _number(version) > _number(TESTED_PADDLE[-1])


def library() -> Path:
    """The compiled library, which may be missing.

    It is next to this file. A source folder that Python finds before the installed package has none; then it is the
    installed package's.
    """
    beside = PACKAGE / LIBRARY_NAME
    if not beside.exists():
        for distribution in metadata.distributions(name="paddle-moe-ops"):
            installed = Path(str(distribution.locate_file(f"{PACKAGE.name}/{LIBRARY_NAME}")))
            if installed.exists():
                return installed
    return beside


def sources_digest(csrc: Path) -> str:
    """A hash of the C++ sources, which says whether two libraries were built from the same ones."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}):
        digest.update(f"{path.relative_to(csrc).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_info() -> dict[str, Any] | None:
    """Facts that setup.py recorded about the compiled library, or None if the package was not built."""
    try:
        return json.loads(library().with_name(INFO_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def mismatch() -> str | None:
    """The reason why this process must not load the compiled library, with the remedy; or None.

    Raises:
        ImportError: Paddle cannot be imported.
    """
    import paddle

    info, folder = build_info(), library().parent
    if info is not None and folder != PACKAGE and info.get("sources_sha256") != sources_digest(PACKAGE / "csrc"):
        return f"the source folder {PACKAGE} hides the package in {folder}, which has other C++ sources; {REBUILD}"
    return compare(info, paddle.version.full_version, paddle.version.commit, bool(paddle.is_compiled_with_cuda()))


def loaded_library() -> ctypes.CDLL | None:
    """Return the library for calls of its C functions; None if it is missing, does not fit Paddle or does not load."""
    path = library()
    if not path.exists() or mismatch() is not None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def compare(info: dict[str, Any] | None, version: str, commit: str, with_cuda: bool) -> str | None:
    """The rule that `mismatch` applies to Paddle.

    Args:
        info: what `build_info` returned.
        version: full version of the running Paddle, such as ``3.3.1``.
        commit: its commit.
        with_cuda: whether it is compiled with CUDA.

    Returns:
        None if the library fits. Otherwise the reason, with the remedy.
    """
    if info is None:
        return f"the package was not built: {INFO_NAME} is missing; {REBUILD}"
    built_version, built_commit = info["paddle_version"], info["paddle_commit"]
    if _number(built_version) != _number(version):
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


def gpu_problem(info: dict[str, Any], capability: tuple[int, int]) -> str | None:
    """Why a library has no kernels for GPUs of a compute capability, or None.

    Args:
        info: what `build_info` returned.
        capability: major and minor number.
    """
    if not info["cuda"]:
        return f"the library was built without GPU kernels ({info['cuda_reason']}); {REBUILD}"
    major, minor = capability
    flags = " ".join(info.get("nvcc_flags", ()))
    kernels = [divmod(int(number), 10) for number in re.findall(r"code=sm_(\d+)", flags)]
    portable = [divmod(int(number), 10) for number in re.findall(r"code=compute_(\d+)", flags)]
    fits = any(built[0] == major and built[1] <= minor for built in kernels)
    if fits or any(built <= capability for built in portable) or not kernels:
        return None
    known = ", ".join(f"{built[0]}.{built[1]}" for built in kernels)
    return f"the library has kernels for compute capability {known}, but that of the GPU is {major}.{minor}"


def _number(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
