# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark that records when the steps of a layer begin and end, between processes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.expert_parallel.__main__ import main
from benchmarks.expert_parallel.timeline_report import Recorded, picture

from . import processes

FORWARD = [
    *("dispatch plan", "dispatch send", "dispatch wait", "dispatch wait", "dispatch receive", "routing route"),
    "products products",
    *(f"combine {step}" for step in ("send", "wait", "receive")),
]
BACKWARD = [
    *(f"combine {step}" for step in ("send", "wait", "receive")),
    "products products",
    *(f"dispatch {step}" for step in ("send", "write", "wait", "receive", "read")),
]


def test_the_command_records_the_steps_of_both_passes_in_order_on_each_rank(tmp_path, monkeypatch):
    out = tmp_path / "a-expert-parallel-timeline.jsonl"
    command = ["--timeline", "--backend", processes.default_backend, "--shapes", "trial", "--tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *command, "--samples", "2", "--out", str(out), "--commit", "abc"])
    monkeypatch.setattr(processes, "TIMEOUT_S", processes.TIMEOUT_S)  # which the command sets
    monkeypatch.setenv("MALLOC_PERTURB_", "0")
    main()
    machine, *ranks = map(json.loads, out.read_text().splitlines())
    assert machine["ranks"] == 2
    assert [(line["shape"], line["what"], line["rank"]) for line in ranks] == [
        ("trial", "timeline", each) for each in (0, 1)
    ]
    for line in ranks:
        for passing, expected in (("forward", FORWARD), ("backward", BACKWARD)):
            of_pass = [each for each in line["steps"] if each["pass"] == passing]
            assert [f"{each['stage']} {each['step']}" for each in of_pass] == expected
        times = [each[which] for each in line["steps"] for which in ("begin_us", "end_us")]
        assert times == sorted(times)
        assert times[0] >= 0
    assert picture(Recorded.of(out)).count("<title>") > len(FORWARD + BACKWARD)


def test_times_of_gpus_are_not_measured_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--backend", "gloo", "--out", "x", "--commit", "abc"])
    with pytest.raises(SystemExit):
        main()
    assert "--backend gloo needs --timeline" in capsys.readouterr().err
