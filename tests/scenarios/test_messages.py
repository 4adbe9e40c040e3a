# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users make: the message names the function and the argument, what was given and what was expected."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_moe_ops import (
    dequantize_1x128,
    dispatch,
    masked,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    quantized_experts,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import TopKRouter
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal

T, H, E, K = 6, 4, 5, 2
N = T * K
IDS = [[0, 1], [1, 2], [0, 2], [1, 0], [2, 1], [4, 3]]
COUNTS = [3, 4, 3, 1, 1]


@pytest.fixture
def given(place):
    """What a user has at hand after a forward pass."""
    ids = paddle.to_tensor(IDS, dtype="int32", place=place)
    x, probs = paddle.ones([T, H]), paddle.full([T, K], 0.5)
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, 1)
    return SimpleNamespace(
        x=x,
        ids=ids,
        probs=probs,
        rows=rows,
        rowmap=rowmap,
        row_probs=row_probs,
        plan=route(ids, probs, num_experts=E),
        other_plan=route(ids[:4], probs[:4], num_experts=E),
        plan_without_probs=route(ids, num_experts=E),
        weights=paddle.ones([E, H, H]),
        row_id_map=masked.make_row_id_map(paddle.ones([T, E], "bool"))[0],
    )


def permuted(g, ids=None, probs=None, num_experts=E, counts=None, alignment=1, x=None, **options):
    x, ids, probs = (g.x if x is None else x), (g.ids if ids is None else ids), (g.probs if probs is None else probs)
    return moe_permute(x, None, ids, probs, num_experts, counts, alignment, **options)


def unpermuted(g, rows=None, rowmap=None, row_probs=None, tokens=T):
    rows, rowmap = g.rows if rows is None else rows, g.rowmap if rowmap is None else rowmap
    return moe_unpermute(rows, rowmap, g.ids, g.row_probs if row_probs is None else row_probs, tokens, E)


SUMS = "bfloat16, float16 or float32"
MISTAKES = {
    "rows shorter than the map": (
        lambda g: unpermuted(g, g.rows[:5], row_probs=g.row_probs[:5]),
        "moe_unpermute: zipped_expertwise_rowmap must hold rows in [-1, 5), but token 1, expert 2 holds 7",
    ),
    "rows shorter than the map and the probabilities": (
        lambda g: unpermuted(g, g.rows[:5]),
        "moe_unpermute: hidden_states_unzipped must be of shape [12, hidden], one row for each of "
        "token_prob_unzipped, but got [5, 4]",
    ),
    "a wide dtype for the result": (
        lambda g: dequantize_1x128(*quantize_1x128(g.x), dtype="float64"),
        "dequantize_1x128: dtype must be one of bfloat16, float16, float32, as a paddle dtype or its name, "
        "but got 'float64'",
    ),
    "ids in float": (
        lambda g: permuted(g, g.ids.astype("float32")),
        "moe_permute: expert_routemap_topk must be of dtype int32 or int64, but got float32",
    ),
    "ids of a plan in float": (
        lambda g: route(g.ids.astype("float32"), num_experts=E),
        "route: routing must be of dtype int32, int64 or bool, but got float32",
    ),
    "probabilities in float64": (
        lambda g: permuted(g, probs=g.probs.astype("float64")),
        "moe_permute: expert_prob_topk must be of dtype float32, but got float64",
    ),
    "counts in an array of floats": (
        lambda g: permuted(g, counts=np.array(COUNTS, np.float32)),
        "moe_permute: tokens_per_expert must be a list of ints or of int tensors with one element, "
        "a 1-D int array or tensor, or None, but got an array of float32 [5]",
    ),
    "counts of a wrong sum": (
        lambda g: permuted(g, counts=[3, 4, 3, 1, 2]),
        "moe_permute: tokens_per_expert must be [3, 4, 3, 1, 1], the rows routed to each expert, "
        "but got [3, 4, 3, 1, 2]",
    ),
    "counts that include another padding": (
        lambda g: route(g.ids, num_experts=E, padding_alignment=4, tokens_per_expert=[8, 8, 8, 8, 8]),
        "route: tokens_per_expert must be [3, 4, 3, 1, 1], the rows routed to each expert, "
        "with or without the padding to a multiple of 4, but got [8, 8, 8, 8, 8]",
    ),
    "no number of experts": (
        lambda g: route(g.ids, g.probs),
        "route: num_experts must be given with expert ids, but got None",
    ),
    "a batch too large for the plan": (
        lambda g: permute(g.x, g.other_plan),
        "permute: x must be of shape [4, hidden], the tokens of plan, but got [6, 4]",
    ),
    "tokens where rows are due": (
        lambda g: unpermute(g.x, g.plan),
        "unpermute: y must be of shape [12, hidden], the rows of plan, but got [6, 4]",
    ),
    "a batch of sequences": (
        lambda g: permuted(g, x=g.x.unsqueeze(0)),
        "moe_permute: hidden_states must be of shape [num_tokens, hidden], but got [1, 6, 4]",
    ),
    "a transposed row map": (
        lambda g: unpermuted(g, rowmap=g.rowmap.T),
        "moe_unpermute: zipped_expertwise_rowmap must be of shape [6, 5], but got [5, 6]",
    ),
    "rows for the number of tokens": (
        lambda g: unpermuted(g, tokens=N),
        "moe_unpermute: zipped_expertwise_rowmap must be of shape [12, 5], but got [6, 5]",
    ),
    "probabilities by expert": (
        lambda g: unpermute(g.rows, g.plan, paddle.ones([T, E])),
        "unpermute: probs must be of shape [12] by row of plan, or [6, 2] by slot, but got [6, 5]",
    ),
    "probabilities of rows that the plan does not have": (
        lambda g: g.plan_without_probs.row_probs,
        "plan.row_probs: this plan was made without probabilities; give them to route: "
        "route(ids, probs, num_experts=E)",
    ),
    "a buffer below zero": (
        lambda g: permuted(g, override_buffer_size=-5),
        "moe_permute: override_buffer_size must be from -1 to 2147483647, but got -5",
    ),
    "more slots than experts": (
        lambda g: calculate_topk(paddle.ones([T, E]), E + 1, False, True),
        "calculate_topk: top_k must be at most 5, the experts to choose from, but got 6",
    ),
    "a router with more slots than experts": (
        lambda g: TopKRouter(H, 3, 4),
        "TopKRouter: topk must be at most num_experts=3, but got 4",
    ),
    "arguments in the wrong order": (
        lambda g: unpermute(g.plan, g.rows),
        "unpermute: plan must be a paddle_moe_ops.Plan, but got Tensor",
    ),
    "sizes of chunks in a list": (
        lambda g: sort_chunks(g.x, [3, 3], [1, 0]),
        "sort_chunks: split_sizes must be a paddle.Tensor, but got list",
    ),
    "weights of other matrices": (
        lambda g: grouped_gemm(g.rows, paddle.ones([E, 3, 7]), COUNTS),
        "grouped_gemm: W must be of shape [E, N, 4], but got [5, 3, 7]",
    ),
    "sizes beyond the rows": (
        lambda g: grouped_gemm(g.rows, g.weights, [3, 4, 3, 1, 9]),
        "grouped_gemm: m_sizes must be sizes of 12 rows at most, those of X, but got [3, 4, 3, 1, 9]",
    ),
    "a column of probabilities": (
        lambda g: unpermute(g.rows, g.plan, g.plan.row_probs.unsqueeze(-1)),
        "unpermute: probs must be of shape [12] by row of plan, or [6, 2] by slot, but got [12, 1]",
    ),
    "a column of weights for products": (
        lambda g: grouped_gemm(g.rows, g.weights, plan=g.plan, topk_weights=g.plan.row_probs.unsqueeze(-1)),
        "grouped_gemm: topk_weights must be of shape [12] by row of plan, or [6, 2] or [12] by slot, but got [12, 1]",
    ),
    "probabilities by slot where those by row are due": (
        lambda g: unpermuted(g, row_probs=g.probs),
        "moe_unpermute: token_prob_unzipped must be of shape [12] or [12, 1], one for each row, but got [6, 2]",
    ),
    "tokens of another batch for float8 experts": (
        lambda g: quantized_experts(g.x, g.other_plan, dequantize_1x128, dequantize_1x128),
        "quantized_experts: x must be of shape [4, hidden], the tokens of plan, but got [6, 4]",
    ),
    "a mask in integers": (
        lambda g: route(paddle.ones([T, E], "int32"), num_experts=E),
        "route: routing must name an expert at most once per token, but token 0 names expert 1 in slots 0 and 1; "
        "a mask [num_tokens, num_experts] must be of dtype bool",
    ),
    "ids of as many slots as experts that are no mask": (
        lambda g: route(paddle.full([T, E], 2, "int32"), num_experts=E),
        "route: routing must name an expert at most once per token, but token 0 names expert 2 in slots 0 and 1",
    ),
    "no state of an exchange": (
        lambda g: dispatch.local_unpermute_before_a2a(g.x, {"sizes": 1}),
        "local_unpermute_before_a2a: state must be the dictionary that local_permute_after_a2a returned, "
        "but got ['sizes']",
    ),
    "another state of an exchange": (
        lambda g: dispatch.local_unpermute_before_a2a(g.x, g.ids),
        "local_unpermute_before_a2a: state must be the dictionary that local_permute_after_a2a returned, "
        "but got Tensor",
    ),
    "a row map of moe_permute for that of a mask": (
        lambda g: masked.permute_with_mask_map(g.x, g.rowmap, N),
        "permute_with_mask_map: row_id_map must be a map of make_row_id_map, which counts the experts of each token "
        "in its last column, at most 2, but got -1 for token 0",
    ),
    "weights by slot where those by expert are due": (
        lambda g: masked.moe_unpermute(g.rows, g.row_id_map, g.probs),
        "moe_unpermute: merging_probs must be of shape [6, 5], but got [6, 2]",
    ),
}


GIANT_BUFFERS = {
    "bytes for an alignment": (
        lambda g: permuted(g, alignment=2**29),
        "moe_permute: padding_alignment must give a buffer of fewer than 2^31 rows, but 536870912 gives 2684354560",
    ),
    "alignment of a plan in bytes": (
        lambda g: route(g.ids, num_experts=E, padding_alignment=2**29),
        "route: padding_alignment must give a buffer of fewer than 2^31 rows, but 536870912 gives 2684354560",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.cpu_only  # on a GPU data is not looked at
def test_the_message_says_what_is_wrong(mistake, given, backend):
    call, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError)) as raised:
        call(given)
    assert str(raised.value) == message


@pytest.mark.parametrize("mistake", GIANT_BUFFERS)
def test_a_buffer_of_2_to_the_31_rows_is_blamed_on_the_alignment(mistake, given, backend):
    call, message = GIANT_BUFFERS[mistake]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(given)


def test_a_dtype_may_be_given_by_its_name(given, backend):
    codes, scales = quantize_1x128(given.x)
    for dtype in (paddle.bfloat16, paddle.float16, paddle.float32):
        name = str(dtype).rpartition(".")[2]
        assert_bits_equal(dequantize_1x128(codes, scales, dtype=name), dequantize_1x128(codes, scales, dtype=dtype))
