# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor facts that every call needs: from the compiled library, and from Python without it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import paddle
import pytest

from paddle_moe_ops._native import Native, native
from paddle_moe_ops.backends import register_operators

pytestmark = [pytest.mark.cpu_only, pytest.mark.compiled_only]

register_operators()
BY_KIND = pytest.mark.parametrize("functions", [native, Native()], ids=["library", "python"])

FACTS = {
    "dtype": lambda x: x.astype("float16"),
    "shape": lambda x: x.reshape([3, 4]),
    "strides": lambda x: paddle.zeros([4, 6])[:, :3],
    "alignment": lambda x: paddle.zeros([13])[1:].reshape([4, 3]),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("other", FACTS)
def test_facts_differ_where_launches_may(other):
    x = paddle.zeros([4, 3])
    assert native.facts(x, None) == native.facts(paddle.ones([4, 3]), None)
    assert native.facts(x, None) != native.facts(FACTS[other](x), None)
    assert native.facts(x, None) != native.facts(None, x)
    assert native.facts(None, x) != native.facts(None, FACTS[other](x))


@pytest.mark.parametrize(
    "value", [1, "x", [paddle.zeros([1])], paddle.zeros([0, 3]), np.zeros(3)], ids=lambda v: type(v).__name__
)
def test_there_are_no_facts_of_what_is_no_tensor_with_memory(value):
    assert native.facts(paddle.zeros([1]), value) is None


def test_without_the_library_there_are_no_facts_and_no_recordings():
    assert Native().facts(paddle.zeros([1])) is None
    assert Native().recordings is None


@BY_KIND
def test_a_change_in_place_is_noticed_while_the_tensor_lives(functions):
    x, y = paddle.zeros([2]), paddle.zeros([2])
    watched = functions.watch(x, y)
    assert not functions.was_changed(watched)
    y.add_(paddle.ones([2]))
    assert functions.was_changed(watched)
    assert not functions.was_changed(functions.watch(x, y))
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    assert not functions.was_changed(watched)


@BY_KIND
def test_a_tensor_that_is_gone_hides_no_change_of_another(functions):
    x, y = paddle.zeros([2]), paddle.zeros([2])
    watched, gone = functions.watch(x, y), weakref.ref(x)
    y.add_(paddle.ones([2]))
    del x
    gc.collect()
    assert gone() is None
    assert functions.was_changed(watched)


@BY_KIND
def test_a_wanted_gradient_is_found_among_values_of_any_type(functions):
    constant, leaf = paddle.zeros([2]), paddle.create_parameter([2], "float32")
    assert functions.carries_graph(constant, None, 1, "x", object()) is False
    assert functions.carries_graph(constant, 3, leaf) is True
    assert functions.carries_graph(constant, [leaf]) is None
    assert functions.carries_graph(leaf, [leaf]) is True


@pytest.mark.parametrize("call", ["watch", "was_changed"])
def test_what_is_no_tensor_is_refused(call):
    with pytest.raises((TypeError, ValueError)):
        getattr(native, call)(1)
