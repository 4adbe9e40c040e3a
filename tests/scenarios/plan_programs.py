# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs on ids and plans: Paddle's two functions, the plan and its verbs, quantised rows, grouped products."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops import (
    dequantize_1x128,
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
from paddle_moe_ops.mlp import moe_mlp
from paddle_moe_ops.routing import calculate_topk

from .models import (
    MASKS,
    E,
    K,
    Program,
    T,
    constant,
    dense_by_expert,
    dense_by_slot,
    expert_rows,
    experts_of_rows,
    largest,
    padded,
    sizes_of_ids,
    sizes_of_mask,
    with_graph,
)

A = 3


def weighted_by_slot(h, probs, ids, experts, **_):
    return dense_by_slot(h, ids, experts, probs)


def weighted_by_gate(h, gates, experts, **_):
    return dense_by_expert(h, experts, gates)


def moe_plain(h, probs, ids, experts, **_):
    """The experts weight their rows, as in training with Paddle."""
    rows, rowmap, row_probs, _ = moe_permute(h, None, ids, probs, E, None, 1)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes_of_ids(ids)))
    rowmap = with_graph(rowmap, h)
    out, _ = moe_unpermute(rows * row_probs.unsqueeze(-1), rowmap, ids, row_probs, T, E)
    return out


def moe_weighted(h, probs, ids, experts, **_):
    rows, rowmap, row_probs, _, expert_of_row = moe_permute(h, None, ids, probs, E, None, A, return_expert_indices=True)
    rows = expert_rows(rows, experts, expert_of_row)
    out, _ = moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)
    return out


def moe_like_paddle(h, probs, ids, experts, **_):
    rows, rowmap, row_probs, _ = moe_permute(h, None, ids, probs, E, None, 1)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes_of_ids(ids)))
    out, _ = moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True, compat="paddle")
    return out


def moe_through_paddle(h, probs, ids, experts, **_):
    """Paddle's own functions, while `patched_paddle` makes them those of the package."""
    rows, rowmap, row_probs, _ = F.moe_permute(h, None, ids, probs, E, None, 1)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes_of_ids(ids)))
    out, _ = F.moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)
    return out


def dense_like_paddle(h, probs, ids, experts, **_):
    """A token with one row is not weighted."""
    single = (ids >= 0).astype("int32").sum(1, keepdim=True) == 1
    return dense_by_slot(h, ids, experts, paddle.where(single, paddle.ones_like(probs), probs))


def moe_with_scale_and_counts(h, probs, ids, experts, **_):
    scale = largest(h) / 448
    counts = with_graph(sizes_of_ids(ids), h)
    rows, rowmap, row_probs, row_scale = moe_permute(h, scale, ids, probs, E, counts, A)
    rows = expert_rows(rows, experts, experts_of_rows(rows, padded(counts, A))) * (1 + 448 * row_scale)
    out, _ = moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)
    return out


def dense_with_scale(h, probs, ids, experts, **_):
    return dense_by_slot(h, ids, experts, probs) * (1 + constant(largest(h)))


def moe_with_list_of_counts(h, probs, ids, experts, **_):
    counts = with_graph(sizes_of_ids(ids), h)
    of_each = [counts[e].astype("int64" if e % 2 else "int32") for e in range(E)]
    rows, rowmap, row_probs, _ = moe_permute(h, None, ids, probs, E, of_each, 1)
    rows = expert_rows(rows, experts, experts_of_rows(rows, counts))
    out, _ = moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)
    return out


def moe_with_own_gather(h, probs, ids, experts, **_):
    """Only the maps and probabilities are the package's, in a static buffer; the rows are Paddle's gather."""
    _, rowmap, row_probs, _, expert_of_row, overflow = moe_permute(
        h,
        None,
        ids,
        probs,
        E,
        [],
        1,
        do_gather=False,
        return_expert_indices=True,
        override_buffer_size=T * K + 4,
        return_overflow=True,
    )
    token_of_row = route(ids, num_experts=E, buffer_size=T * K + 4).row_to_token
    rows = paddle.gather(h, paddle.clip(token_of_row, 0)) + overflow.astype("float32")
    rows = expert_rows(rows, experts, expert_of_row) * row_probs.unsqueeze(-1)
    out, _ = moe_unpermute(rows, rowmap, ids, row_probs, T, E)
    return out


def probabilities_there_and_back(h, probs, ids, experts, **_):
    """The probability output of moe_unpermute belongs to the loss."""
    rows, rowmap, row_probs, _ = moe_permute(h, None, ids, probs, E, None, 1)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes_of_ids(ids)))
    return moe_unpermute(rows, rowmap, ids, row_probs * row_probs, T, E)


def dense_there_and_back(h, probs, ids, experts, **_):
    probs = paddle.where(ids >= 0, probs, paddle.zeros_like(probs))
    return dense_by_slot(h, ids, experts, paddle.ones_like(probs)), probs * probs


def plan_by_row(h, probs, ids, experts, **_):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    rows, _ = permute(h, plan)
    return unpermute(expert_rows(rows, experts, plan.row_to_expert), plan, plan.row_probs)


def plan_by_slot(h, probs, ids, experts, **_):
    plan = route(ids, num_experts=E, tokens_per_expert=with_graph(sizes_of_ids(ids), h))
    rows, _ = permute(h, plan)
    return unpermute(expert_rows(rows, experts, plan.row_to_expert), plan, probs)


def plan_by_mask(h, gates, mask, experts, **_):
    counts = with_graph(sizes_of_mask(mask), h)
    plan = route(mask, gates, tokens_per_expert=counts, padding_alignment=A)
    rows, _ = permute(h, plan)
    return unpermute(expert_rows(rows, experts, plan.row_to_expert) * plan.row_probs.unsqueeze(-1), plan)


CAPACITY = 4


def plan_with_capacity(h, probs, ids, experts, **_):
    capacity = with_graph(paddle.to_tensor(CAPACITY, dtype="int32"), h)
    plan = route(ids, probs, num_experts=E, capacity=capacity)
    rows, _ = permute(h, plan)
    return unpermute(expert_rows(rows, experts, plan.row_to_expert), plan, plan.row_probs)


def dense_with_capacity(h, probs, ids, experts, **_):
    """An expert gets the first tokens that name it."""
    named = (ids.unsqueeze(-1) == paddle.arange(E, dtype=ids.dtype)).astype("int32")
    place = (paddle.cumsum(named.sum(1), axis=0).astype("int32").unsqueeze(1) * named).sum(-1)
    return dense_by_slot(h, ids, experts, paddle.where(place <= CAPACITY, probs, paddle.zeros_like(probs)))


def plan_with_graphs(h, scores, probs, ids, experts, **_):
    """The maps of the plan carry graphs, as after any arithmetic on them."""
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    maps = {name: getattr(plan, name) for name in ("slot_to_row", "token_rows", "row_to_token", "row_to_slot")}
    maps = {name: with_graph(value, scores) for name, value in maps.items()}
    plan = plan._replace(**maps, expert_offsets=with_graph(plan.expert_offsets, scores))
    rows, _ = permute(h, plan)
    products = grouped_gemm(rows, matrices(experts), plan=plan, topk_weights=probs)
    return unpermute(products, plan)


def plan_with_scale(h, probs, ids, experts, **_):
    plan = route(ids, probs, num_experts=E)
    rows, row_scale = permute(h, plan, largest(h))
    rows = expert_rows(rows, experts, plan.row_to_expert) * (1 + row_scale)
    return unpermute(rows, plan, plan.row_probs)


def plan_with_codes_beside(h, probs, ids, experts, **_):
    """The float8 rows have no gradient; what is made of them counts as a constant."""
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    codes, scales = permute(h, plan, quantize="fp8_1x128")
    rows, _ = permute(h, plan)
    rows = expert_rows(rows, experts, plan.row_to_expert) * dequantize_1x128(codes, scales, dtype=paddle.float32)
    return unpermute(rows, plan, plan.row_probs)


def quantised(h: Tensor) -> Tensor:
    return dequantize_1x128(*quantize_1x128(constant(h)), dtype=paddle.float32)


def dense_with_codes_beside(h, probs, ids, experts, **_):
    return dense_by_slot(h, ids, experts, probs) * quantised(h)


def codes_of_tokens(h, probs, ids, experts, **_):
    codes, scales = quantize_1x128(h)
    return dense_by_slot(h, ids, experts, probs) * dequantize_1x128(codes, scales, dtype=paddle.float32)


def plan_with_float8_experts(h, probs, ids, experts, **_):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    weights = F.embedding(paddle.clip(plan.row_to_expert, 0), experts)

    def expert_fn(codes, scales, weights, row_probs):
        return dequantize_1x128(codes, scales, dtype=paddle.float32) * weights * row_probs.unsqueeze(-1)

    def expert_vjp(d_out, codes, scales, weights, row_probs):
        rows = dequantize_1x128(codes, scales, dtype=paddle.float32)
        by_row = row_probs.unsqueeze(-1)
        return d_out * weights * by_row, d_out * rows * by_row, (d_out * rows * weights).sum(1)

    return unpermute(quantized_experts(h, plan, expert_fn, expert_vjp, weights, plan.row_probs), plan)


def dense_float8_experts(h, probs, ids, experts, **_):
    """The gradient of the tokens goes straight through the quantisation."""
    tokens = h + constant(quantised(h) - h)
    weights = paddle.where(ids >= 0, probs, paddle.zeros_like(probs))
    rows = tokens.unsqueeze(1) * F.embedding(paddle.clip(ids, 0), experts)
    return (weights.unsqueeze(-1) * rows).sum(1)


def chunk_arguments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes and order of four chunks; two rows are in none of them."""
    sizes = with_graph(paddle.to_tensor([3, 0, 6, 2], dtype="int64"), h)
    return sizes, with_graph(paddle.to_tensor([2, 0, 3, 1], dtype="int32"), h)


CHUNKS_SORTED = [*range(3, 9), *range(3), 9, 10, 11, 12]  # rows in their new order


def chunks(h, probs, experts, **_):
    rows, probs, _ = sort_chunks(h, *chunk_arguments(h), probs[:, 0])
    return paddle.tanh(rows * experts[0]) * probs.unsqueeze(-1)


def dense_chunks(h, probs, experts, **_):
    order = paddle.to_tensor(CHUNKS_SORTED)
    rows = paddle.tanh(paddle.gather(h, order) * experts[0])
    return rows * paddle.gather(probs[:, :1], order)


def matrices(experts: Tensor) -> Tensor:
    """[E, H, H] of the experts' vectors."""
    return experts.unsqueeze(2) * experts.flip(0).unsqueeze(1)


def products(h: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """[T, H]: each token times the matrices of all experts, with weights [T, E]."""
    by_expert = paddle.matmul(h.unsqueeze(0), matrices(experts), transpose_y=True)
    return (by_expert * weights.transpose([1, 0]).unsqueeze(-1)).sum(0)


def dense_gemm(h, probs, ids, experts, **_):
    one_hot = (ids.unsqueeze(-1) == paddle.arange(E, dtype=ids.dtype)).astype("float32")
    return products(h, experts, (one_hot * probs.unsqueeze(-1)).sum(1))


def gemm_by_sizes(h, probs, ids, experts, **_):
    plan = route(ids, num_experts=E)
    rows = grouped_gemm(permute(h, plan)[0], matrices(experts), with_graph(sizes_of_ids(ids), h))
    return unpermute(rows, plan, probs)


def gemm_by_offsets(h, probs, ids, experts, **_):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    offsets, sizes = with_graph(plan.expert_offsets, h), with_graph(plan.tokens_per_expert, h)
    transposed = experts.unsqueeze(1) * experts.flip(0).unsqueeze(2)
    rows, _ = permute(h, plan)
    rows = grouped_gemm(rows, transposed, sizes, False, expert_offsets=offsets, topk_weights=plan.row_probs)
    return unpermute(rows, plan)


def gemm_with_plan(h, probs, ids, experts, **_):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    return unpermute(grouped_gemm(h, matrices(experts), plan=plan, permute_x=True), plan, plan.row_probs)


def gemm_with_weights_of_slots(h, probs, ids, experts, **_):
    plan = route(ids, num_experts=E, padding_alignment=A)
    return unpermute(grouped_gemm(permute(h, plan)[0], matrices(experts), plan=plan, topk_weights=probs), plan)


def gemm_to_slots(h, probs, ids, experts, **_):
    plan = route(ids, num_experts=E, padding_alignment=A)
    weights = {"topk_weights": probs.flatten(), "weights_by": "slot"}
    slots = grouped_gemm(permute(h, plan)[0], matrices(experts), plan=plan, permute_y=True, **weights)
    return slots.reshape([*ids.shape, -1]).sum(1)


def mlp(h, probs, ids, experts, **_):
    """Matrices [E, H, 2H] and [E, H, H] of the experts' vectors."""
    plan = route(ids, num_experts=E, padding_alignment=A)
    gate_up = paddle.concat([matrices(experts), matrices(experts.flip(1))], axis=2)
    return moe_mlp(h, plan, probs, gate_up, matrices(experts).transpose([0, 2, 1]))


def dense_mlp(h, probs, ids, experts, **_):
    one_hot = (ids.unsqueeze(-1) == paddle.arange(E, dtype=ids.dtype)).astype("float32")
    gate, up = (paddle.matmul(h.unsqueeze(0), matrices(each)) for each in (experts, experts.flip(1)))
    by_expert = paddle.matmul(paddle.nn.functional.silu(gate) * up, matrices(experts).transpose([0, 2, 1]))
    return (by_expert * (one_hot * probs.unsqueeze(-1)).sum(1).transpose([1, 0]).unsqueeze(-1)).sum(0)


def bias_of(scores: Tensor, experts: Tensor) -> Tensor:
    return 0.2 * scores.mean(0) + experts[:, 0] / 16


def own_router(h, logits, scores, experts, **_):
    """The router is the package's, its bias has a graph."""
    probs, ids, scores = calculate_topk(
        logits, K, False, True, correction_bias=bias_of(scores, experts), scaling_factor=2.5, return_scores=True
    )
    plan = route(ids, probs.astype("float32"), num_experts=E)
    rows, _ = permute(h, plan)
    rows = expert_rows(rows, experts, plan.row_to_expert)
    return unpermute(rows, plan, plan.row_probs) + scores.sum(0).sum() * scores[:, :1]


def dense_own_router(h, scores, experts, **_):
    _, ids = paddle.topk(scores + bias_of(scores, experts), K)
    probs = paddle.take_along_axis(scores, ids, axis=1)
    probs = 2.5 * probs / probs.sum(1, keepdim=True)
    return dense_by_slot(h, ids, experts, probs) + scores.sum(0).sum() * scores[:, :1]


PROGRAMS = (
    Program(moe_plain, weighted_by_slot),
    Program(moe_weighted, weighted_by_slot),
    Program(moe_like_paddle, dense_like_paddle),
    Program(moe_through_paddle, dense_like_paddle),
    Program(moe_with_scale_and_counts, dense_with_scale),
    Program(moe_with_list_of_counts, weighted_by_slot),
    Program(moe_with_own_gather, weighted_by_slot),
    Program(probabilities_there_and_back, dense_there_and_back),
    Program(plan_by_row, weighted_by_slot),
    Program(plan_by_slot, weighted_by_slot),
    Program(plan_by_mask, weighted_by_gate, MASKS),
    Program(plan_with_capacity, dense_with_capacity),
    Program(plan_with_graphs, dense_gemm),
    Program(plan_with_scale, dense_with_scale),
    Program(plan_with_codes_beside, dense_with_codes_beside),
    Program(codes_of_tokens, dense_with_codes_beside, MASKS),
    Program(plan_with_float8_experts, dense_float8_experts, in_static_graphs=False),
    Program(chunks, dense_chunks, MASKS),
    Program(gemm_by_sizes, dense_gemm),
    Program(gemm_by_offsets, dense_gemm),
    Program(gemm_with_plan, dense_gemm),
    Program(gemm_with_weights_of_slots, dense_gemm),
    Program(gemm_to_slots, dense_gemm),
    Program(mlp, dense_mlp, products=2),
    Program(own_router, dense_own_router, MASKS),
)
