# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""masked and dispatch: other forms of masks, names and offsets; rows of probability 0; ranks without rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import dispatch, masked, route
from paddle_moe_ops.compat import transformer_engine
from paddle_moe_ops.compat.te_masks import without_zero_probs
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.interpreting import on_both
from tests.ops.masked_model import masks, model_of
from tests.ops.problems import backward, every_kind, ordinary, tensor
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

T, H, E = 63, 24, 7
dtypes = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)


# ---- masks and offsets


def test_the_mask_has_a_second_name(rng, place):
    mask = tensor(masks(rng)[0], place)
    row_id_map, count = masked.make_row_id_map(mask=mask, num_out_tokens=40, fp8_padding=4)
    expected = masked.make_row_id_map(mask, 40, None, 4)
    assert_bits_equal(row_id_map, expected[0])
    assert int(count) == int(expected[1]) == 40
    with pytest.raises(TypeError, match=r"^make_row_id_map: routing_map was given twice, the second time as mask$"):
        masked.make_row_id_map(mask, mask=mask)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'routing_map'$"):
        masked.make_row_id_map()
    of_transformer_engine = transformer_engine.make_row_id_map(mask=mask, num_tokens=T, num_experts=E)
    assert_bits_equal(of_transformer_engine, masked.make_row_id_map(mask)[0])


def every_function_of_a_mask(mask, x, probs):
    """The results of all functions that take a mask and nothing that was made of one."""
    counts = (mask.numpy() != 0).sum(axis=0).tolist()
    room = sum(counts)
    return [
        *masked.make_row_id_map(mask),
        *masked.moe_permute(x, mask, room),
        *masked.moe_permute_with_probs(x, probs, mask, room),
        *masked.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4),
        *dispatch.token_dispatch(x, mask, room, probs, 4),
        *dispatch.routing_map_to_selected_experts(probs, mask, 3),
    ]


@pytest.mark.parametrize("mask_dtype", [np.int8, np.uint8, np.int32, np.int64], ids=lambda dtype: dtype.__name__)
def test_masks_of_integers_are_taken_everywhere(mask_dtype, rng, place, backend):
    mask, *_ = masks(rng)
    x, probs = tensor(ordinary(rng, (T, H)), place), tensor(ordinary(rng, (T, E)), place)
    values = mask * rng.choice(np.array([1, 3, 127, -128], np.int64), mask.shape)
    actual = every_function_of_a_mask(tensor(values.astype(mask_dtype), place), x, probs)
    expected = every_function_of_a_mask(tensor(mask, place), x, probs)
    for got, wanted in zip(actual, expected, strict=True):
        assert_bits_equal(got, wanted)


@dtypes
def test_dispatch_takes_masks_of_floats(dtype, rng, place, backend):
    mask, *_ = masks(rng)
    x, probs = tensor(ordinary(rng, (T, H)), place), tensor(ordinary(rng, (T, E)), place)
    small = np.array([0.5, -2, np.finfo(np.float16).smallest_subnormal, np.nan])
    floats = np.where(mask, rng.choice(small, mask.shape), rng.choice([0.0, -0.0], mask.shape)).astype(dtype)
    room = int(mask.sum())
    for function, arguments in (("token_dispatch", (room, probs, 4)), ("routing_map_to_selected_experts", (3,))):
        first = x if function == "token_dispatch" else probs
        actual = getattr(dispatch, function)(first, tensor(floats, place, gradient=True), *arguments)
        expected = getattr(dispatch, function)(first, tensor(mask, place), *arguments)
        for got, wanted in zip(actual, expected, strict=True):
            assert_bits_equal(got, wanted)
    with pytest.raises(
        TypeError, match=r"^moe_permute: routing_map must be of dtype bool, int32, int64, int8 or uint8"
    ):
        masked.moe_permute(x, tensor(floats, place), room)


def test_offsets_of_64_bits(rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask, 16)
    num_rows = int(model.starts[-1])
    row_id_map = tensor(model.row_id_map(model.pad_offsets), place)
    x, probs, y, d_out = (tensor(ordinary(rng, shape), place) for shape in ((T, H), (T, E), (num_rows, H), (T, H)))
    by_row = tensor(ordinary(rng, (num_rows,)), place)
    narrow = tensor(model.pad_offsets, place)
    results = [
        [
            *masked.permute_with_mask_map(x, row_id_map, num_rows, probs, pad_offsets=offsets)[:2],
            *masked.unpermute_with_mask_map(y, row_id_map, probs, offsets, by_row),
            *masked.unpermute_with_mask_map_bwd_with_merging_probs(d_out, row_id_map, y, probs, offsets),
            masked.moe_unpermute(y, row_id_map, probs, pad_offsets=offsets),
            dispatch.token_combine(y, row_id_map, probs, offsets),
            dispatch.token_combine(y, row_id_map, by_row, offsets),
        ]
        for offsets in (narrow, narrow.astype("int64"))
    ]
    for got, wanted in zip(*results, strict=True):
        assert_bits_equal(got, wanted)
    assert_bits_equal(results[1][2], model.combined(y.numpy(), probs.numpy()))
    far = narrow.astype("int64") + 2**32  # their low halves are good offsets
    with pytest.raises(ValueError, match=r"^unpermute_with_mask_map: row_id_map must hold rows in "):
        masked.unpermute_with_mask_map(y, row_id_map, probs, far, validate=True)
    assert not masked.unpermute_with_mask_map(y, row_id_map, probs, far, validate=False).numpy().any()


# ---- rows of probability 0


def with_probs(model, x, probs, mask, **options):
    return masked.moe_permute_with_probs(x, probs, mask, int(model.starts[-1]) + 3, **options)[:2]


def padded_with_probs(model, x, probs, mask, **options):
    counts = model.counts.tolist()
    return masked.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16, **options)[:2]


def dispatched(model, x, probs, mask, **options):
    return dispatch.token_dispatch(x, mask, int(model.counts.sum()), probs, 16, **options)[:2]


@pytest.mark.parametrize("function", [with_probs, padded_with_probs, dispatched], ids=lambda value: value.__name__)
@dtypes
def test_a_row_of_probability_zero_is_blank_only_when_asked(function, dtype, rng, place, backend):
    mask, *_ = masks(rng)
    x = ordinary(rng, (T, H), dtype)
    probs = rng.choice(np.array([0.0, -0.0, 1.0, np.finfo(np.float16).smallest_subnormal]), (T, E)).astype(dtype)
    for blanks in (False, True):
        leaves = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
        model = model_of(mask, 1 if function is with_probs else 16)
        rows, row_probs = function(model, *leaves, tensor(mask, place), zero_prob_as_padding=blanks)
        num_rows = len(rows)
        by_row = model.permuted_pairs(probs, num_rows)
        assert_bits_equal(row_probs, by_row, what="permuted_probs")
        copies = model.permuted(x, num_rows)
        kept = (by_row != 0)[:, None] | (not blanks)
        assert_bits_equal(rows, np.where(kept, copies, np.zeros_like(copies)), what="rows")
        blank = (rows.numpy()[: model.counts[0]] == 0).all(axis=1)  # those of the first expert, without its padding
        assert blank.any() == blanks
        assert not blank.all()
        # Gradients pass through blank rows, as in TransformerEngine.
        d_rows, d_row_probs = ordinary(rng, copies.shape, dtype), ordinary(rng, (num_rows,), dtype)
        backward([rows, row_probs], [d_rows, d_row_probs])
        assert_bits_equal(leaves[0].grad, model.combined(d_rows), what="d_inp")
        assert_bits_equal(leaves[1].grad, model.pairs(d_row_probs), what="d_probs")


def test_maps_of_blank_rows_agree(rng, place, backend):
    """A GPU writes a row by slots or by rows: where one map names a blank row, two threads would write it."""
    mask, *_ = masks(rng)
    probs = tensor(rng.integers(0, 2, (T, E)).astype(np.float32), place)
    plan = route(tensor(mask, place), probs, padding_alignment=4)
    maps = without_zero_probs(plan, plan.row_probs)
    slots, by_row = maps.slot_to_row.numpy(), plan.row_probs.numpy()
    assert sorted(slots[slots >= 0]) == np.flatnonzero(by_row).tolist()
    assert np.flatnonzero(maps.row_to_token.numpy() >= 0).tolist() == np.flatnonzero(by_row).tolist()


@pytest.mark.cpu_only
def test_blank_rows_of_triton(interpreted, rng):
    """Its kernels follow different maps from those of the other backends."""
    mask, *_ = masks(rng)
    x, probs = ordinary(rng, (T, H)), rng.integers(0, 2, (T, E)).astype(np.float32)
    tensors = [tensor(array, "cpu") for array in (x, probs, mask)]
    for function in (with_probs, padded_with_probs, dispatched):
        model = model_of(mask, 1 if function is with_probs else 16)
        call = lambda: function(model, *tensors, zero_prob_as_padding=True)  # noqa: B023, E731
        for actual, expected in on_both(call):
            assert_bits_equal(actual, expected)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_blank_rows_of_float8_and_their_scales(dtype, rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask)
    num_rows = int(mask.sum())
    x, probs = every_kind(rng, (T, H), dtype), rng.integers(0, 2, (T, E))
    x_tensor, probs_tensor, mask_tensor = (tensor(array, place) for array in (x, probs.astype(np.float16), mask))
    row_id_map = tensor(model.row_id_map(), place)
    kept = model.permuted_pairs(probs, num_rows)[:, None] != 0
    codes = model.permuted(x, num_rows)
    packed = every_kind(rng, (T, 2)).view(np.int32)
    for scale in (every_kind(rng, (T, 2)), packed, rng.integers(0, 256, (T, 5)).astype(np.uint8)):
        blanking = {"scale": tensor(scale, place), "zero_prob_as_padding": True}
        for rows, row_probs, *_, row_scale in (
            masked.moe_permute_with_probs(x_tensor, probs_tensor, mask_tensor, num_rows, **blanking),
            masked.permute_with_mask_map(x_tensor, row_id_map, num_rows, probs_tensor, **blanking),
        ):
            assert_bits_equal(rows, np.where(kept, codes, np.zeros_like(codes)))
            assert_bits_equal(row_scale, model.permuted(scale, num_rows))
            assert row_probs.dtype == paddle.float16


def test_a_flag_is_a_bool(rng, place):
    x, probs, mask = tensor(ordinary(rng, (3, H)), place), paddle.ones([3, 2]), paddle.ones([3, 2]).astype("bool")
    for call in (
        lambda: masked.moe_permute_with_probs(x, probs, mask, 6, zero_prob_as_padding=1),
        lambda: masked.moe_permute_and_pad_with_probs(x, probs, mask, [3, 3], 2, zero_prob_as_padding=1),
        lambda: dispatch.token_dispatch(x, mask, 6, probs, zero_prob_as_padding=1),
    ):
        with pytest.raises(TypeError, match=r": zero_prob_as_padding must be a bool, but got 1 of type int$"):
            call()


# ---- a rank without tokens, and one without rows


@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize("align", [None, 16])
@dtypes
def test_no_rows(dtype, align, tokens, rng, place, backend):
    """A buffer of no rows holds none, whatever is routed."""
    mask = tensor(rng.random((tokens, E)) < 0.5, place)
    no_pairs = np.full((tokens, 2 * E + 1), -1, np.int32)
    no_pairs[:, -1] = 0
    for weights in ("none", "by pair", "by row"):
        leaves = [tensor(ordinary(rng, shape, dtype), place, gradient=True) for shape in ((tokens, H), (tokens, E))]
        rows, row_probs, row_id_map, pad_offsets, counts = dispatch.token_dispatch(leaves[0], mask, 0, leaves[1], align)
        assert_bits_equal(rows, np.zeros((0, H), dtype))
        assert_bits_equal(row_probs, np.zeros(0, dtype))
        assert_bits_equal(row_id_map, no_pairs)
        assert_bits_equal(counts, np.zeros(E, np.int32))
        by_name = {"none": None, "by pair": leaves[1], "by row": row_probs}
        out = dispatch.token_combine(rows, row_id_map, by_name[weights], pad_offsets)
        assert_bits_equal(out, np.zeros((tokens, H), dtype))
        backward([out], [ordinary(rng, (tokens, H), dtype)])
        for leaf in leaves[: 1 + (weights != "none")]:
            assert_bits_equal(leaf.grad, np.zeros(tuple(leaf.shape), dtype))


@dtypes
def test_no_tokens_to_pad(dtype, rng, place, backend):
    mask = tensor(np.zeros((0, E), np.bool_), place)
    for options in ({}, {"zero_prob_as_padding": True}):
        leaves = [tensor(np.zeros(shape, dtype), place, gradient=True) for shape in ((0, H), (0, E))]
        rows, row_probs, row_id_map, pad_offsets, targets = masked.moe_permute_and_pad_with_probs(
            *leaves, mask, [0] * E, 16, **options
        )
        assert pad_offsets is None
        assert_bits_equal(targets, np.zeros(E, np.int64))
        out = masked.moe_unpermute(rows, row_id_map, leaves[1])
        backward([out, row_probs], [np.zeros(shape, dtype) for shape in ((0, H), (0,))])
        for leaf in leaves:
            assert_bits_equal(leaf.grad, np.zeros(tuple(leaf.shape), dtype))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_batches_without_tokens(shape, place, backend):
    x, mask, probs = (tensor(np.zeros((*shape, width), np.float32), place, gradient=True) for width in (H, E, E))
    rows, row_probs, row_id_map, pad_offsets, _ = dispatch.token_dispatch(x, mask, 0, probs, 8)
    assert row_id_map.shape == [0, 2 * E + 1]
    out = dispatch.token_combine(rows, row_id_map, probs, pad_offsets)
    backward([out, row_probs], [np.zeros((0, H), np.float32), np.zeros(0, np.float32)])
    assert (x.grad.shape, probs.grad.shape) == ([*shape, H], [*shape, E])


# ---- weights of batches


@pytest.mark.parametrize("align", [None, 8])
@pytest.mark.parametrize("weights_dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_weights_of_batches_are_taken_as_one_sequence(weights_dtype, align, rng, place, backend):
    mask = rng.random((6, 5, E)) < 0.4
    probs = ordinary(rng, mask.shape, weights_dtype)
    x = tensor(ordinary(rng, (6, 5, H)), place)
    rows, _, row_id_map, pad_offsets, _ = dispatch.token_dispatch(x, tensor(mask, place), int(mask.sum()), None, align)
    d_out, results = ordinary(rng, (30, H)), []
    for shape in (mask.shape, (30, E)):
        leaves = rows.detach(), tensor(probs.reshape(shape), place, gradient=True)
        leaves[0].stop_gradient = False
        out = dispatch.token_combine(leaves[0], row_id_map, leaves[1], pad_offsets)
        backward([out], [d_out])
        results.append((out, leaves[0].grad, leaves[1].grad.reshape([30, E])))
        assert leaves[1].grad.shape == list(shape)
    for got, wanted in zip(*results, strict=True):
        assert_bits_equal(got, wanted)
    with pytest.raises(
        ValueError, match=r"^token_combine: merging_probs must be of shape \[30, 7\] or .* by row, but got \[6, 4, 7\]$"
    ):
        dispatch.token_combine(rows, row_id_map, tensor(probs[:, :4], place), pad_offsets)
