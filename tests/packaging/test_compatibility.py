# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Results in fresh environments are recorded, and docs/compatibility.md shows them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"commit": "abc1234", "date": "2026-11-24", "libc": "glibc 2.36", "machine": "x86_64"}


def test_the_page_is_made_of_the_committed_results():
    tool = runpy.run_path(str(ROOT / "tools" / "fresh_environments.py"))
    text = tool["page"](tool["read_results"]())
    assert text == (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8"), (
        "run `python tools/fresh_environments.py --page`"
    )
    assert text.count("passed") >= 1


@pytest.fixture
def tool(tmp_path):
    functions = runpy.run_path(str(ROOT / "tools" / "fresh_environments.py"))
    functions["record"].__globals__["RESULTS"] = tmp_path / "results.jsonl"
    return functions


def test_a_result_takes_the_place_of_the_one_before_and_versions_are_in_their_order(tool, tmp_path):
    for python, paddle, passed in [
        ("3.10.13", "3.3.1", True),
        ("3.9.2", "3.3.1", True),
        ("3.10.13", "3.2.2", True),
        ("3.10.14", "3.3.1", False),
        ("3.10.14", "3.10.0", True),
    ]:
        tool["record"]({"python": python, "paddle": paddle, "passed": passed, **FACTS})
    lines = map(json.loads, (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines())
    assert [(each["python"], each["paddle"], each["passed"]) for each in lines] == [
        ("3.9.2", "3.3.1", True),
        ("3.10.13", "3.2.2", True),
        ("3.10.14", "3.3.1", False),
        ("3.10.14", "3.10.0", True),
    ]
    rows = [line for line in tool["page"](tool["read_results"]()).splitlines() if line.startswith("| 3.")]
    assert rows[2] == "| 3.10.14 | 3.3.1 | **failed** | x86_64, glibc 2.36 | abc1234 | 2026-11-24 |"
    assert [row for row in rows if "failed" in row] == rows[2:3]


def test_no_result_is_an_empty_table(tool):
    assert tool["read_results"]() == []
    assert tool["page"]([]).endswith("|---|---|---|---|---|---|\n")
