# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling where the experts are on several ranks: ranks that skip a step, and ranks that train."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_moe_ops.expert_parallel import GradScaler, average_gradients, mark_expert_parameters
from tests.distributed.processes import run
from tests.distributed.test_expert_parallel_errors import caught

H = 8
SCALE = 1024.0


class Model(paddle.nn.Layer):
    """Something that all ranks have, and an expert of this rank. Loss scaling needs a device that is not the CPU."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.shared, self.expert = paddle.nn.Linear(H, H), paddle.nn.Linear(H, H)
        mark_expert_parameters(self.expert, group=dist.get_group(0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.expert(self.shared(x))


def model_and_optimizer() -> tuple[Model, paddle.optimizer.Optimizer]:
    with paddle.amp.auto_cast(dtype="float16"):
        pass  # after float32 Paddle turns loss scaling off
    model = Model()
    return model, paddle.optimizer.SGD(0.1, parameters=model.parameters())


def scaled_backward(model: Model, scaler: paddle.amp.GradScaler, step: int) -> paddle.Tensor:
    rng = np.random.default_rng([step, dist.get_rank()])
    out = model(paddle.to_tensor(rng.standard_normal([12, H]).astype("float32")))
    loss = scaler.scale((out**2).mean())
    loss.backward()
    average_gradients(model.parameters())
    return loss


def overflow(model: Model) -> None:
    """Give the expert an infinite gradient."""
    with paddle.no_grad():
        model.expert.weight.grad[0, 0] = float("inf")


def overflow_on_one_rank(own: bool, how: str) -> tuple[list[int], bool, list[np.ndarray]]:
    """Steps with infinity so far, after each; whether the second step moved the expert; what is shared, after each.

    In the second step an expert of the last rank has an infinite gradient.
    """
    model, optimizer = model_and_optimizer()
    scaler = (GradScaler if own else paddle.amp.GradScaler)(init_loss_scaling=SCALE, decr_every_n_nan_or_inf=3)
    assert scaler.is_enable()
    counts, shared, moved = [], [], False
    for step in range(3):
        loss = scaled_backward(model, scaler, step)
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            overflow(model)
        before = model.expert.weight.numpy()
        if how == "minimize":
            scaler.minimize(optimizer, loss)
        else:
            if how == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if step == 1:
            moved = not np.array_equal(before, model.expert.weight.numpy())
        optimizer.clear_grad()
        counts.append(scaler.state_dict()["decr_count"])
        shared.append(model.shared.weight.numpy())
    return counts, moved, shared


@pytest.mark.parametrize("how", ["step", "unscale_", "minimize"])
def test_infinity_in_an_expert_of_one_rank_skips_the_step_on_all(how, custom_backend):
    of_ranks = run(overflow_on_one_rank, 2, custom_backend, own=True, how=how)
    for counts, moved, shared in of_ranks:
        assert counts == [0, 1, 0]
        assert not moved
        assert np.array_equal(shared[1], shared[0])
        assert not np.array_equal(shared[2], shared[1])
        for each, of_first in zip(shared, of_ranks[0][2], strict=True):
            assert np.array_equal(each, of_first)


def test_with_the_scaler_of_paddle_ranks_differ_after_it(custom_backend):
    (counts, moved, shared), (other_counts, other_moved, other_shared) = run(
        overflow_on_one_rank, 2, custom_backend, own=False, how="step"
    )
    assert (counts, other_counts) == ([0, 0, 0], [0, 1, 0])
    assert (moved, other_moved) == (True, False)
    assert not np.array_equal(shared[1], other_shared[1])


def scale_after_infinity() -> tuple[float, float]:
    """The scale after a step that was skipped and after a good one; Paddle's class fails there with NumPy 2.4."""
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(init_loss_scaling=SCALE, decr_every_n_nan_or_inf=1, incr_every_n_steps=1)
    scales = []
    for step in range(2):
        scaled_backward(model, scaler, step)
        if step == 0:
            overflow(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        scales.append(float(scaler.state_dict()["scale"].item()))
    assert scaler.state_dict()["scale"].shape == (1,)
    return scales[0], scales[1]


def test_infinity_halves_the_scale_and_good_steps_raise_it(custom_backend):
    assert run(scale_after_infinity, 2, custom_backend) == [(SCALE / 2, SCALE)] * 2


def unlike_scales() -> list[str]:
    """Errors on this rank after one rank loaded a state, and after all did."""
    model, optimizer = model_and_optimizer()
    scaler, texts = GradScaler(init_loss_scaling=SCALE), []
    state = GradScaler(init_loss_scaling=8.0).state_dict()
    for ranks in ([0], [0, 1]):
        if dist.get_rank() in ranks:
            scaler.load_state_dict(state)
        scaled_backward(model, scaler, 0)
        texts.append(caught(partial(scaler.unscale_, optimizer)))
        scaler.update()
        optimizer.clear_grad()
    return texts


def test_ranks_with_other_scales_get_an_error(custom_backend):
    expected = "the same on all ranks, as after load_state_dict on each of them, but got 8 to 1024"
    texts = [f"ValueError: GradScaler: the scale must be {expected}", "nothing was raised"]
    assert run(unlike_scales, 2, custom_backend) == [texts, texts]


def trained(scales: bool) -> list[np.ndarray]:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(enable=scales, init_loss_scaling=SCALE)
    for step in range(3):
        scaled_backward(model, scaler, step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    return [parameter.numpy() for parameter in model.parameters()]


def test_without_infinity_training_is_that_without_scaling(custom_backend):
    pairs = zip(*(run(trained, 2, custom_backend, scales=scales) for scales in (True, False)), strict=True)
    for scaled, plain in pairs:
        for one, other in zip(scaled, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def main_gradients() -> tuple[list[float], bool, str]:
    """Largest main gradients after `unscale_`; whether a step with infinity on rank 1 moved; an error."""
    model, optimizer = model_and_optimizer()
    scaler, before = GradScaler(init_loss_scaling=SCALE), model.expert.weight.numpy()
    for each in model.parameters():
        each.main_grad = paddle.full(each.shape, 3 * SCALE)
    if dist.get_rank() == 1:
        model.expert.bias.main_grad = paddle.full([H], float("inf"))
    scaler.unscale_(optimizer)
    largest = [float(each.main_grad.max()) for each in model.shared.parameters()]
    for each in model.parameters():
        each.grad, each.main_grad = each.main_grad, None  # as Fleet's MixPrecisionOptimizer passes it on
    scaler.step(optimizer)
    scaler.update()
    optimizer.comm_overlap = True
    text = caught(partial(scaler.unscale_, optimizer))
    return largest, not np.array_equal(before, model.expert.weight.numpy()), text


def test_main_gradients_are_divided_and_infinity_in_one_skips_the_step_on_all(custom_backend):
    expected = "comm_overlap of the optimizer must be False with loss scaling, but got True"
    for largest, moved, text in run(main_gradients, 2, custom_backend):
        assert largest == [3.0, 3.0]
        assert not moved
        assert text == f"ValueError: GradScaler: {expected}"


def steps_of_one_rank() -> list[str]:
    """Errors of steps that rank 0 takes alone, with a scaler that is off and with one of its own group."""
    model, optimizer = model_and_optimizer()
    alone = [dist.new_group([rank]) for rank in range(2)]
    scaled_backward(model, GradScaler(enable=False), 0)
    if dist.get_rank() == 1:
        return []
    scalers = GradScaler(enable=False, timeout=0.5), GradScaler(group=alone[0])
    return [caught(partial(each.step, optimizer)) for each in scalers]


def test_scalers_that_are_off_or_of_one_rank_wait_for_no_other(custom_backend):
    assert run(steps_of_one_rank, 2, custom_backend) == [["nothing was raised"] * 2, []]


def with_bad_groups() -> list[str]:
    alone = dist.new_group([0]), dist.new_group([1])
    given: list[dict[str, Any]] = [{"group": alone[1 - dist.get_rank()]}, {"group": "all"}, {"timeout": 0}]
    return [caught(partial(GradScaler, **each)) for each in given]


def test_bad_groups_and_times_are_refused(custom_backend):
    for rank, (of_the_other, no_group, no_time) in enumerate(run(with_bad_groups, 2, custom_backend)):
        expected = f"a group that this rank belongs to, but got one of ranks [{1 - rank}]"
        assert of_the_other == f"ValueError: GradScaler: group must be {expected}"
        expected = "a group of paddle.distributed, or None, but got"
        assert no_group.startswith(f"TypeError: GradScaler: group must be {expected}")
        expected = "a number of seconds from 0.001 to 1e+06, but got 0"
        assert no_time == f"ValueError: GradScaler: timeout must be {expected}"


def test_in_one_process_it_is_the_scaler_of_paddle():
    layer = paddle.nn.Linear(4, 4)
    optimizer, scaler = paddle.optimizer.SGD(0.1, parameters=layer.parameters()), GradScaler(init_loss_scaling=SCALE)
    scales = "disabled" if paddle.get_device() == "cpu" else "enabled"  # Paddle scales no loss on a CPU
    assert repr(scaler) == f"GradScaler({scales}, rank=0 of 1)"
    before = layer.weight.numpy()
    scaler.scale(layer(paddle.ones([2, 4])).sum()).backward()
    scaler.unscale_(optimizer)
    np.testing.assert_allclose(layer.weight.grad.numpy(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    np.testing.assert_allclose(layer.weight.numpy(), before - 0.2, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"init_loss_scaling": "a"}, TypeError, "init_loss_scaling must be a number, but got str"),
        ({"init_loss_scaling": 0.0}, ValueError, "init_loss_scaling must be above 0, but got 0.0"),
        ({"decr_ratio": -1}, ValueError, "decr_ratio must be above 0, but got -1"),
    ],
)
def test_bad_scales_are_refused_where_scaling_has_no_effect_too(options, error, text):
    with pytest.raises(error, match=f"^GradScaler: {text}$"):
        GradScaler(**options)
