# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""compat.transformer_engine: calls as code for TransformerEngine makes them, by position."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.compat import transformer_engine as te
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import every_kind, ordinary, tensor
from tests.ops.test_masked import model_of
from tests.params import FLOAT8_DTYPES

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


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (
            "make_row_id_map",
            (np.ones((T, E), np.bool_), T, E + 1),
            f"num_experts must be {E}, as the map has it, but got",
        ),
        (
            "make_row_id_map",
            (np.ones((T, E), np.bool_), T + 1, E),
            f"num_tokens must be {T}, as the tensor has it, but",
        ),
        (
            "unpermute_with_mask_map",
            (np.ones((9, H), np.float32), MAP, None, None, None, T, E, H + 1),
            f"hidden_size must be {H}, as the tensor has it, but got {H + 1}",
        ),
        (
            "unpermute_with_mask_map",
            (np.ones((9, H), np.float32), MAP, np.ones((T, E + 1), np.float32), None, None, T, E, H),
            f"merging_probs must be of shape [{T}, {E}], but got [{T}, {E + 1}]",
        ),
        (
            "make_chunk_sort_map",
            (np.ones(3, np.int32), np.arange(3), T, 4),
            "num_splits must be 3, as the tensor has it",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_sizes_that_contradict_the_tensors_are_named(function, arguments, text, place):
    tensors = [tensor(value, place) if isinstance(value, np.ndarray) else value for value in arguments]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{function}: {text}')}"):
        getattr(te, function)(*tensors)
