# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/matrices.py: its forms give the same, and docs/training.md has the table of its result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import matrices as benchmark
from benchmarks.pages import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "integrations" / "cpu-2core-matrices.jsonl"


def test_the_table_is_what_was_measured():
    lines = load(RESULT)
    assert benchmark.with_table(PAGE, lines) == PAGE
    assert [line["form"] for line in lines[1:]] == 2 * list(benchmark.FORMS)


@pytest.fixture
def small(monkeypatch):
    for name, value in {"TOKENS": 9, "HIDDEN": 8, "INNER": 4, "EXPERTS": 3, "TOPK": 2}.items():
        monkeypatch.setattr(benchmark, name, value)


def test_all_forms_give_the_same(small):
    calls, _, _ = benchmark.forms()
    assert list(calls) == list(benchmark.FORMS)
    expected = calls["loop"]().numpy()
    assert np.abs(expected).max() > 0
    for call in calls.values():
        np.testing.assert_allclose(call().numpy(), expected, rtol=1e-5, atol=1e-9)


def test_both_passes_are_timed(small):
    found = benchmark.measure(rounds=2)
    assert list(found) == list(benchmark.FORMS)
    assert all(min(times.values()) > 0 for times in found.values())
