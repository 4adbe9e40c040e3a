# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Router operators of ERNIE's models around the dispatch, from ``paddle.incubate.nn.functional``.

Names, arguments and results are those of Paddle's operators. T tokens, E experts, K slots per token. All are
deterministic, and raise TypeError or ValueError for arguments of the wrong type, dtype, value or shape.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import beside, public, without_autocast

__all__ = [
    "build_src_rank_and_local_expert_id",
    "cal_aux_loss",
    "cal_aux_loss_grad",
    "expand_modality_expert_id",
    "int_bincount",
]

_COUNTS = "a list of ints or a 1-D int array"


@public("gate_prob")
def cal_aux_loss(
    gate_prob: Tensor,
    dispatch_mask: Tensor,
    tokens_mask: Tensor | None,
    dispatch_tokens_mask: Tensor | None,
    num_experts: int,
    use_group: bool,
    moe_k: int,
    clip_min: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss against imbalance: ``num_experts * sum_e ce_e * sum_t gate_prob[t, e] / seqlen``.

    Differentiable in ``gate_prob``. If ``tokens_mask`` and ``dispatch_tokens_mask`` have different numbers of tokens,
    the loss is that of all tokens, and the gradient that of this rank's tokens. Sums in float32. No host
    synchronisation.

    Args:
        gate_prob: [T, E] bfloat16, float16 or float32.
        dispatch_mask: int32 or int64 slots of each expert, [E] or [tokens, E], which is summed.
        tokens_mask: [T], 1 for tokens that count, any of the dtypes of ``gate_prob`` or bool; or None.
        dispatch_tokens_mask: bool, the same for all tokens of the group; or None.
        num_experts: experts of all ranks.
        use_group: whether to divide by ``moe_k``.
        moe_k: K.
        clip_min: the least number of tokens.

    Returns:
        the loss, a scalar; seqlen, the number of tokens that count, a scalar; ce [E], the slots of each expert per
        token; the last two have no gradient. Dtype of ``gate_prob``.
    """
    name = "cal_aux_loss"
    _checks.tensor(name, "gate_prob", gate_prob, _checks.SUM_DTYPES, ["num_tokens", "num_experts"])
    num_tokens, columns = gate_prob.shape
    shape = [columns] if getattr(dispatch_mask, "ndim", 2) == 1 else ["num_tokens", columns]
    text = f"[{columns}] or [num_tokens, {columns}]"
    _checks.tensor(name, "dispatch_mask", dispatch_mask, _checks.ID_DTYPES, shape, text)
    if tokens_mask is not None:
        _checks.tensor(name, "tokens_mask", tokens_mask, (*_checks.SUM_DTYPES, paddle.bool), [num_tokens])
    if dispatch_tokens_mask is not None:
        _checks.tensor(name, "dispatch_tokens_mask", dispatch_tokens_mask, (paddle.bool,), ["all_tokens"])
    num_experts = _checks.integer(name, "num_experts", num_experts, 1)
    divisor = _checks.integer(name, "moe_k", moe_k, 1) if _checks.flag(name, "use_group", use_group) else 1
    least = _checks.number(name, "clip_min", clip_min)
    _checks.same_place(
        name,
        gate_prob=gate_prob,
        dispatch_mask=dispatch_mask,
        tokens_mask=tokens_mask,
        dispatch_tokens_mask=dispatch_tokens_mask,
    )
    with without_autocast():
        probs, scale = gate_prob.astype("float32"), None
        if dispatch_tokens_mask is not None:
            seqlen = dispatch_tokens_mask.astype("float32").sum()
            if tokens_mask is not None and dispatch_tokens_mask.shape[0] != num_tokens:
                scale = seqlen / tokens_mask.astype("float32").sum().clip(min=least)
        elif tokens_mask is not None:
            seqlen = tokens_mask.astype("float32").sum()
        else:
            seqlen = paddle.ones_like(probs[:, 0]).sum() * (columns / num_experts)
        seqlen = seqlen.clip(min=least)
        counts = dispatch_mask if dispatch_mask.ndim == 1 else dispatch_mask.sum(axis=0)
        ce = counts.astype("float32") / seqlen
        loss = (ce * (probs.sum(axis=0) / seqlen)).sum() * (num_experts / divisor)
        if scale is not None:
            value = paddle.assign(loss)
            value.stop_gradient = True
            loss = loss + (scale - 1.0) * value
        return tuple(each.astype(gate_prob.dtype) for each in (loss, seqlen, ce))


@public()
def cal_aux_loss_grad(
    gate_prob: Tensor,
    seqlen_float: Tensor,
    ce: Tensor,
    l_aux_loss_grad: Tensor,
    num_experts: int,
    use_group: bool,
    moe_k: int,
) -> Tensor:
    """Compute the gradient of `cal_aux_loss`, for backward passes written by hand.

    Args:
        gate_prob: [T, E].
        seqlen_float: the second result of `cal_aux_loss`.
        ce: the third.
        l_aux_loss_grad: the gradient of the loss, with one element.
        num_experts: experts of all ranks.
        use_group: whether the loss was divided by ``moe_k``.
        moe_k: K.

    Returns:
        [T, E], dtype of ``gate_prob``.
    """
    name = "cal_aux_loss_grad"
    _checks.tensor(name, "gate_prob", gate_prob, _checks.SUM_DTYPES, ["num_tokens", "num_experts"])
    for argument, value in (("seqlen_float", seqlen_float), ("l_aux_loss_grad", l_aux_loss_grad)):
        _checks.tensor(name, argument, value, _checks.SUM_DTYPES, [1] * getattr(value, "ndim", 0))
    _checks.tensor(name, "ce", ce, _checks.SUM_DTYPES, [gate_prob.shape[1]])
    num_experts = _checks.integer(name, "num_experts", num_experts, 1)
    divisor = _checks.integer(name, "moe_k", moe_k, 1) if _checks.flag(name, "use_group", use_group) else 1
    gradient, seqlen = (each.astype("float32").reshape([]) for each in (l_aux_loss_grad, seqlen_float))
    line = ce.astype("float32") * gradient * (num_experts / divisor) / seqlen
    return (paddle.zeros_like(gate_prob, "float32") + line).astype(gate_prob.dtype)


@public()
def int_bincount(x: Tensor, low: int, high: int, dtype: Any) -> Tensor:
    """Count how often each of the numbers in [low, high) occurs; others are not counted.

    No gradient. Host synchronisation: one on a GPU.

    Args:
        x: int32 or int64, any shape.
        low: the first number.
        high: the end of the numbers.
        dtype: of the counts, int32 or int64, or None for that of ``x``.

    Returns:
        [high - low].
    """
    name = "int_bincount"
    _checks.tensor(name, "x", x, _checks.ID_DTYPES, [f"dim{i}" for i in range(getattr(x, "ndim", 1))])
    low = _checks.integer(name, "low", low, -(2**31))
    high = _checks.integer(name, "high", high, low + 1)
    if dtype is None:
        dtype = x.dtype
    dtype = _checks.dtype_of_result(name, "dtype", dtype, _checks.ID_DTYPES)
    numbers = x.flatten()
    is_counted = (numbers >= low) & (numbers < high)
    bins = paddle.where(is_counted, numbers - low, paddle.full_like(numbers, high - low))
    counts = paddle.bincount(bins, minlength=high - low + 1)[: high - low]
    return beside(counts.astype(dtype).reshape([high - low]), x)


@public()
def expand_modality_expert_id(
    expert_id: Tensor, num_expert_per_modality: int, group_size: int, modality_offset: int, is_group_expert: bool
) -> Tensor:
    """Number the experts of one modality among those of two, which each rank holds one after the other.

    Args:
        expert_id: int32 or int64 [T, K].
        num_expert_per_modality: experts of a modality on each rank; 0: the ids stay as they are.
        group_size: experts of a group.
        modality_offset: 0 or 1, the modality.
        is_group_expert: whether slot k chose among the experts of group k, counted from 0 in each.

    Returns:
        [T, K], dtype of ``expert_id``.
    """
    name = "expand_modality_expert_id"
    _checks.tensor(name, "expert_id", expert_id, _checks.ID_DTYPES, ["num_tokens", "topk"])
    size = _checks.integer(name, "num_expert_per_modality", num_expert_per_modality, -(2**31))
    group_size = _checks.integer(name, "group_size", group_size, -(2**31))
    modality_offset = _checks.integer(name, "modality_offset", modality_offset, 0)
    ids = expert_id
    if _checks.flag(name, "is_group_expert", is_group_expert):
        slots = paddle.arange(ids.shape[1], dtype=ids.dtype)
        ids = ids + beside(slots, ids) * group_size
    if size <= 0:
        return paddle.assign(ids)
    # Division is that of C, towards 0: an id of -1 stays the last before the experts of its modality.
    ranks = paddle.where(ids < 0, -((-ids) // size), ids // size)
    return ids + (ranks + modality_offset) * size


@public()
def build_src_rank_and_local_expert_id(
    expert_num_global_tensor: Tensor, expert_num_global: Any, num_local_experts: int
) -> tuple[Tensor, Tensor]:
    """Tell the rank and the local expert of each row that the ranks receive, ordered by global expert.

    Args:
        expert_num_global_tensor: int32 or int64 [E], rows of each expert.
        expert_num_global: the same numbers as a list, whose sum is the number of rows.
        num_local_experts: experts of each rank.

    Returns:
        int32 [rows], the rank of each row's expert, and int32 [rows], the number of the expert on its rank.
    """
    name = "build_src_rank_and_local_expert_id"
    numbers = _checks.listed(name, "expert_num_global", expert_num_global, _COUNTS)
    counts = [_checks.integer(name, f"expert_num_global[{i}]", count, 0) for i, count in enumerate(numbers)]
    tensor = expert_num_global_tensor
    _checks.tensor(name, "expert_num_global_tensor", tensor, _checks.ID_DTYPES, [len(counts)])
    local = _checks.integer(name, "num_local_experts", num_local_experts, 1)
    ends = paddle.cumsum(tensor.astype("int64"))
    rows = beside(paddle.arange(sum(counts), dtype="int64"), tensor)
    # Rows after the last expert's are those of the last, should the two disagree.
    experts = paddle.searchsorted(ends[:-1], rows, out_int32=True, right=True)
    return experts // local, experts % local
