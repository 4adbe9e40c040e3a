#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA operators by setup.py, as under a GPU wheel of Paddle, and checks the library without a GPU.

    tools/cuda_build.py [--architectures "80 90"] [--cuda 13.0]

PyPI has no GPU wheel of Paddle 3. So the build runs under the installed CPU wheel, which is told to say that it is
compiled with CUDA. In a copy of the checkout, build/cuda_build:

1. setup.py compiles every source for every generation of GPUs, or for those of --architectures.
2. Each undefined symbol of the library is in Paddle's libraries, in the system's, or in CUDA's runtime.
3. `python -m paddle_moe_ops selftest` passes with that library on CPU tensors.

The sizes of the library and of its device code are printed. Needs nvcc and, beside Paddle, the tools of binutils.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "cuda_build"
LIBRARY = COPY / "paddle_moe_ops" / "_C_pd_.so"
# Before Paddle is imported anywhere else; arguments: the CUDA version, then a script or -m and a module, and its own.
AS_CUDA_BUILD = """\
import runpy, sys
import paddle
import paddle.version
from paddle.base import core
version, kind, target, *rest = sys.argv[1:]
for module in (paddle, core, paddle.device):
    module.is_compiled_with_cuda = lambda: True
paddle.version.cuda = lambda: version
paddle.version.cuda_version = version
sys.argv = [target, *rest]
run = {"file": runpy.run_path, "module": lambda name, **how: runpy.run_module(name, alter_sys=True, **how)}[kind]
run(target, run_name="__main__")
"""
# Symbols of these come with every process that loads the library.
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libpthread.so.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default="", help="generations to compile for, such as '90' (default: all)")
    parser.add_argument("--cuda", default="13.0", help="the CUDA version that Paddle says it has")
    options = parser.parse_args()
    cuda_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (cuda_home / "bin" / "nvcc").exists():
        print(f"nvcc was not found in {cuda_home}; set CUDA_HOME", file=sys.stderr)
        return 2
    copy_checkout(options.architectures.split())
    environment = {**os.environ, "CUDA_HOME": str(cuda_home), "PYTHONPATH": str(COPY), "GLOG_minloglevel": "2"}
    environment.pop("PADDLE_MOE_OPS_CUDA", None)
    libraries = f"{cuda_home}/lib64:{os.environ.get('LD_LIBRARY_PATH', '')}"

    def run(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-c", AS_CUDA_BUILD, options.cuda, *arguments]
        done = subprocess.run(command, cwd=COPY, env={**environment, **more}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-8000:]}")
        return done.stdout

    started = time.monotonic()
    built = run("file", "setup.py", "build_ext", "--inplace")
    print(built[built.rindex("paddle_moe_ops: built") :].rstrip())
    print(f"compiled and linked in {time.monotonic() - started:.0f} s")
    print(sizes(LIBRARY))
    missing = unresolved(LIBRARY, cuda_home / "lib64" / "libcudart.so")
    if missing:
        print(f"symbols that no library has: {', '.join(missing)}", file=sys.stderr)
        return 1
    print("symbols: all are in Paddle's libraries, the system's, or CUDA's runtime")
    print(run("module", "paddle_moe_ops", "selftest", LD_LIBRARY_PATH=libraries).splitlines()[-1])
    return 0


def copy_checkout(architectures: list[str]) -> None:
    """Bring the copy up to date; objects of an earlier run stay, and what did not change is not compiled again."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, COPY / name
        if not name.startswith(("paddle_moe_ops/", "setup.py", "pyproject.toml", "README.md")) or not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copyfile(source, target)
    if not architectures:
        return
    setup = COPY / "setup.py"
    text = setup.read_text(encoding="utf-8")
    known = re.findall(r"^    \((\d+), \(\d+, \d+\)\),\n", text, re.MULTILINE)
    if set(architectures) - set(known):
        sys.exit(f"--architectures must be some of {' '.join(known)}, but got {' '.join(architectures)}")
    left_out = "|".join(set(known) - set(architectures)) or "none"
    setup.write_text(re.sub(rf"^    \((?:{left_out}), \(\d+, \d+\)\),\n", "", text, flags=re.MULTILINE), "utf-8")


def sizes(library: Path) -> str:
    """Return the size of a library, and the part of it that is device code."""
    listed = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    (stored,) = re.findall(r" \.nv_fatbin +\w+ +\w+ \w+ (\w+)", listed)
    whole, device = library.stat().st_size / 1e6, int(stored, 16) / 1e6
    return f"library {whole:.1f} MB, of these {device:.1f} MB of device code, compressed"


def unresolved(library: Path, *more: Path) -> list[str]:
    """Return undefined symbols of a library that Paddle's, the system's and the further libraries do not define."""
    import paddle

    package = Path(paddle.__file__).parent
    providers = [*package.glob("libs/*.so*"), package / "base" / "libpaddle.so", *more]
    defined = set().union(*(symbols(path, "--defined-only") for path in [*providers, *map(system_library, SYSTEM)]))
    return sorted(name for name in symbols(library, "--undefined-only") - defined if not name.startswith(("Py", "_Py")))


def symbols(library: Path, which: str) -> set[str]:
    """Return dynamic symbols without their versions; weak undefined ones may stay undefined."""
    listed = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return {words[-1].partition("@")[0] for words in lines if words[-2] not in "wv" or which == "--defined-only"}


def system_library(name: str) -> Path:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    (path, *_) = re.findall(rf"{re.escape(name)} .*x86-64.* => (\S+)", listed)
    return Path(path)


if __name__ == "__main__":
    sys.exit(main())
