# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Copies and wrappers of layers, and ranks whose arguments differ or are bad: programs as people write them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops.expert_parallel import (
    ExpertParallel,
    average_gradients,
    gather_optimizer_state_dict,
    gather_state_dict,
    is_expert_parameter,
    mark_expert_parameters,
    shard_optimizer_state_dict,
    shard_state_dict,
)
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts

from .processes import run
from .test_expert_parallel_errors import caught
from .test_grids import NEIGHBOURS, pair_of_this_rank

SIZES = 16, 8, 4, 2


def made_layer() -> MoELayer:
    paddle.seed(3)
    return MoELayer(*SIZES, group=paddle.distributed.get_group(0))


def shapes(state: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(each.shape) for name, each in state.items()}


def of_a_copy() -> list[bool]:
    layer, group = made_layer(), paddle.distributed.get_group(0)
    twin = copy.deepcopy(layer)
    whole, of_twin = gather_state_dict(layer, group), gather_state_dict(twin, group)
    return [
        all(is_expert_parameter(each) for each in twin.experts.parameters()),
        not any(is_expert_parameter(each) for each in twin.router.parameters()),
        shapes(whole) == shapes(of_twin),
        all(np.array_equal(whole[name].numpy(), of_twin[name].numpy()) for name in whole),
        shapes(shard_state_dict(whole, twin, group)) == shapes(twin.state_dict()),
    ]


def test_a_copy_of_a_layer_has_the_marks_of_its_experts():
    for found in run(of_a_copy, 2):
        assert found == [True] * 5


def test_a_copy_of_experts_without_marks_has_none():
    experts = SwiGLUExperts(2, 8, 4)
    assert not any(map(is_expert_parameter, copy.deepcopy(experts).parameters()))
    mark_expert_parameters(experts)
    twin = copy.deepcopy(experts)
    assert all(each.no_sync and is_expert_parameter(each) for each in twin.parameters())
    assert all(a is not b for a, b in zip(experts.parameters(), twin.parameters(), strict=True))


def of_a_wrapped_model() -> list[bool]:
    layer, group = made_layer(), paddle.distributed.get_group(0)
    wrapped = paddle.DataParallel(layer)
    optimizer = paddle.optimizer.AdamW(parameters=wrapped.parameters())
    wrapped(paddle.randn([5, SIZES[0]])).sum().backward()
    optimizer.step()
    whole, of_optimizer = gather_state_dict(wrapped, group), gather_optimizer_state_dict(optimizer, wrapped, group)
    part = shard_state_dict(whole, wrapped, group)
    part_of_optimizer = shard_optimizer_state_dict(of_optimizer, wrapped, group)
    return [
        shapes(whole) == shapes(gather_state_dict(layer, group)),
        list(whole["experts.down"].shape) == [SIZES[2], SIZES[1], SIZES[0]],
        shapes(part) == shapes(layer.state_dict()) == shapes(wrapped.state_dict()),
        set(of_optimizer["parameter_names"]) == {name for name, _ in layer.named_parameters()},
        set(part_of_optimizer) == set(optimizer.state_dict()),
    ]


def test_states_of_a_wrapped_model_are_those_of_the_model():
    for found in run(of_a_wrapped_model, 2):
        assert found == [True] * 5


def of_a_layer_used_twice() -> list[bool]:
    group = paddle.distributed.get_group(0)
    layer, other = made_layer(), made_layer()
    model, twin = paddle.nn.Sequential(layer, layer), paddle.nn.Sequential(other, other)
    for parameter in twin.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    whole = gather_state_dict(model, group)
    twin.set_state_dict(shard_state_dict(whole, twin, group))
    loaded = gather_state_dict(twin, group)
    return [
        all(list(whole[f"{number}.experts.down"].shape) == [SIZES[2], SIZES[1], SIZES[0]] for number in range(2)),
        all(np.array_equal(whole[name].numpy(), loaded[name].numpy()) for name in whole),
    ]


def test_a_layer_that_is_used_twice_is_whole_under_both_names():
    for found in run(of_a_layer_used_twice, 2):
        assert found == [True] * 2


def arguments(width: int = 8, topk: int = 2, dtype: str = "float32") -> list[Any]:
    ids = paddle.to_tensor(np.tile(np.arange(topk, dtype=np.int32), (3, 1)))
    return [paddle.ones([3, width], dtype), ids, paddle.ones([3, topk])]


def dispatched(kind: str, options: dict[str, Any]) -> str:
    ep, other = ExpertParallel(4, **options), paddle.distributed.get_rank() == 1
    changed = {"width": {"width": 4}, "topk": {"topk": 1}, "dtype": {"dtype": "bfloat16"}}[kind]
    return caught(lambda: ep.dispatch(*arguments(**(changed if other else {}))))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("width", "x must be as wide on all ranks, but got 8 on rank 0, 4 on rank 1"),
        ("topk", "ids must be of as many slots a token on all ranks, but got 2 on rank 0, 1 on rank 1"),
        ("dtype", "x must be of one dtype, but got float32 on rank 0, bfloat16 on rank 1"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"combine": "exact"},
        {"combine": "reduced"},
        pytest.param({"combine": "reduced", "tokens_per_rank": 3}, marks=pytest.mark.cpu_only),
    ],
    ids=["exact", "reduced", "parts of one size"],
)
def test_ranks_whose_tokens_differ_in_form_are_told(kind, expected, options):
    assert run(dispatched, 2, kind=kind, options=options) == [f"ValueError: ExpertParallel.dispatch: {expected}"] * 2


def combined(changed: dict[str, Any]) -> str:
    """Expert outputs that differ on rank 1."""
    ep = ExpertParallel(4)
    received = ep.dispatch(*arguments())
    form = {"width": 8, "dtype": "float32"} | (changed if paddle.distributed.get_rank() else {})
    return caught(lambda: ep.combine(paddle.ones([received.rows.shape[0], form["width"]], form["dtype"]), received))


@pytest.mark.cpu_only  # a device reads nothing in combine
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"width": 5}, "out must be as wide on all ranks, but got 8 on rank 0, 5 on rank 1"),
        ({"dtype": "bfloat16"}, "out must be of one dtype, but got float32 on rank 0, bfloat16 on rank 1"),
    ],
    ids=["width", "dtype"],
)
def test_ranks_whose_expert_outputs_differ_in_form_are_told(changed, expected):
    assert run(combined, 2, changed=changed) == [f"ValueError: ExpertParallel.combine: {expected}"] * 2


def a_bad_input() -> str:
    layer, rank = made_layer(), paddle.distributed.get_rank()
    return caught(lambda: layer(paddle.ones([3, SIZES[0] if rank == 0 else 5])))


def test_a_bad_input_of_one_rank_is_told_to_the_others():
    good, bad = run(a_bad_input, 2)
    assert good == (
        "RuntimeError: ExpertParallel.dispatch: ranks [1] of [0, 1] raised an error in this call, which says more"
    )
    assert bad.startswith("ValueError: MoELayer: x must be")


def probabilities_that_are_none() -> str:
    ep, (x, ids, probs) = ExpertParallel(4), arguments()
    if paddle.distributed.get_rank() == 1:
        probs[1, 0] = float("nan")
    return caught(lambda: ep.dispatch(x, ids, probs, validate=True))


def test_with_validation_probabilities_are_looked_at():
    good, bad = run(probabilities_that_are_none, 2)
    assert "ranks [1] of [0, 1] raised an error" in good
    assert bad == "ValueError: ExpertParallel.dispatch: probs must not hold NaN, but token 1, slot 0 does"


def helpers_with_another_group() -> list[str]:
    """The group of all three ranks, for a layer whose experts two of them share; rank 2 shares with nobody."""
    group = pair_of_this_rank(((0, 1), (2,)))
    layer = MoELayer(*SIZES, group=group)
    layer(paddle.ones([3, SIZES[0]])).sum().backward()
    optimizer = paddle.optimizer.SGD(parameters=layer.parameters())
    copied = list(copy.deepcopy(layer).experts.parameters())
    of_copy = caught(lambda: average_gradients(copied, paddle.distributed.get_group(0)))
    if paddle.distributed.get_rank() == 2:
        return [
            of_copy,
            str(layer.experts.gate_up.shape[0]),
            str(gather_state_dict(layer, group)["experts.gate_up"].shape[0]),
            caught(lambda: gather_state_dict(layer, paddle.distributed.get_group(0))),
            str(gather_state_dict(layer)["experts.gate_up"].shape[0]),
        ]
    return [
        of_copy,
        caught(lambda: average_gradients(layer.experts.parameters(), group)),
        caught(lambda: gather_state_dict(layer, paddle.distributed.get_group(0))),
        str(gather_state_dict(layer)["experts.gate_up"].shape[0]),
        caught(lambda: gather_optimizer_state_dict(optimizer, layer, group)),
    ]


def test_helpers_of_three_ranks_refuse_a_group_that_does_not_share_the_experts():
    (of_copy, *first), (_, *second), (of_copy_alone, *alone) = run(helpers_with_another_group, 3)
    assert first == second
    expected = "ValueError: average_gradients: group must be the group that shares the experts of parameters["
    for text, ranks in ((of_copy, "[0, 1]"), (of_copy_alone, "[2]")):
        assert text.startswith(expected)
        assert text.endswith(f"ranks {ranks}, but got ranks [0, 1, 2]")
    assert alone[:2] == ["4", "4"]
    averaged, gathered, by_marks, of_optimizer = first
    assert averaged == of_optimizer == "nothing was raised"
    assert by_marks == alone[3] == "4"
    expected = "ValueError: gather_state_dict: group must be the group that shares the experts of layer.state_dict()"
    for text, ranks in ((gathered, "[0, 1]"), (alone[2], "[2]")):
        assert text.startswith(expected)
        assert text.endswith(f"ranks {ranks}, but got ranks [0, 1, 2]")


def helpers_over_all() -> list[str]:
    layer, everyone = MoELayer(*SIZES, group=pair_of_this_rank(NEIGHBOURS)), paddle.distributed.get_group(0)
    layer(paddle.ones([3, SIZES[0]])).sum().backward()
    optimizer = paddle.optimizer.SGD(parameters=layer.parameters())
    return [
        caught(lambda: average_gradients(layer.parameters(), everyone)),
        caught(lambda: gather_optimizer_state_dict(optimizer, layer, everyone)),
        caught(lambda: shard_state_dict(layer.state_dict(), layer, everyone)),
        caught(lambda: shard_optimizer_state_dict({}, layer, everyone)),
    ]


@pytest.mark.slow
def test_all_of_four_ranks_are_refused_where_two_share_the_experts():
    expected = "group must be the group that shares the experts of"
    for rank, (averaged, gathered, part, part_of_optimizer) in enumerate(run(helpers_over_all, 4)):
        assert averaged.startswith(f"ValueError: average_gradients: {expected} parameters[")
        assert gathered.startswith(f"ValueError: gather_optimizer_state_dict: {expected} layer.named_parameters() '")
        assert part.startswith(f"ValueError: shard_state_dict: {expected} layer.state_dict()['experts.")
        assert part_of_optimizer.startswith(f"ValueError: shard_optimizer_state_dict: {expected} layer.named_param")
        own = "[0, 1]" if rank < 2 else "[2, 3]"
        for text in (averaged, gathered, part, part_of_optimizer):
            assert text.endswith(f"ranks {own}, but got ranks [0, 1, 2, 3]")
