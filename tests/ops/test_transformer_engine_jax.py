# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""compat.transformer_engine_jax: calls as code for TransformerEngine's JAX functions makes them, against NumPy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from paddle_moe_ops import dispatch
from paddle_moe_ops.compat import transformer_engine_jax as te
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.masked_model import model_of
from tests.ops.problems import backward, every_kind, ordinary, tensor
from tests.ops.test_transformer_engine import blanked, with_zeros
from tests.pairwise import pairwise_of
from tests.params import SUM_DTYPES

B, S, E, H = 3, 7, 5, 8
T = B * S
dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


def test_the_module_has_every_function_of_dispatch():
    assert te.__all__ == dispatch.__all__
    for name in te.__all__:
        own = inspect.signature(getattr(te, name)).parameters
        parameters = inspect.signature(getattr(dispatch, name)).parameters
        positional = [key for key, each in parameters.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert [key for key in own if key in positional] == positional


@pairwise_of(
    dtypes,
    pytest.mark.parametrize("mask_dtype", [np.bool_, np.int32, np.float32], ids=lambda dtype: dtype.__name__),
    pytest.mark.parametrize("align", [None, 1, 16]),
    pytest.mark.parametrize("batched", [False, True], ids=["tokens", "batches"]),
)
def test_there_and_back(dtype, mask_dtype, align, batched, rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    routed = int(mask.sum())
    num_rows = routed if align is None else (routed + E * (align - 1)) // align * align
    model = model_of(mask, align or 1)
    x, probs = ordinary(rng, (T, H), dtype), with_zeros(rng, mask, dtype)
    shape = (B, S) if batched else (T,)
    leaves = [tensor(array.reshape(*shape, -1), place, gradient=True) for array in (x, probs)]
    routing = tensor(mask.astype(mask_dtype).reshape(*shape, E), place)
    rows, row_probs, row_id_map, pad_offsets, counts = te.token_dispatch(leaves[0], routing, routed, leaves[1], align)
    by_row = model.permuted_pairs(probs, num_rows)
    assert_bits_equal(rows, blanked(model, x, probs, num_rows), what="rows")
    assert_bits_equal(row_probs, by_row, what="permuted_probs")
    assert_bits_equal(row_id_map, model.row_id_map(model.pad_offsets), what="row_id_map")
    assert_bits_equal(counts, np.diff(model.starts).astype(np.int32), what="tokens_per_expert")
    if align is None:
        assert pad_offsets is None
    else:
        assert_bits_equal(pad_offsets, model.pad_offsets, what="pad_offsets")
    d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
    backward([rows, row_probs], [d_rows, d_row_probs])
    assert_bits_equal(leaves[0].grad, model.combined(d_rows).reshape(*shape, H), what="d_inp")
    assert_bits_equal(leaves[1].grad, model.pairs(d_row_probs).reshape(*shape, E), what="d_probs")
    y = ordinary(rng, (num_rows, H), dtype)
    for weights, by_pair in ((None, None), (leaves[1], probs)):
        out = te.token_combine(tensor(y, place), row_id_map, weights, pad_offsets)
        assert_bits_equal(out, model.combined(y, by_pair), what="sum")  # [T, H], whatever the batch


def test_rows_without_probabilities_are_copies(rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    model, routed, x = model_of(mask), int(mask.sum()), every_kind(rng, (T, H))
    rows, no_probs, *_ = te.token_dispatch(tensor(x, place), tensor(mask, place), routed)
    assert no_probs is None
    assert_bits_equal(rows, model.permuted(x, routed))


def test_chunks_and_their_map(rng, place, backend):
    x, sizes, order = every_kind(rng, (B, S, H)), np.array([4, 0, 9], np.int32), np.array([2, 0, 1], np.int32)
    out, row_id_map = te.sort_chunks_by_index(tensor(x, place), tensor(sizes, place), tensor(order, place))
    source = [*range(4, 13), *range(4), *range(13, T)]
    assert_bits_equal(out, x.reshape(T, H)[source])
    assert_bits_equal(row_id_map, np.argsort(source).astype(np.int32))


def test_experts_of_a_mask_and_their_weights(rng, place):
    mask = np.argsort(rng.random((T, E)), axis=1) < 2
    probs = rng.random((T, E), np.float32)
    experts, weights = te.routing_map_to_selected_experts(tensor(probs, place), tensor(mask, place), 2)
    assert experts.tolist() == [np.nonzero(line)[0].tolist() for line in mask]
    assert_bits_equal(weights, probs[mask].reshape(T, 2))


RANKS, LOCAL = 3, 2
COUNTS = np.array([[2, 0, 1, 3, 0, 1], [0, 0, 2, 1, 1, 0], [1, 4, 0, 0, 0, 2]], np.int32)


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_a_rank_sends_and_receives(rank, place, backend):
    sends = COUNTS.reshape(RANKS, RANKS, LOCAL).sum(axis=2)
    for function, table in (
        (te.compute_ragged_all_to_all_params, sends),
        (te.compute_reverse_ragged_all_to_all_params, sends.T),
    ):
        expected = (
            [table[rank, :target].sum() for target in range(RANKS)],
            table[rank],
            [table[:rank, target].sum() for target in range(RANKS)],
            table[:, rank],
        )
        actual = function(tensor(COUNTS, place), tensor(np.array(rank, np.int32), place), RANKS)
        for got, wanted in zip(actual, expected, strict=True):
            assert_bits_equal(got, np.array(wanted, np.int32))


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_a_rank_received_in_expert_order_and_back(rank, rng, place, backend):
    mine = COUNTS[:, rank * LOCAL : (rank + 1) * LOCAL]
    owners = [
        (sender, expert) for sender in range(RANKS) for expert in range(LOCAL) for _ in range(mine[sender, expert])
    ]
    source = sorted(range(len(owners)), key=lambda row: (owners[row][1], row))
    x, d_rows = every_kind(rng, (len(owners), H)), ordinary(rng, (len(owners), H))
    x_tensor, shard_id = tensor(x, place, gradient=True), tensor(np.array(rank, np.int32), place)
    rows, sizes, state = te.local_permute_after_a2a(x_tensor, tensor(COUNTS, place), shard_id, RANKS)
    assert_bits_equal(rows, x[source])
    assert_bits_equal(sizes, mine.sum(axis=0, dtype=np.int32))
    assert_bits_equal(te.local_unpermute_before_a2a(rows.detach(), state), x)
    backward([rows], [d_rows])
    assert_bits_equal(x_tensor.grad, d_rows[np.argsort(source)])
