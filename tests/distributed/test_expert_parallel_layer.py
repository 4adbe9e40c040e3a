# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose experts are spread over processes, as users train and save them, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from paddle_moe_ops.expert_parallel import (
    average_gradients,
    gather_state_dict,
    is_expert_parameter,
    shard_state_dict,
)
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.tolerances import assert_close_float8

from .processes import run

pytestmark = pytest.mark.long

SIZES = 8, 12, 4, 2  # H, I, E, K
HIDDEN = SIZES[0]
OF_GROUPS = "combine", "payload", "tokens_per_rank", "transport", "placement"  # options that need a group
BATCHES = {(5, 11): "uneven", (16, 0): "one without tokens", (8, 8): "even"}


class Net(nn.Layer):
    """A small model with an expert layer between dense ones."""

    def __init__(self, group: Any = None, *, recomputes: bool = False, experts: int = SIZES[2], **options: Any) -> None:
        super().__init__()
        self.first, self.moe, self.last = (
            nn.Linear(HIDDEN, HIDDEN),
            MoELayer(*SIZES[:2], experts, SIZES[3], group=group, **options),
            nn.Linear(HIDDEN, 3),
        )
        self.recomputes = recomputes

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        x = x + (recompute(self.moe, x) if self.recomputes else self.moe(x))
        return self.last(x)


def batch(tokens: tuple[int, ...], rank: int | None, step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The inputs and targets of a rank, or of all."""
    rng = np.random.default_rng(step)
    x, y = (rng.standard_normal([sum(tokens), width]).astype(np.float32) for width in (HIDDEN, 3))
    first = 0 if rank is None else sum(tokens[:rank])
    part = slice(first, first + (sum(tokens) if rank is None else tokens[rank]))
    return paddle.to_tensor(np.ascontiguousarray(x[part])), paddle.to_tensor(np.ascontiguousarray(y[part]))


def train(net: Net, tokens: tuple[int, ...], rank: int | None, turns: int = 1) -> None:
    """Four steps of AdamW with clipping; each on `turns` batches whose gradients are accumulated."""
    group, parts = (None, 1) if rank is None else (paddle.distributed.get_group(0), len(tokens))
    clip = nn.ClipGradByGlobalNorm(0.5) if rank is None else ClipGradForMOEByGlobalNorm(0.5, is_expert_parameter, group)
    optimizer = paddle.optimizer.AdamW(0.02, parameters=net.parameters(), grad_clip=clip)
    for step in range(4):
        for turn in range(turns):
            x, y = batch(tokens, rank, turns * step + turn)
            # without tokens, Paddle's matmul has a gradient of its weight only beside one of its input
            x.stop_gradient = False
            ((net(x) - y).square().sum() * (parts / sum(tokens))).backward()
        if rank is not None:
            average_gradients(net.parameters(), group)
        optimizer.step()
        optimizer.clear_grad()


def arrays(state: dict[str, Any]) -> dict[str, NDArray]:
    return {name: value.numpy() for name, value in state.items()}


def train_over_ranks(tokens: tuple[int, ...], turns: int = 1, **options: Any) -> tuple[Any, Any]:
    """The whole state before and after."""
    paddle.seed(7)
    group = paddle.distributed.get_group(0)
    net = Net(group, **options)
    start = arrays(gather_state_dict(net, group))
    train(net, tokens, paddle.distributed.get_rank(), turns)
    return start, arrays(gather_state_dict(net, group))


def assert_like_one_process(tokens, turns=1, **options):
    of_ranks = run(train_over_ranks, len(tokens), tokens=tokens, turns=turns, **options)
    start, end = of_ranks[0]
    for other in of_ranks[1:]:
        for name, value in other[1].items():
            np.testing.assert_array_equal(value, end[name], err_msg=name)
    net = Net(**{name: each for name, each in options.items() if name not in OF_GROUPS})
    net.set_state_dict(start)
    train(net, tokens, None, turns)
    for name, expected in arrays(net.state_dict()).items():
        np.testing.assert_allclose(end[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
    assert any(np.abs(end[name] - start[name]).max() > 0.01 for name in start if "experts" in name)


@pytest.mark.parametrize("combine", ["exact", "reduced"])
@pytest.mark.parametrize("tokens", BATCHES, ids=BATCHES.values())
def test_training_is_that_of_one_process(tokens, combine):
    assert_like_one_process(tokens, combine=combine)


@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_recompute_and_accumulation(combine):
    assert_like_one_process((5, 11), turns=2, recomputes=True, combine=combine)


@pytest.mark.parametrize(("combine", "transport"), [("reduced", "auto"), ("reduced", "peer"), ("exact", "peer")])
@pytest.mark.parametrize("tokens", BATCHES, ids=BATCHES.values())
def test_parts_of_one_size_with_room_for_all(tokens, combine, transport):
    assert_like_one_process(tokens, combine=combine, tokens_per_rank=16, transport=transport)


@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_recompute_and_accumulation_through_windows(combine):
    options = {"combine": combine, "tokens_per_rank": 11, "transport": "peer"}
    assert_like_one_process((5, 11), turns=2, recomputes=True, **options)


FLOAT8_SIZES = 144, 128, 4, 2  # more than a group of 128 columns


def on_float8_operands(layer: MoELayer, x: NDArray) -> list[NDArray]:
    """The results and gradients of two micro-batches that share quantised matrices."""
    found = []
    for number in range(2):
        tokens = paddle.to_tensor(x * (1 + number))
        tokens.stop_gradient = False
        out = layer(tokens, is_first_microbatch=number == 0)
        (out * paddle.cos(tokens.detach())).sum().backward()
        found += [out.numpy(), tokens.grad.numpy()]
    return found


def float8_over_ranks(x: NDArray, tokens: tuple[int, ...], **options: Any) -> tuple[Any, Any, Any]:
    paddle.seed(5)
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    layer = MoELayer(*FLOAT8_SIZES, group=group, combine="reduced", compute="fp8_1x128", **options)
    found = on_float8_operands(layer, np.split(x, np.cumsum(tokens)[:-1])[rank])
    gradient = layer.experts.gate_up.grad
    return arrays(gather_state_dict(layer, group)), found, None if gradient is None else gradient.numpy()


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens_per_rank": 16, "transport": "peer"}, {"keep": "h_fp8"}],
    ids=["auto", "peer", "first product in float8"],
)
@pytest.mark.parametrize("tokens", [(5, 11), (16, 0)], ids=["uneven", "one without tokens"])
def test_experts_on_float8_operands_are_those_of_one_process(tokens, options):
    x = np.random.default_rng(2).standard_normal([sum(tokens), FLOAT8_SIZES[0]]).astype(np.float32)
    of_ranks = run(float8_over_ranks, len(tokens), x=x, tokens=tokens, **options)
    layer = MoELayer(*FLOAT8_SIZES, compute="fp8_1x128", keep=options.get("keep", "h"))
    layer.set_state_dict({name: paddle.to_tensor(value) for name, value in of_ranks[0][0].items()})
    due = on_float8_operands(layer, x)
    made = [np.concatenate(parts) for parts in zip(*(found for _, found, _ in of_ranks), strict=True)]
    made.append(np.concatenate([gradient for _, _, gradient in of_ranks]))
    for got, expected in zip(made, [*due, layer.experts.gate_up.grad.numpy()], strict=True):
        assert_close_float8(got, expected)


def gradients_in(accumulate: bool) -> Any:
    """The averaged gradients of the experts, in `grad` or in `main_grad`."""
    paddle.seed(4)
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    net = Net(group, accumulate=accumulate)
    experts = net.moe.experts.parameters()
    if accumulate:
        for each in experts:
            each.main_grad = None
    x, y = batch((5, 11), rank, 0)
    (net(x) - y).square().mean().backward()
    average_gradients(net.parameters(), group)
    assert all((each.grad is None) == accumulate for each in experts)
    return [(each.main_grad if accumulate else each.grad).numpy() for each in experts]


def test_main_gradients_are_averaged():
    for plain, main in zip(run(gradients_in, 2, accumulate=False), run(gradients_in, 2, accumulate=True), strict=True):
        for expected, got in zip(plain, main, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
            assert np.abs(got).max() > 0


def loaded_over_ranks(state: dict[str, NDArray], tokens: tuple[int, ...], experts: int) -> tuple[Any, Any]:
    """Outputs of a model that loaded a whole state, and the state gathered from it."""
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    net = Net(group, experts=experts)
    whole = {name: paddle.to_tensor(value) for name, value in state.items()}
    net.set_state_dict(shard_state_dict(whole, net, group))
    with paddle.no_grad():
        out = net(batch(tokens, rank, 0)[0])
    return out.numpy(), arrays(gather_state_dict(net, group))


def assert_a_checkpoint_fits(tokens, experts=SIZES[2]):
    paddle.seed(3)
    net = Net(experts=experts)
    whole = arrays(net.state_dict())
    of_ranks = run(loaded_over_ranks, len(tokens), state=whole, tokens=tokens, experts=experts)
    for _, state in of_ranks:
        assert state.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    with paddle.no_grad():
        expected = net(batch(tokens, None, 0)[0]).numpy()
    np.testing.assert_allclose(np.concatenate([out for out, _ in of_ranks]), expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_one_process_fits_two_and_comes_back():
    assert_a_checkpoint_fits((6, 10))


def first_values() -> Any:
    """Initial states of a layer under a seed per rank and under one seed, and the next draw."""
    paddle.seed(paddle.distributed.get_rank())
    moe = MoELayer(*SIZES, group=paddle.distributed.get_group(0))
    paddle.seed(5)
    other = MoELayer(*SIZES, group=paddle.distributed.get_group(0))
    return arrays(moe.state_dict()), arrays(other.state_dict()), paddle.rand([3]).numpy()


def test_ranks_start_with_one_router_and_experts_of_their_own():
    (one, seeded_one, draw_one), (two, seeded_two, draw_two) = run(first_values, 2)
    for state, other in ((one, two), (seeded_one, seeded_two)):
        for name, value in state.items():
            same = np.array_equal(value, other[name])
            assert same != name.startswith("experts."), name
    np.testing.assert_array_equal(draw_one, draw_two)


def questions_of_a_layer() -> int:
    """Number of times that the constructor of a layer gathers objects from the other ranks."""
    asked, of_paddle = [], paddle.distributed.all_gather_object

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(given)
        return of_paddle(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed, "all_gather_object", counted)
        MoELayer(*SIZES, group=paddle.distributed.get_group(0))
    return len(asked)


def test_a_layer_asks_the_other_ranks_once_what_they_were_given():
    assert run(questions_of_a_layer, 2) == [1, 1]


def data_parallel() -> Any:
    paddle.seed(1)
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    net = Net(group)
    assert f"rank={rank} of 2" in repr(net)
    before = arrays(net.moe.experts.state_dict())
    wrapped = paddle.DataParallel(net)
    x, y = batch((8, 8), rank, 0)
    (wrapped(x) - y).square().mean().backward()
    same = all(np.array_equal(before[name], value) for name, value in arrays(net.moe.experts.state_dict()).items())
    return same, {name: each.grad.numpy() for name, each in net.named_parameters()}


def test_data_parallel_leaves_experts_to_their_rank():
    (kept_one, one), (kept_two, two) = run(data_parallel, 2)
    assert kept_one
    assert kept_two
    for name, gradient in one.items():
        assert np.array_equal(gradient, two[name]) != ("experts" in name), name


def gathered_before_a_step(ranks: int) -> bool:
    """Return whether training leaves a gathered state unchanged."""
    group = paddle.distributed.get_group(0) if ranks > 1 else None
    layer = MoELayer(*SIZES, group=group, combine="reduced", num_shared_experts=1)
    state = gather_state_dict(layer, group)
    before = arrays(state)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    layer(paddle.ones([5, SIZES[0]])).sum().backward()
    optimizer.step()
    moved = arrays(gather_state_dict(layer, group))
    assert all(not np.array_equal(moved[name], before[name]) for name in ("router.weight", "shared.down"))
    return all(np.array_equal(each.numpy(), before[name]) for name, each in state.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathered_states_are_copies(ranks):
    assert all(run(gathered_before_a_step, ranks, ranks=ranks))


def of_rank_alone(options: dict[str, Any], tokens: tuple[int, ...]) -> Any:
    """Outputs for this rank's tokens over the ranks and with all experts here, and the dropped slots."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    layer, x = MoELayer(*SIZES, group=group, **options), batch(tokens, rank, 0)[0]
    whole = MoELayer(*SIZES, **{name: each for name, each in options.items() if name not in OF_GROUPS})
    whole.set_state_dict(gather_state_dict(layer, group))
    with paddle.no_grad():
        outs = layer(x).numpy(), whole(x).numpy()
    return *outs, *(int(np.sum(np.asarray(each.dropped_slots))) for each in (layer, whole))


@pytest.mark.parametrize(
    "options",
    [
        {"combine": "exact"},
        {"combine": "reduced"},
        {"combine": "reduced", "tokens_per_rank": 13},
        {"combine": "reduced", "tokens_per_rank": 13, "transport": "peer"},
        {"combine": "exact", "tokens_per_rank": 13, "transport": "peer"},
        {"combine": "exact", "placement": [1, 0, 1, 1]},
        {"combine": "reduced", "placement": [0, 0, 0, 0], "tokens_per_rank": 13, "transport": "peer"},
    ],
    ids=["exact", "reduced", "parts of one size", "peer", "exact over peers", "placed", "peer, placed on one rank"],
)
def test_capacity_counts_the_tokens_of_a_rank(options):
    options = {"capacity_factor": 0.75, **options}
    ranks = run(of_rank_alone, 2, options=options, tokens=(13, 4))
    assert sum(dropped for _, _, dropped, _ in ranks) > 0
    for got, expected, dropped, dropped_alone in ranks:
        assert dropped == dropped_alone
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def with_room_for_few(room: int, **options: Any) -> Any:
    """Outputs with room for few tokens and for all, slots that should be dropped, and those that the layer counts."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    layer = MoELayer(*SIZES, group=group, combine="reduced", tokens_per_rank=room, **options)
    whole = MoELayer(*SIZES)
    whole.set_state_dict(gather_state_dict(layer, group))
    x = batch((13, 4), rank, 0)[0]
    before = layer.dropped_slots
    out, expected, dropped = layer(x), whole(x), layer.dropped_slots
    out.square().sum().backward()
    goes = layer.router(x)[0].numpy() // layer.experts.num_experts == np.arange(2).reshape(2, 1, 1)
    late = goes.any(2).cumsum(1) > room  # by rank and token
    lost = (late[..., None] & goes).any(0)  # by token and slot
    return before.tolist(), dropped.tolist(), lost, out.numpy(), expected.numpy()


@pytest.mark.parametrize("options", [{}, {"transport": "peer"}], ids=["exchanged", "peers"])
def test_a_layer_counts_the_slots_that_found_no_room(options):
    for room in (3, 13):
        ranks = run(with_room_for_few, 2, room=room, **options)
        assert (sum(lost.sum() for _, _, lost, _, _ in ranks) > 0) == (room == 3)
        for before, dropped, lost, out, expected in ranks:
            assert before == 0
            assert dropped == lost.sum()
            complete = ~lost.any(1)
            np.testing.assert_allclose(out[complete], expected[complete], rtol=1e-5, atol=1e-6)
            assert (np.abs(out - expected).max(1)[~complete] > 1e-4).all()


@pytest.mark.parametrize("options", [{}, {"tokens_per_rank": 13, "transport": "peer"}], ids=["exchanged", "peer"])
def test_tokens_that_travel_as_float8_change_little(options):
    options = {"payload": "fp8_1x128", **options}
    for got, expected, _, _ in run(of_rank_alone, 2, options=options, tokens=(13, 4)):
        np.testing.assert_allclose(got, expected, rtol=0.1, atol=0.1)
        assert not np.array_equal(got, expected)


def in_bfloat16() -> Any:
    """Losses of a model and of a copy of it; then its layer runs in bfloat16."""
    paddle.seed(2)
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    net = Net(group, combine="reduced")
    x, y = batch((8, 8), rank, 0)
    losses = []
    for model in (net, copy.deepcopy(net)):
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss))
        assert all(np.isfinite(each.grad.numpy()).all() for each in model.parameters() if not each.stop_gradient)
    moe, x = net.moe, x.astype("bfloat16")
    expected = moe(x.astype("float32"))
    moe.to(dtype="bfloat16")
    assert all(is_expert_parameter(each) for each in moe.experts.parameters())
    out = moe(x)
    assert float((out.astype("float32") - expected).abs().max()) < 0.05 * float(expected.abs().max())
    with paddle.no_grad():
        assert (moe(x).astype("float32") - out.astype("float32")).abs().max() == 0
    return losses


def test_copies_and_bfloat16():
    for loss, of_copy in run(in_bfloat16, 2):
        assert loss == of_copy


# The tests of four processes follow each other, since a start takes seconds.


MANY = [
    pytest.param((3, 4, 0, 9), id="four"),
    pytest.param((3, 0, 1, 4, 0, 2, 6, 0), id="eight", marks=pytest.mark.slow),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", MANY)
@pytest.mark.parametrize("through_peers", [False, True], ids=["exchanged", "peers"])
@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_training_over_many_ranks_is_that_of_one_process(combine, through_peers, tokens):
    options = {"tokens_per_rank": max(tokens), "transport": "peer"} if through_peers else {}
    assert_like_one_process(tokens, combine=combine, experts=8, **options)


def test_a_checkpoint_of_one_process_fits_four_and_comes_back():
    assert_a_checkpoint_fits((1, 2, 3, 10))


@pytest.mark.slow
def test_a_checkpoint_of_one_process_fits_eight_and_comes_back():
    assert_a_checkpoint_fits((1, 2, 0, 3, 0, 4, 1, 5), experts=8)


def two_groups() -> NDArray:
    """Four ranks in two groups, which know nothing of each other."""
    rank = paddle.distributed.get_rank()
    groups = []
    for ranks in ([0, 1], [2, 3]):
        groups.append(paddle.distributed.new_group(ranks))
        paddle.distributed.barrier()  # ranks that connect two groups at a time with gloo may miss each other
    paddle.seed(rank // 2)
    net = Net(groups[rank // 2])
    out = net(batch((2, 3, 4, 5), rank, 0)[0])
    out.sum().backward()
    return out.numpy()


def test_two_groups_of_four_ranks_are_independent():
    outs = run(two_groups, 4)
    assert [len(out) for out in outs] == [2, 3, 4, 5]
    assert all(np.isfinite(out).all() for out in outs)
