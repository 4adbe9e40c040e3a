# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute and moe_unpermute: Paddle's documented example, output shapes, the row map, compat, loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import (
    moe_permute,
    moe_unpermute,
    moe_unpermute_backward,
    plan_to_rowmap,
    rowmap_to_token_rows,
)

from . import brute_force
from .cases import (
    EXAMPLES,
    SUM_DTYPES,
    Case,
    assert_same_bits,
    assert_same_numbers,
    floats_of_every_kind,
    ordinary_floats,
    routing_cases,
)

# The inputs of the example in Paddle's documentation: 3 tokens, 8 slots, 3 experts, alignment 2.
EXAMPLE_IDS = np.array(
    [[-1, 0, -1, -1, 2, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1, -1], [-1, -1, -1, -1, -1, -1, 1, -1]],
    np.int32,
)
EXAMPLE_PROBS = np.array(
    [
        [0.0, 0.6, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    ],
    np.float32,
)


def permute_example(x: NDArray, scale: NDArray | None = None, **arguments) -> tuple[NDArray, ...]:
    return moe_permute(x, scale, EXAMPLE_IDS, EXAMPLE_PROBS, 3, [1, 2, 1], 2, **arguments)


def test_documented_example_of_moe_permute() -> None:
    x = ordinary_floats((3, 128), ml_dtypes.bfloat16, 0)
    rows, rowmap, probs, scale = permute_example(x)
    assert_same_bits(rows, np.concatenate([x[[0]], x[[0]] * 0, x[[1]], x[[2]], x[[0]], x[[0]] * 0]) + 0)
    assert rowmap.dtype == np.int32
    assert rowmap.tolist() == [[0, -1, 4], [-1, 2, -1], [-1, 3, -1]]
    assert_same_bits(probs, np.array([0.6, 0, 1, 1, 0.4, 0], np.float32))
    assert (scale.shape, scale.dtype) == ((0,), np.float32)


def test_documented_example_comes_back() -> None:
    x = ordinary_floats((3, 128), ml_dtypes.bfloat16, 0)
    rows, rowmap, probs, _ = permute_example(x)
    weighted = (rows.astype(np.float32) * probs[:, None]).astype(ml_dtypes.bfloat16)
    hidden, prob_topk = moe_unpermute(weighted, rowmap, EXAMPLE_IDS, probs, 3, 3)
    assert_same_bits(hidden[1:], x[1:])
    np.testing.assert_allclose(hidden.astype(np.float32), x.astype(np.float32), rtol=2**-7)
    assert_same_bits(prob_topk, EXAMPLE_PROBS)
    combined, _ = moe_unpermute(rows, rowmap, EXAMPLE_IDS, probs, 3, 3, using_weighted_combine=True)
    assert_same_bits(combined, x)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("scale_dtype", [np.float32, np.int32])
def test_scales_travel_with_the_rows(dtype: DTypeLike, scale_dtype: DTypeLike) -> None:
    scale = np.array([[1, 2], [3, 4], [5, 6]], scale_dtype)
    rows, _, _, scales = permute_example(
        ordinary_floats((3, 128), dtype, 0), scale, using_ue8m0_scale=scale_dtype == np.int32
    )
    assert (rows.shape, rows.dtype) == ((6, 128), dtype)
    assert_same_bits(scales, scale[[0, 0, 1, 2, 0, 0]] * np.array([[1], [0], [1], [1], [1], [0]], scale_dtype))


@pytest.mark.parametrize("scale_dtype", [None, np.float32, np.int32])
@pytest.mark.parametrize("buffer_size", [-1, 9])
def test_without_gather_only_the_rows_and_scales_are_missing(scale_dtype: DTypeLike | None, buffer_size: int) -> None:
    x = ordinary_floats((3, 128), ml_dtypes.bfloat16, 0)
    scale = None if scale_dtype is None else np.ones((3, 1), scale_dtype)
    arguments = {
        "return_expert_indices": True,
        "return_overflow": True,
        "override_buffer_size": buffer_size,
    }
    whole = permute_example(x, scale, **arguments)
    maps_only = permute_example(x, scale, do_gather=False, **arguments)
    assert (maps_only[0].shape, maps_only[0].dtype) == ((0, 128), x.dtype)
    assert (maps_only[3].shape, maps_only[3].dtype) == ((0,), scale_dtype or np.float32)
    for place in (1, 2, 4, 5):
        assert_same_bits(maps_only[place], whole[place])


def test_optional_outputs_come_in_order() -> None:
    x = np.ones((3, 2), np.float32)
    assert len(permute_example(x)) == 4
    indices = permute_example(x, return_expert_indices=True)[4:]
    overflow = permute_example(x, return_overflow=True, override_buffer_size=4)[4:]
    assert [(out.dtype, out.tolist()) for out in indices] == [(np.int32, [0, -1, 1, 1, 2, -1])]
    assert [(out.dtype, out.tolist()) for out in overflow] == [(np.int32, 1)]
    both = permute_example(x, return_expert_indices=True, return_overflow=True)[4:]
    assert [out.tolist() for out in both] == [[0, -1, 1, 1, 2, -1], 0]


@pytest.mark.parametrize("buffer_size", [-1, 0, 5])
def test_no_tokens_give_defined_outputs(buffer_size: int) -> None:
    x, scale = np.zeros((0, 4), ml_dtypes.bfloat16), np.zeros((0, 2), np.float32)
    ids, probs = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)
    rows, rowmap, token_prob, scales, indices, overflow = moe_permute(
        x,
        scale,
        ids,
        probs,
        3,
        [0, 0, 0],
        2,
        override_buffer_size=buffer_size,
        return_expert_indices=True,
        return_overflow=True,
    )
    num_rows = max(buffer_size, 0)
    assert [out.shape for out in (rows, rowmap, token_prob, scales)] == [
        (num_rows, 4),
        (0, 3),
        (num_rows,),
        (num_rows, 2),
    ]
    assert not rows.any()
    assert not token_prob.any()
    assert not scales.any()
    assert (indices.tolist(), overflow.tolist()) == ([-1] * num_rows, 0)
    hidden, prob_topk = moe_unpermute(rows, rowmap, ids, token_prob, 0, 3)
    assert (hidden.shape, prob_topk.shape) == ((0, 4), (0, 2))


def test_no_rows_give_zeros() -> None:
    ids = np.array([[-1, 0]], np.int32)
    hidden, prob_topk = moe_unpermute(
        np.zeros((0, 2), np.float32), np.full((1, 3), -1), ids, np.zeros(0, np.float32), 1, 3
    )
    assert (hidden.tolist(), prob_topk.tolist()) == ([[0, 0]], [[0, 0]])


@EXAMPLES
@given(routing_cases(duplicates="first"))
def test_rowmap_and_compact_rows_say_the_same(case: Case) -> None:
    rowmap = plan_to_rowmap(case.plan)
    assert rowmap.dtype == np.int32
    for token, line in enumerate(case.loops.token_rows):
        expected = [-1] * case.plan.num_experts
        for row in line:
            if row >= 0:
                expected[case.loops.row_to_expert[row]] = row
        assert rowmap[token].tolist() == expected
    token_rows = rowmap_to_token_rows(rowmap, case.plan.num_rows, validate=True, function="test")
    width = min(case.plan.topk, case.plan.num_experts)
    np.testing.assert_array_equal(token_rows[:, :width], case.plan.token_rows[:, :width])
    assert (token_rows[:, width:] == -1).all()


@st.composite
def unpermute_calls(draw: st.DrawFn) -> tuple:
    """Any row map (repeats, out of range), any ids, and the usable map as the loops see it."""
    num_tokens, num_experts, num_rows = (
        draw(st.integers(0, 5)),
        draw(st.integers(1, 6)),
        draw(st.integers(0, 12)),
    )
    if draw(st.booleans()):
        places = draw(st.permutations(range(num_tokens * num_experts)))
        rowmap = np.array([row if row < num_rows else -1 for row in places], np.int32)
        rowmap = rowmap.reshape(num_tokens, num_experts)
    else:
        entries = st.integers(-2, num_rows + 1)
        rowmap = draw(hnp.arrays(np.int32, (num_tokens, num_experts), elements=entries))
    topk = draw(st.integers(1, 5))
    ids = draw(hnp.arrays(np.int32, (num_tokens, topk), elements=st.integers(-2, num_experts + 1)))
    usable = brute_force.usable_rowmap(rowmap.tolist(), num_rows)
    return rowmap, ids, num_rows, usable


@EXAMPLES
@given(
    unpermute_calls(),
    st.sampled_from(SUM_DTYPES),
    st.booleans(),
    st.sampled_from([None, "paddle"]),
    st.integers(0, 2**32 - 1),
)
def test_moe_unpermute_equals_loops(
    call: tuple, dtype: DTypeLike, weighted: bool, compat: str | None, seed: int
) -> None:
    rowmap, ids, num_rows, usable = call
    y = floats_of_every_kind((num_rows, 3), dtype, seed)
    probs = floats_of_every_kind((num_rows,), np.float32, seed + 1)
    hidden, prob_topk = moe_unpermute(
        y,
        rowmap,
        ids,
        probs,
        len(ids),
        rowmap.shape[1],
        using_weighted_combine=weighted,
        compat=compat,
        validate=False,
    )
    weights = brute_force.numbers(probs) if weighted else None
    copy_single = not weighted or compat == "paddle"
    assert_same_numbers(hidden, brute_force.sum_rows(y, usable, weights, copy_single))
    read = brute_force.rows_read_by_slots(usable, ids.tolist(), first_only=compat is None)
    flat = [row for line in read for row in line]
    assert_same_bits(prob_topk, brute_force.gather(probs, flat).reshape(ids.shape))


@EXAMPLES
@given(
    unpermute_calls(),
    st.sampled_from(SUM_DTYPES),
    st.booleans(),
    st.sampled_from([None, "paddle"]),
    st.integers(0, 2**32 - 1),
)
def test_moe_unpermute_backward_equals_loops(
    call: tuple, dtype: DTypeLike, weighted: bool, compat: str | None, seed: int
) -> None:
    rowmap, ids, num_rows, usable = call
    row_to_token, copied = [-1] * num_rows, [not weighted] * num_rows
    for token, line in enumerate(usable):
        rows = [row for row in line if row >= 0]
        for row in rows:
            row_to_token[row] = token
            copied[row] |= compat == "paddle" and len(rows) == 1
    d_hidden = ordinary_floats((len(ids), 3), dtype, seed)
    d_prob = ordinary_floats(ids.shape, np.float32, seed + 1)
    y = ordinary_floats((num_rows, 3), dtype, seed + 2)
    probs = ordinary_floats((num_rows,), np.float32, seed + 3)
    d_y, d_token_prob = moe_unpermute_backward(
        d_hidden, d_prob, y, rowmap, ids, probs, using_weighted_combine=weighted, compat=compat
    )

    d_copies = brute_force.gather(d_hidden, row_to_token)
    d_weighted = brute_force.weighted_rows(d_hidden, row_to_token, brute_force.numbers(probs))
    assert_same_bits(d_y, np.where(np.array(copied, bool)[:, None], d_copies, d_weighted))
    dots = brute_force.dot_products(d_hidden, y, row_to_token)
    expected = np.where(copied, 0, np.array(dots, np.float32)).astype(np.float32)
    for rows, values in zip(
        brute_force.rows_read_by_slots(usable, ids.tolist(), first_only=compat is None), d_prob, strict=True
    ):
        for row, value in zip(rows, values, strict=True):
            if row >= 0:
                expected[row] += value
    assert (d_token_prob.dtype, d_token_prob.shape) == (np.float32, probs.shape)
    np.testing.assert_allclose(d_token_prob, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("of_first_row", [5, -0.0])
def test_gradient_of_the_probability_output_is_a_copy_when_it_comes_alone(of_first_row: float) -> None:
    rowmap, ids = np.array([[0, 2]], np.int32), np.array([[1, 0, -1]], np.int32)
    y, probs = np.ones((3, 1), np.float32), np.ones(3, np.float32)
    d_prob = np.array([[-0.0, of_first_row, 7]], np.float32)
    _, d_token_prob = moe_unpermute_backward(np.ones((1, 1), np.float32), d_prob, y, rowmap, ids, probs)
    assert_same_bits(d_token_prob, np.array([of_first_row, 0.0, -0.0], np.float32))


def test_a_token_with_one_row_is_weighted_unless_paddle_is_asked_for() -> None:
    rowmap, ids = np.array([[0, -1], [1, 2]], np.int32), np.array([[0, -1], [0, 1]], np.int32)
    y = np.array([[1], [1], [1]], ml_dtypes.bfloat16)
    probs = np.array([[0.5], [0.25], [0.5]], np.float32)
    call = (y, rowmap, ids, probs, 2, 2, True, True)
    assert moe_unpermute(*call)[0].tolist() == [[0.5], [0.75]]
    assert moe_unpermute(*call, compat="paddle")[0].tolist() == [[1], [0.75]]
    d_hidden = np.array([[8], [16]], ml_dtypes.bfloat16)
    for compat, d_y, d_probs in [
        (None, [[4], [4], [8]], [[8], [16], [16]]),
        ("paddle", [[8], [4], [8]], [[0], [16], [16]]),
    ]:
        gradients = moe_unpermute_backward(
            d_hidden, None, y, rowmap, ids, probs, using_weighted_combine=True, compat=compat
        )
        assert [gradient.tolist() for gradient in gradients] == [d_y, d_probs]


def test_the_sum_follows_the_rowmap_whatever_the_ids_say() -> None:
    rowmap, ids = np.array([[1, 0]], np.int32), np.array([[-1]], np.int32)
    y = np.array([[2.0**24], [1.0]], np.float32)
    hidden, prob_topk = moe_unpermute(y, rowmap, ids, np.ones(2, np.float32), 1, 2)
    assert (hidden.tolist(), prob_topk.tolist()) == ([[2.0**24]], [[0]])


def test_mixed_precision_switch_changes_nothing() -> None:
    x = ordinary_floats((3, 128), ml_dtypes.bfloat16, 0)
    rows, rowmap, probs, _ = permute_example(x)
    results = [moe_unpermute(rows, rowmap, EXAMPLE_IDS, probs, 3, 3, mixed)[0] for mixed in (False, True)]
    assert_same_bits(*results)
