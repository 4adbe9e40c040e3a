# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of ERNIE's models in ``paddle.incubate.nn.functional``, slot by slot.

Maps and copies are exact. Sums and products are computed in float64 and rounded at the end, so a backend agrees within
a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arithmetic import round_float64

__all__ = [
    "PartialDispatch",
    "batched_gemm",
    "build_src_rank_and_local_expert_id",
    "cal_aux_loss",
    "combine_rows",
    "combine_rows_backward",
    "expand_modality_expert_id",
    "gather_rows",
    "gather_rows_backward",
    "int_bincount",
    "moe_gate_dispatch",
    "moe_gate_dispatch_partial_nosoftmaxtopk",
    "moe_gate_dispatch_permute",
]


class PartialDispatch(NamedTuple):
    """The results of `moe_gate_dispatch_partial_nosoftmaxtopk` in their order, and which slots [T, K] have a row."""

    y: NDArray
    combine_weights: NDArray
    scatter_index: NDArray
    scatter_index_rev: NDArray
    expert_offset: NDArray
    expert_nums_local: NDArray
    is_kept: NDArray


def moe_gate_dispatch(
    x: NDArray, gate_logits: NDArray, corr_bias: NDArray | None, k: int, capacity: int, use_pad: bool
) -> tuple[NDArray, ...]:
    """Return y, combine_weights, scatter_index, expert_offset, expert_id, and which slots [T, K] have a row.

    Args:
        x: [T, H].
        gate_logits: float32 [T, E].
        corr_bias: float32 [E] or None.
        k: K.
        capacity: rows of an expert at most.
        use_pad: expert e begins at row e * capacity, by slot; else experts follow each other, by token.
    """
    (num_tokens, num_experts), biased = gate_logits.shape, gate_logits
    if corr_bias is not None:
        biased = gate_logits + corr_bias
    ids = np.argsort(-biased, axis=1, kind="stable")[:, :k].astype(np.int32)
    weights = np.take_along_axis(gate_logits, ids, axis=1)
    scatter_index = np.zeros((k, num_tokens), np.int32)
    is_kept = np.zeros(ids.shape, np.bool_)
    counts = np.bincount(ids.reshape(-1), minlength=num_experts)
    starts = np.arange(num_experts) * capacity if use_pad else np.cumsum(counts) - counts
    taken = [0] * num_experts
    for token, slot in _slots_by_slot(ids) if use_pad else np.ndindex(*ids.shape):
        expert = ids[token, slot]
        if taken[expert] < capacity:
            scatter_index[slot, token] = starts[expert] + taken[expert]
            is_kept[token, slot] = True
        taken[expert] += 1
    y = gather_rows(x, scatter_index, is_kept, num_experts * capacity if use_pad else num_tokens * k)
    return y, np.where(is_kept, weights, np.float32(0)), scatter_index, np.cumsum(counts), ids, is_kept


def moe_gate_dispatch_permute(
    x: NDArray, gate_logits: NDArray, corr_bias: NDArray | None, k: int, capacity: int, world_size: int
) -> tuple[NDArray, ...]:
    """Return what `moe_gate_dispatch` does with padding, with y as [E / world_size, world_size, capacity, H]."""
    y, *others = moe_gate_dispatch(x, gate_logits, corr_bias, k, capacity, True)
    by_rank = y.reshape(world_size, gate_logits.shape[1] // world_size, capacity, x.shape[1])
    return by_rank.swapaxes(0, 1), *others


def moe_gate_dispatch_partial_nosoftmaxtopk(
    x: NDArray,
    combine_weights: NDArray,
    expert_id: NDArray,
    capacity: int,
    num_experts: int,
    use_pad: bool,
    expert_start_index: int,
    expert_end_index: int,
    reverse_token_drop: bool,
) -> PartialDispatch:
    """Return the rows of the experts [expert_start_index, expert_end_index), each with ascending tokens.

    Args:
        x: [T, H].
        combine_weights: float32 [T, K].
        expert_id: int [T, K]; ids outside [0, num_experts) are those of no expert.
        capacity: most rows of an expert, assigned by slot, then token.
        num_experts: E.
        use_pad: each local expert has ``capacity`` rows.
        expert_start_index: the first local expert.
        expert_end_index: the end of the local experts.
        reverse_token_drop: the last slots of an expert are kept, not the first.
    """
    num_tokens, topk = expert_id.shape
    expert_offset, expert_nums_local = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    owners: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for token, slot in _slots_by_slot(expert_id):
        if 0 <= expert_id[token, slot] < num_experts:
            owners[expert_id[token, slot]].append((token, slot))
    scatter_index = np.zeros((topk, num_tokens), np.int32)
    is_kept = np.zeros(expert_id.shape, np.bool_)
    tokens: list[int] = []
    for expert, slots in enumerate(owners):
        expert_offset[expert] = len(slots)
        if not expert_start_index <= expert < expert_end_index:
            continue
        kept = sorted(slots[max(len(slots) - capacity, 0) :] if reverse_token_drop else slots[:capacity])
        expert_nums_local[expert] = len(slots) if use_pad else len(kept)
        for token, slot in kept:
            scatter_index[slot, token] = len(tokens)
            is_kept[token, slot] = True
            tokens.append(token)
        if use_pad:
            tokens += [num_tokens] * (capacity - len(kept))
    y = gather_rows(x, scatter_index, is_kept, len(tokens) if use_pad else max(len(tokens), 1))
    rev = np.array(tokens, np.int32) if tokens or use_pad else np.array(0, np.int32)
    weights = np.where(is_kept, combine_weights, np.float32(0))
    return PartialDispatch(y, weights, scatter_index, rev, expert_offset, expert_nums_local, is_kept)


def gather_rows(x: NDArray, scatter_index: NDArray, is_kept: NDArray, num_rows: int) -> NDArray:
    """Return [num_rows, H]: each token in the rows of those of its slots that are kept, zeros elsewhere."""
    y = np.zeros((num_rows, x.shape[1]), x.dtype)
    for token, slot in np.argwhere(is_kept):
        y[scatter_index[slot, token]] = x[token]
    return y


def gather_rows_backward(d_y: NDArray, scatter_index: NDArray, is_kept: NDArray) -> NDArray:
    """Return the gradient [T, H] of the tokens."""
    d_x = np.zeros((len(is_kept), d_y.shape[1]))
    for token, slot in np.argwhere(is_kept):
        d_x[token] += d_y[scatter_index[slot, token]].astype(np.float64)
    return round_float64(d_x, d_y.dtype)


def combine_rows(x: NDArray, weights: NDArray, scatter_index: NDArray) -> NDArray:
    """Return [T, H], the weighted sum of the rows of each token: `moe_combine`.

    With the weights ``np.abs(weights) > epsilon`` it is `moe_combine_no_weight`.

    Args:
        x: [N, H].
        weights: [T, K].
        scatter_index: [T, K].
    """
    rows = x.astype(np.float64)[scatter_index]
    return round_float64((rows * weights.astype(np.float64)[..., None]).sum(axis=1), x.dtype)


def combine_rows_backward(
    d_y: NDArray, x: NDArray, weights: NDArray, scatter_index: NDArray
) -> tuple[NDArray, NDArray]:
    """Return the gradient of the rows [N, H], and the products [T, K, H] whose sum is that of the weights."""
    d_x = np.zeros(x.shape)
    d_rows = weights.astype(np.float64)[..., None] * d_y.astype(np.float64)[:, None]
    np.add.at(d_x, scatter_index, d_rows)
    products = x.astype(np.float64)[scatter_index] * d_y.astype(np.float64)[:, None]
    return round_float64(d_x, x.dtype), round_float64(products, x.dtype)


def cal_aux_loss(
    gate_prob: NDArray,
    dispatch_mask: NDArray,
    tokens_mask: NDArray | None,
    dispatch_tokens_mask: NDArray | None,
    num_experts: int,
    use_group: bool,
    moe_k: int,
    clip_min: float,
) -> tuple[NDArray, ...]:
    """Return the loss, seqlen, ce [E], and the gradient [T, E] of the loss."""
    num_tokens, columns = gate_prob.shape
    scale = 1.0
    if dispatch_tokens_mask is not None:
        seqlen = float(dispatch_tokens_mask.sum())
        if tokens_mask is not None and len(dispatch_tokens_mask) != num_tokens:
            scale = seqlen / max(float(tokens_mask.sum()), clip_min)
    elif tokens_mask is not None:
        seqlen = float(tokens_mask.sum())
    else:
        seqlen = num_tokens * columns / num_experts
    seqlen = max(seqlen, clip_min)
    ce = (dispatch_mask if dispatch_mask.ndim == 1 else dispatch_mask.sum(axis=0)) / seqlen
    factor = num_experts / (moe_k if use_group else 1)
    loss = (ce * gate_prob.astype(np.float64).sum(axis=0)).sum() / seqlen * factor * scale
    d_prob = np.broadcast_to(ce * factor / seqlen, gate_prob.shape)
    return tuple(round_float64(np.asarray(each), gate_prob.dtype) for each in (loss, seqlen, ce, d_prob))


def int_bincount(x: NDArray, low: int, high: int) -> NDArray:
    """Return how often each of the numbers in [low, high) occurs."""
    return np.array([(x == number).sum() for number in range(low, high)], np.int64)


def expand_modality_expert_id(
    expert_id: NDArray, num_expert_per_modality: int, group_size: int, modality_offset: int, is_group_expert: bool
) -> NDArray:
    """Return the ids of one modality's experts among those of two; division is that of C, towards 0."""
    out = expert_id.copy()
    for token, slot in np.ndindex(*out.shape):
        number = int(out[token, slot]) + (slot * group_size if is_group_expert else 0)
        if num_expert_per_modality > 0:
            rank = int(number / num_expert_per_modality)
            in_rank = number - rank * num_expert_per_modality
            number = (2 * rank + modality_offset) * num_expert_per_modality + in_rank
        out[token, slot] = number
    return out


def build_src_rank_and_local_expert_id(counts: Sequence[int], num_local_experts: int) -> tuple[NDArray, NDArray]:
    """Return the rank and the local number of the expert of each row."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    pairs = np.array([divmod(expert, num_local_experts) for expert in experts], np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def batched_gemm(
    lhs: NDArray, rhs: NDArray, batch_sizes: Sequence[int], trans_lhs: bool = False, trans_rhs: bool = False
) -> NDArray:
    """Return each group of rows times its matrix, [M, N], or with ``trans_lhs`` times its rows of rhs, [E, D, N]."""
    left, right, start = lhs.astype(np.float64), rhs.astype(np.float64), 0
    if trans_lhs:
        out = np.zeros((len(batch_sizes), lhs.shape[1], rhs.shape[1]))
    else:
        out = np.zeros((len(lhs), rhs.shape[1 if trans_rhs else 2]))
    for group, size in enumerate(batch_sizes):
        rows = slice(start, start + size)
        if trans_lhs:
            out[group] = left[rows].T @ right[rows]
        else:
            out[rows] = left[rows] @ (right[group].T if trans_rhs else right[group])
        start += size
    return round_float64(out, lhs.dtype)


def _slots_by_slot(ids: NDArray) -> Iterator[tuple[int, int]]:
    """(token, slot) of all first slots, then of all second ones."""
    num_tokens, topk = ids.shape
    return ((token, slot) for slot in range(topk) for token in range(num_tokens))
