# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plain calls of `moe_mlp` that the compiled library checks and runs: the bits and errors of other calls.

Sizes are multiples of 8, for which GPUs have kernels.
"""

from __future__ import annotations

import types

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import _quick, discard_dw, moe_mlp, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.compiled import _declines
from paddle_moe_ops.backends.compiled import backend as compiled
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import plan_tensors, tensor
from tests.ops.test_moe_mlp import Layer
from tests.params import ODD

pytestmark = pytest.mark.compiled_only

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def answers(monkeypatch):
    """Return values of the quick calls."""
    given_back = []
    quick = compiled.quick_moe_mlp

    def recorded(*arguments):
        given_back.append(quick(*arguments))
        return given_back[-1]

    monkeypatch.setattr(compiled, "quick_moe_mlp", recorded)
    return given_back


def run(layer, place, *, gradients, **options):
    """The result and the gradients of a call, by name."""
    leaves = layer.leaves(place)
    for leaf in leaves.values():
        leaf.stop_gradient = not gradients
    plan, order = plan_tensors(layer.plan, place), {"by row": "row", "flat by slot": "slot"}.get(layer.form)
    operands = leaves["x"], plan, leaves.get("probs"), leaves["gate_up"], leaves["down"]
    out = moe_mlp(*operands, transpose=layer.transpose, weights_by=order, **options)
    if not gradients:
        return {"out": out}
    out.backward(tensor(layer.d_out, place))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.parametrize("gradients", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("form", ["by slot", "by row"])
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("keep", ["h", "x"])
def test_bits_are_those_of_the_checked_call(gradients, form, transpose, keep, answers, monkeypatch, rng, place):
    layer = Layer(rng, ODD, BF16, transpose=transpose, form=form, sizes=(24, 16))
    made = run(layer, place, gradients=gradients, keep=keep)
    assert answers[-1] is (True if gradients else made["out"])
    monkeypatch.setattr(compiled, "quick_moe_mlp", _declines)
    expected = run(layer, place, gradients=gradients, keep=keep)
    for name, each in made.items():
        assert_bits_equal(to_numpy(each), to_numpy(expected[name]), what=name)


def test_unusual_calls_are_declined_or_not_tried(answers, rng, place):
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    leaves = {name: leaf.detach() for name, leaf in layer.leaves(place).items()}
    plan = plan_tensors(layer.plan, place)
    operands = [leaves["x"], plan, leaves["probs"], leaves["gate_up"], leaves["down"]]
    expected = moe_mlp(*operands)
    assert answers.pop() is expected
    with use_backend("paddle"):
        moe_mlp(*operands)
    moe_mlp(*operands, accumulate=True, activation="geglu")
    moe_mlp(*operands[:3], list(leaves["gate_up"]), list(leaves["down"]))
    out = moe_mlp(leaves["x"].unsqueeze(0), *operands[1:])
    assert out.shape == [1, *expected.shape]
    assert not any(isinstance(each, paddle.Tensor) or each is True for each in answers)


def test_flat_weights_by_slot_are_not_taken_for_weights_by_row(answers, monkeypatch, place):
    layer = Layer(np.random.default_rng(0), ODD, BF16, form="by slot", sizes=(24, 16))
    leaves = {name: leaf.detach() for name, leaf in layer.leaves(place).items()}
    ids = paddle.to_tensor([[(3 * token + slot) % ODD.E for slot in range(ODD.K)] for token in range(ODD.T)], "int32")
    probs = leaves["probs"]
    plan = route(ids, probs, num_experts=ODD.E)
    assert plan.num_rows == probs.numel()  # either may be meant
    operands = leaves["x"], plan, probs.flatten(), leaves["gate_up"], leaves["down"]
    made = moe_mlp(*operands, weights_by="slot")
    monkeypatch.setattr(compiled, "quick_moe_mlp", _declines)
    assert_bits_equal(to_numpy(made), to_numpy(moe_mlp(*operands, weights_by="slot")))


@pytest.mark.parametrize("options", [{"defer_dw": True}, {"accumulate": True}], ids=str)
def test_deferred_and_accumulated_gradients_are_left_to_the_checked_call(options, answers, rng, place):
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    leaves = layer.leaves(place)
    leaves["gate_up"].main_grad = leaves["down"].main_grad = None
    layer.call(leaves, place, **options).sum().backward()
    assert answers == []
    assert leaves["x"].grad is not None
    assert leaves["gate_up"].grad is None
    discard_dw()


@pytest.mark.parametrize(
    ("options", "keeps_hidden", "mib"), [({}, True, 1024), ({"keep": "x", "workspace_mb": 3}, False, 3)], ids=str
)
def test_a_call_with_gradients_gives_the_operator_its_options(options, keeps_hidden, mib, monkeypatch, rng, place):
    given = []
    monkeypatch.setattr(_quick, "layer_operator", lambda *operands, **named: given.append(named) or operands[0])
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    layer.call(layer.leaves(place), place, **options)
    expected = {"transpose": False, "by_slot": True, "keeps_hidden": keeps_hidden, "workspace": mib << 20}
    assert given == [{**expected, "in_place": True}]


ARRAY = np.array(["swiglu", "h"])
BAD = [
    *(("activation", ARRAY), ("keep", ARRAY), ("weights_by", ARRAY)),
    *(("activation", "relu"), ("keep", "y"), ("weights_by", "column")),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_name_is_left_to_the_checks(name, value, rng, place):
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    with pytest.raises(ValueError, match=f"^moe_mlp: {name} must be "):
        layer.call(layer.leaves(place), place, **{name: value})


def test_plans_of_another_type_and_further_arguments_are_left_to_the_checks(rng, place):
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    leaves, plan = layer.leaves(place), plan_tensors(layer.plan, place)
    other = types.SimpleNamespace(**plan._asdict())
    operands = leaves["probs"], leaves["gate_up"], leaves["down"]
    with pytest.raises(TypeError, match=r"^moe_mlp: plan must be "):
        moe_mlp(leaves["x"], other, *operands)
    with pytest.raises(TypeError, match="positional arguments"):
        moe_mlp(leaves["x"], plan, *operands, "one more")


@pytest.mark.parametrize(
    ("place_of", "change", "message"),
    [
        (0, lambda x: x[:-1], "x must be of"),
        (0, lambda x: x.astype("float32"), "gate_up must"),
        (2, lambda probs: probs[:, :1], "probs must"),
        (2, lambda probs: probs.astype("float16"), "probs must"),
        (3, lambda gate_up: gate_up[:, :, :-1], "gate_up must"),
        (4, lambda down: down[1:], "down must"),
    ],
)
def test_bad_arguments_are_left_to_the_checks(place_of, change, message, answers, rng, place):
    layer = Layer(rng, ODD, BF16, form="by slot", sizes=(24, 16))
    leaves = layer.leaves(place)
    operands = [leaves["x"], plan_tensors(layer.plan, place), leaves["probs"], leaves["gate_up"], leaves["down"]]
    moe_mlp(*operands)
    operands[place_of] = change(operands[place_of].detach())
    with pytest.raises((ValueError, TypeError), match=f"^moe_mlp: {message}"):
        moe_mlp(*operands)
    assert answers == [True, None]


@pytest.mark.cpu_only
@pytest.mark.parametrize("groups", [[5, 0, 3], [-1, 4, 4]], ids=str)
def test_groups_of_a_bad_plan_are_left_to_the_checks(groups, answers, place):
    layer = Layer(np.random.default_rng(0), ODD, np.float32, form="by slot", sizes=(24, 16))
    leaves = layer.leaves(place)
    plan = plan_tensors(layer.plan, place)
    sizes = paddle.to_tensor([*groups, *[0] * (ODD.E - 3)], dtype="int32")
    bad = plan._replace(tokens_per_expert=sizes * 40)
    with pytest.raises(ValueError, match=r"^moe_mlp: plan\."):
        moe_mlp(leaves["x"], bad, leaves["probs"], leaves["gate_up"], leaves["down"])
    assert answers == [None]
