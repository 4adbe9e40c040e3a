# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Workflows, issue forms and policies name what exists: targets, files, versions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import paddle_moe_ops
from paddle_moe_ops import _build_check

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_workflow_calls_what_exists(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"(?:run: |^ +|&& )make (\S+)$", text, re.MULTILINE)
    makefile = read("Makefile").replace("$(VENV)", ".venv")
    rules = set(re.findall(r"^([\w./-]+):(?!=)", makefile, re.MULTILINE))
    assert set(targets) <= rules
    files = re.findall(r"(?<![\w./-])(?:tests/|tools/|\.ci/)[\w./-]+", text)
    assert {name for name in files if not (ROOT / name).exists()} == set()
    assert targets or files or "setup.py" in text


def test_wheels_are_made_for_every_supported_python_and_paddle():
    workflow = read(".github/workflows/wheels.yml")
    pythons, *other_pythons = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    paddles, *other_paddles = re.findall(r"^ +paddle: \[(.*)\]$", workflow, re.MULTILINE)
    assert (other_pythons, other_paddles) == ([pythons], [paddles])  # of wheels for CPUs, and of those for GPUs
    minors = [version.rpartition(".")[0] for version in re.findall(r'"([\d.]+)"', paddles)]
    assert minors == list(_build_check.TESTED_PADDLE)
    (supported,) = re.findall(r"^\| Python \| ([\d., ]+) \|", read("docs/support.md"), re.MULTILINE)
    assert re.findall(r'"([\d.]+)"', pythons) == supported.split(", ")
    assert f">={supported.split(', ')[0]}" in read("pyproject.toml")
    assert f"PaddlePaddle | {' and '.join(_build_check.TESTED_PADDLE)}," in read("docs/support.md")


def test_citation_names_this_version():
    assert re.findall(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE) == [paddle_moe_ops.__version__]
    assert re.findall(r"^  version = \{(.*)\},$", read("README.md"), re.MULTILINE) == [paddle_moe_ops.__version__]


def test_the_source_distribution_has_every_file_of_the_repository():
    """Setuptools itself adds the package's Python files, LICENSE, README.md, pyproject.toml and setup.py."""
    command = ["git", "ls-files"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(files) > 500
    rules = [line.split() for line in read("MANIFEST.in").splitlines()]
    folders = tuple(f"{folder}/" for rule in rules if rule[0] == "graft" for folder in rule[1:])
    named = {name for rule in rules if rule[0] == "include" for name in rule[1:]}
    named |= {"LICENSE", "README.md", "pyproject.toml", "setup.py", "MANIFEST.in", "paddle_moe_ops/py.typed"}
    left_out = {name for name in files if name not in named and not name.startswith(folders)}
    assert {name for name in left_out if not re.fullmatch(r"paddle_moe_ops/.*\.py", name)} == set()


def test_reports_of_bugs_need_the_output_of_env():
    (field,) = [part for part in read(".github/ISSUE_TEMPLATE/bug.yml").split("  - type: ") if "id: env" in part]
    assert "python -m paddle_moe_ops env" in field
    assert "required: true" in field
