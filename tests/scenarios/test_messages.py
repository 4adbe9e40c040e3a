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
    Float8Matrices,
    dequantize_1x128,
    dispatch,
    indexed,
    masked,
    moe_mlp,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    quantized_experts,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.compat import transformer_engine
from paddle_moe_ops.expert_parallel import GradScaler
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer, SwiGLU, SwiGLUExperts, TopKRouter
from paddle_moe_ops.routing import calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal

T, H, E, K = 6, 4, 5, 2
N = T * K
IDS = [[0, 1], [1, 2], [0, 2], [1, 0], [2, 1], [4, 3]]
COUNTS = [3, 4, 3, 1, 1]


@pytest.fixture
def given(place):
    """A user's tensors after a forward pass."""
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


def index_map(g):
    return masked.moe_permute(g.x, g.ids, map_type="index")[1]


def exchange(g):
    """The state of rank 1 of two, which received twelve rows."""
    counts = paddle.to_tensor([[1, 0, 3, 4], [2, 1, 2, 3]])
    return dispatch.local_permute_after_a2a(g.rows, counts, 1, 2)[2]


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
        "route: num_experts must be given with expert ids, by its name, but got None",
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
        "grouped_gemm: W must be of shape [E, N, 4] with transpose=True, but got [5, 3, 7]",
    ),
    "sizes beyond the rows": (
        lambda g: grouped_gemm(g.rows, g.weights, [3, 4, 3, 1, 9]),
        "grouped_gemm: m_sizes must be sizes that add up to at most 12, the rows of X, "
        "but got [3, 4, 3, 1, 9], which add up to 20",
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
    "probabilities in bfloat16": (
        lambda g: route(g.ids, g.probs.astype("bfloat16"), num_experts=E),
        'route: probs must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    "a plan by position": (
        lambda g: grouped_gemm(g.rows, g.weights, g.plan),
        "grouped_gemm: m_sizes must be a list of ints or a 1-D int array or tensor, "
        "but got a Plan, which must be passed by keyword, as plan",
    ),
    "a plan by position for tokens": (
        lambda g: grouped_gemm(g.x, g.weights, g.plan, permute_x=True),
        "grouped_gemm: m_sizes must be a list of ints or a 1-D int array or tensor, "
        "but got a Plan, which must be passed by keyword, as plan",
    ),
    "no groups": (
        lambda g: grouped_gemm(g.rows, g.weights),
        "grouped_gemm: m_sizes or plan must be given, but got neither",
    ),
    "batched rows for another plan": (
        lambda g: grouped_gemm(g.x.reshape([2, 3, H]), g.weights, plan=g.plan),
        "grouped_gemm: X must be of shape [..., hidden] with 12 rows in all, the rows of plan, but got [2, 3, 4]",
    ),
    "experts with a plan by position": (
        lambda g: SwiGLUExperts(E, H, 3)(g.x, g.plan),
        "SwiGLUExperts: tokens_per_expert must be a list of ints or a 1-D int array or tensor, "
        "but got a Plan, which must be passed by keyword, as plan",
    ),
    "experts without counts": (
        lambda g: SwiGLUExperts(E, H, 3)(g.rows),
        "SwiGLUExperts: tokens_per_expert or plan must be given, but got neither",
    ),
    "a shared expert of another width": (
        lambda g: SwiGLU(H + 1, 3)(g.x.reshape([2, 3, H])),
        "SwiGLU: x must be of shape [..., 5], but got [2, 3, 4]",
    ),
    "groups to choose from but no groups": (
        lambda g: calculate_topk(paddle.ones([T, E]), 2, True, False, topk_groups=2),
        "calculate_topk: topk_groups must be at most 1, the number of groups, but got 2",
    ),
    "a mask of other sequences": (
        lambda g: dispatch.token_dispatch(g.x.reshape([2, 3, H]), paddle.ones([3, 2, E], "bool"), 0),
        "token_dispatch: routing_map must be of shape [6, num_experts] or [2, 3, num_experts], but got [3, 2, 5]",
    ),
    "a mask of sequences for more tokens": (
        lambda g: dispatch.token_dispatch(g.x, paddle.ones([2, 4, E], "bool"), 0),
        "token_dispatch: routing_map must be of shape [6, num_experts], but got [2, 4, 5]",
    ),
    "probabilities of sequences for more experts": (
        lambda g: dispatch.token_dispatch(
            g.x.reshape([2, 3, H]), paddle.ones([2, 3, E], "bool"), 0, paddle.ones([2, 3, E + 1])
        ),
        "token_dispatch: probs must be of shape [6, 5] or [2, 3, 5], but got [2, 3, 6]",
    ),
    "tokens with four dimensions": (
        lambda g: dispatch.token_dispatch(g.x.reshape([1, 2, 3, H]), paddle.ones([T, E], "bool"), 0),
        "token_dispatch: inp must be of shape [num_tokens, hidden] or [batch, length, hidden], but got [1, 2, 3, 4]",
    ),
    "weights of sequences for more experts": (
        lambda g: dispatch.token_combine(g.rows, g.row_id_map, paddle.ones([2, 3, E + 1])),
        "token_combine: merging_probs must be of shape [6, 5] or [batch, length, 5] by token, or [12] by row, "
        "but got [2, 3, 6]",
    ),
    "bad ids of sequences": (
        lambda g: indexed.get_routing_indices(paddle.to_tensor([[[0, 1], [1, 9]]]), E),
        "get_routing_indices: selected_experts must hold expert ids in [-1, 5), but token [0, 1], slot 1 holds 9",
    ),
    "indices for other sequences": (
        lambda g: indexed.permute(g.x.reshape([2, 3, H]), paddle.arange(7), K),
        "permute: gather_indices must be of shape [12] with X of shape [2, 3, 4], but got [7]",
    ),
    "a map of chunks that repeats a row": (
        lambda g: masked.sort_chunks_by_map(g.x, paddle.to_tensor([0, 1, 2, 3, 4, 4], dtype="int32")),
        "sort_chunks_by_map: chunk_map must be a permutation of [0, 6), but entries 4 and 5 are both 4",
    ),
    "a map of chunks out of range": (
        lambda g: transformer_engine.sort_chunks_by_map(
            g.x, paddle.to_tensor([0, 1, 2, 3, 9, 4], dtype="int32"), None, T, H, True
        ),
        "sort_chunks_by_map: row_id_map must be a permutation of [0, 6), but entry 4 is 9",
    ),
    "a shape of other tokens": (
        lambda g: transformer_engine.moe_unpermute(paddle.ones([T * E, H]), g.row_id_map, restore_shape=[7, H]),
        "moe_unpermute: restore_shape must be a shape of 24 elements, those of 6 tokens of 4 columns, but got [7, 4]",
    ),
    "a number for a shape": (
        lambda g: transformer_engine.moe_unpermute(paddle.ones([T * E, H]), g.row_id_map, restore_shape=T),
        "moe_unpermute: restore_shape must be a list of ints, such as [num_tokens, hidden], but got 6",
    ),
    "a shape of other tokens by index": (
        lambda g: masked.moe_unpermute(g.rows, index_map(g), restore_shape=[5, H], map_type="index"),
        "moe_unpermute: restore_shape must be the shape of a number of tokens that divides 12, "
        "the entries of row_id_map, but got [5, 4]",
    ),
    "weights of other slots by index": (
        lambda g: masked.moe_unpermute(g.rows, index_map(g), paddle.ones([T, E]), map_type="index"),
        "moe_unpermute: merging_probs must be of shape [num_tokens, topk], "
        "one for each of the 12 entries of row_id_map, but got [6, 5]",
    ),
    "a row out of range by index": (
        lambda g: masked.moe_unpermute(g.rows, index_map(g) + 5, g.probs, map_type="index"),
        "moe_unpermute: row_id_map must hold rows in [-1, 12), but token 1, slot 1 holds 12",
    ),
    "fewer rows than an exchange received": (
        lambda g: dispatch.local_unpermute_before_a2a(g.rows[:5], exchange(g)),
        "local_unpermute_before_a2a: state['sorted_split_sizes'] must add up to at most 5, the number of rows, "
        "but the sum exceeds this at entry 2",
    ),
    "float8 matrices of a layer in another dtype": (
        lambda g: moe_mlp(g.x, g.plan, g.probs, g.weights, g.weights[:, : H // 2], float8_matrices=Float8Matrices()),
        "moe_mlp: float8_matrices must be None without compute, but got Float8Matrices(empty)",
    ),
    "a state of an exchange with another order": (
        lambda g: dispatch.local_unpermute_before_a2a(
            g.rows, {**exchange(g), "inverse_chunk_indices": paddle.zeros([4], "int64")}
        ),
        "local_unpermute_before_a2a: state['inverse_chunk_indices'] must name every chunk once, "
        "but names chunk 0 in entries 0 and 1",
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


@pytest.mark.parametrize("value", [True, False])
def test_a_layer_without_float8_operands_warns_of_micro_batches(value):
    layer = MoELayer(H, 3, E, 2)
    text = 'MoELayer: is_first_microbatch has no effect without compute="fp8_1x128"'
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        out = layer(paddle.ones([T, H]), is_first_microbatch=value)
    assert [each.filename for each in caught] == [__file__]
    assert_bits_equal(out, layer(paddle.ones([T, H])))


def test_the_name_of_the_layers_argument_is_taken(given):
    options = {"use_sigmoid": False, "renormalize": True}
    named, usual = calculate_topk(given.probs, topk=1, **options), calculate_topk(given.probs, 1, **options)
    assert_bits_equal(named[1], usual[1])


def test_printed_objects_say_what_they_are():
    assert repr(Float8Matrices()) == "Float8Matrices(empty)"
    assert re.fullmatch(r"GradScaler\((en|dis)abled, rank=0 of 1\)", repr(GradScaler()))


def test_a_dtype_may_be_given_by_its_name(given, backend):
    codes, scales = quantize_1x128(given.x)
    for dtype in (paddle.bfloat16, paddle.float16, paddle.float32):
        name = str(dtype).rpartition(".")[2]
        assert_bits_equal(dequantize_1x128(codes, scales, dtype=name), dequantize_1x128(codes, scales, dtype=dtype))
