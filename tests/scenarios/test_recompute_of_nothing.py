# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute of both kinds without tokens or rows: the gradients of the same call without recompute."""

from __future__ import annotations

import itertools

import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import Plan, moe_mlp, permute, route, unpermute, use_backend
from paddle_moe_ops.compat.incubate_dispatch import moe_gate_dispatch, moe_gate_dispatch_permute
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.dense import assert_close, results

from ..pairwise import in_turn, pairwise
from .operations import FLOAT8_EXPERTS, OPERATIONS, T, loss_of, make_inputs

pytestmark = pytest.mark.long

H, I, E, K, A = 12, 6, 3, 2, 4  # noqa: E741
WITHOUT = {"no tokens": (0, True), "no rows": (T, False)}
NOTHING = pytest.mark.parametrize(("tokens", "routed"), WITHOUT.values(), ids=WITHOUT)
BY = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
# Interpreted kernels take long; the other way is a slow test.
BY_HOOKS = pytest.mark.parametrize(
    "use_reentrant", [pytest.param(True, marks=pytest.mark.slow), False], ids=["reentrant", "hooks"]
)
EVERY_OPERATION = {"operation": {str(each): each for each in (*OPERATIONS, FLOAT8_EXPERTS)}, "tokens, routed": WITHOUT}


def check_operation(operation, tokens, routed, use_reentrant, place):
    def gradients(run):
        inputs, leaves = make_inputs(place, tokens=tokens, routed=routed)

        def call(*floats):
            return operation.call({**inputs, **dict(zip(operation.floats, floats, strict=True))})

        loss_of(run(call, *(inputs[name] for name in operation.floats))).backward()
        return {name: leaves[name].grad for name in operation.floats}

    expected = gradients(lambda call, *floats: call(*floats))
    got = gradients(lambda call, *floats: recompute(call, *floats, use_reentrant=use_reentrant))
    for name in operation.floats:
        assert_bits_equal(got[name], expected[name], what=name)


@pairwise({**EVERY_OPERATION, "use_reentrant": {"reentrant": True, "hooks": False}}, others_are_slow=True)
def test_every_operation(operation, tokens, routed, use_reentrant, place, backend):
    check_operation(operation, tokens, routed, use_reentrant, place)


@pytest.mark.sampled(3)
@BY_HOOKS
@in_turn(EVERY_OPERATION)
@pytest.mark.cpu_only
def test_every_operation_on_interpreted_kernels(operation, tokens, routed, use_reentrant, interpreted):
    with use_backend("triton"):
        check_operation(operation, tokens, routed, use_reentrant, "cpu")


CHOICES = {
    "moe_gate_dispatch": lambda x, gates: moe_gate_dispatch(x, gates, None, K, 2, True)[:2],
    "moe_gate_dispatch, without padding": lambda x, gates: moe_gate_dispatch(x, gates, None, K, 2, False)[:2],
    "moe_gate_dispatch_permute": lambda x, gates: moe_gate_dispatch_permute(x, gates, None, K, 2, 1)[:2],
    "route, with a capacity": lambda x, gates: (route(gates > 0, gates, topk=K, capacity=2).row_probs, x * 1),
}


@pytest.mark.sampled(4)
@BY
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_choices_of_experts_for_no_tokens(choose, use_reentrant, place, backend):
    x, gates = paddle.zeros([0, H]), paddle.zeros([0, E])
    x.stop_gradient = gates.stop_gradient = False
    chosen = recompute(choose, x, gates, use_reentrant=use_reentrant)
    sum(each.sum() for each in chosen).backward()
    assert (x.grad.shape, gates.grad.shape) == ([0, H], [0, E])


def plan_of(tokens, routed, **options):
    ids = paddle.arange(tokens * K, dtype="int32").reshape([tokens, K]) % E if routed else paddle.full([tokens, K], -1)
    return route(ids.astype("int32"), num_experts=E, **options)


class Mlp(paddle.nn.Layer):
    """`moe_mlp` with options."""

    def __init__(self, **options):
        super().__init__()
        self.gate_up = self.create_parameter([E, H, 2 * I])
        self.down = self.create_parameter([E, I, H])
        self.probs = self.create_parameter([1, K])
        self.options = options

    def forward(self, x, plan):
        probs = self.probs * paddle.ones([x.shape[0], 1])
        return moe_mlp(x, plan, probs, self.gate_up, self.down, **self.options)


class ByCounts(paddle.nn.Layer):
    """`SwiGLUExperts` on rows."""

    def __init__(self):
        super().__init__()
        self.experts = SwiGLUExperts(E, H, I, bias=True)

    def forward(self, x, plan):
        return unpermute(self.experts(permute(x, plan)[0], plan.tokens_per_expert, plan.padding_alignment), plan)


class ByPlan(paddle.nn.Layer):
    """`SwiGLUExperts` with a plan."""

    def __init__(self, *, combine, **options):
        super().__init__()
        self.experts, self.combine = SwiGLUExperts(E, H, I, **options), combine

    def forward(self, x, plan):
        out = self.experts(x, plan=plan, combine=self.combine)
        return out if self.combine else unpermute(out, plan)


FLOAT8 = {"compute": "fp8_1x128"}
LAYERS = {
    "moe_mlp": lambda: Mlp(),
    "moe_mlp, keep x": lambda: Mlp(keep="x"),
    "moe_mlp, GEGLU": lambda: Mlp(activation="geglu"),
    "moe_mlp, float8": lambda: Mlp(**FLOAT8),
    "moe_mlp, float8, keep x": lambda: Mlp(**FLOAT8, keep="x"),
    "moe_mlp, float8, keep h_fp8": lambda: Mlp(**FLOAT8, keep="h_fp8"),
    "SwiGLUExperts by counts": ByCounts,
    "SwiGLUExperts by plan": lambda: ByPlan(combine=False, bias=True),
    "SwiGLUExperts, combined": lambda: ByPlan(combine=True, bias=True),
    "SwiGLUExperts, float8": lambda: ByPlan(combine=True, **FLOAT8),
}
PLANS = {
    "no tokens": lambda: (0, plan_of(0, True, padding_alignment=A)),
    "no rows": lambda: (T, plan_of(T, False, padding_alignment=A)),
    "all rows dropped": lambda: (T, plan_of(T, True, buffer_size=0, validate=False)),
}
BUFFER = "no tokens in a static buffer"  # of which counts on the host must name every row
PLANS[BUFFER] = lambda: (0, plan_of(0, True, padding_alignment=A, buffer_size=8))
PAIRS = [each for each in itertools.product(LAYERS, PLANS) if each != ("SwiGLUExperts by counts", BUFFER)]
# Every second plan of a layer, in turn; the others are slow tests.
SOME_PAIRS = [
    pytest.param(layer, plan, marks=[pytest.mark.slow] * (([*LAYERS].index(layer) + [*PLANS].index(plan)) % 2))
    for layer, plan in PAIRS
]
BY_LAYER_AND_PLAN = pytest.mark.parametrize(
    ("layer", "plan", "use_reentrant"),
    [
        pytest.param(layer, plan, way, id=f"{layer}-{plan}-{name}", marks=[pytest.mark.slow] * (index % 2 != way))
        for index, (layer, plan) in enumerate(PAIRS)
        for name, way in (("reentrant", True), ("hooks", False))
    ],
)


def check_layer(layer, plan, use_reentrant, dtype="float32"):
    layer = LAYERS[layer]().to(dtype=dtype)
    if isinstance(layer, Mlp):
        layer.probs = paddle.create_parameter([1, K], "float32")
    tokens, plan = PLANS[plan]()
    x = paddle.ones([tokens, H], dtype)
    expected = results(layer, x, lambda x: layer(x, plan))
    assert_close(results(layer, x, lambda x: recompute(layer, x, plan, use_reentrant=use_reentrant)), expected)


@BY_LAYER_AND_PLAN
def test_layers_of_experts(layer, plan, use_reentrant, place, backend):
    check_layer(layer, plan, use_reentrant)


@pytest.mark.sampled(2)
@BY_HOOKS
@pytest.mark.parametrize(("layer", "plan"), SOME_PAIRS)
@pytest.mark.cpu_only
def test_layers_of_experts_on_interpreted_kernels(layer, plan, use_reentrant, interpreted):
    with use_backend("triton"):
        check_layer(layer, plan, use_reentrant, "float16")


@BY
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.75}, {**FLOAT8}], ids=["plain", "capacity", "float8"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_without_tokens(masked, options, use_reentrant, place, backend):
    layer, x = MoELayer(H, I, E, K, **options), paddle.zeros([0, H])
    mask = paddle.zeros([0], "bool") if masked else None

    def all_of(x):
        return layer(x, mask=mask), layer.aux_loss, layer.z_loss

    assert_close(
        results(layer, x, lambda x: recompute(all_of, x, use_reentrant=use_reentrant)), results(layer, x, all_of)
    )


class Weighted(PyLayer):
    """A node of the user's whose backward pass hands saved tensors to functions of the package."""

    @staticmethod
    def forward(ctx, x, probs, plan):
        fields = [each for each in plan if isinstance(each, paddle.Tensor)]
        ctx.save_for_backward(probs, *fields)
        ctx.names = [name for name, each in zip(Plan._fields, plan, strict=True) if isinstance(each, paddle.Tensor)]
        ctx.plan = plan
        return unpermute(permute(x, plan)[0], plan, probs)

    @staticmethod
    def backward(ctx, gradient):
        probs, *fields = ctx.saved_tensor()
        plan = ctx.plan._replace(**dict(zip(ctx.names, fields, strict=True)))
        return unpermute(permute(gradient, plan)[0], plan, probs)


@NOTHING
@BY
def test_nodes_that_save_a_plan(use_reentrant, tokens, routed, place, backend):
    plan = plan_of(tokens, routed)
    x, probs = paddle.ones([tokens, H]), paddle.ones([tokens, K])
    x.stop_gradient = False
    recompute(lambda x: Weighted.apply(x, probs, plan), x, use_reentrant=use_reentrant).sum().backward()
    assert_bits_equal(x.grad, paddle.zeros([tokens, H]))
