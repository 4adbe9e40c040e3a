# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet with frozen matrices, experts that a step does not use, and parameters that arrive during the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import mix_precision_utils
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

from paddle_moe_ops.expert_parallel import distributed_optimizer, mark_expert_parameters
from paddle_moe_ops.nn import MoELayer

from .fleets import start_fleet
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import HIDDEN, SIZES, Net, arrays
from .test_fleet import (
    EXPERTS,
    FOUR,
    NAMES_OF_WAYS,
    SHARDING,
    TWO,
    WAYS,
    MoEPair,
    assert_like_one_process,
    group_of_experts,
)

pytestmark = pytest.mark.long


@pytest.mark.cpu_only
@pytest.mark.parametrize(("kind", "options"), WAYS, ids=NAMES_OF_WAYS)
def test_a_frozen_matrix_of_the_experts_stays_while_the_other_is_trained(ranks, kind, options):
    assert_like_one_process(ranks, TWO[kind], kind, (5, 11), freezes=True, **options)


@pytest.mark.parametrize("name", ["linear_7.b_0", "bias"])  # Fleet orders parameters by numbers in their names
@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
def test_parameters_may_arrive_during_the_next_forward_pass(ranks, kind, name):
    assert_like_one_process(ranks, TWO[kind], kind, (5, 11), overlaps=name)


def without_experts(net: Net) -> Callable[[paddle.Tensor], paddle.Tensor]:
    return lambda x: net.last(net.first(x))


def trained_pair(kind: str, used: list[int]) -> list[dict[str, Any]]:
    """Moves of the experts of two nets in a step that uses one of them or both."""
    group = group_of_experts(start_fleet(**TWO[kind]), kind)
    paddle.seed(7)
    pair = MoEPair(group, group)
    optimizer = paddle.optimizer.SGD(0.5, parameters=pair.parameters(), weight_decay=0.1)
    optimizer, experts = distributed_optimizer(optimizer), [net.moe.experts for net in pair.layers]
    before = [arrays(each.state_dict()) for each in experts]
    sum(pair.layers[number](paddle.ones([3, HIDDEN])).sum() for number in used).backward()
    optimizer.step()
    after = [arrays(each.state_dict()) for each in experts]
    return [{name: new[name] - old[name] for name in old} for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
def test_experts_that_a_step_does_not_use_stay_and_others_move_as_before(ranks, kind):
    of_one, of_both = (ranks(2, trained_pair, kind=kind, used=used) for used in ([1], [0, 1]))
    for (unused, alone), (_, beside) in zip(of_one, of_both, strict=True):
        for name, move in beside.items():
            assert not unused[name].any()
            assert np.abs(move).max() > 0.1
            np.testing.assert_array_equal(alone[name], move)


def synchronised(degrees: dict[str, int], shares: bool) -> list[float]:
    """Values of a bias, of a matrix and of experts after a step that copies the first and the last by their names."""
    topology = start_fleet(**degrees)
    rank, columns = topology.get_model_parallel_rank(), topology.get_model_parallel_group()
    net = Net(columns if shares else topology.get_data_parallel_group())
    for each in net.moe.router.parameters() if shares else ():
        mark_as_sequence_parallel_parameter(each)
    parameters = net.last.bias, net.last.weight, net.moe.experts.down
    strategy = fleet.fleet._user_defined_strategy
    strategy.hybrid_configs["mp_configs"].sync_param = True
    strategy.sync_param_name = [parameters[0].name, parameters[2].name]
    optimizer = distributed_optimizer(paddle.optimizer.SGD(0.0, parameters=net.parameters()))
    for each in parameters:
        each.set_value(paddle.full(each.shape, float(rank)))
        each.grad = paddle.zeros_like(each)
    optimizer.step()
    return [float(each.mean()) for each in parameters]


WITH_COPIES = pytest.param({"mp_degree": 2, "dp_degree": 2}, False, marks=pytest.mark.slow, id="copies of experts")


@pytest.mark.parametrize(("degrees", "shares"), [pytest.param({"mp_degree": 2}, True, id="shared"), WITH_COPIES])
def test_parameters_that_model_parallel_ranks_copy_are_those_that_all_of_them_have(ranks, degrees, shares):
    first, second = ranks(2 * degrees.get("dp_degree", 1), synchronised, degrees=degrees, shares=shares)[-2:]
    assert (first, second) == ([0, 0, 0], [0, 1, 1 if shares else 0])


def moved(main_grad: bool, skipping: tuple[int, ...]) -> dict[str, Any]:
    """Move of this rank's experts in a step in which some ranks do not use the layer."""
    group = group_of_experts(start_fleet(**FOUR[EXPERTS]), EXPERTS)
    paddle.seed(7)
    net = Net(group)
    optimizer: Any = paddle.optimizer.SGD(0.5, parameters=net.parameters())
    if main_grad:
        mix_precision_utils.MixPrecisionLayer(net, dtype="bfloat16")
        optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
    optimizer, before = distributed_optimizer(optimizer), arrays(net.moe.experts.state_dict())
    skips = paddle.distributed.get_rank() in skipping
    (without_experts(net) if skips else net)(paddle.ones([3, HIDDEN])).sum().backward()
    down = net.moe.experts.down
    assert ((down.main_grad if main_grad else down.grad) is None) == skips
    optimizer.step()
    return {name: after - before[name] for name, after in arrays(net.moe.experts.state_dict()).items()}


@pytest.mark.slow
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_ranks_that_do_not_use_the_experts_move_them_as_their_copies_do(ranks, main_grad):
    """Ranks [0, 1] share the experts and [2, 3] have copies: without these, gradients are half of those of all."""
    of_all, of_half = (ranks(4, moved, main_grad=main_grad, skipping=skipping) for skipping in ((), (2, 3)))
    for rank, (whole, half) in enumerate(zip(of_all, of_half, strict=True)):
        for name, expected in whole.items():
            assert np.abs(expected).max() > 1e-3
            np.testing.assert_allclose(half[name], expected / 2, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(half[name], of_half[rank % 2][name])


def with_marks(router: bool, experts: bool | None, axis: str, splits: bool = False) -> str:
    """The error of `distributed_optimizer` for experts in a grid with model parallelism."""
    topology = start_fleet(mp_degree=2, dp_degree=2)
    layer = MoELayer(*SIZES, num_shared_experts=0, group=getattr(topology, f"get_{axis}_parallel_group")())
    if router:
        mark_as_sequence_parallel_parameter(layer.router.weight)
    for each in layer.experts.parameters():
        each.is_distributed = splits
        if experts is not None:
            each.sequence_parallel = experts
    return caught(lambda: distributed_optimizer(paddle.optimizer.SGD(parameters=layer.parameters())))


ROUTER = "sequence_parallel must be set by mark_as_sequence_parallel_parameter on the router"
UNMARKED = "sequence_parallel of experts must be unmarked if model parallel ranks share or split the experts"


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"router": False, "experts": None, "axis": "model"}, ROUTER),
        ({"router": False, "experts": None, "axis": "data", "splits": True}, ROUTER),
        ({"router": True, "experts": True, "axis": "model"}, UNMARKED),
        ({"router": True, "experts": True, "axis": "data", "splits": True}, UNMARKED),
        ({"router": True, "experts": None, "axis": "data"}, "sequence_parallel must be set on the experts as on their"),
        ({"router": True, "experts": False, "axis": "data"}, ""),
        ({"router": True, "experts": None, "axis": "data", "splits": True}, ""),
        ({"router": False, "experts": None, "axis": "data"}, ""),
    ],
)
def test_marks_of_sequence_parallelism_that_would_give_wrong_gradients_are_refused(ranks, options, error):
    for text in ranks(4, with_marks, **options):
        assert text.startswith(f"ValueError: distributed_optimizer: {error}" if error else "nothing was raised")


def with_strange_experts_in_the_last_stage() -> tuple[int, str]:
    """The stage of this rank, and the error of `distributed_optimizer`."""
    stage, layer = start_fleet(pp_degree=2, dp_degree=2).get_stage_id(), paddle.nn.Linear(2, 2)
    if stage == 1:
        mark_expert_parameters(layer, group=paddle.distributed.get_group(0))
    return stage, caught(lambda: distributed_optimizer(paddle.optimizer.SGD(parameters=layer.parameters())))


@pytest.mark.cpu_only
@pytest.mark.slow
def test_a_stage_with_strange_experts_raises_on_all_stages(ranks):
    errors = (
        "RuntimeError: distributed_optimizer: ranks [",
        "ValueError: distributed_optimizer: experts must be shared by",
    )
    for stage, text in ranks(4, with_strange_experts_in_the_last_stage):
        assert text.startswith(errors[stage])
