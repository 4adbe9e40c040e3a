# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Whole blocks of the functions named as Unsloth's, with a router that is trained, against dense experts.

Router, indices, permutation, two products, permutation back, weighted sum: apart, and in every way to make the moves
and the weights part of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops import permute, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.indexed import calculate_topk, get_routing_indices, torch_grouped_gemm
from paddle_moe_ops.indexed import permute as permute_indexed
from paddle_moe_ops.indexed import unpermute as unpermute_indexed
from tests.ops.problems import ordinary, tensor
from tests.pairwise import pairwise

B, S, K, E, H, INNER = 3, 13, 3, 7, 10, 9
T = B * S
STEPS, RATE = 4, 0.05


class RouterOptions(NamedTuple):
    """Options of the router, named as in calculate_topk."""

    use_sigmoid: bool
    renormalize: bool
    pre_act: bool

    def __str__(self) -> str:
        scores = "sigmoid" if self.use_sigmoid else "softmax"
        return f"{scores} {'normed' if self.renormalize else 'raw'} {'pre_act' if self.pre_act else 'post_act'}"


ROUTERS = [RouterOptions(*(bool(n & bit) for bit in (4, 2, 1))) for n in range(8)]


def routed(model, x, options):
    """Weights [T, K] and ids [T, K] of tokens [B, S, H]."""
    logits = paddle.matmul(x.reshape([T, H]), model["router"])
    return calculate_topk(
        gating_output=logits,
        top_k=K,
        use_sigmoid=options.use_sigmoid,
        renormalize=options.renormalize,
        pre_act=options.pre_act,
        post_act=not options.pre_act,
    )


def activated(rows):
    gate, up = rows.chunk(2, axis=-1)
    return F.silu(gate) * up


def weighted_sum(slots, weights):
    return (slots.reshape([T, K, H]) * weights.unsqueeze(-1)).sum(axis=1)


def by_indices(model, x, options, index_dtype, shape):
    """The functions one by one, with ids of any rank."""
    weights, ids = routed(model, x, options)
    counts, gather = get_routing_indices(ids.reshape(shape), E, index_dtype=index_dtype)
    rows = permute_indexed(x, gather, K)
    rows = activated(torch_grouped_gemm(rows, model["gate_up"], counts))
    rows = torch_grouped_gemm(rows, model["down"], m_sizes=counts, transpose=True)
    return weighted_sum(unpermute_indexed(rows, gather), weights)


FUSED_WEIGHTS = ("none", "matrix", "flat by slot", "by row")


def by_plan(model, x, options, permute_x, permute_y, fused, padding_alignment):
    """The moves and the weights as parts of the products, or apart."""
    weights, ids = routed(model, x, options)
    plan = route(ids, weights, num_experts=E, padding_alignment=padding_alignment)
    rows = x if permute_x else permute(x.reshape([T, H]), plan)[0]
    rows = activated(grouped_gemm(rows, model["gate_up"], plan=plan, permute_x=permute_x))
    given = {
        "none": {},
        "matrix": {"topk_weights": weights},
        "flat by slot": {"topk_weights": weights.reshape([-1]), "weights_by": "slot"},
        "by row": {"topk_weights": plan.row_probs, "weights_by": "row"},
    }[fused]
    rows = grouped_gemm(rows, model["down"], plan=plan, permute_y=permute_y, **given)
    left = paddle.ones_like(weights) if given else weights
    if permute_y:
        return weighted_sum(rows, left)
    return unpermute(rows, plan) if given else unpermute(rows, plan, weights)


def dense(model, x, options):
    """Every expert on every token, with weights [T, E] that are 0 for all but the K best."""
    tokens = x.reshape([T, H])
    logits = paddle.matmul(tokens, model["router"])
    one_hot = (paddle.argsort(logits, axis=-1, descending=True)[:, :K].unsqueeze(-1) == paddle.arange(E)).any(axis=1)
    if options.use_sigmoid:
        scores = F.sigmoid(logits)
    else:
        scores = F.softmax(logits if options.pre_act else paddle.where(one_hot, logits, logits * 0 - 1e9))
    weights = scores * one_hot.astype("float32")
    if options.renormalize:
        weights = weights / weights.sum(axis=-1, keepdim=True)
    hidden = activated(paddle.matmul(tokens.unsqueeze(0), model["gate_up"], transpose_y=True))
    of_experts = paddle.matmul(hidden, model["down"], transpose_y=True)
    return (of_experts * weights.transpose([1, 0]).unsqueeze(-1)).sum(axis=0)


def trained(block, options, place, *arguments):
    """Outputs of each step, the gradients of its tokens, and the parameters in the end."""
    rng = np.random.default_rng(17)
    shapes = {"router": (H, E), "gate_up": (E, 2 * INNER, H), "down": (E, H, INNER)}
    model = {name: tensor(ordinary(rng, shape), place, gradient=True) for name, shape in shapes.items()}
    optimizer = paddle.optimizer.SGD(RATE, parameters=list(model.values()))
    results = {}
    for step in range(STEPS):
        x = tensor(ordinary(rng, (B, S, H)), place, gradient=True)
        target = tensor(ordinary(rng, (T, H)), place)
        out = block(model, x, options, *arguments)
        (out - target).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        results.update({f"out {step}": out.numpy(), f"d_x {step}": x.grad.numpy()})
    return {**results, **{name: parameter.numpy() for name, parameter in model.items()}}


def assert_trains_as_dense(block, options, place, *arguments):
    got, expected = trained(block, options, place, *arguments), trained(dense, options, place)
    for name, wanted in expected.items():
        np.testing.assert_allclose(got[name], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


@pairwise(
    {"options": ROUTERS, "index_dtype": ["int32", "int64"], "shape": [[T * K], [T, K], [B, S, K]]},
    others_are_slow=True,
)
def test_a_block_by_indices_trains_as_dense_experts_do(options, index_dtype, shape, place):
    assert_trains_as_dense(by_indices, options, place, index_dtype, shape)


@pytest.mark.sampled(2)
@pairwise(
    {
        "options": ROUTERS,
        "permute_x": {"permute": False, "permute_x": True},
        "permute_y": {"unpermute": False, "permute_y": True},
        "fused": FUSED_WEIGHTS,
    },
    others_are_slow=True,
)
def test_a_block_by_a_plan_trains_as_dense_experts_do(options, permute_x, permute_y, fused, place):
    for padding_alignment in (1, 4):
        assert_trains_as_dense(by_plan, options, place, permute_x, permute_y, fused, padding_alignment)


@pytest.mark.parametrize("fused", FUSED_WEIGHTS)
def test_a_fused_block_on_every_backend(fused, place, backend):
    assert_trains_as_dense(by_plan, ROUTERS[-1], place, True, True, fused, 2)
    assert_trains_as_dense(by_indices, ROUTERS[-1], place, "int64", [B, S, K])


def test_the_routers_learn_something():
    """Training changes the routers' weights, so comparing them afterwards proves something."""
    for options in ROUTERS:
        rng = np.random.default_rng(17)
        first = ordinary(rng, (H, E))
        assert np.abs(trained(dense, options, "cpu")["router"] - first).max() > 1e-3
