# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The check on the CPU refuses one wrong element of any output, wherever it is, and no time is taken then."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels import cpu
from benchmarks.kernels.cpu_arrays import ArrayInputs
from benchmarks.kernels.cpu_check import ArrayCheck
from benchmarks.kernels.device import BFLOAT16_SUMS, BITS, FLOAT32_SUMS, Body
from benchmarks.kernels.operators import OPERATIONS, difference
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.run import Runner, Settings
from benchmarks.kernels.shapes import Case, Operation, Shape
from paddle_moe_ops.testing.tolerances import dot_chain, dtype_tols, score_tols

from ..core.conftest import LIBRARY
from .fake_device import CheckingDevice, places, spoilt

# Memory of the host, and the core's library for it.
pytestmark = pytest.mark.cpu_only

BY_OPERATION = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)
# Segments of padding, tokens without rows, rows that fill no multiple of four; a buffer of more rows than columns.
PADDED = Case(Shape("check", 61, 4, 9, 264), "half_unassigned", alignment=7)
CASES = {"padded": PADDED, "dense": Case(Shape("narrow", 61, 4, 9, 8), "uniform")}
TOLERANT = ("d_weights", "router_weights")


@pytest.fixture(scope="module")
def device():
    return cpu.CpuDevice(LIBRARY)


@pytest.fixture(scope="module")
def core(device):
    (core,) = [each for each in device.implementations if each.name == "core"]
    return core


@pytest.fixture(scope="module")
def all_inputs():
    return {name: ArrayInputs(make_problem(case)) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def inputs(request, all_inputs):
    return all_inputs[request.param]


@pytest.fixture
def padded(all_inputs):
    return all_inputs["padded"]


def change(array, place):
    """Another number there: the next one, or where numbers have a tolerance one that is a hundredth further."""
    bits = array.view(f"u{array.itemsize}")
    bits[place] ^= 1


def move(array, place):
    array[place] += np.float32(0.01) * np.abs(array[place]) + np.float32(1e-6)


def make_nan(array, place):
    array[place] = np.nan


@BY_OPERATION
def test_one_wrong_element_of_any_output_keeps_a_time_out_of_the_file(device, core, all_inputs, operation):
    for inputs in all_inputs.values():
        check_one_wrong_element(device, core, inputs, operation)


def check_one_wrong_element(device, core, inputs, operation):
    planted = [spoilt(core, "right", next(iter(core.prepare(operation, inputs).run())), lambda array: None)]
    for name, array in core.prepare(operation, inputs).run().items():
        numbers = array.dtype.kind not in "iu"
        wrongs = [move if name in TOLERANT else change] + ([make_nan] if numbers else [])
        for where, place in places(array.shape, inputs.problem.plan).items():
            for wrong in wrongs:
                spoil = lambda array, wrong=wrong, place=place: wrong(array, place)  # noqa: E731
                planted.append(spoilt(core, f"{name} {where} {wrong.__name__}", name, spoil))
    fake = CheckingDevice(device, planted)
    runner = Runner(fake, planted, Settings(modes=("cpu",), rounds=1, samples=1, probes=False, published=False), 1.0)
    rows = {row.impl: row for row in runner.measure([inputs.problem.case], [operation], lambda row: None)}
    assert rows["right"].check == BITS
    assert rows.pop("right").us == 10.0
    assert len(fake.sampled) == 1
    assert len(rows) == len(planted) - 1
    for planted_name, row in rows.items():
        name = planted_name.split()[0]
        failed = row.check.startswith((f"failed: {name}: ", f"failed: {name} after the last row: "))
        assert failed, f"{planted_name} of {inputs.problem.case.label}: {row.check}"
        assert row.us is None


@BY_OPERATION
def test_outputs_of_another_type_or_shape_or_none_are_refused(core, padded, operation):
    outputs = core.prepare(operation, padded).run()
    assert difference(operation, ArrayCheck(padded, BITS), {}) == "there are no outputs to check"
    for name, array in outputs.items():
        other = np.float64 if array.dtype.kind not in "iu" else np.uint32
        wrongs = [array.astype(other), array[..., None]]
        if array.ndim:
            wider = np.concatenate([array, np.zeros_like(array[..., :1])], axis=-1)
            wrongs += [array[:-1], np.concatenate([array, array[-1:]]), wider]
        for wrong in wrongs:
            found = difference(operation, ArrayCheck(padded, BITS), {**outputs, name: wrong})
            assert found is not None, name
            assert found.startswith(f"{name}: "), found
            assert " instead of " in found


@BY_OPERATION
def test_a_difference_says_what_and_where_it_is(core, padded, operation, monkeypatch):
    """The arrays are compared in many pieces."""
    monkeypatch.setattr(ArrayCheck, "chunk_elements", 4 * PADDED.shape.hidden)
    outputs = core.prepare(operation, padded).run()
    assert difference(operation, ArrayCheck(padded, BITS), outputs) is None
    for name, array in outputs.items():
        for place in places(array.shape, padded.problem.plan).values():
            due = array[place].item()
            array[place] = wrong = 2 if due == 1 else 1
            found = difference(operation, ArrayCheck(padded, BITS), outputs)
            array[place] = due
            by_column = operation.variant == "col" and name == "scales"
            where = list(place[::-1] if by_column else place)
            if by_column and where[0] >= padded.problem.plan.num_rows:
                continue
            assert f" at {where}, " in found
            if name in TOLERANT:
                assert found.startswith(f"{name}: {wrong:.1f} instead of ")
            else:
                given = str(wrong) if isinstance(due, int) else f"{wrong:.1f}"
                assert found.startswith(f"{name}: {given} instead of {due!r} at ")


@BY_OPERATION
def test_what_every_implementation_gives_must_be_there(core, padded, operation):
    outputs = core.prepare(operation, padded).run()
    extra = {"slot_probs", "source_to_dest", "rowmap", *padded.problem.plan._fields}
    for name in outputs:
        others = {key: outputs[key] for key in outputs if key != name} | {"row_probs": padded.row_probs}
        found = difference(operation, ArrayCheck(padded, BITS), others)
        assert found == (None if name in extra else f"there is no {name} to check")
    due = [name for name in outputs if name not in extra]
    if due:
        found = difference(operation, ArrayCheck(padded, BITS), {"row_probs": padded.row_probs})
        assert found == f"there is no {' and no '.join(due)} to check"


@pytest.mark.parametrize("key", ["permute:fp8", "permute_quantized:row", "permute_quantized:col"])
def test_what_padding_holds_is_neither_written_nor_looked_at_where_it_is_not_filled(core, key):
    inputs, operation = ArrayInputs(make_problem(PADDED._replace(fill=False))), Operation(*key.split(":"))
    padding = np.flatnonzero(inputs.problem.plan.row_to_token < 0)
    body = core.prepare(operation, inputs)
    outputs = body.run()
    for name, array in outputs.items():
        by_column = name == "scales" and operation.variant == "col"
        rows = array.T if by_column else array
        rows[padding] = 1
        if by_column:
            array[:, inputs.problem.plan.num_rows :] = 1
        assert difference(operation, ArrayCheck(inputs, BITS), outputs) is None, name
        kept = rows[padding[0] - 1].copy()
        rows[padding[0] - 1] = 1
        assert difference(operation, ArrayCheck(inputs, BITS), outputs).startswith(f"{name}: ")
        rows[padding[0] - 1] = kept
        body.run()
        assert (rows[padding] == 1).all(), name


def test_a_copy_is_of_ones(device, padded):
    for wrong in (0, 1, 2):
        body = Body(lambda wrong=wrong: {"copy": np.array([1] * 8 + [wrong], np.uint8)})
        found = device.check(OPERATIONS[1], padded, device.capture(body, "cpu"), body)
        due = None if wrong == 1 else f"copy: {wrong} instead of 1 at [8], one of 1 that differ"
        assert found == due


def test_sums_in_another_order_may_differ_by_their_tolerance_only(inputs):
    operation = Operation("unpermute", "plain")
    exact, magnitude = inputs.sums(weighted=False)
    assert magnitude.max() > 0
    near = np.nextafter(exact, exact.dtype.type(np.inf))
    assert difference(operation, ArrayCheck(inputs, BITS), {"out": near}).startswith("out: ")
    assert difference(operation, ArrayCheck(inputs, FLOAT32_SUMS), {"out": near}) is None
    far = (exact.astype(np.float32) + magnitude * 0.2).astype(exact.dtype)
    for exactness in (FLOAT32_SUMS, BFLOAT16_SUMS):
        assert "times the allowed error" in difference(operation, ArrayCheck(inputs, exactness), {"out": far})


@pytest.mark.parametrize("exactness", [FLOAT32_SUMS, BFLOAT16_SUMS])
def test_sums_with_a_tolerance_hold_no_nan(inputs, exactness):
    out = inputs.sums(weighted=False)[0].copy()
    out[-1, -1] = np.nan
    found = difference(Operation("unpermute", "plain"), ArrayCheck(inputs, exactness), {"out": out})
    assert found.startswith("out: ")
    assert "nan" in found


def test_sums_that_are_rounded_after_every_addition_may_differ_by_more(padded):
    exact, magnitude = padded.sums(weighted=False)
    place = np.unravel_index(magnitude.argmax(), magnitude.shape)
    for parts, passed in ((0.9, True), (1.3, False)):
        out = exact.copy()
        out[place] = exact[place] + magnitude[place] * parts * 2 * (PADDED.shape.topk + 1) * 2.0**-8
        found = difference(Operation("unpermute", "plain"), ArrayCheck(padded, BFLOAT16_SUMS), {"out": out})
        assert (found is None) == passed
        assert difference(Operation("unpermute", "plain"), ArrayCheck(padded, FLOAT32_SUMS), {"out": out}) is not None


def test_numbers_with_a_tolerance_may_differ_by_it_and_no_more(core, padded):
    plan = padded.problem.plan
    terms = padded.d_out[np.maximum(plan.row_to_token, 0)].astype(np.float64) * padded.rows.astype(np.float64)
    terms[plan.row_to_token < 0] = 0
    allowed = {
        "d_weights": dtype_tols(np.float32, dot_chain(PADDED.shape.hidden)).of_magnitude * np.abs(terms).sum(1),
        "router_weights": score_tols(np.float32, PADDED.shape.num_experts).of_magnitude * padded.problem.chosen[0],
    }
    for key, name in (("unpermute_backward:dprob", "d_weights"), ("topk:softmax", "router_weights")):
        operation = Operation(*key.split(":"))
        outputs = core.prepare(operation, padded).run()
        place = np.unravel_index(allowed[name].argmax(), allowed[name].shape)
        right = outputs[name][place]
        for parts, passed in ((0.5, True), (2.0, False), (-2.0, False)):
            outputs[name][place] = right + parts * allowed[name][place]
            found = difference(operation, ArrayCheck(padded, BITS), outputs)
            assert (found is None) == passed, (name, parts, found)
