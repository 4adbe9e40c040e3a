# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What tools/gpu_rig/run.py says about the machine it ran on."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "tools" / "gpu_rig" / "run.py"


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_of_several_gpus_the_first_is_named(monkeypatch, tmp_path, gpus):
    answers = {
        "nvidia-smi": "NVIDIA H200, 580.82.07\n" * gpus,
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88\n",
    }
    for name, answer in answers.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "commit").write_text("abc1234\n", encoding="utf-8")
    found = runpy.run_path(str(RUN))["machine"](tmp_path / "commit")
    assert found["gpu"] == "NVIDIA H200"
    assert found["driver"] == "580.82.07"
    assert (found["cuda"], found["commit"]) == ("13.0", "abc1234")
