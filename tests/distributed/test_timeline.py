# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark that records when the steps of a layer begin and end, between processes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.expert_parallel.__main__ import main
from benchmarks.expert_parallel.overlap import CASES
from benchmarks.expert_parallel.overlap_report import overlap_section
from benchmarks.expert_parallel.timeline_report import Recorded, picture

from . import processes

FORWARD = [
    *("dispatch plan", "dispatch send", "dispatch wait", "dispatch wait", "dispatch receive", "routing route"),
    "products products",
    *(f"combine {step}" for step in ("send", "wait", "receive")),
]
OUT = ["--commit", "abc", "--out"]
BACKWARD = [
    *(f"combine {step}" for step in ("send", "wait", "receive")),
    "products products",
    *(f"dispatch {step}" for step in ("send", "write", "wait", "receive", "read")),
]


def test_the_command_records_the_steps_of_both_passes_in_order_on_each_rank(tmp_path, monkeypatch):
    out = tmp_path / "a-expert-parallel-timeline.jsonl"
    command = ["--timeline", "--backend", processes.default_backend, "--shapes", "trial", "--tokens", "257"]
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


def test_the_command_times_layers_without_and_with_exchanges_in_flight(tmp_path, monkeypatch):
    out = tmp_path / "a-expert-parallel-overlap.jsonl"
    command = ["--overlap", "--transports", "peer", "--backend", processes.default_backend, "--shapes", "trial"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *command, "--tokens", "514", "--samples", "1", *OUT, str(out)])
    monkeypatch.setattr(processes, "TIMEOUT_S", processes.TIMEOUT_S)  # which the command sets
    monkeypatch.setenv("MALLOC_PERTURB_", "0")
    main()
    _, *lines = map(json.loads, out.read_text().splitlines())
    assert [(line["case"], line["in_flight"]) for line in lines] == [
        (case, in_flight) for case in CASES for in_flight in (False, True)
    ]
    exchanges = {"shared expert": (1, 1), "two micro-batches": (4, 4), "deferred wgrad": (1, 1)}
    products = {"shared expert": ["experts", "shared"], "two micro-batches": ["experts"], "deferred wgrad": ["experts"]}
    for line in lines:
        for passing, number in zip(("forward", "backward"), exchanges[line["case"]], strict=True):
            own = [each for each in line["steps"] if each["pass"] == passing]
            in_flight = [each for each in own if each["stream"] == "side"]
            assert len(in_flight) == (number if line["in_flight"] else 0)
            wgrad = ["wgrad"] if (line["case"], passing) == ("deferred wgrad", "backward") else []
            names = {each["step"] for each in own if each["stream"] == "compute"}
            assert names == {*products[line["case"]], *wgrad}
        assert all(0 <= each["begin_us"] <= each["end_us"] for each in line["steps"])
    assert len([row for row in overlap_section(out).splitlines() if row.startswith("| trial")]) == len(CASES)


def test_times_of_gpus_are_not_measured_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--backend", "gloo", "--out", "x", "--commit", "abc"])
    with pytest.raises(SystemExit):
        main()
    assert "--backend gloo needs --timeline, or --overlap" in capsys.readouterr().err
