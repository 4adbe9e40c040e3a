# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Training as users write it: loops, optimisers, accumulation, checkpoints, paddle.Model, half precision."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import Plan, moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.params import COPIES

H, E, K, CLASSES = 12, 5, 2, 3


def expert_rows(rows, weights):
    """In float32; the result has the dtype of the rows."""
    return paddle.tanh(rows.astype("float32") * weights).astype(rows.dtype)


class PaddleBlock(nn.Layer):
    """Experts of one scale each after a trained router, in Paddle's form."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias_attr=False)
        self.experts = self.create_parameter([E, H], default_initializer=nn.initializer.Normal())

    def forward(self, x):
        probs, ids = paddle.topk(F.softmax(self.router(x.astype("float32"))), K)
        rows, rowmap, row_probs, _, expert_of_row = moe_permute(
            x, None, ids.astype("int32"), probs, E, None, 2, return_expert_indices=True
        )
        rows = expert_rows(rows, F.embedding(expert_of_row.clip(0), self.experts))
        out, _ = moe_unpermute(rows, rowmap, ids.astype("int32"), row_probs, len(x), E, using_weighted_combine=True)
        return out


class PlanBlock(PaddleBlock):
    """The same by a plan."""

    def forward(self, x):
        probs, ids = paddle.topk(F.softmax(self.router(x.astype("float32"))), K)
        plan = route(ids, probs, num_experts=E)
        rows, _ = permute(x, plan)
        rows = expert_rows(rows, F.embedding(plan.row_to_expert, self.experts))
        return unpermute(rows, plan, plan.row_probs)


class HalfPaddleBlock(PaddleBlock):
    """Rows in bfloat16, the router and probabilities in float32; on a CPU Paddle has no products in bfloat16."""

    def forward(self, x):
        return super().forward(x.astype("bfloat16")).astype("float32")


class HalfPlanBlock(PlanBlock):
    def forward(self, x):
        return super().forward(x.astype("bfloat16")).astype("float32")


class Layer(MoELayer):
    def __init__(self) -> None:
        super().__init__(H, 7, E, K)


BLOCK_TYPES = (PaddleBlock, PlanBlock, Layer)
BLOCKS = pytest.mark.parametrize("block", BLOCK_TYPES)
ALL_BLOCKS = pytest.mark.parametrize("block", [PaddleBlock, PlanBlock, HalfPaddleBlock, HalfPlanBlock, Layer])


def make_net(block, seed=3):
    paddle.seed(seed)
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), block(), nn.Linear(H, CLASSES))


def make_data(rng, size=48):
    """Points of three clusters, which the model can learn."""
    centres = rng.standard_normal((CLASSES, H), np.float32)
    labels = rng.integers(0, CLASSES, size)
    points = centres[labels] + 0.3 * rng.standard_normal((size, H), np.float32)
    return points.astype(np.float32), labels


def batch_of(rng, place, size=48):
    points, labels = make_data(rng, size)
    return paddle.to_tensor(points, place=place), paddle.to_tensor(labels, place=place)


def gradients_of(net):
    return {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}


def assert_close(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        limit = tolerance * max(np.abs(wanted).max(), 1e-3)
        assert np.abs(got[name] - wanted).max() <= limit, name


def router_of(net):
    return net[2].router.weight


@ALL_BLOCKS
def test_thirty_steps_lower_the_loss_and_move_the_router(block, rng, place, backend):
    net, (x, labels) = make_net(block), batch_of(rng, place)
    optimizer = paddle.optimizer.AdamW(0.02, parameters=net.parameters())
    before, losses = router_of(net).numpy(), []
    for _ in range(30):
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert np.abs(router_of(net).numpy() - before).max() > 0.01


@BLOCKS
def test_three_micro_batches_add_up_to_one_batch(block, rng, place, backend):
    net, (x, labels) = make_net(block), batch_of(rng, place)
    F.cross_entropy(net(x), labels, reduction="sum").backward()
    expected = gradients_of(net)
    net.clear_gradients()
    for part in (slice(0, 7), slice(7, 8), slice(8, 48)):
        F.cross_entropy(net(x[part]), labels[part], reduction="sum").backward()
    assert_close(gradients_of(net), expected)


@ALL_BLOCKS
def test_gradients_accumulated_in_float32_by_hooks(block, rng, place):
    """As large models keep them: param.main_grad, while param.grad is dropped."""
    net, (x, labels) = make_net(block), batch_of(rng, place)
    for parameter in net.parameters():
        parameter.main_grad = paddle.zeros(parameter.shape, "float32")

        def keep(gradient, parameter=parameter):
            parameter.main_grad.add_(gradient.astype("float32"))

        parameter.register_hook(keep)
    for _ in range(2):
        F.cross_entropy(net(x), labels).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.numpy().any(), name
        np.testing.assert_allclose(parameter.main_grad.numpy(), parameter.grad.numpy(), rtol=1e-6, err_msg=name)


@BLOCKS
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute_of_a_whole_block(block, use_reentrant, rng, place, backend):
    net, (x, labels) = make_net(block), batch_of(rng, place)
    F.cross_entropy(net(x), labels).backward()
    expected = gradients_of(net)
    net.clear_gradients()
    h = net[1](net[0](x))
    out = net[3](recompute(net[2], h, use_reentrant=use_reentrant))
    F.cross_entropy(out, labels).backward()
    assert_close(gradients_of(net), expected)


@BLOCKS
def test_two_losses_of_one_forward_pass(block, rng, place, backend):
    """The loss and one for balance, in one backward pass."""
    net, (x, labels) = make_net(block), batch_of(rng, place)
    out = net(x)
    losses = [F.cross_entropy(out, labels), 0.1 * (out * out).mean()]
    paddle.autograd.backward(losses)
    got = gradients_of(net)
    net.clear_gradients()
    out = net(x)
    (F.cross_entropy(out, labels) + 0.1 * (out * out).mean()).backward()
    assert_close(got, gradients_of(net))


def steps(net, optimizer, scheduler, scaler, batches):
    losses = []
    for x, labels in batches:
        with paddle.amp.auto_cast(enable=False):
            loss = F.cross_entropy(net(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def trainer(block):
    net = make_net(block)
    scheduler = paddle.optimizer.lr.StepDecay(0.01, step_size=2, gamma=0.5)
    clip = nn.ClipGradByGlobalNorm(0.5)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=net.parameters(), grad_clip=clip, weight_decay=0.1)
    return net, optimizer, scheduler, paddle.amp.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2)


@BLOCKS
@pytest.mark.filterwarnings("ignore:AmpScaler can only be enabled")
def test_a_restored_run_goes_on_as_the_uninterrupted_one(block, rng, place, tmp_path):
    batches = [batch_of(rng, place, size=11) for _ in range(6)]
    state = str(tmp_path / "state.pdparams")
    in_a_process_of_its_own = paddle.utils.unique_name.guard  # as far as names go
    with in_a_process_of_its_own():
        net, *tools = trainer(block)
        whole = steps(net, *tools, batches)
    with in_a_process_of_its_own():
        first, *tools = trainer(block)
        steps(first, *tools, batches[:3])
        paddle.save([each.state_dict() for each in (first, *tools)], state)
    with in_a_process_of_its_own():
        second, optimizer, scheduler, scaler = trainer(block)
        for parameter in second.parameters():
            parameter.set_value(paddle.zeros_like(parameter))
        of_net, of_optimizer, of_scheduler, of_scaler = paddle.load(state)
        second.set_state_dict(of_net)
        optimizer.set_state_dict(of_optimizer)
        scheduler.set_state_dict(of_scheduler)
        scaler.load_state_dict(of_scaler)
        losses = steps(second, optimizer, scheduler, scaler, batches[3:])
    np.testing.assert_allclose(losses, whole[3:], rtol=1e-6)
    for got, expected in zip(second.parameters(), net.parameters(), strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


class Points(paddle.io.Dataset):
    def __init__(self, points, labels):
        self.points, self.labels = points, labels

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


@BLOCKS
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_paddle_model_fits(block, rng, place):
    points, labels = make_data(rng, 64)
    dataset = Points(points, labels)
    net = make_net(block)
    model = paddle.Model(net)
    optimizer = paddle.optimizer.AdamW(0.02, parameters=model.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    before = router_of(net).numpy()
    model.fit(dataset, batch_size=17, epochs=8, verbose=0, shuffle=False)
    assert model.evaluate(dataset, batch_size=17, verbose=0)["acc"] > 0.8
    assert np.abs(router_of(net).numpy() - before).max() > 0.01


@pytest.mark.parametrize(("block", "half"), [(PaddleBlock, HalfPaddleBlock), (PlanBlock, HalfPlanBlock)])
def test_gradients_in_half_precision_are_those_in_float32_but_for_rounding(block, half, rng, place, backend):
    x, labels = batch_of(rng, place)
    whole = make_net(block)
    F.cross_entropy(whole(x), labels).backward()
    net = make_net(half)
    F.cross_entropy(net(x), labels).backward()
    assert_close(gradients_of(net), gradients_of(whole), 2**-5)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("with_probs", [True, False])
def test_a_copied_plan_is_a_plan(copied, with_probs, rng, place, backend):
    ids = paddle.to_tensor(np.stack([rng.permutation(E)[:K] for _ in range(9)]).astype(np.int32), place=place)
    probs = paddle.to_tensor(rng.random((9, K), np.float32), place=place) if with_probs else None
    plan = route(ids, probs, num_experts=E, padding_alignment=4)
    twin = copied(plan)
    assert type(twin) is Plan
    for name, got, expected in zip(Plan._fields, twin, plan, strict=True):
        assert type(got) is type(expected), name
        if isinstance(expected, paddle.Tensor):
            assert_bits_equal(got, expected, what=name)
            assert got.stop_gradient
        else:
            assert got == expected, name

    x = paddle.to_tensor(rng.standard_normal((9, H), np.float32), place=place, stop_gradient=False)
    rows, _ = permute(x, twin)
    unpermute(rows, twin, probs).sum().backward()
    expected = np.full((9, H), K) if probs is None else np.tile(probs.numpy().sum(1, keepdims=True), H)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6)
    assert_bits_equal(rows, permute(x, plan)[0])


# With `use_reentrant` only arguments may have a graph of their own, so not the plan's probabilities of rows.
@pytest.mark.parametrize(
    ("use_reentrant", "weights"),
    [(True, "probs"), (False, "probs"), (False, "row_probs")],
    ids=["reentrant", "hooks", "hooks, row_probs"],
)
def test_a_recomputed_function_reads_a_plan_from_outside(use_reentrant, weights, rng, place, backend):
    given = [rng.standard_normal((9, H), np.float32), rng.random((9, K), np.float32)]
    ids = paddle.to_tensor(np.stack([rng.permutation(E)[:K] for _ in range(9)]), place=place)

    def gradients(call):
        x, scores = (paddle.to_tensor(each, place=place, stop_gradient=False) for each in given)
        probs = scores * scores
        plan = route(ids, probs, num_experts=E)

        def layer(x, probs):
            return unpermute(paddle.tanh(permute(x, plan)[0]), plan, probs if weights == "probs" else plan.row_probs)

        call(layer, x, probs).square().sum().backward()
        return x.grad, scores.grad

    due = gradients(lambda layer, *arguments: layer(*arguments))
    made = gradients(lambda layer, *arguments: recompute(layer, *arguments, use_reentrant=use_reentrant))
    for got, expected in zip(made, due, strict=True):
        assert_bits_equal(got, expected, what="gradient")
