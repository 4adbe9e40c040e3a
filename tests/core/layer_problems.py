# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of experts with operands, and the results that the oracle computes from them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import FLOAT8_ERROR

from ..reference.cases import assert_same_bits
from .binding import Core
from .layer import Hidden, Layer, Results, passes

__all__ = ["BFLOAT16", "Case", "ExactLayer", "RandomLayer", "Sizes", "assert_near", "assert_same", "live_part"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Sizes(Protocol):
    """T tokens of d columns, K slots, E experts of inner size n, and the plan's options."""

    @property
    def tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def buffer(self) -> int: ...
    @property
    def unassigned(self) -> float: ...


class Case(NamedTuple):
    """`Sizes` of a test."""

    tokens: int
    hidden: int = 16
    inner: int = 8
    experts: int = 3
    topk: int = 2
    alignment: int = 1
    buffer: int = -1
    unassigned: float = 0.2


class RandomLayer:
    """Random operands; small gradients of the result, as training has them.

    Rows of no token have NaN as their weight.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: Sizes,
        dtype: DTypeLike = BFLOAT16,
        *,
        ids: NDArray | None = None,
        weighted: bool = True,
        **options: Any,
    ) -> None:
        tokens, d, n, experts = sizes.tokens, sizes.hidden, sizes.inner, sizes.experts
        if ids is None:
            ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, : sizes.topk]
            ids = np.where(rng.random(ids.shape) < sizes.unassigned, -1, ids).astype(np.int32)
        routing = {"padding_alignment": sizes.alignment, "buffer_size": sizes.buffer}
        plan = reference.route(ids, num_experts=experts, **routing)
        x, gate_up, down, d_out = self.operands(rng, tokens, d, n, experts)
        if options.get("transpose"):
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        live = plan.row_to_token >= 0
        weights = np.where(live, self.draw_weights(rng, live.size), np.nan).astype(np.float32) if weighted else None
        self.ids = ids
        self.x, self.d_out = x.astype(dtype), d_out.astype(dtype)
        matrices = (np.ascontiguousarray(each).astype(dtype) for each in (gate_up, down))
        self.layer = Layer(plan, *matrices, weights, **options)

    def operands(self, rng: np.random.Generator, tokens: int, d: int, n: int, experts: int) -> tuple[NDArray, ...]:
        gate_up, down = (rng.standard_normal(shape) * d**-0.5 for shape in ((experts, d, 2 * n), (experts, n, d)))
        return rng.standard_normal((tokens, d)), gate_up, down, rng.standard_normal((tokens, d)) * 1e-4

    def draw_weights(self, rng: np.random.Generator, rows: int) -> NDArray:
        return rng.random(rows)

    def run(self, core: Core, layer: Layer | None = None, **options: Any) -> Results:
        """Results of both passes, of this layer or of one with other options."""
        return passes(core, layer or self.layer, self.x, self.d_out, **options)

    def due(self) -> Results:
        """Results of the oracle; H is not in codes."""
        layer = self.layer
        arguments = self.x, layer.plan, layer.gate_up, layer.down, layer.weights
        options: dict[str, Any] = {"transpose": layer.transpose}
        if layer.float8:
            out, hidden = reference.moe_mlp_float8(*arguments, **options)
            options |= {"hidden_in_float8": layer.keeps == Hidden.KEEPS_CODES, "float8_wgrads": layer.float8_wgrads}
            made = reference.moe_mlp_float8_backward(self.d_out, *arguments, **options)
        else:
            out, hidden = reference.moe_mlp(*arguments, **options)
            made = reference.moe_mlp_backward(self.d_out, *arguments, **options)
        kept = hidden if layer.keeps == Hidden.KEEPS else None
        return Results(out, kept, None, made.x, made.gate_up, made.down, made.weights)


class ExactLayer(RandomLayer):
    """Integers in halves of a few bits, whose products and sums are exact, with gates where SwiGLU is exact as well."""

    def operands(self, rng: np.random.Generator, tokens: int, d: int, n: int, experts: int) -> tuple[NDArray, ...]:
        x = np.zeros((tokens, d))
        x[:, 0] = 1
        x[:, 1:] = rng.integers(-1, 2, (tokens, d - 1)) * (rng.random((tokens, d - 1)) < 8 / d)
        gate_up = np.zeros((experts, d, 2 * n))
        # exp(-gate) is less than half a step of 1, and the products of these gates are exact in 8 bits
        gate_up[:, 0, :n] = rng.choice([64.0, 128.0], (experts, n))
        gate_up[:, :, n:] = rng.integers(-1, 2, (experts, d, n)) * (rng.random((experts, d, n)) < 0.3)
        down = rng.integers(-2, 3, (experts, n, d)).astype(float)
        return x, gate_up, down, rng.integers(-2, 3, (tokens, d)).astype(float)

    def draw_weights(self, rng: np.random.Generator, rows: int) -> NDArray:
        return rng.choice([0.5, 1, 2], rows)


def without_sign_of_zero(array: NDArray) -> NDArray:
    with np.errstate(invalid="ignore"):
        return np.where(array == 0, np.zeros(1, array.dtype), array)


def assert_same(made: Results, expected: Results) -> None:
    """Equal bits of the results that both have, but for signs of zeros."""
    for got, due in zip(made, expected, strict=True):
        if got is not None and due is not None:
            assert_same_bits(without_sign_of_zero(got), without_sign_of_zero(due))


def live_part(layer: Layer, results: Results) -> Results:
    """Results, with zeros for the H of rows of no token, of which only rows of no expert are zeros."""
    if results.hidden is None:
        return results
    live = layer.plan.row_to_token[:, None] >= 0
    return results._replace(hidden=np.where(live, results.hidden, np.zeros(1, results.hidden.dtype)))


def assert_near(made: Results, expected: Results, error: float = FLOAT8_ERROR) -> None:
    """Results that both have differ by at most ``error`` of the norm."""
    for name, got, due in zip(Results._fields, made, expected, strict=True):
        if got is not None and due is not None and name != "hidden_scales":
            got, due = got.astype(np.float64), due.astype(np.float64)
            assert np.linalg.norm(got - due) <= error * np.linalg.norm(due), name
