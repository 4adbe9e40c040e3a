# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sharding of stage 3 with experts on several ranks trains as one process does.

The device of the tests aligns parts to 128 elements, so parameters have parts of different sizes, and some ranks have
padding alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_moe_ops.expert_parallel import ClipGradByGlobalNorm, gather_state_dict, group_sharded_parallel
from paddle_moe_ops.nn import TopKRouter

from .fleet_grids import MasterSGD
from .fleet_models import Whole, mean_square, parts
from .problems import on_this_device
from .processes import run
from .test_expert_parallel_layer import HIDDEN, arrays
from .test_group_sharded import GROUPS_OF_FOUR, TURNS, data_of, new_groups

STEPS, CLIP, SEGMENT = 3, 0.1, 40  # weights of dense layers and shared experts have parts, routers and biases none
RANKS_OF_TOKENS = 4  # data of as many ranks, of which the last ones are left out between two


def wide(state: dict[str, Any]) -> dict[str, NDArray]:
    return arrays({name: each.astype("float32") for name, each in state.items()})


class Program:
    """A program that trains on all tokens in one process, or on those of this rank.

    Args:
        ranks: that share the tokens.
        groups: those of experts, of states and of copies of these, see `new_groups`; None in one process.
    """

    kind, rate = "plain", 0.02
    zeros = True  # whether gradients are zeros after they were cleared
    tolerances, of_losses = (1e-6, 3e-7), 3e-6  # relative and absolute ones of parameters, relative one of losses

    def __init__(self, ranks: int, groups: dict[str, Any] | None) -> None:
        self.ranks, self.groups = ranks, groups
        paddle.seed(7 if groups is None else dist.get_rank())  # ranks start with the values of the first
        self.net = self.made(None if groups is None else new_groups(groups.get("experts", ())))
        self.change()

    def made(self, group: Any) -> nn.Layer:
        return Whole(parts(group, self.kind))

    def options(self) -> dict[str, Any]:
        """The arguments of stage 3."""
        return {"segment_size": SEGMENT}

    def change(self) -> None:
        """Change the model before it is sharded."""

    def optimizer(self) -> Any:
        clip = nn.ClipGradByGlobalNorm(CLIP)
        return paddle.optimizer.AdamW(self.rate, parameters=self.net.parameters(), grad_clip=clip, epsilon=1e-2)

    def between(self) -> None:
        """Run between the backward pass and the step."""

    def batch(self, step: int, rank: int, turn: int) -> Any:
        return data_of(step, RANKS_OF_TOKENS, rank, turn)

    def start(self) -> None:
        self.model, self.trainer = self.net, self.optimizer()
        if self.groups is None:
            return
        groups = {name: new_groups(each) for name, each in self.groups.items() if name != "experts"}
        self.model, self.trainer, _ = group_sharded_parallel(
            self.net, self.trainer, "p_g_os", **groups, **self.options()
        )

    def train(self) -> list[float]:
        """The losses of the steps; their mean over ranks is that of one process."""
        losses, of_rank = [], range(self.ranks) if self.groups is None else (dist.get_rank(),)
        for step in range(STEPS):
            self.trainer.clear_grad(self.zeros)
            losses.append(0.0)
            for rank in of_rank:
                for turn in range(TURNS):
                    x, y = self.batch(step, rank, turn)
                    loss = mean_square(self.model(x), y) / (TURNS * len(of_rank))
                    loss.backward()
                    losses[-1] += float(loss)
            self.between()
            self.trainer.step()
        return losses

    def results(self) -> dict[str, NDArray]:
        if self.groups is None:
            return wide(self.net.state_dict())
        self.model.get_all_parameters(with_freeze_param=True)
        return wide(gather_state_dict(self.model))


class Recomputed(Program):
    """Experts, their router and shared experts run again in the backward pass."""

    kind = "recomputed"


class Tied(Program):
    """Two dense layers with one weight."""

    def change(self) -> None:
        first, last = self.net.calls[0][0], self.net.calls[-1]
        last.weight = first.weight


class Frozen(Program):
    """Frozen parameters: with parts, without, and of experts."""

    def change(self) -> None:
        first, second = self.net.calls[1:3]
        for each in (first.dense.weight, first.moe.experts.down, second.moe.router.weight, second.moe.shared.down):
            each.stop_gradient = True


class Evaluated(Tied):
    """A pass without gradients before each step."""

    def between(self) -> None:
        self.model.eval()
        with paddle.no_grad():
            self.model(self.batch(100, 0 if self.groups is None else dist.get_rank(), 0)[0])
        self.model.train()


class Unused(Program):
    """A layer that no pass uses, and one that the passes of every second step use in part."""

    def change(self) -> None:
        self.net.unused = nn.Linear(HIDDEN, HIDDEN)
        self.net.skipped = Skipped()
        self.net.calls.append(self.net.skipped)

    def between(self) -> None:
        self.net.skipped.step += 1


class UnusedWithoutZeros(Unused):
    """The same, if parameters without a gradient stay as they are."""

    zeros = False


class Skipped(nn.Layer):
    """Dense layers: one that always runs, and a weight with parts and a layer without that run in even steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (self.create_parameter([HIDDEN, HIDDEN]) for _ in range(2))
        self.narrow, self.step = nn.Linear(HIDDEN, 4), 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + 0.1 * x @ self.first
        return x if self.step % 2 else x @ self.second + self.narrow(x).sum(-1, keepdim=True)


class Synchronous(Program):
    """Parts of all dense parameters, which are gathered when a layer runs."""

    def options(self) -> dict[str, Any]:
        return {"segment_size": 0, "sync_comm": True}


class InWhole(Program):
    """Dense parameters without parts."""

    def options(self) -> dict[str, Any]:
        return {}


class Excluded(Program):
    """Dense layers without parts, by the name of their class."""

    def options(self) -> dict[str, Any]:
        return {"segment_size": SEGMENT, "exclude_layer": ["Linear"]}


class Settings(Program):
    """Rates and decay by name, and clipping that leaves out parameters, whose differences are larger then."""

    tolerances = 1e-5, 1e-6

    def change(self) -> None:
        first, second = self.net.calls[1:3]
        first.dense.weight.optimize_attr["learning_rate"] = 3.0
        for each in (first.dense.weight, second.moe.shared.down, second.moe.router.weight, first.moe.experts.down):
            each.need_clip = False

    def optimizer(self) -> Any:
        names = {each.name: name for name, each in self.net.named_parameters()}
        # Paddle refuses other ratios than 1 on a CPU. This one raises for a parameter that it does not know.
        ratio = {} if self.groups is None else {"lr_ratio": lambda each: 1.0 if names[each.name] else 0.0}
        return paddle.optimizer.AdamW(
            *(self.rate,),
            parameters=self.net.parameters(),
            grad_clip=nn.ClipGradByGlobalNorm(CLIP),
            epsilon=1e-2,
            weight_decay=0.5,
            apply_decay_param_fun=lambda name: names[name] in ("0.0.weight", "1.moe.experts.down"),
            **ratio,
        )


class MainGradients(Program):
    """Gradients in ``main_grad``."""

    def start(self) -> None:
        self.mixed = mix_precision_utils.MixPrecisionLayer(self.net, dtype="bfloat16")
        super().start()

    def optimizer(self) -> Any:
        return mix_precision_utils.MixPrecisionOptimizer(super().optimizer())


class MasterWeights(Program):
    """Experts, routers and shared experts in bfloat16, and an optimizer that the operators of a CPU have."""

    kind = "narrow"
    tolerances = 0.0, 2.5e-3  # half a unit in the last place of weights near 1
    of_losses = 2e-2
    rate = 1.0

    def optimizer(self) -> Any:
        clip = ClipGradByGlobalNorm(CLIP)  # on a CPU, Paddle's has no norm of bfloat16
        return MasterSGD(self.rate, parameters=self.net.parameters(), grad_clip=clip, multi_precision=True)


class Gathered(Program):
    """Whole parameters between steps, for a layer that returns its dense output in a dict and in a tuple."""

    def change(self) -> None:
        self.net.calls.append(self.net.add_sublayer("outputs", Outputs()))

    def between(self) -> None:
        if self.groups is not None:
            self.model.get_all_parameters()


class Outputs(nn.Layer):
    """A dense layer with outputs of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.router = DictOf(HIDDEN, HIDDEN), TopKRouter(HIDDEN, num_experts=4, topk=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.dense(x)["out"][0] + self.router(x).scores.sum(-1, keepdim=True)


class DictOf(nn.Linear):
    """A dense layer that returns a tuple in a dict."""

    def forward(self, x: paddle.Tensor) -> dict[str, Any]:
        return {"out": (super().forward(x),)}


PROGRAMS = {
    each.__name__: each
    for each in (
        *(
            Program,
            Recomputed,
            Tied,
            Frozen,
            Evaluated,
            Unused,
            UnusedWithoutZeros,
            Synchronous,
            InWhole,
            Excluded,
            Settings,
        ),
        *(MainGradients, MasterWeights, Gathered),
    )
}


def trained(name: str, groups: dict[str, Any]) -> tuple[dict[str, NDArray], list[float], dict[str, NDArray]]:
    """The whole state before, the losses, and the whole state after."""
    with on_this_device():
        program = PROGRAMS[name](dist.get_world_size(), groups)
        program.start()
        return program.results(), program.train(), program.results()


def check(name: str, ranks: int, backend: str, **groups: Any) -> None:
    got = run(trained, ranks, backend, name=name, groups=groups)
    start, _, end = got[0]
    alone = PROGRAMS[name](ranks, None)
    for key, each in alone.net.state_dict().items():
        each.set_value(paddle.to_tensor(start[key]).astype(each.dtype))
    alone.start()
    losses, expected = alone.train(), alone.results()
    np.testing.assert_allclose(np.mean([each for _, each, _ in got], 0), losses, rtol=alone.of_losses)
    relative, absolute = alone.tolerances
    for _, _, found in got:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], end[key], err_msg=key)
            np.testing.assert_allclose(found[key], value, rtol=relative, atol=absolute, err_msg=key)
    assert any(np.abs(end[key] - start[key]).max() > 1e-3 for key in start if "experts" in key)


IN_CI = (
    "Recomputed",
    "Frozen",
    "Unused",
    "UnusedWithoutZeros",
    "Settings",
    "MasterWeights",
    "Gathered",
)


@pytest.mark.parametrize("name", IN_CI)
def test_programs_train_as_in_one_process(name, custom_backend):
    check(name, 2, custom_backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(IN_CI)))
def test_more_programs_train_as_in_one_process(name, custom_backend):
    check(name, 2, custom_backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Program", "Synchronous", "Unused"])
def test_programs_between_four_with_copies_of_experts_and_of_states(name, custom_backend):
    check(name, 4, custom_backend, **GROUPS_OF_FOUR)
