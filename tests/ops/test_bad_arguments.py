# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Bad arguments and bad data: the exact error, raised when it should be and at no other time."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_moe_ops as ops
from paddle_moe_ops import _checks, functional, quantization, routing
from paddle_moe_ops.backends import Validation
from tests.ops.bad_arguments import BAD_ARGUMENTS, BAD_DATA, IDS, BadCall, good_call, zeros
from tests.ops.problems import tensor

VALIDATING = ("moe_permute", "moe_unpermute", "route")
FUNCTIONS = (*VALIDATING, "permute", "unpermute", "quantize_1x128", "dequantize_1x128", "quantized_experts")
ALL_BAD_DATA = [case for cases in BAD_DATA.values() for case in cases]


def call(function, changes, place):
    arguments = {**good_call(function), **changes}
    made = {name: value(place) if callable(value) else value for name, value in arguments.items()}
    return getattr(ops, function)(**made)


def assert_raises(case: BadCall, place, **more):
    with pytest.raises(case.error) as raised:
        call(case.function, {**case.changes, **more}, place)
    assert str(raised.value) == case.message
    assert raised.type is case.error


def names(cases):
    return [str(case) for case in cases]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_call_that_the_tables_change_is_good(function, place, backend):
    assert call(function, {}, place) is not None


def test_no_two_faults_share_a_name():
    for cases in (BAD_ARGUMENTS, ALL_BAD_DATA):
        assert len(set(names(cases))) == len(cases)


@pytest.mark.parametrize("case", BAD_ARGUMENTS, ids=str)
def test_bad_arguments_raise_before_any_operator_is_called(case, place, monkeypatch):
    for module in (functional, quantization, routing):
        monkeypatch.setattr(module, "resolve", lambda name: pytest.fail(f"{name} was about to run"))
    assert_raises(case, place)
    if case.function in VALIDATING and "validate" not in case.changes:
        assert_raises(case, place, validate=False)


@pytest.mark.parametrize("case", BAD_DATA["data"] + BAD_DATA["order"], ids=str)
def test_bad_data_raise_under_validation_which_is_the_default_on_a_cpu(case, place, backend):
    assert_raises(case, place, validate=True)
    if place.is_cpu_place():
        assert_raises(case, place)


def test_validation_is_off_by_default_on_a_gpu():
    def where(is_cpu):
        return SimpleNamespace(place=SimpleNamespace(is_cpu_place=lambda: is_cpu))

    assert _checks.validation("f", None, where(False)) is Validation.OFF
    assert _checks.validation("f", None, where(True)) is Validation.DATA


@pytest.mark.parametrize("case", BAD_DATA["data"], ids=str)
def test_bad_data_pass_without_validation(case, place, backend):
    assert call(case.function, {**case.changes, "validate": False}, place) is not None


@pytest.mark.parametrize("case", BAD_DATA["counts"], ids=str)
@pytest.mark.parametrize("validate", [None, False, True])
def test_wrong_counts_always_raise_on_a_cpu_and_under_validation_on_a_gpu(validate, case, place, backend):
    if place.is_cpu_place() or validate or backend == "reference":
        assert_raises(case, place, validate=validate)
    else:
        assert call(case.function, {**case.changes, "validate": validate}, place) is not None


@pytest.mark.parametrize("case", BAD_DATA["overflow"], ids=str)
def test_dropped_slots_raise_only_under_full_validation(case, place, backend):
    assert_raises(case, place, validate=True)
    for validate in (None, False):
        assert call(case.function, {**case.changes, "validate": validate}, place) is not None


def test_a_buffer_that_lacks_only_padding_is_no_overflow(place, backend):
    """Five rows hold every slot: the sixth row is padding."""
    assert call("route", {"buffer_size": 5, "validate": True}, place).overflow.tolist() == 0


@pytest.mark.parametrize("case", BAD_DATA["data"] + BAD_DATA["overflow"], ids=str)
def test_the_variable_stands_in_for_an_argument_that_is_not_given(case, place, backend, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    assert_raises(case, place)
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    assert call(case.function, case.changes, place) is not None


@pytest.mark.parametrize("case", BAD_DATA["overflow"], ids=str)
def test_the_argument_goes_before_the_variable(case, place, backend, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    assert_raises(case, place, validate=True)
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    assert call(case.function, {**case.changes, "validate": False}, place) is not None


@pytest.mark.parametrize("function", VALIDATING)
@pytest.mark.parametrize("value", ["2", "yes", "true"])
def test_a_bad_value_of_the_variable_raises(value, function, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", value)
    with pytest.raises(ValueError, match=f"^PADDLE_MOE_OPS_VALIDATE must be 0 or 1, but got '{value}'$"):
        call(function, {}, place)


def test_repeated_ids_are_good_where_each_gets_a_row(place, backend):
    plan = call("route", {"routing": lambda place: tensor(IDS * 0, place), "duplicates": "each"}, place)
    assert plan.routed_per_expert.tolist() == [8, 0, 0]


def test_nan_in_slots_without_an_expert_is_no_error(place, backend):
    probs = np.where(IDS < 0, np.float32(np.nan), np.float32(1))
    plan = call("route", {"probs": lambda place: tensor(probs, place), "validate": True}, place)
    assert not np.isnan(plan.row_probs.numpy()).any()


def test_two_to_the_31_rows_are_refused_without_being_allocated(place):
    for function in ("moe_permute", "route"):
        expected = f"^{function}: padding_alignment must give a buffer of fewer than 2\\^31 rows, but {2**30} gives "
        with pytest.raises(ValueError, match=expected):
            call(function, {"padding_alignment": 2**30}, place)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("moe_permute", "hidden_states"),
        ("route", "routing"),
        ("permute", "x"),
        ("unpermute", "y"),
        ("quantize_1x128", "x"),
    ],
)
def test_distributed_tensors_are_refused(function, argument, place):
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    value = good_call(function)[argument]
    with pytest.raises(TypeError) as raised:
        call(function, {argument: lambda place: dist.shard_tensor(value(place), mesh, [dist.Replicate()])}, place)
    assert str(raised.value) == (
        f"{function}: {argument} must be a dense tensor, "
        "but got a distributed tensor (auto parallel), which is not supported"
    )


def test_tensors_on_two_devices_are_refused():
    on_cpu, on_gpu = (SimpleNamespace(place=place) for place in ("Place(cpu)", "Place(gpu:0)"))
    text = "f: probs must be on the device of x, Place(cpu), but got Place(gpu:0)"
    nowhere = SimpleNamespace(place=paddle.base.core.Place())  # of an empty tensor that recompute unpacked
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        _checks.same_place("f", x=on_cpu, scale=None, ids=nowhere, probs=on_gpu)
    _checks.same_place("f", x=on_cpu, scale=None, ids=nowhere, probs=on_cpu)


@pytest.mark.parametrize(
    ("function", "argument", "reference_argument"),
    [
        ("moe_permute", "expert_prob_topk", "hidden_states"),
        ("moe_unpermute", "zipped_expertwise_rowmap", "hidden_states_unzipped"),
        ("route", "probs", "routing"),
    ],
)
def test_real_tensors_on_two_devices_are_refused(function, argument, reference_argument, place):
    """On a CPU there is no second device: the call then passes, and the rule is tested above."""
    value = good_call(function)[argument]
    changes = {argument: lambda place: value(paddle.CPUPlace())}
    if place.is_cpu_place():
        assert call(function, changes, place) is not None
        return
    text = f"{function}: {argument} must be on the device of {reference_argument}, {place}, but got Place(cpu)"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call(function, changes, place)


def test_numpy_integers_and_integer_tensors_serve_as_ints(place, backend):
    for number in (np.int32(3), np.int64(3), paddle.to_tensor(3, place=place)):
        plan = call("route", {"num_experts": number}, place)
        assert plan.num_experts == 3
        assert type(plan.num_experts) is int


def test_a_missing_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'plan'"):
        ops.permute(zeros(4, 6)(paddle.CPUPlace()))


def test_our_own_arguments_are_taken_by_name_only(place):
    arguments = [value(place) if callable(value) else value for value in good_call("moe_permute").values()]
    with pytest.raises(TypeError, match="positional argument"):
        ops.moe_permute(*arguments, True, False, False, -1, None, "all")


def test_an_error_leaves_the_operator_usable(place, backend):
    for case in itertools.islice(BAD_DATA["data"], 3):
        assert_raises(case, place, validate=True)
    assert call("moe_permute", {}, place)[0].shape == [6, 6]


@pytest.mark.cpu_only  # Paddle makes no sparse tensors on a custom device: the process ends
@pytest.mark.parametrize("form", ["coo", "csr"])
def test_a_sparse_tensor_is_refused_by_the_name_of_its_argument(form):
    rows = paddle.ones([3, 4])
    sparse = rows.to_sparse_coo(2) if form == "coo" else rows.to_sparse_csr()
    plan = ops.route(paddle.to_tensor([[0, 1]] * 3, dtype="int32"), num_experts=2)
    for name, argument, call in (
        ("permute", "x", lambda: ops.permute(sparse, plan)),
        ("unpermute", "y", lambda: ops.unpermute(sparse, plan)),
        ("route", "routing", lambda: ops.route(sparse, num_experts=2)),
        ("calculate_topk", "gating", lambda: routing.calculate_topk(sparse, 1, False, True)),
    ):
        text = f"{name}: {argument} must be a dense tensor, but got a sparse tensor, which is not supported"
        with pytest.raises(TypeError, match=re.escape(text)):
            call()
