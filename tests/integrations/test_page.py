# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""docs/integrations.md: its code runs and it names every type. integrations_measured.md shows what was measured.

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
PAGE, MEASURED = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("integrations", "integrations_measured")
)


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


@pytest.mark.parametrize("part", benchmark.PARTS)
def test_what_is_shown_is_what_was_measured(part):
    assert benchmark.with_part(MEASURED, part, benchmark.load(part)) == MEASURED


def test_the_example_runs_patched_alone():
    unpatched, *patched = benchmark.load("example")[1:]
    reason = "PaddleFormers' own blocks do not run here: this build of Paddle has no kernel "
    assert [line.startswith(reason) for line in unpatched["lines"]] == [True]
    assert [each["lines"][-1] for each in patched] == ["PASSED", "PASSED"]


def test_every_model_was_measured():
    blocks, losses = benchmark.load("blocks")[1:], benchmark.load("losses")[1:]
    assert [line["block"] for line in blocks] == [case for case in CASES if case != "qwen3_moe-unnormalised"]
    assert [line["model"] for line in losses] == list(CASES)
    for line in losses:
        assert line["after"] == pytest.approx(line["before"], abs=1e-5)


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
