# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`make test`, where a test kills its process or never ends: the run ends, and names the test."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command of `make test` on the files of a folder."""
    # The make that this run may be a part of says nothing about the new one, and neither do pytest's options.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    dry = ["make", "--dry-run", "test"]
    made = subprocess.run(dry, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    command = made.stdout.replace("\\\n", " ").splitlines()[-1]
    python, dash_m, module, tests, *others = shlex.split(command)
    assert (dash_m, module, tests) == ("-m", "pytest", "tests")
    words = [ROOT / python, "-m", "pytest", *others, *options, f"--rootdir={folder}", "-p", "no:cacheprovider", folder]
    clean = {name: value for name, value in outside.items() if not name.startswith("PYTEST_")}
    return subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, timeout=600)


def write(folder: Path, name: str, body: str, times: int) -> None:
    """A file whose test runs this many times; its body is on line 4."""
    lines = ["import os, time, pytest", f"@pytest.mark.parametrize('number', range({times}))", "def test(number):"]
    (folder / f"test_{name}.py").write_text("\n".join([*lines, f"    {body}\n"]), encoding="utf-8")


def test_a_test_that_kills_its_process_ends_the_run(tmp_path):
    """The worker dies after many files; the others would wait for these if xdist started a new worker."""
    for number in range(40):
        write(tmp_path, f"passes_{number:02}", "time.sleep(0.01)", 40 - number // 2)
    write(tmp_path, "dies", "os.abort() if number == 2 else None", 27)
    made = run(tmp_path)
    assert made.returncode == 1
    assert "crashed while running 'test_dies.py::test[2]'" in made.stdout
    assert "Fatal Python error: Aborted" in made.stdout + made.stderr


def test_a_test_that_never_ends_is_ended_with_its_traceback(tmp_path):
    write(tmp_path, "waits", "time.sleep(10000)", 1)
    made = run(tmp_path, "-o", "faulthandler_timeout=2")
    assert made.returncode == 1
    assert "crashed while running 'test_waits.py::test[0]'" in made.stdout
    assert 'test_waits.py", line 4 in test' in made.stdout + made.stderr
