# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The custom device "stub_rig": memory of the host, and collectives between processes without a GPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RIG = ROOT / "tools" / "gpu_rig"
SOURCES = [*sorted(Path(__file__).parent.glob("*.cc")), RIG / "host_kernels.cc"]
HEADERS = sorted(RIG.glob("*.h"))
BUILD = ROOT / "build" / "stub_device"


def build() -> Path:
    """Compile the plug-in, unless that was done, and return its folder, which is what CUSTOM_DEVICE_ROOT takes."""
    import paddle

    package = Path(paddle.__path__[0])
    digest = hashlib.sha256(f"{paddle.version.full_version} {paddle.version.commit}".encode())
    for file in (*SOURCES, *HEADERS):
        digest.update(file.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    library = folder / "libstub_rig.so"
    if library.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the folder, since Paddle loads every library in it; renamed, since other processes may build it, too.
    unfinished = BUILD / f"{folder.name}-{os.getpid()}.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-fPIC", "-shared", "-pthread", "-Wl,-z,defs"]
    command += ["-Wall", "-Wextra", "-Werror", "-DPADDLE_WITH_CUSTOM_DEVICE", "-DPADDLE_NO_PYTHON"]
    command += [f"-I{RIG}", f"-isystem{package}/include", f"-isystem{package}/include/third_party", *map(str, SOURCES)]
    command += [f"-L{package}/libs", "-l:libphi_core.so", "-l:libphi.so", "-l:libcommon.so", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr}")
    unfinished.rename(library)
    return folder
