# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing problems for the core, and the oracle's results for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import GENERATORS

from ..params import Shape
from ..reference.cases import assert_same_bits
from .binding import CoreError

# Derandomised, so that a red run stays red.
EXAMPLES = settings(max_examples=60, derandomize=True)

INT32 = np.iinfo(np.int32)
INT64 = np.iinfo(np.int64)

SMALL = Shape(63, 72, 7, 3, 16, "tokens with one, several and no rows, padding, and a remainder of columns")
ODD = Shape(63, 200, 7, 8, 16, "a slot without an expert for every token")
DENSE = Shape(1025, 72, 64, 2, 16, "more tokens than a power of two")
CHUNKED = Shape(1025, 1, 1024, 64, 1, "65600 slots, which are counted in several chunks")
UNEVEN = Shape(16400, 1, 5, 3, 2, "several chunks that do not hold the same number of tokens")
SHAPES = (
    Shape(0, 72, 7, 2, 16, "no tokens: counts, offsets and padding are defined all the same"),
    Shape(1, 7, 1, 1, 1, "one of each, and a row shorter than a vector"),
    Shape(2, 7168, 1024, 64, 2, "the longest rows, the most slots, hardly any expert in use"),
    Shape(2, 72, 7, 8, 128, "more slots than experts, and far more padding than rows"),
    Shape(63, 1, 7, 2, 128, "rows of one element"),
    Shape(63, 72, 64, 64, 1, "every token goes to every expert"),
    ODD,
    Shape(63, 7168, 7, 2, 16, "long rows"),
    Shape(1025, 7, 1024, 8, 1, "the most experts"),
    DENSE,
)


def draw_same_expert(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray:
    return np.full((num_tokens, topk), rng.integers(num_experts))


def draw_duplicates(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray:
    return rng.integers(-1, max(1, min(num_experts, topk // 2 + 1)), (num_tokens, topk))


def draw_out_of_range(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray:
    ids = GENERATORS["uniform"](rng, num_tokens, topk, num_experts)
    bad = rng.choice([-2, -7, num_experts, num_experts + 1, INT32.min, INT32.max], ids.shape)
    return np.where(rng.random(ids.shape) < 0.3, bad, ids)


ROUTINGS = {
    **GENERATORS,
    "same_expert": draw_same_expert,
    "duplicates": draw_duplicates,
    "out_of_range": draw_out_of_range,
}


def make_ids(kind: str, shape: Shape, seed: int, dtype: DTypeLike = np.int32) -> NDArray:
    return ROUTINGS[kind](np.random.default_rng(seed), shape.T, shape.K, shape.E).astype(dtype)


def make_wide_ids(shape: Shape, seed: int) -> NDArray:
    """int64 ids, some of which would be valid if only their low 32 bits counted."""
    rng = np.random.default_rng(seed)
    ids = make_ids("uniform", shape, seed, np.int64)
    high = rng.choice([1 << 32, -(1 << 32), 1 << 62, INT64.min], ids.shape)
    return np.where(rng.random(ids.shape) < 0.3, ids + high, ids)


def few_tokens_of_many_experts(shape: Shape) -> Shape:
    """For masks without a number of slots: a token then has E of them, and 129 tokens are several chunks of slots."""
    return shape._replace(T=min(shape.T, 129)) if shape.E > 1000 else shape


def make_mask(shape: Shape, seed: int, density: float | None = None) -> NDArray:
    """A mask whose tokens set about K experts, some more and some none."""
    rng = np.random.default_rng(seed)
    density = min(1.0, 1.2 * shape.K / shape.E) if density is None else density
    mask = rng.random((shape.T, shape.E)) < density
    return mask & (rng.random((shape.T, 1)) < 0.9)


def make_probs(shape: tuple[int, ...], seed: int) -> NDArray:
    """Probabilities, among them negative zeros, infinities, subnormals and NaN of several payloads."""
    rng = np.random.default_rng(seed)
    probs = rng.random(shape, dtype=np.float32)
    special = np.array([0x80000000, 0x7F800000, 0x00000001, 0x7FC00001, 0xFFA00000], np.uint32).view(np.float32)
    return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), probs)


class Problem(NamedTuple):
    """A routing with its options, and the oracle's tolerant plan."""

    routing: NDArray
    probs: NDArray | None
    options: dict[str, Any]
    plan: reference.Plan

    @property
    def is_mask(self) -> bool:
        return self.routing.dtype in (np.bool_, np.uint8)


def make_problem(
    routing: NDArray,
    num_experts: int,
    padding_alignment: int = 1,
    *,
    probs: NDArray | None = None,
    topk: int | None = None,
    duplicates: str = "first",
    num_rows: int = -1,
) -> Problem:
    """`num_rows` -1: the padded rows. A mask is a bool or uint8 array; it knows its own number of experts."""
    is_mask = routing.dtype in (np.bool_, np.uint8)
    options: dict[str, Any] = {"padding_alignment": padding_alignment, "duplicates": duplicates}
    options |= {"topk": topk} if is_mask else {"num_experts": num_experts}
    plan = reference.route(
        routing.astype(np.bool_) if is_mask else routing, probs, buffer_size=num_rows, validate=False, **options
    )
    return Problem(routing, probs, options, plan)


def make_plan(kind: str, shape: Shape, seed: int, num_rows: int = -1) -> reference.Plan:
    return make_problem(make_ids(kind, shape, seed), shape.E, shape.A, num_rows=num_rows).plan


def assert_equals_plan(actual: dict[str, NDArray], plan: reference.Plan) -> None:
    for name, array in actual.items():
        expected = reference.plan_to_rowmap(plan) if name == "rowmap" else getattr(plan, name)
        try:
            assert_same_bits(array, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def text_of_core(function: Callable[..., Any], *args: Any) -> str | None:
    """The error text of a call of the core, or None."""
    try:
        function(*args)
    except CoreError as error:
        return error.text
    return None


def text_of_oracle(function: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """The oracle's error text without the function's name, or None."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error).partition(": ")[2]
    return None


BUFFERS = ("none", "tiny", "short", "exact", "larger")


def buffer_rows(kind: str, exact: reference.Plan) -> int:
    """Rows of a buffer, from the plan with all rows; "short" has no place for the very last routed row."""
    used = np.flatnonzero(exact.row_to_slot >= 0)
    last = int(used[-1]) if len(used) else 0
    rows = {"none": 0, "tiny": min(3, exact.num_rows), "short": last, "exact": exact.num_rows}
    return rows.get(kind, exact.num_rows + 7)


@st.composite
def problems(draw: st.DrawFn, *, with_probs: bool | None = None) -> Problem:
    """Any routing of a few tokens: ids or masks, every skew, bad ids, duplicates, buffers of every size."""
    shape = Shape(
        T=draw(st.integers(0, 40)),
        H=0,
        E=draw(st.sampled_from([1, 2, 7, 64, 256, 1024])),
        K=draw(st.sampled_from([1, 2, 3, 8, 17, 64])),
        A=draw(st.sampled_from([1, 2, 16, 128])),
        reason="drawn",
    )
    seed = draw(st.integers(0, 1 << 30))
    topk = None
    if draw(st.booleans()):
        routing: NDArray = make_mask(shape, seed).astype(draw(st.sampled_from([np.bool_, np.uint8])))
        topk = draw(st.sampled_from([None, min(shape.K, shape.E), 1]))
    else:
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        routing = make_ids(draw(st.sampled_from(sorted(ROUTINGS))), shape, seed, dtype)
    wants_probs = draw(st.booleans()) if with_probs is None else with_probs
    options: dict[str, Any] = {
        "num_experts": shape.E,
        "padding_alignment": shape.A,
        "probs": make_probs(routing.shape, seed) if wants_probs else None,
        "topk": topk,
        "duplicates": draw(st.sampled_from(["first", "each"])),
    }
    exact = make_problem(routing, **options)
    rows = buffer_rows(draw(st.sampled_from(BUFFERS)), exact.plan)
    return make_problem(routing, num_rows=rows, **options)
