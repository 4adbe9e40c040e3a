# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""examples/pretrain_ernie45_moe.py, in processes of its own: what a reader runs has no stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(*options: str, launch: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    command = [sys.executable, *launch, "examples/pretrain_ernie45_moe.py", *options]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout


def held_out(text: str) -> tuple[float, float]:
    """The losses before and after."""
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", text).groups())
    return before, after


def test_it_learns_saves_and_loads():
    status, text = output_of("--steps", "12")
    assert status == 0, text
    before, after = held_out(text)
    assert after < before - 1
    loads = [float(each) for each in re.findall(r"\d\.\d+(?= times| \d)", text)]
    assert max(loads) > 1
    assert "1 process with 16 of 16 experts each" in text
    assert text.endswith("PASSED\n")


def test_two_processes_that_share_the_experts_learn_save_and_load(tmp_path):
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path))
    threads = {"OMP_NUM_THREADS": "1"}
    status, text = output_of("--steps", "12", launch=launch, PADDLE_DISTRI_BACKEND="gloo", **threads)
    assert status == 0, text
    before, after = held_out(text)
    assert before == held_out(output_of("--steps", "1")[1])[0]
    assert after < before - 1
    assert "2 processes with 8 of 16 experts each" in text
    assert "PASSED" in text


def test_without_the_patch_a_kernel_is_missing():
    status, text = output_of("--steps", "1", "--no-patch")
    assert status == 1
    assert re.search(r"this build of Paddle has no kernel \w+", text)
