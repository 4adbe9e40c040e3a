# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value, public, without_autocast

_SMALLEST_SUM = 1e-12  # sigmoids can add up to nothing


@public("scores")
def load_balance_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Compute the auxiliary loss against imbalance, 1 at even load: ``E * sum_e share_e * mean_t scores[t, e]``.

    ``share_e`` is the share of all T*K slots that name expert e; it carries no gradient. Formula: Switch
    Transformer (arXiv:2101.03961, equations 4 to 6) for K experts per token. Scores must sum to 1: divide those of a
    sigmoid by their sum over the experts, as DeepSeek-V3 does (arXiv:2412.19437, equations 17 to 20).
    Deterministic; no host synchronisation.

    Args:
        scores: scores of the router, [T, E], bfloat16, float16 or float32, differentiable.
        ids: chosen experts, int32 or int64 [T, K], -1 for an empty slot, which is not counted. On a CPU they are looked
            at.

    Returns:
        scalar, float32; 0 without tokens.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape; on a CPU, an id outside [-1, E).
    """
    name = "load_balance_loss"
    _checks.tensor(name, "scores", scores, _checks.SUM_DTYPES, ["T", "E"])
    _checks.tensor(name, "ids", ids, _checks.ID_DTYPES, [scores.shape[0], "K"])
    num_experts = scores.shape[1]
    if not is_graph_value(ids) and ids.place.is_cpu_place() and ids.size > 0:
        least, most = int(ids.min()), int(ids.max())
        if least < -1 or most >= num_experts:
            _checks.bad_value(name, "ids", f"in [-1, {num_experts})", least if least < -1 else most)
    load = F.one_hot(ids.astype("int64") + 1, num_experts + 1).sum(axis=[0, 1])[1:]  # the first are empty slots
    return loss_of_load(scores, load, False)


@public("scores")
def loss_of_load(scores: Tensor, load: Tensor, normalise: bool) -> Tensor:
    """`load_balance_loss` of the slots that each expert got, [E].

    Args:
        scores: scores of the router, [T, E].
        load: slots that name each expert, [E].
        normalise: whether to divide the scores of a token by their sum first.
    """
    with without_autocast():
        scores, load = scores.astype("float32"), load.astype("float32")
        if normalise:
            scores = scores / scores.sum(axis=-1, keepdim=True).clip(min=_SMALLEST_SUM)
        share = load / load.sum().clip(min=1.0)
        return scores.shape[1] * (share * _mean(scores)).sum()


@public("logits")
def router_z_loss(logits: Tensor) -> Tensor:
    """Compute the auxiliary loss against large logits: the mean over tokens of ``logsumexp(logits)**2``.

    Formula: ST-MoE (arXiv:2202.08906, equation 5). Deterministic; no host synchronisation.

    Args:
        logits: logits of the router, [T, E], bfloat16, float16 or float32, differentiable.

    Returns:
        scalar, float32; 0 without tokens.

    Raises:
        TypeError: logits is not a tensor of these dtypes.
        ValueError: logits is not [T, E].
    """
    _checks.tensor("router_z_loss", "logits", logits, _checks.SUM_DTYPES, ["T", "E"])
    with without_autocast():
        return _mean(paddle.logsumexp(logits.astype("float32"), axis=-1).square())


def _mean(values: Tensor) -> Tensor:
    """The mean along the first axis, 0 where that is empty."""
    if values.shape[0] >= 0:
        return values.sum(axis=0) / max(values.shape[0], 1)
    return values.sum(axis=0) / paddle.shape(values)[0].clip(min=1).astype("float32")
