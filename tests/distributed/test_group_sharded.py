# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sharding of stages 2 and 3 with experts on several ranks trains as one process does, and continues from checkpoints.

Paddle's class of stage 2 knows GPUs alone. On a CPU its buffers stay where they are.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage2,
    group_sharded_storage,
)

from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    GradScaler,
    group_sharded_parallel,
    is_expert_parameter,
    load_checkpoint,
    save_checkpoint,
)
from paddle_moe_ops.expert_parallel.fully_sharded import FullyShardedModel

from .fleet_grids import unscaled
from .fleet_models import ROWS, Whole, mean_square, parts
from .fleets import code_of_guide, scale_on_a_cpu
from .problems import on_this_device
from .processes import run
from .restarts import assert_equal, contents
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import HIDDEN

pytestmark = pytest.mark.cpu_only

LEVELS = ("os_g", "p_g_os")
SEGMENT = 40  # weights of dense layers and of shared experts have parts in stage 3, routers and biases none
FIRST, THEN, TURNS, CLIP = range(2), range(2, 4), 2, 0.1
WITHOUT_TOKENS = (1, 1)  # step and rank
SCALE = 1024.0
GROUPS_OF_FOUR = {"experts": [[0, 1], [2, 3]], "group": [[0, 2], [1, 3]], "dp_group": [[0, 1], [2, 3]]}
BAD_EXPERT, BAD_DENSE = 1, 3  # steps in which one rank alone has an infinite gradient, of experts or of a dense layer


@contextlib.contextmanager
def stage_2_on_a_cpu() -> Iterator[None]:
    """Let Paddle's class and scalers of losses take memory of the host for that of a GPU."""
    devices = types.SimpleNamespace(
        is_compiled_with_cuda=lambda: True, get_all_custom_device_type=core.get_all_custom_device_type
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_sharded_optimizer_stage2, "core", devices)
        patch.setattr(group_sharded_storage, "cvt_to_device", lambda buffer, *_: buffer)
        for module in (group_sharded_optimizer_stage2, group_sharded_stage2, group_sharded_storage):
            patch.setattr(module, "device_guard", lambda *_: contextlib.nullcontext())
        scale_on_a_cpu(patch)
        patch.setattr(paddle, "get_device", lambda: "gpu:0")
        patch.setattr(paddle.Tensor, "cpu", lambda tensor: tensor.clone())  # whose memory is freed
        yield


def backend_of(level: str) -> str | None:
    """The processes that run Paddle's class of a level: that of stage 3 takes the device of the tests as it is."""
    return "stub" if level == "p_g_os" else None


def device_of(level: str) -> Any:
    return on_this_device() if level == "p_g_os" else stage_2_on_a_cpu()


def optimizer_of(net: nn.Layer, clip: Any = nn.ClipGradByGlobalNorm) -> Any:
    clip = None if clip is None else clip(CLIP)
    return paddle.optimizer.AdamW(0.02, parameters=net.parameters(), grad_clip=clip, epsilon=1e-2)


def data_of(step: int, ranks: int, rank: int, turn: int) -> Any:
    """Inputs and targets of a micro-batch, of which the last one of a step is smaller."""
    rows = np.random.default_rng(step).standard_normal([2, ranks, TURNS, ROWS, HIDDEN]).astype(np.float32)
    count = 0 if (step, rank) == WITHOUT_TOKENS else ROWS - 2 * turn
    x, y = (paddle.to_tensor(each[:count]) for each in rows[:, rank, turn])
    x.stop_gradient = False  # a rank without tokens has gradients of dense layers, too
    return x, y


def alone(
    steps: range,
    ranks: int,
    load: str = "",
    save: str = "",
    skipped: Any = (),
    clip: Any = nn.ClipGradByGlobalNorm,
) -> list[float]:
    """The losses in one process that has the batches of all ranks; it applies no gradients of ``skipped`` steps."""
    paddle.seed(3)
    net = Whole(parts(None))
    optimizer, losses = optimizer_of(net, clip), []
    if load:
        load_checkpoint(load, net, optimizer)
    for step in steps:
        losses.append(0.0)
        for rank in range(ranks):
            for turn in range(TURNS):
                x, y = data_of(step, ranks, rank, turn)
                loss = mean_square(net(x), y) / (ranks * TURNS)
                loss.backward()
                losses[-1] += float(loss)
        if step not in skipped:
            optimizer.step()
        optimizer.clear_grad()
    save_checkpoint(save, net, optimizer)
    return losses


def new_groups(pairs: list[list[int]]) -> Any:
    """The one of these groups that has this rank; all ranks if there are none."""
    groups = []
    for ranks in pairs:
        groups.append(dist.new_group(ranks))
        dist.barrier()
    return next((each for each in groups if dist.get_rank() in each.ranks), dist.get_group(0))


def sharded(
    steps: range,
    load: str,
    save: str,
    copy: str = "",
    clip: Any = nn.ClipGradByGlobalNorm,
    experts: Any = (),
    group: Any = (),
    dp_group: Any = (),
    level: str = "os_g",
) -> tuple[list[float], int]:
    """The losses of all ranks, and the number of dense parameters whose states this rank has.

    Args:
        steps: of the run.
        load: the checkpoint to begin with.
        save: the checkpoint at the end.
        copy: where the first one is saved again, or "".
        clip: the class that clips gradients, or None.
        experts: the groups that share experts; one of all ranks if empty.
        group: the groups that share states, likewise.
        dp_group: the groups with copies of these, or none.
        level: of sharding.
    """
    ranks, rank, losses = dist.get_world_size(), dist.get_rank(), []
    paddle.seed(5 + rank)
    net = Whole(parts(new_groups(experts)))
    with device_of(level):
        copies = new_groups(dp_group) if dp_group else None
        options = {"group": new_groups(group), "dp_group": copies, "segment_size": SEGMENT}
        model, optimizer, _ = group_sharded_parallel(net, optimizer_of(net, clip), level, **options)
        load_checkpoint(load, model, optimizer)
        if copy:
            save_checkpoint(copy, model, optimizer)
        for step in steps:
            losses.append(0.0)
            for turn in range(TURNS):
                x, y = data_of(step, ranks, rank, turn)
                loss = mean_square(model(x), y) / TURNS
                loss.backward()
                losses[-1] += float(loss)
            optimizer.step()
            optimizer.clear_grad()
        save_checkpoint(save, model, optimizer)
        own = [key for key in optimizer.state_dict() if "moment1" in key and "experts" not in key]
    return losses, len(own)


def check(tmp_path: Any, ranks: int, clips: bool = True, level: str = "os_g", **groups: Any) -> None:
    """Compare two parts of a run, of which each continues a checkpoint, with one process.

    Clipping hides a wrong factor of all gradients, so there are runs without it.
    """
    clip, other = (nn.ClipGradByGlobalNorm, ClipGradByGlobalNorm) if clips else (None, None)
    tolerances = {"rtol": 1e-6, "atol": 3e-7} if clips else {"rtol": 2e-5, "atol": 5e-6}  # moments are larger
    paths = {name: str(tmp_path / name) for name in ("first", "half", "whole", "saved", "copied", "last", "end")}
    alone(range(0), ranks, save=paths["first"])
    expected = alone(range(THEN.stop), ranks, load=paths["first"], save=paths["whole"], clip=clip)
    where = {"num_processes": ranks, "backend": backend_of(level), "level": level, **groups}
    got = run(sharded, steps=FIRST, load=paths["first"], save=paths["saved"], clip=clip, **where)
    again = {"steps": THEN, "load": paths["saved"], "copy": paths["copied"], "save": paths["last"]}
    again = run(sharded, clip=other, **again, **where)
    losses = np.mean([each for each, _ in got], 0).tolist() + np.mean([each for each, _ in again], 0).tolist()
    print("losses", np.abs(np.divide(losses, expected) - 1).max())
    np.testing.assert_allclose(losses, expected, rtol=3e-6 if level == "p_g_os" else 1e-6)  # of another backend
    assert_equal(contents(paths["copied"]), contents(paths["saved"]))
    wanted = contents(paths["whole"])
    for path in ("last", "end"):
        if path == "end":  # the first part continues in one process, too
            alone(THEN, ranks, load=paths["saved"], save=paths["end"], clip=clip)
        found = contents(paths[path])
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            print(path, name, np.abs(found[name] - value).max())
            np.testing.assert_allclose(found[name], value, err_msg=name, **tolerances)
    start = contents(paths["first"])
    assert all(np.abs(wanted[name] - start[name]).max() > 1e-3 for name in start if "experts" in name)


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_train_as_one_process(level, tmp_path):
    check(tmp_path, 2, level=level)


@pytest.mark.slow
@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_of_experts_and_of_states(has_copies, level, tmp_path):
    check(
        tmp_path,
        4,
        clips=False,
        level=level,
        **(GROUPS_OF_FOUR if has_copies else {"experts": GROUPS_OF_FOUR["experts"]}),
    )


def overflow(optimizer: Any, step: int) -> None:
    """Set a gradient of one rank to infinity: of the last rank's experts, or of a dense layer that a rank updates."""
    own = [each for each in optimizer._parameter_list if each.grad is not None and each.grad._is_initialized()]
    experts = [each for each in own if is_expert_parameter(each)]
    if step == BAD_EXPERT and dist.get_rank() == dist.get_world_size() - 1:
        experts[0].grad[0, 0, 0] = float("inf")
    if step != BAD_DENSE or dist.get_rank() != 0:
        return
    if hasattr(optimizer, "update_slice"):  # of stage 3
        model = optimizer.update_slice.__self__
        next(iter(model._sliced.values())).bw_storage.fill_(float("inf"))
        return
    ranks = optimizer.param2rank
    next(each for each in own if ranks.get(each.name) == optimizer._rank).grad.fill_(float("inf"))


def scaled(
    steps: range,
    load: str,
    save: str,
    level: str,
    state: Any = None,
    experts: Any = (),
    group: Any = (),
    dp_group: Any = (),
) -> tuple[list[float], list[float], Any]:
    """The losses, the scales after each step, and the state of the scaler; see `sharded` for the arguments.

    Args:
        steps: of the run.
        load: the checkpoint to begin with.
        save: the checkpoint at the end.
        level: of sharding.
        state: of the scaler, or None.
        experts: see `sharded`.
        group: see `sharded`.
        dp_group: see `sharded`.
    """
    ranks, rank, losses, scales = dist.get_world_size(), dist.get_rank(), [], []
    net = Whole(parts(new_groups(experts)))
    with paddle.amp.auto_cast(dtype="float16"):
        pass  # after float32 Paddle turns loss scaling off
    with device_of(level), pytest.MonkeyPatch.context() as patch:
        if level == "p_g_os":
            patch.setattr(paddle._legacy_C_ops, "check_finite_and_unscale", unscaled)
            complete = mock.Mock(side_effect=FullyShardedModel._update_params_slice)
            patch.setattr(FullyShardedModel, "_update_params_slice", lambda model: complete(model))
        copies = new_groups(dp_group) if dp_group else None
        scaler = GradScaler(init_loss_scaling=SCALE, incr_every_n_steps=2)
        options = {"group": new_groups(group), "dp_group": copies, "segment_size": SEGMENT}
        model, optimizer, scaler = group_sharded_parallel(net, optimizer_of(net), level, scaler, **options)
        load_checkpoint(load, model, optimizer)
        if state is not None:
            scaler.load_state_dict(state)
        for step in steps:
            losses.append(0.0)
            for turn in range(TURNS):
                x, y = data_of(step, ranks, rank, turn)
                loss = mean_square(model(x), y) / TURNS
                scaler.scale(loss).backward()
                losses[-1] += float(loss)
            overflow(optimizer, step)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            scales.append(scaler.state_dict()["scale"].item())
        if level == "p_g_os":
            assert complete.call_count == len(steps)  # gradients are complete once in a step
        save_checkpoint(save, model, optimizer)
    return losses, scales, scaler.state_dict()


def check_scaled(tmp_path: Any, ranks: int, level: str, **groups: Any) -> None:
    """Compare steps with a scaler of losses, some of them skipped, with one process that has none."""
    paths = {name: str(tmp_path / name) for name in ("first", "half", "whole", "end")}
    alone(range(0), ranks, save=paths["first"])
    bad = BAD_EXPERT, BAD_DENSE
    expected = alone(range(5), ranks, load=paths["first"], save=paths["whole"], skipped=bad)
    where = {"num_processes": ranks, "backend": backend_of(level), "level": level, **groups}
    got = run(scaled, steps=range(2), load=paths["first"], save=paths["half"], **where)
    (_, _, state), *_ = got
    again = run(scaled, steps=range(2, 5), load=paths["half"], save=paths["end"], state=state, **where)
    losses = np.mean([each for each, _, _ in got], 0).tolist() + np.mean([each for each, _, _ in again], 0).tolist()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for (_, first, _), (_, then, _) in zip(got, again, strict=True):
        assert first + then == [SCALE, SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4]
    wanted, found = contents(paths["whole"]), contents(paths["end"])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("level", LEVELS)
def test_an_infinity_on_one_rank_skips_the_step_on_all(level, tmp_path):
    check_scaled(tmp_path, 2, level)


@pytest.mark.slow
@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_skip_steps_together(has_copies, level, tmp_path):
    check_scaled(tmp_path, 4, level, **(GROUPS_OF_FOUR if has_copies else {"experts": GROUPS_OF_FOUR["experts"]}))


class Unused(Whole):
    """A model with a dense layer that no pass uses."""

    def __init__(self, group: Any) -> None:
        super().__init__(parts(group))
        self.unused = nn.Linear(HIDDEN, HIDDEN)


def with_an_unused_layer(buffer_max_size: int) -> tuple[list[str], list[bool]]:
    """Errors of the next forward pass and of a step, and whether all ranks have the same dense parameters after it."""
    net = Unused(dist.get_group(0))
    with stage_2_on_a_cpu():
        model, optimizer, _ = group_sharded_parallel(net, optimizer_of(net), "os_g", buffer_max_size=buffer_max_size)
        x, y = data_of(0, 2, dist.get_rank(), 0)
        mean_square(model(x), y).backward()
        before = {name: each.numpy() for name, each in net.named_parameters()}
        texts = [caught(lambda: model(x)) if buffer_max_size else "", caught(optimizer.step)]
    same = []
    for name, each in net.named_parameters():
        of_ranks: list[Any] = []
        dist.all_gather_object(of_ranks, each.numpy())
        is_moved = not np.array_equal(before[name], each.numpy())
        same.append(is_expert_parameter(each) or (np.array_equal(*of_ranks) and is_moved != ("unused" in name)))
    return texts, same


def test_a_layer_that_no_pass_uses_is_refused_in_buckets_and_stays_without():
    for texts, _ in run(with_an_unused_layer, 2, buffer_max_size=2**23):
        expected = "computed in each backward pass; freeze the parameter at the start, or pass buffer_max_size=0, "
        expected += "but got none"
        assert texts == [f"ValueError: group_sharded_parallel: the gradient of 'unused.weight' must be {expected}"] * 2
    for texts, same in run(with_an_unused_layer, 2, buffer_max_size=0):
        assert texts == ["", "nothing was raised"]
        assert all(same)


def refused() -> list[str]:
    net, pair = Whole(parts(dist.get_group(0))), dist.get_group(0)
    optimizer, name = optimizer_of(net), group_sharded_parallel
    alone = new_groups([[0], [1]])
    return [
        caught(lambda: name(optimizer, optimizer, "os")),
        caught(lambda: name(net, net, "os")),
        caught(lambda: name(net, optimizer, "p_g")),
        caught(lambda: name(net, optimizer, "os", paddle.amp.GradScaler())),
        caught(lambda: name(net, optimizer, "os", GradScaler(group=alone))),
        caught(lambda: name(net, optimizer, "os", offload=True)),
        caught(lambda: name(net, optimizer, "os", dp_group=pair)),
    ]


def of_the_guide() -> list[str]:
    with stage_2_on_a_cpu():
        return code_of_guide("Stages 2 and 3")


def test_the_guides_program_runs():
    for names in run(of_the_guide, 2):
        assert "optimizer" in names


def test_arguments_are_named():
    name = "group_sharded_parallel"
    for rank, texts in enumerate(run(refused, 2)):
        assert texts == [
            f"TypeError: {name}: model must be a Layer, but got AdamW",
            f"TypeError: {name}: optimizer must be an optimizer of paddle.optimizer with a list of parameters, but got "
            "Whole",
            f"ValueError: {name}: level must be one of ('os', 'os_g', 'p_g_os'), but got 'p_g'",
            f"TypeError: {name}: scaler must be a paddle_moe_ops.expert_parallel.GradScaler, which skips a step on all "
            "ranks, or None, but got paddle.amp.grad_scaler.GradScaler",
            f"ValueError: {name}: the group of scaler must be all ranks [0, 1], but got ranks [{rank}]",
            f"ValueError: {name}: offload must be False, since Paddle's offload updates dense parameters and no "
            "experts, but got True",
            f"ValueError: {name}: group and dp_group must be all ranks together, at least two, but got groups of 4 of "
            "2 ranks",
        ]
