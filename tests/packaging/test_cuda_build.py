# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""tools/cuda_build.py, but for the build itself: Paddle as a CUDA build, undefined symbols, generations of GPUs."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_moe_ops import _build_check

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "cuda_build.py"))
needs_binutils = pytest.mark.skipif(shutil.which("nm") is None, reason="binutils")


def test_paddle_says_that_it_is_compiled_with_cuda(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, paddle\n"
        "from paddle.base import core\n"
        "print(paddle.is_compiled_with_cuda(), core.is_compiled_with_cuda(), paddle.version.cuda(), sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", TOOL["AS_CUDA_BUILD"], "13.0", "file", str(script), "build_ext"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == "True True 13.0 ['build_ext']"


@needs_binutils
def test_symbols_that_no_library_has_are_named(tmp_path):
    assert TOOL["unresolved"](_build_check.library()) == []
    source, library = tmp_path / "one.cc", tmp_path / "one.so"
    source.write_text('extern "C" int of_nowhere(); extern "C" int first() { return of_nowhere(); }\n')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    assert TOOL["unresolved"](library) == ["of_nowhere"]


def test_other_generations_are_left_out_of_the_copy_and_unknown_ones_refused(tmp_path):
    copy = TOOL["copy_checkout"]
    copy.__globals__["COPY"] = tmp_path
    copy(["80", "90"])
    text = (tmp_path / "setup.py").read_text(encoding="utf-8")
    assert [line.split(",")[0].strip(" (") for line in text.splitlines() if line.startswith("    (")] == ["80", "90"]
    assert list(tmp_path.glob("paddle_moe_ops/csrc/cuda/moe/*.cu"))
    with pytest.raises(SystemExit, match=r"--architectures must be some of 80 .*, but got 70"):
        copy(["70"])
