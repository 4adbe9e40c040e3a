# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments without a gradient are detached, in whatever form they come; the others keep their graph."""

from __future__ import annotations

import importlib
import inspect

import paddle
import pytest

import paddle_moe_ops
from paddle_moe_ops import Plan, route
from paddle_moe_ops._graphs import public

FAMILIES = ("functional", "routing", "quantization", "gemm", "masked", "dispatch", "indexed")


def tensor_with_graph(*shape: int) -> paddle.Tensor:
    leaf = paddle.ones(shape)
    leaf.stop_gradient = False
    return leaf * 1.0


PLAIN = 3


def items_of(value):
    return list(value.values()) if isinstance(value, dict) else value


@public("x", "rest")
def probe(x, ids=None, *rest, flag=None, table=None):
    return x, ids, rest, flag, table


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: [PLAIN, tensor],
        lambda tensor: (tensor, PLAIN),
        lambda tensor: {"sizes": tensor},
        lambda tensor: [[tensor]],
    ],
    ids=["tensor", "list", "tuple", "dict", "nested"],
)
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_an_argument_without_gradient_is_detached_in_every_form(wrap, by):
    given = wrap(tensor_with_graph(2))
    _, ids, *_ = probe(1, given) if by == "position" else probe(1, ids=given)
    while not isinstance(ids, paddle.Tensor):
        assert type(ids) is type(given)
        ids, given = (next(item for item in items_of(each) if item is not PLAIN) for each in (ids, given))
    assert ids.stop_gradient


def test_differentiable_arguments_are_passed_on_as_they_are():
    x, first, second = tensor_with_graph(1), tensor_with_graph(2), tensor_with_graph(3)
    got_x, _, rest, _, _ = probe(x, None, first, second)
    assert got_x is x
    assert rest[0] is first
    assert rest[1] is second
    assert probe(x=x)[0] is x


def test_keyword_only_arguments_are_detached():
    assert probe(1, flag=tensor_with_graph(1))[3].stop_gradient


def test_what_carries_no_graph_is_passed_on_as_it_is():
    constant, sizes = paddle.ones([2]), [1, 2, 3]
    _, ids, _, flag, table = probe(1, constant, flag=sizes, table="row")
    assert ids is constant
    assert flag is sizes
    assert table == "row"


def test_a_plan_stays_a_plan():
    plan = route(paddle.to_tensor([[0], [1]]), num_experts=2)
    changed = plan._replace(token_rows=plan.token_rows.detach())
    changed.token_rows.stop_gradient = False
    _, got, *_ = probe(1, changed)
    assert type(got) is Plan
    assert got.token_rows.stop_gradient


def test_a_name_that_is_no_argument_is_refused():
    with pytest.raises(TypeError, match=r"has no arguments \['y'\]"):
        public("y")(lambda x: x)


def test_signature_and_name_are_those_of_the_function():
    assert list(inspect.signature(probe).parameters) == ["x", "ids", "rest", "flag", "table"]
    assert inspect.getfullargspec(paddle_moe_ops.sort_chunks).args == ["x", "split_sizes", "order", "probs"]
    assert paddle_moe_ops.permute.__name__ == "permute"


def public_functions():
    found = []
    for family in FAMILIES:
        module = importlib.import_module(f"paddle_moe_ops.{family}")
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                found.append(pytest.param(function, id=f"{family}.{name}"))
    return found


@pytest.mark.parametrize("function", public_functions())
def test_every_function_says_which_of_its_arguments_have_a_gradient(function):
    documented = inspect.getdoc(function)
    named = function.differentiable_arguments
    assert all(f"``{name}``" in documented for name in named), "the docstring names them, too"
    if not named:
        assert "ifferentiable in" not in documented
