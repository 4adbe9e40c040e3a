# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the layers name the layer that was called, its own argument, and what was given."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops.nn import MoELayer, SwiGLU, SwiGLUExperts, TopKRouter, load_balance_loss
from paddle_moe_ops.routing import route

pytestmark = pytest.mark.usefixtures("place")

H = 12
SIZE = "must be from 1 to 2147483647, but got 0"
EXPERTS = "must be from 1 to 65536, but got 0"  # of layers with a router
# For each layer: good arguments of its constructor.
GOOD = {
    TopKRouter: {"hidden_size": H, "num_experts": 4, "topk": 2},
    SwiGLU: {"hidden_size": H, "intermediate_size": 6},
    SwiGLUExperts: {"num_experts": 4, "hidden_size": H, "intermediate_size": 6},
    MoELayer: {"hidden_size": H, "intermediate_size": 6, "num_experts": 4, "topk": 2},
}
ROUTING = [
    ({"topk": 5}, ValueError, "topk must be at most num_experts=4, but got 5"),
    ({"num_experts": 65537}, ValueError, "num_experts must be from 1 to 65536, but got 65537"),
    ({"scoring": "tanh"}, ValueError, "scoring must be one of 'softmax', 'sigmoid', but got 'tanh'"),
    ({"correction_bias": 1}, TypeError, "correction_bias must be a bool, but got 1 of type int"),
    ({"correction_bias": None}, TypeError, "correction_bias must be a bool, but got None of type NoneType"),
    ({"norm_topk_prob": "yes"}, TypeError, "norm_topk_prob must be a bool, but got 'yes' of type str"),
    ({"num_groups": 3}, ValueError, "num_groups must be a divisor of num_experts=4, but got 3"),
    ({"num_groups": 1.0}, TypeError, "num_groups must be an int, but got float"),
    ({"num_groups": 2, "topk_groups": 3}, ValueError, "topk_groups must be at most 2, the number of groups, but got 3"),
    ({"scores_per_group": 0}, ValueError, f"scores_per_group {SIZE}"),
    (
        {"topk": 3, "num_groups": 2, "topk_groups": 1},
        ValueError,
        "topk must be at most 2, the experts to choose from, but got 3",
    ),
    ({"scaling_factor": "2"}, TypeError, "scaling_factor must be a number, but got str"),
    ({"scaling_factor": float("inf")}, ValueError, "scaling_factor must be finite, but got inf"),
    ({"capacity_factor": "2"}, TypeError, "capacity_factor must be a number, but got str"),
    ({"capacity_factor": True}, TypeError, "capacity_factor must be a number, but got bool"),
    ({"capacity_factor": 0}, ValueError, "capacity_factor must be above 0 or None, but got 0"),
    ({"capacity_factor": float("nan")}, ValueError, "capacity_factor must be finite, but got nan"),
    ({"top_k": 2}, TypeError, "the argument is called topk, but got top_k"),
]
BAD_ARGUMENTS = [
    *(
        (layer, {name: 0}, ValueError, f"{name} {EXPERTS if 'topk' in good and name == 'num_experts' else SIZE}")
        for layer, good in GOOD.items()
        for name in good
    ),
    *(
        (layer, {name: 1.5}, TypeError, f"{name} must be an int, but got float")
        for layer in GOOD
        for name in GOOD[layer]
    ),
    *((layer, *bad) for layer in (TopKRouter, MoELayer) for bad in ROUTING),
    (MoELayer, {"num_shared_experts": -1}, ValueError, "num_shared_experts must be from 0 to 2147483647, but got -1"),
    (MoELayer, {"num_shared_experts": 1.0}, TypeError, "num_shared_experts must be an int, but got float"),
    (MoELayer, {"num_shared_experts": True}, TypeError, "num_shared_experts must be an int, but got a bool"),
    (MoELayer, {"combine": "sum"}, ValueError, "combine must be one of 'exact', 'reduced', but got 'sum'"),
]


@pytest.mark.parametrize(
    ("layer", "changes", "error", "text"),
    BAD_ARGUMENTS,
    ids=[
        f"{layer.__name__}-{'-'.join(f'{name}={value}' for name, value in bad.items())}"
        for layer, bad, *_ in BAD_ARGUMENTS
    ],
)
def test_bad_arguments_of_constructors_are_named(layer, changes, error, text):
    with pytest.raises(error, match=f"^{re.escape(f'{layer.__name__}: {text}')}$"):
        layer(**{**GOOD[layer], **changes})


def test_sizes_may_be_numpy_integers():
    layer = MoELayer(np.int64(H), np.int32(6), np.int64(4), np.int64(2), np.int64(1), scaling_factor=np.float32(1))
    assert layer(paddle.zeros([3, H])).shape == [3, H]
    assert isinstance(layer.hidden_size, int)
    assert isinstance(layer.router.topk, int)


def router():
    return TopKRouter(**GOOD[TopKRouter])


def experts():
    return SwiGLUExperts(2, H, 6)


def moe():
    return MoELayer(**GOOD[MoELayer])


def shared():
    return SwiGLU(H, 6)


def plan_of(ids):
    return route(paddle.to_tensor(ids, dtype="int32"), num_experts=2)


ANY = "must be of dtype bfloat16, float16 or float32, but got"
SEGMENTS = "SwiGLUExperts: tokens_per_expert must be 2 counts whose segments have 3 rows in all"
BAD_CALLS = {
    **{
        f"{name} in float64": (
            lambda make=make, rest=rest: make().to(dtype="float64")(paddle.zeros([3, H], "float64"), *rest()),
            TypeError,
            f"{name}: {argument} {ANY} float64",
        )
        for name, argument, make, rest in (
            ("SwiGLUExperts", "rows", experts, lambda: [paddle.to_tensor([1, 2])]),
            ("MoELayer", "x", moe, list),
            ("SwiGLU", "x", shared, list),
        )
    },
    "router array": (
        lambda: router()(np.zeros((2, H), np.float32)),
        TypeError,
        "TopKRouter: x must be a paddle.Tensor, but got ndarray",
    ),
    "router dtype": (lambda: router()(paddle.zeros([2, H], "int32")), TypeError, f"TopKRouter: x {ANY} int32"),
    "router rank": (
        lambda: router()(paddle.zeros([2, 3, H])),
        ValueError,
        "TopKRouter: x must be of shape [T, 12], but got [2, 3, 12]",
    ),
    "router width": (
        lambda: router()(paddle.zeros([2, H + 1])),
        ValueError,
        "TopKRouter: x must be of shape [T, 12], but got [2, 13]",
    ),
    "update without a bias": (
        lambda: TopKRouter(H, 4, 2, correction_bias=False).update_correction_bias([1, 1, 1, 1]),
        ValueError,
        "update_correction_bias: the router must be one with a correction bias, but got one without",
    ),
    "update load": (
        lambda: router().update_correction_bias([1, 2]),
        ValueError,
        "update_correction_bias: tokens_per_expert must be of shape [4], but got [2]",
    ),
    "update load of a traced pass": (
        lambda: router().update_correction_bias(None),
        TypeError,
        "update_correction_bias: tokens_per_expert must be a sequence of numbers or a tensor, but got NoneType",
    ),
    "update load of tensor": (
        lambda: router().update_correction_bias(paddle.ones([4, 1])),
        ValueError,
        "update_correction_bias: tokens_per_expert must be of shape [4], but got [4, 1]",
    ),
    "update rate": (
        lambda: router().update_correction_bias([1, 2, 3, 4], rate="1e-3"),
        TypeError,
        "update_correction_bias: rate must be a number, but got str",
    ),
    "update load of words": (
        lambda: router().update_correction_bias(["a", "b", "c", "d"]),
        TypeError,
        "update_correction_bias: tokens_per_expert must be a sequence of numbers or a tensor, "
        "but got ['a', 'b', 'c', 'd']",
    ),
    "update load of a word": (
        lambda: router().update_correction_bias("1234"),
        TypeError,
        "update_correction_bias: tokens_per_expert must be a sequence of numbers or a tensor, but got str",
    ),
    "update load of NaN": (
        lambda: router().update_correction_bias([1.0, float("nan"), 1.0, 1.0]),
        ValueError,
        "update_correction_bias: tokens_per_expert must be finite numbers, but got [1.0, nan, 1.0, 1.0]",
    ),
    "capacity of a word": (
        lambda: router().capacity("3"),
        TypeError,
        "capacity: num_tokens must be an int, but got str",
    ),
    "capacity of less than no tokens": (
        lambda: router().capacity(-5),
        ValueError,
        "capacity: num_tokens must be from 0 to 2147483647, but got -5",
    ),
    "loss of an expert too many": (
        lambda: load_balance_loss(paddle.ones([1, 3]), paddle.to_tensor([[0, 3]], place=paddle.CPUPlace())),
        ValueError,
        "load_balance_loss: ids must be in [-1, 3), but got 3",
    ),
    "loss of a negative expert": (
        lambda: load_balance_loss(paddle.ones([1, 3]), paddle.to_tensor([[0, -2]], place=paddle.CPUPlace())),
        ValueError,
        "load_balance_loss: ids must be in [-1, 3), but got -2",
    ),
    "shared array": (lambda: shared()([1.0]), TypeError, "SwiGLU: x must be a paddle.Tensor, but got list"),
    "shared dtype": (
        lambda: shared()(paddle.zeros([2, H], "bfloat16")),
        TypeError,
        'SwiGLU: x must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    "shared width": (
        lambda: shared()(paddle.zeros([2, 3, H - 1])),
        ValueError,
        "SwiGLU: x must be of shape [..., 12], but got [2, 3, 11]",
    ),
    "shared rank": (
        lambda: shared()(paddle.zeros([])),
        ValueError,
        "SwiGLU: x must be of shape [..., 12], but got []",
    ),
    "experts sum": (lambda: experts()(paddle.zeros([3, H]), [1, 1]), ValueError, f"{SEGMENTS}, but got [1, 1]"),
    "experts padded sum": (
        lambda: experts()(paddle.zeros([3, H]), [1, 1], padding_alignment=2),
        ValueError,
        f"{SEGMENTS}, but got [1, 1]",
    ),
    "experts sum of tensor": (
        lambda: experts()(paddle.zeros([3, H]), paddle.to_tensor([1, 1], place=paddle.CPUPlace())),
        ValueError,
        f"{SEGMENTS}, but got [1, 1]",
    ),
    "experts length": (lambda: experts()(paddle.zeros([3, H]), [3]), ValueError, f"{SEGMENTS}, but got [3]"),
    "experts length of tensor": (
        lambda: experts()(paddle.zeros([3, H]), paddle.to_tensor([3])),
        ValueError,
        "SwiGLUExperts: tokens_per_expert must be of shape [2], but got [1]",
    ),
    "experts negative": (
        lambda: experts()(paddle.zeros([3, H]), [4, -1]),
        ValueError,
        "SwiGLUExperts: tokens_per_expert[1] must be from 0 to 2147483647, but got -1",
    ),
    "experts float": (
        lambda: experts()(paddle.zeros([3, H]), [1.5, 2]),
        TypeError,
        "SwiGLUExperts: tokens_per_expert[0] must be an int, but got float",
    ),
    "experts float tensor": (
        lambda: experts()(paddle.zeros([3, H]), paddle.to_tensor([1.0, 2.0])),
        TypeError,
        "SwiGLUExperts: tokens_per_expert must be of dtype int32 or int64, but got float32",
    ),
    "experts no counts": (
        lambda: experts()(paddle.zeros([3, H])),
        ValueError,
        "SwiGLUExperts: tokens_per_expert or plan must be given, but got neither",
    ),
    "experts alignment": (
        lambda: experts()(paddle.zeros([3, H]), [1, 2], padding_alignment=0),
        ValueError,
        f"SwiGLUExperts: padding_alignment {SIZE}",
    ),
    "experts dtype": (
        lambda: experts()(paddle.zeros([3, H], "float16"), [1, 2]),
        TypeError,
        'SwiGLUExperts: rows must be of dtype float32, but got float16; convert it with .astype("float32")',
    ),
    "experts width": (
        lambda: experts()(paddle.zeros([3, H + 1]), [1, 2]),
        ValueError,
        "SwiGLUExperts: rows must be of shape [N, 12], but got [3, 13]",
    ),
    "experts by a plan dtype": (
        lambda: experts()(paddle.zeros([1, H], "float16"), plan=plan_of([[0, 1]])),
        TypeError,
        'SwiGLUExperts: rows must be of dtype float32, but got float16; convert it with .astype("float32")',
    ),
    "experts by a plan tokens": (
        lambda: experts()(paddle.zeros([2, H]), plan=plan_of([[0, 1]])),
        ValueError,
        "SwiGLUExperts: rows must be of shape [1, hidden], the tokens of plan, but got [2, 12]",
    ),
    "experts by a plan probs": (
        lambda: experts()(paddle.zeros([1, H]), plan=plan_of([[0, 1]]), probs=paddle.zeros([1, 3])),
        ValueError,
        "SwiGLUExperts: probs must be of shape [2] by row of plan, or [1, 2] by slot, but got [1, 3]",
    ),
    "experts of another plan": (
        lambda: SwiGLUExperts(3, H, 6).weighted_rows(paddle.zeros([1, H]), plan_of([[0, 1]]), paddle.zeros([1, 2])),
        ValueError,
        "SwiGLUExperts: plan must be one of 3 experts, but got one of 2",
    ),
    "experts probs without a plan": (
        lambda: experts()(paddle.zeros([3, H]), [1, 2], probs=paddle.ones([3])),
        ValueError,
        "SwiGLUExperts: probs must be None without a plan, but got Tensor",
    ),
    "experts counts and a plan": (
        lambda: experts()(paddle.zeros([1, H]), [1, 1], plan=plan_of([[0, 1]])),
        ValueError,
        "SwiGLUExperts: tokens_per_expert must be None with a plan, but got list",
    ),
    "experts alignment and a plan": (
        lambda: experts()(paddle.zeros([1, H]), padding_alignment=8, plan=plan_of([[0, 1]])),
        ValueError,
        "SwiGLUExperts: padding_alignment must be 1 with a plan, but got 8",
    ),
    "experts micro-batch": (
        lambda: experts()(paddle.zeros([1, H]), plan=plan_of([[0, 1]]), is_first_microbatch=5),
        TypeError,
        "SwiGLUExperts: is_first_microbatch must be a bool, but got 5 of type int",
    ),
    "experts no plan": (
        lambda: experts()(paddle.zeros([1, H]), plan=[1]),
        TypeError,
        "SwiGLUExperts: plan must be a paddle_moe_ops.Plan, but got list",
    ),
    "layer array": (lambda: moe()([[1.0] * H]), TypeError, "MoELayer: x must be a paddle.Tensor, but got list"),
    "layer dtype": (
        lambda: moe()(paddle.zeros([3, H], "bfloat16")),
        TypeError,
        'MoELayer: x must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    "narrow layer dtype": (
        lambda: moe().to(dtype="float16")(paddle.zeros([3, H])),
        TypeError,
        "MoELayer: x must be of dtype float16, but got float32",
    ),
    "layer rank 1": (
        lambda: moe()(paddle.zeros([H])),
        ValueError,
        "MoELayer: x must be of shape [T, 12] or [B, S, 12], but got [12]",
    ),
    "layer rank 4": (
        lambda: moe()(paddle.zeros([2, 3, 4, H])),
        ValueError,
        "MoELayer: x must be of shape [T, 12] or [B, S, 12], but got [2, 3, 4, 12]",
    ),
    "layer width": (
        lambda: moe()(paddle.zeros([3, H + 1])),
        ValueError,
        "MoELayer: x must be of shape [T, 12] or [B, S, 12], but got [3, 13]",
    ),
}


@pytest.mark.parametrize(("bad_call", "error", "text"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_named(bad_call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        bad_call()


@pytest.mark.parametrize("options", [{}, {"num_shared_experts": 0}, {"compute": "fp8_1x128"}], ids=str)
@pytest.mark.parametrize("shape", [[3, H + 1], [2, H], [1], [3, H, 1]])
def test_a_gradient_of_another_shape_is_refused(options, shape):
    layer, x = MoELayer(**GOOD[MoELayer], **options), paddle.zeros([3, H])
    x.stop_gradient = False
    name = "MoELayer" if layer.shared is not None else "(MoELayer|moe_mlp)"
    expected = re.escape(f": the gradient of the result must be of shape [3, {H}]")
    with pytest.raises((ValueError, OSError), match=name + expected):
        paddle.grad(layer(x), [x, *layer.experts.parameters()], grad_outputs=[paddle.ones(shape)])
