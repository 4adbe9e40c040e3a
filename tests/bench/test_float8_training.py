# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""docs/float8_layers.md has the table of benchmarks/float8_training.py, and float8 costs no more than noise."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks import float8_training as benchmark
from benchmarks.pages import load, with_part

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "float8_layers.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "float8-training.jsonl"


def test_the_table_is_what_was_measured():
    assert with_part(PAGE, benchmark.BEGIN, benchmark.table(load(RESULT))) == PAGE


def test_losses_are_within_noise():
    found = {(line["form"], line["seed"]): line["loss"] for line in load(RESULT)[1:]}
    seeds = sorted({seed for _, seed in found})
    assert len(seeds) >= 4
    noise = statistics.stdev(found["float32", seed] for seed in seeds)
    differences = [found["float8", seed] - found["float32", seed] for seed in seeds]
    assert abs(statistics.mean(differences)) < noise


def test_both_forms_are_trained_from_the_same_start(monkeypatch):
    small = {"hidden": 64, "layers": 2, "experts": 4, "topk": 2, "context": 16}
    monkeypatch.setattr(benchmark, "SIZES", small)
    losses = [benchmark.held_out_loss(compute, 3, 2) for compute in benchmark.FORMS.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1]
