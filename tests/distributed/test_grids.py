# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Four ranks in a grid: experts are spread over some of them, and others have copies. All is as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    average_gradients,
    gather_state_dict,
    is_expert_parameter,
    mark_expert_parameters,
)
from paddle_moe_ops.nn import MoELayer

from .fleets import code_of_guide
from .processes import run
from .test_average_gradients import frozen, of_experts, parameter
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import HIDDEN, SIZES, Net, arrays, batch

TOKENS = 3, 0, 9, 4
STEPS = 3
NEIGHBOURS, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))
_groups: dict[tuple[int, ...], Any] = {}  # of this process


def pair_of_this_rank(pairs: tuple[tuple[int, ...], ...]) -> Any:
    """The group that this rank is in. All ranks make all groups, one after the other."""
    for ranks in pairs:
        if ranks not in _groups:
            _groups[ranks] = paddle.distributed.new_group(list(ranks))
            paddle.distributed.barrier()
    return next(_groups[ranks] for ranks in pairs if paddle.distributed.get_rank() in ranks)


def losses_of(net: Any, optimizer: Any, rank: int | None, average: Any) -> list[float]:
    """Train; the losses are parts of those over all tokens."""
    losses, parts = [], 1 if rank is None else len(TOKENS)
    for step in range(STEPS):
        x, y = batch(TOKENS, rank, step)
        x.stop_gradient = False
        loss = (net(x) - y).square().sum() * (parts / sum(TOKENS))
        loss.backward()
        average()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss) / parts)
    return losses


def momentum(net: nn.Layer, clip: Any = None) -> Any:
    """Shows a wrong factor of a gradient at once."""
    return paddle.optimizer.Momentum(0.3 if clip else 0.001, parameters=net.parameters(), grad_clip=clip)


def in_a_grid(pairs: Any, pairs_of_copies: Any) -> Any:
    """A model whose experts are shared by a pair of ranks, and copied by the other pair."""
    group, copies = pair_of_this_rank(pairs), pair_of_this_rank(pairs_of_copies)
    paddle.seed(7)
    net = Net(group)
    start = arrays(gather_state_dict(net, group))
    optimizer = momentum(net, ClipGradForMOEByGlobalNorm(0.5, is_expert_parameter, group))
    rank = paddle.distributed.get_rank()
    losses = losses_of(net, optimizer, rank, lambda: average_gradients(net.parameters(), group, copies=copies))
    return start, losses, arrays(gather_state_dict(net, group))


def assert_like_one_process(got: list[Any], net: nn.Layer, clip: Any) -> None:
    start, _, end = got[0]
    net.set_state_dict(start)
    losses = losses_of(net, momentum(net, clip), None, lambda: None)
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(np.sum([each for _, each, _ in got], 0), losses, rtol=1e-5)
    for _, _, state in got:
        for key, expected in arrays(net.state_dict()).items():
            np.testing.assert_allclose(state[key], expected, rtol=2e-4, atol=2e-5, err_msg=key)
            np.testing.assert_array_equal(state[key], end[key], err_msg=key)
    assert any(np.abs(end[key] - start[key]).max() > 0.001 for key in start if "experts" in key)


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "copies"), [(NEIGHBOURS, APART), (APART, NEIGHBOURS)], ids=["neighbours", "apart"])
def test_two_groups_of_four_ranks_train_one_model(pairs, copies):
    assert_like_one_process(run(in_a_grid, 4, pairs=pairs, pairs_of_copies=copies), Net(), nn.ClipGradByGlobalNorm(0.5))


class Two(nn.Layer):
    """Two expert layers, whose experts may be shared by different ranks."""

    def __init__(self, group: Any = None, other: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)
        self.wide, self.narrow = MoELayer(*SIZES, group=group), MoELayer(*SIZES, 0, group=other)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        x = x + self.wide(x)
        return self.last(x + self.narrow(x))


def layers_of_different_groups(clips: bool, names_groups: bool) -> Any:
    everyone, pair, copies = paddle.distributed.get_group(0), pair_of_this_rank(APART), pair_of_this_rank(NEIGHBOURS)
    paddle.seed(7)
    net = Two(everyone, pair)

    def whole() -> dict[str, NDArray]:
        if not names_groups:
            return arrays(gather_state_dict(net))
        state = arrays(net.state_dict())
        for name, layer, group in (("wide", net.wide, everyone), ("narrow", net.narrow, pair)):
            state |= {f"{name}.{key}": each for key, each in arrays(gather_state_dict(layer, group)).items()}
        return state

    def average() -> None:
        if not names_groups:
            average_gradients(net.parameters())
            return
        narrow = set(map(id, net.narrow.experts.parameters()))
        average_gradients([each for each in net.parameters() if id(each) not in narrow], everyone)
        average_gradients(net.narrow.experts.parameters(), pair, copies=copies)

    start, rank = whole(), paddle.distributed.get_rank()
    optimizer = momentum(net, ClipGradByGlobalNorm(0.5) if clips else None)
    return start, losses_of(net, optimizer, rank, average), whole()


@pytest.mark.slow
@pytest.mark.parametrize("names_groups", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_layers_of_one_model_may_have_different_groups_of_four_ranks(clips, names_groups):
    ranks = run(layers_of_different_groups, 4, clips=clips, names_groups=names_groups)
    assert_like_one_process(ranks, Two(), nn.ClipGradByGlobalNorm(0.5) if clips else None)


def unlike_in_a_grid() -> list[str]:
    """Errors if one rank or group has other parameters, and gradients that only some ranks have."""
    rank, group, copies = paddle.distributed.get_rank(), pair_of_this_rank(NEIGHBOURS), pair_of_this_rank(APART)
    first = parameter([2])
    texts = [
        caught(lambda: average_gradients(first if rank == 3 else [first], group, copies=copies)),
        caught(lambda: average_gradients([first, parameter([2 + rank // 2])], group, copies=copies)),
        caught(lambda: average_gradients([first, frozen([2]) if rank == 1 else parameter([2])], group, copies=copies)),
        caught(lambda: average_gradients([first], group, copies=group)),
        caught(lambda: average_gradients([first], group, copies=[0, 1])),
    ]
    assert first.grad.tolist() == [1.0, 1.0]  # an error leaves gradients alone
    some, experts = (parameter([1], gradient=8.0 if rank == 2 else None), of_experts([1], gradient=float(rank)))
    average_gradients([some, experts], group, copies=copies)
    return [*texts, f"{some.grad.tolist()} {experts.grad.tolist()}"]


@pytest.mark.slow
def test_errors_of_one_group_of_four_ranks_reach_the_other():
    name = "average_gradients"
    elsewhere = f"RuntimeError: {name}: ranks of another group raised an error in this call, which says more"
    ranks = run(unlike_in_a_grid, 4)
    assert ranks[3][0].startswith(f"TypeError: {name}: parameters must be tensors")
    assert ranks[2][0] == f"RuntimeError: {name}: ranks [3] of [2, 3] raised an error in this call, which says more"
    assert [ranks[0][0], ranks[1][0]] == [elsewhere] * 2
    for rank, (_, shapes, trained, same, no_group, averaged) in enumerate(ranks):
        there = [rank % 2, rank % 2 + 2]
        given = f"'float32 [2]' on rank {there[0]}, 'float32 [3]' on rank {there[1]}"
        assert shapes.endswith(f"parameters[1] must be the same on all ranks of the group, but got {given}")
        assert (
            trained == elsewhere if rank > 1 else trained.endswith("'float32 [2]' on rank 0, 'not trained' on rank 1")
        )
        assert same.startswith(f"ValueError: {name}: copies must be ranks of which only this one is in the group, but")
        assert no_group.startswith(f"TypeError: {name}: copies must be a group of paddle.distributed")
        assert averaged == f"[2.0] [{sum(there) / 4}]"


def updated_biases() -> list[Any]:
    """Balancing without a loss: a bias of each expert follows the load of all ranks."""
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    paddle.seed(5)
    layer = MoELayer(*SIZES, group=group)
    start, biases = arrays(gather_state_dict(layer, group)), []
    for step in range(STEPS):
        layer(batch(TOKENS, rank, step)[0])
        load = paddle.to_tensor(layer.tokens_per_expert)
        paddle.distributed.all_reduce(load, group=group)
        layer.router.update_correction_bias(load, rate=0.5)
        biases.append(layer.router.correction_bias.numpy())
    return [start, biases]


@pytest.mark.slow
def test_biases_of_four_ranks_follow_the_load_of_all():
    ranks = run(updated_biases, 4)
    layer = MoELayer(*SIZES)
    layer.set_state_dict(ranks[0][0])
    for step in range(STEPS):
        layer(batch(TOKENS, None, step)[0])
        layer.router.update_correction_bias(layer.tokens_per_expert, rate=0.5)
        for _, biases in ranks:
            np.testing.assert_array_equal(biases[step], layer.router.correction_bias.numpy())
    assert np.abs(layer.router.correction_bias.numpy()).max() > 0


def evaluated(batches: tuple[int, ...]) -> Any:
    """Outputs of ranks that have different numbers of batches: those that ran out come with no tokens."""
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    paddle.seed(5)
    net = Net(group)
    net.eval()
    outs, left = [], iter(range(batches[rank]))
    with paddle.no_grad():
        while True:
            number = next(left, None)
            has_one = paddle.to_tensor([int(number is not None)])
            paddle.distributed.all_reduce(has_one, op=paddle.distributed.ReduceOp.MAX, group=group)
            if not has_one.item():
                return arrays(gather_state_dict(net, group)), outs
            x = paddle.zeros([0, HIDDEN]) if number is None else batch((5,) * 4, rank, number)[0]
            out = net(x)
            if number is not None:
                outs.append(out.numpy())


@pytest.mark.slow
def test_four_ranks_evaluate_until_the_last_has_no_batch():
    ranks = run(evaluated, 4, batches=(1, 3, 0, 2))
    net = Net()
    net.set_state_dict(ranks[0][0])
    with paddle.no_grad():
        for rank, (_, outs) in enumerate(ranks):
            assert len(outs) == (1, 3, 0, 2)[rank]
            for number, out in enumerate(outs):
                expected = net(batch((5,) * 4, rank, number)[0]).numpy()
                np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def marked_with(group: Any) -> str:
    layer = nn.Linear(2, 2)
    return caught(lambda: mark_expert_parameters(layer, group=group))


def test_marks_name_a_group():
    assert marked_with([0]).startswith("TypeError: mark_expert_parameters: group must be a group of paddle.distributed")
    assert marked_with(None) == "nothing was raised"


@pytest.mark.slow
def test_the_guides_program_for_four_ranks_runs():
    for names in run(code_of_guide, 4, heading="Several groups in one program"):
        assert {"model", "copies"} <= set(names)
