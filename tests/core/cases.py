# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing problems for the core, and what the oracle makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

# Derandomised, so that a red run stays red; too_slow judges a sanitizer build by the clock.
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

INT32 = np.iinfo(np.int32)
INT64 = np.iinfo(np.int64)


class Shape(NamedTuple):
    """Sizes in the usual letters; H where rows are moved."""

    T: int
    K: int
    E: int
    A: int = 1
    H: int = 0

    def __str__(self) -> str:
        hidden = f"-H{self.H}" if self.H else ""
        return f"T{self.T}{hidden}-E{self.E}-K{self.K}-A{self.A}"


def _distinct(rng: np.random.Generator, shape: Shape) -> NDArray:
    """Each token names min(K, E) different experts, in random order."""
    ids = np.full((shape.T, shape.K), -1, np.int64)
    chosen = np.argsort(rng.random((shape.T, shape.E)), axis=1)[:, : shape.K]
    ids[:, : chosen.shape[1]] = chosen
    return rng.permuted(ids, axis=1)


def _with_holes(rng: np.random.Generator, shape: Shape) -> NDArray:
    return np.where(rng.random((shape.T, shape.K)) < 0.5, -1, _distinct(rng, shape))


def _out_of_range(rng: np.random.Generator, shape: Shape) -> NDArray:
    ids = _distinct(rng, shape)
    bad = rng.choice([-2, -7, shape.E, shape.E + 1, INT32.min, INT32.max], ids.shape)
    return np.where(rng.random(ids.shape) < 0.3, bad, ids)


def _int64_only(rng: np.random.Generator, shape: Shape) -> NDArray:
    """Ids that would be valid if only their low 32 bits counted."""
    ids = _distinct(rng, shape)
    high = rng.choice([1 << 32, -(1 << 32), 1 << 62, INT64.min], ids.shape)
    return np.where(rng.random(ids.shape) < 0.3, ids + high, ids)


MakeIds = Callable[[np.random.Generator, Shape], NDArray]
ROUTINGS: dict[str, MakeIds] = {
    "distinct": _distinct,
    "zipf": lambda rng, s: np.minimum(rng.zipf(1.3, (s.T, s.K)) - 1, s.E - 1),
    "one_expert": lambda rng, s: np.full((s.T, s.K), rng.integers(s.E)),
    "first_experts": lambda rng, s: np.tile(np.arange(s.K) % s.E, (s.T, 1)),
    "half_unassigned": _with_holes,
    "unassigned": lambda rng, s: np.full((s.T, s.K), -1),
    "out_of_range": _out_of_range,
    "duplicates": lambda rng, s: rng.integers(-1, max(1, min(s.E, s.K // 2 + 1)), (s.T, s.K)),
}


def make_ids(kind: str, shape: Shape, seed: int, dtype: DTypeLike = np.int32) -> NDArray:
    return ROUTINGS[kind](np.random.default_rng(seed), shape).astype(dtype)


def make_wide_ids(shape: Shape, seed: int) -> NDArray:
    return _int64_only(np.random.default_rng(seed), shape)


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
    shape: Shape,
    *,
    probs: NDArray | None = None,
    topk: int | None = None,
    duplicates: str = "first",
    num_rows: int = -1,
) -> Problem:
    """`num_rows` -1: the padded rows. A mask is a bool or uint8 array; bool ids do not exist."""
    is_mask = routing.dtype in (np.bool_, np.uint8)
    options: dict[str, Any] = {"padding_alignment": shape.A, "duplicates": duplicates}
    options |= {"topk": topk} if is_mask else {"num_experts": shape.E}
    plan = reference.route(
        routing.astype(np.bool_) if is_mask else routing, probs, buffer_size=num_rows, validate=False, **options
    )
    return Problem(routing, probs, options, plan)


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
        K=draw(st.sampled_from([1, 2, 3, 8, 17, 64])),
        E=draw(st.sampled_from([1, 2, 7, 64, 256, 1024])),
        A=draw(st.sampled_from([1, 2, 16, 128])),
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
        "probs": make_probs(routing.shape, seed) if wants_probs else None,
        "topk": topk,
        "duplicates": draw(st.sampled_from(["first", "each"])),
    }
    exact = make_problem(routing, shape, **options)
    rows = buffer_rows(draw(st.sampled_from(BUFFERS)), exact.plan)
    return make_problem(routing, shape, num_rows=rows, **options)
