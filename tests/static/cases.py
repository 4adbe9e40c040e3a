# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions that every way of running Paddle must answer with the same bits.

If a call contains Paddle's matmul, sums may differ in the order of their terms. The operator contract takes its
examples from here, so a case also puts a new operator under that contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_moe_ops import (
    dequantize_1x128,
    dispatch,
    indexed,
    masked,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.routing import calculate_topk
from tests.static.inputs import (
    BFLOAT16,
    BUFFER,
    GROUPS,
    SMALL_BUFFER,
    A,
    E,
    Inputs,
    K,
    chunk_inputs,
    expert_weights,
    gating_inputs,
    mask_inputs,
    mask_inputs_without_probs,
    packed_scales,
    plan_inputs,
    row_inputs,
    row_scales,
    token_inputs,
    true_counts,
)


class Case(NamedTuple):
    """A function of tensors, what it is called with, and which of its inputs want gradients.

    `by_matmul`: the results are sums of Paddle's matmul, which adds up in another order in another executor.
    """

    name: str
    function: Callable[..., tuple[paddle.Tensor, ...]]
    inputs: Callable[[np.random.Generator, int], Inputs]
    leaves: tuple[str, ...]
    by_matmul: bool = False

    def __str__(self) -> str:
        return self.name


def num_tokens(ids: Any) -> Any:
    """T as a tensor: a graph does not know it when it is built."""
    return paddle.shape(ids)[0]


def permute_counted(x, ids, probs):
    return moe_permute(x, None, ids, probs, E, None, A, return_expert_indices=True)


def permute_counts_tensor(x, ids, probs, counts):
    return moe_permute(x, None, ids, probs, E, counts, A)


def permute_counts_list_of_tensors(x, ids, probs, counts):
    return moe_permute(x, None, ids, probs, E, [counts[expert] for expert in range(E)], A)


def permute_static_buffer(x, ids, probs):
    return moe_permute(
        x, None, ids, probs, E, [], A, return_expert_indices=True, override_buffer_size=BUFFER, return_overflow=True
    )


def permute_small_buffer(x, ids, probs):
    return moe_permute(x, None, ids, probs, E, [], A, override_buffer_size=SMALL_BUFFER, return_overflow=True)


def permute_scale(x, ids, probs, scale):
    return moe_permute(x, scale, ids, probs, E, None, A)


def permute_packed_scale(x, ids, probs, scale):
    return moe_permute(x, scale, ids, probs, E, None, A, using_ue8m0_scale=True)


def permute_float8(x, ids, probs, scale):
    # An Executor neither takes nor hands out float8. Random normals are far from where the cast saturates.
    rows, *others = moe_permute(x.astype("float8_e4m3fn"), scale, ids, probs, E, None, A)
    return rows.astype("float32"), *others


def permute_maps_only(x, ids, probs):
    return moe_permute(x, None, ids, probs, E, None, A, do_gather=False, return_expert_indices=True)


def unpermute_plain(rows, rowmap, ids, row_probs):
    return moe_unpermute(rows, rowmap, ids, row_probs, num_tokens(ids), E)


def unpermute_weighted(rows, rowmap, ids, row_probs):
    return moe_unpermute(rows, rowmap, ids, row_probs, num_tokens(ids), E, using_weighted_combine=True)


def unpermute_like_paddle(rows, rowmap, ids, row_probs):
    return moe_unpermute(
        rows, rowmap, ids, row_probs.unsqueeze(-1), num_tokens(ids), E, using_weighted_combine=True, compat="paddle"
    )


def layer(x, ids, probs):
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, A)
    return moe_unpermute(rows * 2, rowmap, ids, row_probs, num_tokens(ids), E, using_weighted_combine=True)


def plan_tensors(plan):
    return tuple(field for field in plan if field is not None and not isinstance(field, int))


def route_ids(ids, probs):
    return plan_tensors(route(ids, probs, num_experts=E, padding_alignment=A))


def route_without_probs(ids):
    return plan_tensors(route(ids, num_experts=E, padding_alignment=A))


def route_each(ids, probs):
    return plan_tensors(route(ids, probs, num_experts=E, duplicates="each", buffer_size=SMALL_BUFFER))


def route_counts_tensor(ids, probs, counts):
    return plan_tensors(route(ids, probs, num_experts=E, tokens_per_expert=counts))


def route_mask(x, mask, probs):
    plan = route(mask, probs, topk=K, padding_alignment=A)
    rows, _ = permute(x, plan)
    return *plan_tensors(plan), rows, unpermute(rows, plan, plan.row_probs)


def permute_by_plan(x, ids, probs, scale):
    rows, scales = permute(x, route(ids, probs, num_experts=E, padding_alignment=A), scale)
    return rows, scales


def permute_by_plan_float8(x, ids, probs, scale):
    plan = route(ids, probs, num_experts=E, buffer_size=BUFFER)
    rows, scales = permute(x.astype("float8_e4m3fn"), plan, scale)
    return rows.astype("float32"), scales


def permute_by_plan_float8_e5m2(x, ids):
    rows, _ = permute(x.astype("float8_e5m2"), route(ids, num_experts=E))
    return (rows.astype("float32"),)


def unpermute_by_plan(rows, ids):
    return (unpermute(rows, route(ids, num_experts=E, padding_alignment=A)),)


def unpermute_by_plan_row_probs(rows, ids, probs):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    return unpermute(rows, plan, plan.row_probs), plan.row_probs


def unpermute_by_plan_slot_probs(rows, ids, probs):
    return (unpermute(rows, route(ids, num_experts=E, padding_alignment=A), probs),)


def chunks_without_probs(x, sizes, order):
    out, _, source_to_dest = sort_chunks(x, sizes, order)
    return out, source_to_dest


def chunks_float8(x, sizes, order, probs):
    out, probs_out, source_to_dest = sort_chunks(x.astype("float8_e4m3fn"), sizes, order, probs)
    return out.astype("float32"), probs_out, source_to_dest


def chunks_by_map(x, sizes, order, probs):
    chunk_map = masked.make_chunk_sort_map(sizes, order)  # shorter than x: the last rows are not in any chunk
    full_map = masked.make_chunk_sort_map(sizes.astype("int32"), order, 500)
    rows = num_tokens(chunk_map)
    out, probs_out = masked.sort_chunks_by_map(x[:rows], chunk_map, probs[:rows])
    back, _ = masked.sort_chunks_by_map(out, chunk_map, probs_out, is_forward=False)
    return chunk_map, full_map, out, probs_out, back


def mask_maps(x, mask, probs):
    row_id_map, num_out = masked.make_row_id_map(mask, num_topK=K, fp8_padding=A)
    rows, row_probs, _ = masked.permute_with_mask_map(x, row_id_map, num_out, probs)
    out, slot_probs = masked.unpermute_with_mask_map(rows * 2, row_id_map, probs, permuted_probs=row_probs)
    return row_id_map, num_out, rows, row_probs, out, slot_probs


def mask_maps_without_probs(x, mask):
    row_id_map, _ = masked.make_row_id_map(mask, num_out_tokens=SMALL_BUFFER)
    rows = masked.permute_with_mask_map(x, row_id_map, SMALL_BUFFER)
    return row_id_map, rows, masked.unpermute_with_mask_map(rows, row_id_map)


def mask_backward(x, mask, probs):
    row_id_map, num_out = masked.make_row_id_map(mask)
    rows = masked.permute_with_mask_map(x * 3, row_id_map, num_out).detach()
    return masked.unpermute_with_mask_map_bwd_with_merging_probs(x, row_id_map, rows, probs)


def mask_moe(x, mask, probs):
    rows, row_probs, row_id_map = masked.moe_permute_with_probs(x, probs, mask, BUFFER)
    return rows, row_probs, row_id_map, masked.moe_unpermute(rows, row_id_map, probs)


def mask_moe_padded(x, mask, probs):
    counts = mask.astype("int32").sum(0)
    rows, row_probs, row_id_map, pad_offsets, targets = masked.moe_permute_and_pad_with_probs(x, probs, mask, counts, A)
    out = masked.moe_unpermute(rows * 2, row_id_map, probs, pad_offsets=pad_offsets)
    return rows, row_probs, row_id_map, targets, out


def index_moe(x, ids, probs):
    rows, row_id_map = masked.moe_permute(x, ids, BUFFER, map_type="index", num_experts=E)
    return rows, row_id_map, masked.moe_unpermute(rows, row_id_map, probs, map_type="index")


def dispatch_and_combine(x, mask, probs):
    rows, row_probs, row_id_map, _, counts = dispatch.token_dispatch(x, mask, SMALL_BUFFER, probs)
    return rows, row_probs, row_id_map, counts, dispatch.token_combine(rows, row_id_map, row_probs)


def dispatch_and_combine_padded(x, mask, probs):
    rows, row_probs, row_id_map, pad_offsets, counts = dispatch.token_dispatch(x, mask, BUFFER, probs, A)
    out = dispatch.token_combine(rows * 2, row_id_map, probs, pad_offsets)
    return rows, row_probs, row_id_map, pad_offsets, counts, out


def expert_parallel(x, mask, probs):
    counts = mask.astype("int32").sum(0).expand([E, E])  # as many ranks as experts, all with the same tokens
    rows, sizes, state = dispatch.local_permute_after_a2a(
        x, paddle.minimum(counts, num_tokens(x) // E + counts * 0), 2, E
    )
    back = dispatch.local_unpermute_before_a2a(rows, state)
    experts, weights = dispatch.routing_map_to_selected_experts(probs, mask, K)
    return rows, sizes, back, experts, weights, *dispatch.compute_ragged_all_to_all_params(counts, 2, E)


def as_float32(codes, scales):
    """An Executor neither takes nor hands out float8."""
    return codes.astype("float32"), scales


def quantize_rows(x):
    return as_float32(*quantize_1x128(x))


def quantize_packed(x):
    return as_float32(*quantize_1x128(x, ue8m0=True, scale_layout="col", amax_min=0.25))


def permute_quantized(x, ids):
    plan = route(ids, num_experts=E, padding_alignment=A)
    return as_float32(*permute(x, plan, quantize="fp8_1x128"))


def permute_quantized_packed(x, ids):
    plan = route(ids, num_experts=E, buffer_size=BUFFER)
    return as_float32(*permute(x, plan, quantize="fp8_1x128_ue8m0", scale_layout="col"))


def quantize_and_back(x):
    by_row = dequantize_1x128(*quantize_1x128(x))
    codes, scales = quantize_1x128(x, ue8m0=True, scale_layout="col")
    return by_row, dequantize_1x128(codes, scales, scale_layout="col", dtype=paddle.float32)


def topk_softmax(gating):
    return calculate_topk(gating, K, False, True)


def topk_in_groups(gating, bias):
    scaling = {"scaling_factor": 2.5, "return_scores": True}
    return calculate_topk(gating, K, True, True, correction_bias=bias, **GROUPS, **scaling)


def topk_of_logits(gating):
    by_keyword = {"gating_output": gating, "pre_act": False, "post_act": True}
    return calculate_topk(top_k=K, use_sigmoid=False, renormalize=False, **by_keyword)


def by_gather_indices(x, ids):
    counts, gather, scatter = indexed.get_routing_indices(ids, E, True)
    rows = indexed.permute(x, gather, K)
    return counts, gather, scatter, rows, indexed.unpermute(rows * 2, gather)


def by_flat_gather_indices(x, ids):
    counts, gather, scatter = indexed.get_routing_indices(ids.flatten(), E, True, index_dtype="int64")
    rows = indexed.permute(x.unsqueeze(0), gather, K)
    return counts, gather, scatter, rows, indexed.unpermute((rows * 2).unsqueeze(1), gather)


def gemm_by_plan(x, ids, weights):
    plan = route(ids, num_experts=E, padding_alignment=A)
    rows, _ = permute(x, plan)
    return (grouped_gemm(rows, weights, plan.tokens_per_expert, expert_offsets=plan.expert_offsets),)


def gemms_with_permutation_and_weights(x, ids, probs, weights):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    rows = grouped_gemm(x, weights, plan=plan, permute_x=True)
    return (unpermute(grouped_gemm(rows, weights, None, False, plan=plan, topk_weights=probs), plan),)


def gemm_to_slots(x, ids, probs, weights):
    plan = route(ids, num_experts=E, padding_alignment=A)
    rows = grouped_gemm(x.unsqueeze(0), weights, plan=plan, permute_x=True)
    flat = {"topk_weights": probs.flatten(), "weights_by": "slot"}
    return (grouped_gemm(rows, weights, None, False, plan=plan, permute_y=True, **flat),)


COUNTS32, COUNTS64 = true_counts(np.int32), true_counts(np.int64)

MOE_PERMUTE = (
    Case("moe_permute-float32", permute_counted, token_inputs(), ("x", "probs")),
    Case("moe_permute-bfloat16", permute_counted, token_inputs(BFLOAT16), ("x", "probs")),
    Case("moe_permute-float16", permute_counted, token_inputs(np.float16), ("x", "probs")),
    Case("moe_permute-x-only", permute_counted, token_inputs(), ("x",)),
    Case("moe_permute-probs-only", permute_counted, token_inputs(BFLOAT16), ("probs",)),
    Case("moe_permute-counts32", permute_counts_tensor, token_inputs(counts=COUNTS32), ("x", "probs")),
    Case("moe_permute-counts64", permute_counts_tensor, token_inputs(BFLOAT16, counts=COUNTS64), ("x", "probs")),
    Case("moe_permute-counts0D", permute_counts_list_of_tensors, token_inputs(counts=COUNTS64), ("x", "probs")),
    Case("moe_permute-buffer", permute_static_buffer, token_inputs(BFLOAT16), ("x", "probs")),
    Case("moe_permute-small-buffer", permute_small_buffer, token_inputs(), ("x", "probs")),
    Case("moe_permute-scale", permute_scale, token_inputs(BFLOAT16, scale=row_scales), ("x", "probs")),
    Case("moe_permute-packed-scale", permute_packed_scale, token_inputs(scale=packed_scales), ("x", "probs")),
    Case("moe_permute-float8", permute_float8, token_inputs(scale=row_scales), ("probs",)),
    Case("moe_permute-maps-only", permute_maps_only, token_inputs(), ("x", "probs")),
)
MOE_UNPERMUTE = (
    Case("moe_unpermute-float32", unpermute_plain, row_inputs(), ("rows", "row_probs")),
    Case("moe_unpermute-bfloat16", unpermute_plain, row_inputs(BFLOAT16, np.int64), ("rows", "row_probs")),
    Case("moe_unpermute-weighted-float32", unpermute_weighted, row_inputs(), ("rows", "row_probs")),
    Case("moe_unpermute-weighted-bfloat16", unpermute_weighted, row_inputs(BFLOAT16), ("rows", "row_probs")),
    Case("moe_unpermute-weighted-rows-only", unpermute_weighted, row_inputs(), ("rows",)),
    Case("moe_unpermute-weighted-probs-only", unpermute_weighted, row_inputs(), ("row_probs",)),
    Case("moe_unpermute-compat", unpermute_like_paddle, row_inputs(BFLOAT16), ("rows", "row_probs")),
    Case("layer", layer, token_inputs(BFLOAT16), ("x", "probs")),
)
FLOAT8_E5M2 = Case("permute-float8_e5m2", permute_by_plan_float8_e5m2, token_inputs(leave_out="probs"), ())
VERBS = (
    Case("route", route_ids, token_inputs(leave_out="x"), ("probs",)),
    Case("route-without-probs", route_without_probs, token_inputs(leave_out="x probs"), ()),
    Case("route-each", route_each, token_inputs(leave_out="x"), ("probs",)),
    Case("route-counts", route_counts_tensor, token_inputs(leave_out="x", counts=COUNTS32), ("probs",)),
    Case("route-mask", route_mask, mask_inputs, ("x", "probs")),
    Case("permute", permute_by_plan, token_inputs(scale=row_scales), ("x",)),
    Case("permute-bfloat16", permute_by_plan, token_inputs(BFLOAT16, scale=packed_scales), ("x",)),
    Case("permute-float8", permute_by_plan_float8, token_inputs(scale=row_scales), ()),
    FLOAT8_E5M2,
    Case("unpermute", unpermute_by_plan, plan_inputs(with_probs=False), ("rows",)),
    Case("unpermute-bfloat16", unpermute_by_plan, plan_inputs(BFLOAT16, with_probs=False), ("rows",)),
    Case("unpermute-row-probs", unpermute_by_plan_row_probs, plan_inputs(), ("rows", "probs")),
    Case("unpermute-row-probs-bfloat16", unpermute_by_plan_row_probs, plan_inputs(BFLOAT16), ("rows", "probs")),
    Case("unpermute-slot-probs", unpermute_by_plan_slot_probs, plan_inputs(), ("rows", "probs")),
    Case("unpermute-slot-probs-bfloat16", unpermute_by_plan_slot_probs, plan_inputs(BFLOAT16), ("rows", "probs")),
)
FAMILIES = (
    Case("sort_chunks", sort_chunks, chunk_inputs(), ("x", "probs")),
    Case("sort_chunks-bfloat16", sort_chunks, chunk_inputs(BFLOAT16), ("x", "probs")),
    Case("sort_chunks-x-only", sort_chunks, chunk_inputs(), ("x",)),
    Case("sort_chunks-probs-only", sort_chunks, chunk_inputs(BFLOAT16), ("probs",)),
    Case("sort_chunks-without-probs", chunks_without_probs, chunk_inputs(with_probs=False), ("x",)),
    Case("sort_chunks-float8", chunks_float8, chunk_inputs(), ("probs",)),
    Case("masked-chunk-map", chunks_by_map, chunk_inputs(), ("x", "probs")),
    Case("masked-maps", mask_maps, mask_inputs, ("x", "probs")),
    Case("masked-maps-small", mask_maps_without_probs, mask_inputs_without_probs, ("x",)),
    Case("masked-backward", mask_backward, mask_inputs, ()),
    Case("masked-moe", mask_moe, mask_inputs, ("x", "probs")),
    Case("masked-moe-padded", mask_moe_padded, mask_inputs, ("x", "probs")),
    Case("masked-moe-index", index_moe, token_inputs(), ("x", "probs")),
    Case("dispatch", dispatch_and_combine, mask_inputs, ("x", "probs")),
    Case("dispatch-padded", dispatch_and_combine_padded, mask_inputs, ("x", "probs")),
    Case("dispatch-expert-parallel", expert_parallel, mask_inputs, ("x", "probs")),
)
QUANTIZE = (
    Case("quantize", quantize_rows, token_inputs(leave_out="ids probs"), ()),
    Case("quantize-packed", quantize_packed, token_inputs(BFLOAT16, leave_out="ids probs"), ()),
    Case("permute-quantized", permute_quantized, token_inputs(BFLOAT16, leave_out="probs"), ()),
    Case("permute-quantized-packed", permute_quantized_packed, token_inputs(np.float16, leave_out="probs"), ()),
    Case("dequantize", quantize_and_back, token_inputs(BFLOAT16, leave_out="ids probs"), ()),
)
ROUTERS = (
    Case("calculate_topk", topk_softmax, gating_inputs(with_bias=False), ("gating",)),
    Case("calculate_topk-groups", topk_in_groups, gating_inputs(), ("gating",)),
    Case("calculate_topk-groups-bfloat16", topk_in_groups, gating_inputs(BFLOAT16), ("gating",)),
    Case("calculate_topk-post_act", topk_of_logits, gating_inputs(with_bias=False), ("gating",)),
)
INDEXED = (
    Case("indexed", by_gather_indices, token_inputs(leave_out="probs"), ("x",)),
    Case("indexed-bfloat16", by_gather_indices, token_inputs(BFLOAT16, leave_out="probs"), ("x",)),
    Case("indexed-flat", by_flat_gather_indices, token_inputs(leave_out="probs"), ("x",)),
    Case("grouped_gemm", gemm_by_plan, token_inputs(leave_out="probs", weights=expert_weights), ("x", "weights"), True),
    Case(
        "grouped_gemm-fused",
        gemms_with_permutation_and_weights,
        token_inputs(weights=expert_weights),
        ("x", "probs", "weights"),
        by_matmul=True,
    ),
    Case(
        "grouped_gemm-to-slots",
        gemm_to_slots,
        token_inputs(weights=expert_weights),
        ("x", "probs", "weights"),
        by_matmul=True,
    ),
)
CASES = (*MOE_PERMUTE, *MOE_UNPERMUTE, *VERBS, *FAMILIES, *QUANTIZE, *ROUTERS, *INDEXED)
