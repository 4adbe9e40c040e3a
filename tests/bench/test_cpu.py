# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU benchmarks: results of every implementation, and the files that a run writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.kernels import cli, cpu
from benchmarks.kernels.cpu_arrays import ArrayInputs, empty
from benchmarks.kernels.device import Unsupported
from benchmarks.kernels.inputs import pieces
from benchmarks.kernels.operators import OPERATIONS
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.results import load_run
from benchmarks.kernels.shapes import Case, Operation, Shape
from paddle_moe_ops import _report, reference

from ..core.conftest import LIBRARY

# Memory of the host, and the core's library for it.
pytestmark = pytest.mark.cpu_only

SHAPE = Shape("check", 300, 4, 9, 264)
CASES = [
    Case(SHAPE, routing, alignment, fill)
    for routing in ("uniform", "half_unassigned")
    for alignment, fill in ((1, True), (8, True), (8, False))
]


BY_OPERATION = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)


@pytest.fixture(scope="module")
def all_inputs():
    return {f"{case.routing}-{case.label}": ArrayInputs(make_problem(case)) for case in CASES}


@pytest.fixture(params=[f"{case.routing}-{case.label}" for case in CASES])
def inputs(request, all_inputs):
    return all_inputs[request.param]


@pytest.fixture(scope="module")
def device():
    return cpu.CpuDevice(LIBRARY)


def checked(device, implementation, operation, inputs):
    body = implementation.prepare(operation, inputs)
    return device.check(operation, inputs, device.capture(body, "cpu"), body)


@BY_OPERATION
def test_every_implementation_passes_its_check(device, all_inputs, operation):
    offered = [implementation for implementation in device.implementations if implementation.offers(operation)]
    assert {"core", "public function"} <= {implementation.name for implementation in offered}
    for case, inputs in all_inputs.items():
        for implementation in offered:
            try:
                assert checked(device, implementation, operation, inputs) is None, f"{implementation.name}: {case}"
            except Unsupported:
                assert implementation.name not in ("core", "public function", "memcpy"), case


@BY_OPERATION
def test_a_call_that_leaves_its_outputs_as_they_were_fails_its_check(device, all_inputs, operation):
    core = next(each for each in device.implementations if each.name == "core")
    for case, inputs in all_inputs.items():
        body = core.prepare(operation, inputs)
        outputs = body.run()
        captured = device.capture(body._replace(run=lambda outputs=outputs: outputs), "cpu")
        assert device.check(operation, inputs, captured, body) is not None, case


def test_sums_and_magnitudes_are_the_oracle_s(inputs):
    plan = inputs.problem.plan
    expected = reference.unpermute(inputs.rows, plan, inputs.row_probs)
    exact, magnitude = inputs.sums(weighted=True)
    np.testing.assert_array_equal(exact.view(np.uint16), expected.view(np.uint16))
    terms = np.abs(inputs.rows.astype(np.float64)) * np.abs(inputs.row_probs[:, None])
    terms[plan.row_to_token < 0] = 0
    by_token = np.zeros(exact.shape)
    np.add.at(by_token, np.maximum(plan.row_to_token, 0), terms)
    np.testing.assert_allclose(magnitude, by_token, rtol=1e-6)


def test_no_two_rows_of_an_input_are_alike():
    rows = ArrayInputs(make_problem(Case(Shape("wide", 4000, 1, 4, 1000), "uniform"))).x
    assert len(np.unique(rows.view(np.uint16), axis=0)) == len(rows)


def test_names_of_python_are_no_arrays_of_a_problem(all_inputs):
    unfinished = object.__new__(ArrayInputs)
    assert not hasattr(unfinished, "problem")
    for name in ("_private", "__deepcopy__"):
        with pytest.raises(AttributeError, match=f"^{name}$"):
            getattr(next(iter(all_inputs.values())), name)


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_arrays_begin_at_a_page(size):
    arrays = [empty((size, 3), np.float16) for _ in range(4)]
    assert all(array.ctypes.data % 4096 == 0 for array in arrays)
    assert all((array.shape, array.dtype) == ((size, 3), np.float16) for array in arrays)


@pytest.mark.parametrize(
    ("count", "width", "elements", "rows"),
    [(7, 3, 10, [3, 3, 1]), (2, 20, 10, [1, 1]), (0, 3, 10, []), (3, 0, 2, [2, 1])],
)
def test_pieces_have_about_so_many_elements(count, width, elements, rows):
    found = pieces(count, width, elements)
    assert [part.stop - part.start for part in found] == rows
    assert [index for part in found for index in range(count)[part]] == list(range(count))


def test_the_largest_cache_is_some_kilobytes_at_least(device):
    assert device.cache_bytes >= 1 << 14


def test_threads_are_those_that_the_user_asks_for(device, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_NUM_THREADS", "3")
    try:
        assert cpu.CpuDevice(LIBRARY).threads == 3
    finally:
        device.core.set_num_threads(device.threads)


def test_a_problem_that_does_not_fit_into_memory_is_skipped(device, inputs, monkeypatch):
    monkeypatch.setattr(_report, "available_memory", lambda: 1000)
    with pytest.raises(Unsupported, match="GB of memory"):
        device.implementations[0].prepare(OPERATIONS[0], inputs)


def test_new_outputs_are_given_back_before_the_next_call(device):
    operation = Operation("permute", "bf16")
    (public,) = [each for each in device.implementations if each.name == "public function"]
    body = public.prepare(operation, ArrayInputs(make_problem(CASES[0])))
    captured = device.capture(body, "cpu")
    assert len(device.sample(captured, 3, cold=False)) == 3
    captured.launch()
    assert captured.outputs()["rows"] is not captured.outputs()["rows"], "the first is gone, the second is new"


def test_a_slow_call_is_sampled_once_a_turn(device, monkeypatch):
    monkeypatch.setattr(cpu, "_SECONDS_PER_TURN", 0.0)
    body = device.implementations[0].prepare(OPERATIONS[0], ArrayInputs(make_problem(CASES[0])))
    assert len(device.sample(device.capture(body, "cpu"), 5, cold=True)) == 1


def test_a_run_of_the_command_holds_speeds_and_rows(tmp_path, capsys):
    path = tmp_path / "cpu.jsonl"
    arguments = ["--device", "cpu", "--shapes", "40,3,7,16", "--ops", "unpermute:plain", "--core-library", str(LIBRARY)]
    assert cli.main([*arguments, "--samples", "4", "--rounds", "2", "--out", str(path)]) == 0
    run = load_run(path)
    assert run.machine["copy_gbps"] > 0
    assert run.machine["read_gbps"] > 0
    assert run.machine["threads"] >= 1
    rows = {row.impl: row for row in run.rows}
    assert {"core", "memcpy", "public function", "paddle ops"} <= set(rows)
    assert all(row.us > 0 and row.plain for row in rows.values())
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["device"] == "cpu"
    assert "unpermute:plain" in capsys.readouterr().out


def test_a_missing_library_is_named(tmp_path, capsys):
    assert cli.main(["--device", "cpu", "--core-library", str(tmp_path / "none.so")]) == 2
    assert "--core-library must be libpmo_core.so" in capsys.readouterr().err
