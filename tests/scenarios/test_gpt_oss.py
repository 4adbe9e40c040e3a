# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A block like that of gpt_oss: a router with a bias, softmax after the top k, biased experts, clamped SwiGLU."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_mlp, route

H, I, E, K, LIMIT, ALPHA = 12, 8, 6, 2, 7.0, 1.702  # noqa: E741

pytestmark = pytest.mark.usefixtures("place", "backend")


class Block(nn.Layer):
    """Parameters with gpt_oss's columns: gate, up, gate, up, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.router = nn.Linear(H, E)
        normal = nn.initializer.Normal(std=1.5)
        self.gate_up = self.create_parameter([E, H, 2 * I], default_initializer=normal)
        self.down = self.create_parameter([E, I, H], default_initializer=nn.initializer.Normal(std=0.1))
        self.gate_up_bias = self.create_parameter([E, 2 * I], default_initializer=normal)
        self.down_bias = self.create_parameter([E, H], default_initializer=nn.initializer.Normal(std=0.1))

    def choose(self, x):
        values, ids = paddle.topk(self.router(x), K)
        return F.softmax(values, axis=-1), ids

    def forward(self, x):
        rows = self.norm(x)
        probs, ids = self.choose(rows)
        return x + self.mix(rows, probs, ids)

    def mix(self, rows, probs, ids):
        raise NotImplementedError


def halves(columns):
    """The gate's columns first."""
    return paddle.concat([columns[..., 0::2], columns[..., 1::2]], axis=-1)


class Sparse(Block):
    def mix(self, rows, probs, ids):
        biases = {"gate_up_bias": halves(self.gate_up_bias), "down_bias": self.down_bias}
        plan = route(ids, num_experts=E)
        return moe_mlp(rows, plan, probs, halves(self.gate_up), self.down, activation="swiglu_oai", **biases)


class Recomputed(Sparse):
    def mix(self, *arguments):
        return recompute(super().mix, *arguments)


class Dense(Block):
    """Every expert on every token."""

    cut = 0.0

    def mix(self, rows, probs, ids):
        hidden = paddle.einsum("td,edn->etn", rows, self.gate_up) + self.gate_up_bias.unsqueeze(1)
        gate, up = hidden[..., 0::2], hidden[..., 1::2]
        self.cut = max(self.cut, float((gate > LIMIT).astype("float32").mean()))
        gate, up = gate.clip(max=LIMIT), up.clip(min=-LIMIT, max=LIMIT)
        act = (up + 1) * gate * F.sigmoid(ALPHA * gate)
        out = paddle.einsum("etn,end->etd", act, self.down) + self.down_bias.unsqueeze(1)
        weights = (F.one_hot(ids, E) * probs.unsqueeze(-1)).sum(1)
        return paddle.einsum("te,etd->td", weights, out)


def trained(kind, steps: int = 8):
    """The model, its losses, and the gradients of the first step."""
    paddle.seed(11)
    model = kind()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    x = paddle.to_tensor(np.random.default_rng(4).standard_normal((40, H)).astype(np.float32))
    losses, first = [], {}
    for _ in range(steps):
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        first = first or {name: each.grad.numpy() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return model, losses, first


@pytest.mark.parametrize("kind", [Sparse, Recomputed])
def test_it_trains_as_a_dense_formulation_does(kind):
    dense, expected, due = trained(Dense)
    _, losses, made = trained(kind)
    assert 0.01 < dense.cut < 0.9
    assert losses[-1] < 0.95 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    for name, gradient in due.items():
        largest = np.abs(gradient).max()
        assert largest > 0, name
        np.testing.assert_allclose(made[name], gradient, rtol=0, atol=2e-5 * largest, err_msg=name)
