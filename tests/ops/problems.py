# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Random inputs for tests of the operators, and conversions from arrays to tensors and back to gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import paddle
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import Plan, reference
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import GENERATORS, random_probs
from tests.params import ALIGNMENTS, Shape
from tests.reference.cases import floats_of_every_kind, ordinary_floats

SEEDS = st.integers(0, 2**32 - 1)
TENSOR_FIELDS = Plan._fields[:10]


def seed_of(rng: np.random.Generator) -> int:
    return int(rng.integers(2**32))


def ordinary(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
    """Finite numbers of size 1."""
    return ordinary_floats(shape, dtype, seed_of(rng))


def every_kind(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
    """Ordinary numbers, subnormals, huge numbers, zeros, infinities and NaN with payloads."""
    return floats_of_every_kind(shape, dtype, seed_of(rng))


class Problem(NamedTuple):
    """Tokens with a clean routing: no bad ids, no duplicates, finite probabilities."""

    shape: Shape
    x: NDArray
    ids: NDArray
    probs: NDArray

    @property
    def route_arguments(self) -> dict[str, Any]:
        return {"num_experts": self.shape.E, "padding_alignment": self.shape.A}

    def plan(self, **options: Any) -> reference.Plan:
        """The oracle's plan."""
        return reference.route(self.ids, self.probs, **{**self.route_arguments, **options})


def make_problem(
    rng: np.random.Generator, shape: Shape, dtype: DTypeLike = np.float32, routing: str = "half_unassigned"
) -> Problem:
    ids = GENERATORS[routing](rng, shape.T, shape.K, shape.E)
    return Problem(shape, ordinary(rng, (shape.T, shape.H), dtype), ids, random_probs(rng, ids))


class Routing(NamedTuple):
    """Arguments of route with `validate=False`: any ids or mask, good or bad."""

    routing: NDArray
    probs: NDArray | None
    arguments: dict[str, Any]

    def oracle(self, **options: Any) -> reference.Plan:
        return reference.route(self.routing, self.probs, **{**self.arguments, **options}, validate=False)


@st.composite
def ids_and_experts(draw: st.DrawFn) -> tuple[NDArray, int]:
    """Expert ids [T, K], good and bad, with E: few tokens one by one, or many from a generator."""
    num_experts = draw(st.one_of(st.integers(1, 12), st.integers(1, 1024)))
    topk = draw(st.one_of(st.integers(1, 8), st.integers(1, 64)))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    if draw(st.booleans()):
        tokens_by_slots = (draw(st.integers(0, 6)), topk)
        elements = st.integers(-1, min(num_experts, 3))  # few values, so that duplicates are the rule
        return draw(hnp.arrays(dtype, tokens_by_slots, elements=elements)), num_experts
    num_tokens = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(SEEDS))
    kind = draw(st.sampled_from([*GENERATORS, "repeated", "out of range", "one expert in all slots"]))
    if kind in GENERATORS:
        ids = GENERATORS[kind](rng, num_tokens, topk, num_experts)
    elif kind == "repeated":
        ids = rng.integers(-1, num_experts, (num_tokens, topk))
    elif kind == "out of range":
        ids = rng.integers(-num_experts - 2, 2 * num_experts + 2, (num_tokens, topk))
        limits = np.iinfo(dtype)
        extremes = rng.choice([limits.min, limits.max], ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.1, extremes, ids)
    else:
        ids = np.full((num_tokens, topk), rng.integers(num_experts))
    return ids.astype(dtype), num_experts


def buffer_sizes(draw: st.DrawFn, needed: int) -> int:
    """-1 for none, 0, one row too few, just enough, more than enough, anything."""
    choices = [-1, -1, 0, max(needed - 1, 0), needed, needed + 20, draw(st.integers(0, needed))]
    return draw(st.sampled_from(choices))


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Everything that route takes: ids and masks, both duplicate rules, padding, buffers of every size."""
    arguments: dict[str, Any] = {"padding_alignment": draw(st.sampled_from([*ALIGNMENTS]))}
    rng = np.random.default_rng(draw(SEEDS))
    if draw(st.integers(0, 2)) == 0:
        num_tokens, num_experts = draw(st.integers(0, 40)), draw(st.integers(1, 100))
        routing = rng.random((num_tokens, num_experts)) < draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
        arguments["topk"] = draw(st.one_of(st.none(), st.integers(1, num_experts)))
    else:
        routing, arguments["num_experts"] = draw(ids_and_experts())
        arguments["duplicates"] = draw(st.sampled_from(["first", "each"]))
    probs = every_kind(rng, routing.shape) if draw(st.booleans()) else None
    needed = Routing(routing, probs, arguments).oracle().num_rows
    arguments["buffer_size"] = buffer_sizes(draw, needed)
    return Routing(routing, probs, arguments)


def tensor(array: NDArray, place: object, *, gradient: bool = False) -> paddle.Tensor:
    made = to_tensor(array, place)
    made.stop_gradient = not gradient
    return made


def optional_tensor(array: NDArray | None, place: object) -> paddle.Tensor | None:
    return None if array is None else tensor(array, place)


def plan_tensors(plan: reference.Plan, place: object) -> Plan:
    """The oracle's plan as the public one, so that a verb is tested apart from route."""
    return Plan(*(tensor(field, place) if isinstance(field, np.ndarray) else field for field in plan))


def assert_plan(plan: Plan, expected: reference.Plan) -> None:
    """Every field has the oracle's bits."""
    for name, got, wanted in zip(Plan._fields, plan, expected, strict=True):
        if wanted is None or name not in TENSOR_FIELDS:
            assert got == wanted, name
        else:
            assert_bits_equal(got, wanted, what=name)


def backward(outputs: Iterable[paddle.Tensor], gradients: Iterable[NDArray]) -> None:
    """Run backward from some outputs with given gradients."""
    outputs = list(outputs)
    paddle.autograd.backward(outputs, [to_tensor(g, out.place) for g, out in zip(gradients, outputs, strict=True)])


def products_in_graphs_are(dtype: Any) -> bool:
    """Return whether products have this dtype under mixed precision, by a program that is built but not run."""
    with paddle.static.program_guard(paddle.static.Program()):
        value = paddle.static.data("value", [2, 2])
        return paddle.matmul(value, value).dtype == dtype


def rounds_before_weights(x: Any) -> bool:
    """Return whether `grouped_gemm` rounds its product before the weights and the bias, and again after them."""
    return not x.place.is_cpu_place() and resolve("grouped_gemm", x).name == "paddle"
