# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models with experts placed on any ranks, trained with Fleet, give the losses and parameters of one process."""

from __future__ import annotations

import functools
from typing import Any

import paddle
import pytest

from paddle_moe_ops.expert_parallel import move_experts

from . import test_fleet
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import Net
from .test_fleet import DATA, DIVIDED, EXPERTS, SHARDING, TWO

pytestmark = pytest.mark.long
UNEVEN, ONE_HAS_ALL = [1, 0, 1, 1], [1, 1, 1, 1]


def placed(placement: list[int], moves: bool, **given: Any) -> Any:
    """`test_fleet.with_fleet` of a model with a placement, and of one that moves in its third step."""
    calls = []

    class Moving(Net):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            calls.append(x)
            if moves and len(calls) == 3:
                optimizer = test_fleet.made_here
                move_experts(self, UNEVEN, optimizer)
            return super().forward(x)

    def kept(*arguments: Any) -> Any:
        test_fleet.made_here = of_package(*arguments)
        return test_fleet.made_here

    of_package = test_fleet.distributed_optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_fleet, "Net", functools.partial(Moving, placement=placement))
        patch.setattr(test_fleet, "distributed_optimizer", kept)
        patch.setattr(test_fleet, "made_here", None, raising=False)
        return test_fleet.with_fleet(**given)


def assert_like_one_process(
    ranks: Any,
    kind: str,
    placement: list[int],
    *,
    moves: bool = False,
    tokens: tuple[int, ...] = (5, 11),
    **options: Any,
) -> None:
    def call(count: int, _: Any, **arguments: Any) -> Any:
        return ranks(count, placed, placement=placement, moves=moves, **arguments)

    test_fleet.assert_like_one_process(call, TWO[kind], kind, tokens, **options)


@pytest.mark.parametrize(
    ("kind", "placement"),
    [*((kind, UNEVEN) for kind in TWO), (DATA, ONE_HAS_ALL)],
    ids=[*TWO, "data parallel, a rank without experts"],
)
def test_training_with_fleet_is_that_of_one_process(ranks, kind, placement):
    assert_like_one_process(ranks, kind, placement, optimizer="AdamW")


@pytest.mark.cpu_only  # Fleet names the devices on which it runs, and a plug-in's is none of them
@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
def test_fleet_may_divide_each_parameter(ranks, kind):
    assert_like_one_process(ranks, kind, UNEVEN, tokens=(8, 8), **DIVIDED)


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", [DATA, SHARDING])
def test_checkpoints_of_paddle_have_all_experts(ranks, kind, tmp_path):
    options = {"optimizer": "AdamW", "save": str(tmp_path / "flex")}
    assert_like_one_process(ranks, kind, [1, 0, 0, 0], tokens=(8, 8), **options)


def test_experts_move_in_a_data_parallel_topology(ranks):
    assert_like_one_process(ranks, DATA, [0, 1, 0, 1], moves=True, optimizer="AdamW")


def refused(kind: str) -> list[str]:
    """The errors of a move with an optimizer that divides its states, and of one for a rank without experts."""
    topology, texts = test_fleet.start_fleet(**TWO[kind]), []
    for placement in (UNEVEN, ONE_HAS_ALL):
        net = Net(test_fleet.group_of_experts(topology, kind), placement=placement)
        optimizer = paddle.optimizer.AdamW(parameters=net.parameters())
        texts.append(
            caught(lambda net=net, made=optimizer: move_experts(net, [0] * 4, test_fleet.distributed_optimizer(made)))
        )
    return texts


@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
def test_what_is_not_known_to_be_right_is_refused(ranks, kind):
    for texts in ranks(2, refused, kind=kind):
        assert texts == [
            "ValueError: move_experts: optimizer must be one that keeps whole states on every rank, but got Sharding",
            "ValueError: distributed_optimizer: placement must be one in which each rank has experts, with sharding, "
            "but got [1, 1, 1, 1]",
        ]
