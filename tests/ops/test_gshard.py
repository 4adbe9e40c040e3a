# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of GShard's gates, patched, under the names of Paddle's functions, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest
from paddle import _C_ops
from paddle.distributed.models.moe import utils

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.compat import gshard
from paddle_moe_ops.reference import gshard as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor
from tests.pairwise import pairwise_of

E = 7
SHAPES = {"none": (0, 2), "one": (1,), "flat": (63,), "by token": (1025, 2), "in three dimensions": (5, 3, 4)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [np.int64, np.int32])
SKEWS = {"even": None, "one expert": 3, "some dropped": -1}
skews = pytest.mark.parametrize("skew", SKEWS.values(), ids=SKEWS)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle("gshard"):
        yield


def experts(rng, shape, dtype, skew):
    """Ids of experts: all equally likely, all the same, or a third of them -1."""
    if skew is not None and skew >= 0:
        return np.full(shape, skew, dtype)
    ids = rng.integers(0, E, shape)
    return np.where(rng.random(shape) < (0.3 if skew == -1 else 0), -1, ids).astype(dtype)


def cumulated(ids):
    return np.cumsum(oracle.number_count(ids, E)).astype(ids.dtype)


@shapes
@dtypes
@skews
def test_number_count(skew, dtype, shape, rng, place, backend):
    ids = experts(rng, shape, dtype, skew)
    assert_bits_equal(utils._number_count(tensor(ids, place), E), oracle.number_count(ids, E))
    assert_bits_equal(utils._number_count(tensor(ids, place), 3), oracle.number_count(ids, 3))  # others aren't counted


@shapes
@dtypes
@skews
def test_assign_pos(skew, dtype, shape, rng, place, backend):
    ids = experts(rng, shape, dtype, skew)
    ends = tensor(cumulated(ids), place)
    got = utils._assign_pos(tensor(ids, place), ends)
    assert_bits_equal(got, oracle.assign_pos(ids, cumulated(ids)))
    assert_bits_equal(ends, cumulated(ids))  # Paddle counts it down


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("num_experts", [1, 3, 65])
@dtypes
def test_limit_by_capacity(dtype, num_experts, workers, rng, place):
    counts = rng.integers(0, 9, workers * num_experts).astype(dtype)
    for most in (1, 9, 50):
        capacity = rng.integers(0, most, num_experts).astype(np.int64)
        room = tensor(capacity, place)
        got = utils._limit_by_capacity(tensor(counts, place), room, workers)
        assert_bits_equal(got, oracle.limit_by_capacity(counts, capacity, workers))
        assert_bits_equal(room, capacity)


@pairwise_of(pytest.mark.parametrize("most", [1, 4, 2000]), skews, dtypes, shapes)
def test_prune_gate_by_capacity(most, skew, dtype, shape, rng, place, backend):
    ids, counts = experts(rng, shape, dtype, skew), rng.integers(0, most, E).astype(np.int64)
    room = tensor(counts, place)
    got = utils._prune_gate_by_capacity(tensor(ids, place), room, E, 1)
    assert_bits_equal(got, oracle.prune_gate_by_capacity(ids, counts))
    assert_bits_equal(room, counts)


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("num_tokens", [0, 1, 1025])
@dtypes
def test_random_routing(dtype, num_tokens, value_dtype, rng, place):
    ids = rng.integers(-1, E, (num_tokens, 2)).astype(dtype)
    values = tensor(rng.random((num_tokens, 2)).astype(np.float32) / 2, place).astype(value_dtype)
    prob = tensor(rng.random(num_tokens).astype(np.float32), place)
    if value_dtype != "bfloat16":
        prob = prob.astype(value_dtype)
    routing = tensor(ids, place)
    got = utils._random_routing(routing, values, prob)
    wide = [each.astype("float64").numpy() for each in (prob, values)]
    assert_bits_equal(got, oracle.random_routing(*wide, ids))
    assert_bits_equal(routing, ids)


def test_random_routing_keeps_ties_and_nan(place):
    ids = tensor(np.array([[0, 1]] * 3, np.int64), place)
    values = tensor(np.array([[0.5, 0.25], [0.5, np.nan], [0.5, 0.2499]], np.float32), place)
    prob = tensor(np.array([0.5, 0.5, 0.5], np.float32), place)
    assert utils._random_routing(ids, values, prob).tolist() == [[0, 1], [0, 1], [0, -1]]


def test_the_examples_of_paddles_documentation(place):
    ids = tensor(np.array([[0, 2], [0, 2]], np.int64), place)
    assert utils._number_count(ids, 6).tolist() == [2, 0, 2, 0, 0, 0]
    assert utils._assign_pos(ids, paddle.cumsum(utils._number_count(ids, 4))).tolist() == [2, 0, 3, 1]
    counts, capacity = (tensor(np.array(each), place) for each in ([1, 2, 2, 8, 3, 6], [5, 5, 5]))
    assert utils._limit_by_capacity(counts, capacity, 2).tolist() == [1, 2, 2, 4, 3, 3]
    gate, room = (tensor(np.array(each), place) for each in ([1, 3, 3, 3, 3, 2, 1, 1], [0, 3, 1, 3, 0, 0, 0, 0]))
    assert utils._prune_gate_by_capacity(gate, room, 8, 1).tolist() == [1, 3, 3, 3, -1, 2, 1, 1]


def test_one_expert_and_entries_of_none(place):
    ids = tensor(np.array([-1, 0, 0, -1, 0]), place)
    assert utils._number_count(ids, 1).tolist() == [3]
    assert utils._assign_pos(ids, tensor(np.array([3]), place)).tolist() == [4, 2, 1]
    assert utils._prune_gate_by_capacity(ids, tensor(np.array([2]), place), 1, 1).tolist() == [-1, 0, 0, -1, -1]


def test_pruned_entries_are_those_that_the_limits_leave_out(rng, place):
    """Two workers share the capacity of each expert, and the first comes first."""
    ids = experts(rng, (2, 200), np.int64, None)
    counts = np.stack([oracle.number_count(each, E) for each in ids]).reshape(-1)
    limited = utils._limit_by_capacity(tensor(counts, place), paddle.full([E], 33, "int64"), 2).reshape([2, E])
    for worker in range(2):
        pruned = utils._prune_gate_by_capacity(tensor(ids[worker], place), limited[worker], E, 1)
        assert_bits_equal(utils._number_count(pruned, E), limited[worker].numpy())


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_a_graph_counts_and_prunes(rng, place):
    def gate(ids, capacity):
        counts = utils._limit_by_capacity(utils._number_count(ids, E), capacity, 1)
        return counts, utils._prune_gate_by_capacity(ids, counts, E, 1)

    spec = [paddle.static.InputSpec([None, 2], "int64"), paddle.static.InputSpec([E], "int64")]
    program = paddle.jit.to_static(gate, full_graph=True, input_spec=spec)
    for num_tokens in (63, 5):
        ids = experts(rng, (num_tokens, 2), np.int64, -1)
        arguments = tensor(ids, place), paddle.full([E], 6, "int64")
        for got, expected in zip(program(*arguments), gate(*arguments), strict=True):
            assert_bits_equal(got, expected.numpy())

    def positions(ids):
        return utils._assign_pos(ids, paddle.cumsum(utils._number_count(ids, E)))

    with pytest.raises(TypeError, match="assign_pos: eff_num_len must be a tensor, outside of graphs"):
        paddle.jit.to_static(positions, full_graph=True)(arguments[0])


def ids_of(*values):
    return paddle.to_tensor(values, "int64")


BAD = [
    ("number_count", [paddle.ones([2]), 3], TypeError, "numbers must be of dtype int32 or int64, but got float32"),
    ("number_count", [[0, 1], 3], TypeError, "numbers must be a paddle.Tensor, but got list"),
    ("number_count", [ids_of(0), 0], ValueError, "upper_range must be from 1 to 65536, but got 0"),
    ("number_count", [ids_of(0), 1.0], TypeError, "upper_range must be an int, but got"),
    ("assign_pos", [ids_of(0, 2), ids_of(1, 2), ids_of(2)], ValueError, "x must be below 2, the number of experts"),
    (
        "assign_pos",
        [ids_of(0, 1), ids_of(2, 2), ids_of(2)],
        ValueError,
        r"cum_count must be \[1, 2\], the cumulated counts of x, but got \[2, 2\]",
    ),
    ("assign_pos", [ids_of(0, 1), ids_of(1, 2), ids_of(3)], ValueError, "eff_num_len must be at most 2, the entries"),
    ("assign_pos", [ids_of(0), ids_of(1), ids_of(1, 1)], ValueError, r"eff_num_len must be of shape \[1\]"),
    ("assign_pos", [ids_of(0), ids_of(1).reshape([1, 1]), ids_of(1)], ValueError, "cum_count must be of shape"),
    (
        "limit_by_capacity",
        [ids_of(1, 2, 3), ids_of(1, 2), 2],
        ValueError,
        r"expert_count must be of shape \[4\], but got \[3\]",
    ),
    ("limit_by_capacity", [ids_of(1, 2), ids_of(1, 2), 0], ValueError, "n_worker must be from 1"),
    ("limit_by_capacity", [ids_of(1), paddle.ones([1]), 1], TypeError, "capacity must be of dtype int32 or int64"),
    ("prune_gate_by_capacity", [ids_of(0, 4), ids_of(1, 1), 2, 1], ValueError, "gate_idx must be below 2, the number"),
    (
        "prune_gate_by_capacity",
        [ids_of(0), ids_of(1, 1), 2, 2],
        ValueError,
        r"expert_count must be of shape \[4\], but got \[2\]",
    ),
    ("prune_gate_by_capacity", [ids_of(0), ids_of(1), 2**10, 2**10], ValueError, "n_expert must be such that all"),
    (
        "random_routing",
        [paddle.ones([3]), paddle.ones([2, 2]), ids_of(0, 1, 2, 3).reshape([2, 2])],
        ValueError,
        r"prob must be of shape \[2\], but got \[3\]",
    ),
    (
        "random_routing",
        [paddle.ones([1]), paddle.ones([1, 3]), ids_of(0, 1, 2).reshape([1, 3])],
        ValueError,
        r"topk_idx must be of shape \[num_tokens, 2\], but got \[1, 3\]",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "error", "text"), BAD, ids=[f"{n}{row[0]}" for n, row in enumerate(BAD)])
def test_bad_arguments(name, arguments, error, text, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(gshard, name)(*arguments)


def test_without_validation_entries_of_no_expert_are_left_out(monkeypatch, place):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    ids = tensor(np.array([5, 1, -7, 0, 1]), place)
    assert _C_ops.prune_gate_by_capacity(ids, paddle.full([2], 9, "int64"), 2, 1).tolist() == [-1, 1, -1, 0, 1]
    assert _C_ops.assign_pos(ids, ids_of(1, 3), ids_of(3)).tolist() == [3, 4, 1]
    assert _C_ops.assign_pos(ids, ids_of(1, 4), ids_of(4)).tolist() == [3, 4, 1, -1]
