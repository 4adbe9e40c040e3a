# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Ids, masks, maps, counts and scales that carry a graph cost no gradient: those of a dense model in plain Paddle."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops import patched_paddle
from tests.onednn import BFLOAT16_IN_GRAPHS
from tests.static.test_to_static import plain_errors

from . import family_programs, plan_programs
from .models import Program, Source, arrays_of, cast, model
from .modes import Gradients, assert_same_gradients, dygraph, recomputed, static_graph, traced

PROGRAMS = (*plan_programs.PROGRAMS, *family_programs.PROGRAMS)
ALL = pytest.mark.parametrize("program", PROGRAMS, ids=str)
IN_GRAPHS = [each for each in PROGRAMS if each.in_static_graphs]
# Every second program, by syntax or by bytecode in turn; the others are slow tests.
TO_STATIC = [
    pytest.param(program, full_graph, id=f"{program}-{name}", marks=[pytest.mark.slow] * (index % 4 != 2 * full_graph))
    for name, full_graph in (("full_graph", True), ("bytecode", False))
    for index, program in enumerate(IN_GRAPHS)
]
STATIC = pytest.mark.parametrize("program", IN_GRAPHS, ids=str)
EVERY_SECOND = [
    pytest.param(program, id=str(program), marks=[pytest.mark.slow] * (index % 2))
    for index, program in enumerate(IN_GRAPHS)
]
BFLOAT16 = 2**-6  # a few roundings to 8 bits, of the largest element
ARRAYS = arrays_of(np.random.default_rng(7))

# Paddle says so of its own full_like, whenever it makes a gradient in a graph.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
]


@pytest.fixture(scope="module", autouse=True)
def patched():
    with patched_paddle():
        yield


@functools.cache
def dense_gradients(program: Program, source: Source, place: Any) -> Gradients:
    return dygraph(model(program.dense, source), ARRAYS, place)


@pytest.mark.parametrize(
    ("program", "source"),
    [pytest.param(each, source, id=f"{each}-{source.__name__}") for each in PROGRAMS for source in each.sources],
)
def test_dygraph(program, source, place, backend):
    got = dygraph(model(program.sparse, source), ARRAYS, place)
    assert_same_gradients(got, dense_gradients(program, source, place))


@ALL
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute(program, use_reentrant, place, backend):
    got = recomputed(model(program.sparse), ARRAYS, place, use_reentrant=use_reentrant)
    assert_same_gradients(got, dense_gradients(program, cast, place))


@ALL
def test_ids_shared_by_two_calls(program, place, backend):
    def twice(**routed):
        return program.sparse(**routed), program.sparse(**routed)

    def dense_twice(**routed):
        return program.dense(**routed), program.dense(**routed)

    assert_same_gradients(dygraph(model(twice), ARRAYS, place), dygraph(model(dense_twice), ARRAYS, place))


@pytest.mark.parametrize(("program", "full_graph"), TO_STATIC)
def test_to_static(program, full_graph, place):
    with plain_errors():
        got = traced(model(program.sparse), ARRAYS, place, full_graph=full_graph)
    assert_same_gradients(got, dense_gradients(program, cast, place))


@pytest.mark.sampled(2, 1)
@STATIC
def test_static_graph(program, place):
    assert_same_gradients(static_graph(model(program.sparse), ARRAYS, place), dense_gradients(program, cast, place))


@ALL
@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled")
def test_mixed_precision(program, place, backend):
    """On a CPU Paddle's eager mixed precision casts nothing; there the static graph below is the test."""

    def mixed(form):
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            return dygraph(model(form), ARRAYS, place)

    tolerance = 1e-5 if place.is_cpu_place() else program.products * BFLOAT16
    assert_same_gradients(mixed(program.sparse), mixed(program.dense), tolerance)


@pytest.mark.sampled(2)
@BFLOAT16_IN_GRAPHS
@pytest.mark.parametrize("program", EVERY_SECOND)
def test_mixed_precision_in_a_static_graph(program, place):
    """Against float32: some of the dense programs lose gradients in such graphs of Paddle's own operators."""

    def forward(*leaves):
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            return model(program.sparse)(*leaves)

    tolerance = program.products * BFLOAT16
    assert_same_gradients(static_graph(forward, ARRAYS, place), dense_gradients(program, cast, place), tolerance)
