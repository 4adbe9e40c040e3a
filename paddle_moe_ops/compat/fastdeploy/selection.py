# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's operators that choose experts and count their tokens. T tokens, E experts, K slots per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ... import _checks
from ..._graphs import beside, float32, numbers_of, public, to_dtype
from ...routing import calculate_topk, check_groups, route
from ..row_maps import known_slots
from .codes import GROUP, times

__all__ = [
    "count_tokens_per_expert_func",
    "get_expert_token_num",
    "grouped_topk",
    "moe_redundant_topk_select",
    "moe_topk_select",
    "noaux_tc",
    "noaux_tc_redundant",
]

_EPSILON = 1e-20


@public()
def moe_topk_select(
    gating_logits: Tensor,
    bias: Tensor | None,
    moe_topk: int,
    apply_norm_weight: bool,
    enable_softmax_top_k_fused: bool,
) -> list[Tensor]:
    """Choose the K experts with the highest softmax, which is their weight.

    No gradient. Deterministic; equal scores: the lower expert first. No host synchronisation.

    Args:
        gating_logits: float32 [T, E].
        bias: float32 [E] or [1, E], added to the softmax for the choice only, or None.
        moe_topk: K.
        apply_norm_weight: whether to divide a token's weights by their sum.
        enable_softmax_top_k_fused: accepted for the signature; results are the same.

    Returns:
        ids int64 [T, K], best first, and weights float32 [T, K].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "moe_topk_select"
    _checks.flag(name, "apply_norm_weight", apply_norm_weight)
    _checks.flag(name, "enable_softmax_top_k_fused", enable_softmax_top_k_fused)
    return _by_softmax(name, gating_logits, bias, moe_topk, apply_norm_weight)


@public()
def moe_redundant_topk_select(
    gating_logits: Tensor,
    expert_id_to_ep_rank_array: Tensor,
    expert_in_rank_num_list: Tensor,
    tokens_per_expert_stats_list: Tensor,
    bias: Tensor | None,
    moe_topk: int,
    apply_norm_weight: bool,
    enable_softmax_top_k_fused: bool,
    redundant_ep_rank_num_plus_one: int,
) -> list[Tensor]:
    """Choose experts as `moe_topk_select` does, and a replica of each.

    Token t takes replica (t + e) % count of expert e. FastDeploy's choice of replicas is pseudo-random.

    No gradient. Deterministic. No host synchronisation. Adds to ``tokens_per_expert_stats_list``.

    Args:
        gating_logits: float32 [T, E].
        expert_id_to_ep_rank_array: int32 [E, R], the physical experts that are replicas of each expert.
        expert_in_rank_num_list: int32 [E], the number of each expert's replicas, at least 1.
        tokens_per_expert_stats_list: int32 [E], to which the tokens of each expert are added in place.
        bias: float32 [E] or [1, E], or None.
        moe_topk: K.
        apply_norm_weight: as in `moe_topk_select`.
        enable_softmax_top_k_fused: as in `moe_topk_select`.
        redundant_ep_rank_num_plus_one: R.

    Returns:
        physical ids int64 [T, K], weights float32 [T, K], and ``tokens_per_expert_stats_list``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "moe_redundant_topk_select"
    _checks.flag(name, "apply_norm_weight", apply_norm_weight)
    _checks.flag(name, "enable_softmax_top_k_fused", enable_softmax_top_k_fused)
    ids, weights = _by_softmax(name, gating_logits, bias, moe_topk, apply_norm_weight)
    tables = expert_id_to_ep_rank_array, expert_in_rank_num_list, tokens_per_expert_stats_list
    physical = _replicas(name, {"gating_logits": gating_logits}, ids, *tables, redundant_ep_rank_num_plus_one)
    return [physical, weights, tokens_per_expert_stats_list]


@public()
def noaux_tc(
    scores: Tensor,
    scores_with_bias: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> list[Tensor]:
    """Choose experts from the best groups, by biased scores, and weight them by their scores.

    The score of a group is the sum of its two best biased scores. Biased scores that are not finite are lowest. A token
    without a group whose score is finite gets experts 0 to K - 1, each with weight 1 / K.

    No gradient. Deterministic; equal scores: the lower group or expert. No host synchronisation.

    Args:
        scores: float32 [T, E], usually the sigmoid of logits.
        scores_with_bias: float32 [T, E].
        n_group: groups of E / n_group consecutive experts.
        topk_group: groups that are kept.
        topk: K.
        renormalize: whether to divide a token's weights by their sum plus 1e-20.
        routed_scaling_factor: factor of the weights.

    Returns:
        float32 [T, E], the weights of the chosen experts and 0 elsewhere, which `moe_expert_dispatch` takes with
        topk_only_mode; weights float32 [T, K], best biased score first; ids int64 [T, K].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "noaux_tc"
    return _by_groups(
        name, scores, scores_with_bias, n_group, topk_group, topk, renormalize, routed_scaling_factor, _EPSILON
    )


@public()
def noaux_tc_redundant(
    scores: Tensor,
    scores_with_bias: Tensor,
    expert_id_to_ep_rank_array: Tensor,
    expert_in_rank_num_list: Tensor,
    tokens_per_expert_stats_list: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    redundant_ep_rank_num_plus_one: int,
) -> list[Tensor]:
    """Choose experts as `noaux_tc` does, and a replica of each as `moe_redundant_topk_select` does.

    No gradient. Deterministic. No host synchronisation. Adds to ``tokens_per_expert_stats_list``.

    Args:
        scores: float32 [T, E].
        scores_with_bias: float32 [T, E].
        expert_id_to_ep_rank_array: int32 [E, R].
        expert_in_rank_num_list: int32 [E].
        tokens_per_expert_stats_list: int32 [E], to which the tokens of each expert are added in place.
        n_group: as in `noaux_tc`.
        topk_group: as in `noaux_tc`.
        topk: K.
        renormalize: as in `noaux_tc`.
        routed_scaling_factor: as in `noaux_tc`.
        redundant_ep_rank_num_plus_one: R.

    Returns:
        weights float32 [T, E] of logical experts, weights float32 [T, K], physical ids int64 [T, K], and
        ``tokens_per_expert_stats_list``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "noaux_tc_redundant"
    sparse, weights, ids = _by_groups(
        name, scores, scores_with_bias, n_group, topk_group, topk, renormalize, routed_scaling_factor, _EPSILON
    )
    tables = expert_id_to_ep_rank_array, expert_in_rank_num_list, tokens_per_expert_stats_list
    physical = _replicas(name, {"scores": scores}, ids, *tables, redundant_ep_rank_num_plus_one)
    return [sparse, weights, physical, tokens_per_expert_stats_list]


@public()
def grouped_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> list[Tensor]:
    """Choose experts as `noaux_tc` does, by the sigmoid of logits plus a bias.

    No gradient. Deterministic. No host synchronisation.

    Args:
        gating_output: logits [T, E] bfloat16, float16 or float32.
        e_score_correction_bias: float32 [E].
        n_group: as in `noaux_tc`.
        topk_group: as in `noaux_tc`.
        topk: K.
        renormalize: whether to divide a token's weights by their sum.
        routed_scaling_factor: factor of the weights.

    Returns:
        weights float32 [T, E], 0 for experts that are not chosen; weights float32 [T, K]; ids int64 [T, K].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "grouped_topk"
    _checks.tensor(name, "gating_output", gating_output, _checks.SUM_DTYPES, ["num_tokens", "num_experts"])
    bias, num_experts = e_score_correction_bias, gating_output.shape[1]
    _checks.tensor(name, "e_score_correction_bias", bias, (paddle.float32,), [num_experts])
    _checks.same_place(name, gating_output=gating_output, e_score_correction_bias=bias)
    scores = F.sigmoid(float32(gating_output))
    biased = scores + bias
    return _by_groups(name, scores, biased, n_group, topk_group, topk, renormalize, routed_scaling_factor, 0.0)


@public()
def count_tokens_per_expert_func(topk_ids: Tensor, num_experts: int, compute_padded_cumsum: bool = False) -> Tensor:
    """Count the slots of each expert.

    No gradient. Deterministic. No host synchronisation.

    Args:
        topk_ids: int32 or int64 [T, K]; ids outside [0, E) are not counted.
        num_experts: E.
        compute_padded_cumsum: whether to add the third row.

    Returns:
        int32 [2 or 3, E]: counts; counts rounded up to multiples of 128; the ends of segments of that many rows.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "count_tokens_per_expert_func"
    _checks.flag(name, "compute_padded_cumsum", compute_padded_cumsum)
    counts = _counts(name, topk_ids, num_experts)
    padded = (counts + (GROUP - 1)) // GROUP * GROUP
    rows = [counts, padded]
    if compute_padded_cumsum:
        rows.append(paddle.cumsum(padded, dtype="int32"))
    return paddle.stack(rows)


@public()
def get_expert_token_num(topk_ids: Tensor, num_experts: int) -> list[list[int]]:
    """Count the slots of each expert, on the host.

    No gradient. Deterministic. One host synchronisation.

    Args:
        topk_ids: int32 or int64 [T, K], ids in [0, E); others are not counted.
        num_experts: E.

    Returns:
        counts; counts padded to multiples of 128, of which one of 128 * n > 0 becomes 128 * (n + 1), as in FastDeploy;
        the two sums.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    _checks.of_dygraph("get_expert_token_num", "topk_ids", topk_ids)
    counts = _counts("get_expert_token_num", topk_ids, num_experts).tolist()
    padded = [(count // GROUP + 1) * GROUP if count else 0 for count in counts]
    return [counts, padded, [sum(counts), sum(padded)]]


def _by_softmax(name: str, logits: Tensor, bias: Tensor | None, moe_topk: Any, renormalize: bool) -> list[Tensor]:
    _checks.tensor(name, "gating_logits", logits, (paddle.float32,), ["num_tokens", "num_experts"])
    names = {"gating": "gating_logits", "top_k": "moe_topk", "correction_bias": "bias"}
    with _checks.renaming("calculate_topk", name, **names):
        weights, ids = calculate_topk(logits, moe_topk, False, renormalize, correction_bias=bias)
    return [ids, weights]


def _by_groups(
    name: str,
    scores: Tensor,
    biased: Tensor,
    n_group: Any,
    topk_group: Any,
    topk: Any,
    renormalize: Any,
    routed_scaling_factor: Any,
    epsilon: float,
) -> list[Tensor]:
    """The results of `noaux_tc`."""
    _checks.tensor(name, "scores", scores, (paddle.float32,), ["num_tokens", "num_experts"])
    _checks.tensor(name, "scores_with_bias", biased, (paddle.float32,), list(scores.shape))
    _checks.same_place(name, scores=scores, scores_with_bias=biased)
    num_experts = scores.shape[1]
    if num_experts == 0:
        _checks.bad_value(
            name, "scores", "of shape [num_tokens, num_experts] with num_experts >= 1", list(scores.shape)
        )
    with _checks.renaming(name, name, num_groups="n_group", topk_groups="topk_group"):
        n_group, topk_group = check_groups(name, "topk", num_experts, topk, n_group, topk_group, 2)
    _checks.flag(name, "renormalize", renormalize)
    factor = _checks.number(name, "routed_scaling_factor", routed_scaling_factor)
    is_finite = paddle.isfinite(biased)
    biased = paddle.where(is_finite, biased, paddle.full_like(biased, -float("inf")))
    groups = {"num_groups": n_group, "topk_groups": topk_group}
    with _checks.renaming("calculate_topk", name, gating="scores_with_bias"):
        ids = calculate_topk(biased, topk, False, False, pre_act=False, post_act=True, **groups)[1]
    values = paddle.index_sample(scores, ids)
    if renormalize:
        total = sum_of_slots(values) + epsilon
        values = values / paddle.where(total == 0, paddle.ones_like(total), total)
    values = times(values, factor)
    size = num_experts // n_group
    finite_of_group = is_finite.astype("int32").reshape([scores.shape[0], n_group, size]).sum(-1)
    has_group = (finite_of_group >= min(size, 2)).any(-1, keepdim=True)
    values = paddle.where(has_group, values, paddle.full_like(values, 1.0 / topk))
    ids = paddle.where(has_group, ids, beside(paddle.arange(topk, dtype="int64"), ids))
    return [paddle.put_along_axis(paddle.zeros_like(scores), ids, values, 1), values, ids]


def sum_of_slots(weights: Tensor) -> Tensor:
    """float32 [T, 1], the sum of each token's weights: in float64 and rounded, the same in any order of additions."""
    return weights.astype("float64").sum(-1, keepdim=True).astype("float32")


def _replicas(
    name: str, by: Mapping[str, Tensor], ids: Tensor, table: Tensor, sizes: Tensor, statistics: Tensor, columns: Any
) -> Tensor:
    """Physical ids of replica (t + e) % count; the slots of each expert are added to the statistics."""
    _checks.of_dygraph(name, "tokens_per_expert_stats_list", statistics)
    columns = _checks.integer(name, "redundant_ep_rank_num_plus_one", columns, 1)
    (num_experts,) = {scores.shape[1] for scores in by.values()}
    int32 = (paddle.int32,)
    _checks.tensor(name, "expert_id_to_ep_rank_array", table, int32, [num_experts, columns])
    _checks.tensor(name, "expert_in_rank_num_list", sizes, int32, [num_experts])
    _checks.tensor(name, "tokens_per_expert_stats_list", statistics, int32, [num_experts])
    tensors = {"expert_id_to_ep_rank_array": table, "expert_in_rank_num_list": sizes}
    _checks.same_place(name, **by, **tensors, tokens_per_expert_stats_list=statistics)
    counted = route(ids, num_experts=num_experts, buffer_size=known_slots(ids), validate=False)
    statistics.add_(counted.routed_per_expert)
    flat = ids.flatten()
    tokens = numbers_of(flat) // ids.shape[1]
    replicas = (tokens + flat) % paddle.gather(sizes, flat).astype("int64").clip(1, columns)
    return paddle.gather(table.flatten(), flat * columns + replicas).astype("int64").reshape(ids.shape)


def _counts(name: str, topk_ids: Tensor, num_experts: Any) -> Tensor:
    """int32 [E]."""
    with _checks.renaming("route", name, routing="topk_ids"):
        _checks.tensor("route", "routing", topk_ids, _checks.ID_DTYPES, ["num_tokens", "topk"])
        plan = route(
            topk_ids,
            num_experts=num_experts,
            buffer_size=known_slots(topk_ids),
            duplicates="each",
            validate=False,
        )
    return to_dtype(plan.routed_per_expert, paddle.int32)
