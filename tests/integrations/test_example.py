# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""examples/pretrain_ernie45_moe.py, in processes of its own: what a reader runs has no stand-ins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(*options: str) -> tuple[int, str]:
    command = [sys.executable, "examples/pretrain_ernie45_moe.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout


def test_it_learns_saves_and_loads():
    status, text = output_of("--steps", "12")
    assert status == 0, text
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", text).groups())
    assert after < before - 1
    loads = [float(each) for each in re.findall(r"\d\.\d+(?= times| \d)", text)]
    assert max(loads) > 1
    assert text.endswith("PASSED\n")


def test_without_the_patch_a_kernel_is_missing():
    status, text = output_of("--steps", "1", "--no-patch")
    assert status == 1
    assert re.search(r"this build of Paddle has no kernel \w+", text)
