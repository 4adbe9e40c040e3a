# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operators called without Paddle's machinery: when that happens, with the same results, safe for any argument."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import permute, route, unpermute
from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, plan_tensors, tensor
from tests.params import ODD
from tests.static.operators import operator_names

pytestmark = pytest.mark.compiled_only


@pytest.fixture(scope="module")
def direct():
    register_operators()
    return compiled._direct


@pytest.fixture
def calls_of_paddle(monkeypatch):
    """The names of the operators that are called through Paddle."""
    names, through_paddle = [], paddle._C_ops._run_custom_op

    def record(name, *arguments):
        names.append(name)
        return through_paddle(name, *arguments)

    monkeypatch.setattr(paddle._C_ops, "_run_custom_op", record)
    return names


@pytest.fixture
def problem(rng, place):
    case = make_problem(rng, ODD)
    return tensor(case.x, place), plan_tensors(case.plan(), place)


def test_every_operator_can_be_called_directly(direct):
    only_directly = {name for name in direct if name.startswith("rank_")} | {"window", "host_words"}
    # test_paddle_fp8_quantize.py, test_paddle_fp8_products.py
    only_directly |= {name for name in direct if name.startswith("paddle_")}
    # test_float8_mlp.py and tests/scenarios/test_deferred_weight_gradients.py; the others: test_rank_operators.py
    only_directly |= {"quantize_matrices", "layer_forward", "layer_backward"}
    only_directly |= {"layer_wgrads", "grouped_dgrad", "grouped_wgrad"}
    only_directly |= {"index_add"}  # test_paddlefleet.py
    only_directly |= {"take_samples", "compare_samples"}  # tests/scenarios/test_unnoticed_writes.py
    assert sorted(f"pmo_{name}" for name in direct if name not in only_directly) == operator_names()
    assert len(only_directly) == 32


def test_a_call_without_gradient_does_not_go_through_paddle(problem, calls_of_paddle):
    x, plan = problem
    rows, _ = permute(x, plan)
    out = unpermute(rows, plan, plan.row_probs)
    assert calls_of_paddle == []
    assert rows.stop_gradient
    assert out.stop_gradient


def test_a_call_with_gradient_goes_through_paddle_and_gives_the_same_bits(problem, calls_of_paddle):
    x, plan = problem
    expected, _ = permute(x, plan)
    x.stop_gradient = False
    rows, _ = permute(x, plan)
    assert calls_of_paddle == ["pmo_permute"]
    assert not rows.stop_gradient
    assert_bits_equal(rows.detach().cpu().numpy(), expected.cpu().numpy())


def test_no_grad_makes_every_call_one_without_gradient(problem, calls_of_paddle):
    x, plan = problem
    x.stop_gradient = False
    with paddle.no_grad():
        rows, _ = permute(x, plan)
    assert calls_of_paddle == []
    assert rows.stop_gradient


def test_the_result_of_a_direct_call_can_be_given_a_gradient(problem):
    x, plan = problem
    rows, _ = permute(x, plan)
    rows.stop_gradient = False
    unpermute(rows, plan).sum().backward()
    assert rows.grad.shape == rows.shape


def test_what_an_operator_refuses_is_raised_at_once(place, calls_of_paddle):
    ids = tensor(np.array([[0, 7]], np.int32), place)
    with pytest.raises(
        ValueError, match=r"^route: routing must hold expert ids in \[-1, 4\), but token 0, slot 1 holds 7$"
    ):
        route(ids, num_experts=4, validate=True)
    assert calls_of_paddle == []


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-(2**40), 2**40), max_size=3),
    st.tuples(st.integers()),
    st.sampled_from([(0,), (1,), (63,), (63, 2), (3, 0), (1, 2, 3)]).map(lambda shape: paddle.ones(shape, "int32")),
    st.sampled_from([(0,), (2, 72), (63, 72), (1, 1)]).map(paddle.ones),
    st.lists(st.sampled_from([(0,), (128, 256), (0, 128), (3, 5)]).map(paddle.ones), min_size=1, max_size=3),
)


@given(data=st.data())
@settings(max_examples=100)
def test_arguments_of_any_kind_raise_or_are_taken_but_never_end_the_process(direct, data):
    name = data.draw(st.sampled_from(sorted(direct)))
    arguments = data.draw(st.lists(anything, max_size=13))
    try:
        outputs = direct[name](*arguments)
    except (ValueError, OverflowError):
        return
    assert all(output is None or isinstance(output, paddle.Tensor) for output in outputs)


def test_an_argument_of_another_type_is_refused(direct, problem):
    x, plan = problem
    maps = plan.slot_to_row, plan.token_rows, plan.row_to_token
    with pytest.raises(OverflowError):
        direct["permute"](x, None, *maps, 3, False, -1, 10, 2**64, 10)
    for fill in (2**31, 1.5, None, [3]):
        with pytest.raises(ValueError, match="an argument is not what the operator takes"):
            direct["permute"](x, None, *maps, fill, False, -1, 10, 72, 10)
    with pytest.raises(ValueError, match="an argument is not what the operator takes"):
        direct["route"](plan.slot_to_row, None, 7, -1, 1, 1, [2**31], -1, 0, 0)
    with pytest.raises(ValueError, match="permute: the number of arguments is wrong"):
        direct["permute"](x)
    for matrices in ([x, 1], [1, x], [], x, [x, None]):
        with pytest.raises(ValueError, match="an argument is not what the operator takes"):
            direct["paddle_quantize_stack"](matrices, True)


def turns_of_another_thread_during(call, attempts=1000):
    """Number of times that another thread ran Python code during `call`, in the first of `attempts` calls that allows
    it.

    The interpreter never asks a thread to yield, so the other thread runs only if the call releases the lock itself.
    """
    turns, done = 0, threading.Event()

    def count():
        nonlocal turns
        while not done.wait(1e-5):
            turns += 1

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        counter.start()
        for _ in range(attempts):
            time.sleep(1e-3)  # the counter is waiting, or about to
            before = turns
            result = call()
            during = turns - before
            del result  # freeing it is not part of the call
            if during:
                return during
        return 0
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counter.join()


@pytest.mark.cpu_only
def test_other_threads_run_while_an_operator_does(place, direct):
    rows, tokens, hidden = 1 << 13, 1 << 10, 1024
    slots = tensor(np.arange(rows, dtype=np.int32).reshape(tokens, -1), place)
    owners = tensor(np.repeat(np.arange(tokens, dtype=np.int32), rows // tokens), place)
    x = paddle.ones([tokens, hidden], "float32")
    arguments = x, None, slots, slots, owners, 3, False, -1, x.dtype.value, hidden, x.dtype.value
    assert turns_of_another_thread_during(lambda: direct["permute"](*arguments)) > 0
    assert turns_of_another_thread_during(lambda: sum(range(1 << 20)), attempts=3) == 0


def test_a_direct_call_names_the_problem_of_a_library_that_does_not_load(monkeypatch):
    monkeypatch.setattr(compiled, "_direct", {})
    monkeypatch.setattr(compiled, "_library_problem", lambda: "it is missing")
    with pytest.raises(RuntimeError, match=r"^this needs the compiled operators, but it is missing$"):
        compiled.direct("near_blocks", paddle.zeros([1, 1, 1]))
