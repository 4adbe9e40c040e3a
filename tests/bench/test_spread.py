# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Minimum and maximum of samples stay with the median, from the samples to the page."""

from __future__ import annotations

import json

import pytest

from benchmarks.expert_parallel import report as parallel
from benchmarks.kernels import report as kernels
from benchmarks.kernels.results import load_run
from benchmarks.kernels.timing import stats_of
from benchmarks.layer import report as layers
from benchmarks.spread import deviation, difference_fields, time_fields, with_deviation

from .test_layer_report import MACHINE as LAYER_MACHINE
from .test_layer_report import line, row_of
from .test_report import timed, write

SAMPLES = [104.0, 98.0, 100.0]


def test_minimum_and_maximum_survive_a_round_trip_through_a_line():
    written = json.loads(json.dumps(time_fields(SAMPLES, "forward_")))
    assert written == {"forward_us": 100.0, "forward_min_us": 98.0, "forward_max_us": 104.0}
    assert deviation(written, "forward_") == pytest.approx(0.04)
    assert with_deviation(600.0, deviation(written, "forward_")) == "600 ±24"


def test_a_line_of_an_older_result_has_no_deviation():
    assert deviation({"us": 100.0, "min_us": 98.0}) is None
    assert with_deviation(600.0, None) == "600"


def test_operators_keep_and_show_minimum_and_maximum(tmp_path):
    stats = stats_of(SAMPLES)
    spread = {"min_us": stats.least, "max_us": stats.most}
    write(tmp_path / "run.jsonl", [timed(stats.median, **spread), timed(stats.median, impl="peer", **spread)])
    run = load_run(tmp_path / "run.jsonl")
    assert [(row.min_us, row.us, row.max_us) for row in run.rows] == 2 * [(98.0, 100.0, 104.0)]
    page = kernels.page("GPUs", [run], {})
    assert "| min .. max |" in page
    assert "| 98.0 .. 104.0 |" in page
    assert "| 100.0 ±4.0 |" in page


def test_layers_show_the_deviation_of_each_pass(tmp_path):
    spread = time_fields(SAMPLES, "forward_") | time_fields([100.0, 101.0, 99.0], "backward_")
    path = tmp_path / "h200-layer.jsonl"
    path.write_text(f"{json.dumps(LAYER_MACHINE)}\n{json.dumps(line(**spread))}\n")
    assert "| 600 ±24 / 500 ±5 |" in row_of(layers.page([layers.Run(path)]), "ernie-21b")


def test_exchanges_between_gpus_show_the_deviation(tmp_path):
    whats = "p2p_copy", "dispatch", "dispatch_without_copy", "dispatch_float8", "combine", "alltoall_single"
    shape = {"shape": "dsv3", "tokens": 8192, "ranks": 2, "bytes": 1_000_000}
    machine = {"gpus": ["NVIDIA H200"] * 2, "commit": "abc", "date": "2026-11-24", "driver": "1"}
    lines = [machine, *({**shape, "what": what, **time_fields(SAMPLES)} for what in (*whats, "rows_alltoall"))]
    path = tmp_path / "h200x2-expert-parallel.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert "| 100 ±4 | 100 ±4 (1.00) |" in parallel.page([path])


def test_the_time_of_a_difference_has_bounds():
    whole, part = ({"us": 10.0, "min_us": 8.0, "max_us": 13.0}, {"us": 4.0, "min_us": 3.0, "max_us": 6.0})
    assert difference_fields(whole, part) == {"us": 6.0, "min_us": 2.0, "max_us": 10.0}
