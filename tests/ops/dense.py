# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer in plain Paddle: every expert on every token, weighted by a matrix [T, E].

It shares only the parameters with a layer; the options of the layer are given once more, as `Options`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray

from paddle_moe_ops.backends.arrays import to_numpy

Results = dict[str, NDArray]


class Options(NamedTuple):
    """Options of a layer, named as in MoELayer."""

    topk: int
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    num_groups: int = 1
    topk_groups: int | None = None
    scores_per_group: int = 2
    scaling_factor: float = 1.0
    capacity: int | None = None


class Dense(NamedTuple):
    """The output [..., H], the choice [T, K], the slots dropped and the auxiliary losses."""

    out: paddle.Tensor
    ids: NDArray
    dropped: int
    aux_loss: paddle.Tensor
    z_loss: paddle.Tensor


def stable_topk(values: NDArray, k: int) -> NDArray:
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def choose(values: NDArray, options: Options) -> NDArray:
    """The experts of each token, best first, from the best groups."""
    num_tokens, num_experts = values.shape
    groups = values.reshape(num_tokens, options.num_groups, num_experts // options.num_groups)
    sums = np.sort(groups, axis=-1)[..., -options.scores_per_group :].sum(axis=-1)
    kept = stable_topk(sums, options.topk_groups or options.num_groups)
    is_kept = np.zeros(sums.shape, np.bool_)
    np.put_along_axis(is_kept, kept, True, axis=1)
    candidates = np.where(is_kept[..., None], groups, -np.inf).reshape(num_tokens, num_experts)
    return stable_topk(candidates, options.topk)


def dense_layer(
    parameters: dict[str, paddle.Tensor],
    x: paddle.Tensor,
    options: Options,
    at_experts: Callable[[paddle.Tensor], paddle.Tensor] = lambda tokens: tokens,
) -> Dense:
    """The layer of the given parameters (and correction bias), in float32; its experts get ``at_experts(tokens)``."""
    weights = {name: tensor.astype("float32") for name, tensor in parameters.items()}
    tokens = x.astype("float32").reshape([-1, x.shape[-1]])
    logits = tokens @ weights["router.weight"]
    scores = F.softmax(logits, axis=-1) if options.scoring == "softmax" else F.sigmoid(logits)
    bias = weights.get("router.correction_bias")
    ids = choose(scores.numpy() + (0 if bias is None else bias.numpy()), options)
    num_tokens, num_experts = scores.shape
    chosen = np.zeros((num_tokens, num_experts), np.float32)
    np.put_along_axis(chosen, ids, 1, axis=1)

    probs = scores * paddle.to_tensor(chosen)
    if options.norm_topk_prob:
        probs = probs / probs.sum(axis=-1, keepdim=True)
    kept = chosen if options.capacity is None else chosen * (np.cumsum(chosen, axis=0) <= options.capacity)
    probs = probs * options.scaling_factor * paddle.to_tensor(kept)
    products = paddle.einsum("th,ehi->eti", at_experts(tokens), weights["experts.gate_up"])
    gate, up = paddle.chunk(products, 2, axis=-1)
    outputs = paddle.einsum("eti,eih->eth", F.silu(gate) * up, weights["experts.down"])
    out = paddle.einsum("te,eth->th", probs, outputs)
    if "shared.down" in weights:
        gate, up = paddle.chunk(tokens @ weights["shared.gate_up"], 2, axis=-1)
        out = out + (F.silu(gate) * up) @ weights["shared.down"]

    share = paddle.to_tensor(chosen.sum(axis=0) / np.float32(max(num_tokens, 1) * options.topk))
    affinity = scores / scores.sum(axis=-1, keepdim=True)
    aux_loss = num_experts * (share * affinity.mean(axis=0)).sum()
    z_loss = (paddle.log(paddle.exp(logits).sum(axis=-1)) ** 2).mean()
    return Dense(out.reshape(x.shape), ids, int((chosen - kept).sum()), aux_loss, z_loss)


def parameters_and_bias(layer: paddle.nn.Layer) -> dict[str, paddle.Tensor]:
    """Parameters and buffers by name; the parameters are the layer's own, so that they get gradients."""
    return {**dict(layer.named_buffers()), **dict(layer.named_parameters())}


def results(layer: paddle.nn.Layer, x: paddle.Tensor, run: Callable[[paddle.Tensor], Any]) -> Results:
    """Outputs of a function of x, and gradients of x and all parameters from a loss that weights each element
    differently.

    The function returns the output, or a tuple of it and losses to add.
    """
    layer.clear_gradients()
    x = x.detach()
    x.stop_gradient = False
    returned = run(x)
    out, *losses = returned if isinstance(returned, (tuple, list)) else (returned,)
    factors = np.sin(np.arange(1, out.size + 1, dtype=np.float32)).reshape(out.shape)
    loss = (out.astype("float32") * paddle.to_tensor(factors)).sum()
    for extra in losses:
        loss = loss + extra
    loss.backward()
    found = {"out": out, "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    missing = [name for name, tensor in found.items() if tensor is None]
    assert not missing, f"no gradient of {missing}"
    return {name: np.array(to_numpy(tensor.detach())) for name, tensor in found.items()}


def assert_close(got: Results, expected: Results, what: str = "") -> None:
    """Within the tolerance of float32 matrix products, relative to the largest element of each tensor."""
    assert got.keys() == expected.keys(), what
    for name, wanted in expected.items():
        scale = np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-5 * scale, err_msg=f"{name} {what}")


def assert_same(got: NDArray, expected: NDArray) -> None:
    """The same numbers, but for the last bits of Paddle's own matmul, which may differ from call to call."""
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(initial=0))


def assert_equals_dense(layer: paddle.nn.Layer, x: paddle.Tensor, options: Options, run: Any = None) -> Results:
    """Check output and gradients of a layer (or what `run` makes of it) against those of the dense formulation."""
    ours = results(layer, x, run or layer)
    dense = results(layer, x, lambda x: dense_layer(parameters_and_bias(layer), x, options).out)
    assert_close(ours, dense)
    return ours
