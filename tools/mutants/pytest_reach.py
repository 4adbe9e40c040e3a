# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in: writes down which tests reach which lines, or runs the tests that it is told, the fastest first.

MUTANTS_RECORD=FILE with MUTANTS_SOURCES (paths, separated by os.pathsep) writes a JSON object: "reached" holds for
every line ("path:number") the numbers of tests, "tests" their ids, "seconds" their times, and "spawning" lists the
files whose tests start processes, in which nothing is written down. MUTANTS_TESTS=FILE names a JSON list of ids.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_sources = {os.path.abspath(path): path for path in os.environ.get("MUTANTS_SOURCES", "").split(os.pathsep) if path}
_reached: defaultdict[str, set[int]] = defaultdict(set)
_tests: list[str] = []
_seconds: list[float] = []
_spawning: set[str] = set()


def _trace(frame: FrameType, event: str, _: Any) -> Any:
    path = _sources.get(frame.f_code.co_filename)
    if path is None:
        return None
    _reached[f"{path}:{frame.f_lineno}"].add(len(_tests) - 1)
    return _trace


def _audit(event: str, _: Any) -> None:
    if event in ("subprocess.Popen", "os.fork") and _tests:
        _spawning.add(_tests[-1].partition("::")[0])


if _sources:
    sys.addaudithook(_audit)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _tests.append(item.nodeid)
    start = time.perf_counter()
    if _sources:
        threading.settrace(_trace)
        sys.settrace(_trace)
    yield
    sys.settrace(None)
    _seconds.append(time.perf_counter() - start)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "MUTANTS_TESTS" in os.environ:
        order = {name: place for place, name in enumerate(json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_sessionfinish() -> None:
    if "MUTANTS_RECORD" in os.environ:
        reached = {line: sorted(tests) for line, tests in _reached.items()}
        record = {"tests": _tests, "seconds": _seconds, "reached": reached, "spawning": sorted(_spawning)}
        Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(record))
