# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The page coverage.md shows measured files and every line that did not run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "coverage_report.py"))


def test_reasons_are_given_for_what_exists(tool):
    assert [part for part in tool["REASONS"] if not (ROOT / "paddle_moe_ops" / part).exists()] == []


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([9, 3, 4, 5], "3-5, 9"), ([1, 2, 4, 5], "1-2, 4-5")]
)
def test_lines_are_told_as_ranges(tool, numbers, text):
    assert tool["ranges"](numbers) == text


def test_only_a_complete_file_has_100_percent(tool):
    def share(lines, missing):
        return tool["percent"]([{"lines": lines, "missing": missing}])

    assert (share(7, 0), share(100000, 1), share(8, 1), share(3, 3), share(0, 0)) == (
        *("100 %", "99.9 %", "87.5 %", "0.0 %"),
        "100 %",
    )


def test_files_of_python_that_run_little_are_listed_unless_their_module_has_a_reason(tool):
    def file(missing, ranges):
        return {"lines": 10, "missing": missing, "ranges": ranges}

    files = {
        "integrations/sums.py": file(6, "1-6"),
        "masked/maps.py": file(2, "4-5"),
        "masked/moe.py": file(1, "3"),
        "mlp.py": file(0, ""),
    }
    text = tool["page"]({"python": {"tests": "tests/ops", "commit": "abc", "date": "2026-11-24", "files": files}})
    assert "`tests/ops`, commit abc, 2026-11-24: **77.5 %** of 40 lines." in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `integrations` | 10 | 40.0 % | {tool['REASONS']['integrations']} |",
        "| `masked` | 20 | 85.0 % |  |",
        "| `mlp.py` | 10 | 100 % |  |",
        "| `masked/maps.py` | 10 | 80.0 % | 4-5 |  |",
    ]


@pytest.mark.parametrize(("python", "counted"), [({}, "are not counted."), ({"processes": True}, "are counted.")])
def test_the_page_says_whether_processes_that_tests_start_count(tool, python, counted):
    run = {"tests": "tests/ops", "commit": "abc", "date": "2026-11-24", "files": {}, **python}
    assert f"Lines that run only in processes which a test starts {counted}" in tool["page"]({"python": run})
