# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Random inputs and comparisons for tests of the oracle."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from . import brute_force

EXAMPLES = settings(max_examples=60, deadline=None)
SUM_DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
ROW_DTYPES = (*SUM_DTYPES, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


class Case(NamedTuple):
    """One call of route, by the oracle (``plan``) and by loops (``loops``)."""

    routing: NDArray
    probs: NDArray | None
    plan: reference.Plan
    loops: brute_force.Routing


@st.composite
def routing_cases(
    draw: st.DrawFn, *, is_mask: bool | None = None, duplicates: str | None = None, with_capacity: bool = True
) -> Case:
    """Any routing: bad ids, duplicates, empty and full experts, all to one, T = 0, padding, buffers of every size."""
    is_mask = draw(st.booleans()) if is_mask is None else is_mask
    num_tokens = draw(st.integers(0, 9))
    num_experts = draw(st.integers(1, 20))
    alignment = draw(st.sampled_from([1, 2, 3, 16]))
    rule = draw(st.sampled_from(["first", "each"])) if duplicates is None else duplicates
    if is_mask:
        topk = draw(st.integers(1, num_experts))
        routing = draw(hnp.arrays(np.bool_, (num_tokens, num_experts)))
    else:
        topk = draw(st.integers(1, 8))
        one = draw(st.integers(0, num_experts - 1))
        low, high = draw(st.sampled_from([(-3, num_experts + 2), (0, num_experts - 1), (one, one), (-1, -1)]))
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        routing = draw(hnp.arrays(dtype, (num_tokens, topk), elements=st.integers(low, high)))
    probs = None
    if draw(st.booleans()):
        probs = draw(hnp.arrays(np.float32, routing.shape, elements=st.floats(width=32)))

    ids, slot_probs = routing.tolist(), None if probs is None else probs.tolist()
    if is_mask:
        ids, slot_probs = brute_force.mask_to_slots(ids, slot_probs, topk)
    capacity = draw(st.one_of(st.none(), st.integers(0, 6))) if with_capacity else None
    whole = brute_force.route(ids, slot_probs, num_experts, topk, alignment, -1, rule, capacity)
    buffer_size = draw(st.one_of(st.just(-1), st.just(whole.num_rows), st.integers(0, whole.num_rows + 20)))
    plan = reference.route(
        routing,
        probs,
        num_experts=num_experts,
        padding_alignment=alignment,
        buffer_size=buffer_size,
        topk=topk if is_mask else None,
        duplicates=rule,
        capacity=capacity,
        validate=False,
    )
    loops = brute_force.route(ids, slot_probs, num_experts, topk, alignment, buffer_size, rule, capacity)
    return Case(routing, probs, plan, loops)


def floats_of_every_kind(shape: tuple[int, ...], dtype: DTypeLike, seed: int) -> NDArray:
    """Ordinary numbers, random bits (subnormals, huge numbers, NaN with payloads), zeros and infinities."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    word = np.dtype(f"u{values.dtype.itemsize}")
    noise = rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True).view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)[rng.integers(0, 4, shape)]
    with np.errstate(all="ignore"):
        special = special.astype(dtype)
    kind = rng.random(shape)
    return np.where(kind < 0.6, values, np.where(kind < 0.9, noise, special))


def ordinary_floats(shape: tuple[int, ...], dtype: DTypeLike, seed: int) -> NDArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def assert_same_bits(actual: NDArray, expected: NDArray) -> None:
    """Same dtype, shape and bits."""
    assert actual.dtype == expected.dtype
    word = np.dtype(f"u{expected.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(word), np.ascontiguousarray(expected).view(word), strict=True
    )


def assert_same_numbers(actual: NDArray, expected: NDArray) -> None:
    """Same dtype, shape and bits, where any NaN equals any NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    assert_same_bits(
        np.where(both_nan, np.zeros_like(actual), actual),
        np.where(both_nan, np.zeros_like(expected), expected),
    )
