# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that move between ranks in the middle of training, and checkpoints that move between placements."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.utils import unique_name

from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    ExpertParallel,
    average_gradients,
    gather_optimizer_state_dict,
    gather_state_dict,
    mark_expert_parameters,
    move_experts,
    shard_optimizer_state_dict,
    shard_state_dict,
)
from paddle_moe_ops.nn import MoELayer

from .processes import run
from .test_expert_parallel_errors import caught
from .test_flex_checkpoints import load_on_cpu
from .test_optimizer_states import assert_same

HIDDEN, INNER, EXPERTS, STEPS = 8, 12, 5, 4
TOKENS = (5, 0, 9)
APART, TOGETHER, MIXED, ORDERED, REVERSED = [0, 1, 0, 1, 0], [1] * 5, [1, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 1, 0, 0, 0]
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": 16}


class AdamWOfMasters(paddle.optimizer.AdamW):
    """AdamW with master weights on a CPU, for which Paddle has no kernel."""

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        parameter, gradient = param_and_grad
        if parameter.dtype != paddle.bfloat16:
            return super()._append_optimize_op(block, param_and_grad)
        gradient, master = gradient.astype("float32"), self._master_weights[parameter.name]
        mean, square = (self._get_accumulator_master(f"moment{number}", parameter) for number in (1, 2))
        paddle.assign(0.9 * mean + 0.1 * gradient, mean)
        paddle.assign(0.99 * square + 0.01 * gradient * gradient, square)
        paddle.assign(0.999 * master - 0.05 * mean / (square.sqrt() + 1e-6), master)
        paddle.assign(master.astype("bfloat16"), parameter)
        return None


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: paddle.optimizer.AdamW(0.05, parameters=parameters),
    "AdamW with master weights": lambda parameters: AdamWOfMasters(0.05, parameters=parameters, multi_precision=True),
    "clipped Momentum": lambda parameters: paddle.optimizer.Momentum(
        0.05, parameters=parameters, grad_clip=ClipGradByGlobalNorm(0.3)
    ),
}


class Net(nn.Layer):
    """Two expert layers around a dense one; the second one's first matrix is frozen."""

    def __init__(self, group: Any, placement: Any, **options: Any) -> None:
        super().__init__()
        # A third gradient of x, as of a shared expert, would be added up in another order on a rank without experts.
        sizes = HIDDEN, INNER, EXPERTS, 2, 0
        of_group = {} if group is None else {"group": group, "placement": placement, **options}
        self.first, self.dense = MoELayer(*sizes, **of_group), nn.Linear(HIDDEN, HIDDEN)
        self.last = MoELayer(*sizes, expert_bias=True, **of_group)
        self.last.experts.gate_up.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in (self.first, self.last):
            dtype = layer.experts.down.dtype
            x = self.dense(layer(x.astype(dtype)).astype("float32"))
        return x


class Run:
    """A model and its optimizer."""

    def __init__(self, placement: Any = None, optimizer: str = "AdamW", **options: Any) -> None:
        alone = not dist.is_initialized()
        self.group = None if alone else dist.get_group(0)
        self.rank, self.ranks = (0, 1) if alone else (self.group.rank, self.group.nranks)
        paddle.seed(5)
        self.net = Net(self.group, placement, **options)
        whole = gather_state_dict(self.net, self.group)
        rng = np.random.default_rng(4)  # the same start for any placement
        start = {
            name: paddle.to_tensor(0.4 * rng.standard_normal(each.shape), each.dtype) for name, each in whole.items()
        }
        self.net.set_state_dict(shard_state_dict(start, self.net, self.group))
        if "master" in optimizer:
            for layer in (self.net.first, self.net.last):
                layer.to(dtype="bfloat16")
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())

    def train(self, steps: range, moves: dict[int, Any] | None = None) -> None:
        for step in steps:
            if step in (moves or {}):
                move_experts(self.net, moves[step], self.optimizer)
            rows = np.random.default_rng(step).standard_normal([sum(TOKENS), HIDDEN]).astype(np.float32)
            if self.ranks > 1:
                ends = np.cumsum(TOKENS[: self.ranks - 1])
                rows = np.split(rows, ends)[self.rank]
            x = paddle.to_tensor(np.ascontiguousarray(rows))
            x.stop_gradient = False
            ((self.net(x) - x.detach().flip([1])).square().sum() * (self.ranks / sum(TOKENS))).backward()
            average_gradients(self.net.parameters(), self.group)
            self.optimizer.step()
            self.optimizer.clear_grad()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        of_optimizer = gather_optimizer_state_dict(self.optimizer, self.net, self.group)
        return gather_state_dict(self.net, self.group), of_optimizer

    def arrays(self) -> dict[str, NDArray]:
        """The whole states, with the model's names in place of Paddle's."""
        state, of_optimizer = self.states()
        names, masters = of_optimizer.pop("parameter_names"), of_optimizer.pop("master_weights", {})
        of_optimizer |= {f"{key}_master": value for key, value in masters.items()}
        found = {name: each.astype("float32").numpy() for name, each in state.items()}
        for name, key in names.items():
            for entry, value in of_optimizer.items():
                if entry.startswith(f"{key}_"):
                    found[name + entry.removeprefix(key)] = value.numpy()
        return found


def trained(start: Any, moves: dict[int, Any], optimizer: str, **options: Any) -> dict[str, NDArray]:
    program = Run(start, optimizer, **options)
    program.train(range(STEPS), moves)
    return program.arrays()


@pytest.mark.parametrize(
    ("start", "moves", "optimizer", "options"),
    [
        (None, {1: MIXED, 3: TOGETHER}, "AdamW", {}),
        (TOGETHER, {2: APART}, "AdamW with master weights", {}),
        (APART, {1: [0] * 5, 2: {"first": MIXED}}, "AdamW", PEER),
        (MIXED, {2: {"last": ORDERED}}, "clipped Momentum", {"combine": "reduced"}),
    ],
    ids=["alltoall", "master weights", "peer", "reduced"],
)
def test_training_goes_on_as_if_the_experts_had_not_moved(start, moves, optimizer, options):
    expected, moved = (run(trained, 2, start=start, moves=each, optimizer=optimizer, **options) for each in ({}, moves))
    for got, due in zip(moved, expected, strict=True):
        assert got.keys() == due.keys()
        assert sum("moment" in name or "velocity" in name for name in due) > 5
        assert any("master" in name for name in due) == ("master" in optimizer)
        if not options.get("combine"):
            assert_same(got, due)
        for name, value in due.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_training_goes_on_after_a_move_between_three_ranks():
    moves = {1: [2, 0, 2, 2, 0], 2: [1] * 5, 3: [2, 1, 0, 2, 1]}
    expected, moved = (run(trained, 3, start=None, moves=each, optimizer="AdamW") for each in ({}, moves))
    for got, due in zip(moved, expected, strict=True):
        assert_same(got, due)


def saved(path: str, placement: Any, flex: bool) -> dict[str, NDArray]:
    with unique_name.guard():
        program = Run(placement)
        program.train(range(2))
        state, of_optimizer = program.states()
        if flex:
            of_model = program.net.sharded_state_dict()
            dist.save_state_dict(of_model | program.optimizer.sharded_state_dict(of_model), path)
        elif program.rank == 0:
            paddle.save(state, f"{path}.pdparams")
            paddle.save(of_optimizer, f"{path}.pdopt")
        if program.ranks > 1:
            dist.barrier()
        return program.arrays()


def loaded(path: str, placement: Any, flex: bool) -> dict[str, NDArray]:
    with unique_name.guard():
        nn.Linear(1, 1)  # so that parameters get other names
        program = Run(placement)
        if flex:
            program.train(range(1))  # an optimizer has tensors to load into after its first step
            of_model = program.net.sharded_state_dict()
            load_on_cpu(of_model | program.optimizer.sharded_state_dict(of_model), path)
        else:
            net, group = program.net, program.group
            net.set_state_dict(shard_state_dict(paddle.load(f"{path}.pdparams"), net, group))
            state = shard_optimizer_state_dict(paddle.load(f"{path}.pdopt"), net, group)
            program.optimizer.set_state_dict(state)
        return program.arrays()


# Paddle's load_state_dict assigns to slices, which share no memory with their tensor on a plug-in's device.
CHECKPOINTS = [pytest.param(False, id="gathered"), pytest.param(True, id="flex", marks=pytest.mark.cpu_only)]


@pytest.mark.parametrize("flex", CHECKPOINTS)
def test_a_checkpoint_of_one_placement_loads_under_others_and_in_one_process(tmp_path, flex):
    first, others = (ORDERED, [None, REVERSED]) if flex else (APART, [MIXED, TOGETHER, None])
    path = str(tmp_path / "checkpoint")
    there = run(saved, 2, path=path, placement=first, flex=flex)[0]
    for placement in others:
        for found in run(loaded, 2, path=path, placement=placement, flex=flex):
            assert_same(found, there)
    assert_same(loaded(path, None, flex), there)


@pytest.mark.parametrize("flex", CHECKPOINTS)
def test_a_checkpoint_of_one_process_loads_under_any_placement(tmp_path, flex):
    path = str(tmp_path / "checkpoint")
    there = saved(path, None, flex)
    for placement in (ORDERED, REVERSED) if flex else (MIXED, TOGETHER):
        for found in run(loaded, 2, path=path, placement=placement, flex=flex):
            assert_same(found, there)


def loaded_without_experts() -> tuple[list[str], list[bool]]:
    """Devices of loaded states on this rank, and whether they are gathered again as they were saved."""
    model = Scales(TOGETHER)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    model.scales.grad = paddle.ones(model.scales.shape)
    optimizer.step()
    saved = gather_optimizer_state_dict(optimizer, model)
    part = shard_optimizer_state_dict(saved, model)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    optimizer.set_state_dict(part)
    again = gather_optimizer_state_dict(optimizer, model)
    pairs = ((value, again[name]) for name, value in saved.items() if isinstance(value, paddle.Tensor))
    places = [str(value.place) for value in part.values() if isinstance(value, paddle.Tensor)]
    return places, [np.array_equal(*pair) for pair in pairs]


def test_states_load_on_a_rank_without_experts_of_any_device(custom_backend):
    """Paddle's copies of tensors without elements are on the host."""
    for places, same in run(loaded_without_experts, 2, custom_backend):
        assert len(places) == 1
        assert "cpu" not in places[0]
        assert same == [True]


def after_loading(path: str) -> dict[str, NDArray]:
    """The whole states after experts moved between loading and the first step, and the loaded ones after that."""
    program = Run(APART)
    net, group = program.net, program.group
    net.set_state_dict(shard_state_dict(paddle.load(f"{path}.pdparams"), net, group))
    state = shard_optimizer_state_dict(paddle.load(f"{path}.pdopt"), net, group)
    shapes = {name: each.shape for name, each in state.items() if isinstance(each, paddle.Tensor)}
    program.optimizer.set_state_dict(state)
    move_experts(program.net, MIXED, program.optimizer)
    assert shapes == {name: each.shape for name, each in state.items() if isinstance(each, paddle.Tensor)}
    program.train(range(2, STEPS))
    return program.arrays()


def test_experts_move_between_loading_and_the_first_step(tmp_path):
    path = str(tmp_path / "checkpoint")
    run(saved, 2, path=path, placement=None, flex=False)
    expected = run(trained, 2, start=None, moves={}, optimizer="AdamW")
    for got, due in zip(run(after_loading, 2, path=path), expected, strict=True):
        assert_same(got, due)


class Scales(nn.Layer):
    """Experts of a user's class: each is a number for each column."""

    def __init__(self, placement: Any) -> None:
        super().__init__()
        self.parallel = ExpertParallel(EXPERTS, placement=placement)
        self.scales, self.moved = self.create_parameter([self.parallel.num_local_experts, HIDDEN]), 0
        whole = np.random.default_rng(4).standard_normal([EXPERTS, HIDDEN]).astype(np.float32)
        self.scales.set_value(whole[list(self.parallel.local_experts)])
        mark_expert_parameters(self, group=self.parallel.group, placement=self.parallel.placement)

    def experts_moved(self) -> None:
        self.moved += 1

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        ids = paddle.arange(x.shape[0]).reshape([-1, 1]) % EXPERTS
        received = self.parallel.dispatch(x, ids, paddle.ones(ids.shape))
        scales = paddle.gather(self.scales, received.plan.row_to_expert)
        return self.parallel.combine(received.rows * scales, received)


def of_own_class() -> list[Any]:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Scales(MIXED), copy.deepcopy(nn.Identity()))
    x = paddle.ones([6, HIDDEN])
    before, whole = model[1](x).numpy(), gather_state_dict(model)["1.scales"].numpy()
    move_experts(model, {"1": APART})
    outs = [model[1](x).numpy()]
    move_experts(model[1], [0] * EXPERTS)  # which is the layer itself
    outs.append(model[1](x).numpy())
    same = [np.array_equal(before, out) for out in outs]
    return [*same, np.array_equal(whole, gather_state_dict(model)["1.scales"]), model[1].moved]


def test_experts_of_a_users_class_move():
    assert run(of_own_class, 2) == [[True, True, True, 2]] * 2


def moved_inside_of_others() -> list[Any]:
    """Flags of equal outputs after a move of experts in a layer that has experts itself, and the moves of both."""
    outer, inner = Scales(MIXED), Scales(MIXED)
    outer.inner = inner
    x = paddle.ones([6, HIDDEN])
    before = inner(x).numpy()
    move_experts(outer, {"inner": APART})
    return [np.array_equal(before, each(x)) for each in (outer, inner)] + [outer.moved, inner.moved]


def test_experts_inside_of_a_layer_with_experts_move_alone():
    assert run(moved_inside_of_others, 2) == [[True, True, 0, 1]] * 2


def moved_in_two_groups() -> list[Any]:
    """True if a layer in a group of this rank alone stays as it is, and the placement of one that both ranks share."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    alone, shared = (MoELayer(HIDDEN, INNER, EXPERTS, 2, group=each) for each in (group, dist.get_group(0)))
    before = alone.experts.down.clone()
    if group.ranks == [0]:
        move_experts(alone, [0] * EXPERTS)
    move_experts(nn.Sequential(alone, shared), {"1": APART})
    return [paddle.equal_all(alone.experts.down, before).item(), shared.parallel.placement]


def test_the_ranks_of_a_layers_group_call_and_those_of_several_groups_call_together():
    assert run(moved_in_two_groups, 2) == [[True, tuple(APART)]] * 2


def refused() -> list[str]:
    """The errors of moves on a rank, which change nothing."""
    program, rank = Run(APART), dist.get_rank()
    net, optimizer, of_other_group = program.net, program.optimizer, Scales(APART)
    mark_expert_parameters(of_other_group, group=[dist.new_group([each]) for each in range(2)][rank])
    texts = [
        caught(lambda: move_experts(net, [0] * 4, optimizer)),
        caught(lambda: move_experts(net, [0, 0, 0, 0, 2], optimizer)),
        caught(lambda: move_experts(net, (TOGETHER, MIXED)[rank], optimizer)),
        caught(lambda: move_experts(net, {"middle": MIXED}, optimizer)),
        caught(lambda: move_experts(net, None, optimizer)),
        caught(lambda: move_experts(net.dense, MIXED, optimizer)),
        caught(lambda: move_experts(net, MIXED, net)),
        caught(net.sharded_state_dict),
        caught(lambda: move_experts([net], MIXED)),
        caught(lambda: move_experts(of_other_group, MIXED)),
    ]
    loss = net(paddle.ones([3, HIDDEN])).sum()
    loss.backward(retain_graph=True)
    texts.append(caught(lambda: move_experts(net, MIXED, optimizer)))
    optimizer.clear_grad()
    assert net.first.parallel.placement == tuple(APART)
    again = net(paddle.ones([3, HIDDEN])).sum()
    move_experts(net, MIXED, optimizer)
    assert net.first.config.placement == net.last.parallel.placement == tuple(MIXED)
    assert all(each.grad is None for each in net.first.experts.parameters())
    texts.append("raised" if "nothing" not in caught(again.backward) else "backward passed")
    return texts


def test_moves_that_are_refused():
    for rank, texts in enumerate(run(refused, 2)):
        gaps = "one in which each rank has experts that follow each other, for 'first.experts.gate_up'; use "
        gaps += "save_checkpoint, or move_experts before you save, but got [0, 1, 0, 1, 0]"
        own = [
            "ValueError: move_experts: placement must be 5 ranks, one for each expert, but got 4",
            "ValueError: move_experts: placement[4] must be from 0 to 1, but got 2",
            "ValueError: move_experts: placement must be the same on all ranks of the group, but got (1, 1, 1, 1, 1) "
            "on rank 0, (1, 1, 0, 1, 0) on rank 1",
            "ValueError: move_experts: placement must be a list, or a dict with names of layers with experts, of "
            "['first', 'last'], but got the name 'middle'",
            "TypeError: move_experts: placement must be a list of the rank of each expert, but got None",
            "ValueError: move_experts: model must be one with experts on the ranks of a group, but got none",
        ]
        assert texts[:6] == own
        assert texts[6].startswith("ValueError: move_experts: optimizer.state_dict()")
        assert texts[7] == f"ValueError: sharded_state_dict: placement must be {gaps}"
        assert texts[8:10] == [
            "TypeError: move_experts: model must be a Layer, but got list",
            f"ValueError: move_experts: group must be the group that shares the experts of 'scales', ranks [{rank}], "
            "but got ranks [0, 1]",
        ]
        assert texts[10].startswith("ValueError: move_experts: the gradient of 'first.experts.")
        assert texts[11] == "raised"
