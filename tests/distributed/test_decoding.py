# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over ranks: steps of few tokens, of another number in each step and on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import permute, unpermute
from paddle_moe_ops.backends.quantized import FORMATS
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

from .fleets import code_of_guide
from .problems import scaled
from .processes import run

EXPERTS, TOPK, HIDDEN, INNER, ROOM = 6, 2, 64, 32, 16
STEPS = ((3, 16), (0, 5), (16, 0), (1, 1), (0, 0), (30, 2), (7, 7))
DECODING: dict[str, Any] = {"combine": "reduced", "transport": "peer", "tokens_per_rank": ROOM}


def batch(rank: int, step: int, tokens: int) -> dict[str, NDArray]:
    """Small integers, whose sums every dtype has."""
    rng = np.random.default_rng([rank, step])
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
    x = 4 * rng.integers(-2, 3, (tokens, HIDDEN)).astype(np.float32)
    return {"x": x, "ids": np.ascontiguousarray(ids), "probs": rng.integers(1, 3, ids.shape).astype(np.float32)}


def due(arrays: dict[str, NDArray]) -> NDArray:
    """The result of one process; expert e multiplies by e / 4 + 1."""
    factors = (arrays["probs"] * (arrays["ids"] / 4 + 1)).sum(axis=1, keepdims=True)
    return (arrays["x"] * factors).astype(np.float32)


def slots_without_room(ids: NDArray) -> int:
    """Slots of tokens beyond the room that each rank has for this one."""
    at_rank = [ids // (EXPERTS // 2) == rank for rank in range(2)]
    return sum(int((here & (np.cumsum(here.any(axis=1)) > ROOM)[:, None]).sum()) for here in at_rank)


def steps_of_a_rank(order: list[int], trains: str) -> list[tuple[NDArray, int]]:
    rank, ep = paddle.distributed.get_rank(), ExpertParallel(EXPERTS, **DECODING)
    found = []
    for step in order:
        arrays = batch(rank, step, STEPS[step][rank])
        x, ids, probs = (paddle.to_tensor(arrays[name]) for name in ("x", "ids", "probs"))
        x.stop_gradient = False
        with paddle.set_grad_enabled(trains == "all" or (trains == "one" and rank == 0)):
            received = ep.dispatch(x, ids, probs)
            assert received.tokens.shape == [2 * ROOM, HIDDEN]  # in every step
            experts = received.plan.row_to_expert + ep.first_expert
            rows = scaled(permute(received.tokens, received.plan)[0], experts)
            out = ep.combine(unpermute(rows, received.plan, received.probs), received)
        if trains == "all":
            out.sum().backward()
            assert x.grad.shape == x.shape
        found.append((out.numpy(), received.dropped_slots.item()))
    return found


@pytest.mark.parametrize("trains", ["none", "one", "all"], ids=lambda trains: f"{trains} trains")
def test_steps_of_any_size_have_the_tokens_of_one_process(trains):
    order = [*range(len(STEPS)), 0, 3, 2]
    for rank, found in enumerate(run(steps_of_a_rank, 2, order=order, trains=trains)):
        for step, (out, dropped) in zip(order, found, strict=True):
            arrays = batch(rank, step, STEPS[step][rank])
            assert dropped == slots_without_room(arrays["ids"])
            assert (dropped > 0) == (len(out) == 30)
            if not dropped:
                assert_bits_equal(out, due(arrays))


def served(format: str | None, order: list[int]) -> list[NDArray]:
    """The outputs of a layer whose experts are quantised, step by step."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    paddle.seed(7)
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, group=group, **DECODING)
    layer.eval()
    if format is not None:
        layer.quantize_experts(format)
    with paddle.no_grad():
        return [layer(paddle.to_tensor(batch(rank, step, STEPS[step][rank])["x"])).numpy() for step in order]


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_served_layer_gives_each_step_what_it_gives_alone(format):
    order = [0, 1, 3, 2, 6]
    together = run(served, 2, format=format, order=order)
    for place, step in enumerate(order):
        alone = run(served, 2, format=format, order=[step])
        for rank in range(2):
            assert_bits_equal(together[rank][place], alone[rank][0])


def served_by_one_expert(format: str) -> list[NDArray]:
    """Outputs of a layer whose only expert is on the first rank, and those of one process with the same codes."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    paddle.seed(7)
    options = {"norm_topk_prob": False, "num_shared_experts": 0}
    alone = MoELayer(HIDDEN, INNER, 1, 1, **options).quantize_experts(format)
    saved, layer = (MoELayer(HIDDEN, INNER, 1, 1, group=group, **options, **DECODING) for _ in range(2))
    for each in (saved, layer):
        each.quantize_experts(format)
    state = alone.state_dict()
    if rank == 1:
        state = {name: each[:0] if name.startswith("experts.") else each for name, each in state.items()}
    saved.set_state_dict(state)
    layer.set_state_dict(saved.state_dict())
    layer.eval()
    with paddle.no_grad():
        x = paddle.randn([5, HIDDEN])[: 5 - 2 * rank]
        return [each(x).numpy() for each in (layer, alone)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_without_experts_serves_those_of_others(format):
    for out, expected in run(served_by_one_expert, 2, format=format):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_the_guides_program_runs():
    for names in run(code_of_guide, 2, heading="Several ranks", page="serving.md"):
        assert "out" in names
