# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's dispatch and reduce of a rank that has all experts. T tokens, H hidden size, E experts, K slots."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import beside, public, to_dtype
from ...functional import move_rows
from ...routing import calculate_topk, route
from ..row_maps import known_slots, num_rows_of
from .codes import quantize_rows
from .rows import INDICES, check_experts, combined, maps_of_indices, transposed

__all__ = ["moe_expert_dispatch", "moe_expert_reduce"]


@public()
def moe_expert_dispatch(
    input: Tensor,  # noqa: A002
    gating_output: Tensor,
    gating_correction_bias: Tensor | None,
    w4a8_in_scale: Tensor | None,
    moe_topk: int,
    group_moe: bool,
    moe_quant_type: str,
    topk_only_mode: bool,
) -> list[Tensor]:
    """Choose K experts for each token and copy it to their rows, which are ordered by expert, then token, then slot.

    Weights are the softmax over E of the chosen experts; `moe_expert_reduce` normalises them. No gradient.
    Deterministic; equal scores: the lower expert first. No host synchronisation.

    Args:
        input: [T, H], or [..., H] with T tokens in all, bfloat16, float16 or float32.
        gating_output: float32 [T, E] or [..., E].
        gating_correction_bias: float32 [E] or [1, E], added to the scores for the choice only, or None.
        w4a8_in_scale: float32 [E], factors of the rows of w4a8 and w4afp8, or None.
        moe_topk: K.
        group_moe: whether the softmax runs over each of K groups of E / K experts, of which each gives one expert; its
            weight is divided by the largest score of its group.
        moe_quant_type: "w4a8" with ``w4a8_in_scale`` makes int8 rows, round(clip(127 * scale * x)), halves away from 0;
            "w4afp8" float8_e4m3fn rows, of 448 * scale * x, or without a scale of x * (440 / the row's largest
            magnitude). With any other text, known or not, rows stay as they are, as in FastDeploy.
        topk_only_mode: whether ``gating_output`` are scores already.

    Returns:
        permute_input [T * K, H]; tokens_expert_prefix_sum int64 [E], the ends of the experts' rows;
        permute_indices_per_token int32 [K, T], the row of each slot; topk_weight float32 [T, K], best first; topk_idx
        int32 [T, K]; expert_idx_per_token int32 [T * K], the expert of each row; dequant_scale float32, the largest
        magnitude of each row [T * K] for w4afp8 without a scale, otherwise one 1; max_tokens_per_expert int32 [1], the
        most rows of an expert.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "moe_expert_dispatch"
    x = _checks.lines(name, "input", input, _checks.SUM_DTYPES, "hidden")
    gate = _checks.lines(name, "gating_output", gating_output, (paddle.float32,), "num_experts")
    _checks.rows(name, "input", x, _checks.SUM_DTYPES, "num_tokens")
    _checks.tensor(name, "gating_output", gate, (paddle.float32,), [x.shape[0], "num_experts"])
    num_experts = gate.shape[1]
    topk = _checks.integer(name, "moe_topk", moe_topk, 1)
    if topk > num_experts:
        _checks.bad_value(name, "moe_topk", f"at most {num_experts}, the experts of gating_output", topk)
    bias = gating_correction_bias
    if bias is not None:
        shape = [1, num_experts] if getattr(bias, "ndim", 1) == 2 else [num_experts]
        _checks.tensor(name, "gating_correction_bias", bias, (paddle.float32,), shape)
        bias = bias.reshape([num_experts])
    if w4a8_in_scale is not None:
        _checks.tensor(name, "w4a8_in_scale", w4a8_in_scale, (paddle.float32,), [num_experts])
    if _checks.flag(name, "group_moe", group_moe) and num_experts % topk:
        _checks.bad_value(name, "moe_topk", f"a divisor of the {num_experts} experts with group_moe", topk)
    _checks.instance(name, "moe_quant_type", moe_quant_type, str, "a str")
    if moe_quant_type == "w4afp8":
        _checks.of_dygraph(name, "input", input)
    _checks.flag(name, "topk_only_mode", topk_only_mode)
    given = {"gating_correction_bias": gating_correction_bias, "w4a8_in_scale": w4a8_in_scale}
    _checks.same_place(name, input=x, gating_output=gate, **given)

    with _checks.renaming("calculate_topk", name, gating="gating_output"):
        weights, ids = (_by_groups if group_moe else _by_all)(gate, bias, topk, topk_only_mode)
    plan = route(ids, num_experts=num_experts, buffer_size=known_slots(ids), duplicates="each", validate=False)
    rows = move_rows(x, plan.slot_to_row, plan.row_to_token)
    scale = None if w4a8_in_scale is None else paddle.gather(w4a8_in_scale, plan.row_to_expert)
    rows, amax = quantize_rows(rows, scale, moe_quant_type)
    dequant_scale = beside(paddle.ones([1]), x) if amax is None else amax
    most = plan.routed_per_expert.max().reshape([1])
    ends, indices = plan.expert_offsets[1:].astype("int64"), transposed(plan.slot_to_row)
    return [rows, ends, indices, weights, ids, plan.row_to_expert, dequant_scale, most]


@public()
def moe_expert_reduce(
    ffn_out: Tensor,
    top_k_weight: Tensor,
    permute_indices_per_token: Tensor,
    top_k_indices: Tensor,
    down_proj_bias: Tensor | None,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Sum the rows of each token, weighted: ascending rows, in float32, rounded once.

    A weight is divided by the sum of its token's weights, if asked for, and multiplied by the factor, each rounded to
    float32; the sum is that of `paddle_moe_ops.unpermute`. No gradient. Deterministic: the same bits on every backend.
    No host synchronisation, except on a GPU under PADDLE_MOE_OPS_VALIDATE.

    Args:
        ffn_out: [T * K, H] bfloat16, float16 or float32.
        top_k_weight: float32 [T, K].
        permute_indices_per_token: int32 [K, T], the row of each slot, -1 for none.
        top_k_indices: int32 or int64 [T, K], the expert of each slot.
        down_proj_bias: [E, H], dtype of ``ffn_out``, added to the rows of each expert before they are weighted, or
            None.
        norm_topk_prob: whether to divide a token's weights by their sum; weights that are all 0 stay 0.
        routed_scaling_factor: factor of the result.

    Returns:
        [T, H], dtype of ``ffn_out``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also rows that are repeated or do not
            exist, and with ``down_proj_bias`` experts outside [-1, E).
    """
    name = "moe_expert_reduce"
    _checks.rows(name, "ffn_out", ffn_out, _checks.SUM_DTYPES, "num_rows")
    _checks.tensor(name, "top_k_weight", top_k_weight, (paddle.float32,), ["num_tokens", "topk"])
    num_tokens, topk = top_k_weight.shape
    _checks.tensor(name, INDICES, permute_indices_per_token, (paddle.int32,), [topk, num_tokens])
    _checks.tensor(name, "top_k_indices", top_k_indices, _checks.ID_DTYPES, [num_tokens, topk])
    if down_proj_bias is not None:
        _checks.tensor(name, "down_proj_bias", down_proj_bias, (ffn_out.dtype,), ["num_experts", ffn_out.shape[1]])
        check_experts(name, "top_k_indices", top_k_indices, down_proj_bias.shape[0])
    _checks.flag(name, "norm_topk_prob", norm_topk_prob)
    factor = _checks.number(name, "routed_scaling_factor", routed_scaling_factor)
    tensors: dict[str, Any] = {INDICES: permute_indices_per_token, "top_k_indices": top_k_indices}
    _checks.same_place(name, ffn_out=ffn_out, top_k_weight=top_k_weight, **tensors, down_proj_bias=down_proj_bias)
    slot_rows = permute_indices_per_token.transpose([1, 0])
    maps = maps_of_indices(name, INDICES, slot_rows, num_rows_of(ffn_out), ffn_out)
    bias_of_row = None
    if down_proj_bias is not None and num_tokens != 0:
        experts = paddle.gather(top_k_indices.flatten(), maps.row_to_slot.clip(min=0))
        bias_of_row = paddle.gather(down_proj_bias.astype("float32"), experts.clip(0, down_proj_bias.shape[0] - 1))
    return combined(ffn_out, top_k_weight, maps, norm_topk_prob=norm_topk_prob, factor=factor, bias_of_row=bias_of_row)


def _by_all(gate: Tensor, bias: Tensor | None, topk: int, are_scores: bool) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int32 [T, K] of the best experts."""
    if are_scores:
        chosen_by = gate if bias is None else gate + bias
        ids = calculate_topk(chosen_by, topk, False, False, pre_act=False, post_act=True)[1]
        return paddle.index_sample(gate, ids), to_dtype(ids, paddle.int32)
    weights, ids = calculate_topk(gate, topk, False, False, correction_bias=bias)
    return weights, to_dtype(ids, paddle.int32)


def _by_groups(gate: Tensor, bias: Tensor | None, topk: int, are_scores: bool) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int32 [T, K] of the best expert of each group."""
    size = gate.shape[1] // topk
    groups = gate.reshape([-1, size]) if gate.shape[0] else gate.reshape([0, size])
    scores = groups
    if not are_scores:
        scores = calculate_topk(groups, 1, False, False, return_scores=True)[2]
    chosen_by = scores
    if bias is not None:
        chosen_by = (scores.reshape(gate.shape) + bias).reshape(groups.shape)
    places = calculate_topk(chosen_by, 1, False, False, pre_act=False, post_act=True)[1]
    weights = paddle.index_sample(scores, places) / scores.max(-1, keepdim=True)
    first = beside(paddle.arange(topk, dtype="int64"), gate) * size
    ids = places.reshape([gate.shape[0], topk]) + first
    return weights.reshape(ids.shape), to_dtype(ids, paddle.int32)
