# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""docs/integrations.md: its code runs, it names every type, and its table is what was measured.

Its code is marked ``py``, since the test of the other pages runs where PaddleFormers is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paddle_moe_ops.integrations.paddleformers as pf
from benchmarks import integrations as benchmark

from .models import CASES, batch, build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "integrations" / "cpu-2core.jsonl"


def test_the_code_runs(capsys, monkeypatch):
    names = {"model": build("qwen3_moe"), "tokens": batch()}
    monkeypatch.undo()  # a reader has no stand-ins
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, "docs/integrations.md", "exec"), names)
    assert "patched: paddleformers.transformers.ernie4_5_moe.modeling" in capsys.readouterr().out


def test_every_method_is_listed_for_its_type():
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    for name, each in pf.supported().items():
        first = next(index for index, row in enumerate(rows) if f"`{name}`" in row.split("|")[1])
        text = "".join(rows[first : first + len(each.methods)])
        for path in each.methods:
            assert f"`{'.'.join(path.split('.')[-2:])}`" in text, name


def test_the_table_is_what_was_measured():
    lines = benchmark.load(RESULT)
    assert benchmark.with_table(PAGE, lines) == PAGE
    assert [line["block"] for line in lines[1:]] == [case for case in CASES if case != "qwen3_moe-unnormalised"]


@pytest.mark.parametrize("case", ["qwen3_moe", "ernie4_5_moe"])
def test_a_block_is_measured(case, monkeypatch):
    for name, value in {"TOKENS": 5, "HIDDEN": 48}.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(benchmark, "SIZES", {"num_hidden_layers": 2})
    row = benchmark.measure(case, rounds=2)
    assert 0 < row["after_min_ms"] <= row["after_ms"]
    assert 0 < row["before_min_ms"] <= row["before_ms"]
    assert row["output_difference"] < 1e-5
    assert 0 < row["gradient_difference"] < 1e-5
    assert min(row["before_mib"], row["after_mib"]) > 0
