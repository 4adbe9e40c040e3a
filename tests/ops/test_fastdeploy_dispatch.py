# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's dispatches and sums, by its names, against the oracle."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.reference import fastdeploy as oracle
from paddle_moe_ops.reference.routing import take_or_zero
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols, score_tols
from tests.ops.problems import every_kind, optional_tensor, ordinary, tensor
from tests.pairwise import pairwise
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

H, E, K = 9, 6, 3
SIZES = {"no token": 0, "one token": 1, "odd": 63, "many tokens": 1025}
BIASES = {"no bias": False, "bias": True}
NORMS = {"as they are": False, "divided": True}
dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


def grid(**axes):
    """Cases that cover all pairs of values of any two axes."""
    return pairwise({"num_tokens": SIZES, **axes}, empty={"num_tokens": [0]})


E4M3 = FLOAT8_DTYPES[0]


def scores(rng, num_tokens, num_experts=E):
    """Multiples of 1/8 with ties, of which an exponential keeps the order; no one chooses the last expert."""
    values = rng.integers(-8, 9, (num_tokens, num_experts)).astype(np.float32) / 8
    values[:, -1] = -4
    return values


def received(rng, num_tokens, topk=K):
    """Ids of local experts: some elsewhere, some twice in a token, none of the last expert."""
    ids = rng.integers(0, E - 1, (num_tokens, topk)).astype(np.int64)
    ids[rng.random(ids.shape) < 0.3] = -1
    return ids


def on(place, *arrays):
    return [optional_tensor(each, place) for each in arrays]


def assert_results(got, expected, names, inexact=()):
    got = list(got)
    assert len(got) == len(names)
    for result, name in zip(got, names, strict=True):
        if name not in inexact:
            assert_bits_equal(result, getattr(expected, name), what=name)


def assert_weights(got, expected, num_experts=E):
    assert_close_sums(got, expected, np.abs(expected), score_tols(np.float32, num_experts), what="weights")


@grid(dtype=SUM_DTYPES, has_bias=BIASES, mode=["softmax", "scores", "groups", "groups of scores"])
def test_dispatch(mode, has_bias, dtype, num_tokens, rng, place, backend):
    x, gating = ordinary(rng, (num_tokens, H), dtype), scores(rng, num_tokens)
    if mode == "groups of scores":
        gating = np.abs(gating) + 1
    bias = (rng.integers(-4, 5, E) / 8).astype(np.float32) if has_bias else None
    options = K, mode.startswith("groups"), "w16a16", "scores" in mode
    expected = oracle.moe_expert_dispatch(x, gating, bias, None, *options)
    got = ops.moe_expert_dispatch(*on(place, x, gating, bias), None, *options)
    assert_results(got, expected, oracle.TpDispatch._fields, ("topk_weight",))
    assert_weights(got[3], expected.topk_weight)


def test_dispatch_takes_three_dimensions_and_a_bias_with_two(rng, place):
    x, gating, bias = ordinary(rng, (2, 7, H)), scores(rng, 14).reshape(2, 7, E), np.full((1, E), 0.5, np.float32)
    options = K, False, "w16a16", True
    got = ops.moe_expert_dispatch(*on(place, x, gating, bias), None, *options)
    expected = oracle.moe_expert_dispatch(x.reshape(14, H), gating.reshape(14, E), bias, None, *options)
    assert_results(got, expected, oracle.TpDispatch._fields)


def test_one_expert_takes_all_tokens(rng, place):
    x = ordinary(rng, (63, H))
    rows, ends, indices, weights, ids, experts, _, most = ops.moe_expert_dispatch(
        *on(place, x, np.tile(np.float32([0, 0, 1]), (63, 1))), None, None, 1, False, "", topk_only_mode=True
    )
    assert_bits_equal(rows, x)
    assert ends.tolist() == [0, 0, 63]
    assert most.tolist() == [63]
    assert indices.tolist() == [list(range(63))]
    assert {*weights.flatten().tolist()} == {1.0}
    assert {*ids.flatten().tolist(), *experts.tolist()} == {2}


def in_scales():
    return np.float32([1e-3, 0.3, 0.5, 1, 2, 1e3])


CODES = {"w4a8": np.dtype(np.int8), "w4afp8": E4M3}


@pytest.mark.parametrize("method", CODES)
@pytest.mark.parametrize("has_scale", [False, True], ids=["no scale", "scale"])
@dtypes
def test_rows_of_four_bit_methods(dtype, has_scale, method, rng, place):
    x, gating = every_kind(rng, (63, H), dtype), scores(rng, 63)
    x[1], x[2] = 0, np.float32(0.5)  # a row of zeros, and halves, which are rounded away from 0
    scale = in_scales() if has_scale else None
    options = K, False, method, True
    expected = oracle.moe_expert_dispatch(x, gating, None, scale, *options)
    got = ops.moe_expert_dispatch(*on(place, x, gating, None, scale), *options)
    assert_results(got, expected, oracle.TpDispatch._fields)
    by_code = method == "w4afp8" or has_scale
    assert to_numpy(got[0]).dtype == (CODES[method] if by_code else dtype)
    assert got[6].shape == ([63 * K] if method == "w4afp8" and not has_scale else [1])


@grid(dtype=SUM_DTYPES, has_bias=BIASES, norm=NORMS)
def test_reduce(norm, has_bias, dtype, num_tokens, rng, place, backend):
    dispatched = oracle.moe_expert_dispatch(
        ordinary(rng, (num_tokens, H)), scores(rng, num_tokens), None, None, K, False, "", True
    )
    rows, weights = ordinary(rng, (num_tokens * K, H), dtype), np.abs(ordinary(rng, (num_tokens, K)))
    weights[: num_tokens // 8] = 0
    bias = ordinary(rng, (E, H), dtype) if has_bias else None
    maps = dispatched.permute_indices_per_token, dispatched.topk_idx
    factor = 2.5 if norm else 1.0
    got = ops.moe_expert_reduce(*on(place, rows, weights, *maps, bias), norm, factor)
    assert_bits_equal(got, oracle.moe_expert_reduce(rows, weights, *maps, bias, norm, factor))


@dtypes
def test_reduce_agrees_with_the_order_of_fastdeploy(dtype, rng, place):
    """Slot by slot, divided and multiplied in the end."""
    gating = scores(rng, 63)
    dispatched = oracle.moe_expert_dispatch(ordinary(rng, (63, H)), gating, None, None, K, False, "", True)
    rows, weights, bias = ordinary(rng, (63 * K, H), dtype), rng.random((63, K)).astype(np.float32) + 0.1, None
    bias = ordinary(rng, (E, H), dtype)
    maps = dispatched.permute_indices_per_token, dispatched.topk_idx
    got = ops.moe_expert_reduce(*on(place, rows, weights, *maps, bias), True, 1.5)
    expected, terms = np.zeros((63, H)), np.zeros((63, H))
    for slot in range(K):
        addend = rows[maps[0][slot]].astype(np.float64) + bias[maps[1][:, slot]].astype(np.float64)
        expected += weights[:, slot, None] * addend
        terms += np.abs(weights[:, slot, None] * addend)
    factors = 1.5 / weights.astype(np.float64).sum(axis=1, keepdims=True)
    assert_close_sums(got, (expected * factors).astype(dtype), terms * factors, dtype_tols(dtype, 3 * K), what="sums")


def test_slots_without_a_row_take_no_part(rng, place):
    rows, weights = ordinary(rng, (4, H)), np.ones((2, 2), np.float32)
    indices, ids = np.int32([[3, -1], [-1, -1]]), np.zeros((2, 2), np.int32)
    got = ops.moe_expert_reduce(*on(place, rows, weights, indices, ids), None, True, 1.0)
    assert_bits_equal(got, np.stack([rows[3] / 2, np.zeros(H, np.float32)]))


@grid(dtype=SUM_DTYPES, segments=["exact", "padded", "too small", "buffer too small"])
def test_dispatch_of_received_tokens(segments, dtype, num_tokens, rng, place, backend, monkeypatch):
    if "small" in segments:
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    x, ids, weights = ordinary(rng, (num_tokens, H), dtype), received(rng, num_tokens), ordinary(rng, (num_tokens, K))
    counts = oracle.tokens_per_expert(ids, E)[1 if segments == "padded" else 0]
    if segments == "too small":
        counts = counts // 2
    num_rows = int(counts.sum()) // (2 if segments == "buffer too small" else 1)
    expected = oracle.ep_moe_expert_dispatch(x, ids, weights, None, counts.tolist(), num_rows, "w16a16")
    got = ops.ep_moe_expert_dispatch(*on(place, x, ids, weights), None, counts.tolist(), num_rows, "w16a16")
    assert_results(got, expected, oracle.EpDispatch._fields[:-1])
    assert got[0].shape == [num_rows, H]


@pytest.mark.parametrize("method", CODES)
@pytest.mark.parametrize("has_scale", [False, True], ids=["no scale", "scale"])
def test_received_rows_of_four_bit_methods(has_scale, method, rng, place):
    x, ids, weights = every_kind(rng, (63, H)), received(rng, 63), ordinary(rng, (63, K))
    counts, scale = oracle.tokens_per_expert(ids, E)[1].tolist(), in_scales() if has_scale else None
    options = counts, sum(counts), method
    expected = oracle.ep_moe_expert_dispatch(x, ids, weights, scale, *options)
    got = ops.ep_moe_expert_dispatch(*on(place, x, ids, weights, scale), *options)
    assert_results(got, expected, oracle.EpDispatch._fields[:-1])


def test_no_entry_of_a_map_is_written_twice(rng, place, monkeypatch):
    """A GPU stores such entries in any order."""
    written, put_along_axis = [], paddle.put_along_axis

    def record(table, columns, *others):
        written.append(columns.numpy())
        return put_along_axis(table, columns, *others)

    monkeypatch.setattr(paddle, "put_along_axis", record)
    x, ids = ordinary(rng, (63, H)), received(rng, 63)
    counts = oracle.tokens_per_expert(ids, E)[0].tolist()
    ops.ep_moe_expert_dispatch(*on(place, x, ids, ordinary(rng, ids.shape)), None, counts, sum(counts), "")
    (columns,) = written
    assert any(len({*row[row >= 0]}) < (row >= 0).sum() for row in ids)
    assert all(len({*row[row < E]}) == (row < E).sum() for row in columns)


@pytest.mark.parametrize("topk", [1, 2, E + 2])
def test_counts_may_be_an_array_and_ids_int32(topk, rng, place):
    x, ids, weights = ordinary(rng, (63, H)), received(rng, 63, topk).astype(np.int32), ordinary(rng, (63, topk))
    counts = oracle.tokens_per_expert(ids, E)[0]
    expected = oracle.ep_moe_expert_dispatch(x, ids, weights, None, counts.tolist(), int(counts.sum()), "")
    got = ops.ep_moe_expert_dispatch(*on(place, x, ids, weights), None, counts, counts.sum(), "")
    assert_results(got, expected, oracle.EpDispatch._fields[:-1])


@grid(
    in_ep={"ranks": True, "one rank": False},
    ue8m0={"float32": False, "ue8m0": True},
    layout=["by row", "by column", "padded columns"],
)
def test_dispatch_of_float8_tokens(layout, ue8m0, in_ep, num_tokens, rng, place, backend):
    ids, weights = received(rng, num_tokens), ordinary(rng, (num_tokens, K))
    x = ordinary(rng, (num_tokens, H)).astype(E4M3)
    scale = ordinary(rng, (num_tokens, 2)).view(np.int32) if ue8m0 else ordinary(rng, (num_tokens, 2))
    counts = oracle.tokens_per_expert(ids, E)
    num_rows = int(counts[1].sum()) if in_ep else num_tokens * K + E * 127
    given = tensor(scale, place)
    if layout != "by row":
        padded = np.zeros((2, -(-num_tokens // 4) * 4), scale.dtype)
        padded[:, :num_tokens] = scale.T
        given = tensor(padded, place).transpose([1, 0])
        given = given[:num_tokens] if layout == "by column" else given
    got = ops.ep_moe_expert_dispatch_fp8(
        tensor(x, place), given, *on(place, ids, weights, *counts[:2]), in_ep, num_rows if in_ep else -1
    )
    rows, scales, indices, ends, padded_ends, of_rows, pairs, used, experts = got
    expected = oracle.ep_moe_expert_dispatch(x, ids, weights, None, counts[1].tolist(), num_rows, "")
    names = (
        "permute_indices_per_token",
        "token_nums_per_expert_cumsum",
        "dst_weights",
        "dst_indices",
        "cumsum_idx_gpu",
    )
    assert_bits_equal(rows, expected.permute_input)
    assert_results([indices, padded_ends, of_rows, pairs, used], expected, names)
    assert_bits_equal(ends, np.cumsum(counts[0], dtype=np.int64))
    assert_bits_equal(scales, take_or_zero(scale, expected.tokens))
    assert scales.strides == [1, -(-num_rows // 4) * 4] or num_rows == 0
    wanted = np.where(expected.tokens >= 0, expected.expert_idx_per_token, -1)
    assert_bits_equal(experts, wanted.astype(np.int32))


@grid(dtype=SUM_DTYPES, has_bias=BIASES, norm=NORMS)
def test_combine_of_received_tokens(norm, has_bias, dtype, num_tokens, rng, place, backend):
    ids = np.argsort(rng.random((num_tokens, E)), axis=1)[:, :K].astype(np.int64)
    ids[rng.random(ids.shape) < 0.4] = -1
    counts = oracle.tokens_per_expert(ids, E)[0].tolist()
    weights = np.abs(ordinary(rng, ids.shape))
    maps = oracle.ep_moe_expert_dispatch(ordinary(rng, (num_tokens, H)), ids, weights, None, counts, sum(counts), "")
    rows, bias = ordinary(rng, (sum(counts), H), dtype), ordinary(rng, (E, H), dtype) if has_bias else None
    factor = 2.5 if norm else 1.0
    arguments = rows, maps.dst_weights, maps.permute_indices_per_token
    got = ops.ep_moe_expert_combine(*on(place, *arguments, maps.dst_indices, bias), norm, factor)
    assert_bits_equal(got, oracle.ep_moe_expert_combine(*arguments, bias, norm, factor))


@grid(capacity=[0, 1, 8, 1025], dtype=[SUM_DTYPES[2], E4M3])
def test_packed_prefill(dtype, capacity, num_tokens, rng, place, backend):
    ids, x = received(rng, num_tokens), ordinary(rng, (num_tokens, H)).astype(dtype)
    scale, weights = ordinary(rng, (num_tokens, 2)), ordinary(rng, ids.shape)
    got = ops.prefill_permute_to_masked_gemm(*on(place, x, scale, ids), E, capacity)
    expected = oracle.prefill_permute_to_masked_gemm(x, scale, ids, E, capacity)
    assert_results(got, expected, oracle.Prefill._fields)
    assert got[1].strides == [2 * capacity, 1, capacity] or capacity == 0
    rows = ordinary(rng, (E, capacity, H), SUM_DTYPES[2])
    for num_worst_tokens in {0, num_tokens // 2, num_tokens, num_tokens + 5}:
        arguments = rows, expected.permuted_indice_map, weights
        out = ops.depermute_prefill_combine(*on(place, *arguments), num_worst_tokens)
        assert_bits_equal(out, oracle.depermute_prefill_combine(*arguments, num_worst_tokens))


def test_dropped_slots_raise_if_asked_for(rng, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    ids = tensor(np.zeros((5, 1), np.int64), place)
    arguments = *on(place, ordinary(rng, (5, H)), ordinary(rng, (5, 1))), ids, 2
    ops.prefill_permute_to_masked_gemm(*arguments, 5)
    with pytest.raises(ValueError, match=r"max_token_num must be at least 5, the slots of an expert, but got 4$"):
        ops.prefill_permute_to_masked_gemm(*arguments, 4)


def test_arguments_stay_as_they_are(rng, place):
    buffer = tensor(ordinary(rng, (64, 2 * H)), place)
    view, gating = buffer[:63, :H], tensor(scores(rng, 63), place)
    before = buffer.numpy(), view.strides
    ops.moe_expert_dispatch(view, gating, None, None, K, False, "w4afp8", topk_only_mode=False)
    assert_bits_equal(buffer, before[0])
    assert view.strides == before[1]
    assert isinstance(view, paddle.Tensor)
