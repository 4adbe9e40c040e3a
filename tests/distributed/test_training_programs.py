# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that change settings of parameters, schedules or layers while they train, over ranks and in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import mix_precision_utils, tensor_fusion_helper
from paddle.optimizer import lr

from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    average_gradients,
    distributed_optimizer,
    gather_state_dict,
    group_sharded_parallel,
    move_experts,
)

from .fleets import start_fleet
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import Net, arrays, batch
from .test_fleet import reduced_and_scattered
from .test_group_sharded import stage_2_on_a_cpu

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]

DIVIDED = "sharding, divided"
TOKENS, STEPS, CLIP = (5, 11), 5, 0.4
DEGREES = {
    "data parallel": {"dp_degree": 2},
    "sharding": {"sharding_degree": 2},
    DIVIDED: {"sharding_degree": 2},
}


class Program:
    """Training on all tokens in one process, or on those of this rank; the programs of tests change parts of it.

    Args:
        kind: the way to train: of `DEGREES`, "by hand", "stage 2" or "alone".
    """

    recomputes = False

    def __init__(self, kind: str) -> None:
        self.kind, self.is_alone = kind, kind == "alone"
        self.rank = None if self.is_alone else paddle.distributed.get_rank()
        paddle.seed(7)
        group = None if self.is_alone else paddle.distributed.get_group(0)
        if kind in DEGREES:
            topology = start_fleet({"split_param": True} if kind == DIVIDED else None, **DEGREES[kind])
            axis = "data" if kind == "data parallel" else "sharding"
            group = getattr(topology, f"get_{axis}_parallel_group")()
        self.net = Net(group, recomputes=self.recomputes)
        self.turns = 1

    def start(self) -> None:
        """Make the model and the optimizers that train."""
        self.before()
        self.optimizers = self.made()
        self.model: Any = self.net
        if self.kind in DEGREES:
            if self.kind == DIVIDED:
                self.model = mix_precision_utils.MixPrecisionLayer(self.net, dtype="bfloat16")
                self.optimizers = [mix_precision_utils.MixPrecisionOptimizer(each) for each in self.optimizers]
            self.model = fleet.distributed_model(self.model)
            self.optimizers = [distributed_optimizer(each) for each in self.optimizers]
        elif self.kind == "stage 2":
            (optimizer,) = self.optimizers
            self.model, optimizer, _ = group_sharded_parallel(self.net, optimizer, "os_g")
            self.optimizers = [optimizer]

    def trainable(self) -> list[paddle.Tensor]:
        """The parameters of an optimizer; Fleet's second sharding optimizer takes no frozen ones."""
        return [each for each in self.net.parameters() if self.kind != DIVIDED or not each.stop_gradient]

    def clip(self) -> Any:
        return (ClipGradByGlobalNorm if self.kind == "by hand" else nn.ClipGradByGlobalNorm)(CLIP)

    def before(self) -> None:
        """Change the model before the optimizers are made."""

    def made(self) -> list[Any]:
        """The optimizers of `paddle.optimizer`."""
        return [paddle.optimizer.AdamW(0.02, parameters=self.trainable(), grad_clip=self.clip(), epsilon=1e-3)]

    def between(self, step: int) -> None:
        """Run before a step."""

    def after(self) -> None:
        """Run after a step."""

    def train(self) -> list[float]:
        """The losses of the steps; over ranks their sums are those of one process."""
        losses, parts, number = [], 1 if self.is_alone else len(TOKENS), 0
        for step in range(STEPS):
            self.between(step)
            losses.append(0.0)
            for _ in range(self.turns):
                x, y = batch(TOKENS, self.rank, number)
                loss = (self.model(x) - y).square().sum() * (parts / sum(TOKENS) / self.turns)
                loss.backward()
                losses[-1] += float(loss) / parts
                number += 1
            if self.kind == "by hand":
                average_gradients(self.net.parameters())
            for each in self.optimizers:
                each.step()
                each.clear_grad()
            self.after()
        return losses

    def results(self) -> dict[str, NDArray]:
        return self.whole(self.net)

    def whole(self, net: nn.Layer) -> dict[str, NDArray]:
        return arrays(net.state_dict() if self.is_alone else gather_state_dict(net))


class FrozenRouter(Program):
    def before(self) -> None:
        self.net.moe.router.weight.stop_gradient = True


class RatesAndDecay(Program):
    """Other rates for some parameters, a clip that leaves out another one, and decay for those that a name allows."""

    def before(self) -> None:
        self.net.moe.experts.down.optimize_attr["learning_rate"] = 0.1
        self.net.first.weight.optimize_attr["learning_rate"] = 3.0
        self.net.moe.router.weight.need_clip = self.net.moe.experts.gate_up.need_clip = False

    def made(self) -> list[Any]:
        names = {
            each.name for name, each in self.net.named_parameters() if name in ("first.weight", "moe.experts.down")
        }
        options = {"weight_decay": 0.5, "apply_decay_param_fun": lambda name: name in names}
        parameters = self.trainable()
        return [paddle.optimizer.AdamW(0.02, parameters=parameters, grad_clip=self.clip(), epsilon=1e-3, **options)]


class TwoOptimizers(Program):
    def made(self) -> list[Any]:
        experts, dense = (
            [each for name, each in self.net.named_parameters() if ("experts" in name) == of_experts]
            for of_experts in (True, False)
        )
        momentum = paddle.optimizer.Momentum(0.1, parameters=experts, grad_clip=self.clip())
        return [paddle.optimizer.AdamW(0.02, parameters=dense, grad_clip=self.clip(), epsilon=1e-3), momentum]


class Schedule(Program):
    """A schedule of the rate that begins again, without clipping, which would hide a wrong factor of all gradients."""

    def made(self) -> list[Any]:
        self.rate = lr.CosineAnnealingWarmRestarts(0.02, T_0=2, eta_min=0.001)
        return [paddle.optimizer.Momentum(self.rate, parameters=self.trainable())]

    def after(self) -> None:
        self.rate.step()


class Averages(Program):
    """Averages of parameters over steps, in a deep copy."""

    def start(self) -> None:
        self.copy = copy.deepcopy(self.net)
        super().start()

    @paddle.no_grad()
    def after(self) -> None:
        for average, each in zip(self.copy.parameters(), self.net.parameters(), strict=True):
            average.set_value(0.5 * average + 0.5 * each)

    def results(self) -> dict[str, NDArray]:
        return super().results() | {f"average of {name}": each for name, each in self.whole(self.copy).items()}


class Evaluated(Program):
    """Passes without gradients in both modes, between steps and between micro-batches."""

    def between(self, step: int) -> None:
        self.turns = 1 + step % 2
        x, _ = batch(TOKENS, self.rank, 100 + step)
        self.model.eval()
        with paddle.no_grad():
            self.model(x)
        self.model.train()
        with paddle.no_grad():
            self.model(x)


class Frozen(Program):
    """Parameters that are frozen after some steps."""

    def between(self, step: int) -> None:
        if step == 2:
            for each in self.chosen():
                each.stop_gradient = True

    def chosen(self) -> list[paddle.Tensor]:
        return [*self.net.first.parameters(), self.net.moe.experts.down]


class FrozenExperts(Frozen):
    def chosen(self) -> list[paddle.Tensor]:
        return [self.net.moe.experts.down]


class Unfrozen(Frozen):
    """Parameters that are trained after some steps."""

    def before(self) -> None:
        for each in self.chosen():
            each.stop_gradient = True

    def between(self, step: int) -> None:
        if step == 2:
            for each in self.chosen():
                each.stop_gradient = False


class UnfrozenExperts(Unfrozen, FrozenExperts):
    pass


class Moved(Program):
    """Experts that move between steps."""

    def between(self, step: int) -> None:
        if not self.is_alone and step in (1, 3):
            move_experts(self.net, [[0, 1, 1, 1], [1, 0, 0, 1]][step // 2], self.optimizers[0])


class MovedAndRecomputed(Moved):
    recomputes = True


# The first way to train of each program runs in CI. Paddle's DataParallel supports neither recompute nor parameters
# that are frozen later, and Fleet's second sharding optimizer no frozen ones.
CASES = {
    FrozenRouter: ("stage 2", "by hand", *DEGREES),
    RatesAndDecay: (DIVIDED, "by hand", "data parallel", "sharding", "stage 2"),
    TwoOptimizers: ("sharding", "by hand", "data parallel", DIVIDED),
    Schedule: ("data parallel", "by hand", "sharding", DIVIDED, "stage 2"),
    Averages: ("by hand", *DEGREES, "stage 2"),
    Evaluated: ("stage 2", "by hand", *DEGREES),
    Frozen: ("sharding", "by hand", DIVIDED),
    FrozenExperts: ("stage 2", "data parallel"),
    Unfrozen: ("sharding", "by hand"),
    UnfrozenExperts: ("stage 2", "data parallel"),
    Moved: ("data parallel",),
    MovedAndRecomputed: ("by hand",),
}
PROGRAMS = {each.__name__: each for each in CASES}
IN_CI, SLOW = (
    [(each.__name__, kind) for each, kinds in CASES.items() for kind in kinds[part]]
    for part in (slice(1), slice(1, None))
)


@contextlib.contextmanager
def on_a_cpu(kind: str) -> Iterator[None]:
    """Let Paddle's classes that know GPUs alone take memory of the host."""
    if kind == "stage 2":
        with stage_2_on_a_cpu():
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if kind == DIVIDED:
            patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
            patch.setattr(paddle.distributed, "reduce_scatter", reduced_and_scattered)
        yield


def trained(name: str, kind: str) -> tuple[dict[str, NDArray], list[float], dict[str, NDArray]]:
    """The whole state before, the losses, and the results."""
    program = PROGRAMS[name](kind)
    with on_a_cpu(kind):
        program.start()
        start = program.whole(program.net)
        return start, program.train(), program.results()


def assert_like_one_process(ranks: Any, name: str, kind: str) -> None:
    got = ranks(2, trained, name=name, kind=kind)
    start, _, end = got[0]
    alone = PROGRAMS[name]("alone")
    alone.net.set_state_dict({key: paddle.to_tensor(value) for key, value in start.items()})
    alone.start()
    losses = alone.train()
    np.testing.assert_allclose(np.sum([each for _, each, _ in got], 0), losses, rtol=1e-5)
    expected = alone.results()
    for _, _, found in got:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], end[key], err_msg=key)
            np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5, err_msg=key)
    assert any(np.abs(expected[key] - start[key]).max() > 0.01 for key in start if "experts" in key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind"), IN_CI)
def test_programs_train_as_in_one_process(ranks, name, kind):
    assert_like_one_process(ranks, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), SLOW)
def test_programs_train_in_more_ways_as_in_one_process(ranks, name, kind):
    assert_like_one_process(ranks, name, kind)


def refused(name: str, kind: str) -> str:
    """The error of a program."""
    return caught(lambda: trained(name, kind))


@pytest.mark.parametrize(
    ("name", "kind", "function", "expected"),
    [
        ("Unfrozen", "data parallel", "distributed_optimizer", "True as at the start, since paddle.DataParallel adds"),
        ("Unfrozen", "stage 2", "group_sharded_parallel", "True as at the start, since the buckets of dense gradients"),
        ("Frozen", "stage 2", "group_sharded_parallel", "False as at the start, since the buckets of dense gradients"),
    ],
    ids=["unfrozen, data parallel", "unfrozen, stage 2", "frozen, stage 2"],
)
def test_dense_parameters_whose_gradients_would_not_be_added_up_are_refused(ranks, name, kind, function, expected):
    for text in ranks(2, refused, name=name, kind=kind):
        assert text.startswith(f"ValueError: {function}: stop_gradient of '")
        assert f" must be {expected}" in text
