# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's operators for Mixture-of-Experts layers, slot by slot.

Source: FastDeploy's custom_ops/gpu_ops/moe. Maps, copies and counts are exact. Sums of a token's rows follow the rule
of `permutation`; FastDeploy adds in the order of slots. Scores hold an exponential and GEMMs add in any order, so a
backend agrees within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .activations import activate
from .arithmetic import add32, round_float64, round_to, to_float32
from .fastdeploy_quantization import quantize_rows
from .gemm import grouped_gemm
from .permutation import sum_rows
from .routing import take_or_zero
from .topk import select_experts

__all__ = [
    "EpDispatch",
    "Prefill",
    "TpDispatch",
    "combine_rows",
    "depermute_prefill_combine",
    "ep_moe_expert_combine",
    "ep_moe_expert_dispatch",
    "expert_token_num",
    "moe_expert_dispatch",
    "moe_expert_ffn",
    "moe_expert_reduce",
    "moe_topk_select",
    "noaux_tc",
    "prefill_permute_to_masked_gemm",
    "replicas",
    "tokens_per_expert",
]

GROUP = 128


class TpDispatch(NamedTuple):
    """The results of `moe_expert_dispatch` in their order."""

    permute_input: NDArray
    tokens_expert_prefix_sum: NDArray
    permute_indices_per_token: NDArray
    topk_weight: NDArray
    topk_idx: NDArray
    expert_idx_per_token: NDArray
    dequant_scale: NDArray
    max_tokens_per_expert: NDArray


class EpDispatch(NamedTuple):
    """The results of `ep_moe_expert_dispatch` in their order, and the token of each row, -1 in padding."""

    permute_input: NDArray
    permute_indices_per_token: NDArray
    token_nums_per_expert_cumsum: NDArray
    dst_weights: NDArray
    dst_indices: NDArray
    cumsum_idx_gpu: NDArray
    expert_idx_per_token: NDArray
    dequant_scale: NDArray
    tokens: NDArray


class Prefill(NamedTuple):
    """The results of `prefill_permute_to_masked_gemm` in their order."""

    permute_x: NDArray
    permute_scale: NDArray
    permuted_indice_map: NDArray
    token_nums_per_expert: NDArray


def moe_topk_select(logits: NDArray, bias: NDArray | None, topk: int, renormalize: bool) -> tuple[NDArray, NDArray]:
    """Return ids int64 and weights float32 [T, K]: chosen by softmax + bias, weighted by softmax, ties to the lower id.

    The norm divides by the plain sum.
    """
    scores = _softmax(logits)
    ids = select_experts(scores, topk, correction_bias=bias)
    weights = np.take_along_axis(scores, ids, axis=1)
    return ids, _normalised(weights, np.float32(0)) if renormalize else weights


def moe_expert_dispatch(
    x: NDArray,
    gating: NDArray,
    bias: NDArray | None,
    in_scale: NDArray | None,
    topk: int,
    group_moe: bool,
    quant_type: str,
    topk_only_mode: bool,
) -> TpDispatch:
    """Return the rows of all slots, sorted by expert, a stable sort of the T * K slots token by token.

    Weights are the softmax of the chosen experts, or the scores that were given. With groups, the softmax runs inside
    each of K groups, one expert is chosen from each, and its weight is divided by the group's largest.
    """
    num_tokens, num_experts = gating.shape
    biased = np.zeros(num_experts, np.float32) if bias is None else bias.reshape(-1)
    if group_moe:
        groups = gating.reshape(num_tokens, topk, num_experts // topk)
        scores = groups if topk_only_mode else _softmax(groups)
        places = np.argmax(add32(scores, biased.reshape(groups.shape[1:])), axis=2)
        chosen = np.take_along_axis(scores, places[..., None], axis=2)[..., 0]
        weights = chosen / scores.max(axis=2, initial=-np.inf)
        ids = places + np.arange(topk) * groups.shape[2]
    else:
        scores = gating if topk_only_mode else _softmax(gating)
        ids = select_experts(scores, topk, correction_bias=biased)
        weights = np.take_along_axis(scores, ids, axis=1)
    order = np.argsort(ids.reshape(-1), kind="stable")
    indices = np.zeros((topk, num_tokens), np.int32)
    for row, slot in enumerate(order):
        indices[slot % topk, slot // topk] = row
    counts = np.bincount(ids.reshape(-1), minlength=num_experts)
    experts = ids.reshape(-1)[order].astype(np.int32)
    rows, amax = quantize_rows(x[order // topk], None if in_scale is None else in_scale[experts], quant_type)
    scale = np.ones(1, np.float32) if amax is None else amax
    most = np.array([counts.max()], np.int32)
    return TpDispatch(
        rows, np.cumsum(counts), indices, weights.astype(np.float32), ids.astype(np.int32), experts, scale, most
    )


def moe_expert_ffn(
    rows: NDArray,
    tokens: NDArray,
    up_gate: NDArray,
    down: NDArray,
    bias: NDArray | None = None,
    *,
    low_latency: bool = False,
    activation: str = "swiglu",
) -> NDArray:
    """Return the rows after two GEMMs with an activation between them, rounded after each of the three.

    Args:
        rows: [N, H], or with low_latency [E, C, H].
        tokens: [E] the ends of the experts' rows, or with low_latency their numbers.
        up_gate: [E, H, 2 * I].
        down: [E, I, H].
        bias: [E, 2 * I] or None.
        low_latency: whether each expert has C rows.
        activation: "swiglu" or "swigluoai", whose gate and up columns alternate.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    if low_latency:
        sizes, offsets = tokens.tolist(), (np.arange(len(tokens) + 1) * rows.shape[1]).tolist()
    else:
        sizes, offsets = np.diff(tokens, prepend=0).tolist(), None
    columns = grouped_gemm(flat, up_gate, sizes, False, expert_offsets=offsets, bias=bias)
    if activation == "swigluoai":
        gated = activate(np.concatenate([columns[:, 0::2], columns[:, 1::2]], axis=1), "swiglu_oai")
    else:
        gated = activate(columns, "swiglu")
    return grouped_gemm(gated, down, sizes, False, expert_offsets=offsets).reshape(rows.shape)


def moe_expert_reduce(
    rows: NDArray,
    weights: NDArray,
    indices: NDArray,
    ids: NDArray,
    bias: NDArray | None,
    norm_topk_prob: bool,
    factor: float,
) -> NDArray:
    """Return sum_k w * (y + bias[e]) for each token, with w divided by the token's sum and multiplied by the factor.

    Args:
        rows: [N, H].
        weights: float32 [T, K].
        indices: int [K, T], -1 for a slot without a row.
        ids: int [T, K].
        bias: [E, H] or None.
        norm_topk_prob: whether weights are divided by their sum.
        factor: factor of the weights.
    """
    if norm_topk_prob:
        weights = _normalised(weights, np.float32(0))
    weights = weights * np.float32(factor)
    wide, of_row = to_float32(rows), np.zeros(len(rows), np.float32)
    for slot, token in np.argwhere(indices >= 0):
        row = indices[slot, token]
        of_row[row] = weights[token, slot]
        if bias is not None:
            wide[row] = add32(wide[row], to_float32(bias[ids[token, slot]]))
    return combine_rows(wide if bias is not None else rows, of_row, indices.T, rows.dtype)


def combine_rows(rows: NDArray, row_weights: NDArray, token_rows: NDArray, dtype: DTypeLike) -> NDArray:
    """Return the weighted sum of the rows [T, any] of each token, ascending, rounded to ``dtype``."""
    return round_to(sum_rows(rows, _ascending(token_rows), row_weights), dtype)


def ep_moe_expert_dispatch(
    x: NDArray,
    ids: NDArray,
    weights: NDArray,
    in_scale: NDArray | None,
    sizes: Sequence[int],
    num_rows: int,
    quant_type: str,
) -> EpDispatch:
    """Return the rows of local experts, in segments of the given sizes, by token, then slot; padding is 0.

    An expert that a token names twice has two rows, and the map holds the last. Slots that do not fit have none.
    """
    num_experts, num_tokens = len(sizes), len(ids)
    ends = np.cumsum(sizes)
    slot_rows, counts = _placed(ids, ends - sizes, sizes)
    slot_rows[slot_rows >= num_rows] = -1
    tokens, of_rows = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.float32)
    indices = np.full((num_experts, num_tokens), -1, np.int32)
    for token, slot in np.ndindex(*ids.shape):
        expert = ids[token, slot]
        if 0 <= expert < num_experts:
            row = indices[expert, token] = slot_rows[token, slot]
            if row >= 0:
                tokens[row], of_rows[row] = token, weights[token, slot]
    pairs = np.where(indices.T >= 0, np.arange(num_experts, dtype=np.int32), np.int32(-1))
    experts = np.minimum(np.searchsorted(ends, np.arange(num_rows), side="right"), num_experts - 1)
    rows, amax = quantize_rows(take_or_zero(x, tokens), None if in_scale is None else in_scale[experts], quant_type)
    scale = np.ones(1, np.float32) if amax is None else amax
    return EpDispatch(rows, indices, ends, of_rows, pairs, counts, experts, scale, tokens)


def ep_moe_expert_combine(
    rows: NDArray, weights: NDArray, indices: NDArray, bias: NDArray | None, norm_topk_prob: bool, factor: float
) -> NDArray:
    """Return the sum over the experts of each token, w * y, plus the sum of their biases.

    Args:
        rows: [N, H].
        weights: float32 [N].
        indices: int [E, T] row of each pair, -1 for none.
        bias: [E, H] or None.
        norm_topk_prob: whether the weights of a token are divided by their sum.
        factor: factor of the weights.
    """
    if norm_topk_prob:
        of_pairs = take_or_zero(weights, indices.T)
        divided, weights = _normalised(of_pairs, np.float32(0)), weights.copy()
        for token, expert in np.argwhere(indices.T >= 0):
            weights[indices[expert, token]] = divided[token, expert]
    weights = weights * np.float32(factor)
    if bias is None:
        return combine_rows(rows, weights, indices.T, rows.dtype)
    out = combine_rows(to_float32(rows), weights, indices.T, np.float32)
    of_rows = np.zeros(rows.shape, np.float32)
    for expert, token in np.argwhere(indices >= 0):
        of_rows[indices[expert, token]] = to_float32(bias[expert])
    return round_to(add32(out, sum_rows(of_rows, _ascending(indices.T))), rows.dtype)


def noaux_tc(
    scores: NDArray,
    biased: NDArray,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    factor: float,
    epsilon: float = 1e-20,
) -> tuple[NDArray, NDArray, NDArray]:
    """Return sparse weights [T, E], weights float32 and ids int64 [T, K].

    The best groups by the sum of their two best biased scores are kept, then the best experts by biased score; ties go
    to the lower one, and scores that are not finite are lowest. Without any finite group the experts are 0 to K - 1,
    each with weight 1 / K. The weights are the scores, with ``renormalize`` divided by epsilon plus their sum, times
    the factor.
    """
    lowest = np.where(np.isfinite(biased), biased, np.float32(-np.inf))
    ids = select_experts(lowest, topk, num_groups=n_group, topk_groups=topk_group)
    values = np.take_along_axis(scores, ids, axis=1)
    if renormalize:
        values = _normalised(values, np.float32(epsilon))
    values = values * np.float32(factor)
    size = scores.shape[1] // n_group
    for token, row in enumerate(lowest.reshape(-1, n_group, size)):
        if (np.isfinite(row).sum(axis=1) < min(2, size)).all():
            ids[token], values[token] = np.arange(topk), np.float32(1 / topk)
    sparse = np.zeros_like(scores)
    np.put_along_axis(sparse, ids, values, axis=1)
    return sparse, values, ids


def replicas(ids: NDArray, table: NDArray, sizes: NDArray) -> NDArray:
    """Return physical ids: replica (t + e) % count of expert e for token t. Any valid replica is right."""
    out = np.zeros_like(ids)
    for token, slot in np.ndindex(*ids.shape):
        expert = ids[token, slot]
        out[token, slot] = table[expert, (token + expert) % max(sizes[expert], 1)]
    return out


def tokens_per_expert(ids: NDArray, num_experts: int) -> NDArray:
    """Return int32 [3, E]: slots of each expert, the same rounded up to 128, and the running sum of those."""
    counts = np.array([(ids == expert).sum() for expert in range(num_experts)], np.int32)
    padded = -(-counts // GROUP) * GROUP
    return np.stack([counts, padded, np.cumsum(padded)]).astype(np.int32)


def expert_token_num(ids: NDArray, num_experts: int) -> list[list[int]]:
    """Return counts, counts with the next multiple of 128 above each that is not 0, and both sums."""
    counts = tokens_per_expert(ids, num_experts)[0].tolist()
    padded = [count + GROUP - count % GROUP if count else 0 for count in counts]
    return [counts, padded, [sum(counts), sum(padded)]]


def prefill_permute_to_masked_gemm(
    x: NDArray, scale: NDArray, ids: NDArray, num_experts: int, capacity: int
) -> Prefill:
    """Return tokens [E, M, H] and scales [E, M, S] by expert, the map e * M + place [T, K], and the counts."""
    starts, sizes = np.arange(num_experts) * capacity, [capacity] * num_experts
    slot_rows, counts = _placed(ids, starts, sizes)
    rows = np.zeros((num_experts * capacity, x.shape[1]), x.dtype)
    scales = np.zeros((num_experts * capacity, scale.shape[1]), scale.dtype)
    for token, slot in np.argwhere(slot_rows >= 0):
        rows[slot_rows[token, slot]] = x[token]
        scales[slot_rows[token, slot]] = scale[token]
    by_expert = num_experts, capacity
    permuted = rows.reshape(*by_expert, x.shape[1]), scales.reshape(*by_expert, scale.shape[1])
    return Prefill(*permuted, slot_rows, counts[:, None])


def depermute_prefill_combine(x: NDArray, indices: NDArray, weights: NDArray, num_tokens: int) -> NDArray:
    """Return the weighted sums [num_tokens, H] of the rows of x [E, M, H] that each token has."""
    rows, of_row = x.reshape(-1, x.shape[2]), np.zeros(x.shape[0] * x.shape[1], np.float32)
    out = np.zeros((num_tokens, x.shape[2]), x.dtype)
    indices, weights = indices[:num_tokens], weights[:num_tokens]
    of_row[indices[indices >= 0]] = weights[indices >= 0]
    out[: len(indices)] = combine_rows(rows, of_row, indices, x.dtype)
    return out


def _placed(ids: NDArray, starts: NDArray, sizes: Sequence[int]) -> tuple[NDArray, NDArray]:
    """The row [T, K] of each slot in its expert's segment, -1 without one, and the rows in use [E], int32."""
    slot_rows, counts = np.full(ids.shape, -1, np.int32), np.zeros(len(sizes), np.int32)
    for token, slot, expert in _slots(ids):
        if 0 <= expert < len(sizes) and counts[expert] < sizes[expert]:
            slot_rows[token, slot] = starts[expert] + counts[expert]
            counts[expert] += 1
    return slot_rows, counts


def _ascending(token_rows: NDArray) -> NDArray:
    """The rows of each token, -1 last."""
    none = np.iinfo(np.int32).max
    ascending = np.sort(np.where(token_rows < 0, none, token_rows), axis=1)
    return np.where(ascending == none, -1, ascending)


def _slots(ids: NDArray) -> Iterator[tuple[int, int, int]]:
    return ((token, slot, int(ids[token, slot])) for token, slot in np.ndindex(*ids.shape))


def _softmax(logits: NDArray) -> NDArray:
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True, initial=-np.inf))
    return round_float64(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def _normalised(weights: NDArray, epsilon: np.float32) -> NDArray:
    """Weights over their sum, which is rounded to float32, plus epsilon; weights that are all 0 stay 0."""
    total = round_float64(weights.astype(np.float64).sum(axis=1, keepdims=True), np.float32) + epsilon
    return weights / np.where(total == 0, np.float32(1), total)
