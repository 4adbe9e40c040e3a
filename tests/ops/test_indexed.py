# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The family with gather indices: sorting slots, moving tokens to rows and rows back to slots."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import gemm, indexed, reference, routing, unpermute
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from tests.ops.problems import SEEDS, backward, every_kind, ids_and_experts, ordinary, tensor
from tests.params import ROW_DTYPES, SUM_DTYPES

SIZES = [(0, 2, 3, 7), (1, 1, 1, 1), (63, 3, 5, 72), (1025, 8, 64, 7), (5, 4, 6, 7168)]
BY_SIZE = pytest.mark.parametrize(("T", "K", "E", "H"), SIZES, ids=lambda size: str(size))


def random_ids(rng, T, K, E):
    return rng.integers(-1, E, (T, K)).astype(np.int64)


def random_gather(rng, num_slots):
    return rng.permutation(num_slots).astype(np.int32)


def test_the_family_has_the_functions_of_the_other_modules():
    assert indexed.torch_grouped_gemm is gemm.grouped_gemm
    assert indexed.calculate_topk is routing.calculate_topk


@settings(max_examples=60)
@given(ids_and_experts())
def test_any_ids_are_sorted_as_the_oracle_sorts_them(place, case):
    ids, num_experts = case
    got = indexed.get_routing_indices(tensor(ids, place), num_experts, True, validate=False)
    expected = reference.get_routing_indices(ids, num_experts)
    assert_all_bits_equal(got, expected, ("counts", "gather", "scatter"))
    assert all(output.stop_gradient for output in got)


@BY_SIZE
def test_slots_are_sorted_by_expert_and_unassigned_ones_come_last(T, K, E, H, rng, place, backend):
    ids = random_ids(rng, T, K, E)
    counts, gather = indexed.get_routing_indices(tensor(ids, place), E)
    flat = ids.reshape(-1)
    sorted_ids = flat[gather.numpy()]
    assert counts.tolist() == [np.count_nonzero(flat == expert) for expert in range(E)]
    assert sorted_ids.tolist() == [*sorted(flat[flat >= 0]), *flat[flat < 0]]
    for expert in range(-1, E):
        assert (np.diff(gather.numpy()[sorted_ids == expert]) > 0).all()


def test_an_expert_may_be_named_twice_by_a_token(place, backend):
    ids = np.int32([[1, 1], [0, 1]])
    counts, gather, scatter = indexed.get_routing_indices(tensor(ids, place), 2, True)
    assert (counts.tolist(), gather.tolist(), scatter.tolist()) == ([1, 3], [2, 0, 1, 3], [1, 2, 0, 3])


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@BY_SIZE
def test_rows_are_copies_of_tokens_and_come_back_to_slots(T, K, E, H, dtype, rng, place, backend):
    x, gather = every_kind(rng, (T, H), dtype), random_gather(rng, T * K)
    rows = indexed.permute(tensor(x, place), tensor(gather, place), K)
    assert_bits_equal(rows, reference.permute_indexed(x, gather, K), what="rows")
    slots = indexed.unpermute(rows, tensor(gather.astype(np.int64), place))
    assert_bits_equal(slots, np.repeat(x, K, axis=0), what="slots")


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 40), SEEDS)
def test_any_permutation_brings_rows_back(place, num_tokens, topk, hidden, seed):
    rng = np.random.default_rng(seed)
    rows, gather = every_kind(rng, (num_tokens * topk, hidden)), random_gather(rng, num_tokens * topk)
    out = indexed.unpermute(tensor(rows, place), tensor(gather, place))
    assert_bits_equal(out, reference.unpermute_indexed(rows, gather))
    assert_bits_equal(indexed.permute(out, tensor(gather, place), 1), rows)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@BY_SIZE
def test_gradients_are_ascending_sums_and_copies(T, K, E, H, dtype, rng, place, backend):
    x, gather = ordinary(rng, (T, H), dtype), random_gather(rng, T * K)
    d_rows = every_kind(rng, (T * K, H), dtype)
    leaf = tensor(x, place, gradient=True)
    backward([indexed.permute(leaf, tensor(gather, place), K)], [d_rows])
    assert_bits_equal(leaf.grad, reference.permute_indexed_backward(d_rows, gather, K), any_nan=True, what="permute")

    leaf = tensor(d_rows, place, gradient=True)
    backward([indexed.unpermute(leaf, tensor(gather, place))], [d_rows])
    assert_bits_equal(leaf.grad, reference.permute_indexed(d_rows, gather, 1), what="unpermute")


def test_tokens_may_have_more_dimensions(rng, place):
    x, gather = ordinary(rng, (3, 7, 20)), random_gather(rng, 42)
    leaf = tensor(x, place, gradient=True)
    rows = indexed.permute(leaf, tensor(gather, place), 2)
    assert_bits_equal(rows, reference.permute_indexed(x.reshape(21, 20), gather, 2))
    rows.sum().backward()
    assert leaf.grad.shape == [3, 7, 20]


def test_a_block_of_the_family_equals_one_of_the_verbs(rng, place, backend):
    """Permute, grouped GEMM, unpermute, weighted sum over slots, against a plan of the same routing."""
    T, K, E, H = 37, 3, 5, 12
    ids = random_ids(rng, T, K, E)
    x, weights = ordinary(rng, (T, H)), ordinary(rng, (E, 6, H))
    probs = np.where(ids >= 0, rng.random((T, K)), 0).astype(np.float32)
    counts, gather = indexed.get_routing_indices(tensor(ids, place), E)
    rows = indexed.permute(tensor(x, place), gather, K)
    rows = indexed.torch_grouped_gemm(rows, tensor(weights, place), counts)
    slots = indexed.unpermute(rows, gather).reshape([T, K, 6])
    out = (slots * tensor(probs, place).unsqueeze(-1)).sum(axis=1)

    plan = routing.route(tensor(ids, place), tensor(probs, place), num_experts=E, duplicates="each")
    rows = gemm.grouped_gemm(tensor(x, place)[plan.row_to_token], tensor(weights, place), plan.tokens_per_expert)
    expected = unpermute(rows, plan, plan.row_probs)
    np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gather", [[5, 5, 5, 5], [-1, 9, 2**40, -(2**40)], [3, 2, 2, 0]], ids=str)
def test_indices_without_validation_count_by_their_rank(gather, rng, place, backend):
    x, ranks = ordinary(rng, (4, 5)), np.argsort(np.argsort(gather, kind="stable"))
    indices = tensor(np.int64(gather), place)
    assert_bits_equal(indexed.permute(tensor(x, place), indices, 1, validate=False), x[ranks])
    assert_bits_equal(indexed.unpermute(tensor(x, place), indices, validate=False), x[np.argsort(ranks)])


@settings(max_examples=60)
@given(st.lists(st.integers(-1, 6), max_size=6))
def test_exactly_the_permutations_are_good(place, gather):
    x, indices = paddle.zeros([len(gather), 2]), tensor(np.int64(gather), place)
    if sorted(gather) == list(range(len(gather))):
        assert indexed.unpermute(x, indices, validate=True).shape == [len(gather), 2]
        return
    with pytest.raises(ValueError, match="unpermute: gather_indices must be a permutation of") as raised:
        indexed.unpermute(x, indices, validate=True)
    entries = [int(number) for number in re.findall(r"\d+", str(raised.value).partition("entr")[2])]
    if "both" in str(raised.value):
        first, second, value = entries
        assert gather[first] == gather[second] == value
        assert first < second
    else:
        assert not 0 <= gather[entries[0]] < len(gather)


def rows_and_indices(x, ids, gather):
    counts, sorted_slots = indexed.get_routing_indices(ids, 3)
    return counts, sorted_slots, indexed.permute(x, gather, 2)


# Paddle says so of its own full_like.
@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_bad_values_in_a_graph_are_taken_as_without_validation(rng, place):
    """The values of a graph are not known when the function is called."""
    x = tensor(ordinary(rng, (2, 5)), place)
    arguments = x, tensor(np.int32([[7, 0], [-9, 2]]), place), tensor(np.int32([9, -1, 9, 0]), place)
    counts, sorted_slots, rows = paddle.jit.to_static(rows_and_indices, full_graph=True)(*arguments)
    assert (counts.tolist(), sorted_slots.tolist()) == ([1, 0, 1], [1, 3, 0, 2])
    assert_bits_equal(rows, x.numpy()[[1, 0, 1, 0]])


X, GATHER, IDS = paddle.zeros([4, 6]), paddle.arange(8), paddle.zeros([4, 2], "int64")
CALLS = {
    "permute": lambda **changes: indexed.permute(**{"X": X, "gather_indices": GATHER, "topk": 2, **changes}),
    "unpermute": lambda **changes: indexed.unpermute(**{"X": X, "gather_indices": GATHER[:4], **changes}),
    "get_routing_indices": lambda **changes: indexed.get_routing_indices(
        **{"selected_experts": IDS, "num_experts": 3, **changes}
    ),
}
BAD = {
    "permute": [
        ({"X": X[0]}, ValueError, "X must be of at least two dimensions, [..., hidden], but got [6]"),
        ({"X": None}, TypeError, "X must be a paddle.Tensor, but got NoneType"),
        ({"X": paddle.zeros([4, 0])}, ValueError, "X must be of shape [..., hidden] with hidden >= 1, but got [4, 0]"),
        ({"topk": 0}, ValueError, "topk must be from 1 to 2147483647, but got 0"),
        ({"topk": 1}, ValueError, "gather_indices must be of shape [4], but got [8]"),
        (
            {"gather_indices": GATHER.astype("float32")},
            TypeError,
            "gather_indices must be of dtype int32 or int64, but got float32",
        ),
        (
            {"gather_indices": GATHER + 1},
            ValueError,
            "gather_indices must be a permutation of [0, 8), but entry 7 is 8",
        ),
        (
            {"gather_indices": GATHER // 2 * 2},
            ValueError,
            "gather_indices must be a permutation of [0, 8), but entries 0 and 1 are both 0",
        ),
        ({"validate": 1}, TypeError, "validate must be True, False or None, but got 1 of type int"),
    ],
    "unpermute": [
        ({"gather_indices": GATHER}, ValueError, "gather_indices must be of shape [4], but got [8]"),
        (
            {"gather_indices": paddle.to_tensor([0, 1, 3, 3])},
            ValueError,
            "gather_indices must be a permutation of [0, 4), but entries 2 and 3 are both 3",
        ),
        (
            {"gather_indices": paddle.to_tensor([3, 0, 2, 3])},
            ValueError,
            "gather_indices must be a permutation of [0, 4), but entries 0 and 3 are both 3",
        ),
    ],
    "get_routing_indices": [
        (
            {"selected_experts": IDS[0, 0]},
            ValueError,
            "selected_experts must be of shape [num_slots], [num_tokens, topk] or [..., topk], but got []",
        ),
        (
            {"selected_experts": IDS[:, :0]},
            ValueError,
            "selected_experts must be of shape [..., topk] with topk >= 1, but got [4, 0]",
        ),
        (
            {"selected_experts": paddle.to_tensor([0, 1, 3])},
            ValueError,
            "selected_experts must hold expert ids in [-1, 3), but slot 2 holds 3",
        ),
        (
            {"selected_experts": paddle.to_tensor([[[0, 1], [2, 2]], [[0, 4], [2, 1]]])},
            ValueError,
            "selected_experts must hold expert ids in [-1, 3), but token [1, 0], slot 1 holds 4",
        ),
        (
            {"selected_experts": IDS.astype("float32")},
            TypeError,
            "selected_experts must be of dtype int32 or int64, but got float32",
        ),
        (
            {"index_dtype": "int16"},
            TypeError,
            "index_dtype must be one of int32, int64, as a paddle dtype or its name, but got 'int16'",
        ),
        ({"num_experts": 65536}, ValueError, "num_experts must be from 1 to 65535, but got 65536"),
        (
            {"return_scatter_indices": None},
            TypeError,
            "return_scatter_indices must be a bool, but got None of type NoneType",
        ),
        (
            {"selected_experts": paddle.to_tensor([[0, 1], [2, 3]])},
            ValueError,
            "selected_experts must hold expert ids in [-1, 3), but token 1, slot 1 holds 3",
        ),
        (
            {"selected_experts": paddle.to_tensor([[0, -2]], dtype="int32")},
            ValueError,
            "selected_experts must hold expert ids in [-1, 3), but token 0, slot 1 holds -2",
        ),
    ],
}
BAD_CALLS = [(function, *bad) for function, cases in BAD.items() for bad in cases]


@pytest.mark.parametrize(("function", "changes", "error", "text"), BAD_CALLS)
def test_bad_arguments_are_named(function, changes, error, text, place):
    with pytest.raises(error, match=f"^{function}: {re.escape(text)}$"):
        CALLS[function](**{"validate": True, **changes})
