# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts placed on any ranks, in any numbers, beside one process that has all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import permute, unpermute
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.expert_parallel.placement import Placement, Slots
from paddle_moe_ops.testing.equality import assert_bits_equal

from .problems import Problem, alone, results, scaled
from .processes import run
from .test_expert_parallel_layer import assert_like_one_process

PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": 80}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"combine": "exact"},
    "exact over peers": {"combine": "exact", **PEER},
    "reduced": {"combine": "reduced"},
    "reduced over peers": {"combine": "reduced", **PEER},
    "parts of one size": {"combine": "reduced", "tokens_per_rank": 80},
}
# Tokens of each rank, E, K, and the placement.
PROBLEMS: dict[int, list[tuple[Problem, list[int] | None]]] = {
    2: [
        (Problem((5, 16), 5, 2, 7), None),
        (Problem((63, 1), 7, 3, 72, dtype="bfloat16"), [1, 0, 1, 1, 0, 1, 1]),
        (Problem((0, 7), 4, 2, 8), [1, 1, 0, 0]),
        (Problem((9, 4), 3, 3, 33, "half none"), [1, 1, 1]),
        (Problem((3, 2), 1, 1, 8), None),
        (Problem((11, 6), 6, 4, 16, "one expert"), [0, 1, 0, 1, 0, 1]),
    ],
    3: [
        (Problem((4, 0, 9), 7, 3, 16), None),
        (Problem((1, 12, 5), 8, 4, 24, "half none"), [2, 0, 2, 2, 0, 0, 2, 0]),
        (Problem((6, 3, 2), 2, 2, 8), None),
        (Problem((0, 0, 17), 6, 2, 40), [0, 1, 2, 0, 1, 2]),
    ],
}


SIZES = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)], scope="module")


def exchanged(problem: Problem, placement: list[int] | None, options: dict[str, Any], rank: int) -> dict[str, NDArray]:
    """The results of one rank's tokens, whose expert outputs depend on the number of the expert alone."""
    ep, t = ExpertParallel(problem.experts, placement=placement, **options), problem.tensors(problem.of_rank(rank))
    received = ep.dispatch(t["x"], t["ids"], t["probs"])
    ids = problem.arrays()["ids"][problem.of_rank(rank)]
    routed = [int((ids == expert).any(1).sum()) for expert in range(problem.experts)]
    assert received.routed_per_expert.tolist() == routed
    assert received.dropped_slots.item() == 0
    assert len(received.tokens_per_expert) == ep.num_local_experts == received.plan.num_experts
    assert len(received.plan.expert_offsets) == ep.num_local_experts + 1
    assert len(received.plan.routed_per_expert) == ep.num_local_experts
    names = paddle.to_tensor([*ep.local_experts, 0], "int32")
    experts = paddle.gather(names, received.plan.row_to_expert.clip(min=0)) if received.plan.num_rows else names[:0]
    if received.rows is not None:
        return results(ep.combine(scaled(received.rows, experts), received), t)
    if not ep.local_experts:
        return results(ep.combine(received.tokens * 0, received), t)
    rows = scaled(permute(received.tokens, received.plan)[0], experts)
    return results(ep.combine(unpermute(rows, received.plan, received.probs), received), t)


def all_exchanged(size: int, way: str, integers: bool) -> list[dict[str, NDArray]]:
    rank = paddle.distributed.get_rank()
    of_rank = [(problem._replace(integers=integers), placement) for problem, placement in PROBLEMS[size]]
    return [exchanged(*each, WAYS[way], rank) for each in of_rank]


@pytest.mark.parametrize("way", WAYS)
@SIZES
def test_any_placement_has_the_bits_of_one_process(size, way):
    integers = way.startswith(("reduced", "parts"))
    parts = run(all_exchanged, size, size=size, way=way, integers=integers)
    for number, (problem, placement) in enumerate(PROBLEMS[size]):
        for name, expected in alone(problem._replace(integers=integers)).items():
            got = np.concatenate([each[number][name] for each in parts])
            assert_bits_equal(got, expected, what=f"{name} of {problem} placed {placement}")


@pytest.mark.parametrize("tokens", [0, 2])
def test_slots_of_experts_are_int32(tokens):
    ids = paddle.full([tokens, 3], 1, "int64")
    slots = Slots(Placement((1, 0, 1), 2)).of_ids(ids)
    assert (slots.dtype, slots.tolist()) == (paddle.int32, [[0] * 3] * tokens)


@pytest.mark.parametrize(("ranks", "expected"), [((1, 1, 0), True), ((0, 1, 0), False), ((0, 0), False)])
def test_experts_are_in_blocks_if_every_rank_has_some_that_follow_each_other(ranks, expected):
    assert Placement(ranks, 2).is_in_blocks == expected


TRAINED = {
    2: [
        ({"combine": "exact", "experts": 5}, (5, 11)),
        ({"combine": "reduced", "experts": 5, "placement": [1, 0, 1, 1, 0]}, (5, 11)),
        ({"combine": "reduced", "placement": [0, 0, 0, 0], "recomputes": True, "expert_bias": True}, (16, 0)),
        ({"combine": "exact", "placement": [1, 1, 1, 1]}, (16, 0)),
        ({"combine": "reduced", "placement": [1, 1, 1, 1], **PEER}, (4, 6)),
        ({"combine": "exact", "experts": 5, "placement": (0, 1, 0, 1, 1), **PEER}, (5, 11)),
    ],
    3: [
        ({"combine": "exact", "experts": 7}, (5, 0, 11)),
        ({"combine": "reduced", "placement": [2, 0, 2, 0]}, (5, 2, 11)),
    ],
}
CASES = [
    pytest.param(options, tokens, id=f"{size} ranks, {options}", marks=[pytest.mark.slow] * (size > 2 or number > 2))
    for size, cases in TRAINED.items()
    for number, (options, tokens) in enumerate(cases)
]


@pytest.mark.parametrize(("options", "tokens"), CASES)
def test_training_is_that_of_one_process(options, tokens):
    assert_like_one_process(tokens, **options)
