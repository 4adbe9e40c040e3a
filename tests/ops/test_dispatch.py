# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""dispatch: static shapes, padding, and the exchange of expert parallelism, simulated with all ranks."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import dispatch, reference
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.masked_model import masks, model_of
from tests.ops.problems import backward, every_kind, optional_tensor, ordinary, tensor
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

H = 24


def static_rows(num_out_tokens: int, experts: int, align: int | None) -> int:
    return num_out_tokens if align is None else (num_out_tokens + experts * (align - 1)) // align * align


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("align", [None, 1, 16, 128])
@pytest.mark.parametrize("room", ["enough", "too little"])
def test_dispatch_and_combine(room, align, dtype, rng, place, backend):
    for mask in masks(rng):
        tokens, experts = mask.shape
        num_out = max(int(mask.sum()) // (1 if room == "enough" else 2), 1)
        num_rows = static_rows(num_out, experts, align)
        model = model_of(mask, align or 1, num_rows)
        x, probs = ordinary(rng, (tokens, H), dtype), ordinary(rng, mask.shape, dtype)
        leaves = tensor(x, place, gradient=True), tensor(probs, place, gradient=True)
        rows, row_probs, row_id_map, pad_offsets, counts = dispatch.token_dispatch(
            leaves[0], tensor(mask, place), num_out, leaves[1], align
        )
        assert_bits_equal(rows, model.permuted(x, num_rows), what="rows")
        assert_bits_equal(row_probs, model.permuted_pairs(probs, num_rows), what="probs")
        assert_bits_equal(row_id_map, model.row_id_map(model.pad_offsets), what="row_id_map")
        assert (pad_offsets is None) == (align is None)
        starts = np.minimum(model.starts, num_rows)
        held = np.clip(num_rows - model.starts[:-1], 0, model.counts) if align is None else np.diff(starts)
        assert_bits_equal(counts, held.astype(np.int32), what="tokens_per_expert")
        assert counts.stop_gradient
        if pad_offsets is not None and room == "enough":
            assert_bits_equal(pad_offsets, model.pad_offsets)
        by_row = model.permuted_pairs(probs, num_rows)
        y = ordinary(rng, (num_rows, H), dtype)
        for weights, by_pair in ((None, None), (probs, probs), (by_row, probs)):
            out = dispatch.token_combine(tensor(y, place), row_id_map, optional_tensor(weights, place), pad_offsets)
            assert_bits_equal(out, model.combined(y, by_pair), what="sum")
        d_rows, d_row_probs = ordinary(rng, (num_rows, H), dtype), ordinary(rng, (num_rows,), dtype)
        backward([rows, row_probs], [d_rows, d_row_probs])
        assert_bits_equal(leaves[0].grad, model.combined(d_rows), what="d_inp")
        assert_bits_equal(leaves[1].grad, model.pairs(d_row_probs), what="d_probs")


def test_nan_in_gradients_stays(rng, place, backend):
    mask, *_ = masks(rng)
    model = model_of(mask, 16)
    x = tensor(ordinary(rng, (len(mask), H)), place, gradient=True)
    rows, *_ = dispatch.token_dispatch(x, tensor(mask, place), int(mask.sum()), None, 16)
    d_rows = ordinary(rng, tuple(rows.shape))
    row = model.rowmap.max()
    d_rows[row] = np.nan
    backward([rows], [d_rows])
    assert np.isnan(x.grad.numpy()).all(axis=1).tolist() == (model.rowmap == row).any(axis=1).tolist()


@pytest.mark.parametrize("dtype", [*SUM_DTYPES, *FLOAT8_DTYPES], ids=str)
def test_batches_are_taken_as_one_sequence(dtype, rng, place):
    mask = np.random.default_rng(1).random((6, 5, 4)) < 0.4
    x, probs = every_kind(rng, (6, 5, H), dtype), rng.random(mask.shape, np.float32)
    flat = [tensor(array.reshape(30, -1), place) for array in (x, mask, probs)]
    deep = [tensor(array, place) for array in (x, mask, probs)]
    num_out = int(mask.sum())
    expected = dispatch.token_dispatch(flat[0], flat[1], num_out, flat[2], 8)
    actual = dispatch.token_dispatch(deep[0], deep[1], num_out, deep[2], 8)
    for got, wanted in zip(actual, expected, strict=True):
        assert_bits_equal(got, wanted)
    assert int(actual[4].sum()) == sum(-(-count // 8) * 8 for count in mask.sum(axis=(0, 1)))
    sizes, order = tensor(np.array([7, 20]), place), tensor(np.array([1, 0]), place)
    out, source_to_dest = dispatch.sort_chunks_by_index(deep[0], sizes, order)
    assert out.shape == [30, H]
    expected_rows = reference.sort_chunks(x.reshape(30, H), np.array([7, 20]), np.array([1, 0]))
    assert_bits_equal(out, expected_rows[0])
    assert_bits_equal(source_to_dest, expected_rows[2])


def test_selected_experts_are_ascending_and_short_ones_marked(rng, place):
    mask = np.array([[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], np.bool_)
    probs = rng.random((4, 4), np.float32)
    probs_tensor = tensor(probs, place, gradient=True)
    experts, weights = dispatch.routing_map_to_selected_experts(probs_tensor, tensor(mask, place), 2)
    assert experts.tolist() == [[1, 3], [1, 2], [-1, 2], [-1, -1]]
    expected = np.where(experts.numpy() < 0, 0, np.take_along_axis(probs, np.maximum(experts.numpy(), 0), 1))
    assert_bits_equal(weights, expected.astype(np.float32))
    weights.sum().backward()
    used = np.zeros((4, 4), np.float32)
    for token, chosen in enumerate(experts.tolist()):
        used[token, [expert for expert in chosen if expert >= 0]] = 1
    assert_bits_equal(probs_tensor.grad, used)
    half = dispatch.routing_map_to_selected_experts(tensor(probs.astype(np.float16), place), tensor(mask, place), 2)
    assert half[1].dtype == paddle.float16


# ---- expert parallelism: every rank's tokens go to the ranks of their experts and back, in NumPy


def exchange(buffers, params):
    """All-to-all with uneven parts, from the parameters of the senders."""
    rows = [int(recv.sum()) + 2 for *_, recv in params]  # a little more room than is needed
    received = [np.full((count, buffers[0].shape[1]), np.nan, np.float32) for count in rows]
    for buffer, (input_offsets, send_sizes, output_offsets, _) in zip(buffers, params, strict=True):
        for target, (begin, size, place) in enumerate(zip(input_offsets, send_sizes, output_offsets, strict=True)):
            received[target][place : place + size] = buffer[begin : begin + size]
    for sender, (_, send_sizes, _, _) in enumerate(params):
        assert [recv[sender] for *_, recv in params] == send_sizes.tolist()
    return received


@pytest.mark.parametrize("shard_ids", ["ints", "tensors"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_reach_their_experts_and_come_back(dtype, shard_ids, rng, place, backend):
    shards, experts = 4, 8
    counts = rng.integers(0, 6, (shards, experts)) * (rng.random((shards, experts)) < 0.8)
    counts[1] = 0
    table = tensor(counts.astype(dtype), place)
    # row = (rank, expert, number): who sent it, to whom, and which it is
    sent = [
        np.array([[s, e, i] for e in range(experts) for i in range(counts[s, e])], np.float32).reshape(-1, 3)
        for s in range(shards)
    ]
    ids = [tensor(np.array(s, np.int32), place) if shard_ids == "tensors" else s for s in range(shards)]
    forward = [dispatch.compute_ragged_all_to_all_params(table, s, shards) for s in ids]
    assert all(part.dtype == table.dtype for params in forward for part in params)
    received = exchange(sent, [[part.numpy() for part in params] for params in forward])
    returned = []
    for s, buffer in enumerate(received):
        x = tensor(buffer, place, gradient=True)
        rows, sizes, state = dispatch.local_permute_after_a2a(x, table, ids[s], shards)
        local = range(2 * s, 2 * s + 2)
        assert sizes.tolist() == [counts[:, e].sum() for e in local]
        expected = [[r, e, i] for e in local for r in range(shards) for i in range(counts[r, e])]
        assert rows.numpy()[: len(expected)].tolist() == expected
        back = dispatch.local_unpermute_before_a2a(rows, state)
        assert_bits_equal(back, buffer)
        d_rows = ordinary(rng, buffer.shape)
        backward([back], [d_rows])
        assert_bits_equal(x.grad, d_rows)
        returned.append(buffer)
    reverse = [dispatch.compute_reverse_ragged_all_to_all_params(table, s, shards) for s in ids]
    home = exchange(returned, [[part.numpy() for part in params] for params in reverse])
    for buffer, original in zip(home, sent, strict=True):
        assert buffer[: len(original)].tolist() == original.tolist()


COUNTS = np.ones((2, 4), np.int32)
BAD = [
    ("token_dispatch", (np.zeros((4, 2)), np.ones((4, 3), np.bool_), 5), TypeError, "inp must be of dtype bfloat16"),
    ("token_dispatch", (np.zeros((4, 2), np.float32), np.ones((5, 3), np.bool_), 5), ValueError, "routing_map must be"),
    (
        "token_dispatch",
        (np.zeros((4, 2), np.float32), np.ones((4, 3), np.bool_), -1),
        ValueError,
        "num_out_tokens must be from 0 to 2147483647, but got -1",
    ),
    (
        "token_dispatch",
        (np.zeros((4, 2), np.float32), np.ones((4, 3), np.bool_), 5, None, 0),
        ValueError,
        "align_size must be from 1 to 2147483647, but got 0",
    ),
    (
        "token_combine",
        (np.zeros((9, 2), np.float32), np.zeros((4, 7), np.int32), np.zeros(8, np.float32)),
        ValueError,
        "merging_probs must be of shape [4, 3] or [batch, length, 3] by token, or [9] by row, but got [8]",
    ),
    ("token_combine", (np.zeros((9, 2), np.float32), np.zeros((4, 6), np.int32)), ValueError, "row_id_map must be of"),
    ("compute_ragged_all_to_all_params", (COUNTS, 2, 2), ValueError, "shard_id must be from 0 to 1, but got 2"),
    (
        "compute_ragged_all_to_all_params",
        (COUNTS, 0, 3),
        ValueError,
        "all_shards_tokens_per_expert must be of shape [3",
    ),
    (
        "compute_reverse_ragged_all_to_all_params",
        (np.ones((3, 4), np.int32), 0, 3),
        ValueError,
        "num_expert_shards must be a divisor of num_experts=4",
    ),
    (
        "local_permute_after_a2a",
        (np.zeros(3, np.float32), COUNTS, 0, 2),
        ValueError,
        "x_recv must be of shape [num_rows, hidden], but got [3]",
    ),
    (
        "routing_map_to_selected_experts",
        (COUNTS, COUNTS, 2),
        TypeError,
        "sparse_probs must be of dtype bfloat16, float16",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_arguments_are_named(function, arguments, error, text, place):
    tensors = [tensor(value, place) if isinstance(value, np.ndarray) else value for value in arguments]
    with pytest.raises(error, match=f"^{re.escape(f'{function}: {text}')}"):
        getattr(dispatch, function)(*tensors)


@pytest.mark.cpu_only  # data on a device is not read
@pytest.mark.parametrize("shape", [None, (4, 3), (9,)], ids=["plain", "by token", "by row"])
def test_bad_data_of_a_map_is_named(shape):
    probs = None if shape is None else paddle.ones(shape)
    with pytest.raises(ValueError, match=r"^token_combine: row_id_map must "):
        dispatch.token_combine(paddle.ones([9, 2]), paddle.full([4, 7], 99, "int32"), merging_probs=probs)


@pytest.mark.parametrize("argument", ["routing_map", "probs"])
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 6, 5)], ids=["transposed", "of one batch"])
def test_batches_of_another_shape_are_refused_though_they_have_as_many_tokens(argument, shape, place):
    arguments = {"routing_map": np.ones((2, 3, 5), np.int32), "probs": np.ones((2, 3, 5), np.float32)}
    arguments[argument] = arguments[argument].reshape(shape)
    given = {name: tensor(array, place) for name, array in arguments.items()}
    text = (
        rf"^token_dispatch: {argument} must be of shape .* or \[2, 3, \w+\], but got \[{', '.join(map(str, shape))}\]$"
    )
    with pytest.raises(ValueError, match=text):
        dispatch.token_dispatch(tensor(np.ones((2, 3, 4), np.float32), place), num_out_tokens=30, **given)


@pytest.mark.cpu_only  # numbers on a device are not waited for
@pytest.mark.parametrize(
    "function",
    [
        dispatch.compute_ragged_all_to_all_params,
        dispatch.compute_reverse_ragged_all_to_all_params,
        lambda *arguments: dispatch.local_permute_after_a2a(paddle.ones([9, 2]), *arguments),
    ],
    ids=["there", "back", "permute"],
)
def test_wrong_ranks_and_counts_in_tensors_are_refused(function):
    counts = paddle.to_tensor([[1, 0, 2, 1], [0, 3, 1, 1]], dtype="int32")
    for rank in (-1, 2, 5):
        with pytest.raises(ValueError, match=f"shard_id must be from 0 to 1, but got {rank}$"):
            function(counts, paddle.to_tensor(rank), 2)
    with pytest.raises(
        ValueError, match=r"all_shards_tokens_per_expert must be counts, none of them negative, but got -3$"
    ):
        function(-counts, 0, 2)
