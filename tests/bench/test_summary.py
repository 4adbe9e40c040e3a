# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The summary for users: a section of the page, from times of public calls and of other libraries."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.kernels.results import Row, Run, run_paths
from benchmarks.kernels.summary import PADDLE, TE, newest_calls, section

GPU = "NVIDIA H200"
MACHINE = {"machine": True, "gpu": GPU, "commit": "c", "date": "2026-11-24", "paddle": "3.3.1", "device": "gpu:0"}
HOST = {kind: {"median": us, "least": 1.0} for kind, us in (("without_gradient", 7), ("forward", 40), ("backward", 90))}


def row(op, variant, impl, us, shape="dsv3"):
    values = {field.name: None for field in dataclasses.fields(Row)}
    return Row(**{**values, "op": op, "variant": variant, "impl": impl, "shape": shape, "us": us, "frac_copy": 0.9})


@pytest.fixture
def calls(tmp_path):
    def write(name="a", **machine):
        lines = [
            {**MACHINE, **machine},
            {"operation": "moe_permute", "shape": "dsv3", "tokens": 4096, "us": 150.0},
            {"operation": "unpermute", "shape": "dsv3", "tokens": 4096, "us": 120.0},
            {"operation": "permute, unpermute and gradients", "shape": "dsv3", "tokens": 4096, "us": 700.0},
            {"operation": "permute", "host": True, **HOST},
        ]
        (tmp_path / f"{name}-public-calls.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        rows = [
            row("moe_permute", "bf16", "core", 135.0),
            row("moe_permute", "bf16", PADDLE, 300.0),
            row("route_permute", "bf16", TE, 225.0),
            row("unpermute", "weighted", "core", 120.0),
            row("unpermute", "weighted", TE, 132.0),
        ]
        return newest_calls(tmp_path, [Run({"gpu": GPU, "set": "targets", "device": "cuda"}, rows)])

    return write


def test_a_row_has_our_time_the_share_of_a_copy_and_the_others_times(calls):
    text = section(calls())
    assert "| DeepSeek-V3 | 4096 | moe_permute | 150 | 0.81 | 300 (2.00 x) | 225 (1.50 x) |" in text
    assert "| DeepSeek-V3 | 4096 | unpermute | 120 | 0.90 |  | 132 (1.10 x) |" in text
    assert "| permute | 7 | 40 | 90 |" in text


def test_the_newest_file_of_a_gpu_counts_and_one_without_others_times_does_not(calls):
    calls("b", date="2026-11-25", commit="newer")
    calls("c", gpu="another")
    (found,) = calls("d", date="2026-11-01")
    assert found.machine["commit"] == "newer"
    assert section([]) == ""


def test_results_of_other_programs_are_no_runs_of_this_one(calls, tmp_path):
    calls()
    (tmp_path / "mine.jsonl").write_text(json.dumps({"machine": True, "set": "targets", "commit": "c"}) + "\n")
    assert [path.name for path in run_paths(tmp_path)] == ["mine.jsonl"]
