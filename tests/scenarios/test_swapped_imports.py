# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs written for other packages, as their users write them, after nothing but the import changed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops import dequantize_1x128, patched_paddle, quantize_1x128
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import transformer_engine as te
from paddle_moe_ops.compat import transformer_engine_jax as te_jax
from tests.ops.problems import tensor

T, H, E, K = 21, 16, 6, 2
RANKS, LOCAL = 2, E // 2  # each rank has half of the experts


class Model:
    """A trained router, one matrix for each expert, and the same without moving a row."""

    def __init__(self, rng, place) -> None:
        self.router = tensor((rng.standard_normal((H, E)) / 4).astype(np.float32), place, gradient=True)
        self.experts = tensor((rng.standard_normal((E, H, H)) / 4).astype(np.float32), place, gradient=True)

    def routed(self, x, dtype="float32"):
        """Probabilities [T, E], 0 where an expert is not chosen, and an int mask of the chosen ones."""
        probs, ids = paddle.topk(F.softmax(paddle.matmul(x, self.router)), K)
        mask = F.one_hot(ids, E).sum(axis=1)
        gates = (F.one_hot(ids, E) * probs.unsqueeze(-1)).sum(axis=1)
        return gates.astype(dtype), mask.astype("int32")

    def of_experts(self, rows, counts, first=0):
        """Rows in the order of the experts from ``first`` on."""
        parts = paddle.split(rows, counts) if sum(counts) else [rows]
        return paddle.concat([F.tanh(paddle.matmul(part, self.experts[first + e])) for e, part in enumerate(parts)])

    def dense(self, x, dtype="float32"):
        gates, _ = self.routed(x, dtype)
        every = F.tanh(paddle.einsum("th,ehd->ted", x, self.experts))
        return (every * gates.astype("float32").unsqueeze(-1)).sum(axis=1)

    def gradients(self, out, x):
        weights = paddle.sin(paddle.arange(out.shape[0] * H, dtype="float32")).reshape(out.shape)
        found = paddle.grad([(out * weights).sum()], [x, self.router, self.experts])
        return [out.numpy(), *(each.numpy() for each in found)]


@pytest.fixture
def model(rng, place):
    return Model(rng, place)


def assert_close(got, expected):
    for actual, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("of_ranks", [(13, 8), (0, 21), (21, 0)], ids=["tokens", "first without", "second without"])
def test_a_token_dispatcher_of_two_ranks_one_of_which_may_have_no_tokens(of_ranks, dtype, model, rng, place, backend):
    """Permute, exchange, sort by expert, multiply, and all the way back; the exchange is one of lists here."""
    x = tensor(rng.standard_normal((sum(of_ranks), H)).astype(np.float32), place, gradient=True)
    sent = []
    for tokens in paddle.split(x, of_ranks):
        gates, mask = model.routed(tokens, dtype)
        counts = mask.sum(axis=0)
        rows, row_probs, row_id_map = te.moe_permute_with_probs(tokens, gates, mask, int(counts.sum()))
        assert row_probs.dtype == gates.dtype
        sent.append((rows, row_probs, row_id_map, counts.numpy()))
    returned: list[list] = [[], []]
    for rank in range(RANKS):
        mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
        received, received_probs, sizes = [], [], []
        for rows, row_probs, _, counts in sent:
            begin, length = int(counts[: mine.start].sum()), int(counts[mine].sum())
            received.append(rows[begin : begin + length])
            received_probs.append(row_probs[begin : begin + length])
            sizes.append(counts[mine])
        split_sizes = tensor(np.concatenate(sizes).astype(np.int32), place)
        by_expert = tensor(np.arange(RANKS * LOCAL, dtype=np.int32).reshape(RANKS, LOCAL).T.reshape(-1), place)
        rows, row_probs = te.moe_sort_chunks_by_index_with_probs(
            paddle.concat(received), paddle.concat(received_probs), split_sizes, by_expert
        )
        rows = model.of_experts(rows, np.sum(sizes, axis=0).tolist(), mine.start)
        rows = rows * row_probs.astype("float32").unsqueeze(-1)
        back = tensor(np.arange(RANKS * LOCAL, dtype=np.int32).reshape(LOCAL, RANKS).T.reshape(-1), place)
        sizes_by_expert = tensor(np.stack(sizes, axis=1).reshape(-1).astype(np.int32), place)
        rows = te.moe_sort_chunks_by_index(rows, sizes_by_expert, back)
        for each, part in zip(returned, paddle.split(rows, [int(size.sum()) for size in sizes]), strict=True):
            each.append(part)
    outs = [
        te.moe_unpermute(paddle.concat(parts), row_id_map, restore_shape=[tokens, H])
        for parts, (_, _, row_id_map, _), tokens in zip(returned, sent, of_ranks, strict=True)
    ]
    got = model.gradients(paddle.concat(outs), x)
    assert_close(got, model.gradients(model.dense(x, dtype), x))


@pytest.mark.parametrize("align_size", [None, 8])
def test_a_layer_of_batches_with_a_static_buffer(align_size, model, rng, place, backend):
    """As in JAX: [B, S, ...] throughout, a mask of floats, and weights where the rows come together."""
    x = tensor(rng.standard_normal((3, 7, H)).astype(np.float32), place, gradient=True)
    flat = x.reshape([21, H])
    gates, mask = model.routed(flat)
    gates, mask = gates.reshape([3, 7, E]), mask.reshape([3, 7, E]).astype("float32")
    rows, _, row_id_map, pad_offsets, counts = te_jax.token_dispatch(x, mask, 21 * K, align_size=align_size)
    rows = model.of_experts(rows[: int(counts.sum())], counts.tolist())
    out = te_jax.token_combine(rows, row_id_map, gates, pad_offsets)
    assert_close(model.gradients(out, x), model.gradients(model.dense(flat), x))


def test_serving_with_rows_in_float8_and_counts_that_a_dispatcher_padded(rng, place, backend):
    """Quantised tokens with their scales through Paddle's own functions, patched; each expert adds its own number."""
    hidden, alignment = 256, 16
    x = rng.standard_normal((T, hidden)).astype(ml_dtypes.bfloat16)
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    probs = rng.random((T, K)).astype(np.float32)
    counts = np.bincount(ids.reshape(-1), minlength=E)
    padded = -(-counts // alignment) * alignment
    codes, scales = quantize_1x128(tensor(x, place))
    tokens = to_numpy(dequantize_1x128(codes, scales, dtype="float32"))
    with patched_paddle():
        rows, rowmap, row_probs, row_scales, experts = F.moe_permute(
            codes,
            scales,
            tensor(ids, place),
            tensor(probs, place),
            num_experts=E,
            tokens_per_expert=padded,
            padding_alignment=alignment,
            return_expert_indices=True,
        )
        assert rows.shape == [padded.sum(), hidden]
        made = dequantize_1x128(rows, row_scales, dtype="float32") + experts.astype("float32").unsqueeze(-1)
        out, back = F.moe_unpermute(made, rowmap, tensor(ids, place), row_probs, T, E, using_weighted_combine=True)
    expected = ((tokens[:, None] + ids[..., None]) * probs[..., None]).sum(axis=1)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(back.numpy(), probs)
