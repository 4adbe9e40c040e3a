# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The model around every program: a layer, a trained router, experts; and its dense form in plain Paddle.

A program moves rows with functions of the package and returns tokens; its dense form computes the same without moving
a row. Router and program share the layer before them, so a gradient that is lost on one path makes those of
everything upstream wrong. The inputs of both are among

    h: tokens [T, H] after the layer.
    logits: [T, E], and scores: their softmax.
    probs: the K highest scores of each token, and ids: their experts.
    gates: [T, E] scores above the mean, 0 elsewhere, and mask: bool [T, E], where gates are not 0.
    experts: [E, H], the weights of the experts.

Each of them carries a graph that leads to x, those of integers and bools too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import Tensor

T, H, E, K = 13, 10, 5, 2
LEAVES = ("x", "front", "router", "experts")


Source = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def as_chosen(h: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int64 ids straight from paddle.topk."""
    return h, probs, ids


def cast(h: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return h, probs, ids.astype("int32")


def out_of_one_message(h: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, probabilities and ids packed into one tensor, as one all-to-all sends them."""
    message = paddle.concat([h, probs, ids.astype(probs.dtype)], axis=1)
    h, probs, ids = paddle.split(message, [H, K, K], axis=1)
    return h, probs, ids.astype("int32")


def with_unassigned_slots(h: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of small probability have no expert."""
    return h, probs, paddle.where(probs > 0.9 / E, ids, paddle.full_like(ids, -1)).astype("int32")


SOURCES = (as_chosen, cast, out_of_one_message, with_unassigned_slots)
IDS_OF_EXPERTS = SOURCES[:3]
MASKS = (as_chosen, out_of_one_message)  # for programs that take no ids


Form = Callable[..., Any]


class Program(NamedTuple):
    """A program with functions of the package and its dense form.

    Attributes:
        sparse: the program.
        dense: the same in plain Paddle.
        sources: where its tokens, probabilities and ids may come from.
        in_static_graphs: whether it also runs where values are not known while it is called.
        products: matrix products that follow one another, each rounded under mixed precision.
    """

    sparse: Form
    dense: Form
    sources: tuple[Source, ...] = SOURCES
    in_static_graphs: bool = True
    products: int = 1

    def __str__(self) -> str:
        return self.sparse.__name__


def model(form: Form, source: Source = cast) -> Callable[..., Any]:
    """The whole model as a function of its `LEAVES`."""

    def forward(x: Tensor, front: Tensor, router: Tensor, experts: Tensor) -> Any:
        h = paddle.matmul(x, front)
        logits = paddle.matmul(h, router)
        scores = F.softmax(logits)
        gates = paddle.where(scores > 1 / E, scores, paddle.zeros_like(scores))
        h, probs, ids = source(h, *paddle.topk(scores, K))
        return form(
            h=h,
            logits=logits,
            scores=scores,
            probs=probs,
            ids=ids,
            gates=gates,
            mask=gates.astype("bool"),
            experts=experts,
        )

    return forward


def expert_rows(rows: Tensor, experts: Tensor, expert_of_row: Tensor) -> Tensor:
    """Expert outputs: each expert scales the columns by its own weights."""
    weights = F.embedding(paddle.clip(expert_of_row, 0, E - 1), experts)
    return paddle.tanh(rows * weights)


def experts_of_rows(rows: Tensor, sizes: Tensor) -> Tensor:
    """The expert of each row, from the rows of each expert, padding included; any for rows after the last."""
    numbers = paddle.cumsum(paddle.ones_like(rows[:, 0], dtype="int64")) - 1
    return paddle.searchsorted(paddle.cumsum(sizes.astype("int64")), numbers, right=True)


def sizes_of_ids(ids: Tensor) -> Tensor:
    """int32 [E]: how many slots name each expert."""
    return (ids.unsqueeze(-1) == paddle.arange(E, dtype=ids.dtype)).astype("int32").sum([0, 1], dtype="int32")


def sizes_of_mask(mask: Tensor) -> Tensor:
    """int32 [E]: how many tokens each expert gets."""
    return mask.astype("int32").sum(0, dtype="int32")


def with_graph(constant: Tensor, source: Tensor) -> Tensor:
    """The same integers, with a graph that leads to the source."""
    return constant + (source.sum() * 0).astype(constant.dtype)


def largest(h: Tensor) -> Tensor:
    """A scale of each token, float32 [T, 1]."""
    return h.abs().max(axis=1, keepdim=True).astype("float32")


def constant(tensor: Tensor) -> Tensor:
    """The same numbers without a graph. Paddle has no detach of bfloat16 in static graphs."""
    if isinstance(tensor, Tensor):
        return tensor.detach()
    copy = paddle.assign(tensor)
    copy.stop_gradient = True
    return copy


def padded(sizes: Tensor, alignment: int) -> Tensor:
    return (sizes + alignment - 1) // alignment * alignment


def dense_by_slot(h: Tensor, ids: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The sum over slots of expert outputs for the token, with weights [T, K]; id -1 is no expert."""
    weights = paddle.where(ids >= 0, weights, paddle.zeros_like(weights))
    rows = expert_rows(h.unsqueeze(1), experts, ids)
    return (weights.unsqueeze(-1) * rows).sum(1)


def dense_by_expert(h: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The sum over experts, with weights [T, E] that are 0 where an expert does not get the token."""
    rows = paddle.tanh(h.unsqueeze(1) * experts.unsqueeze(0))
    return (weights.unsqueeze(-1) * rows).sum(1)


def arrays_of(rng: np.random.Generator) -> dict[str, NDArray]:
    """Values of the `LEAVES`; no two scores of a token are so close that rounding decides who is chosen."""
    while True:
        arrays = {
            "x": rng.standard_normal((T, H), np.float32),
            "front": (rng.standard_normal((H, H)) / H**0.5).astype(np.float32),
            "router": (rng.standard_normal((H, E)) / H**0.5).astype(np.float32),
            "experts": rng.uniform(0.5, 2, (E, H)).astype(np.float32),
        }
        logits = arrays["x"] @ arrays["front"] @ arrays["router"]
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        edges = np.concatenate([scores, np.full((T, 2), [1 / E, 0.9 / E])], axis=1)
        if np.diff(np.sort(edges)).min() > 1e-3:
            return arrays


def loss_of(outputs: Any) -> Tensor:
    """A scalar in which every element of every output counts differently."""
    loss = 0.0
    for output in paddle.utils.flatten(outputs):
        weights = np.sin(np.arange(1, np.prod(output.shape, dtype=np.int64) + 1)).reshape(output.shape)
        loss = loss + (output * paddle.to_tensor(weights.astype(np.float32))).sum()
    return loss
