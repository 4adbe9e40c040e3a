# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The shipped helpers: routings are what they say, comparisons can fail, tolerances are neither loose nor too tight."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paddle_moe_ops as ops
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from paddle_moe_ops.testing import selftest
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from paddle_moe_ops.testing.routing import (
    GENERATORS,
    all_to_one,
    all_unassigned,
    expert_parallel_sparse,
    first_experts,
    half_unassigned,
    random_probs,
    uniform,
    zipf,
)
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.problems import SEEDS
from tests.params import HIDDEN_SIZES, ROW_DTYPES, SUM_DTYPES


@pytest.mark.cpu_only
@pytest.mark.parametrize("size", [1, 16, 1000, 10**6])
def test_new_tensors_hold_poison(size, poison):
    assert (paddle.empty([size], "int8").cpu().numpy().view(np.uint8) == poison).all()


# ---- routings


@given(
    name=st.sampled_from([*GENERATORS]),
    num_tokens=st.integers(0, 30),
    topk=st.integers(1, 64),
    num_experts=st.integers(1, 1024),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_routings_are_clean_and_repeatable(name, num_tokens, topk, num_experts, seed):
    def draw():
        return GENERATORS[name](np.random.default_rng(seed), num_tokens, topk, num_experts)

    ids = draw()
    assert (ids.dtype, ids.shape) == (np.int32, (num_tokens, topk))
    assert ((ids >= -1) & (ids < num_experts)).all()
    for line in ids:
        assigned = line[line >= 0]
        assert len(set(assigned)) == len(assigned)
    assert_bits_equal(draw(), ids)


def counts(ids, num_experts):
    return np.bincount(ids[ids >= 0], minlength=num_experts)


def test_uniform_is_balanced_and_uses_every_slot(rng):
    ids = uniform(rng, 4000, 4, 16)
    assert (ids >= 0).all()
    np.testing.assert_allclose(counts(ids, 16), 1000, rtol=0.15)


def test_zipf_has_hot_and_cold_experts(rng):
    loads = np.sort(counts(zipf(rng, 4000, 2, 64), 64))
    assert loads[-1] > 20 * loads[0]
    assert loads[-1] < 2500  # with an exponent of 2 some 3,500
    assert loads[-1] > 1.5 * loads[-2]  # the second is drawn half as often
    assert (counts(zipf(rng, 4000, 2, 64, exponent=0.0), 64) > 60).all()


def test_extreme_routings(rng):
    assert np.count_nonzero(counts(all_to_one(rng, 50, 3, 8), 8)) == 1
    assert counts(all_to_one(rng, 50, 3, 8), 8).sum() == 50
    np.testing.assert_array_equal(counts(first_experts(rng, 50, 3, 8), 8), [50, 50, 50, 0, 0, 0, 0, 0])
    assert (all_unassigned(rng, 50, 3, 8) == -1).all()
    assert 0.45 < (half_unassigned(rng, 2000, 3, 8) >= 0).mean() < 0.55


def test_expert_parallel_routing_has_one_slot_or_a_few_per_token(rng):
    valid = (expert_parallel_sparse(rng, 5000, 10, 8) >= 0).sum(axis=1)
    assert valid.min() == 1
    assert valid.mean() == pytest.approx(1.4, abs=0.05)
    assert (expert_parallel_sparse(rng, 100, 3, 1) >= 0).sum() == 100


def test_probabilities_sum_to_one_over_assigned_slots(rng):
    ids = half_unassigned(rng, 200, 4, 8)
    probs = random_probs(rng, ids)
    assert probs.dtype == np.float32
    assert (probs[ids >= 0] > 0).all()
    assert not probs[ids < 0].any()
    np.testing.assert_allclose(probs.sum(axis=1), (ids >= 0).any(axis=1), rtol=1e-6)


# ---- equality


def test_equal_bits_pass_for_tensors_and_arrays_of_every_dtype(place):
    for dtype in ROW_DTYPES:
        array = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
        assert_bits_equal(array, array.copy())
    assert_bits_equal(paddle.to_tensor([1, 2], place=place), np.array([1, 2]))
    assert_bits_equal(np.float32(2.0), np.float32(2.0))
    assert_bits_equal(np.zeros((0, 3)), np.zeros((0, 3)))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (np.float32([1, 0]), np.float32([1, -0.0]), "out: 1 of 2 elements differ, first at [1]: "
         "0.0 (0x00000000) instead of -0.0 (0x80000000)"),
        (np.zeros(2, np.float32), np.zeros(2), "out: dtype float32 instead of float64"),
        (np.zeros((2, 1)), np.zeros(2), "out: shape [2, 1] instead of [2]"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [0, 0]]), "out: 2 of 4 elements differ, first at [1, 0]: "
         "3 (0x0000000000000003) instead of 0 (0x0000000000000000)"),
        (np.ones(1, ml_dtypes.bfloat16), np.zeros(1, ml_dtypes.bfloat16), "out: 1 of 1 elements differ, first at "
         "[0]: 1.0 (0x3f80) instead of 0.0 (0x0000)"),
        (np.array(True), np.array(False), "out: 1 of 1 elements differ, first at []: "
         "True (0x01) instead of False (0x00)"),
    ],
    ids=["sign of zero", "dtype", "shape", "first place", "narrow dtype", "0-D"],
)  # fmt: skip
def test_different_bits_fail_and_the_message_says_where(actual, expected, message):
    with pytest.raises(AssertionError, match="^" + re.escape(message) + "$"):
        assert_bits_equal(actual, expected, what="out")


def test_any_nan_equals_any_nan_only_on_request():
    quiet, payload = np.uint32([0x7FC00000, 1]).view(np.float32), np.uint32([0xFF800123, 1]).view(np.float32)
    assert_bits_equal(quiet, payload, any_nan=True)
    with pytest.raises(AssertionError, match="0x7fc00000"):
        assert_bits_equal(quiet, payload)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bits_equal(quiet, np.float32([1, 1]), any_nan=True)


def test_a_sequence_of_another_length_fails():
    with pytest.raises(ValueError, match="longer than argument 1"):
        assert_all_bits_equal([np.zeros(1)], [np.zeros(1), np.zeros(1)], ["a", "b"])


# ---- tolerances


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_a_dot_product_that_misses_a_column_is_out_of_tolerance(hidden, rng):
    a, b = rng.standard_normal((2, 50, hidden), np.float32)
    products = a.astype(np.float64) * b
    exact, magnitude = products.sum(axis=1), np.abs(products).sum(axis=1)
    tolerance = dtype_tols(np.float32, dot_chain(hidden))
    lanes = np.zeros((50, 16), np.float32)
    for begin in range(0, hidden, 16):  # the order of additions of the CPU operators
        piece = a[:, begin : begin + 16] * b[:, begin : begin + 16]
        lanes[:, : piece.shape[1]] += piece
    assert_close_sums(lanes.sum(axis=1), exact.astype(np.float32), magnitude, tolerance, what="dot")
    without_last = (products.sum(axis=1) - products[:, -1]).astype(np.float32)
    with pytest.raises(AssertionError, match="times the allowed error"):
        assert_close_sums(without_last, exact.astype(np.float32), magnitude, tolerance, what="dot")


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_sums_in_the_opposite_order_are_within_tolerance(dtype, rng):
    terms = rng.standard_normal((1000, 8), np.float32).astype(dtype).astype(np.float32)
    forward, backward = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    for k in range(8):
        forward, backward = forward + terms[:, k], backward + terms[:, 7 - k]
    arguments = (np.abs(terms).sum(axis=1), dtype_tols(dtype, 8))
    assert_close_sums(backward.astype(dtype), forward.astype(dtype), *arguments, what="sum")
    with pytest.raises(AssertionError, match="instead of"):
        assert_close_sums((backward - terms[:, 0]).astype(dtype), forward.astype(dtype), *arguments, what="sum")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_never_within_tolerance(value):
    tolerance = dtype_tols(np.float32, 4)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_close_sums(np.float32([1, value]), np.float32([1, 1]), np.ones(2), tolerance, what="sum")


def test_a_sum_of_nothing_may_be_off_by_the_smallest_step():
    step, zeros = 2.0**-24, np.zeros(2, np.float16)
    arguments = (zeros, np.zeros(2), dtype_tols(np.float16, 4))
    assert_close_sums(np.float16([0, step]), *arguments, what="sum")
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_close_sums(np.float16([0, 2 * step]), *arguments, what="sum")


def test_another_dtype_or_shape_is_never_within_tolerance():
    tolerance = dtype_tols(np.float32, 4)
    with pytest.raises(AssertionError, match=re.escape("sum: float64 [2] instead of float32 [2]")):
        assert_close_sums(np.ones(2), np.ones(2, np.float32), np.ones(2), tolerance, what="sum")


# ---- selftest


@pytest.mark.compiled_only
@pytest.mark.parametrize(("number", "name"), [*enumerate(("rows", "rowmap", "probabilities", "scales"))])
def test_selftest_names_a_wrong_result_of_float8_rows(number, name, monkeypatch):
    monkeypatch.setattr(ops, "moe_permute", with_wrong_result(ops.moe_permute, number))
    with pytest.raises(AssertionError, match=f"^{name}:"):
        selftest._check_float8()


# The operators of each check, with the numbers of results, and with those of arguments that have gradients.
OF_CHECKS = {
    "route": ("route", range(10), ()),
    "permute": ("permute", (0,), (0,)),
    "quantize": ("permute", (0, 1), ()),
    "quantize, of rows": ("quantize_1x128", (0, 1), ()),
    "quantize, back": ("dequantize_1x128", (0,), ()),
    "unpermute": ("unpermute", (0,), (0,)),
    "weighted_unpermute": ("unpermute", (0,), (0, 2)),
    "moe_permute": ("moe_permute", (0, 1, 2, 4), (0, 3)),
    "moe_unpermute": ("moe_unpermute", (0, 1), (0, 3)),
    "weighted_moe_unpermute": ("moe_unpermute", (0, 1), (0, 3)),
    "sort_chunks": ("sort_chunks", (0, 1, 2), (0,)),
}


def changed(value):
    """A tensor with another element."""
    if value.dtype in (paddle.float32, paddle.int32, paddle.int64):
        return value + 1
    codes = to_numpy(value).view(np.uint8).copy()
    codes.flat[-1] ^= 1
    return to_tensor(codes.view(to_numpy(value).dtype), value.place)


def with_wrong_result(function, number):
    def call(*given, **options):
        made = function(*given, **options)
        if isinstance(made, paddle.Tensor):
            return changed(made)
        results = [*made]
        results[number] = changed(results[number])
        return type(made)(*results) if hasattr(made, "_fields") else tuple(results)

    return call


def with_wrong_gradient(function, number):
    def call(*given, **options):
        given = [*given]
        given[number] = given[number] * 2 - given[number].detach()  # the same values
        return function(*given, **options)

    return call


@pytest.mark.compiled_only
def test_selftest_is_of_the_compiled_operators_whatever_the_environment_names(monkeypatch, capsys):
    names = []
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "reference")
    monkeypatch.setattr(selftest, "all_checks", lambda: [("one", lambda: names.append(resolve("route").name))])
    assert selftest.main() == 0
    assert names == ["compiled"]
    assert capsys.readouterr().out.startswith("ok     one\nselftest passed: 1 checks")


@pytest.mark.compiled_only
@pytest.mark.parametrize("check", OF_CHECKS)
def test_selftest_notices_each_result_and_each_gradient(check, monkeypatch):
    operator, results, arguments = OF_CHECKS[check]
    right, name = getattr(ops, operator), f"check_{check.partition(',')[0]}"
    wrong = [*((with_wrong_result, each) for each in results), *((with_wrong_gradient, each) for each in arguments)]
    getattr(selftest._Problem(selftest.CASES[0], selftest.FLOAT32), name)()
    for make, number in wrong:
        problem = selftest._Problem(selftest.CASES[0], selftest.FLOAT32)
        monkeypatch.setattr(ops, operator, make(right, number))
        with pytest.raises(AssertionError, match="^gradient" if make is with_wrong_gradient else "^(?!gradient)"):
            getattr(problem, name)()
        monkeypatch.setattr(ops, operator, right)
