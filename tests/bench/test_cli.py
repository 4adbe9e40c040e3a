# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The command: exit status, result file, errors."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernels import cli
from benchmarks.kernels.operators import OPERATIONS
from benchmarks.kernels.results import load_run
from tests.packaging.subprocesses import run_module

from .fake_device import FakeDevice, implementation

SMALL = ("--device", "cuda", "--shapes", "40,3,7,16", "--ops", "unpermute:plain")


@pytest.fixture
def bench(monkeypatch):
    """Runs the command on a device with these implementations."""

    def run(*arguments, implementations=None):
        chosen = [implementation("core")] if implementations is None else implementations
        monkeypatch.setattr(cli, "_open_device", lambda _: FakeDevice(chosen))
        return cli.main([*SMALL, *arguments])

    return run


def test_a_run_writes_the_machine_and_its_rows(bench, tmp_path, capsys):
    path = tmp_path / "new folder" / "run.jsonl"
    assert bench("--out", str(path), "--samples", "10") == 0
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    machine = json.loads(first)
    assert machine["machine"] is True
    assert machine["gpu"] == "Imagined GPU"
    assert machine["copy_gbps"] == 1000.0
    assert machine["command"].startswith("python -m benchmarks.kernels --device cuda --shapes 40,3,7,16")
    assert {"commit", "date", "python", "cpu", "set", "device"} <= set(machine)
    (row,) = load_run(path).rows
    assert (row.impl, row.us, row.samples) == ("core", 10.0, 10)
    printed = capsys.readouterr().out
    assert "left out: some library: it is not installed" in printed
    assert "unpermute:plain" in printed


def test_the_commit_can_be_given(bench, tmp_path):
    path = tmp_path / "run.jsonl"
    assert bench("--out", str(path), "--commit", "abc123") == 0
    machine = load_run(path).machine
    assert machine["commit"] == "abc123"
    assert machine["seconds"] >= 0


def test_a_wrong_result_makes_the_command_fail(bench, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    assert bench("--out", str(path), implementations=[implementation("core", error=1.0)]) == 1
    (row,) = load_run(path).rows
    assert row.us is None
    assert row.check == "failed: out: something else"
    assert "failed: out: something else" in capsys.readouterr().out


def test_implementations_are_chosen_by_pattern(bench, tmp_path):
    path = tmp_path / "run.jsonl"
    chosen = [implementation("core"), implementation("torch gather"), implementation("torch index_add")]
    assert bench("--impl", "torch*", "--out", str(path), implementations=chosen) == 0
    assert [row.impl for row in load_run(path).rows] == ["torch gather", "torch index_add"]


def test_list_measures_nothing(bench, capsys):
    assert bench("--list", implementations=[]) == 0
    assert "40,3,7,16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--impl", "jax"), "--impl must match some of core, but got 'jax'"),
        (("--mode", "slow"), "--mode must be one of graph, eager on cuda, but got 'slow'"),
        (("--samples", "0"), "--samples must be at least 1, but got 0"),
        (("--rounds", "0"), "--rounds must be at least 1, but got 0"),
        (("--set", "all"), "--set must be one of targets, quick, padding, matrix, but got 'all'"),
    ],
)
def test_bad_arguments_are_named(bench, capsys, arguments, text):
    assert bench(*arguments) == 2
    assert capsys.readouterr().err == f"bench: {text}\n"


def test_the_benchmark_is_a_module_of_the_checkout():
    done = run_module("benchmarks.kernels", "--device", "cuda", "--set", "targets", "--list")
    assert done.returncode == 0, done.stderr
    assert "paddle-production" in done.stdout


def test_cases_and_operations_are_listed_without_any_library():
    done = run_module("benchmarks.kernels", "--device", "cuda", "--list", missing=["torch", "paddle", "triton"])
    assert done.returncode == 0, done.stderr
    assert all(operation.key in done.stdout.splitlines() for operation in OPERATIONS)


@pytest.mark.parametrize("name", ["ncu", "sweeps.cpu_cores", "sweeps.cpu_small_calls"])
def test_programs_beside_the_benchmark_start(name):
    done = run_module(f"benchmarks.{name}", "--help")
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


def test_without_pytorch_the_gpu_side_says_what_is_missing():
    done = run_module("benchmarks.kernels", "--device", "cuda", missing=["torch"])
    assert done.returncode == 2
    assert "bench: --device cuda needs PyTorch" in done.stderr
    assert "Traceback" not in done.stderr
