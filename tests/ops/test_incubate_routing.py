# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Patched routing functions of paddle.incubate.nn.functional, and batched_gemm, against the oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import paddle
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.reference import incubate as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.ops.problems import backward, ordinary, tensor
from tests.params import SUM_DTYPES
from tests.static.modes import plain_errors

T, E = 37, 5


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle(("incubate", "gemm")):
        yield


def masks(rng, kind):
    """tokens_mask, dispatch_tokens_mask and the dtype of the former."""
    tokens = (rng.random(T) < 0.7).astype(np.float32)
    return {
        "none": (None, None),
        "tokens": (tokens, None),
        "all tokens": (None, rng.random(2 * T + 1) < 0.7),
        "both": (tokens, rng.random(T) < 0.7),
        "both, of ranks": (tokens, rng.random(2 * T + 1) < 0.7),
        "nothing counts": (0 * tokens, np.zeros(2 * T + 1, np.bool_)),
    }[kind]


KINDS = ["none", "tokens", "all tokens", "both", "both, of ranks", "nothing counts"]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_group", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_aux_loss(by_token, use_group, kind, dtype, rng, place):
    prob = rng.random((T, E)).astype(np.float32).astype(dtype)
    mask = rng.integers(0, 3, (T, E) if by_token else E)
    tokens_mask, all_mask = masks(rng, kind)
    options = 2 * E, use_group, 3, 0.5
    *expected, d_prob = oracle.cal_aux_loss(prob, mask, tokens_mask, all_mask, *options)
    prob_tensor = tensor(prob, place, gradient=True)
    on_device = [None if each is None else tensor(each, place) for each in (tokens_mask, all_mask)]
    if on_device[0] is not None:
        on_device[0] = on_device[0].astype(prob_tensor.dtype)
    got = F.cal_aux_loss(prob_tensor, tensor(mask, place), *on_device, *options)
    for result, wanted in zip(got, expected, strict=True):
        assert_close_sums(result, wanted, np.abs(wanted), dtype_tols(dtype, T + E), what="a result")
    assert [each.stop_gradient for each in got] == [False, True, True]
    backward(got[:1], [np.array(2, dtype)])
    assert_close_sums(prob_tensor.grad, 2 * d_prob, 2 * d_prob, dtype_tols(dtype, 8), what="the gradient")
    by_hand = _C_ops.cal_aux_loss_grad(prob_tensor, *got[1:], tensor(np.array([2], dtype), place), *options[:3])
    twice = dtype_tols(dtype, 8)._replace(of_result=8 * dtype_tols(dtype, 0).of_result)  # of rounded seqlen and ce
    assert_close_sums(by_hand, 2 * d_prob, 2 * d_prob, twice, what="the gradient by hand")


@pytest.mark.parametrize("kind", KINDS)
def test_aux_loss_is_that_of_paddles_formula_for_devices_without_the_operator(kind, rng, place):
    formula = sys.modules["paddle.incubate.nn.functional.cal_aux_loss"].math_cal_aux_loss
    prob, mask = rng.random((T, E)).astype(np.float32), tensor(rng.integers(0, 9, (T, E)), place)
    on_device = [None if each is None else tensor(each, place) for each in masks(rng, kind)]
    results = []
    for function in (F.cal_aux_loss, formula):
        leaf = tensor(prob, place, gradient=True)
        outputs = function(leaf, mask, *on_device, E, True, 2, 0.5)
        outputs[0].backward()
        results.append([each.numpy() for each in (*outputs, leaf.grad)])
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_aux_loss_against_finite_differences(rng, place):
    prob, mask = rng.random((4, 3)).astype(np.float32), tensor(rng.integers(0, 4, 3), place)
    leaf = tensor(prob, place, gradient=True)
    F.cal_aux_loss(leaf, mask, None, None, 3, False, 2, 1e-6)[0].backward()
    for index in np.ndindex(prob.shape):
        step = np.zeros_like(prob)
        step[index] = 0.5
        sides = [F.cal_aux_loss(tensor(prob + d, place), mask, None, None, 3, False, 2, 1e-6)[0] for d in (step, -step)]
        up, down = map(float, sides)
        np.testing.assert_allclose(leaf.grad.numpy()[index], up - down, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("counts_dtype", ["int32", paddle.int64])
@pytest.mark.parametrize("shape", [(T,), (T, 3), (0,), ()])
def test_bincount(shape, counts_dtype, dtype, rng, place):
    numbers = rng.integers(-4, 12, shape).astype(dtype)
    for low, high in ((0, 7), (2, 30), (-3, 1)):
        got = F.int_bincount(tensor(np.asarray(numbers), place), low, high, counts_dtype)
        expected = oracle.int_bincount(numbers, low, high)
        assert_bits_equal(got, expected.astype(np.int32 if counts_dtype == "int32" else np.int64))


def test_bincount_counts_the_outermost_integers_of_no_range(place):
    limits = np.array([-(2**31), 2**31 - 1, 3], np.int32)
    assert F.int_bincount(tensor(limits, place), 2, 5, "int64").tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("per_modality", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("is_group", [False, True])
def test_modality_ids(is_group, offset, per_modality, dtype, rng, place):
    ids = rng.integers(-1, 12, (T, 3)).astype(dtype)
    got = F.expand_modality_expert_id(tensor(ids, place), per_modality, 5, offset, is_group)
    assert_bits_equal(got, oracle.expand_modality_expert_id(ids, per_modality, 5, offset, is_group))


@pytest.mark.parametrize("counts", [[3, 0, 1, 2, 0, 0], [0, 0, 0, 4], [0, 0], [5]], ids=str)
def test_rank_and_local_expert(counts, place):
    local = max(len(counts) // 2, 1)
    got = F.build_src_rank_and_local_expert_id(tensor(np.array(counts, np.int64), place), counts, local)
    expected = oracle.build_src_rank_and_local_expert_id(counts, local)
    for result, wanted in zip(got, expected, strict=True):
        assert_bits_equal(result, wanted)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("form", ["plain", "trans_rhs", "trans_lhs"])
def test_batched_gemm(form, dtype, rng, place):
    sizes, inner, outer = [5, 0, 11, 2], 7, 3
    num_rows = sum(sizes) + (2 if form != "trans_lhs" else 1)
    shapes = {"plain": (4, inner, outer), "trans_rhs": (4, outer, inner), "trans_lhs": (num_rows, outer)}
    left, right = ordinary(rng, (num_rows, inner), dtype), ordinary(rng, shapes[form], dtype)
    flags = form == "trans_lhs", form == "trans_rhs"
    leaves = [tensor(each, place, gradient=True) for each in (left, right)]
    out = F.batched_gemm(*leaves, sizes, *flags)
    tolerance = dtype_tols(dtype, 16)
    expected = oracle.batched_gemm(left, right, sizes, *flags)
    assert_close_sums(
        out, expected, oracle.batched_gemm(abs(left), abs(right), sizes, *flags), tolerance, what="product"
    )
    d_out = ordinary(rng, expected.shape, dtype)
    backward([out], [d_out])
    if form == "trans_lhs":  # both gradients are products of rows and matrices
        calls = [((right, d_out), (False, True)), ((left, d_out), (False, False))]
    elif form == "plain":
        calls = [((d_out, right), (False, True)), ((left, d_out), (True, False))]
    else:
        calls = [((d_out, right), (False, False)), ((d_out, left), (True, False))]
    for leaf, (operands, how) in zip(leaves, calls, strict=True):
        wanted = oracle.batched_gemm(*operands, sizes, *how)
        terms = oracle.batched_gemm(*(abs(each) for each in operands), sizes, *how)
        assert_close_sums(leaf.grad, wanted, terms, tolerance, what="a gradient")


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_operand_of_batched_gemm_may_want_a_gradient_alone(wanted, rng, place):
    operands = [
        tensor(ordinary(rng, (3, size)), place, gradient=number == wanted) for number, size in enumerate((4, 5))
    ]
    for sizes in ([2, 0, 1], [0, 0]):
        out = F.batched_gemm(*operands, sizes, True)
        out.sum().backward()
        expected = operands[1 - wanted].sum(axis=1, keepdim=True).expand([3, 4 + wanted]).numpy() * (sum(sizes) > 0)
        np.testing.assert_allclose(operands[wanted].grad.numpy(), expected, rtol=1e-6)
        operands[wanted].clear_gradient()


def test_rows_that_the_counts_do_not_know_are_those_of_the_last_expert(place):
    ranks, experts = F.build_src_rank_and_local_expert_id(tensor(np.array([1, 1, 0, 1]), place), [2, 1, 0, 2], 2)
    assert ranks.tolist() == [0, 0, 1, 1, 1]
    assert experts.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("full_graph", [True, False])
def test_a_traced_program_may_call_them(full_graph, rng, place):
    def program(prob, ids, rows):
        counts = F.int_bincount(ids, 0, E, "int64")
        loss, seqlen, ce = F.cal_aux_loss(prob, counts, prob[:, 0] * 0 + 1, None, E, True, 2, 1e-6)
        moved = F.expand_modality_expert_id(ids, 2, 1, 1, True)
        whose = F.build_src_rank_and_local_expert_id(counts, [2, 0, 3, 1, 4], 2)
        products = F.batched_gemm(rows, rows, [4, 0, 9], True, False), F.batched_gemm(rows, products_of, [4, 9])
        return loss, seqlen, ce, counts, moved, *whose, *products

    products_of = tensor(ordinary(rng, (2, 6, 3)), place)
    arguments = [rng.random((T, E), np.float32), rng.integers(0, E, (T, 2)).astype(np.int32), ordinary(rng, (13, 6))]
    tensors = [tensor(each, place) for each in arguments]
    with plain_errors():
        traced = paddle.jit.to_static(program, full_graph=full_graph)(*tensors)
    for got, wanted in zip(traced, program(*tensors), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
        assert got.dtype == wanted.dtype


P, C = lambda: paddle.ones([T, E]), lambda: paddle.ones([E], "int64")
LOSS = (None, None, E, False, 2, 1e-6)
BAD = {
    "gate_prob": ("cal_aux_loss", lambda: (paddle.ones([T]), C(), *LOSS), ValueError, "gate_prob must be of shape"),
    "dispatch_mask": ("cal_aux_loss", lambda: (P(), P(), *LOSS), TypeError, "dispatch_mask must be of dtype"),
    "columns": (
        "cal_aux_loss",
        lambda: (P(), paddle.ones([E + 1], "int64"), *LOSS),
        ValueError,
        r"dispatch_mask must be of shape \[5\] or \[num_tokens, 5\]",
    ),
    "tokens_mask": (
        "cal_aux_loss",
        lambda: (P(), C(), paddle.ones([T + 1]), *LOSS[1:]),
        ValueError,
        "tokens_mask must be of shape",
    ),
    "moe_k": ("cal_aux_loss", lambda: (P(), C(), None, None, E, True, 0, 1e-6), ValueError, "moe_k must be from 1"),
    "low": ("int_bincount", lambda: (C(), -(2**31) - 1, 3, "int64"), ValueError, "low must be from -2147483648"),
    "high": ("int_bincount", lambda: (C(), 3, 3, "int64"), ValueError, "high must be from 4"),
    "dtype": ("int_bincount", lambda: (C(), 0, 3, "float32"), TypeError, "dtype must be one of int32, int64"),
    "x": ("int_bincount", lambda: (P(), 0, 3, "int64"), TypeError, "x must be of dtype int32 or int64"),
    "expert_id": ("expand_modality_expert_id", lambda: (C(), 2, 1, 0, True), ValueError, "expert_id must be of shape"),
    "is_group_expert": (
        "expand_modality_expert_id",
        lambda: (paddle.ones([T, 2], "int32"), 2, 1, 0, 1),
        TypeError,
        "is_group_expert must be a bool",
    ),
    "list": (
        "build_src_rank_and_local_expert_id",
        lambda: (C(), [1] * (E + 1), 2),
        ValueError,
        r"expert_num_global_tensor must be of shape \[6\]",
    ),
    "no list": (
        "build_src_rank_and_local_expert_id",
        lambda: (C(), C(), 2),
        TypeError,
        "expert_num_global must be a list",
    ),
    "lhs": (
        "batched_gemm",
        lambda: (P(), paddle.ones([2, E + 1, 3]), [3, 4]),
        ValueError,
        r"rhs must be of shape",
    ),
    "too many rows": (
        "batched_gemm",
        lambda: (P(), paddle.ones([2, E, 3]), [30, 40]),
        ValueError,
        r"batch_sizes must",
    ),
    "too many rows of both": ("batched_gemm", lambda: (P(), P(), [30, 40], True), ValueError, "batch_sizes must be at"),
    "trans_rhs": ("batched_gemm", lambda: (P(), P(), [3, 4], False, 1), TypeError, "trans_rhs must be a bool"),
    "both": ("batched_gemm", lambda: (P(), P(), [3, 4], True, True), ValueError, "trans_rhs must be False with"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    name, arguments, error, text = BAD[case]
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(F, name)(*arguments())
