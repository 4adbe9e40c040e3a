# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""No call builds a node of the graph where no gradient is wanted, whatever backend runs it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import use_backend
from paddle_moe_ops.backends import autograd
from tests.ops.every_call import CALLS, Call, made_of

BACKENDS = ["compiled", "reference"]


@pytest.fixture
def nodes_built(monkeypatch):
    """The calls that became nodes."""
    built, apply = [], autograd._Node.apply

    def record(call, *arguments, **options):
        built.append(call.function)
        return apply(call, *arguments, **options)

    monkeypatch.setattr(autograd._Node, "apply", record)
    return built


def leaves(call: Call, place: object) -> dict[str, paddle.Tensor]:
    """The float tensors of a call, which want gradients."""
    made = {name: made_of(call.arguments[name], place) for name in call.tensors}
    floats = {name: each for name, each in made.items() if each.dtype in (paddle.float32, paddle.bfloat16)}
    for each in floats.values():
        each.stop_gradient = False
    return floats


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_grad_builds_no_node(call, name, nodes_built, place):
    with use_backend(name), paddle.no_grad():
        call.run(place, **leaves(call, place))
    assert nodes_built == []


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_inputs_without_gradient_build_no_node(call, name, nodes_built, place):
    with use_backend(name):
        call.run(place)
    assert nodes_built == []


def test_an_input_that_wants_a_gradient_builds_one(nodes_built, place):
    call = next(call for call in CALLS if call.function == "unpermute")
    with use_backend("reference"):
        out = call.run(place, **leaves(call, place))
    assert nodes_built == ["unpermute"]
    out.sum().backward()
    assert np.isfinite(float(out.sum()))
