# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""States of models that sharding of stage 3 divides, and the calls that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_moe_ops.expert_parallel import (
    gather_optimizer_state_dict,
    gather_state_dict,
    group_sharded_parallel,
    load_checkpoint,
    move_experts,
    save_checkpoint,
)

from .fleet_grids import MasterSGD
from .fleet_models import Whole, mean_square, parts
from .problems import on_this_device
from .processes import kept, run
from .restarts import assert_equal, contents
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import HIDDEN
from .test_group_sharded import SEGMENT, data_of, optimizer_of

NAME = "group_sharded_parallel"


def sharded(optimizer: Any = optimizer_of, kind: str = "plain") -> tuple[Any, Any, nn.Layer]:
    """The model and the optimizer of stage 3, and the model inside."""
    paddle.seed(3)
    net = Whole(parts(dist.get_group(0), kind))
    model, made, _ = group_sharded_parallel(net, optimizer(net), "p_g_os", segment_size=SEGMENT)
    return model, made, net


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    x, y = data_of(number, 2, dist.get_rank(), 0)
    mean_square(model(x), y).backward()
    optimizer.step()
    optimizer.clear_grad()


def masters(net: nn.Layer) -> Any:
    return MasterSGD(0.3, parameters=net.parameters(), multi_precision=True)


def main_gradients(net: nn.Layer) -> Any:
    mix_precision_utils.MixPrecisionLayer(net, dtype="bfloat16")
    return mix_precision_utils.MixPrecisionOptimizer(optimizer_of(net))


def saved(first: str, second: str, optimizer_of: Any = masters, kind: str = "narrow") -> None:
    """Save a model after a step; another one loads it and saves it again."""
    with on_this_device():
        model, optimizer, _ = sharded(optimizer_of, kind)
        step(model, optimizer)
        save_checkpoint(first, model, optimizer)
        model, optimizer, _ = sharded(optimizer_of, kind)
        load_checkpoint(first, model, optimizer)
        save_checkpoint(second, model, optimizer)


def test_master_weights_are_saved_and_loaded(tmp_path, custom_backend):
    paths = [str(tmp_path / name) for name in ("first", "second", "alone")]
    run(saved, 2, custom_backend, first=paths[0], second=paths[1])
    found = contents(paths[0])
    assert "1.moe.shared.gate_up.w_0" in found
    assert "2.moe.router.weight.w_0" in found
    assert_equal(contents(paths[1]), found)
    net = Whole(parts(None, "narrow"))
    optimizer = masters(net)
    load_checkpoint(paths[0], net, optimizer)
    save_checkpoint(paths[2], net, optimizer)
    assert_equal(contents(paths[2]), found)


def test_an_optimizer_of_main_gradients_loads_before_its_first_step(tmp_path, custom_backend):
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    run(saved, 2, custom_backend, first=first, second=second, optimizer_of=main_gradients, kind="plain")
    assert "0.0.weight.moment1_0" in contents(first)
    assert_equal(contents(second), contents(first))


def loaded_alone(path: str) -> list[bool]:
    """True for each tensor of which a step begins with the values of a load without the optimizer."""
    with on_this_device():
        model, optimizer, _ = sharded(masters, "narrow")
        model.get_all_parameters()
        start = {name: each.astype("float32").numpy() for name, each in gather_state_dict(model).items()}
        load_checkpoint(path, model)
        optimizer.set_lr(0.0)
        step(model, optimizer)
        model.get_all_parameters()
        end = {name: each.astype("float32").numpy() for name, each in gather_state_dict(model).items()}
    return [np.array_equal(start[name] * 2, end[name]) for name in start if "correction_bias" not in name]


def test_master_weights_begin_with_the_model_that_is_loaded(tmp_path, custom_backend):
    path = str(tmp_path / "twice")
    paddle.seed(3)
    run(doubled, 2, custom_backend, path=path)
    for same in run(loaded_alone, 2, custom_backend, path=path):
        assert all(same)


@paddle.no_grad()
def doubled(path: str) -> None:
    """Save the model of `sharded` with twice its values."""
    paddle.seed(3)
    net = Whole(parts(dist.get_group(0), "narrow"))
    for each in net.parameters():
        each.scale_(2.0)
    save_checkpoint(path, net)


def states() -> tuple[list[str], list[list[str]]]:
    """Errors of states, and the tensors that differ after values were gathered, between two runs."""
    with on_this_device():
        model, optimizer, net = sharded()
        step(model, optimizer)
        texts = [
            caught(model.state_dict),
            caught(lambda: gather_state_dict(model)),
            caught(lambda: gather_state_dict(net)),
            caught(lambda: model.set_state_dict({})),
            caught(lambda: gather_optimizer_state_dict(optimizer, model)),
            caught(lambda: move_experts(model, [0, 1, 0, 1], optimizer)),
            caught(lambda: optimizer.minimize(paddle.ones([1]))),
        ]
        model.get_all_parameters()
        gathered = [sorted(model.state_dict()) == sorted(net.state_dict()), len(gather_state_dict(net)) > 0]
        step(model, optimizer, 1)
        model.get_all_parameters(convert2cpu=True)
        step(model, optimizer, 2)
        value = paddle.ones([HIDDEN, HIDDEN])
        with paddle.no_grad():
            paddle.assign(value, net.calls[-1].weight)
        texts.append(caught(lambda: model(value)))
    return texts, gathered


def test_states_that_are_not_whole_are_refused(custom_backend):
    instead = "gathered by get_all_parameters() of the model on all ranks, or saved by save_checkpoint, but got divided"
    gathers = f"ValueError: gather_state_dict: layer.state_dict()['0.0.weight'] must be {instead} between ranks"
    for texts, gathered in run(states, 2, custom_backend):
        assert all(gathered)
        assert texts == [
            f"ValueError: {NAME}: parameter '0.0.weight' must be gathered by get_all_parameters() on all ranks, or "
            "saved by save_checkpoint, but got divided between ranks",
            *[gathers] * 2,
            f"ValueError: {NAME}: set_state_dict must be called before {NAME}; load_checkpoint loads after it, but "
            "got a call after it",
            "ValueError: gather_optimizer_state_dict: optimizer must be one that keeps whole states on every rank; "
            "save those that Fleet's sharding spreads over ranks with save_checkpoint, but got AdamW",
            "ValueError: move_experts: optimizer must be one that keeps whole states on every rank, but got AdamW",
            f"RuntimeError: {NAME}: minimize() is not supported with level='p_g_os'; call step()",
            f"ValueError: {NAME}: parameter '3.weight' must be set before {NAME}, or by load_checkpoint, but got set "
            "to a whole value",
        ]


def after_a_skipped_step() -> list[bool]:
    """True for each tensor that a step changes after a scaler has skipped one."""
    with on_this_device():
        model, optimizer, _ = sharded()
        optimizer.update_slice()  # as a `GradScaler` does before it decides
        optimizer.update_scaler = True
        optimizer.clear_grad()
        model.get_all_parameters()
        start = gather_state_dict(model, to_cpu=True)
        step(model, optimizer)
        model.get_all_parameters()
        end = gather_state_dict(model, to_cpu=True)
    return [not np.array_equal(start[name], end[name]) for name in start if "correction_bias" not in name]


def test_a_step_without_a_scaler_follows_one_that_was_skipped(custom_backend):
    for changed in run(after_a_skipped_step, 2, custom_backend):
        assert all(changed)


def freezing() -> list[str]:
    """Errors of the pass and of the step after dense parameters changed, and none for experts."""
    texts = []
    with on_this_device():
        for index in range(2):
            model, optimizer, net = sharded()
            dense = net.calls[1].dense
            net.calls[2].moe.experts.down.stop_gradient = True
            step(model, optimizer)
            changed = (dense.weight, dense.bias)[index]
            changed.stop_gradient = True
            texts += [caught(lambda model=model: model(paddle.ones([1, HIDDEN]))), caught(optimizer.step)]
    return texts


def test_freezing_dense_parameters_later_is_refused(custom_backend):
    expected = [
        f"ValueError: {NAME}: stop_gradient of '1.dense.{name}' must be False as at the start, since Paddle has "
        "divided the dense parameters, but got True"
        for name in ("weight", "bias")
        for _ in range(2)
    ]
    for texts in run(freezing, 2, custom_backend):
        assert texts == expected


def refused() -> list[str]:
    """Errors of the constructor."""
    net = Whole(parts(dist.get_group(0)))
    everything, some = net.parameters(), [each for each in net.parameters() if each is not net.calls[-1].bias]

    def told(optimizer: Any = None, **options: Any) -> str:
        return caught(lambda: group_sharded_parallel(net, optimizer or optimizer_of(net), "p_g_os", **options))

    texts = [
        told(segment_size=-1),
        told(segment_size="1"),
        told(exclude_layer="Linear"),
        told(exclude_layer=[nn.Linear]),
        told(paddle.optimizer.Lamb(parameters=everything)),
        told(paddle.optimizer.AdamW(parameters=everything, grad_clip=nn.ClipGradByNorm(1.0))),
        told(paddle.optimizer.AdamW(parameters=some)),
        told(paddle.optimizer.AdamW(parameters=[*everything, nn.Linear(1, 1, bias_attr=False).weight])),
    ]
    with on_this_device():
        _, optimizer, net = sharded()
    texts.append(told(optimizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(GroupShardedStage3, "init_slice_param")
        return [*texts, told()]


def test_arguments_are_named(custom_backend):
    of_layers = "a list of names of classes or ids of layers"
    for texts in run(refused, 2, custom_backend):
        assert texts[:7] == [
            f"ValueError: {NAME}: segment_size must be from 0 to 2147483647, but got -1",
            f"TypeError: {NAME}: segment_size must be an int, but got str",
            f"TypeError: {NAME}: exclude_layer must be {of_layers}, but got str",
            f"TypeError: {NAME}: exclude_layer must be {of_layers}, but got one with a type",
            f"ValueError: {NAME}: optimizer must be one that updates each element alone, with level='p_g_os', but got "
            "Lamb",
            f"ValueError: {NAME}: grad_clip of the optimizer must be clipping by the global norm or by value, or none, "
            "with level='p_g_os', but got ClipGradByNorm",
            f"ValueError: {NAME}: parameters of the optimizer must be all trained parameters of the model, since "
            "Paddle's stage 3 trains all, but got ones without '3.bias'",
        ]
        assert texts[7].startswith(
            f"ValueError: {NAME}: parameters of the optimizer must be parameters of the model, with level='p_g_os', "
        )
        assert texts[8] == (
            f"ValueError: {NAME}: optimizer must be one that was not sharded before, but got the optimizer of another "
            "model"
        )
        assert texts[9] == (
            f"ValueError: {NAME}: level must be 'os_g' under Paddle 3.2, whose stage 3 has no layers with several "
            "outputs, such as routers, but got 'p_g_os'"
        )


def with_other_names() -> str:
    """The error for a rank that has made layers before, so its parameters have another order of their names."""
    number = int(nn.Linear(1, 1).weight.name.removeprefix("linear_").partition(".")[0])
    for _ in range(98 - number if dist.get_rank() else 0):
        nn.Linear(1, 1)
    with on_this_device():
        return caught(sharded)


def test_gradients_that_ranks_would_add_up_in_another_order_are_refused(custom_backend):
    with kept(custom_backend) as call:  # processes whose numbers of layers differ end here
        for text in call(2, with_other_names):
            expected = f"ValueError: {NAME}: dense parameters in the order of their .name must be the same on all ranks"
            assert text.startswith(expected)
