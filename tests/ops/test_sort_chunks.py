# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""sort_chunks: chunks of rows in another order, bit for bit, with gradients that go back the same way."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import reference, sort_chunks
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import SEEDS, backward, every_kind, optional_tensor, ordinary, tensor
from tests.params import FLOAT8_DTYPES, HIDDEN_SIZES, ROW_DTYPES, SUM_DTYPES


def chunks(rng, num_rows, num_chunks):
    """Uneven sizes, some of them 0, that leave a few rows over, and an order."""
    shares = rng.dirichlet(np.full(num_chunks, 0.3)) if num_chunks else []
    sizes = rng.multinomial(num_rows - num_rows // 7, shares) if num_chunks else np.zeros(0, np.int64)
    return sizes, rng.permutation(num_chunks)


def check(x, sizes, order, probs, place, **options):
    arrays = tensor(sizes, place), tensor(order, place)
    actual = sort_chunks(tensor(x, place), *arrays, optional_tensor(probs, place), **options)
    expected = reference.sort_chunks(x, sizes, order, probs, **options)
    assert_bits_equal(actual[0], expected[0], what="rows")
    assert_bits_equal(actual[2], expected[2], what="source_to_dest")
    if probs is None:
        assert actual[1] is None
    else:
        assert_bits_equal(actual[1], expected[1], any_nan=probs.dtype != np.float32, what="probs")
    assert actual[2].stop_gradient


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_rows_of_every_width_and_dtype(dtype, hidden, rng, place, backend):
    sizes, order = chunks(rng, 63, 9)
    check(every_kind(rng, (63, hidden), dtype), sizes, order, every_kind(rng, (63,)), place)


@given(
    num_rows=st.sampled_from([0, 1, 63, 1025]),
    num_chunks=st.sampled_from([0, 1, 2, 64, 300, 1100]),
    dtype=st.sampled_from(ROW_DTYPES),
    kinds=st.tuples(st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64])),
    probs_dtype=st.sampled_from([None, *SUM_DTYPES]),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_any_number_of_chunks_equals_the_oracle(num_rows, num_chunks, dtype, kinds, probs_dtype, seed, place):
    rng = np.random.default_rng(seed)
    sizes, order = chunks(rng, num_rows, num_chunks)
    probs = None if probs_dtype is None else every_kind(rng, (num_rows,), probs_dtype)
    check(every_kind(rng, (num_rows, 5), dtype), sizes.astype(kinds[0]), order.astype(kinds[1]), probs, place)


@given(sizes=st.lists(st.integers(-4, 30), max_size=8), order=st.lists(st.integers(-2, 9), min_size=8, max_size=8))
@settings(max_examples=60)
def test_bad_chunks_give_a_permutation_without_validation(sizes, order, place):
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    arrays = np.array(sizes, np.int64), np.array(order[: len(sizes)], np.int64)
    check(x, *arrays, None, place, validate=False)


@pytest.mark.parametrize("wants", ["x", "probs", "x probs"])
@pytest.mark.parametrize("probs_dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_gradients_go_back_the_same_way(dtype, probs_dtype, wants, rng, place, backend):
    sizes, order = chunks(rng, 63, 9)
    x, probs = every_kind(rng, (63, 7), dtype), every_kind(rng, (63,), probs_dtype)
    d_out, d_probs_out = every_kind(rng, (63, 7), dtype), every_kind(rng, (63,), probs_dtype)
    x_tensor, probs_tensor = tensor(x, place, gradient="x" in wants), tensor(probs, place, gradient="probs" in wants)
    out, probs_out, _ = sort_chunks(x_tensor, tensor(sizes, place), tensor(order, place), probs_tensor)
    wanted = {"x": (out, d_out), "probs": (probs_out, d_probs_out)}
    outputs, gradients = zip(*(wanted[name] for name in wants.split()), strict=True)
    backward(list(outputs), list(gradients))
    source_to_dest = reference.chunk_sort_map(sizes, order, 63)
    if "x" in wants:
        assert_bits_equal(x_tensor.grad, reference.sort_chunks_backward(d_out, source_to_dest), what="d_x")
    if "probs" in wants:
        expected = reference.sort_chunks_backward(d_probs_out, source_to_dest)
        assert_bits_equal(probs_tensor.grad, expected, any_nan=probs_dtype != np.float32, what="d_probs")


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_probabilities_of_float8_rows_are_differentiable(dtype, rng, place, backend):
    sizes, order = chunks(rng, 63, 9)
    x, probs, d_probs_out = every_kind(rng, (63, 7), dtype), every_kind(rng, (63,)), every_kind(rng, (63,))
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    out, probs_out, source_to_dest = sort_chunks(x_tensor, tensor(sizes, place), tensor(order, place), probs_tensor)
    assert out.stop_gradient
    backward([probs_out], [d_probs_out])
    assert_bits_equal(out, reference.sort_chunks(x, sizes, order)[0])
    assert_bits_equal(probs_tensor.grad, d_probs_out[source_to_dest.numpy()])


def test_rows_may_be_strided(rng, place, backend):
    x, (sizes, order) = ordinary(rng, (63, 24)), chunks(rng, 63, 5)
    strided = tensor(x, place)[:, ::2]
    out, _, _ = sort_chunks(strided, tensor(sizes, place), tensor(order, place))
    assert_bits_equal(out, reference.sort_chunks(np.ascontiguousarray(x[:, ::2]), sizes, order)[0])


GOOD = {
    "x": np.zeros((6, 2), np.float32),
    "split_sizes": np.array([1, 2, 3]),
    "order": np.array([2, 0, 1], np.int32),
    "probs": np.zeros(6, np.float32),
}
IDS = "of dtype int32 or int64"
BAD = [
    ({"x": None}, TypeError, "x must be a paddle.Tensor, but got NoneType"),
    ({"x": np.zeros((6, 2), np.int32)}, TypeError, "x must be of dtype bfloat16, float16, float32, float8_e4m3fn or"),
    ({"x": np.zeros(6, np.float32)}, ValueError, "x must be of shape [num_rows, hidden], but got [6]"),
    ({"x": np.zeros((6, 0), np.float32)}, ValueError, "x must be of shape [num_rows, hidden] with hidden >= 1, but"),
    ({"split_sizes": [1, 2, 3]}, TypeError, "split_sizes must be a paddle.Tensor, but got list"),
    ({"split_sizes": np.ones(3, np.float32)}, TypeError, f"split_sizes must be {IDS}, but got float32"),
    (
        {"split_sizes": np.ones((3, 1), np.int32)},
        ValueError,
        "split_sizes must be of shape [num_chunks], but got [3, 1]",
    ),
    ({"order": np.ones(3, np.float32)}, TypeError, f"order must be {IDS}, but got float32"),
    ({"order": np.arange(2)}, ValueError, "order must be of shape [3], but got [2]"),
    ({"probs": np.zeros(6, np.int32)}, TypeError, "probs must be of dtype bfloat16, float16 or float32, but got int32"),
    ({"probs": np.zeros(5, np.float32)}, ValueError, "probs must be of shape [6], but got [5]"),
    ({"validate": 1}, TypeError, "validate must be True, False or None, but got 1 of type int"),
]
BAD_DATA = [
    ({"split_sizes": np.array([1, -2, 3])}, "split_sizes must hold no negative numbers, but entry 1 is -2"),
    (
        {"split_sizes": np.array([1, 2, 4])},
        "split_sizes must add up to at most 6, the number of rows, but the sum exceeds this at entry 2",
    ),
    ({"order": np.array([2, 0, 3])}, "order must hold chunks in [0, 3), but entry 2 is 3"),
    ({"order": np.array([2, 0, 2])}, "order must name every chunk once, but names chunk 2 in entries 0 and 2"),
]


def call(changes, place):
    arguments = {**GOOD, **changes}
    made = {name: tensor(value, place) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    return sort_chunks(**made)


@pytest.mark.parametrize(("changes", "error", "text"), BAD, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_named(changes, error, text, place):
    with pytest.raises(error, match=re.escape(f"sort_chunks: {text}")):
        call(changes, place)


@pytest.mark.parametrize(("changes", "text"), BAD_DATA, ids=lambda value: str(value)[:40])
def test_bad_data_are_named_under_validation(changes, text, place, backend):
    with pytest.raises(ValueError, match=rf"^{re.escape(f'sort_chunks: {text}')}$"):
        call({**changes, "validate": True}, place)
    call({**changes, "validate": False}, place)


def test_no_grad_is_respected(place, backend):
    x = tensor(GOOD["x"], place, gradient=True)
    with paddle.no_grad():
        out, _, _ = sort_chunks(x, tensor(GOOD["split_sizes"], place), tensor(GOOD["order"], place))
    assert out.stop_gradient
