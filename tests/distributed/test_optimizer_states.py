# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of models whose experts are spread over processes: saved on some ranks, resumed on others."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.utils import unique_name

from paddle_moe_ops.expert_parallel import (
    average_gradients,
    gather_optimizer_state_dict,
    gather_state_dict,
    mark_expert_parameters,
    shard_optimizer_state_dict,
    shard_state_dict,
)
from paddle_moe_ops.nn import MoELayer

from .processes import run
from .test_expert_parallel_errors import caught
from .test_grids import NEIGHBOURS, pair_of_this_rank

pytestmark = pytest.mark.long

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, STEPS = 6, 10, 4, 12, 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "NAdam": {},
    "Momentum": {},
    "SGD": {"multi_precision": True},
}


class Net(nn.Layer):
    """Two expert layers between dense ones, one of them frozen."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        sizes = HIDDEN, INTERMEDIATE, EXPERTS, 2
        self.first, self.frozen = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe, self.other = (MoELayer(*sizes, group=group) for _ in range(2))
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.frozen(self.first(x))
        for layer in (self.moe, self.other):
            x = x + layer(x.astype(layer.experts.down.dtype)).astype(x.dtype)
        return x


class Run:
    """A model and its optimizer on this rank of a group, or alone; training is the same over any number of ranks."""

    model: type[Net] = Net

    def __init__(self, optimizer: str = "AdamW", *, layers_before: int = 0, **options: Any) -> None:
        alone = not paddle.distributed.is_initialized()
        self.group = None if alone else paddle.distributed.get_group(0)
        self.rank, self.ranks = (0, 1) if alone else (self.group.rank, self.group.nranks)
        for _ in range(layers_before):  # so that parameters get other names
            nn.Linear(1, 1)
        paddle.seed(5)
        self.net = self.model(self.group)
        self.rate = paddle.optimizer.lr.StepDecay(0.01, step_size=3)
        arguments = {"learning_rate": self.rate, **OPTIMIZERS[optimizer], **options}
        if "multi_precision" in arguments:
            for layer in (self.net.moe, self.net.other):  # a CPU has no dense layers of bfloat16
                layer.to(dtype="bfloat16")
        self.optimizer = getattr(paddle.optimizer, optimizer)(parameters=self.net.parameters(), **arguments)

    def train(self, steps: range) -> list[float]:
        """The mean losses of all ranks."""
        losses = []
        for step in steps:
            rows = np.random.default_rng(step).standard_normal([TOKENS, HIDDEN]).astype(np.float32)
            count = TOKENS // self.ranks
            x = paddle.to_tensor(rows[self.rank * count : (self.rank + 1) * count])
            loss = (self.net(x) - x.flip([1])).square().mean()
            loss.backward()
            average_gradients(self.net.parameters(), self.group)
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.rate.step()
            loss = loss.detach()
            if self.ranks > 1:
                paddle.distributed.all_reduce(loss, group=self.group)
            losses.append(loss.item() / self.ranks)
        return losses

    def save(self, path: str) -> None:
        """Write both checkpoints, on the first rank."""
        states = (
            gather_state_dict(self.net, self.group),
            gather_optimizer_state_dict(self.optimizer, self.net, self.group),
        )
        if self.rank == 0:
            paddle.save(states[0], f"{path}.pdparams")
            paddle.save(states[1], f"{path}.pdopt")

    def load(self, path: str) -> None:
        """Read both checkpoints."""
        state = paddle.load(f"{path}.pdparams")
        self.net.set_state_dict(shard_state_dict(state, self.net, self.group))
        state = paddle.load(f"{path}.pdopt")
        self.optimizer.set_state_dict(shard_optimizer_state_dict(state, self.net, self.group))

    def arrays(self) -> dict[str, NDArray]:
        """All parameters of the whole model and their optimizer states, by names of the model."""
        found = {name: each.numpy() for name, each in gather_state_dict(self.net, self.group).items()}
        state = gather_optimizer_state_dict(self.optimizer, self.net, self.group)
        names = {key: name for name, key in state.pop("parameter_names").items()}
        state.pop("LR_Scheduler", None)
        masters = state.pop("master_weights", {})
        found |= {f"master of {names[key]}": each.numpy() for key, each in masters.items()}
        for key, each in state.items():
            owner = max((name for name in names if key.startswith(name)), key=len)
            found[names[owner] + key[len(owner) :]] = each.numpy()
        return found


class NetOfTwoGroups(Net):
    """The same layers, one with experts on two of four ranks and copies on the others."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.moe = MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, 2, group=pair_of_this_rank(NEIGHBOURS))


class RunOfTwoGroups(Run):
    """All functions find the groups by themselves; the last rank alone writes the checkpoints."""

    model = NetOfTwoGroups

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.group = None

    def save(self, path: str) -> None:
        last = {"dst": self.ranks - 1, "to_cpu": True}
        states = gather_state_dict(self.net, **last), gather_optimizer_state_dict(self.optimizer, self.net, **last)
        if self.rank < self.ranks - 1:
            assert states == ({}, {})
        else:
            paddle.save(states[0], f"{path}.pdparams")
            paddle.save(states[1], f"{path}.pdopt")


def trained(optimizer: str, steps: range, load: str = "", save: str = "", groups: int = 1, **options: Any) -> Any:
    """Losses of these steps, and the state after them."""
    with unique_name.guard():
        program = (Run if groups == 1 else RunOfTwoGroups)(optimizer, **options)
        if load:
            program.load(load)
        losses = program.train(steps)
        if save:
            program.save(save)
        return losses, program.arrays()


def passed_on(optimizer: str, load: str, save: str) -> dict[str, NDArray]:
    """The state after loading and before any step; it is saved again."""
    with unique_name.guard():
        program = Run(optimizer, layers_before=paddle.distributed.get_rank() + 1)
        program.load(load)
        program.save(save)
        return program.arrays()


def assert_same(found: dict[str, NDArray], expected: dict[str, NDArray], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        found_value, value = (each.astype(np.float32) for each in (found[name], value))
        np.testing.assert_allclose(found_value, value, err_msg=name, **{"rtol": 0, "atol": 0, **tolerance})


# Over other ranks gradients are other sums of the same terms, and Adam divides by their size.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
FIRST, LATER, ALL = range(STEPS), range(STEPS, 2 * STEPS), range(2 * STEPS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function of the optimizer that returns a checkpoint after five steps, and losses and end of a longer run."""
    folder, made = tmp_path_factory.mktemp("states"), {}

    def of(optimizer):
        if optimizer not in made:
            path = str(folder / optimizer)
            first, there = run(trained, 2, optimizer=optimizer, steps=FIRST, save=path)[0]
            losses, end = run(trained, 2, optimizer=optimizer, steps=ALL)[0]
            assert losses[:STEPS] == first
            made[optimizer] = path, there, losses[STEPS:], end
        return made[optimizer]

    return of


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_go_on_bit_for_bit(optimizer, saved):
    path, _, losses, end = saved(optimizer)
    for got, found in run(trained, 2, optimizer=optimizer, steps=LATER, load=path, layers_before=2):
        assert got == losses
        assert_same(found, end)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "Momentum"])
def test_one_process_goes_on_where_two_ranks_were(optimizer, saved):
    path, _, losses, end = saved(optimizer)
    got, found = trained(optimizer, LATER, load=path, layers_before=1)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same(found, end, **CLOSE)


def test_paddle_alone_takes_a_gathered_state(saved):
    """As one process has it: with parameters of the same names nothing needs to be cut."""
    path, there, _, _ = saved("AdamW")
    with unique_name.guard():
        program = Run()
        program.net.set_state_dict(paddle.load(f"{path}.pdparams"))
        program.optimizer.set_state_dict(paddle.load(f"{path}.pdopt"))
        program.train(range(1))
        assert there.keys() == program.arrays().keys()


def different_states() -> list[str]:
    """Errors on a rank whose optimizer differs from the others'."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    with unique_name.guard():
        program, other = Run("Momentum" if rank else "AdamW"), nn.Linear(2, 2)
        program.train(range(1))
        narrow = Run("AdamW")
        skipped = narrow.net.moe.experts.down if rank == 1 else None
        narrow.optimizer = paddle.optimizer.AdamW(
            parameters=[each for each in narrow.net.parameters() if each is not skipped]
        )
        narrow.train(range(1))
    gather = gather_optimizer_state_dict
    return [
        caught(lambda: gather(program.optimizer, program.net, group)),
        caught(lambda: gather(narrow.optimizer, narrow.net, group)),
        caught(lambda: gather(program.optimizer if rank else None, program.net, group)),
        caught(lambda: gather(narrow.optimizer, narrow.net if rank else other, group)),
        caught(lambda: gather_state_dict(nn.Sequential(narrow.net.moe) if rank else narrow.net.moe, group)),
    ]


def test_ranks_whose_states_differ_are_told():
    name = "gather_optimizer_state_dict"
    first, second = run(different_states, 2)
    for one, two in zip(first[:2], second[:2], strict=True):
        assert one == two
        assert one.startswith(f"ValueError: {name}: optimizer.state_dict() of '")
        assert " must be the same on all ranks of the group, but got " in one
    assert first[0].endswith("but got 'float32 [6, 6]' on rank 0, None on rank 1")
    assert "of 'moe.experts.down_moment1_0' must" in first[1]
    assert first[1].endswith("but got 'float32 [2, 10, 6]' on rank 0, None on rank 1")
    assert first[2] == f"TypeError: {name}: optimizer must be an optimizer of paddle.optimizer, but got NoneType"
    assert first[3].startswith(f"ValueError: {name}: optimizer.state_dict() must be what an optimizer keeps for")
    told = f"RuntimeError: {name}: ranks [0] of [0, 1] raised an error in this call, which says more"
    assert second[2:4] == [told] * 2
    assert first[4] == second[4]
    assert first[4].startswith(
        "ValueError: gather_state_dict: layer.state_dict()['experts.down'] must be the same on all"
    )


def one_number_of_each_expert() -> dict[str, list[float]]:
    """AdamW's state for an expert parameter of shape [1] on each rank."""
    group, net = paddle.distributed.get_group(0), nn.Layer()
    net.add_parameter("scale", net.create_parameter([1]))
    mark_expert_parameters(net)
    optimizer = paddle.optimizer.AdamW(parameters=net.parameters())
    (net.scale * (group.rank + 1.0)).sum().backward()
    optimizer.step()
    state = gather_optimizer_state_dict(optimizer, net, group)
    name = state.pop("parameter_names")["scale"]
    return {key.removeprefix(f"{name}_"): each.tolist() for key, each in state.items()}


def test_powers_are_no_numbers_of_experts():
    for state in run(one_number_of_each_expert, 2):
        assert [len(state[f"moment{each}_0"]) for each in (1, 2)] == [2, 2]
        np.testing.assert_allclose(state["moment1_0"], [0.1, 0.2], rtol=1e-6)
        assert [len(state[f"beta{each}_pow_acc_0"]) for each in (1, 2)] == [1, 1]


# The tests of four processes follow each other, since a start takes seconds.


@pytest.mark.slow
def test_four_ranks_go_on_where_two_were(saved):
    path, _, losses, end = saved("AdamW")
    got, found = run(trained, 4, optimizer="AdamW", steps=LATER, load=path)[0]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same(found, end, **CLOSE)


@pytest.mark.slow
def test_one_process_goes_on_after_four_ranks_that_went_on_after_one(tmp_path):
    one, four, last = str(tmp_path / "one"), str(tmp_path / "four"), range(2 * STEPS, 3 * STEPS)
    losses, end = trained("AdamW", range(3 * STEPS))
    trained("AdamW", FIRST, save=one)
    got, _ = run(trained, 4, optimizer="AdamW", steps=LATER, load=one, save=four, layers_before=1)[0]
    np.testing.assert_allclose(got, losses[STEPS : 2 * STEPS], rtol=1e-5)
    got, found = trained("AdamW", last, load=four, layers_before=2)
    np.testing.assert_allclose(got, losses[2 * STEPS :], rtol=1e-5)
    assert_same(found, end, **CLOSE)


@pytest.mark.slow
def test_one_process_goes_on_after_four_ranks_with_experts_on_two_groups(tmp_path):
    one, four, last = str(tmp_path / "one"), str(tmp_path / "four"), range(2 * STEPS, 3 * STEPS)
    losses, end = trained("AdamW", range(3 * STEPS))
    trained("AdamW", FIRST, save=one)
    ranks = run(trained, 4, optimizer="AdamW", steps=LATER, load=one, save=four, layers_before=1, groups=2)
    for got, found in ranks:
        np.testing.assert_allclose(got, losses[STEPS : 2 * STEPS], rtol=1e-5)
        assert_same(found, ranks[0][1])
    got, found = trained("AdamW", last, load=four)
    np.testing.assert_allclose(got, losses[2 * STEPS :], rtol=1e-5)
    assert_same(found, end, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "SGD"])
def test_a_state_goes_through_four_ranks_unchanged(optimizer, saved, tmp_path):
    path, there, _, _ = saved(optimizer)
    for found in run(passed_on, 4, optimizer=optimizer, load=path, save=str(tmp_path / "four")):
        assert_same(found, there)
    with unique_name.guard():
        program = Run(optimizer)
        program.load(str(tmp_path / "four"))
        assert_same(program.arrays(), there)
