# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of several ranks whose float8 matrices are quantised once after each change."""

from __future__ import annotations

import copy
import functools

import paddle
import pytest
from paddle.distributed.fleet.utils import mix_precision_utils, tensor_fusion_helper

from paddle_moe_ops.backends import layers
from paddle_moe_ops.expert_parallel import GradScaler, average_gradients, distributed_optimizer
from paddle_moe_ops.nn import MoELayer, keep_float8_matrices
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.scenarios.test_kept_matrices import enabled_scaler

from .fleet_grids import for_this_device
from .fleets import start_fleet
from .processes import run
from .test_fleet import reduced_and_scattered


def train_with_and_without_kept_matrices() -> None:
    """A rank without tokens in one micro-batch, another optimizer for the router, and a step that all ranks skip."""
    paddle.seed(5)
    group = paddle.distributed.get_group(0)
    options = {"combine": "reduced", "compute": "fp8_1x128", "num_shared_experts": 0}
    layer = MoELayer(160, 128, num_experts=4, topk=2, group=group, **options)
    states, made = copy.deepcopy(layer.state_dict()), []
    parts = [paddle.randn([size, 160]) for size in (9, 0 if paddle.distributed.get_rank() else 5, 3)]
    for keeps in (True, False):
        layer.set_state_dict(states)
        optimizers = [
            paddle.optimizer.AdamW(1e-2, parameters=layer.experts.parameters()),
            paddle.optimizer.SGD(1e-2, parameters=layer.router.parameters()),
        ]
        if keeps:
            assert keep_float8_matrices(layer) == 1
        else:
            layer.experts.float8_matrices = None
        with pytest.MonkeyPatch.context() as patch:
            scaler = enabled_scaler(patch, functools.partial(GradScaler, group=group))
            for step in range(3):
                for x in parts:
                    scaler.scale(layer(x).square().sum()).backward()
                average_gradients(layer.parameters(), group)
                if step == 1 and paddle.distributed.get_rank() == 1:
                    layer.experts.down.grad.fill_(float("inf"))
                before = layer.experts.down.numpy()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.clear_grad()
                scaler.update()
                assert (layer.experts.down.numpy() == before).all() == (step == 1)
        made.append({name: each.clone() for name, each in layer.state_dict().items()})
    for name, each in made[0].items():
        assert_bits_equal(each, made[1][name], what=name)


def write_parameters_by_collectives() -> None:
    """Values that another rank sends to a layer with kept codes, or to a buffer that contains its parameter."""
    group, this = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    paddle.seed(3 + this)
    layer, twin = (MoELayer(160, 128, 4, 2, compute="fp8_1x128", num_shared_experts=0) for _ in range(2))
    keep_float8_matrices(layer)
    down, x = layer.experts.down, paddle.randn([9, 160])
    buffer = paddle.stack([down.detach(), down.detach()])
    part = buffer._slice(1, 2)
    part.get_tensor()._set_dims(down.shape)
    part._share_buffer_to(down)
    halves = [paddle.empty_like(down[:2]) for _ in range(2)]
    scattered = [each + 0.1 for each in (down.detach(), down.detach())]
    writes = {
        "broadcast": lambda: paddle.distributed.broadcast(down, src=1, group=group),
        "all_reduce": lambda: paddle.distributed.all_reduce(down, group=group),
        "all_reduce of a buffer": lambda: paddle.distributed.all_reduce(buffer, group=group),
        "a task": lambda: paddle.distributed.all_reduce(down, group=group, sync_op=False).wait(),
        "scatter": lambda: paddle.distributed.scatter(down, scattered if this == 0 else None, src=0, group=group),
        "a stream": lambda: paddle.distributed.stream.all_reduce(down, group=group),
    }
    with paddle.no_grad():
        for name, write in writes.items():
            before = layer(x)
            kept = layer.experts.float8_matrices._made
            paddle.distributed.all_gather(halves, paddle.zeros_like(halves[0]), group=group)
            layer(x)
            assert layer.experts.float8_matrices._made is kept, name  # others' collectives are no changes
            write()
            twin.set_state_dict(layer.state_dict())
            made = layer(x)
            assert layer.experts.float8_matrices._made is not kept, name
            assert_bits_equal(made, twin(x), what=name)
            assert name == "broadcast" or not paddle.equal_all(made, before)


@pytest.mark.cpu_only
def test_parameters_that_collectives_write_are_quantised_again():
    run(write_parameters_by_collectives, 2)


def train_by_sharding(splits: bool) -> int:
    """Steps whose parameters other ranks update and send. The number of times that this rank quantised matrices."""
    start_fleet({"split_param": True} if splits else {}, sharding_degree=2)
    counts, quantize, made = [], layers.LayerKernels.quantize_experts, []
    with pytest.MonkeyPatch.context() as patch, for_this_device():
        patch.setattr(layers.LayerKernels, "quantize_experts", lambda *given: counts.append(1) or quantize(*given))
        if splits:  # Fleet's second optimizer knows GPUs alone, and gloo lacks its collective
            patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
            patch.setattr(paddle.distributed, "reduce_scatter", reduced_and_scattered)
        for keeps in (True, False):
            paddle.seed(5)
            layer = MoELayer(160, 128, 4, 2, compute="fp8_1x128", num_shared_experts=0)
            optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
            if splits:
                mix_precision_utils.MixPrecisionLayer(layer, dtype="bfloat16")
                optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
            optimizer = distributed_optimizer(optimizer)
            if not keeps:
                layer.experts.float8_matrices = None
            paddle.seed(11 + paddle.distributed.get_rank())
            before = len(counts)
            for _ in range(3):
                for _ in range(2):
                    layer(paddle.randn([7, 160])).square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()
            made.append(({name: each.clone() for name, each in layer.state_dict().items()}, len(counts) - before))
    for name, each in made[0][0].items():
        assert_bits_equal(each, made[1][0][name], what=name)
    return made[0][1]


@pytest.mark.cpu_only
@pytest.mark.parametrize("splits", [False, True], ids=["whole parameters", "parts of a buffer"])
def test_sharded_optimizers_train_alike_with_and_without_kept_matrices(splits):
    assert run(train_by_sharding, 2, splits=splits) == [3, 3]


@pytest.mark.cpu_only
def test_ranks_train_alike_with_and_without_kept_matrices():
    run(train_with_and_without_kept_matrices, 2)
