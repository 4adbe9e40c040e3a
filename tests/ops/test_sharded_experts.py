# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet's sharding optimizer groups the experts of a rank apart from the replicated parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

from paddle_moe_ops.expert_parallel import mark_expert_parameters
from paddle_moe_ops.expert_parallel.fleet_optimizers import FleetClip, FleetOptimizer, Place
from paddle_moe_ops.nn import MoELayer

ALL, COPIES = Group(1, 5, [0, 1, 2, 3]), Group(0, 6, [1, 3])


def comm_buffers(parameters: list[Any]) -> list[tuple[list[int], set[str]]]:
    """The ranks and the names of the parameters of each buffer that the optimizer would reduce and scatter.

    Buffers themselves need a GPU, and gloo has no reduce_scatter.
    """
    made: list[tuple[list[int], set[str]]] = []

    def buffer(number: int, parameters: list[Any], group: Group, *_: Any, **__: Any) -> Any:
        made.append((group.ranks, {each.name for each in parameters}))

    optimizer = SimpleNamespace(
        pp_overlap=False,
        comm_overlap=False,
        offload_opt_buffer_size=0,
        sd_release_grads=False,
        use_reduce_avg=False,
        enable_fuse_optimizer_states=False,
        _hcg=SimpleNamespace(get_sharding_parallel_group=lambda: ALL),
        _parameter_list=parameters,
        _slice_params={each.name: SimpleNamespace() for each in parameters},
        _comm_buffer_list=[],
        _color_to_comm_buffer_list={},
        param2bucket={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dygraph_sharding_optimizer, "FusedCommBuffer", buffer)
        dygraph_sharding_optimizer.DygraphShardingOptimizerV2._build_comm_buffers(optimizer, 1)
    return made


def model() -> tuple[nn.Layer, set[str], set[str]]:
    """A layer, the names of its experts' parameters and those of the others."""
    layer = MoELayer(4, 3, 2, 1)
    experts = {each.name for each in layer.experts.parameters()}
    return layer, experts, {each.name for each in layer.parameters() if not each.stop_gradient} - experts


def test_experts_are_sharded_between_the_ranks_that_have_copies_of_them():
    layer, experts, others = model()
    mark_expert_parameters(layer.experts, COPIES)
    trained = [each for each in layer.parameters() if not each.stop_gradient]
    assert sorted(comm_buffers(trained), key=lambda each: len(each[0])) == [([1, 3], experts), ([0, 1, 2, 3], others)]


def test_without_a_sharding_group_fleet_would_average_different_experts():
    """Why the argument is there: marks alone do not tell that optimizer."""
    layer, experts, others = model()
    mark_expert_parameters(layer.experts)
    trained = [each for each in layer.parameters() if not each.stop_gradient]
    assert comm_buffers(trained) == [([0, 1, 2, 3], experts | others)]


def test_gradients_behind_a_frozen_buffer_are_means_over_all_ranks():
    """Fleet's reduction leaves the mean over a buffer's ranks, and none of a buffer whose parameters are frozen."""
    alone, of_two, of_four = Group(0, -1, [0]), Group(1, 6, [1, 3]), Group(2, 7, [0, 1, 2, 3])
    gradients = [paddle.ones([3]) for _ in range(3)]
    buffers = [
        SimpleNamespace(
            params=[SimpleNamespace(name=name)],
            grad_storage=gradient,
            _comm_group=alone,
            need_reduce_scale_sync=lambda trains=trains: trains,
        )
        for (name, trains), gradient in zip((("w", False), ("v", True), ("experts", True)), gradients, strict=True)
    ]
    optimizer = SimpleNamespace(
        _place=Place(of_two, (), (), share=0.125, splits_parameters=True),
        _hcg=SimpleNamespace(get_data_parallel_group=lambda: of_four),
        _dp_enable=False,
        _sep_enable=False,
        _experts={"experts"},
        _inner_opt=SimpleNamespace(_comm_buffer_list=buffers),
    )
    FleetOptimizer._scale_buffers(optimizer)
    assert [each.tolist() for each in gradients] == [[1.0] * 3, [0.25] * 3, [0.25] * 3]


def test_frozen_experts_may_be_trained_later_and_dense_layers_under_data_parallel_not():
    experts, dense = nn.Linear(2, 2), nn.Linear(2, 2)
    for each in (*experts.parameters(), *dense.parameters()):
        each.stop_gradient = True
    optimizer = SimpleNamespace(_use_dp_mode=True, _sharding_enable=False, _dp_enable=False, _sep_enable=False)
    optimizer._inner_opt = None
    place = Place(Group(0, -1, [0]), (), (), share=1.0, splits_parameters=False)
    parameters = [*experts.parameters(), *dense.parameters()]
    FleetOptimizer.keep_apart(optimizer, experts.parameters(), place, parameters)
    experts.weight.stop_gradient = False
    FleetOptimizer._hybrid_sync_grad(optimizer, parameters)
    dense.bias.stop_gradient = False
    with pytest.raises(ValueError, match=f"distributed_optimizer: stop_gradient of '{dense.bias.name}' must be True"):
        FleetOptimizer._hybrid_sync_grad(optimizer, parameters)


def test_a_norm_is_in_float64_if_one_gradient_is(monkeypatch):
    monkeypatch.setattr(paddle.distributed, "all_reduce", lambda _: None)
    small, wide = (SimpleNamespace(name=name) for name in ("small", "wide"))
    pairs = [(small, paddle.full([1], 2.0**-20)), (wide, paddle.ones([1], "float64"))]
    square, dtype = FleetClip(1.0, frozenset({"small", "wide"})).get_l2_norm_pow(pairs)
    assert (square.item(), dtype) == (1 + 2.0**-40, "float64")


def test_marks_without_a_group_leave_an_earlier_one():
    layer, _, _ = model()
    mark_expert_parameters(layer.experts, COPIES)
    mark_expert_parameters(layer.experts)
    assert all(each.color["group"] is COPIES for each in layer.experts.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([],), TypeError, "experts must be a Layer, but got list"),
        ((nn.Linear(2, 2), [0, 1]), TypeError, "sharding_group must be a group of paddle.distributed"),
        (
            (nn.Linear(2, 2), Group(-1, 7, [2, 3])),
            ValueError,
            "sharding_group must be a group that this rank",
        ),
    ],
    ids=["no layer", "no group", "a group of others"],
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=f"^mark_expert_parameters: {text}"):
        mark_expert_parameters(*arguments)
