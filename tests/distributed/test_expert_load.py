# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Loads and losses of the experts over ranks: those of one process with the tokens of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_moe_ops.expert_parallel import average_gradients, gather_state_dict
from paddle_moe_ops.nn import ExpertLoad, MoELayer

from .processes import run
from .test_average_gradients import reductions_told
from .test_expert_parallel_errors import caught

H, E, K = 8, 4, 2
TOKENS = ((9, 5), (0, 7))  # of each micro-batch, by rank


def model_of(group: Any) -> nn.Layer:
    """A layer that the ranks share, and one that each has of its own."""
    paddle.seed(3)
    shared = MoELayer(H, 4, E, K, group=group)
    paddle.seed(4)
    return nn.Sequential(shared, MoELayer(H, 4, E + 1, K, scoring="sigmoid"))


def tokens_of(micro_batch: int, rank: int | None) -> paddle.Tensor:
    parts = [
        np.random.default_rng([micro_batch, other]).standard_normal((count, H)).astype(np.float32)
        for other, count in enumerate(TOKENS[micro_batch])
    ]
    return paddle.to_tensor(np.concatenate(parts) if rank is None else parts[rank])


def trained(model: nn.Layer, group: Any, rank: int | None) -> dict[str, Any]:
    """A step with two micro-batches and losses of the global batch."""
    load, losses = ExpertLoad(model, group), []
    for number in range(len(TOKENS)):
        model(tokens_of(number, rank))
        loss = load.aux_losses(of_step=True)
        loss.sum().backward()
        losses.append(loss.numpy())
    average_gradients(model.parameters())
    gradients = [each.router.weight.grad.numpy() for each in model]
    total = [each.tolist() for each in load.total()]
    load.update_correction_biases(0.5)
    biases = [each.router.correction_bias.numpy() for each in model]
    return {"losses": losses, "gradients": gradients, "total": total, "biases": biases}


def both() -> tuple[dict[str, Any], dict[str, Any]]:
    """The results over the ranks, and those of this rank alone with all tokens."""
    group, own = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    model, whole = model_of(group), model_of(None)
    whole.set_state_dict(gather_state_dict(model))
    of_ranks = trained(model, group, own)
    alone = [paddle.distributed.new_group([rank]) for rank in range(group.nranks)][own]
    return of_ranks, trained(whole, alone, None)


def test_a_step_over_ranks_is_that_of_one_process():
    (first, expected), (second, _) = run(both, 2)
    assert first["total"] == second["total"] == expected["total"]
    assert [sum(each) for each in first["total"]] == [sum(map(sum, TOKENS)) * K] * 2
    for got in (first, second):
        np.testing.assert_array_equal(got["biases"][0], expected["biases"][0])
        np.testing.assert_array_equal(got["biases"][1], expected["biases"][1])
        for mine, whole in zip(got["gradients"], expected["gradients"], strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-7)
    means = (np.array(first["losses"]) + np.array(second["losses"])) / 2
    np.testing.assert_allclose(means, expected["losses"], rtol=1e-5, atol=1e-7)


def collectives_of(call: Callable[[], Any]) -> list[str]:
    """The collectives of a call, with the number of elements of those that add up."""
    asked: list[str] = []
    with reductions_told(lambda tensor: asked.append(f"all_reduce of {tensor.size}")) as patch:
        for name in ("all_gather", "all_gather_object", "broadcast", "reduce"):
            patch.setattr(paddle.distributed, name, lambda *_, name=name, **__: asked.append(name))
        call()
    return asked


def collectives_of_a_step() -> list[list[str]]:
    """Collectives of the losses of two micro-batches and of the update of biases."""
    group, losses, asked = paddle.distributed.get_group(0), [], []
    model = model_of(group)
    load = ExpertLoad(model, group)
    for number in range(len(TOKENS)):
        model(tokens_of(number, group.rank))
        asked.append(collectives_of(lambda: losses.append(load.aux_losses(of_step=True))))
        losses[-1].sum().backward()
    return [*asked, collectives_of(lambda: load.update_correction_biases(0.5))]


def test_all_layers_share_one_all_reduce():
    """Loads of 4 and 5 experts; for losses the number of tokens of each layer, too."""
    of_losses, of_biases = [f"all_reduce of {E + E + 1 + 2}"], [f"all_reduce of {E + E + 1}"]
    assert run(collectives_of_a_step, 2) == [[of_losses, of_losses, of_biases]] * 2


def other_layers() -> str:
    rank = paddle.distributed.get_rank()
    model = nn.Sequential(*[MoELayer(H, 4, E, K) for _ in range(1 + rank)])
    return caught(lambda: ExpertLoad(model))


def no_layers() -> str:
    return caught(lambda: ExpertLoad(nn.Linear(2, 2) if paddle.distributed.get_rank() else MoELayer(H, 4, E, K)))


def test_ranks_with_other_layers_are_told():
    for text in run(other_layers, 2):
        assert "ExpertLoad: the layers and their experts must be the same on all ranks" in text
    first, second = run(no_layers, 2)
    assert "RuntimeError" in first
    assert "rank" in first
    assert "model must be one with a MoELayer" in second
