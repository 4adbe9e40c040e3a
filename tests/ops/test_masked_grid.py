# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""masked and its index maps over dtypes, sizes, rooms and padding, forward and backward, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import masked, reference
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.masked_model import Model, model_of
from tests.ops.problems import backward, optional_tensor, ordinary, tensor
from tests.pairwise import pairwise
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

H = 21
SIZES = [(0, 5, 2), (1, 1, 1), (37, 7, 1), (129, 9, 4)]  # tokens, experts, experts of a token
AXES = {"dtype": SUM_DTYPES, "size": SIZES}
NO_TOKENS = {"size": SIZES[:1]}
WEIGHTED = {"plain": False, "weighted": True}


def mask_of(rng: np.random.Generator, size: tuple[int, int, int]) -> NDArray:
    tokens, experts, topk = size
    return np.argsort(rng.random((tokens, experts)), axis=1) < topk


def check_sum(out: Any, leaves: Any, model: Model, rows: NDArray, probs: NDArray | None, d_out: NDArray) -> None:
    """A sum of rows and, after its backward pass, the gradients of the rows and the probabilities."""
    num_rows, dtype = len(rows), rows.dtype
    assert_bits_equal(out, model.combined(rows, probs), what="out")
    backward([out], [d_out])
    if probs is None:
        assert_bits_equal(leaves[0].grad, model.permuted(d_out, num_rows), what="d_rows")
        return
    weights = model.permuted_pairs(probs.astype(np.float32), num_rows)[:, None]
    exact = weights * model.permuted(d_out, num_rows).astype(np.float32)
    assert_bits_equal(leaves[0].grad, np.where(weights == 0, 0, exact).astype(dtype), what="d_rows")
    products = model.permuted(d_out, num_rows).astype(np.float64) * rows.astype(np.float64)
    expected, amount = model.pairs(products.sum(axis=1)), model.pairs(np.abs(products).sum(axis=1))
    tolerance = dtype_tols(dtype, dot_chain(H))
    assert_close_sums(leaves[1].grad, expected.astype(np.float32).astype(dtype), amount, tolerance, what="d_probs")


@pairwise(
    {**AXES, "room": ["all", "none", "half", "more"], "with_probs": WEIGHTED}, empty={**NO_TOKENS, "room": ["none"]}
)
def test_by_mask(dtype, size, room, with_probs, rng, place, backend):
    mask = mask_of(rng, size)
    routed = int(mask.sum())
    given = {"all": -1, "none": 0, "half": routed // 2, "more": routed + 6}[room]
    num_rows = routed if given < 0 else given
    model = model_of(mask, 1, num_rows)
    x, probs = ordinary(rng, (size[0], H), dtype), ordinary(rng, mask.shape, dtype) if with_probs else None
    x_tensor = tensor(x, place, gradient=True)
    d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
    if with_probs:
        probs_tensor = tensor(probs, place, gradient=True)
        rows, row_probs, row_id_map = masked.moe_permute_with_probs(x_tensor, probs_tensor, tensor(mask, place), given)
        assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows), what="permuted_probs")
        backward([rows, row_probs], [d_rows, d_row_probs])
        assert_bits_equal(probs_tensor.grad, model.pairs(d_row_probs), what="d_probs")
    else:
        rows, row_id_map = masked.moe_permute(x_tensor, tensor(mask, place), given)
        backward([rows], [d_rows])
    assert_bits_equal(rows, model.permuted(x, num_rows), what="rows")
    assert_bits_equal(row_id_map, model.row_id_map(), what="row_id_map")
    assert_bits_equal(x_tensor.grad, model.combined(d_rows), what="d_inp")
    y, d_out = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (size[0], H), dtype)
    leaves = [tensor(array, place, gradient=True) for array in (y, probs)[: 1 + with_probs]]
    out = masked.moe_unpermute(leaves[0], row_id_map, *leaves[1:], restore_shape=[size[0], H])
    check_sum(out, leaves, model, y, probs, d_out)


@pairwise({**AXES, "align": [1, 3, 16, 128], "offsets": [np.int32, np.int64]}, empty=NO_TOKENS)
def test_padded(dtype, size, align, offsets, rng, place, backend):
    mask = mask_of(rng, size)
    model = model_of(mask, align)
    num_rows = int(model.starts[-1])
    x, probs = ordinary(rng, (size[0], H), dtype), ordinary(rng, mask.shape, dtype)
    leaves = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    rows, row_probs, row_id_map, pad_offsets, targets = masked.moe_permute_and_pad_with_probs(
        *leaves, tensor(mask, place), tensor(model.counts, place), align
    )
    assert_bits_equal(rows, model.permuted(x, num_rows), what="rows")
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows), what="permuted_probs")
    assert_bits_equal(row_id_map, model.row_id_map(model.pad_offsets), what="row_id_map")
    assert_bits_equal(targets, np.diff(model.starts).astype(np.int64), what="targets")
    assert (pad_offsets is None) == (num_rows == mask.sum())
    d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
    backward([rows, row_probs], [d_rows, d_row_probs])
    assert_bits_equal(leaves[0].grad, model.combined(d_rows), what="d_inp")
    assert_bits_equal(leaves[1].grad, model.pairs(d_row_probs), what="d_probs")
    y, d_out = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (size[0], H), dtype)
    back = tensor(y, place, gradient=True), tensor(probs, place, gradient=True)
    out = masked.moe_unpermute(
        *back[:1], row_id_map, back[1], pad_offsets=tensor(model.pad_offsets.astype(offsets), place)
    )
    check_sum(out, back, model, y, probs, d_out)


@pairwise({**AXES, "room": [-1, 0, 1, 60], "with_probs": WEIGHTED}, empty=NO_TOKENS)
def test_by_index(dtype, size, room, with_probs, rng, place, backend):
    tokens, experts, topk = size
    ids = rng.integers(0, experts, (tokens, topk)).astype(np.int32)
    num_rows = room if room > 0 else tokens * topk
    order = np.argsort(ids.ravel(), kind="stable")[:num_rows]
    tokens_of = order // topk
    rows_of = np.full(tokens * topk, -1, np.int32)
    rows_of[order] = np.arange(len(order))
    x, probs = ordinary(rng, (tokens, H), dtype), ordinary(rng, (tokens, topk), dtype)
    x_tensor = tensor(x, place, gradient=True)
    rows, row_id_map = masked.moe_permute(x_tensor, tensor(ids, place), room, map_type="index", num_experts=experts)
    expected = np.zeros((num_rows, H), dtype)
    expected[: len(order)] = x[tokens_of]
    assert_bits_equal(rows, expected, what="rows")
    assert_bits_equal(row_id_map, rows_of.reshape(tokens, topk).T.ravel(), what="row_id_map")
    ascending = np.sort(np.where(rows_of < 0, 1 << 30, rows_of).reshape(tokens, topk), axis=1)
    token_rows = np.where(ascending == 1 << 30, -1, ascending)
    d_rows = ordinary(rng, (num_rows, H), dtype)
    backward([rows], [d_rows])
    assert_bits_equal(x_tensor.grad, reference.sum_rows(d_rows, token_rows), what="d_inp")
    y, d_out = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (tokens, H), dtype)
    y_tensor, weights = tensor(y, place, gradient=True), np.zeros(num_rows, np.float32)
    weights[: len(order)] = probs.ravel()[order] if with_probs else 1
    out = masked.moe_unpermute(
        y_tensor, row_id_map, optional_tensor(probs if with_probs else None, place), [tokens, H], "index"
    )
    assert_bits_equal(out, reference.sum_rows(y, token_rows, weights if with_probs else None), what="out")
    backward([out], [d_out])
    expected = np.zeros((num_rows, H), np.float32)
    expected[: len(order)] = weights[: len(order), None] * d_out[tokens_of].astype(np.float32)
    assert_bits_equal(y_tensor.grad, expected.astype(dtype), what="d_rows")


@pairwise({"dtype": FLOAT8_DTYPES, "size": SIZES, "room": [0, 50]}, empty=NO_TOKENS)
def test_float8_rows_with_probabilities_and_scales(dtype, size, room, rng, place, backend):
    mask = mask_of(rng, size)
    x, probs = ordinary(rng, (size[0], H), dtype), ordinary(rng, mask.shape)
    for align in (1, 16):
        model = model_of(mask, align, room if align == 1 else 1 << 30)
        num_rows = room if align == 1 else int(model.starts[-1])
        for scale in (ordinary(rng, (size[0], 3)), rng.integers(0, 256, (size[0], 5)).astype(np.uint8)):
            tensors = [tensor(array, place) for array in (x, probs, mask)]
            if align == 1:
                made = masked.moe_permute_with_probs(*tensors, room, scale=tensor(scale, place))
            else:
                counts = tensor(model.counts, place)
                made = masked.moe_permute_and_pad_with_probs(*tensors, counts, align, scale=tensor(scale, place))
            assert len(made) == (4 if align == 1 else 6)
            assert_bits_equal(made[0], model.permuted(x, num_rows), what="rows")
            assert_bits_equal(made[1], model.permuted_pairs(probs, num_rows), what="permuted_probs")
            assert_bits_equal(made[-1], model.permuted(scale, num_rows), what="permuted_scale")


@pairwise(
    {
        "dtype": [*SUM_DTYPES, *FLOAT8_DTYPES],
        "num_rows, num_chunks": [(0, 4), (0, 0), (63, 1), (130, 24)],
        "probs_dtype": [None, *SUM_DTYPES],
    },
    empty={"num_rows, num_chunks": [(0, 4), (0, 0)]},
)
def test_chunks(dtype, num_rows, num_chunks, probs_dtype, rng, place, backend):
    lengths = rng.multinomial(num_rows, np.full(num_chunks, 1 / num_chunks)) if num_chunks else np.zeros(0, np.int64)
    order, starts = rng.permutation(num_chunks), np.cumsum(lengths) - lengths
    source = [row for chunk in order for row in range(starts[chunk], starts[chunk] + lengths[chunk])]
    source = np.array(source + list(range(len(source), num_rows)), np.int64)
    x, d_out = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows, H), dtype)
    x_tensor = tensor(x, place, gradient=dtype in SUM_DTYPES)
    arrays = tensor(lengths, place), tensor(order, place)
    if probs_dtype is None:
        out = masked.moe_sort_chunks_by_index(x_tensor, *arrays)
        outputs, gradients = [out], [d_out]
    else:
        probs, d_probs = ordinary(rng, (num_rows,), probs_dtype), ordinary(rng, (num_rows,), probs_dtype)
        probs_tensor = tensor(probs, place, gradient=True)
        out, probs_out = masked.moe_sort_chunks_by_index_with_probs(x_tensor, probs_tensor, *arrays)
        assert_bits_equal(probs_out, probs[source], what="probs")
        outputs, gradients = [out, probs_out], [d_out, d_probs]
    assert_bits_equal(out, x[source], what="rows")
    first = 0 if dtype in SUM_DTYPES else 1  # float8 rows have no gradient
    if not outputs[first:]:
        return
    backward(outputs[first:], gradients[first:])
    back = np.argsort(source)
    if first == 0:
        assert_bits_equal(x_tensor.grad, d_out[back], what="d_inp")
    if probs_dtype is not None:
        assert_bits_equal(probs_tensor.grad, d_probs[back], what="d_probs")
