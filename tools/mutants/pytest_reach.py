# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in that records the lines that each test reaches, or runs a list of tests, the fastest first.

MUTANTS_RECORD=FILE writes a JSON object: "tests" are ids, "seconds" their times, "failed" the numbers of failing ones.
"reached" maps every line ("path:number") to the numbers of tests that reach it. It needs the variables of reach.py.
MUTANTS_TESTS=FILE names a JSON list of ids.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reach import Current, Tracer, reached_lines

_folder = os.environ.get("MUTANTS_CHILDREN", "")
_current, _tracer = (Current(_folder), Tracer(_folder)) if _folder else (None, None)
_tests: list[str] = []
_seconds: list[float] = []
_failed: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _tests.append(item.nodeid)
    start = time.perf_counter()
    if _current is not None:
        _current.set(len(_tests) - 1)
        _tracer.start()  # again: a test may have ended it
    yield
    _seconds.append(time.perf_counter() - start)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "MUTANTS_TESTS" in os.environ:
        order = {name: place for place, name in enumerate(json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_sessionfinish() -> None:
    if "MUTANTS_RECORD" in os.environ:
        failed = [number for number, test in enumerate(_tests) if test in _failed]
        record = {"tests": _tests, "seconds": _seconds, "failed": failed, "reached": reached_lines(_folder)}
        Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(record))
