# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's checks: a training step against a dense formulation, and moved rows against plain Paddle ops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops import moe_permute, moe_unpermute
from paddle_moe_ops.bench.decoder import Decoder, MoEForward
from paddle_moe_ops.nn import MoELayer

from .purpose import Sizes

DENSE_TOLERANCE = 2e-5
PLAIN_TOLERANCE = 1e-5
TURNS = 7


class DenseCheck(NamedTuple):
    """Differences between a training step through the operators and the dense one.

    Attributes:
        parameters: Number of parameters compared.
        loss: Absolute difference of the losses.
        gradient: Largest absolute difference of any gradient element.
        relative: Largest difference of a gradient element, as a part of its parameter's largest gradient.
        worst: Name of the parameter with that largest part.
        passed: True if ``loss`` and ``relative`` are at most DENSE_TOLERANCE.
    """

    parameters: int
    loss: float
    gradient: float
    relative: float
    worst: str
    passed: bool


class Speed(NamedTuple):
    """Milliseconds of rows on their way to the experts and back, with gradients; the least of TURNS.

    Attributes:
        ours: Through the operators.
        plain: From plain Paddle ops.
        difference: Largest difference of the outputs.
        passed: True if ``difference`` is at most PLAIN_TOLERANCE.
    """

    ours: float
    plain: float
    difference: float
    passed: bool


def dense_check(model: Decoder, tokens: Tensor, moe_forward: MoEForward = MoELayer.__call__) -> DenseCheck:
    """Compare the loss and the gradient of every parameter with those of a dense formulation.

    Both take the same experts for each token: a choice between nearly equal scores could otherwise fall
    differently after different roundings, and a choice has no gradient.
    """
    chosen: list[Tensor] = []
    hooks = [
        layer.router.register_forward_post_hook(lambda _layer, _inputs, output: chosen.append(output.ids))
        for layer in model.moe_layers
    ]
    loss, gradients = _loss_and_gradients(model, tokens, moe_forward)
    for hook in hooks:
        hook.remove()
    ids = iter(chosen)
    dense_loss, dense_gradients = _loss_and_gradients(model, tokens, lambda layer, x: dense_moe(layer, x, next(ids)))

    names = list(dense_gradients)
    differences = np.array([np.abs(gradients[name] - dense_gradients[name]).max() for name in names])
    largest = np.array([np.abs(dense_gradients[name]).max() for name in names])
    # A NaN is the maximum to NumPy and fails the comparison, as it has to.
    parts = differences / np.maximum(largest, np.finfo(np.float32).tiny)
    worst = int(np.argmax(parts))
    relative, loss_difference = float(parts[worst]), abs(loss - dense_loss)
    passed = loss_difference <= DENSE_TOLERANCE and relative <= DENSE_TOLERANCE
    return DenseCheck(len(names), loss_difference, float(differences.max()), relative, names[worst], passed)


def dense_moe(layer: MoELayer, x: Tensor, ids: Tensor) -> Tensor:
    """The MoE layer with every expert on every token, weighted by a matrix of probabilities [T, E].

    It shares the layer's weights and none of its code; ids [T, K] are the experts that count for each token.
    """
    tokens = x.reshape([-1, x.shape[-1]])
    scores = F.softmax(tokens @ layer.router.weight, axis=-1)
    weights = scores * F.one_hot(ids.astype("int64"), scores.shape[-1]).sum(axis=1)
    weights = weights / weights.sum(axis=-1, keepdim=True) * layer.router.scaling_factor
    gate, up = paddle.chunk(paddle.einsum("th,ehi->eti", tokens, layer.experts.gate_up), 2, axis=-1)
    outputs = paddle.einsum("eti,eih->eth", F.silu(gate) * up, layer.experts.down)
    out = paddle.einsum("te,eth->th", weights, outputs)
    if layer.shared is not None:
        gate, up = paddle.chunk(tokens @ layer.shared.gate_up, 2, axis=-1)
        out = out + (F.silu(gate) * up) @ layer.shared.down
    return out.reshape(x.shape)


def speed_of_moving(sizes: Sizes, num_tokens: int) -> Speed:
    """Time the moving of rows both ways, by turns, since other programs run too; the outputs are compared."""
    x = paddle.randn([num_tokens, sizes.hidden])
    probs, ids = paddle.topk(F.softmax(paddle.randn([num_tokens, sizes.experts])), sizes.topk)
    leaves = [x, probs]
    for leaf in leaves:
        leaf.stop_gradient = False
    runs = (lambda: _move(x, ids, probs, sizes.experts), lambda: _plain_move(x, ids, probs))
    moved, plain_moved = (run() for run in runs)
    difference = float((moved - plain_moved).abs().max())
    # The first turn warms up.
    times = [[_milliseconds(run, leaves) for run in runs] for _ in range(1 + TURNS)][1:]
    ours, plain = np.min(times, axis=0).tolist()
    return Speed(ours, plain, difference, difference <= PLAIN_TOLERANCE)


def _move(tokens: Tensor, ids: Tensor, probs: Tensor, num_experts: int) -> Tensor:
    counts = _count(ids, num_experts)
    rows, rowmap, row_probs, _ = moe_permute(tokens, None, ids, probs, num_experts, counts, padding_alignment=1)
    total = tokens.shape[0]
    return moe_unpermute(rows, rowmap, ids, row_probs, total, num_experts, using_weighted_combine=True)[0]


def _plain_move(tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    slots = paddle.argsort(ids.flatten(), stable=True)
    row_to_token = slots // ids.shape[1]
    rows = paddle.gather(tokens, row_to_token) * paddle.gather(probs.flatten(), slots).unsqueeze(-1)
    return paddle.index_add(paddle.zeros_like(tokens), row_to_token, 0, rows)


def _count(ids: Tensor, num_experts: int) -> list[int]:
    return np.bincount(ids.numpy().ravel(), minlength=num_experts).tolist()


def _milliseconds(run: Callable[[], Tensor], leaves: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    run().sum().backward()
    elapsed = time.perf_counter() - start
    for leaf in leaves:
        leaf.clear_gradient()
    return 1e3 * elapsed


def _loss_and_gradients(model: Decoder, tokens: Tensor, moe_forward: MoEForward) -> tuple[float, dict[str, np.ndarray]]:
    model.clear_gradients()
    loss = model.loss(tokens, moe_forward)
    loss.backward()
    # A parameter that got no gradient has to fail the comparison.
    gradients = {
        name: np.full(parameter.shape, np.nan) if parameter.grad is None else parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
    }
    model.clear_gradients()
    return float(loss), gradients
