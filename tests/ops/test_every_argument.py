# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public function is checked and named: its kind, its dtype, its sizes and its device."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import _checks, use_backend
from tests.ops.every_call import CALLS as OWN_CALLS
from tests.ops.every_call import Call
from tests.ops.fastdeploy_calls import FASTDEPLOY_CALLS
from tests.ops.problems import tensor
from tests.ops.test_detached_arguments import FAMILIES

CALLS = [*OWN_CALLS, *FASTDEPLOY_CALLS]
# Not checked, because they only complete a signature, or only compared: K of ids.
IGNORED = {"name", "max_token_num", "restore_shape", "estimate_total_token_nums", "hadamard_block_size"}
COMPARED = {("routing.route", "topk")}
# Arguments of the caller's own, and those whose kind only the functions inside tell.
OTHER_KINDS = {"plan", "expert_fn", "expert_vjp", "*tensors", "state", "moe_quant_type"}
# Whose sizes follow no other argument's, so that data say what is wrong with them, and their lowest rank.
ANY_RANK = {
    ("indexed.get_routing_indices", "selected_experts"): 1,
    ("indexed.permute", "X"): 2,
    ("indexed.unpermute", "X"): 2,
    ("gemm.grouped_gemm", "X"): 2,
    ("routing.calculate_topk", "gating"): 1,
    ("mlp.moe_mlp", "x"): 2,
    ("compat.fastdeploy.moe_expert_dispatch", "input"): 2,
    ("compat.fastdeploy.moe_expert_dispatch", "gating_output"): 2,
}
# May be on the host or on the device, since only the host reads it.
ON_ANY_DEVICE = {"m_sizes", "expert_offsets", "shard_id", "all_shards_tokens_per_expert"}


def arguments_of(call: Call, kinds: type) -> list[str]:
    """Names of a call's arguments of a kind that are checked."""
    return [
        name
        for name, value in call.arguments.items()
        if isinstance(value, kinds) and not (isinstance(value, bool) and kinds is not bool)
        if name not in IGNORED | OTHER_KINDS and (call.name, name) not in COMPARED
    ]


def with_arguments(kinds: type) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", [call for call in CALLS if arguments_of(call, kinds)], ids=str)


def raises(error, call: Call, argument: str):
    return pytest.raises(error, match=f"^{re.escape(call.function)}: {re.escape(argument)} must be ")


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_calls_are_good_and_give_every_argument(call, place):
    assert call.run(place) is not None
    family, _, name = call.name.rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(f"paddle_moe_ops.{family}"), name))
    given = {name.lstrip("*") for name in call.arguments}
    # The old name of another argument, and arguments that replace others.
    assert set(signature.parameters) - given <= {"probs", "plan"}


def test_no_public_function_is_left_out():
    functions = set()
    for family in (*FAMILIES, "compat.fastdeploy"):
        module = importlib.import_module(f"paddle_moe_ops.{family}")
        own = (name for name in module.__all__ if inspect.isfunction(getattr(module, name)))
        functions |= {f"{family}.{name}" for name in own}
    assert functions - {str(call) for call in CALLS} == {
        *("indexed.calculate_topk", "indexed.torch_grouped_gemm"),
        *(f"compat.fastdeploy.{name}" for name in ("patch_fastdeploy", "patched_fastdeploy", "unpatch_fastdeploy")),
    }


@with_arguments(np.ndarray)
def test_what_is_no_tensor_is_refused(call, place):
    for argument in arguments_of(call, np.ndarray):
        with raises(TypeError, call, argument):
            call.run(place, **{argument: "x"})


@with_arguments(np.ndarray)
def test_another_dtype_is_refused(call, place):
    for argument in arguments_of(call, np.ndarray):
        value = call.arguments[argument]
        with raises(TypeError, call, argument):
            call.run(place, **{argument: tensor(value.astype(np.float64), place).astype("complex64")})


@with_arguments(np.ndarray)
def test_other_dimensions_are_refused(call, place):
    for argument in arguments_of(call, np.ndarray):
        value = call.arguments[argument]
        if (call.name, argument) in ANY_RANK:
            wrong = np.asarray(value[(0,) * (value.ndim - ANY_RANK[call.name, argument] + 1)])
        else:
            wrong = value[None, None]
        with raises(ValueError, call, argument):
            call.run(place, **{argument: wrong})


@with_arguments(np.ndarray)
def test_sizes_that_contradict_the_other_arguments_are_refused(call, place):
    for argument in arguments_of(call, np.ndarray):
        value = call.arguments[argument]
        for axis in range(value.ndim):
            larger = np.concatenate([value, value.take([0], axis)], axis)
            if (argument, axis) in call.free:
                call.run(place, **{argument: larger})
            else:
                looked_at = {"validate": True} if "validate" in call.arguments else {}
                with pytest.raises(ValueError, match=f"^{call.function}: "):
                    call.run(place, **{argument: larger, **looked_at})


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_tensor_is_compared_with_the_device_of_the_others(call, place, monkeypatch):
    """The comparison is by tensor, since inner functions have other names for it."""
    seen, same_place = [], _checks.same_place

    def record(function, **tensors):
        seen.extend(each.data_ptr() for each in tensors.values() if isinstance(each, paddle.Tensor))
        return same_place(function, **tensors)

    monkeypatch.setattr(_checks, "same_place", record)
    given = {name: tensor(call.arguments[name], place) for name in call.tensors}
    with use_backend("compiled"):  # otherwise quick calls check first, in C++
        call.run(place, **given)
    compared = {name for name, value in given.items() if value.data_ptr() in seen}
    alone = len(call.tensors) == 1 and "plan" not in call.arguments
    assert compared == (set() if alone and not compared else set(given) - (set(given) & ON_ANY_DEVICE))


def test_a_layer_compares_the_devices_of_all_its_tensors_itself(place, monkeypatch):
    """On some devices it is one operator, which calls no functions that would."""
    names = {}
    monkeypatch.setattr(_checks, "same_place", lambda function, **tensors: names.setdefault(function, set(tensors)))
    call = next(call for call in CALLS if call.name == "mlp.moe_mlp")
    call.run(place)
    assert set(call.tensors) <= names["moe_mlp"]


@with_arguments(bool)
def test_what_is_no_bool_is_refused(call, place):
    for argument in arguments_of(call, bool):
        with raises(TypeError, call, argument):
            call.run(place, **{argument: 1})


@with_arguments(int)
def test_what_is_no_integer_is_refused(call, place):
    for argument in arguments_of(call, int):
        for wrong in ("x", 2.0, True):
            with raises(TypeError, call, argument):
                call.run(place, **{argument: wrong})
        with raises(ValueError, call, argument):
            call.run(place, **{argument: -2})
        with raises(ValueError, call, argument):
            call.run(place, **{argument: 2**31})


@with_arguments(float)
def test_what_is_no_number_is_refused(call, place):
    for argument in arguments_of(call, float):
        for wrong in ("x", True, None):
            with raises(TypeError, call, argument):
                call.run(place, **{argument: wrong})
        with raises(ValueError, call, argument):
            call.run(place, **{argument: float("nan")})


@with_arguments(str)
def test_another_choice_is_refused(call, place):
    for argument in arguments_of(call, str):
        with pytest.raises((TypeError, ValueError), match=f"^{call.function}: {argument} must be one of "):
            call.run(place, **{argument: "another"})


@pytest.mark.parametrize("call", [call for call in CALLS if "validate" in call.arguments], ids=str)
def test_validate_is_true_false_or_none(call, place):
    text = f"^{call.function}: validate must be True, False or None, but got 1 of type int$"
    with pytest.raises(TypeError, match=text):
        call.run(place, validate=1)
    for level in (True, False):
        assert call.run(place, validate=level) is not None
