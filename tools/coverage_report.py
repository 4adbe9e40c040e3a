#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Writes benchmarks/results/coverage.json after the tests that `make coverage` runs, and the page coverage.md.

The core's lines come from gcov, by the .gcda files in build/coverage, Python's from build/coverage/python.json of
coverage.py. A part that was not run keeps its last result. The page is written to build/pages for `make docs`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "coverage"
RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
PAGE = ROOT / "build" / "pages" / "coverage.md"
PACKAGE = "paddle_moe_ops"
LOW = 90  # percent; files of Python below it are listed

INTRODUCTION = """\
# Coverage

The share of lines that the tests run. A line that runs may still be wrong; `make mutants` looks for faults that no
test notices.

"""
# Reasons why lines are excluded, by their file or folder.
REASONS = {
    "csrc/common/chunks.cc": "the report of a CUDA run, which only a CUDA build of the bindings calls",
    "csrc/common/float8_checks.cc": "checks of kernels that only GPUs have",
    "csrc/common/grouped_checks.cc": "checks of kernels that only Hopper GPUs have",
    "csrc/common/status.cc": "out of memory for the text of an error",
    "csrc/common/status.h": "an unexpected exception of the C++ library",
    "csrc/cpu/pool.cc": "thread creation fails; two threads create the pool concurrently; clean-up after exceptions",
    "csrc/cpu/pool.h": "an exception of a task",
    "csrc/cpu/quota.cc": "containers with a quota: `test_cpu_quota.py` compiles these lines into a separate program",
    "csrc/cpu/row_kernels_avx512.cc": "the CPU of this run has no AVX-512",
    "csrc/cpu/row_kernels_generic.cc": "the choice of AVX-512; lines that `test_row_kernels.py` compiles separately",
    "csrc/cpu/streaming.cc": "caches that sysconf does not report, as on aarch64",
    "csrc/cpu/unpermute.cc": "clean-up after an exception",
    "integrations": "PaddleFormers: `tests/integrations`, in an environment of its own",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core-tests", default="tests/core", help="what ran on the core, for the page")
    parser.add_argument("--python-tests", default="tests/ops tests/packaging", help="what ran on Python, for the page")
    options = parser.parse_args()
    results = read_results()
    if any(BUILD.rglob("*.gcda")):
        results["core"] = {**circumstances(options.core_tests), "files": core_lines()}
    if (BUILD / "python.json").exists():
        results["python"] = {**circumstances(options.python_tests), "files": python_lines(), "processes": True}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(read_results()), encoding="utf-8")
    return 0


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def circumstances(tests: str) -> dict[str, str]:
    """Return the sources, the time and the versions of the run."""
    described = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(described, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    return {"tests": tests, "commit": commit, "date": datetime.date.today().isoformat()}


def core_lines() -> dict[str, dict[str, Any]]:
    """Return the core's files; a line of a header counts when it ran in any of the sources that include it."""
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for notes in sorted(BUILD.rglob("*.gcno")):
        gcov = ["gcov", "--json-format", "--stdout", str(notes)]
        documents = subprocess.run(gcov, cwd=BUILD, check=True, capture_output=True, text=True).stdout
        for file in (file for document in documents.splitlines() for file in json.loads(document)["files"]):
            path = (ROOT / file["file"]).resolve()
            if path.is_relative_to(ROOT / PACKAGE):
                lines = counts[path.relative_to(ROOT / PACKAGE).as_posix()]
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = max(lines.get(number, 0), line["count"])
    return {
        name: summary(len(lines), [number for number, count in lines.items() if count == 0])
        for name, lines in sorted(counts.items())
    }


def python_lines() -> dict[str, dict[str, Any]]:
    """Return the package's own files, as coverage.py counts them."""
    measured = json.loads((BUILD / "python.json").read_text(encoding="utf-8"))["files"]
    return {
        Path(name).relative_to(PACKAGE).as_posix(): summary(file["summary"]["num_statements"], file["missing_lines"])
        for name, file in measured.items()
        if Path(name).name != "_C.py"  # written by the build
    }


def summary(lines: int, missing: list[int]) -> dict[str, Any]:
    return {"lines": lines, "missing": len(missing), "ranges": ranges(missing)}


def ranges(numbers: list[int]) -> str:
    """Return numbers as text, such as ``3-5, 9``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def page(results: dict[str, Any]) -> str:
    """Return the text of coverage.md."""
    text = INTRODUCTION
    if "core" in results:
        text += heading("The C++ core", results["core"]) + core_table(results["core"]["files"])
    if "python" in results:
        counted = "counted" if results["python"].get("processes") else "not counted"
        text += heading("Python", results["python"])
        text += f"Lines that run only in processes which a test starts are {counted}.\n\n"
        text += python_tables(results["python"]["files"])
    source = "Generated by `make docs` from `benchmarks/results/coverage.json`, which `make coverage` writes."
    return f"{text.rstrip()}\n\n---\n\n{source}\n"


def heading(title: str, part: dict[str, Any]) -> str:
    facts = f"`{part['tests']}`, commit {part['commit']}, {part['date']}"
    return f"## {title}\n\n{facts}: **{percent(part['files'].values())}** of {total(part['files'])} lines.\n\n"


def core_table(files: dict[str, dict[str, Any]]) -> str:
    rows = ["| file | lines | run | not run | what these are for |", "|---|---|---|---|---|"]
    complete = [name for name, file in files.items() if not file["missing"]]
    rows += [
        f"| `{name}` | {file['lines']} | {percent([file])} | {file['ranges']} | {reason(name)} |"
        for name, file in files.items()
        if file["missing"]
    ]
    return "\n".join(rows) + f"\n\nAll lines of the other {len(complete)} files run.\n\n"


def python_tables(files: dict[str, dict[str, Any]]) -> str:
    modules: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, file in files.items():
        modules[name.partition("/")[0]].append(file)
    rows = ["| module | lines | run | what runs the rest |", "|---|---|---|---|"]
    for name, part in sorted(modules.items()):
        lines = sum(file["lines"] for file in part)
        rows.append(f"| `{name}` | {lines} | {percent(part)} | {reason(name) if is_low(part) else ''} |")
    low = {name: file for name, file in files.items() if is_low([file]) and not reason(name.partition("/")[0])}
    rows += ["", f"Files of the other modules of which less than {LOW} % runs:", ""]
    rows += ["| file | lines | run | not run | what runs these |", "|---|---|---|---|---|"]
    rows += [
        f"| `{name}` | {file['lines']} | {percent([file])} | {file['ranges']} | {reason(name)} |"
        for name, file in sorted(low.items())
    ]
    return "\n".join(rows) + "\n"


def is_low(files: list[dict[str, Any]]) -> bool:
    lines, missing = sum(file["lines"] for file in files), sum(file["missing"] for file in files)
    return 100 * missing > (100 - LOW) * lines


def reason(name: str) -> str:
    return next((why for part, why in REASONS.items() if name == part or name.startswith(f"{part}/")), "")


def total(files: dict[str, dict[str, Any]]) -> int:
    return sum(file["lines"] for file in files.values())


def percent(files: Any) -> str:
    """Return the share in percent, rounded down, so that only a complete file has 100 %."""
    files = list(files)
    lines, missing = sum(file["lines"] for file in files), sum(file["missing"] for file in files)
    return f"{1000 * (lines - missing) // max(lines, 1) / 10} %" if missing else "100 %"


if __name__ == "__main__":
    raise SystemExit(main())
