# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Whole states that one rank gets, or the host's memory holds, and whole states that do not fit a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelOptimizer

from paddle_moe_ops.expert_parallel import (
    gather_optimizer_state_dict,
    gather_state_dict,
    mark_expert_parameters,
    shard_optimizer_state_dict,
    shard_state_dict,
)
from paddle_moe_ops.nn import SwiGLUExperts

from .processes import run
from .test_expert_parallel_errors import caught
from .test_grids import pair_of_this_rank

pytestmark = pytest.mark.long

EXPERTS, HIDDEN, INTERMEDIATE = 2, 3, 5  # of a rank


def model_and_optimizer(dtype: str = "float32") -> tuple[nn.Layer, Any]:
    """Experts, numbers of experts and a dense layer, after a step whose gradients are the ranks' numbers."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    paddle.seed(rank)
    net = nn.Sequential(SwiGLUExperts(EXPERTS, HIDDEN, INTERMEDIATE), nn.Linear(HIDDEN, 1))
    net.to(dtype=dtype)
    mark_expert_parameters(net[0], group=group)
    for parameter in net[1].parameters():
        paddle.distributed.broadcast(parameter, 0)
    if dtype == "float32":
        optimizer: Any = paddle.optimizer.Momentum(0.5, parameters=net.parameters())
    else:  # for which a CPU has no other one
        optimizer = paddle.optimizer.SGD(0.5, parameters=net.parameters(), multi_precision=True)
    for parameter in net.parameters():
        parameter.grad = paddle.full(parameter.shape, 1.0 + rank, dtype)
    optimizer.step()
    return net, optimizer


def tensors_of(state: dict[str, Any]) -> dict[str, paddle.Tensor]:
    return {
        key: each for key, each in (state | state.get("master_weights", {})).items() if isinstance(each, paddle.Tensor)
    }


def numbers(state: dict[str, Any]) -> dict[str, NDArray]:
    return {key: each.astype("float32").numpy() for key, each in tensors_of(state).items()}


def gathered(dtype: str, **options: Any) -> list[Any]:
    """Both states: values, and whether all are on the host; and the same with the default options."""
    net, optimizer = model_and_optimizer(dtype)
    found = []
    for given in (options, {}):
        states = gather_state_dict(net, **given), gather_optimizer_state_dict(optimizer, net, **given)
        found += [[numbers(each), {str(value.place) for value in tensors_of(each).values()}] for each in states]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{"dst": 1}, {"to_cpu": True}, {"dst": 0, "to_cpu": True}], ids=str)
def test_one_rank_or_the_host_gets_the_states_that_all_ranks_get(options, dtype, custom_backend):
    for rank, states in enumerate(run(gathered, 2, custom_backend, dtype=dtype, **options)):
        for (found, places), (expected, usual) in zip(states[:2], states[2:], strict=True):
            if rank != options.get("dst", rank):
                assert (found, places) == ({}, set())
                continue
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[key], expected[key]) for key in found)
            assert places == ({"Place(cpu)"} if options.get("to_cpu") else usual)
            assert usual != {"Place(cpu)"}
        assert states[2][0]["0.down"].shape == (2 * EXPERTS, INTERMEDIATE, HIDDEN)


def states_that_the_host_held() -> list[bool]:
    """Return whether a model and an optimizer continue from states in host memory as from others."""
    found, is_here = [], []
    for options in ({}, {"to_cpu": True}):
        net, optimizer = model_and_optimizer("bfloat16")
        states = gather_state_dict(net, **options), gather_optimizer_state_dict(optimizer, net, **options)
        for parameter in net.parameters():
            parameter.set_value(paddle.zeros_like(parameter))
        net.set_state_dict(shard_state_dict(states[0], net))
        part = shard_optimizer_state_dict(states[1], net)
        is_here += [each.place == net[0].down.place for each in part["master_weights"].values()]
        optimizer.set_state_dict(part)
        optimizer.step()
        found.append([*numbers(net.state_dict()).values(), *numbers(optimizer.state_dict()).values()])
    return [*is_here, *(np.array_equal(*pair) for pair in zip(*found, strict=True))]


def test_an_optimizer_goes_on_from_a_state_in_the_hosts_memory(custom_backend):
    for found in run(states_that_the_host_held, 2, custom_backend):
        assert len(found) == 2 * 4 + 2 * 4  # of four parameters
        assert all(found)


def bad_destinations() -> list[str]:
    rank, (net, optimizer) = paddle.distributed.get_rank(), model_and_optimizer()
    alone = paddle.distributed.new_group([rank])
    return [
        caught(lambda: gather_state_dict(net, dst="0")),
        caught(lambda: gather_state_dict(net, dst=True)),
        caught(lambda: gather_optimizer_state_dict(optimizer, net, dst=2)),
        caught(lambda: gather_optimizer_state_dict(optimizer, net, to_cpu=1)),
        caught(lambda: gather_state_dict(net, dst=rank)),
        caught(lambda: gather_optimizer_state_dict(optimizer, net, dst=-1 if rank else 0)),
        caught(lambda: gather_state_dict(nn.Linear(2, 2), alone, dst=rank)),
    ]


def test_a_destination_is_one_rank_of_the_group_on_all_ranks():
    name = "gather_optimizer_state_dict"
    first, second = run(bad_destinations, 2)
    same = [
        "TypeError: gather_state_dict: dst must be an int, or None, but got str",
        "TypeError: gather_state_dict: dst must be an int, or None, but got bool",
        f"ValueError: {name}: dst must be one of the ranks [0, 1], or None, but got 2",
        f"TypeError: {name}: to_cpu must be a bool, but got 1 of type int",
        "ValueError: gather_state_dict: dst must be the same on all ranks of the group, but got "
        "'0' on rank 0, '1' on rank 1",
    ]
    assert first[:5] == second[:5] == same
    assert first[5] == f"RuntimeError: {name}: ranks [1] of [0, 1] raised an error in this call, which says more"
    assert second[5] == f"ValueError: {name}: dst must be one of the ranks [0, 1], or None, but got -1"
    assert first[6] == second[6] == "nothing was raised"


def where_one_group_differs() -> list[str]:
    """Experts on ranks 0 and 1, which differ, and on rank 2 alone, whose experts may have any shape."""
    rank = paddle.distributed.get_rank()
    experts, group = SwiGLUExperts(EXPERTS, HIDDEN, INTERMEDIATE + rank), pair_of_this_rank(((0, 1), (2,)))
    mark_expert_parameters(experts, group=group)
    optimizer = paddle.optimizer.Momentum(0.5, parameters=experts.parameters())
    for parameter in experts.parameters():
        parameter.grad = paddle.ones_like(parameter)
    optimizer.step()
    return [
        caught(lambda: gather_state_dict(experts, dst=2)),
        caught(lambda: gather_optimizer_state_dict(optimizer, experts)),
        caught(lambda: gather_state_dict(experts if rank else None)),
    ]


def test_where_one_group_of_three_ranks_differs_all_groups_are_told():
    ranks = run(where_one_group_differs, 3)
    shapes = "'float32 [2, 5, 3] of ranks [0, 1]' on rank 0, 'float32 [2, 6, 3] of ranks [0, 1]' on rank 1"
    different = f"must be the same on all ranks of the group, but got {shapes}"
    for of_model, of_optimizer, told in ranks:
        assert of_model == f"ValueError: gather_state_dict: layer.state_dict()['down'] {different}"
        assert of_optimizer.startswith("ValueError: gather_optimizer_state_dict: optimizer.state_dict() of '")
        assert "must be the same on all ranks of the group, but got " in of_optimizer
        assert told.startswith(
            "TypeError: " if told is ranks[0][2] else "RuntimeError: gather_state_dict: ranks [0] of"
        )


def with_a_group_of_others() -> list[str]:
    """Errors on ranks 0 and 1, whose group is given, though ranks 1 and 2 share the experts of rank 1."""
    net, optimizer = model_and_optimizer()
    mark_expert_parameters(net[0], group=pair_of_this_rank(((1, 2), (0, 1))))
    group = pair_of_this_rank(((0, 1), (1, 2)))
    if paddle.distributed.get_rank() == 2:
        return []
    calls = (
        lambda: gather_state_dict(net, group),
        lambda: gather_optimizer_state_dict(optimizer, net, group),
        lambda: shard_optimizer_state_dict({}, net, group),
        lambda: shard_state_dict({}, net, group),
    )
    return [caught(each) for each in calls]


def test_a_group_of_the_same_size_but_other_ranks_is_refused_by_three_ranks():
    first, second, _ = run(with_a_group_of_others, 3)
    names = "gather_state_dict", "gather_optimizer_state_dict", "shard_optimizer_state_dict", "shard_state_dict"
    for name, text in zip(names, second, strict=True):
        assert text.startswith(f"ValueError: {name}: group must be the group that shares the experts of ")
        assert text.endswith(", ranks [1, 2], but got ranks [0, 1]")
    for name, text in zip(names[:2], first, strict=False):
        assert text == f"RuntimeError: {name}: ranks [1] of [0, 1] raised an error in this call, which says more"


def with_fleets_optimizer() -> list[str]:
    net, optimizer = model_and_optimizer()
    wrapped = [object.__new__(each) for each in (DygraphShardingOptimizer, HybridParallelOptimizer)]
    wrapped[0]._inner_opt, wrapped[1]._inner_opt = optimizer, wrapped[0]
    return [caught(lambda each=each: gather_optimizer_state_dict(each, net)) for each in wrapped]


def test_a_state_that_fleet_spreads_over_ranks_is_refused():
    for texts in run(with_fleets_optimizer, 2):
        for text in texts:
            assert text.startswith("ValueError: gather_optimizer_state_dict: optimizer must be one that keeps whole")
            assert "spreads over ranks with save_checkpoint" in text
            assert text.endswith("but got DygraphShardingOptimizer")


def loaded_from(state: dict[str, Any], layer: nn.Layer) -> str:
    return caught(lambda: shard_state_dict(state, layer))


def test_a_state_without_the_experts_or_with_a_prefix_is_refused():
    layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), SwiGLUExperts(EXPERTS, HIDDEN, INTERMEDIATE))
    whole = layer.state_dict()
    name, such_as = "ValueError: shard_state_dict: state must be", "with keys of layer.state_dict(), such as"
    wrapped = {f"_layers.{key}": each for key, each in whole.items()}
    lacking = f"{name} one with tensors of the layer, but got one without '0.weight'"
    for experts in (False, True):  # marked, as on several ranks
        if experts:
            mark_expert_parameters(layer[1])
            lacking = f"{name} one with all experts of the layer, but got one without '1.down'"
        key = "1.down" if experts else "0.weight"
        got = f"but got '_layers.{key}', which has the prefix '_layers.'"
        assert loaded_from(wrapped, layer) == f"{name} {such_as} {key!r}, {got}"
        assert loaded_from({}, layer) == loaded_from({"other": whole[key]}, layer) == lacking
        assert loaded_from({"1.down": whole["1.down"], "1.gate_up": whole["1.gate_up"]}, layer) == "nothing was raised"
    # the layer is a part of the model, and a name of its own looks like one with a prefix
    got = "but got '1.down', which has the prefix '1.'"
    assert loaded_from(whole, layer[1]) == f"{name} {such_as} 'down', {got}"
    twice = nn.Sequential(layer[1], nn.Sequential(layer[1]))
    state = twice.state_dict()
    assert loaded_from(state, twice) == "nothing was raised"
    del state["0.down"]
    assert loaded_from(state, twice) == f"{name} one with all experts of the layer, but got one without '0.down'"
    assert loaded_from({}, nn.ReLU()) == loaded_from({"down": whole["1.down"]}, nn.ReLU()) == "nothing was raised"
