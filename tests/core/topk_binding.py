# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Params of the core's router, filled from arrays as in `tests.core.binding`."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .structs import DTYPES, TopkBackwardParams, TopkParams, row_stride

__all__ = ["topk_backward_params", "topk_params"]


def topk_params(
    gating: NDArray,
    weights: NDArray,
    ids: NDArray,
    scores: NDArray | None = None,
    *,
    num_groups: int = 1,
    topk_groups: int | None = None,
    scores_per_group: int = 2,
    scaling_factor: float = 1.0,
    **fields: Any,
) -> TopkParams:
    """Params of "topk". Rows of ``gating`` may lie apart; use_sigmoid, pre_act and renormalize are ``fields``."""
    return TopkParams(
        num_tokens=len(gating),
        topk=ids.shape[1],
        num_experts=gating.shape[1],
        num_groups=num_groups,
        topk_groups=num_groups if topk_groups is None else topk_groups,
        scores_per_group=scores_per_group,
        gating=gating,
        gating_row_stride=row_stride(gating),
        weights=weights,
        ids=ids,
        scores=scores,
        dtype=DTYPES[gating.dtype],
        scaling_factor=scaling_factor,
        **fields,
    )


def topk_backward_params(
    gating: NDArray,
    ids: NDArray,
    d_gating: NDArray,
    d_weights: NDArray | None = None,
    d_scores: NDArray | None = None,
    *,
    scaling_factor: float = 1.0,
    **fields: Any,
) -> TopkBackwardParams:
    """Params of "topk_backward"; gradients of outputs that are None count as zeros."""
    return TopkBackwardParams(
        num_tokens=len(gating),
        topk=ids.shape[1],
        num_experts=gating.shape[1],
        gating=gating,
        gating_row_stride=row_stride(gating),
        ids=ids,
        d_weights=d_weights,
        d_scores=d_scores,
        d_gating=d_gating,
        dtype=DTYPES[gating.dtype],
        scaling_factor=scaling_factor,
        **fields,
    )
