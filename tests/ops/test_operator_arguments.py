# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the compiled operators themselves, called without the checks in Python.

Every requirement of csrc/paddle is broken once, in each operator that states it. Requirements of gradients are in
test_gradient_shapes.py; that all tensors are on one device is tested where there are two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import paddle_moe_ops
from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.bad_arguments import zeros
from tests.ops.bad_operator_calls import BAD_CALLS, NO_TENSOR, NOT_MOVED, wrong_shape
from tests.ops.operator_calls import GOOD_CALLS, MAPS, E, H, S, T, by_position
from tests.ops.problems import tensor
from tests.static.operators import operator_names

pytestmark = pytest.mark.compiled_only

SOURCES = Path(paddle_moe_ops.__file__).parent / "csrc" / "paddle"


def arguments_of(operator: str, place: Any, changes: dict[str, Any]) -> list[Any]:
    good = GOOD_CALLS[operator]
    assert changes.keys() <= good.keys()
    return by_position(
        operator, {name: value(place) if callable(value) else value for name, value in {**good, **changes}.items()}
    )


def public_name(operator: str) -> str:
    name = re.sub("(_weighted)?(_backward)?(_with_probs)?$", "", operator)
    names = {"permute_quantized": "permute", "grouped_product": "grouped_gemm", "moe_mlp_float8": "moe_mlp"}
    names |= dict.fromkeys(("moe_mlp_quantized", "dequantize_matrices"), "moe_mlp")
    return names.get(name, name)


@pytest.fixture(params=["direct", "paddle"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls an operator directly, or through Paddle."""
    register_operators()
    if request.param == "direct":
        return lambda operator, *arguments: compiled._direct[operator](*arguments)
    return lambda operator, *arguments: paddle._C_ops._run_custom_op(f"pmo_{operator}", *arguments)


def test_every_operator_is_called():
    assert sorted(f"pmo_{name}" for name in GOOD_CALLS) == operator_names()
    assert {fault.operator for fault in BAD_CALLS} == {*GOOD_CALLS}


@pytest.mark.parametrize("operator", GOOD_CALLS)
def test_a_good_call_is_taken(operator, call, place):
    assert call(operator, *arguments_of(operator, place, {}))


@pytest.mark.parametrize("operator", GOOD_CALLS)
def test_a_bad_call_raises_a_value_error_that_says_what_is_wrong(operator, call, place):
    for fault in (each for each in BAD_CALLS if each.operator == operator):
        with pytest.raises(ValueError, match=r": ") as caught:
            call(operator, *arguments_of(operator, place, fault.changes))
        assert str(caught.value) == f"{public_name(operator)}: {fault.message}", str(fault)


@pytest.mark.parametrize("layout", ["every second column", "turned", "no tokens"])
@pytest.mark.parametrize("operator", [name for name, call in GOOD_CALLS.items() if MAPS.keys() & call.keys()])
def test_maps_may_be_strided(operator, layout, call, place):
    """Also tensors without elements, whose strides fit another shape."""
    changes = {}
    for name, value in GOOD_CALLS[operator].items():
        array = value(place).numpy() if callable(value) else None
        if name in MAPS:
            array = array[:0] if layout == "no tokens" else array
            made = turned(array, place) if layout == "turned" else tensor(np.repeat(array, 2, axis=1), place)[:, ::2]
            assert not made.is_contiguous()
            changes[name] = made
        elif layout == "no tokens" and array is not None and array.shape[0] == T:
            changes[name] = tensor(array[:0], place)
    dense = {name: value.contiguous() for name, value in changes.items()}
    both = (call(operator, *arguments_of(operator, place, each)) for each in (changes, dense))
    for got, expected in zip(*both, strict=True):
        if layout == "no tokens":  # the rows of a permute then hold nothing that the maps name
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        else:
            assert_bits_equal(to_numpy(got), to_numpy(expected))


def turned(array, place):
    """A matrix whose columns lie one after the other."""
    return tensor(np.ascontiguousarray(array.T), place).t()


@pytest.mark.parametrize("operator", GOOD_CALLS)
def test_a_tensor_that_is_missing_raises(operator, call, place):
    given = f"{public_name(operator)}: {NO_TENSOR}", "an argument is not what the operator takes"
    for name, value in GOOD_CALLS[operator].items():
        if callable(value):
            with pytest.raises(ValueError, match=r"\w") as caught:
                call(operator, *arguments_of(operator, place, {name: None}))
            assert str(caught.value) in given, name


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (zeros(S, H), wrong_shape("the matrices", "[any, any, any]", [S, H])),
        (zeros(E, S, H, dtype=np.float64), f"the matrices {NOT_MOVED}"),
        (zeros(E, S, H, dtype=np.int32), "dtype must be PMO_FLOAT32, PMO_FLOAT16 or PMO_BFLOAT16"),
    ],
)
def test_matrices_that_have_no_values_in_float8_raise(matrices, message, place):
    """The operator is called directly alone, so it is none of `BAD_CALLS`."""
    register_operators()
    with pytest.raises(ValueError, match=r"\w") as caught:
        compiled.direct("quantize_matrices", matrices(place), True, False)
    assert str(caught.value) == f"moe_mlp: {message}"


@pytest.mark.parametrize(
    ("operator", "first", "second", "expected"),
    [
        ("grouped_dgrad", zeros(S, H + 1), zeros(E, S, H), f"[any, {H}]"),
        ("grouped_wgrad", zeros(S, H), zeros(S + 1, H), f"[{S}, any]"),
    ],
)
def test_gradients_of_other_sizes_than_the_product_raise(operator, first, second, expected, place):
    """These operators are called directly alone, for products whose wgrad comes later."""
    register_operators()
    sizes = zeros(E, dtype=np.int32)(place)
    with pytest.raises(ValueError, match=r"\w") as caught:
        compiled.direct(operator, first(place), second(place), sizes, sizes, False, True)
    given = [S, H + 1] if operator == "grouped_dgrad" else [S + 1, H]
    assert str(caught.value) == f"grouped_gemm: {wrong_shape('the gradient of the product', expected, given)}"


VALUES, SAMPLES = zeros(E, 7), zeros(4)
NOT_THEIRS = "the samples must be those of the matrices"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: zeros(E, 7, dtype=np.int8)}, "the matrices must be contiguous, of 2 or 4 bytes for each element"),
        ({0: zeros(E, 7, dtype=np.float64)}, "the matrices must be contiguous, of 2 or 4 bytes for each element"),
        ({0: zeros(E, 6)}, NOT_THEIRS),
        ({1: 0}, NOT_THEIRS),
        ({1: 7}, NOT_THEIRS),
        ({2: zeros(0)}, NOT_THEIRS),
        ({2: zeros(5)}, NOT_THEIRS),
        ({2: zeros(4, dtype=np.float16)}, "the samples must be float32, but got float16"),
        ({3: zeros(1)}, "the word must be int32, but got float32"),
        ({3: zeros(0, dtype=np.int32)}, NOT_THEIRS),
        ({4: zeros(3, dtype=np.int32)}, "the scales must be float32, but got int32"),
    ],
)
def test_samples_of_other_matrices_are_refused(changes, message, place):
    """The operators are called directly alone: every 6th of 21 elements."""
    register_operators()
    good = {0: VALUES, 1: 6, 2: SAMPLES, 3: zeros(1, dtype=np.int32), 4: zeros(3)}
    made = [[each(place) if callable(each) else each for each in ({**good, **own}).values()] for own in ({}, changes)]
    compiled.direct("compare_samples", *made[0])
    with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(message)}$"):
        compiled.direct("compare_samples", *made[1])
    if changes.keys() <= {0, 1}:
        with pytest.raises(ValueError, match=f"^moe_mlp: {re.escape(message)}$"):
            compiled.direct("take_samples", made[1][0], 4, made[1][1])


# Requirements that have a test of their own, here or where there are two devices.
ELSEWHERE = {
    *("all tensors must be on one device", ": every tensor must be ", "the gradient of the product must be "),
    *(NO_TENSOR, "the matrices must be ", "the samples must be ", "the word must be "),
    # test_dygraph_operators.py, and a second device
    *("x[0] must be ", "sizes must be multiples of 128", "matrices must be alike", "counts must add up to the rows"),
    *("rows must have an even number of columns", "do2_s must be ", "matrices must be on one device"),
    *("a must be ", "b must be ", "a_decode_scale must be ", "b_decode_scale must be ", "sizes must be "),
    *("x_unzipped must be ", "x_unzipped must have a row for each token of idx_unzipped", "idx_unzipped must be "),
    *("the tokens of a tensor must be in [0, 2^31)", "x_zipped must be ", "x_zipped must be contiguous"),
    "x_zipped must have at most the tokens of a tensor",
}


OF_RANKS = "ranks_op.cc", "few_tokens_op.cc", "rank_buffers.cc"


def requirements(files: str = "*.cc") -> dict[str, str]:
    """Every requirement in the sources: a part of its message, with the line that states it."""
    found = {}
    for source in SOURCES.glob(files):
        # binding.cc and direct.cc have the functions; operators between ranks have a test of their own
        if files == "*.cc" and source.name in ("binding.cc", "direct.cc", *OF_RANKS):
            continue
        text = re.sub(r"\s+", " ", source.read_text("utf-8"))
        for statement in re.findall(r"(?:require|require_\w+|map_data|int32_data|index_kind|fail)\([^;]*;", text):
            literals = re.findall(r'"((?:[^"\\]|\\.)*)"', statement)
            if statement.startswith("require_gradient") or not literals:
                continue
            # what a text says, or whose shape or dtype must be what
            says = literals[0] if statement.startswith(("require(", "fail(")) else f"{literals[0]} must be "
            found[says.removeprefix(": ")] = statement
    return found


def test_every_requirement_of_the_sources_is_broken_by_some_call():
    messages = [fault.message for fault in BAD_CALLS]
    unbroken = {
        says: statement
        for says, statement in requirements().items()
        if says not in {each.removeprefix(": ") for each in ELSEWHERE}
        and not any(says in message for message in messages)
    }
    assert not unbroken
    assert len(requirements()) > 50
