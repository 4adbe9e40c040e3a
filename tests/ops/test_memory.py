# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that stays allocated between forward and backward, by Paddle's own count of bytes."""

from __future__ import annotations

import gc

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import (
    Float8Matrices,
    dequantize_1x128,
    flush_dw,
    moe_mlp,
    moe_permute,
    moe_unpermute,
    permute,
    quantized_experts,
    route,
    sort_chunks,
    unpermute,
    use_backend,
)
from paddle_moe_ops.nn._counts import keep_first
from paddle_moe_ops.testing.routing import uniform
from tests.ops.problems import tensor

# Paddle's count of host memory.
pytestmark = pytest.mark.cpu_only

T, H, E, K = 512, 1024, 8, 2
TOKEN_BYTES = T * H * 4
ROW_BYTES = K * TOKEN_BYTES
SLACK = TOKEN_BYTES // 4  # maps and probabilities: a few KiB each


def allocated_bytes() -> int:
    gc.collect()
    # Paddle counts its CPU memory but has no public function for it (paddle.device has them for GPUs).
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0)


@pytest.fixture
def ids(rng, place):
    return tensor(uniform(rng, T, K, E), place)


@pytest.fixture
def probs(place):
    return tensor(np.full((T, K), 0.5, np.float32), place, gradient=True)


def leaf(rows, place):
    return tensor(np.ones((rows, H), np.float32), place, gradient=True)


def kept_for_backward(source, call):
    """Bytes of the call's input that the graph keeps after the caller has released it, without the output.

    The input is made by multiplying a leaf by a number, which keeps nothing itself.
    """
    before = allocated_bytes()
    output = call(source * 1.0)
    kept = allocated_bytes() - before - output.size * 4
    output.sum().backward()
    assert source.grad is not None
    return kept


def test_the_count_sees_a_tensor_that_is_kept(place):
    source = leaf(T, place)
    assert kept_for_backward(source, lambda x: x * x) >= TOKEN_BYTES
    assert kept_for_backward(source, lambda x: x * 2.0) < SLACK


def test_permute_keeps_no_tokens(ids, place, backend):
    plan = route(ids, num_experts=E)
    assert kept_for_backward(leaf(T, place), lambda x: permute(x, plan)[0]) < SLACK


def test_sorting_keeps_no_rows(place, backend):
    sizes, order = (tensor(np.array(values, np.int32), place) for values in ([T // 4, T // 2, T // 4], [2, 0, 1]))
    assert kept_for_backward(leaf(T, place), lambda x: sort_chunks(x, sizes, order)[0]) < SLACK


def test_quantized_experts_keep_codes_and_scales(ids, place):
    plan = route(ids, num_experts=E)

    def experts(x):
        return quantized_experts(x, plan, lambda *rows: dequantize_1x128(*rows, dtype=paddle.float32), lambda d, *_: d)

    kept = kept_for_backward(leaf(T, place), experts)
    assert T * K * H <= kept < T * K * H + SLACK


def test_moe_permute_keeps_no_tokens(ids, probs, place, backend):
    assert kept_for_backward(leaf(T, place), lambda x: moe_permute(x, None, ids, probs, E, None, 1)[0]) < SLACK


def test_plain_unpermute_keeps_no_rows(ids, place, backend):
    plan = route(ids, num_experts=E)
    assert kept_for_backward(leaf(T * K, place), lambda y: unpermute(y, plan)) < SLACK


def test_plain_moe_unpermute_keeps_no_rows(ids, probs, place):
    _, rowmap, row_probs, _ = moe_permute(leaf(T, place), None, ids, probs, E, None, 1, do_gather=False)
    kept = kept_for_backward(leaf(T * K, place), lambda y: moe_unpermute(y, rowmap, ids, row_probs, T, E)[0])
    assert kept < SLACK


@pytest.mark.parametrize("columns", [H, H // 2], ids=["contiguous rows", "columns of a buffer"])
def test_nodes_keep_the_rows_that_they_are_given_or_one_copy_of_a_part(columns, ids, probs, place):
    plan = route(ids, probs.detach(), num_experts=E)
    with use_backend("reference"):
        kept = kept_for_backward(leaf(T * K, place), lambda y: unpermute(y[:, :columns], plan, probs))
    expected = ROW_BYTES * columns // H
    assert expected <= kept < expected + SLACK


def test_weighted_unpermute_keeps_its_rows_once(ids, probs, place):
    plan = route(ids, probs.detach(), num_experts=E)
    kept = kept_for_backward(leaf(T * K, place), lambda y: unpermute(y, plan, probs))
    assert ROW_BYTES <= kept < ROW_BYTES + SLACK


def test_the_backward_pass_frees_what_a_weighted_sum_kept_though_the_loss_lives_on(ids, probs, place, backend):
    plan = route(ids, probs.detach(), num_experts=E)
    source = leaf(T * K, place)
    before = allocated_bytes()
    loss = unpermute(source * 1.0, plan, probs).sum()
    assert allocated_bytes() - before >= ROW_BYTES
    loss.backward()
    source.grad = None
    assert allocated_bytes() - before < SLACK


def test_inference_keeps_nothing(ids, place):
    plan = route(ids, num_experts=E)
    source = leaf(T, place)
    before = allocated_bytes()
    with paddle.no_grad():
        rows, _ = permute(source * 1.0, plan)
    assert allocated_bytes() - before - rows.size * 4 < SLACK


def test_a_rank_with_few_experts_frees_the_memory_of_the_others(place):
    before = allocated_bytes()
    stacked = [leaf(E * T, place).reshape([E, T, H]).detach() for _ in range(2)]
    keep_first(stacked[:1], 1)
    keep_first(stacked[1:], 0)
    assert [each.shape for each in stacked] == [[1, T, H], [0, T, H]]
    assert allocated_bytes() - before < TOKEN_BYTES + SLACK


INNER = 64
MATRIX_ELEMENTS = 3 * E * H * INNER
HIDDEN_BYTES = T * K * 2 * INNER * 4


@pytest.fixture
def float8_layer(ids, place):
    """A layer of float8 experts without a router, by its tokens."""
    plan = route(ids, num_experts=E)
    matrices = [tensor(np.ones(shape, np.float32), place) for shape in ((E, H, 2 * INNER), (E, INNER, H))]

    def call(x, **options):
        return moe_mlp(x, plan, None, *matrices, compute="fp8_1x128", **options)

    return call


def test_float8_experts_keep_a_byte_for_each_element_of_their_matrices(float8_layer, place):
    kept = kept_for_backward(leaf(T, place), float8_layer)
    expected = TOKEN_BYTES + HIDDEN_BYTES + MATRIX_ELEMENTS
    assert expected <= kept < expected + SLACK


@pytest.mark.parametrize("options", [{"keep": "x"}, {"float8_matrices": Float8Matrices()}], ids=["x", "a cache"])
def test_float8_experts_that_share_or_recompute_codes_keep_none_of_their_own(options, float8_layer, place):
    with paddle.no_grad():
        float8_layer(leaf(T, place), **options)  # fills the cache
    kept = kept_for_backward(leaf(T, place), lambda x: float8_layer(x, **options))
    expected = TOKEN_BYTES + HIDDEN_BYTES * (options.get("keep") != "x")
    assert expected <= kept < expected + SLACK


def test_deferred_gradients_of_float8_experts_keep_no_codes(ids, place):
    plan = route(ids, num_experts=E)
    shapes = (E, H, 2 * INNER), (E, INNER, H)
    matrices = [tensor(np.ones(shape, np.float32), place, gradient=True) for shape in shapes]
    before = allocated_bytes()
    loss = moe_mlp(leaf(T, place), plan, None, *matrices, compute="fp8_1x128", defer_dw=True).sum()
    loss.backward()
    assert allocated_bytes() - before < 3 * TOKEN_BYTES + 2 * HIDDEN_BYTES < 3 * TOKEN_BYTES + MATRIX_ELEMENTS
    flush_dw()


def test_recomputed_float8_experts_keep_their_tokens_alone(float8_layer, place):
    kept = kept_for_backward(leaf(T, place), lambda x: recompute(float8_layer, x, use_reentrant=False))
    assert TOKEN_BYTES <= kept < TOKEN_BYTES + SLACK


def test_the_backward_pass_frees_codes_of_float8_experts_though_the_loss_lives_on(float8_layer, place):
    source = leaf(T, place)
    before = allocated_bytes()
    loss = float8_layer(source * 1.0).sum()
    assert allocated_bytes() - before >= MATRIX_ELEMENTS
    loss.backward()
    source.grad = None
    assert allocated_bytes() - before < SLACK
