# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of checkpoints on any grid of ranks: they name the argument or the tensor, and change nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint

from .processes import run
from .test_expert_parallel_errors import caught

pytestmark = pytest.mark.cpu_only

LOAD, SAVE = "ValueError: load_checkpoint:", "ValueError: save_checkpoint:"


class Part(nn.Layer):
    """A layer with columns of a matrix [2, 4]."""

    def __init__(self, first: int, count: int, dtype: str = "float32") -> None:
        super().__init__()
        self.w, self.first = self.create_parameter([2, count], dtype=dtype), first

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        name = f"{structured_name_prefix}w"
        return {name: ShardedWeight(name, self.w, tuple(self.w.shape), (2, 4), (0, self.first))}


def stepped(net: nn.Layer, kind: Any = paddle.optimizer.AdamW, **options: Any) -> Any:
    optimizer = kind(parameters=net.parameters(), **options)
    net(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    return optimizer


def test_arguments_are_named(tmp_path):
    net = nn.Linear(2, 2)
    for call in (save_checkpoint, load_checkpoint):
        name = call.__name__
        assert (
            caught(functools.partial(call, 3, net))
            == f"TypeError: {name}: path must be a path of a folder, but got int"
        )
        text = caught(functools.partial(call, tmp_path / "a", net.weight))
        assert text == f"TypeError: {name}: model must be a Layer, but got EagerParamBase"
    save_checkpoint(tmp_path, net)
    for call, path in ((save_checkpoint, tmp_path / "a"), (load_checkpoint, tmp_path)):
        expected = f"TypeError: {call.__name__}: optimizer must be an optimizer of Paddle or Fleet, but got Linear"
        assert caught(functools.partial(call, path, net, net)) == expected
    expected = "TypeError: save_checkpoint: async_save must be a bool, but got 1 of type int"
    assert caught(lambda: save_checkpoint(tmp_path / "b", net, async_save=1)) == expected
    expected = f"{SAVE} path must be a folder without a checkpoint, but got {str(tmp_path)!r}"
    assert caught(lambda: save_checkpoint(tmp_path, net)) == expected
    net.register_buffer("codes", paddle.zeros([2]).astype("complex64"))
    assert caught(lambda: save_checkpoint(tmp_path / "c", net)).startswith(
        "TypeError: save_checkpoint: 'codes' must be of dtype float64, float32, "
    )
    assert not list(tmp_path.glob("?"))


def test_folders_without_a_whole_checkpoint(tmp_path):
    net, place = nn.Linear(2, 2), repr(str(tmp_path))
    expected = f"{LOAD} path must be a folder with one file *.metadata, {place}, but got none"
    assert caught(lambda: load_checkpoint(tmp_path, net)) == expected
    save_checkpoint(tmp_path, net)
    (tmp_path / "0_0.safetensors").rename(tmp_path / "other")
    expected = f"{LOAD} path must be a complete checkpoint, {place}, but got one without ['0_0.safetensors']"
    assert caught(lambda: load_checkpoint(tmp_path, net)) == expected
    file = tmp_path / "0.metadata"
    expected = f"{LOAD} path must be a folder with one file *.metadata, {str(file)!r}, but got a file"
    assert caught(lambda: load_checkpoint(file, net)) == expected
    (tmp_path / "1.metadata").touch()
    expected = f"{LOAD} path must be a folder with one file *.metadata, {place}, but got ['0.metadata', '1.metadata']"
    assert caught(lambda: load_checkpoint(tmp_path, net)) == expected


def test_tensors_that_do_not_fit_are_named_and_none_changes(tmp_path):
    save_checkpoint(tmp_path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    cases = [
        (
            nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2)),
            "path must be a checkpoint with '2.weight', ",
        ),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), "'1.weight' of the checkpoint must be float32 [3, 4], "),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).to(dtype="float16")), "'1.weight' of the checkpoint must be f"),
    ]
    given = ["one without it", "float32 [3, 2]", "float32 [3, 2]"]
    for (net, expected), got in zip(cases, given, strict=True):
        before = net[0].weight.numpy()
        text = caught(lambda net=net: load_checkpoint(tmp_path, net))
        assert text.startswith(f"{LOAD} {expected}")
        assert text.endswith(f"but got {got}")
        np.testing.assert_array_equal(net[0].weight.numpy(), before)


def test_states_of_another_optimizer(tmp_path):
    net = nn.Linear(2, 2, bias_attr=False)
    save_checkpoint(tmp_path / "adam", net, stepped(net))
    powers = "'beta1_pow_acc_0', 'beta2_pow_acc_0', 'moment1_0', 'moment2_0'"
    expected = f"{LOAD} optimizer must be one with the states of 'weight' that the checkpoint has, "
    momentum = paddle.optimizer.Momentum(parameters=net.parameters())
    text = caught(lambda: load_checkpoint(tmp_path / "adam", net, momentum))
    assert text == f"{expected}[{powers}], but got one with ['velocity_0']"
    plain = paddle.optimizer.SGD(parameters=net.parameters())
    text = caught(lambda: load_checkpoint(tmp_path / "adam", net, plain))
    assert text == f"{expected}[{powers}], but got one with []"
    save_checkpoint(tmp_path / "model", net)
    text = caught(lambda: load_checkpoint(tmp_path / "model", net, stepped(net)))
    assert text == f"{expected}[], but got one with [{powers}]"
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=1)
    schedule.step()
    fresh = paddle.optimizer.AdamW(schedule, parameters=net.parameters())
    load_checkpoint(tmp_path / "model", net, fresh)
    assert fresh.state_dict().keys() == {"LR_Scheduler"}
    assert schedule.last_epoch == 1


def of_ranks(folder: str) -> list[str]:
    """Errors of ranks with other arguments, dtypes and parts."""
    rank, net = dist.get_rank(), nn.Linear(2, 2)
    return [
        caught(lambda: save_checkpoint(f"{folder}/a", net if rank else None)),
        caught(lambda: save_checkpoint(f"{folder}/b", Part(2 * rank, 2, "float64" if rank else "float32"))),
        caught(lambda: save_checkpoint(f"{folder}/c", Part(3 * rank, 1))),
        caught(lambda: load_checkpoint(f"{folder}/{rank}", net)),
        caught(lambda: save_checkpoint(f"{folder}/d", Part(2 * rank, 2))),
        caught(lambda: load_checkpoint(f"{folder}/d", Part(3 - 3 * rank, 1 + 2 * rank))),
    ]


def test_ranks_that_differ(tmp_path):
    save_checkpoint(tmp_path / "0", nn.Linear(2, 2))
    first, second = run(of_ranks, 2, folder=str(tmp_path))
    told = "RuntimeError: {}: ranks [{}] of [0, 1] raised an error in this call, which says more"
    assert first[0] == "TypeError: save_checkpoint: model must be a Layer, but got NoneType"
    assert second[0] == told.format("save_checkpoint", 0)
    expected = "float32 [2, 4] on rank 0, float64 [2, 4] on rank 1"
    assert first[1] == f"{SAVE} 'w' must be of one dtype and global shape on all ranks, but got {expected}"
    assert first[2] == f"{SAVE} 'w' must be on the ranks in full, but got 4 of 8 elements"
    assert second[1:3] == first[1:3]
    assert first[3] == told.format("load_checkpoint", 1)
    assert second[3].startswith(f"{LOAD} path must be a folder with one file *.metadata")
    assert first[4:] == second[4:] == ["nothing was raised"] * 2
    assert not list(tmp_path.glob("[abc]"))
