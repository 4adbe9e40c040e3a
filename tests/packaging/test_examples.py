# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The examples run and report success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ernies_own_nodes_run_through_the_patch_and_match_the_dense_formulation():
    lines = run("ernie_unzip_zip.py").splitlines()
    assert lines[0].endswith("this package (patch_paddle)")
    assert [line.split()[0] for line in lines[1:4]] == ["output", "d_tokens", "d_probs"]
    assert lines[-1].endswith("PASSED")
