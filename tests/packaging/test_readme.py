# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What the README says is true."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import paddle_moe_ops
from paddle_moe_ops.__main__ import _parser
from tests.packaging.subprocesses import run_command

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_quick_start_runs_and_has_at_most_15_lines_of_code(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[6, 8] [6, 8]"


def test_install_section_has_the_lines_that_are_run_in_fresh_environments():
    lines = runpy.run_path(str(ROOT / "tools" / "fresh_environments.py"))["install_lines"]().splitlines()
    assert len(lines) == 3
    assert lines[1] == "pip install --no-build-isolation ."


def test_function_table_names_public_functions():
    rows = re.findall(r"^\| `(\w+)\(", README, re.MULTILINE)
    assert {"moe_permute", "moe_unpermute", "route", "permute", "unpermute"} <= set(rows)
    for name in rows:
        assert name in paddle_moe_ops.__all__


def test_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_commands_of_the_package_are_listed_and_the_example_of_bench_is_taken():
    (listed,) = re.findall(r"`python -m paddle_moe_ops ([a-z |]+)`", README)
    done = run_command("--help")
    assert re.findall(r"^    ([a-z]+) ", done.stdout, re.MULTILINE) == listed.split(" | ")
    (example,) = re.findall(r"`python -m paddle_moe_ops (bench --[^`]+)`", README)
    assert _parser().parse_args(example.split()).tokens == [512, 4096]


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
