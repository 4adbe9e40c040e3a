# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""route with a capacity: at most C rows per expert, the first ones, in every form of routing and every mode."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import permute, reference, route, unpermute
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import GENERATORS
from tests.ops.problems import (
    TENSOR_FIELDS,
    Routing,
    assert_plan,
    backward,
    make_problem,
    optional_tensor,
    ordinary,
    routings,
    seed_of,
    tensor,
)
from tests.params import MOST_EXPERTS, SHAPES, SMALL
from tests.static.cases import Case, plan_tensors
from tests.static.inputs import E, mask_inputs, token_inputs
from tests.static.modes import (
    StaticGraph,
    assert_same_run,
    input_specs,
    plain_errors,
    random_d_outputs,
    run_dygraph,
)

# Paddle says so of its own full_like, whenever it makes a gradient in a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
]

CAPACITIES = st.one_of(st.integers(0, 5), st.integers(0, 40), st.just(2**31 - 1))
FULL = 4  # capacity that many experts of SMALL reach


def capacity_forms(capacity, place):
    return {
        "int": capacity,
        "NumPy integer": np.int64(capacity),
        "int32 tensor": tensor(np.array(capacity, np.int32), place),
        "int64 tensor": tensor(np.array(capacity, np.int64), place),
    }


@given(case=routings(), capacity=CAPACITIES, data=st.data())
@settings(max_examples=120)
def test_plan_equals_the_oracle(case: Routing, capacity, data, place):
    form = data.draw(st.sampled_from([*capacity_forms(capacity, place).values()]))
    probs = optional_tensor(case.probs, place)
    plan = route(tensor(case.routing, place), probs, **case.arguments, capacity=form, validate=False)
    assert_plan(plan, case.oracle(capacity=capacity))


@pytest.mark.parametrize("routing", GENERATORS)
@pytest.mark.parametrize("shape", [*SHAPES, MOST_EXPERTS], ids=str)
def test_plan_of_named_shapes(shape, routing, rng, place):
    problem = make_problem(rng, shape, routing=routing)
    capacity = -(-shape.T * shape.K // shape.E)
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    plan = route(ids, probs, **problem.route_arguments, capacity=capacity, validate=True)
    assert_plan(plan, problem.plan(capacity=capacity))


@pytest.mark.parametrize(("capacity", "rows"), [(2**40, 4), (-3, 0), (-(2**40), 0)])
def test_capacities_in_a_tensor_may_be_any_numbers(capacity, rows, place):
    ids = tensor(np.array([[0], [0], [1], [0]], np.int32), place)
    plan = route(ids, num_experts=2, capacity=tensor(np.array(capacity), place))
    assert (plan.num_rows, plan.overflow.item()) == (rows, 4 - rows)


def test_a_full_expert_keeps_the_first_of_its_rows(place, backend):
    ids = tensor(np.array([[1, 0], [1, -1], [0, 1], [2, 1]], np.int32), place)
    plan = route(ids, num_experts=3, padding_alignment=3, capacity=2)
    assert plan.slot_to_row.tolist() == [[3, 0], [4, -1], [1, -1], [6, -1]]
    assert plan.row_to_slot.tolist() == [1, 4, -1, 0, 2, -1, 6, -1, -1]
    assert plan.tokens_per_expert.tolist() == [2, 2, 1]
    assert plan.routed_per_expert.tolist() == [2, 4, 1]
    assert plan.overflow.tolist() == 2


@pytest.mark.parametrize("buffer_size", [-1, 0, 5, 100])
@pytest.mark.parametrize("kind", ["ids", "each", "mask"])
def test_plan_is_the_same_on_both_backends(kind, buffer_size, rng, place, backend):
    options = {"padding_alignment": 2, "buffer_size": buffer_size}
    if kind == "mask":
        routing, options["topk"] = rng.random((SMALL.T, SMALL.E)) < 0.5, SMALL.K
    else:
        routing, options["num_experts"] = rng.integers(-1, SMALL.E, (SMALL.T, SMALL.K)), SMALL.E
        options["duplicates"] = "each" if kind == "each" else "first"
    probs = ordinary(rng, routing.shape)
    plan = route(tensor(routing, place), tensor(probs, place), **options, capacity=FULL, validate=False)
    expected = reference.route(routing, probs, **options, capacity=FULL, validate=False)
    assert expected.overflow.item() > 0
    assert_plan(plan, expected)
    for name in TENSOR_FIELDS:
        field = getattr(plan, name)
        assert field.stop_gradient, name
        assert field.place == place


@given(case=routings(), capacity=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_gradient_of_probabilities_is_zero_at_dropped_slots(case: Routing, capacity, seed, place):
    rng = np.random.default_rng(seed)
    probs = tensor(ordinary(rng, case.routing.shape), place, gradient=True)
    plan = route(tensor(case.routing, place), probs, **case.arguments, capacity=capacity, validate=False)
    expected = case.oracle(capacity=capacity)
    d_row_probs = ordinary(rng, (expected.num_rows,))
    backward([plan.row_probs], [d_row_probs])
    mask_experts = expected.num_experts if case.routing.dtype == np.bool_ else None
    wanted = reference.route_backward(d_row_probs, expected, mask_experts=mask_experts)
    np.testing.assert_array_equal(probs.grad.numpy(), wanted)


def test_gradient_is_the_same_on_both_backends(rng, place, backend):
    problem = make_problem(rng, SMALL)
    probs = tensor(problem.probs, place, gradient=True)
    plan = route(tensor(problem.ids, place), probs, **problem.route_arguments, capacity=FULL)
    expected = problem.plan(capacity=FULL)
    d_row_probs = ordinary(rng, (expected.num_rows,))
    backward([plan.row_probs], [d_row_probs])
    assert_bits_equal(probs.grad, reference.route_backward(d_row_probs, expected))


def test_a_token_whose_slots_are_all_dropped_gets_zeros(place, backend):
    ids = tensor(np.array([[0, 1], [1, 0], [1, 0], [0, 2]], np.int32), place)
    x = tensor(np.arange(1, 13, dtype=np.float32).reshape(4, 3), place)
    plan = route(ids, num_experts=3, capacity=2)
    rows, _ = permute(x, plan)
    out = unpermute(rows, plan)
    assert out.tolist() == [[2.0, 4, 6], [8, 10, 12], [0, 0, 0], [10, 11, 12]]


COUNT_FORMS = {
    "list": lambda counts, place: counts.tolist(),
    "list of 0-D tensors": lambda counts, place: list(tensor(counts, place)),
    "padded array": lambda counts, place: -(-counts // SMALL.A) * SMALL.A,
    "int32 tensor": lambda counts, place: tensor(counts.astype(np.int32), place),
    "int64 tensor": lambda counts, place: tensor(counts.astype(np.int64), place),
}


@pytest.mark.parametrize("capacity_form", ["int", "int64 tensor"])
@pytest.mark.parametrize("form", COUNT_FORMS)
def test_counts_are_those_before_slots_are_dropped(form, capacity_form, rng, place, backend):
    problem = make_problem(rng, SMALL)
    expected = problem.plan(capacity=FULL)
    assert expected.overflow.item() > 0
    ids, probs = tensor(problem.ids, place), tensor(problem.probs, place)
    capacity = capacity_forms(FULL, place)[capacity_form]
    arguments = {**problem.route_arguments, "capacity": capacity}
    counts = COUNT_FORMS[form](expected.routed_per_expert, place)
    assert_plan(route(ids, probs, **arguments, tokens_per_expert=counts), expected)
    if not place.is_cpu_place():  # where counts are taken as they are
        return
    text = f"route: tokens_per_expert must be {expected.routed_per_expert.tolist()}, the rows routed to each expert"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        route(ids, probs, **arguments, tokens_per_expert=COUNT_FORMS[form](expected.tokens_per_expert, place))


@pytest.mark.parametrize("capacity", [0, 3, 5, 6, 8, 9])
@pytest.mark.parametrize("counts", [[5, 1], [8, 8]], ids=["rows", "with padding"])
def test_counts_with_padding_may_be_above_or_below_the_capacity(counts, capacity, place, backend):
    ids = tensor(np.array([[0], [0], [1], [0], [0], [0]], np.int32), place)
    arguments = {"num_experts": 2, "padding_alignment": 8, "capacity": capacity}
    plan = route(ids, **arguments, tokens_per_expert=counts)
    assert_plan(plan, reference.route(ids.numpy(), **arguments))


@pytest.mark.parametrize("counts", [None, [9, 9]], ids=["counted", "ignored"])
def test_slots_dropped_for_lack_of_room_in_a_buffer_still_raise(counts, place, backend):
    ids = tensor(np.array([[0], [0], [0], [1]], np.int32), place)
    arguments = {"num_experts": 2, "capacity": 2, "tokens_per_expert": counts, "validate": True}
    assert route(ids, **arguments, buffer_size=3).overflow.item() == 1
    with pytest.raises(ValueError, match=r"^route: buffer_size must be at least 3, the padded rows of this routing"):
        route(ids, **arguments, buffer_size=2)
    assert route(ids, **{**arguments, "validate": None}, buffer_size=2).overflow.item() == 2


NAN = float("nan")
BAD_DATA = {
    "bad id": ([[0, 1], [1, 2]], None, r"routing must hold expert ids in \[-1, 2\), but token 1, slot 1 holds 2"),
    "repeated id": ([[0, 1], [1, 1]], None, r"routing must name an expert at most once per token, but token 1"),
    "NaN of a dropped slot": ([[0, 1], [1, 0]], [[0.5, 0.5], [NAN, 0.5]], r"probs must not hold NaN, but token 1"),
    "mask": ([[False, True], [True, True]], None, r"routing must set at most topk=1 experts per token, but token 1"),
}


@pytest.mark.parametrize("fault", BAD_DATA)
def test_bad_data_raise_as_without_a_capacity(fault, place, backend):
    routing, probs, message = BAD_DATA[fault]
    routing = np.array(routing)
    options = {"topk": 1} if routing.dtype == np.bool_ else {"num_experts": 2}
    probs = optional_tensor(None if probs is None else np.array(probs, np.float32), place)
    with pytest.raises(ValueError, match=f"^route: {message}"):
        route(tensor(routing, place), probs, **options, capacity=1, validate=True)
    plan = route(tensor(routing, place), probs, **options, capacity=1, validate=False)
    assert plan.tokens_per_expert.tolist() == [1, 1]


BAD_CAPACITIES = {
    "negative": (-1, ValueError, "from 0 to 2147483647, but got -1"),
    "float": (2.0, TypeError, "an int, but got float"),
    "bool": (True, TypeError, "an int, but got a bool"),
    "float tensor": (lambda: paddle.ones([]), TypeError, "of dtype int32 or int64, but got float32"),
    "1-D tensor": (lambda: paddle.ones([1], "int32"), ValueError, "of shape [], but got [1]"),
}


@pytest.mark.parametrize("fault", BAD_CAPACITIES)
def test_bad_capacities_are_named(fault, place):
    capacity, error, text = BAD_CAPACITIES[fault]
    with pytest.raises(error, match=f"^{re.escape(f'route: capacity must be {text}')}$"):
        route(paddle.zeros([3, 1], "int32"), num_experts=1, capacity=capacity() if callable(capacity) else capacity)


@pytest.mark.parametrize("tokens_per_expert", [None, [23, 23, 0, 0, 23]], ids=["buffer", "host counts"])
def test_a_buffer_or_host_counts_leave_nothing_to_wait_for(tokens_per_expert, rng, place, monkeypatch):
    specs = []
    backend = resolve("route")
    original = backend.route

    def spy(routing, probs, counts, spec):
        specs.append(spec)
        return original(routing, probs, counts, spec)

    monkeypatch.setattr(backend, "route", spy)
    for name in ("numpy", "item", "tolist", "__int__", "__bool__"):
        monkeypatch.setattr(paddle.Tensor, name, lambda self, *args: pytest.fail("the host read a tensor"))
    ids = tensor(np.tile(np.array([0, 1, 4], np.int32), (23, 1)), place)
    buffer = {"buffer_size": 40} if tokens_per_expert is None else {"tokens_per_expert": tokens_per_expert}
    route(ids, num_experts=5, capacity=FULL, validate=False, **buffer)
    assert len(specs) == 2
    assert all(spec.buffer_size >= 0 or spec.counts is not None for spec in specs)


def ids_up_to_capacity(ids, probs, capacity):
    return plan_tensors(route(ids, probs, num_experts=E, padding_alignment=2, capacity=capacity))


def each_up_to_capacity_in_a_buffer(ids, probs):
    return plan_tensors(route(ids, probs, num_experts=E, duplicates="each", buffer_size=9, capacity=3))


def mask_up_to_capacity(x, mask, probs):
    return *plan_tensors(route(mask, probs, topk=3, capacity=4)), x * 2


def a_capacity(rng, ids):
    return np.array(3)


MODES = (
    Case("ids", ids_up_to_capacity, token_inputs(leave_out="x", capacity=a_capacity), ("probs",)),
    Case("each", each_up_to_capacity_in_a_buffer, token_inputs(leave_out="x"), ("probs",)),
    Case("mask", mask_up_to_capacity, mask_inputs, ("x", "probs")),
)


@pytest.mark.parametrize("case", MODES, ids=str)
class TestGraphs:
    """The bits of dygraph, one program for any number of tokens."""

    def test_traced_by_syntax(self, case, rng, place):
        traced = paddle.jit.to_static(case.function, input_spec=input_specs(case), full_graph=True)
        for tokens in (29, 0, 1):
            inputs = case.inputs(rng, tokens)
            d_outputs = random_d_outputs(case, inputs, rng)
            expected = run_dygraph(case.function, inputs, case.leaves, d_outputs)
            assert_same_run(run_dygraph(traced, inputs, case.leaves, d_outputs), expected)
        assert len(traced.program_cache) == 1

    def test_traced_by_bytecode(self, case, rng, place):
        traced = paddle.jit.to_static(case.function, full_graph=False)
        for tokens in (29, 7):
            inputs = case.inputs(rng, tokens)
            d_outputs = random_d_outputs(case, inputs, rng)
            expected = run_dygraph(case.function, inputs, case.leaves, d_outputs)
            with plain_errors():
                run = run_dygraph(traced, inputs, case.leaves, d_outputs)
            assert_same_run(run, expected)

    def test_static_graph(self, case, rng, place):
        graph = None
        for tokens in (29, 0, 1):
            inputs = case.inputs(rng, tokens)
            d_outputs = random_d_outputs(case, inputs, rng)
            graph = graph or StaticGraph(case, d_outputs)
            expected = run_dygraph(case.function, inputs, case.leaves, d_outputs)
            assert_same_run(graph.run(inputs, d_outputs), expected)


def test_a_list_of_counts_tells_a_graph_the_number_of_rows(rng, place):
    ids = np.random.default_rng(seed_of(rng)).integers(0, 2, (11, 1))
    counts = np.bincount(ids.ravel(), minlength=2)

    def kept_rows(ids):
        plan = route(ids, num_experts=2, tokens_per_expert=counts.tolist(), capacity=4, padding_alignment=3)
        assert plan.num_rows == 12
        return plan.row_to_slot

    traced = paddle.jit.to_static(kept_rows, full_graph=True)
    assert_bits_equal(traced(tensor(ids, place)), kept_rows(tensor(ids, place)))
