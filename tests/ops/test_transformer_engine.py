# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""compat.transformer_engine: calls as code for TransformerEngine makes them, by position."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.compat import transformer_engine as te
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.masked_model import model_of
from tests.ops.problems import backward, every_kind, ordinary, tensor
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

T, E, H = 29, 5, 8
MAP = np.zeros((T, 2 * E + 1), np.int32)


def test_all_six_take_and_give_what_transformer_engine_does(rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    model = model_of(mask, 16)
    offsets, unpadded, num_rows = tensor(model.pad_offsets, place), model_of(mask), int(model.starts[-1])
    row_id_map = te.make_row_id_map(tensor(mask, place), T, E)
    assert_bits_equal(row_id_map, unpadded.row_id_map())
    x, probs = ordinary(rng, (T, H)), rng.integers(0, 3, (T, E)).astype(np.float32)
    output, permuted_scale, permuted_probs = te.permute_with_mask_map(
        tensor(x, place), row_id_map, tensor(probs, place), None, offsets, T, E, num_rows, H, 0
    )
    by_row = model.permuted_pairs(probs, num_rows)
    assert permuted_scale is None
    assert_bits_equal(permuted_probs, by_row)
    assert_bits_equal(output, np.where(by_row[:, None] == 0, np.float32(0), model.permuted(x, num_rows)))
    codes, scale = every_kind(rng, (T, H), FLOAT8_DTYPES[0]), every_kind(rng, (T, 3))
    output, permuted_scale, permuted_probs = te.permute_with_mask_map(
        tensor(codes, place), row_id_map, None, tensor(scale, place), offsets, T, E, num_rows, H, 3
    )
    assert permuted_probs is None
    assert_bits_equal(output, model.permuted(codes, num_rows))
    assert_bits_equal(permuted_scale, model.permuted(scale, num_rows))
    y, d_out = ordinary(rng, (num_rows, H)), ordinary(rng, (T, H))
    sums, pairs = te.unpermute_with_mask_map(
        tensor(y, place), row_id_map, tensor(probs, place), tensor(by_row, place), offsets, T, E, H
    )
    assert_bits_equal(sums, model.combined(y, probs))
    assert_bits_equal(pairs, np.where(mask, probs, 0).astype(np.float32))
    plain, nothing = te.unpermute_with_mask_map(tensor(y, place), row_id_map, None, None, offsets, T, E, H)
    assert nothing is None
    assert_bits_equal(plain, model.combined(y))
    act_grad, probs_grad = te.unpermute_with_mask_map_bwd_with_merging_probs(
        tensor(d_out, place), row_id_map, tensor(y, place), tensor(probs, place), offsets, T, E, num_rows, H
    )
    assert (act_grad.shape, probs_grad.shape) == ([num_rows, H], [T, E])


def test_chunks(rng, place, backend):
    sizes, order = np.array([10, 0, 12]), np.array([2, 1, 0])
    chunk_map = te.make_chunk_sort_map(tensor(sizes, place), tensor(order, place), T, 3)
    assert_bits_equal(chunk_map, reference.chunk_sort_map(sizes, order, T))
    x, probs = every_kind(rng, (T, H)), every_kind(rng, (T,))
    out, probs_out = te.sort_chunks_by_map(tensor(x, place), chunk_map, tensor(probs, place), T, H, True)
    expected = reference.sort_chunks(x, sizes, order, probs)
    assert_bits_equal(out, expected[0])
    assert_bits_equal(probs_out, expected[1])
    back, nothing = te.sort_chunks_by_map(out, chunk_map, None, T, H, False)
    assert nothing is None
    assert_bits_equal(back, x)


# ---- the functions that route and move in one call


def with_zeros(rng, mask, dtype=np.float32):
    """Probabilities of which some are 0 where tokens are routed, and none where they are not."""
    return rng.choice(np.array([0, 0.25, 0.5, 1]), mask.shape).astype(dtype)


def blanked(model, x, probs, num_rows):
    """The rows as TransformerEngine has them: 0 where the probability is 0."""
    copies = model.permuted(x, num_rows)
    return np.where(model.permuted_pairs(probs, num_rows)[:, None] == 0, np.zeros_like(copies), copies)


@pytest.mark.parametrize("room", [-1, 0, 20, 100])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_one_call_with_probabilities(dtype, room, rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    num_rows = int(mask.sum()) if room < 0 else room
    model, x, probs = model_of(mask, 1, num_rows), ordinary(rng, (T, H), dtype), with_zeros(rng, mask, dtype)
    leaves = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    given = () if room < 0 else (room,)
    rows, row_probs, row_id_map = te.moe_permute_with_probs(*leaves, tensor(mask.astype(np.int32), place), *given)
    assert_bits_equal(rows, blanked(model, x, probs, num_rows))
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows))
    assert_bits_equal(row_id_map, model.row_id_map())
    d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
    backward([rows, row_probs], [d_rows, d_row_probs])
    assert_bits_equal(leaves[0].grad, model.combined(d_rows))
    assert_bits_equal(leaves[1].grad, model.pairs(d_row_probs))
    out = te.moe_unpermute(rows, row_id_map, leaves[1], [T, H], "mask")
    assert_bits_equal(out, model.combined(blanked(model, x, probs, num_rows), probs))
    alone, same_map = te.moe_permute(leaves[0], tensor(mask, place), *given)
    assert_bits_equal(alone, model.permuted(x, num_rows))
    assert_bits_equal(same_map, row_id_map)
    assert_bits_equal(
        te.moe_unpermute(alone, row_id_map, restore_shape=[T, H]), model.combined(model.permuted(x, num_rows))
    )


@pytest.mark.parametrize("align", [1, 16])
def test_one_call_with_padding(align, rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    model = model_of(mask, align)
    num_rows = int(model.starts[-1])
    x, probs = ordinary(rng, (T, H)), with_zeros(rng, mask)
    tensors = [tensor(array, place) for array in (x, probs, mask, model.counts)]
    rows, row_probs, row_id_map, pad_offsets, targets = te.moe_permute_and_pad_with_probs(*tensors, align)
    assert_bits_equal(rows, blanked(model, x, probs, num_rows))
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows))
    assert_bits_equal(targets, np.diff(model.starts).astype(np.int64))
    assert (pad_offsets is None) == (align == 1)
    out = te.moe_unpermute(rows, row_id_map, tensors[1], [T, H], "mask", None, pad_offsets)
    assert_bits_equal(out, model.combined(blanked(model, x, probs, num_rows), probs))
    old_name = te.moe_unpermute(rows, row_id_map, None, None, "mask", tensors[1], pad_offsets)
    assert_bits_equal(old_name, out)


def test_one_call_with_scales(rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    model, num_rows = model_of(mask), int(mask.sum())
    codes, scale = every_kind(rng, (T, H), FLOAT8_DTYPES[0]), ordinary(rng, (T, 3))
    probs = np.ones((T, E), np.float32)
    tensors = [tensor(array, place) for array in (codes, probs, mask)]
    scaled = {"scale": tensor(scale, place)}
    for made in (
        te.moe_permute(tensors[0], tensors[2], num_rows, **scaled),
        te.moe_permute_with_probs(*tensors, num_rows, **scaled),
        te.moe_permute_and_pad_with_probs(*tensors, model.counts.tolist(), 1, **scaled),
    ):
        assert_bits_equal(made[0], model.permuted(codes, num_rows))
        assert_bits_equal(made[-1], model.permuted(scale, num_rows))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_one_call_with_chunks(dtype, rng, place, backend):
    lengths, order = np.array([10, 0, 12]), np.array([2, 1, 0])
    x, probs = ordinary(rng, (T, H), dtype), ordinary(rng, (T,), dtype)
    arrays = tensor(lengths, place), tensor(order, place)
    expected = reference.sort_chunks(x, lengths, order, probs)
    assert_bits_equal(te.moe_sort_chunks_by_index(tensor(x, place), *arrays), expected[0])
    out, probs_out = te.moe_sort_chunks_by_index_with_probs(tensor(x, place), tensor(probs, place), *arrays)
    assert_bits_equal(out, expected[0])
    assert_bits_equal(probs_out, expected[1])
    chunk_map = te.make_chunk_sort_map(*arrays, T, 3)
    _, by_map = te.sort_chunks_by_map(tensor(x, place), chunk_map, tensor(probs, place), T, H, True)
    assert_bits_equal(by_map, expected[1])


# ---- maps with a limit


@pytest.mark.parametrize("num_rows", [0, 1, 23, 500])
def test_a_map_with_a_limit_names_no_row_beyond_it(num_rows, rng, place, backend):
    mask = rng.random((T, E)) < 0.4
    model = model_of(mask, 1, num_rows)
    row_id_map = te.make_row_id_map(tensor(mask, place), T, E, num_rows)
    assert_bits_equal(row_id_map, model.row_id_map())
    assert row_id_map.numpy()[:, :E].max() == min(num_rows, mask.sum()) - 1
    assert row_id_map.numpy()[:, -1].sum() == min(num_rows, mask.sum())
    x, probs = ordinary(rng, (T, H)), ordinary(rng, (T, E))
    x_tensor, probs_tensor = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
    rows, _, row_probs = te.permute_with_mask_map(x_tensor, row_id_map, probs_tensor, None, None, T, E, num_rows, H, 0)
    assert_bits_equal(rows, model.permuted(x, num_rows))
    assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows))
    d_rows, d_row_probs = ordinary(rng, (num_rows, H)), ordinary(rng, (num_rows,))
    backward([rows, row_probs], [d_rows, d_row_probs])
    assert_bits_equal(x_tensor.grad, model.combined(d_rows))
    assert_bits_equal(probs_tensor.grad, model.pairs(d_row_probs))
    out, pairs = te.unpermute_with_mask_map(rows, row_id_map, probs_tensor, row_probs, None, T, E, H)
    assert_bits_equal(out, model.combined(model.permuted(x, num_rows), probs))
    assert_bits_equal(pairs, model.pairs(model.permuted_pairs(probs, num_rows)))


def test_a_limit_is_a_number_of_rows(place):
    with pytest.raises(ValueError, match=r"^make_row_id_map: num_out_tokens must be from 0 to 2147483647, but got -1$"):
        call("make_row_id_map", place, num_out_tokens=-1)


N, S = 9, 3
ROWS, PROBS = np.ones((N, H), np.float32), np.ones((T, E), np.float32)
# A good call of each function, and which sizes of which tensors its arguments repeat.
CALLS = {
    "make_row_id_map": {"routing_map": PROBS > 0, "num_tokens": T, "num_experts": E},
    "permute_with_mask_map": {
        "inp": np.ones((T, H), FLOAT8_DTYPES[0]),
        "row_id_map": MAP,
        "probs": None,
        "scale": np.ones((T, S), np.float32),
        "pad_offsets": None,
        "num_tokens": T,
        "num_experts": E,
        "num_out_tokens": N,
        "hidden_size": H,
        "scale_hidden_dim": S,
    },
    "unpermute_with_mask_map": {
        "inp": ROWS,
        "row_id_map": MAP,
        "merging_probs": PROBS,
        "permuted_probs": None,
        "pad_offsets": None,
        "num_tokens": T,
        "num_experts": E,
        "hidden_size": H,
    },
    "unpermute_with_mask_map_bwd_with_merging_probs": {
        "fwd_output_grad": np.ones((T, H), np.float32),
        "row_id_map": MAP,
        "fwd_input": ROWS,
        "merging_probs": PROBS,
        "pad_offsets": None,
        "num_tokens": T,
        "num_experts": E,
        "num_out_tokens": N,
        "hidden_size": H,
    },
    "make_chunk_sort_map": {
        "split_sizes": np.ones(3, np.int32),
        "sorted_indices": np.arange(3),
        "num_tokens": T,
        "num_splits": 3,
    },
    "sort_chunks_by_map": {
        "inp": ROWS,
        "row_id_map": np.arange(N, dtype=np.int32),
        "probs": None,
        "num_tokens": N,
        "hidden_size": H,
        "is_forward": True,
    },
}
# Sizes that are free: rows of the output, rows after the last chunk.
FREE = {("permute_with_mask_map", "num_out_tokens"), ("make_chunk_sort_map", "num_tokens")}
SIZES = [
    (function, argument)
    for function, arguments in CALLS.items()
    for argument, value in arguments.items()
    if type(value) is int and (function, argument) not in FREE
]


def call(function, place, **changes):
    arguments = CALLS[function] | changes
    tensors = (tensor(value, place) if isinstance(value, np.ndarray) else value for value in arguments.values())
    return getattr(te, function)(*tensors)


@pytest.mark.parametrize(("function", "argument"), SIZES)
def test_a_size_that_contradicts_the_tensors_is_named(function, argument, place):
    call(function, place)
    size = CALLS[function][argument]
    having = "map" if argument == "num_experts" else "tensor"
    for wrong in (size - 1, size + 1, 1 if argument == "num_experts" else -1):
        text = f"{function}: {argument} must be {size}, as the {having} has it, but got {wrong}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call(function, place, **{argument: wrong})
    with pytest.raises(TypeError, match=f"^{function}: {argument} must be an int"):
        call(function, place, **{argument: str(size)})


@pytest.mark.parametrize(
    ("function", "argument", "about"),
    [
        ("unpermute_with_mask_map", "row_id_map", "row_id_map"),
        ("sort_chunks_by_map", "inp", "num_tokens"),
        ("make_chunk_sort_map", "split_sizes", "num_splits"),
    ],
)
def test_what_has_no_such_size_is_named(function, argument, about, place):
    text = f"^{function}: {about} must be about a tensor with more than [01] dimensions, but got "
    for value in ([1, 2], paddle.to_tensor(1)):
        with pytest.raises(TypeError, match=text):
            call(function, place, **{argument: value})


def test_errors_call_arguments_as_transformer_engine_does(place):
    for function, argument, value in (
        ("unpermute_with_mask_map", "merging_probs", np.ones((T, E + 1), np.float32)),
        ("sort_chunks_by_map", "row_id_map", np.arange(N + 1, dtype=np.int32)),
    ):
        with pytest.raises(ValueError, match=f"^{function}: {argument} must be of shape"):
            call(function, place, **{argument: value})


def test_rows_alone_come_first(place):
    output, permuted_scale, permuted_probs = call("permute_with_mask_map", place, scale=None, scale_hidden_dim=None)
    assert output.shape == [N, H]
    assert (permuted_scale, permuted_probs) == (None, None)


def traced_permute(tokens, width):
    specs = [([tokens, width], "int32"), ([None, H], "float32")]

    @paddle.jit.to_static(full_graph=True, input_spec=[paddle.static.InputSpec(*spec) for spec in specs])
    def traced(row_id_map, x):
        return te.permute_with_mask_map(x, row_id_map, None, None, None, T, E, T * E, H, None)[0]

    return traced


def test_a_number_of_tokens_that_a_graph_does_not_know_is_not_compared(rng, place):
    mask, x = rng.random((T, E)) < 0.4, ordinary(rng, (T, H))
    row_id_map = te.make_row_id_map(tensor(mask, place), T, E)
    assert_bits_equal(traced_permute(None, 2 * E + 1)(row_id_map, tensor(x, place)), model_of(mask).permuted(x, T * E))


def test_a_map_whose_width_a_graph_does_not_know_is_named():
    with pytest.raises(ValueError, match=r"permute_with_mask_map: row_id_map must be of shape \[num_tokens, 2 \* num"):
        traced_permute(None, None).concrete_program  # noqa: B018 it traces
