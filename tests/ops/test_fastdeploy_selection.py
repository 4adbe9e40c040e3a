# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's choice of experts and its counts against the oracle."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.reference import fastdeploy as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, score_tols
from tests.ops.problems import optional_tensor, ordinary, tensor
from tests.pairwise import pairwise
from tests.params import SUM_DTYPES

E = 12
SIZES = {"no token": 0, "one token": 1, "odd": 63, "many tokens": 1025}
FLAGS = {"no": False, "yes": True}
GROUPS = {"one group": (1, 1, 4), "two of four": (4, 2, 4), "groups of one": (E, 5, 4), "one expert": (3, 1, 1)}


def grid(**axes):
    return pairwise({"num_tokens": SIZES, **axes}, empty={"num_tokens": [0]})


def eighths(rng, *shape):
    """Multiples of 1/8, with ties."""
    return (rng.integers(1, 16, shape) / 8).astype(np.float32)


def assert_weights(got, expected, what="weights"):
    assert_close_sums(got, expected, np.abs(expected), score_tols(np.float32, E), what=what)


@grid(has_bias=FLAGS, renormalize=FLAGS, topk=[1, 5, E])
def test_topk_select(topk, renormalize, has_bias, num_tokens, rng, place, backend):
    logits, bias = eighths(rng, num_tokens, E), eighths(rng, E) - 1 if has_bias else None
    got_ids, got = ops.moe_topk_select(
        tensor(logits, place), optional_tensor(bias, place), topk, renormalize, bool(topk % 2)
    )
    ids, weights = oracle.moe_topk_select(logits, bias, topk, renormalize)
    assert_bits_equal(got_ids, ids)
    assert_weights(got, weights)


def test_large_logits_have_weights(rng, place, backend):
    logits = 400 * eighths(rng, 9, E)
    got_ids, got = ops.moe_topk_select(tensor(logits, place), None, 3, True, False)
    ids, weights = oracle.moe_topk_select(logits, None, 3, True)
    assert np.isfinite(weights).all()
    assert_bits_equal(got_ids, ids)
    assert_weights(got, weights)


@grid(groups=GROUPS, renormalize=FLAGS, factor=[1.0, 2.5])
def test_noaux_tc(factor, renormalize, groups, num_tokens, rng, place, backend):
    scores = eighths(rng, num_tokens, E)
    biased = scores + eighths(rng, E) - 1
    arguments = *groups, renormalize, factor
    got = ops.noaux_tc(tensor(scores, place), tensor(biased, place), *arguments)
    for result, expected in zip(got, oracle.noaux_tc(scores, biased, *arguments), strict=True):
        assert_bits_equal(result, expected)


def test_biased_scores_that_are_not_finite_are_lowest(rng, place, backend):
    scores = eighths(rng, 4, E)
    biased = scores.copy()
    biased[0, :9] = np.nan  # the last of three groups is left
    biased[1] = np.nan
    biased[2] = [np.inf, -np.inf, *([np.nan] * 9), 1]  # each group has one finite score at most
    biased[3, 3:] = np.inf
    got = ops.noaux_tc(tensor(scores, place), tensor(biased, place), 4, 2, 3, True, 2.0)
    for result, expected in zip(got, oracle.noaux_tc(scores, biased, 4, 2, 3, True, 2.0), strict=True):
        assert_bits_equal(result, expected)
    assert got[2].tolist()[1:3] == [[0, 1, 2]] * 2
    assert got[1].tolist()[1] == [np.float32(1 / 3)] * 3
    assert got[2].tolist()[3] == sorted(range(3), key=lambda expert: (-scores[3, expert], expert))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@grid(groups=GROUPS, renormalize=FLAGS)
def test_grouped_topk(renormalize, groups, num_tokens, dtype, rng, place):
    # Eighths are far apart under a sigmoid; the bias makes no further ties.
    logits, bias = eighths(rng, num_tokens, E).astype(dtype), rng.permutation(E).astype(np.float32) / 1024
    arguments = *groups, renormalize, 2.5
    sparse, values, ids = ops.grouped_topk(tensor(logits, place), tensor(bias, place), *arguments)
    scores = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    wanted_sparse, wanted_values, wanted_ids = oracle.noaux_tc(scores, scores + bias, *arguments, epsilon=0.0)
    assert_bits_equal(ids, wanted_ids)
    assert_weights(values, wanted_values)
    assert_weights(sparse, wanted_sparse, "sparse weights")


def replica_tables(rng, place):
    """Replicas of each expert, how many there are, and statistics."""
    sizes, table = rng.integers(1, 4, E).astype(np.int32), rng.permutation(3 * E).reshape(E, 3).astype(np.int32)
    return table, sizes, tensor(np.arange(E, dtype=np.int32), place)


@pytest.mark.parametrize("num_tokens", SIZES.values())
@pytest.mark.parametrize("gate", ["softmax", "groups"])
def test_replicas(gate, num_tokens, rng, place, backend):
    scores = eighths(rng, num_tokens, E)
    table, sizes, statistics = replica_tables(rng, place)
    tables = tensor(table, place), tensor(sizes, place), statistics
    on_device = tensor(scores, place)
    if gate == "softmax":
        ids, weights, out = ops.moe_redundant_topk_select(on_device, *tables, None, 4, True, False, 3)
        logical, expected = ops.moe_topk_select(on_device, None, 4, True, False)
    else:
        sparse, weights, ids, out = ops.noaux_tc_redundant(on_device, on_device, *tables, 4, 2, 4, True, 2.5, 3)
        wanted_sparse, expected, logical = ops.noaux_tc(on_device, on_device, 4, 2, 4, True, 2.5)
        assert_bits_equal(sparse, wanted_sparse.numpy())
    assert_bits_equal(weights, expected.numpy())
    assert_bits_equal(ids, oracle.replicas(logical.numpy(), table, sizes))
    assert out is statistics
    added = np.bincount(logical.numpy().reshape(-1), minlength=E)
    assert_bits_equal(statistics, (np.arange(E) + added).astype(np.int32))


@grid(topk=[1, 3], dtype=[np.int32, np.int64])
def test_counts(dtype, topk, num_tokens, rng, place, backend):
    ids = rng.integers(-1, E + 1, (num_tokens, topk)).astype(dtype)
    expected = oracle.tokens_per_expert(ids, E)
    assert_bits_equal(ops.count_tokens_per_expert_func(tensor(ids, place), E), expected[:2])
    assert_bits_equal(ops.count_tokens_per_expert_func(tensor(ids, place), E, True), expected)
    assert ops.get_expert_token_num(tensor(ids, place), E) == oracle.expert_token_num(ids, E)


def test_counts_that_are_multiples_of_128(place):
    ids = paddle.to_tensor([0] * 128 + [1] * 127 + [2] * 129, dtype="int64", place=place).reshape([-1, 1])
    assert ops.count_tokens_per_expert_func(ids, 4, True).tolist() == [
        [128, 127, 129, 0],
        [128, 128, 256, 0],
        [128, 256, 512, 512],
    ]
    assert ops.get_expert_token_num(ids, 4) == [[128, 127, 129, 0], [256, 128, 256, 0], [384, 640]]


def test_the_sparse_weights_lead_to_the_same_experts(rng, place):
    scores = eighths(rng, 63, E) / 2
    sparse, values, ids = ops.noaux_tc(
        tensor(scores, place), tensor(scores + eighths(rng, E), place), 4, 2, 3, True, 1.0
    )
    x = tensor(ordinary(rng, (63, 4)), place)
    _, _, _, weights, chosen, *_ = ops.moe_expert_dispatch(x, sparse, None, None, 3, False, "", topk_only_mode=True)
    assert_bits_equal(np.sort(chosen.numpy(), axis=1), np.sort(ids.numpy(), axis=1).astype(np.int32))
    assert_bits_equal(np.sort(weights.numpy(), axis=1), np.sort(values.numpy(), axis=1))
