# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's dispatch and combine of tokens that other ranks sent: prefill, and packed float8 prefill.

T tokens, H hidden size, E experts of this rank, K slots, N rows, S scales of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import beside, is_graph_value, public, to_dtype
from ...backends import RowMaps, Validation, resolve
from ...routing import row_probs
from ..row_maps import num_rows_of, read_index_map
from .codes import GROUP, by_column, ceil_to, quantize_rows
from .rows import INDICES, combined, maps_of_indices, placed, rows_by_expert, transposed

__all__ = [
    "depermute_prefill_combine",
    "ep_moe_expert_combine",
    "ep_moe_expert_dispatch",
    "ep_moe_expert_dispatch_fp8",
    "prefill_permute_to_masked_gemm",
]

_COUNTS = "a list of ints or a 1-D int array"


@public()
def ep_moe_expert_dispatch(
    input: Tensor,  # noqa: A002
    topk_ids: Tensor,
    topk_weights: Tensor,
    up_gate_proj_in_scale: Tensor | None,
    token_nums_per_expert: Sequence[int],
    token_nums_this_rank: int,
    moe_quant_type: str,
) -> list[Tensor]:
    """Copy received tokens to the rows of this rank's experts.

    An expert's segment has as many rows as ``token_nums_per_expert`` says; its rows follow ascending tokens, then
    slots. On a GPU slots beyond a segment or beyond N have no row. No gradient. Deterministic. No host synchronisation;
    the list is copied to the device.

    Args:
        input: [T, H] bfloat16, float16 or float32.
        topk_ids: int32 or int64 [T, K], experts of this rank, -1 for those elsewhere. An expert that a token names
            twice gets two rows.
        topk_weights: float32 [T, K].
        up_gate_proj_in_scale: float32 [E], as ``w4a8_in_scale`` of `moe_expert_dispatch`, or None.
        token_nums_per_expert: rows of each segment, E ints: the slots of each expert, or more, as with padding.
        token_nums_this_rank: N.
        moe_quant_type: as in `moe_expert_dispatch`.

    Returns:
        permute_input [N, H], 0 in padding; permute_indices_per_token int32 [E, T], the row of each pair (the last
        slot's of a repeated expert), -1 for none; token_nums_per_expert_cumsum int64 [E], the ends of the segments;
        dst_weights float32 [N], 0 in padding; dst_indices int32 [T, E], e where token t has a row of expert e, else
        -1; cumsum_idx_gpu int32 [E], the rows of each expert that are in use; expert_idx_per_token int64 [N], the
        expert of each row's segment, padding included; dequant_scale as in `moe_expert_dispatch`, 0 in padding.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also ids outside [-1, E), and segments or an N
            that are too small for the slots.
    """
    name = "ep_moe_expert_dispatch"
    _checks.rows(name, "input", input, _checks.SUM_DTYPES, "num_tokens")
    _check_slots(name, input, topk_ids, topk_weights)
    given = _checks.listed(name, "token_nums_per_expert", token_nums_per_expert, _COUNTS)
    sizes = [_checks.integer(name, f"token_nums_per_expert[{i}]", size, 0) for i, size in enumerate(given)]
    num_experts = len(sizes)
    if num_experts == 0:
        _checks.bad_value(name, "token_nums_per_expert", "a list of one int for each expert", sizes)
    num_rows = _checks.integer(name, "token_nums_this_rank", token_nums_this_rank, 0)
    if up_gate_proj_in_scale is not None:
        shape = [num_experts]
        _checks.tensor(name, "up_gate_proj_in_scale", up_gate_proj_in_scale, (paddle.float32,), shape)
    _checks.instance(name, "moe_quant_type", moe_quant_type, str, "a str")
    if moe_quant_type == "w4afp8":
        _checks.of_dygraph(name, "input", input)
    tensors = {"topk_ids": topk_ids, "topk_weights": topk_weights, "up_gate_proj_in_scale": up_gate_proj_in_scale}
    _checks.same_place(name, input=input, **tensors)
    on_device = beside(paddle.to_tensor(sizes, "int32"), input)
    ends = paddle.cumsum(on_device, dtype="int32")
    ids, slot_rows, segments, routed = placed(name, topk_ids, ends - on_device, on_device)
    if _is_checked(name, input):
        _check_room(name, "token_nums_per_expert", on_device, routed)
        _check_rows(name, "token_nums_this_rank", num_rows, ends - on_device + routed, routed)
    maps = read_index_map(name, slot_rows, num_rows, Validation.OFF)
    rows = resolve("permute", input).permute(input, None, maps, "all")[0]
    experts, _ = segments.experts_of_rows(num_rows)
    scale = None if up_gate_proj_in_scale is None else paddle.gather(up_gate_proj_in_scale, experts)
    rows, amax = quantize_rows(rows, scale, moe_quant_type)
    dequant_scale = beside(paddle.ones([1]), input) if amax is None else amax
    indices, of_pairs = _indices(ids, maps, num_experts)
    weights = row_probs(topk_weights, maps)
    starts = [indices, ends.astype("int64"), weights, of_pairs, segments.counts]
    return [rows, *starts, experts.astype("int64"), dequant_scale]


@public()
def ep_moe_expert_dispatch_fp8(
    input: Tensor,  # noqa: A002
    scale: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts_per_rank_tensor: Tensor,
    num_experts_per_rank_padded_tensor: Tensor,
    use_in_ep: bool,
    token_nums_this_rank_padded: int,
) -> list[Tensor]:
    """Copy float8 tokens and their scales to rows of experts, whose segments are padded.

    Rows of an expert follow ascending tokens, then slots. On a GPU slots beyond a segment or beyond N have no row. No
    gradient. Deterministic. No host synchronisation, except on a GPU under PADDLE_MOE_OPS_VALIDATE.

    Args:
        input: [T, H] float8_e4m3fn.
        scale: float32 [T, S], or int32 [T, ceil(S / 4)] of packed ue8m0, of any strides. There may be more rows than
            tokens, as `per_token_quant_padding` returns them.
        topk_ids: int32 or int64 [T, K], -1 for none.
        topk_weights: float32 [T, K].
        num_experts_per_rank_tensor: int32 [E], the slots of each expert.
        num_experts_per_rank_padded_tensor: int32 [E], the rows of each segment.
        use_in_ep: whether N is ``token_nums_this_rank_padded``; otherwise it is T * K + 127 * E.
        token_nums_this_rank_padded: N.

    Returns:
        permute_input [N, H] and permute_scale [N, S] or [N, ceil(S / 4)], stored column by column with strides
        (1, ceil4(N)), both 0 in padding; permute_indices_per_token int32 [E, T]; the cumulated counts int64 [E] of the
        two tensors; dst_weights float32 [N]; dst_indices int32 [T, E]; cumsum_idx_gpu int32 [E], as in
        `ep_moe_expert_dispatch`; m_indices int32 [N], the expert of each row, -1 in padding.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also ids outside [-1, E), and segments or an N
            that are too small for the slots.
    """
    name = "ep_moe_expert_dispatch_fp8"
    _checks.rows(name, "input", input, (paddle.float8_e4m3fn,), "num_tokens")
    _check_slots(name, input, topk_ids, topk_weights)
    num_tokens, topk = topk_ids.shape
    _checks.tensor(name, "scale", scale, (paddle.float32, paddle.int32), ["num_tokens", "num_scales"])
    is_known = min(num_tokens, scale.shape[0]) >= 0
    if is_known and scale.shape[0] not in (num_tokens, ceil_to(num_tokens, 4)):
        expected = f"of shape [{num_tokens}, num_scales] or [{ceil_to(num_tokens, 4)}, num_scales]"
        _checks.bad_value(name, "scale", expected, list(scale.shape))
    counts, sizes = num_experts_per_rank_tensor, num_experts_per_rank_padded_tensor
    _checks.tensor(name, "num_experts_per_rank_tensor", counts, (paddle.int32,), ["num_experts"])
    num_experts = counts.shape[0]
    if num_experts == 0:
        expected = "of shape [num_experts] with num_experts >= 1"
        _checks.bad_value(name, "num_experts_per_rank_tensor", expected, list(counts.shape))
    _checks.tensor(name, "num_experts_per_rank_padded_tensor", sizes, (paddle.int32,), [num_experts])
    num_rows = _checks.integer(name, "token_nums_this_rank_padded", token_nums_this_rank_padded, -1)
    if not _checks.flag(name, "use_in_ep", use_in_ep):
        if num_tokens < 0:
            _checks.bad_value(name, "use_in_ep", "True in a graph that does not know the number of tokens", False)
        num_rows = num_tokens * topk + num_experts * (GROUP - 1)
    elif num_rows < 0:
        _checks.bad_value(name, "token_nums_this_rank_padded", "at least 0 with use_in_ep", num_rows)
    tensors = {"scale": scale, "topk_ids": topk_ids, "topk_weights": topk_weights}
    tensors |= {"num_experts_per_rank_tensor": counts, "num_experts_per_rank_padded_tensor": sizes}
    _checks.same_place(name, input=input, **tensors)
    ends = paddle.cumsum(sizes, dtype="int32")
    ids, slot_rows, segments, routed = placed(name, topk_ids, ends - sizes, sizes)
    if _is_checked(name, input):
        _check_room(name, "num_experts_per_rank_padded_tensor", sizes, routed)
        if use_in_ep:
            _check_rows(name, "token_nums_this_rank_padded", num_rows, ends - sizes + routed, routed)
    maps = read_index_map(name, slot_rows, num_rows, Validation.OFF)
    by_token = scale[:num_tokens] if is_known else scale
    rows, scales = resolve("permute", input).permute(input, by_token, maps, "all")
    experts, is_used = segments.experts_of_rows(num_rows)
    m_indices = paddle.where(is_used, experts, paddle.full_like(experts, -1))
    indices, of_pairs = _indices(ids, maps, num_experts)
    weights = row_probs(topk_weights, maps)
    cumulated = [paddle.cumsum(counts, dtype="int64"), ends.astype("int64")]
    scales = by_column(to_dtype(scales, scale.dtype), ceil_to(num_rows, 4))
    return [rows, scales, indices, *cumulated, weights, of_pairs, segments.counts, m_indices]


@public()
def ep_moe_expert_combine(
    ffn_out: Tensor,
    expert_scales_float: Tensor,
    permute_indices_per_token: Tensor,
    top_k_indices: Tensor,
    down_proj_bias: Tensor | None,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Sum the rows of each token, weighted: ascending experts, in float32, rounded once.

    No gradient. Deterministic: the same bits on every backend. No host synchronisation, except on a GPU under
    PADDLE_MOE_OPS_VALIDATE.

    Args:
        ffn_out: [N, H] bfloat16, float16 or float32.
        expert_scales_float: float32 [N], dst_weights of `ep_moe_expert_dispatch`.
        permute_indices_per_token: int32 [E, T], the row of each pair, -1 for none.
        top_k_indices: int32 [T, E], dst_indices; accepted for the signature.
        down_proj_bias: [E, H], dtype of ``ffn_out``, added once for each row, not weighted, or None.
        norm_topk_prob: whether to divide a token's weights by their sum. FastDeploy's operator ignores this and the
            factor, and its callers pass False and 1.
        routed_scaling_factor: factor of the weights.

    Returns:
        [T, H], dtype of ``ffn_out``; 0 for a token without a row.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also rows that are repeated or do not exist.
    """
    name = "ep_moe_expert_combine"
    _checks.rows(name, "ffn_out", ffn_out, _checks.SUM_DTYPES, "num_rows")
    num_rows = ffn_out.shape[0]
    _checks.tensor(name, "expert_scales_float", expert_scales_float, (paddle.float32,), [num_rows])
    _checks.tensor(name, INDICES, permute_indices_per_token, (paddle.int32,), ["num_experts", "num_tokens"])
    num_experts, num_tokens = permute_indices_per_token.shape
    _checks.tensor(name, "top_k_indices", top_k_indices, _checks.ID_DTYPES, [num_tokens, num_experts])
    if down_proj_bias is not None:
        _checks.tensor(name, "down_proj_bias", down_proj_bias, (ffn_out.dtype,), [num_experts, ffn_out.shape[1]])
    _checks.flag(name, "norm_topk_prob", norm_topk_prob)
    factor = _checks.number(name, "routed_scaling_factor", routed_scaling_factor)
    tensors: dict[str, Any] = {INDICES: permute_indices_per_token, "top_k_indices": top_k_indices}
    tensors |= {"expert_scales_float": expert_scales_float, "down_proj_bias": down_proj_bias}
    _checks.same_place(name, ffn_out=ffn_out, **tensors)
    slot_rows = permute_indices_per_token.transpose([1, 0])
    maps = maps_of_indices(name, INDICES, slot_rows, num_rows_of(ffn_out), ffn_out)
    bias_of_row = None
    if down_proj_bias is not None:
        # Slot e of a token is its expert e.
        bias_of_row = paddle.gather(down_proj_bias.astype("float32"), maps.row_to_expert.clip(min=0))
    return combined(
        ffn_out,
        expert_scales_float,
        maps,
        norm_topk_prob=norm_topk_prob,
        factor=factor,
        bias_of_row=bias_of_row,
        weighs_bias=False,
    )


@public()
def prefill_permute_to_masked_gemm(
    x: Tensor, scale: Tensor, topk_ids: Tensor, num_local_experts: int, max_token_num: int
) -> list[Tensor]:
    """Copy tokens and their scales to the first rows of their experts' matrices, for masked grouped GEMMs.

    Rows of an expert follow ascending tokens, then slots; slots beyond M rows are dropped. No gradient. Deterministic.
    No host synchronisation, except on a GPU under PADDLE_MOE_OPS_VALIDATE.

    Args:
        x: [T, H] float8_e4m3fn, bfloat16, float16 or float32.
        scale: float32 [T, S].
        topk_ids: int32 or int64 [T, K], -1 for none.
        num_local_experts: E.
        max_token_num: M.

    Returns:
        permute_x [E, M, H]; permute_scale float32 [E, M, S] with strides (S * M, 1, M); permuted_indice_map int32
        [T, K], e * M + place, -1 for none; token_nums_per_expert int32 [E, 1]. Rows that are not in use are 0.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also ids outside [-1, E); under
            PADDLE_MOE_OPS_VALIDATE=1 dropped slots.
    """
    name = "prefill_permute_to_masked_gemm"
    _checks.rows(name, "x", x, (paddle.float8_e4m3fn, *_checks.SUM_DTYPES), "num_tokens")
    num_tokens, hidden = x.shape
    _checks.tensor(name, "scale", scale, (paddle.float32,), [num_tokens, "num_scales"])
    _check_ids(name, topk_ids, num_tokens)
    num_experts = _checks.integer(name, "num_local_experts", num_local_experts, 1, _checks.MAX_EXPERTS)
    rows_of_each = _checks.integer(name, "max_token_num", max_token_num, 0)
    _checks.same_place(name, x=x, scale=scale, topk_ids=topk_ids)
    starts = beside(paddle.arange(num_experts, dtype="int32"), x) * rows_of_each
    sizes = paddle.full_like(starts, rows_of_each)
    _, slot_rows, segments, routed = placed(name, topk_ids, starts, sizes)
    validation = Validation.OFF if is_graph_value(x) else _checks.validation(name, None, x)
    if validation == Validation.ALL and bool((routed > sizes).any()):
        _checks.bad_value(name, "max_token_num", f"at least {int(routed.max())}, the slots of an expert", rows_of_each)
    maps = read_index_map(name, slot_rows, num_experts * rows_of_each, Validation.OFF)
    rows, scales = resolve("permute", x).permute(x, scale, maps, "all")
    scales = by_column(scales.reshape([num_experts, rows_of_each, scale.shape[1]]), rows_of_each)
    rows = rows.reshape([num_experts, rows_of_each, hidden])
    return [rows, scales, slot_rows, segments.counts.unsqueeze(-1)]


@public()
def depermute_prefill_combine(x: Tensor, indice_map: Tensor, topk_weights: Tensor, num_worst_tokens: int) -> Tensor:
    """Sum the rows of each token, weighted: ascending rows, in float32, rounded once.

    No gradient. Deterministic: the same bits on every backend. No host synchronisation, except on a GPU under
    PADDLE_MOE_OPS_VALIDATE.

    Args:
        x: [E, M, H] bfloat16, float16 or float32.
        indice_map: int32 [T, K], permuted_indice_map of `prefill_permute_to_masked_gemm`.
        topk_weights: float32 [T, K].
        num_worst_tokens: tokens of the result; those beyond T are 0.

    Returns:
        [num_worst_tokens, H], dtype of ``x``; 0 for a token without a row.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also rows that are repeated or do not exist.
    """
    name = "depermute_prefill_combine"
    _checks.tensor(name, "x", x, _checks.SUM_DTYPES, ["num_experts", "max_token_num", "hidden"])
    _checks.tensor(name, "indice_map", indice_map, (paddle.int32,), ["num_tokens", "topk"])
    _checks.tensor(name, "topk_weights", topk_weights, (paddle.float32,), list(indice_map.shape))
    num_tokens = _checks.integer(name, "num_worst_tokens", num_worst_tokens, 0)
    _checks.same_place(name, x=x, indice_map=indice_map, topk_weights=topk_weights)
    num_experts, capacity, hidden = x.shape
    if min(num_experts, capacity) < 0:
        _checks.bad_value(name, "x", "of a known number of rows", list(x.shape))
    rows = x.reshape([num_experts * capacity, hidden])
    slot_rows, weights = indice_map[:num_tokens], topk_weights[:num_tokens]
    maps = maps_of_indices(name, "indice_map", slot_rows, rows.shape[0], x)
    out = combined(rows, weights, maps, norm_topk_prob=False, factor=1.0)
    if out.shape[0] == num_tokens:
        return out
    # A graph may not know T: as many zeros as could be missing, cut off.
    zeros = paddle.zeros([num_tokens - max(out.shape[0], 0), hidden], x.dtype)
    return paddle.concat([out, beside(zeros, out)])[:num_tokens]


def _check_ids(name: str, topk_ids: Tensor, num_tokens: int) -> None:
    _checks.tensor(name, "topk_ids", topk_ids, _checks.ID_DTYPES, [num_tokens, "topk"])
    if topk_ids.shape[1] == 0:
        _checks.bad_value(name, "topk_ids", f"of shape [{num_tokens}, topk] with topk >= 1", list(topk_ids.shape))


def _check_slots(name: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    _check_ids(name, topk_ids, x.shape[0])
    _checks.tensor(name, "topk_weights", topk_weights, (paddle.float32,), list(topk_ids.shape))


def _check_room(name: str, argument: str, sizes: Tensor, routed: Tensor) -> None:
    """Check that the segments of experts have rows for all of their slots."""
    if bool((routed > sizes).any()):
        _checks.bad_value(name, argument, f"at least {routed.tolist()}, the slots of each expert", sizes.tolist())


def _check_rows(name: str, argument: str, num_rows: int, ends: Tensor, routed: Tensor) -> None:
    """Check that the slots of experts, which end at rows ``ends``, are among the first N rows."""
    last = int(paddle.where(routed > 0, ends, paddle.zeros_like(ends)).max())
    if last > num_rows:
        _checks.bad_value(name, argument, f"at least {last}, the rows up to the last slot", num_rows)


def _is_checked(name: str, x: Tensor) -> bool:
    return not is_graph_value(x) and _checks.validation(name, None, x) > Validation.OFF


def _indices(ids: Tensor, maps: RowMaps, num_experts: int) -> tuple[Tensor, Tensor]:
    """permute_indices_per_token [E, T] and dst_indices [T, E]."""
    by_expert = rows_by_expert(ids, maps.slot_to_row, num_experts)
    experts = beside(paddle.arange(num_experts, dtype="int32"), by_expert)
    of_pairs = paddle.where(by_expert >= 0, experts.expand_as(by_expert), paddle.full_like(by_expert, -1))
    return transposed(by_expert), of_pairs
