# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs on the families of other packages: masks, dispatch and combine, gather indices; and on the layers."""

from __future__ import annotations

import functools

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops import dispatch, indexed, masked, nn, route, unpermute
from paddle_moe_ops.compat import transformer_engine, transformer_engine_jax

from .models import (
    IDS_OF_EXPERTS,
    MASKS,
    E,
    H,
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
from .plan_programs import (
    chunk_arguments,
    dense_chunks,
    dense_gemm,
    dense_with_scale,
    matrices,
    weighted_by_gate,
)

A = 3
ROOM = T * E


def rows_of_mask(mask: Tensor, experts: Tensor, rows: Tensor, alignment: int = 1) -> Tensor:
    """Expert outputs for rows in expert order."""
    return expert_rows(rows, experts, experts_of_rows(rows, padded(sizes_of_mask(mask), alignment)))


def by_maps(h, gates, mask, experts, **_):
    row_id_map, count = masked.make_row_id_map(mask, fp8_padding=A)
    row_id_map, count = with_graph(row_id_map, h), with_graph(count, h)
    rows, row_probs, row_scale = masked.permute_with_mask_map(h, row_id_map, count, gates, largest(h))
    rows = rows_of_mask(mask, experts, rows, A) * (1 + row_scale)
    out, probs = masked.unpermute_with_mask_map(rows, row_id_map, gates, permuted_probs=row_probs)
    return out + probs.sum(1, keepdim=True)


def by_maps_of_transformer_engine(h, gates, mask, experts, **_):
    count = with_graph(sizes_of_mask(mask).sum(dtype="int32"), h)
    row_id_map = with_graph(transformer_engine.make_row_id_map(mask, T, E), h)
    rows, row_scale, row_probs = transformer_engine.permute_with_mask_map(
        h, row_id_map, gates, largest(h), None, T, E, count, H, 1
    )
    rows = rows_of_mask(mask, experts, rows) * (1 + row_scale)
    out, probs = transformer_engine.unpermute_with_mask_map(rows, row_id_map, gates, row_probs, None, T, E, H)
    return out + probs.sum(1, keepdim=True)


def dense_by_maps(h, gates, experts, **_):
    return dense_by_expert(h, experts, gates) * (1 + constant(largest(h))) + gates.sum(1, keepdim=True)


def gradients_by_hand(h, gates, mask, experts, **_):
    """Results of the backward function are constants for autograd, whatever its arguments."""
    row_id_map, count = masked.make_row_id_map(mask)
    rows = masked.permute_with_mask_map(h, row_id_map, count)
    d_rows, d_probs = masked.unpermute_with_mask_map_bwd_with_merging_probs(h, row_id_map, rows, gates)
    factor = d_probs.sum(1, keepdim=True) + masked.unpermute_with_mask_map(d_rows, row_id_map)
    return factor * masked.unpermute_with_mask_map(rows_of_mask(mask, experts, rows), row_id_map, gates)


def gradients_by_hand_of_transformer_engine(h, gates, mask, experts, **_):
    row_id_map = transformer_engine.make_row_id_map(mask, T, E)
    rows = masked.permute_with_mask_map(h, row_id_map, ROOM)
    d_rows, d_probs = transformer_engine.unpermute_with_mask_map_bwd_with_merging_probs(
        h, with_graph(row_id_map, h), rows, gates, None, T, E, ROOM, H
    )
    factor = d_probs.sum(1, keepdim=True) + masked.unpermute_with_mask_map(d_rows, row_id_map)
    return factor * masked.unpermute_with_mask_map(rows_of_mask(mask, experts, rows), row_id_map, gates)


def dense_gradients_by_hand(h, gates, mask, experts, **_):
    squares = (h * h).sum(1, keepdim=True) * mask.astype("float32").sum(1, keepdim=True)
    return constant(squares + gates.sum(1, keepdim=True) * h) * dense_by_expert(h, experts, gates)


def by_mask(h, gates, mask, experts, **_):
    rows, row_id_map = masked.moe_permute(h, mask, ROOM)
    return masked.moe_unpermute(rows_of_mask(mask, experts, rows), with_graph(row_id_map, h), gates)


def by_index(h, probs, ids, experts, **_):
    """Slots of -1 come after all experts."""
    scale = largest(h)
    rows, row_id_map, row_scale = masked.moe_permute(h, ids, 0, map_type="index", scale=scale, num_experts=E)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes_of_ids(ids))) * (1 + row_scale)
    weights = paddle.where(ids >= 0, probs, paddle.zeros_like(probs))
    return masked.moe_unpermute(rows, with_graph(row_id_map, h), weights, map_type="index")


def by_mask_with_probs(h, gates, mask, experts, **_):
    rows, row_probs, row_id_map = masked.moe_permute_with_probs(h, gates, mask, ROOM)
    return masked.moe_unpermute(rows_of_mask(mask, experts, rows) * row_probs.unsqueeze(-1), row_id_map)


def by_mask_padded(h, gates, mask, experts, **_):
    counts = with_graph(sizes_of_mask(mask), h)
    rows, row_probs, row_id_map, pad_offsets, sizes = masked.moe_permute_and_pad_with_probs(h, gates, mask, counts, A)
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes)) * row_probs.unsqueeze(-1)
    return masked.moe_unpermute(rows, row_id_map, pad_offsets=with_graph(pad_offsets, h))


def by_mask_of_transformer_engine(h, gates, mask, experts, **_):
    mask = with_graph(mask.astype("int32"), h)
    rows, row_probs, row_id_map = transformer_engine.moe_permute_with_probs(h, gates, mask, ROOM)
    rows = rows_of_mask(mask, experts, rows) * row_probs.unsqueeze(-1)
    return transformer_engine.moe_unpermute(rows, with_graph(row_id_map, h), restore_shape=[T, H])


def by_mask_padded_of_transformer_engine(h, gates, mask, experts, **_):
    counts = with_graph(sizes_of_mask(mask), h)
    rows, row_probs, row_id_map, pad_offsets, sizes = transformer_engine.moe_permute_and_pad_with_probs(
        h, gates, mask, counts, A
    )
    rows = expert_rows(rows, experts, experts_of_rows(rows, sizes)) * row_probs.unsqueeze(-1)
    pad_offsets = with_graph(pad_offsets.astype("int64"), h)
    return transformer_engine.moe_unpermute(rows, row_id_map, pad_offsets=pad_offsets)


def chunks_by_index(h, probs, experts, **_):
    sizes, order = chunk_arguments(h)
    rows, probs = masked.moe_sort_chunks_by_index_with_probs(h, probs[:, 0], sizes, order)
    same = masked.moe_sort_chunks_by_index(h, sizes, order)
    also_same, _ = dispatch.sort_chunks_by_index(h, sizes, order)
    return paddle.tanh((rows + same + also_same) / 3 * experts[0]) * probs.unsqueeze(-1)


def chunks_by_map(h, probs, experts, **_):
    sizes, order = chunk_arguments(h)
    chunk_map = with_graph(masked.make_chunk_sort_map(sizes, order, T), h)
    rows, probs = masked.sort_chunks_by_map(h, chunk_map, probs[:, 0])
    return paddle.tanh(rows * experts[0]) * probs.unsqueeze(-1)


def chunks_by_map_of_transformer_engine(h, probs, experts, **_):
    """Sort chunks, and the result back again."""
    sizes, order = chunk_arguments(h)
    chunk_map = with_graph(transformer_engine.make_chunk_sort_map(sizes, order, T, 4), h)
    rows, probs = transformer_engine.sort_chunks_by_map(h, chunk_map, probs[:, 0], T, H, True)
    rows = paddle.tanh(rows * experts[0]) * probs.unsqueeze(-1)
    back, _ = transformer_engine.sort_chunks_by_map(rows, chunk_map, None, T, H, False)
    return back


def dense_chunks_back(h, probs, experts, **_):
    return paddle.tanh(h * experts[0]) * probs[:, :1]


def dispatch_and_combine(h, gates, mask, experts, **_):
    rows, row_probs, row_id_map, _, counts = dispatch.token_dispatch(h.unsqueeze(0), mask, ROOM, gates)
    rows = expert_rows(rows, experts, experts_of_rows(rows, counts)) * (1 + row_probs.unsqueeze(-1))
    return dispatch.token_combine(rows, with_graph(row_id_map, h), gates)


def dense_dispatch_and_combine(h, gates, experts, **_):
    return dense_by_expert(h, experts, gates * (1 + gates))


def dispatch_and_combine_by_row(h, gates, mask, experts, **_):
    rows, row_probs, row_id_map, pad_offsets, counts = dispatch.token_dispatch(h, mask, ROOM, gates, A)
    rows = expert_rows(rows, experts, experts_of_rows(rows, counts))
    row_id_map, pad_offsets = with_graph(row_id_map, h), with_graph(pad_offsets, h)
    return dispatch.token_combine(rows, row_id_map, row_probs, pad_offsets)


def dispatch_and_combine_of_jax(h, gates, mask, experts, **_):
    """A mask of floats that have a graph, and weights of a batch."""
    floats = mask.astype("float32") + 0 * h.sum()
    rows, _, row_id_map, pad_offsets, counts = transformer_engine_jax.token_dispatch(h, floats, ROOM, gates, A)
    rows = expert_rows(rows, experts, experts_of_rows(rows, counts))
    return transformer_engine_jax.token_combine(rows, row_id_map, gates.unsqueeze(0), pad_offsets)


COUNTS_OF_RANKS = [[1, 0, 3, 4], [2, 1, 2, 3]]  # rank 1 of two receives 3 and 4 rows from rank 0, 2 and 3 of its own
EXPERTS_OF_RECEIVED = [2] * 3 + [3] * 4 + [2] * 2 + [3] * 3 + [4]  # the last row belongs to no chunk


def rows_of_an_exchange(h, probs, experts, **_):
    counts = with_graph(paddle.to_tensor(COUNTS_OF_RANKS, dtype="int32"), h)
    rank = with_graph(paddle.to_tensor(1, dtype="int64"), h)
    rows, sizes, state = dispatch.local_permute_after_a2a(h, counts, rank, 2)
    rows = expert_rows(rows, experts, 2 + experts_of_rows(rows, sizes))
    there = dispatch.compute_ragged_all_to_all_params(counts, rank, 2)
    back = dispatch.compute_reverse_ragged_all_to_all_params(counts, rank, 2)
    factor = (there[1] + 2 * back[1]).sum().astype("float32")
    return dispatch.local_unpermute_before_a2a(rows, state) * probs[:, :1] * factor


def dense_rows_of_an_exchange(h, probs, experts, **_):
    """Rank 1 sends 3 rows to rank 0 and keeps 5, and on the way back sends 7 and keeps 5."""
    return expert_rows(h, experts, paddle.to_tensor(EXPERTS_OF_RECEIVED)) * probs[:, :1] * (8 + 2 * 12)


def experts_of_a_mask(h, gates, mask, experts, **_):
    ids, weights = dispatch.routing_map_to_selected_experts(gates, mask, K)
    plan = route(ids, num_experts=E)
    rows = paddle.gather(h, plan.row_to_token)
    return unpermute(expert_rows(rows, experts, plan.row_to_expert), plan, weights)


def dense_experts_of_a_mask(h, gates, mask, experts, **_):
    """If a token has more than K experts, those of the highest ids are kept."""
    from_the_last = paddle.cumsum(mask.astype("int32").flip(1), axis=1).flip(1)
    return dense_by_expert(h, experts, paddle.where(from_the_last <= K, gates, paddle.zeros_like(gates)))


def gather_indices(h, probs, ids, experts, **_):
    counts, gather, scatter = indexed.get_routing_indices(ids, E, True)
    rows = indexed.permute(h, with_graph(gather, h), K)
    rows = indexed.torch_grouped_gemm(rows, matrices(experts), with_graph(counts, h))
    slots = indexed.unpermute(rows, with_graph(gather, h)) + 0 * scatter.unsqueeze(-1).astype("float32")
    return (slots.reshape([T, K, H]) * probs.unsqueeze(-1)).sum(1)


def flat_gather_indices(h, probs, ids, experts, **_):
    """Ids, tokens and rows with other numbers of dimensions, and wide indices."""
    counts, gather = indexed.get_routing_indices(ids.flatten(), E, index_dtype="int64")
    rows = indexed.permute(h.unsqueeze(0), gather, K)
    rows = indexed.torch_grouped_gemm(rows.reshape([T, K, H]), matrices(experts), counts)
    slots = indexed.unpermute(rows.reshape([T, K, H]), gather)
    return (slots.reshape([T, K, H]) * probs.unsqueeze(-1)).sum(1)


def gather_indices_and_router(h, logits, experts, **_):
    probs, ids = indexed.calculate_topk(top_k=K, use_sigmoid=False, renormalize=False, gating_output=logits)
    return gather_indices(h, probs, ids, experts)


def balanced(h, scores, probs, ids, experts, **_):
    return dense_by_slot(h, ids, experts, probs), nn.load_balance_loss(scores, ids)


def dense_balanced(h, scores, probs, ids, experts, **_):
    share = (ids.unsqueeze(-1) == paddle.arange(E, dtype=ids.dtype)).astype("float32").mean([0, 1])
    return dense_by_slot(h, ids, experts, probs), E * (share * scores.mean(0)).sum()


INNER = 7


@functools.cache
def layer() -> nn.MoELayer:
    paddle.seed(11)
    return nn.MoELayer(H, INNER, E, K, capacity_factor=float(E))  # enough for all slots


def layers(h, probs, **_):
    block = layer()
    ids, weights, scores, logits = block.router(h)
    capacity = block.router.capacity(with_graph(paddle.to_tensor(T), h))
    plan = route(ids, weights, num_experts=E, capacity=capacity)
    rows = block.experts.weighted_rows(h, plan, weights)
    load = with_graph(plan.tokens_per_expert, h)
    counted = block.experts(masked.moe_permute(h, ids, 0, map_type="index")[0], load)
    block.router.update_correction_bias(load, rate=0.0)
    out = block(h) + unpermute(rows, plan) + block.shared(h) + unpermute(counted, plan, plan.row_probs)
    return (out + scores[:, :1]) * probs[:, :1], block.aux_loss + nn.router_z_loss(logits)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = paddle.matmul(x, gate_up).chunk(2, axis=-1)
    return paddle.matmul(F.silu(gate) * up, down)


def dense_layers(h, probs, **_):
    block = layer()
    scores = F.softmax(paddle.matmul(h, block.router.weight))
    chosen, ids = paddle.topk(scores, K)
    one_hot = (ids.unsqueeze(-1) == paddle.arange(E)).astype("float32")
    weights = (one_hot * (chosen / chosen.sum(1, keepdim=True)).unsqueeze(-1)).sum(1)
    of_experts = swiglu(h.unsqueeze(0), block.experts.gate_up, block.experts.down)
    routed = (of_experts * weights.transpose([1, 0]).unsqueeze(-1)).sum(0)
    shared = swiglu(h, block.shared.gate_up, block.shared.down)
    balance = E * (one_hot.mean([0, 1]) * scores.mean(0)).sum()
    z_loss = paddle.logsumexp(paddle.matmul(h, block.router.weight), axis=-1).square().mean()
    return (3 * routed + 2 * shared + scores[:, :1]) * probs[:, :1], balance + z_loss


PROGRAMS = (
    Program(by_maps, dense_by_maps, MASKS),
    Program(by_maps_of_transformer_engine, dense_by_maps, MASKS),
    Program(gradients_by_hand, dense_gradients_by_hand, MASKS),
    Program(gradients_by_hand_of_transformer_engine, dense_gradients_by_hand, MASKS),
    Program(by_mask, weighted_by_gate, MASKS),
    Program(by_index, dense_with_scale),
    Program(by_mask_with_probs, weighted_by_gate, MASKS),
    Program(by_mask_padded, weighted_by_gate, MASKS),
    Program(by_mask_of_transformer_engine, weighted_by_gate, MASKS),
    Program(by_mask_padded_of_transformer_engine, weighted_by_gate, MASKS),
    Program(chunks_by_index, dense_chunks, MASKS),
    Program(chunks_by_map, dense_chunks, MASKS),
    Program(chunks_by_map_of_transformer_engine, dense_chunks_back, MASKS),
    Program(dispatch_and_combine, dense_dispatch_and_combine, MASKS),
    Program(dispatch_and_combine_by_row, weighted_by_gate, MASKS),
    Program(dispatch_and_combine_of_jax, weighted_by_gate, MASKS),
    Program(rows_of_an_exchange, dense_rows_of_an_exchange, MASKS),
    Program(experts_of_a_mask, dense_experts_of_a_mask, MASKS),
    Program(gather_indices, dense_gemm),
    Program(flat_gather_indices, dense_gemm),
    Program(gather_indices_and_router, dense_gemm, MASKS),
    Program(balanced, dense_balanced, IDS_OF_EXPERTS),
    Program(layers, dense_layers, MASKS, in_static_graphs=False),
)
