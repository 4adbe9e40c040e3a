# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing by Triton kernels: every map is the oracle's, whatever the ids and however many launches it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import GENERATORS
from paddle_moe_ops.triton.ops import route as route_module
from paddle_moe_ops.triton.ops.route import Routing, route
from tests.params import MANY_EXPERTS, MOST_EXPERTS, SHAPES, SMALL, SPARSE
from tests.reference.cases import assert_same_bits, routing_cases

from .problems import fitting, make_problem


def check(gpu: Any, routing: Any, probs: Any, plan: reference.Plan, *, each: bool = False, known: bool = True) -> None:
    """The maps of a routing against the oracle's plan."""
    is_mask = routing.dtype == np.bool_
    problem = Routing(
        gpu.array(routing),
        None if probs is None else gpu.array(probs),
        *(plan.num_tokens, plan.topk, plan.num_experts, plan.padding_alignment, is_mask, not each),
    )
    maps = route(gpu, problem, plan.num_rows if known else None, with_rowmap=not each)
    for name, actual in maps._asdict().items():
        if name == "rowmap":
            expected = None if each else reference.plan_to_rowmap(plan)
        elif name == "row_probs" and probs is None:
            expected = np.zeros(0, np.float32)
        else:
            expected = getattr(plan, name)
        if expected is not None:
            assert_same_bits(gpu.numpy(actual), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_maps_are_those_of_the_oracle(gpu, rng, shape):
    problem = make_problem(rng, fitting(gpu, shape, tokens=600 if shape.K < 20 else 12))
    check(gpu, problem.ids, problem.probs, problem.plan)


@pytest.mark.parametrize("routing", GENERATORS)
def test_maps_of_every_kind_of_routing(gpu, rng, routing):
    for shape in (SMALL, SPARSE):
        problem = make_problem(rng, shape, routing)
        check(gpu, problem.ids, problem.probs, problem.plan)


@given(st.data(), st.sampled_from(["first", "each"]))
@settings(max_examples=25)
def test_maps_of_any_ids_and_masks(gpu, data, rule):
    """Bad and repeated ids, masks with more experts than slots, buffers of every size."""
    case = data.draw(routing_cases(duplicates=rule, with_capacity=False))
    check(gpu, case.routing, case.probs, case.plan, each=rule == "each")


@pytest.mark.parametrize("shape", [SMALL, SPARSE, MANY_EXPERTS], ids=str)
def test_the_number_of_rows_is_counted_where_it_is_not_known(gpu, rng, shape):
    problem = make_problem(rng, shape)
    check(gpu, problem.ids, problem.probs, problem.plan, known=False)


@pytest.mark.parametrize("buffer", ["nothing", "half", "too much"])
@pytest.mark.parametrize("shape", [SMALL, SPARSE], ids=str)
def test_rows_beyond_a_static_buffer_are_dropped_and_counted(gpu, rng, shape, buffer):
    needed = make_problem(rng, shape).plan.num_rows
    size = {"nothing": 0, "half": needed // 2, "too much": needed + 2000}[buffer]
    problem = make_problem(rng, shape, buffer_size=size)
    check(gpu, problem.ids, problem.probs, problem.plan)


def test_one_program_and_several_give_the_same_maps(gpu, rng, monkeypatch):
    problem = make_problem(rng, SMALL)
    check(gpu, problem.ids, problem.probs, problem.plan)
    monkeypatch.setattr(route_module, "ONE_PROGRAM", 0)
    check(gpu, problem.ids, problem.probs, problem.plan)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("each", [False, True], ids=["first", "each"])
def test_repeated_ids_of_a_token(gpu, rng, dtype, each):
    """Several tiles, so that a token's slots lie in two of them."""
    ids = rng.integers(-2, 5, (300, 5)).astype(dtype)
    probs = rng.random(ids.shape, np.float32)
    plan = reference.route(ids, probs, num_experts=4, duplicates="each" if each else "first", validate=False)
    check(gpu, ids, probs, plan, each=each)


@pytest.mark.parametrize("topk", [1, 3, 70])
def test_masks(gpu, rng, topk):
    mask = rng.random((9, 70)) < 0.2
    probs = rng.random(mask.shape, np.float32)
    plan = reference.route(mask, probs, topk=topk, validate=False)
    check(gpu, mask, probs, plan)


def test_ids_at_the_limits_of_int64_count_as_none(gpu):
    limits = np.iinfo(np.int64)
    ids = np.array([[limits.min, 1], [limits.max, 2], [2**32, 2**32 + 1]], np.int64)
    plan = reference.route(ids, num_experts=3, validate=False)
    check(gpu, ids, None, plan)


def test_many_experts(gpu, rng):
    shape = MOST_EXPERTS
    ids = rng.integers(0, shape.E, (shape.T, shape.K)).astype(np.int32)
    check(gpu, ids, None, reference.route(ids, num_experts=shape.E, padding_alignment=shape.A), each=True)
