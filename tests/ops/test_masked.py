# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""masked: TransformerEngine's functions against what it documents of them, computed here by loops over tokens."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import masked, reference
from paddle_moe_ops.backends import Validation
from paddle_moe_ops.rowmaps import read_chunk_map
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols
from tests.ops.masked_model import E, H, T, masks, model_of
from tests.ops.problems import backward, every_kind, optional_tensor, ordinary, tensor
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


# ---- maps


@pytest.mark.parametrize("mask_dtype", [np.bool_, np.int32, np.int64, np.int8, np.uint8])
@pytest.mark.parametrize("padding", [0, 1, 16, 128])
def test_row_id_map_has_the_documented_layout(padding, mask_dtype, rng, place, backend):
    for mask in masks(rng):
        model = model_of(mask, max(padding, 1))
        row_id_map, num_out = masked.make_row_id_map(tensor(mask.astype(mask_dtype), place), fp8_padding=padding)
        assert_bits_equal(row_id_map, model.row_id_map())
        assert (num_out.dtype, num_out.shape, int(num_out)) == (paddle.int32, [], model.starts[-1])
        assert row_id_map.stop_gradient
        assert num_out.stop_gradient


@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_rows_beyond_num_out_tokens_are_dropped(limit, padding, rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask, max(padding, 1), limit)
    row_id_map, num_out = masked.make_row_id_map(tensor(mask, place), limit, fp8_padding=padding)
    assert_bits_equal(row_id_map, model.row_id_map())
    assert int(num_out) == min(limit, model.starts[-1])
    x = every_kind(rng, (T, H))
    permuted = masked.permute_with_mask_map(tensor(x, place), row_id_map, num_out)
    assert_bits_equal(permuted, model.permuted(x, int(num_out)))


def test_num_topk_keeps_the_lowest_experts(rng, place):
    mask, *_ = masks(rng)
    kept = mask & (np.cumsum(mask, axis=1) <= 2)
    row_id_map, _ = masked.make_row_id_map(tensor(mask, place), num_topK=2, validate=False)
    assert_bits_equal(row_id_map, model_of(kept).row_id_map())
    with pytest.raises(ValueError, match=r"^make_row_id_map: routing_map must set at most topk=2 experts per token, "):
        masked.make_row_id_map(tensor(mask, place), num_topK=2, validate=True)


# ---- map, permute and unpermute, with all their arguments


def test_map_permute_unpermute_as_documented(rng, place, backend):
    mask = np.zeros((T, E), np.bool_)
    for token in range(T):
        mask[token, rng.choice(E, 2, replace=False)] = True
    x_array, probs_array = ordinary(rng, (T, H)), rng.random((T, E), np.float32)
    mask, x, probs = tensor(mask, place), tensor(x_array, place), tensor(probs_array, place)
    row_id_map, num_out = masked.make_row_id_map(mask, num_topK=2)
    y = masked.permute_with_mask_map(x, row_id_map, num_out)
    out = masked.unpermute_with_mask_map(y, row_id_map, probs=probs)
    model = model_of(mask.numpy())
    assert_bits_equal(y, model.permuted(x_array, T * 2))
    assert_bits_equal(out, model.combined(model.permuted(x_array, T * 2), probs_array))


def with_padding(padding, rng, place):
    """A model with its number of rows, and the row_id_map and pad_offsets that say the same."""
    mask, *_ = masks(rng)
    model = model_of(mask, 1 if padding == "none" else 16)
    offsets = model.pad_offsets if padding == "by offsets" else None
    maps = tensor(model.row_id_map(offsets), place), optional_tensor(offsets, place)
    return model, int(model.starts[-1]), maps


@dtypes
@pytest.mark.parametrize("padding", ["none", "in the map", "by offsets"])
def test_rows_probabilities_and_gradients(padding, dtype, rng, place, backend):
    model, num_rows, maps = with_padding(padding, rng, place)
    x, probs = ordinary(rng, (T, H), dtype), ordinary(rng, (T, E), dtype)
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    rows, row_probs, no_scale = masked.permute_with_mask_map(
        x_tensor, maps[0], num_rows, probs_tensor, pad_offsets=maps[1]
    )
    assert no_scale is None
    assert_bits_equal(rows, model.permuted(x, num_rows), what="rows")
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows), what="permuted_probs")
    d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
    backward([rows, row_probs], [d_rows, d_row_probs])
    assert_bits_equal(x_tensor.grad, model.combined(d_rows), what="d_inp")
    assert_bits_equal(probs_tensor.grad, model.pairs(d_row_probs), what="d_probs")


@dtypes
@pytest.mark.parametrize("padding", ["none", "in the map", "by offsets"])
def test_sums_and_gradients(padding, dtype, rng, place, backend):
    model, num_rows, maps = with_padding(padding, rng, place)
    rows, probs, values = (ordinary(rng, shape, dtype) for shape in ((num_rows, H), (T, E), (num_rows,)))
    leaves = [tensor(array, place, gradient=True) for array in (rows, probs, values)]
    out, pairs = masked.unpermute_with_mask_map(leaves[0], maps[0], leaves[1], maps[1], leaves[2])
    assert_bits_equal(out, model.combined(rows, probs), what="out")
    assert_bits_equal(pairs, model.pairs(values), what="unpermuted_probs")
    d_out, d_pairs = ordinary(rng, (T, H), dtype), ordinary(rng, (T, E), dtype)
    backward([out, pairs], [d_out, d_pairs])
    d_rows, d_probs = (leaf.grad for leaf in leaves[:2])
    weights = model.permuted_pairs(probs.astype(np.float32), num_rows)
    exact = weights[:, None] * model.permuted(d_out, num_rows).astype(np.float32)
    assert_bits_equal(d_rows, np.where(weights[:, None] == 0, 0, exact).astype(dtype), what="d_inp")
    assert_bits_equal(leaves[2].grad, model.permuted_pairs(d_pairs, num_rows), what="d_permuted_probs")
    products = model.permuted(d_out, num_rows).astype(np.float64) * rows.astype(np.float64)
    expected, size = model.pairs(products.sum(axis=1)), model.pairs(np.abs(products).sum(axis=1))
    tolerance = dtype_tols(dtype, dot_chain(H))
    assert_close_sums(d_probs, expected.astype(np.float32).astype(dtype), size, tolerance, what="d_probs")
    by_hand = masked.unpermute_with_mask_map_bwd_with_merging_probs(
        tensor(d_out, place), maps[0], tensor(rows, place), tensor(probs, place), maps[1]
    )
    assert_bits_equal(by_hand[0], d_rows, what="act_grad")
    assert_bits_equal(by_hand[1], d_probs, what="merging_probs_grad")
    plain = masked.unpermute_with_mask_map(tensor(rows, place), maps[0], pad_offsets=maps[1])
    assert_bits_equal(plain, model.combined(rows), what="plain sum")


def test_zero_probability_blanks_a_row_only_when_asked(rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask)
    num_rows = int(model.starts[-1])
    x, probs = ordinary(rng, (T, H)), rng.integers(0, 2, (T, E)).astype(np.float32)
    row_id_map = tensor(model.row_id_map(), place)
    rows = model.permuted(x, num_rows)
    for blanks in (False, True):
        x_tensor = tensor(x, place, gradient=True)
        actual, row_probs, _ = masked.permute_with_mask_map(
            x_tensor, row_id_map, num_rows, tensor(probs, place), zero_prob_as_padding=blanks
        )
        expected_probs = model.permuted_pairs(probs, num_rows)
        assert_bits_equal(row_probs, expected_probs)
        assert_bits_equal(actual, np.where((expected_probs == 0)[:, None] & blanks, np.float32(0), rows))
        backward([actual], [rows])  # the gradient passes through blank rows, as in TransformerEngine
        assert_bits_equal(x_tensor.grad, model.combined(rows))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_float8_rows_travel_with_their_scales(dtype, rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask, 16)
    num_rows = int(model.starts[-1])
    x, row_id_map = every_kind(rng, (T, 200), dtype), tensor(model.row_id_map(), place)
    rows = model.permuted(x, num_rows)
    scales = {
        "groups of 128": every_kind(rng, (T, 2)),
        "packed": every_kind(rng, (T, 1)).view(np.int32),
        "groups of 32": rng.integers(0, 256, (T, 7)).astype(np.uint8),
    }
    for scale in scales.values():
        permuted, _, permuted_scale = masked.permute_with_mask_map(
            tensor(x, place), row_id_map, num_rows, scale=tensor(scale, place)
        )
        assert permuted.stop_gradient
        assert_bits_equal(permuted, rows)
        assert_bits_equal(permuted_scale, model.permuted(scale, num_rows))
    whole = tensor(np.array([0.5], np.float32), place)
    assert masked.permute_with_mask_map(tensor(x, place), row_id_map, num_rows, scale=whole)[2] is whole
    permuted, _, permuted_scale = masked.moe_permute(
        tensor(x, place), tensor(mask, place), 300, scale=tensor(scales["groups of 32"], place)
    )
    assert_bits_equal(permuted_scale, model_of(mask).permuted(scales["groups of 32"], 300))


# ---- chunk maps


@dtypes
@pytest.mark.parametrize("is_forward", [True, False])
def test_chunk_maps_move_rows_and_probabilities_both_ways(is_forward, dtype, rng, place, backend):
    sizes, order = rng.multinomial(50, np.full(6, 1 / 6)), rng.permutation(6).astype(np.int32)
    chunk_map = masked.make_chunk_sort_map(tensor(sizes, place), tensor(order, place), T)
    expected_map = reference.chunk_sort_map(sizes, order, T)
    assert_bits_equal(chunk_map, expected_map)
    short = masked.make_chunk_sort_map(tensor(sizes, place), tensor(order, place))
    assert_bits_equal(short, expected_map[:50])
    x, probs = every_kind(rng, (T, H)), ordinary(rng, (T,), dtype)
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    out, probs_out = masked.sort_chunks_by_map(x_tensor, chunk_map, probs_tensor, is_forward)
    source = np.argsort(expected_map) if is_forward else expected_map
    assert_bits_equal(out, x[source])
    assert_bits_equal(probs_out, probs[source])
    d_out, d_probs = every_kind(rng, (T, H)), ordinary(rng, (T,), dtype)
    backward([out, probs_out], [d_out, d_probs])
    assert_bits_equal(x_tensor.grad, d_out[np.argsort(source)])
    assert_bits_equal(probs_tensor.grad, d_probs[np.argsort(source)])
    codes = every_kind(rng, (T, H), FLOAT8_DTYPES[0])
    assert_bits_equal(masked.sort_chunks_by_map(tensor(codes, place), chunk_map, None, is_forward), codes[source])
    maps = read_chunk_map("f", chunk_map, is_forward, Validation.DATA)
    for each in (maps.row_to_token, maps.row_to_slot):  # kernels of a GPU read the second one
        assert_bits_equal(each, source.astype(np.int32))


@dtypes
def test_sorting_by_index_is_sort_chunks(dtype, rng, place):
    x, probs, sizes = every_kind(rng, (T, H)), ordinary(rng, (T,), dtype), np.array([5, 0, 40])
    arrays = tensor(sizes, place), tensor(np.array([2, 1, 0]), place)
    expected = reference.sort_chunks(x, sizes, np.array([2, 1, 0]), probs)
    assert_bits_equal(masked.moe_sort_chunks_by_index(tensor(x, place), *arrays), expected[0])
    out, probs_out = masked.moe_sort_chunks_by_index_with_probs(tensor(x, place), tensor(probs, place), *arrays)
    assert_bits_equal(out, expected[0])
    assert_bits_equal(probs_out, expected[1])
    with pytest.raises(ValueError, match=r"^moe_sort_chunks_by_index: sorted_index must be of shape \[3\], but got"):
        masked.moe_sort_chunks_by_index(tensor(x, place), arrays[0], arrays[1][:2])


# ---- route and move in one call


@dtypes
def test_moe_permute_and_moe_unpermute_by_mask(dtype, rng, place, backend):
    for mask in masks(rng):
        tokens, experts = mask.shape
        num_out = max(int(mask.sum()) - 2, 1)
        model = model_of(mask, 1, num_out)
        x, probs = ordinary(rng, (tokens, H), dtype), rng.random((tokens, experts)).astype(dtype)
        rows, row_id_map = masked.moe_permute(tensor(x, place), tensor(mask, place), num_out)
        assert_bits_equal(rows, model.permuted(x, num_out))
        assert_bits_equal(row_id_map, model.row_id_map())
        probs_tensor = tensor(probs, place, gradient=True)
        rows, row_probs, row_id_map = masked.moe_permute_with_probs(
            tensor(x, place), probs_tensor, tensor(mask, place), num_out
        )
        assert_bits_equal(rows, model.permuted(x, num_out))
        assert_bits_equal(row_probs, model.permuted_pairs(probs, num_out))
        assert_bits_equal(row_id_map, model.row_id_map())
        d_row_probs = ordinary(rng, (num_out,), dtype)
        backward([row_probs], [d_row_probs])
        assert_bits_equal(probs_tensor.grad, model.pairs(d_row_probs))
        y = ordinary(rng, (num_out, H), dtype)
        for weights in (None, probs):
            out = masked.moe_unpermute(tensor(y, place), row_id_map, optional_tensor(weights, place))
            assert_bits_equal(out, model.combined(y, weights))
        shaped = masked.moe_unpermute(tensor(y, place), row_id_map, restore_shape=[tokens, 1, H])
        assert shaped.shape == [tokens, 1, H]


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("counts_as", ["tensor", "list"])
def test_moe_permute_and_pad(counts_as, align, rng, place, backend, monkeypatch):
    mask, *_ = masks(rng)
    model = model_of(mask, align)
    num_rows = int(model.starts[-1])
    x, probs = ordinary(rng, (T, H)), ordinary(rng, (T, E))
    counts = model.counts.tolist() if counts_as == "list" else tensor(model.counts, place)
    rows, row_probs, row_id_map, pad_offsets, targets = masked.moe_permute_and_pad_with_probs(
        tensor(x, place), tensor(probs, place), tensor(mask, place), counts, align
    )
    assert_bits_equal(rows, model.permuted(x, num_rows))
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows))
    assert_bits_equal(row_id_map, model.row_id_map(model.pad_offsets))
    assert_bits_equal(targets, np.diff(model.starts).astype(np.int64))
    assert (pad_offsets is None) == (align == 1)
    if pad_offsets is not None:
        assert_bits_equal(pad_offsets, model.pad_offsets)
    out = masked.moe_unpermute(rows, row_id_map, tensor(probs, place), pad_offsets=pad_offsets)
    assert_bits_equal(out, model.combined(model.permuted(x, num_rows), probs))
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    with pytest.raises(ValueError, match="moe_permute_and_pad_with_probs: tokens_per_expert must be"):
        masked.moe_permute_and_pad_with_probs(
            tensor(x, place), tensor(probs, place), tensor(mask, place), [1] * E, align
        )


@pytest.mark.parametrize("num_out_tokens", [0, 100])
@pytest.mark.parametrize("num_experts", [None, E])
def test_index_map_is_a_stable_sort_of_all_slots(num_experts, num_out_tokens, rng, place, backend):
    ids = rng.integers(-1, E, (T, 3)).astype(np.int32)  # -1 comes after all experts
    keys = np.where(ids < 0, E, ids).ravel()
    order = np.argsort(keys, kind="stable")[: num_out_tokens or T * 3]
    slot_to_row = np.full(T * 3, -1, np.int32)
    slot_to_row[order] = np.arange(len(order))
    x, probs = ordinary(rng, (T, H)), ordinary(rng, (T, 3))
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    rows, row_id_map = masked.moe_permute(
        x_tensor, tensor(ids, place), num_out_tokens, map_type="index", num_experts=num_experts
    )
    assert_bits_equal(rows, x[order // 3])
    assert_bits_equal(row_id_map, slot_to_row.reshape(T, 3).T.ravel())
    token_rows = np.sort(np.where(slot_to_row < 0, 10_000, slot_to_row).reshape(T, 3), axis=1)
    token_rows = np.where(token_rows == 10_000, -1, token_rows)
    out = masked.moe_unpermute(rows, row_id_map, probs_tensor, map_type="index")
    weights = probs.ravel()[order]
    assert_bits_equal(out, reference.sum_rows(x[order // 3], token_rows, weights))
    plain = masked.moe_unpermute(rows.detach(), row_id_map, restore_shape=[T, H], map_type="index")
    assert_bits_equal(plain, reference.sum_rows(x[order // 3], token_rows))
    d_out = ordinary(rng, (T, H))
    backward([out], [d_out])
    d_rows = reference.round_to(reference.fma32(weights[:, None], d_out[order // 3], np.float32(-0.0)), np.float32)
    assert_bits_equal(x_tensor.grad, reference.sum_rows(d_rows, token_rows))
    products = d_out[order // 3].astype(np.float64) * x[order // 3]
    expected, size = np.zeros(T * 3, np.float32), np.zeros(T * 3)
    expected[order], size[order] = products.sum(axis=1), np.abs(products).sum(axis=1)
    tolerance = dtype_tols(np.float32, dot_chain(H))
    assert_close_sums(probs_tensor.grad, expected.reshape(T, 3), size.reshape(T, 3), tolerance, what="d_probs")


def test_without_validation_the_first_slot_of_an_index_map_owns_a_repeated_row(place, backend):
    rows, row_id_map = tensor(np.float32([[1], [2], [4]]), place), tensor(np.int32([0, 0, 1]), place)
    options = {"restore_shape": [3, 1], "map_type": "index"}
    assert masked.moe_unpermute(rows, row_id_map, **options, validate=False).flatten().tolist() == [1, 0, 2]
    text = "^moe_unpermute: row_id_map must name a row at most once, but row 0 is at token 0, slot 0 and at token 1"
    with pytest.raises(ValueError, match=text):
        masked.moe_unpermute(rows, row_id_map, **options, validate=True)


def test_index_map_puts_ids_beyond_all_possible_experts_last(place, backend):
    x, ids = tensor(np.float32([[1], [2], [3]]), place), tensor(np.int32([[70000], [1], [65535]]), place)
    rows, _ = masked.moe_permute(x, ids, map_type="index")
    assert rows.flatten().tolist() == [2, 1, 3]


# ---- bad maps and bad arguments


def test_bad_maps_never_lead_out_of_bounds(rng, place, backend):
    bad = rng.integers(-(2**31), 2**31, (T, 2 * E + 1)).astype(np.int32)
    bad[:, E : 2 * E] = rng.integers(-1, E + 1, (T, E))
    bad[::2, :E] = rng.integers(-1, 40, (T + 1) // 2 * E).reshape(-1, E)
    bad[:, -1] = rng.integers(-2, E + 3, T)
    rowmap = reference.row_id_map_to_rowmap(bad)
    maps = reference.read_rowmap(rowmap, 40)
    x, y = ordinary(rng, (T, H)), ordinary(rng, (40, H))
    permuted = masked.permute_with_mask_map(tensor(x, place), tensor(bad, place), 40, validate=False)
    expected = np.where((maps.row_to_token >= 0)[:, None], x[maps.row_to_token], np.float32(0))
    assert_bits_equal(permuted, expected)
    out = masked.unpermute_with_mask_map(tensor(y, place), tensor(bad, place), validate=False)
    assert_bits_equal(out, reference.sum_rows(y, maps.token_rows))
    with pytest.raises(
        ValueError, match=r"^unpermute_with_mask_map: row_id_map must be a map of make_row_id_map, which"
    ):
        masked.unpermute_with_mask_map(tensor(y, place), tensor(bad, place), validate=True)
    bad[:, -1] = np.clip(bad[:, -1], 0, E)
    with pytest.raises(ValueError, match=r"^unpermute_with_mask_map: row_id_map must hold rows in \[-1, 40\), but"):
        masked.unpermute_with_mask_map(tensor(y, place), tensor(bad, place), validate=True)
    with pytest.raises(ValueError, match=r"^permute_with_mask_map: row_id_map must name a row at most once, but row"):
        masked.permute_with_mask_map(tensor(x, place), tensor(bad, place), 40, validate=True)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


MAP, PROBS = zeros(4, 7, dtype=np.int32), zeros(4, 3)
BAD = [
    ("make_row_id_map", (zeros(4, 3),), TypeError, "routing_map must be of dtype bool, int32, int64, int8 or uint8,"),
    (
        "make_row_id_map",
        (zeros(4, dtype=np.bool_),),
        ValueError,
        "routing_map must be of shape [num_tokens, num_experts]",
    ),
    ("make_row_id_map", (zeros(4, 3, dtype=np.bool_), -1), ValueError, "num_out_tokens must be from 0 to"),
    ("make_row_id_map", (zeros(4, 3, dtype=np.bool_), 0, 4), ValueError, "num_topK must be from 1 to 3, but got 4"),
    ("make_row_id_map", (zeros(4, 3, dtype=np.bool_), 0, None, "8"), TypeError, "fp8_padding must be an int, but got"),
    ("permute_with_mask_map", (zeros(4, 2), MAP[:, :6], 9), ValueError, "row_id_map must be of shape [num_tokens, 2 *"),
    ("permute_with_mask_map", (zeros(5, 2), MAP, 9), ValueError, "inp must be of shape [4, hidden], but got [5, 2]"),
    ("permute_with_mask_map", (zeros(4, 2), MAP, -1), ValueError, "num_out_tokens must be from 0 to 2147483647, but"),
    (
        "permute_with_mask_map",
        (zeros(4, 2), MAP, 9, PROBS[:, :2]),
        ValueError,
        "probs must be of shape [4, 3], but got",
    ),
    ("permute_with_mask_map", (zeros(4, 2), MAP, 9, 0.5), TypeError, "probs must be a paddle.Tensor, but got float"),
    (
        "permute_with_mask_map",
        (zeros(4, 2), MAP, 9, None, zeros(3, 1)),
        ValueError,
        "scale must be of shape [4, num_sca",
    ),
    ("permute_with_mask_map", (zeros(4, 2), MAP, 9, None, zeros(3)), ValueError, "scale must be of shape [num_tokens,"),
    (
        "permute_with_mask_map",
        (zeros(4, 2), MAP, 9, None, None, zeros(2, dtype=np.int32)),
        ValueError,
        "pad_offsets must be of shape [3], but got [2]",
    ),
    ("unpermute_with_mask_map", (zeros(9, 2), zeros(4, 7)), TypeError, "row_id_map must be of dtype int32, but got"),
    (
        "unpermute_with_mask_map",
        (zeros(9, 2, dtype=np.int32), MAP),
        TypeError,
        "inp must be of dtype bfloat16, float16 or",
    ),
    (
        "unpermute_with_mask_map",
        (zeros(9, 2), MAP, PROBS, None, zeros(8)),
        ValueError,
        "permuted_probs must be of shape [9], but got [8]",
    ),
    (
        "unpermute_with_mask_map_bwd_with_merging_probs",
        (zeros(4, 3), MAP, zeros(9, 2), PROBS),
        ValueError,
        "fwd_output_grad must be of shape [4, 2], but got [4, 3]",
    ),
    ("make_chunk_sort_map", (zeros(3), zeros(3)), TypeError, "split_sizes must be of dtype int32 or int64, but got"),
    (
        "sort_chunks_by_map",
        (zeros(4, 2), zeros(3, dtype=np.int32)),
        ValueError,
        "chunk_map must be of shape [4], but got",
    ),
    ("moe_permute", (zeros(4, 2), zeros(4, 3, dtype=np.bool_), -2), ValueError, "num_out_tokens must be from -1 to"),
    ("moe_permute", (zeros(4, 2), MAP, 9, -1, "masks"), ValueError, "map_type must be one of 'mask', 'index', but got"),
    (
        "moe_permute",
        (zeros(4, 2), zeros(5, 3, dtype=np.bool_), 9),
        ValueError,
        "routing_map must be of shape [4, num_ex",
    ),
    (
        "moe_permute_and_pad_with_probs",
        (zeros(4, 2), PROBS, zeros(4, 3, dtype=np.bool_), None, 8),
        ValueError,
        "tokens_per_expert must be a list of ints or a 1-D int tensor, but got None",
    ),
    (
        "moe_unpermute",
        (zeros(9, 2), MAP, PROBS, None, "mask", PROBS),
        ValueError,
        "probs must be None with merging_probs",
    ),
    (
        "moe_unpermute",
        (zeros(9, 2), MAP, PROBS[:3]),
        ValueError,
        "merging_probs must be of shape [4, 3], but got [3, 3]",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_arguments_are_named(function, arguments, error, text, place):
    tensors = [tensor(value, place) if isinstance(value, np.ndarray) else value for value in arguments]
    with pytest.raises(error) as caught:
        getattr(masked, function)(*tensors)
    assert str(caught.value).startswith(f"{function}: {text}")
