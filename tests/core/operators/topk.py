# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`topk` and `topk_backward`: a router's weights, ids and scores, and the gradient of its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Floats, Int, Int64s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ...routers import Router
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class TopkParams(Params):
    """pmo_topk_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts num_groups topk_groups scores_per_group"),
        (Bytes, "gating"),
        (Size, "gating_row_stride"),
        (Floats, "correction_bias"),
        (Bytes, "weights"),
        (Int64s, "ids"),
        (Bytes, "scores"),
        (Int, "dtype use_sigmoid pre_act renormalize"),
        (Float, "scaling_factor"),
        (Int, "num_threads"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
    )
    needs_cuda_workspace = True


class TopkBackwardParams(Params):
    """pmo_topk_backward_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts"),
        (Bytes, "gating"),
        (Size, "gating_row_stride"),
        (Int64s, "ids"),
        (Bytes, "d_weights d_scores d_gating"),
        (Int, "dtype use_sigmoid pre_act renormalize"),
        (Float, "scaling_factor"),
        (Int, "num_threads"),
    )


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
        ids=ids,
        d_weights=d_weights,
        d_scores=d_scores,
        d_gating=d_gating,
        dtype=DTYPES[gating.dtype],
        scaling_factor=scaling_factor,
        **fields,
    )


def router_flags(router: Router) -> dict[str, Any]:
    """Fields of either struct of a router."""
    return {name: getattr(router, name) for name in ("use_sigmoid", "pre_act", "renormalize", "scaling_factor")}


def topk(core: Core, router: Router, *, num_threads: int = 0, with_scores: bool = True) -> tuple[NDArray, ...]:
    """Weights, ids and, if they are wanted, scores."""
    gating = router.gating
    shape = len(gating), router.top_k
    with guarded_outputs() as output:
        weights, ids = output(shape, gating.dtype), output(shape, np.int64)
        scores = output(gating.shape, gating.dtype) if with_scores else None
        options = {**router_flags(router), **router.groups, "num_threads": num_threads}
        params = topk_params(gating, weights, ids, scores, correction_bias=router.correction_bias, **options)
        core.run("topk", params)
    return (weights, ids) if scores is None else (weights, ids, scores)


def topk_backward(
    core: Core,
    router: Router,
    ids: NDArray,
    d_weights: NDArray | None,
    d_scores: NDArray | None = None,
    *,
    num_threads: int = 0,
) -> NDArray:
    with guarded_outputs() as output:
        d_gating = output(router.gating.shape, router.gating.dtype)
        options = {**router_flags(router), "num_threads": num_threads}
        core.run("topk_backward", topk_backward_params(router.gating, ids, d_gating, d_weights, d_scores, **options))
    return d_gating


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    gating = np.ones((s.T, s.E), np.float32)
    weights, ids = output((s.T, s.K), np.float32), output((s.T, s.K), np.int64)
    scores, groups = output(gating.shape, np.float32), {"num_groups": 2, "topk_groups": 1}
    return topk_params(gating, weights, ids, scores, correction_bias=gating[0], pre_act=1, **groups)


def _valid_backward(core: Core, output: MakeOutput, s: Small) -> Params:
    gating, ids = np.ones((s.T, s.E), np.float32), np.zeros((s.T, s.K), np.int64)
    d_gating, d_weights = output(gating.shape, np.float32), np.ones(ids.shape, np.float32)
    return topk_backward_params(gating, ids, d_gating, d_weights, gating, pre_act=1)


def _flags(s: Draw) -> dict[str, Any]:
    """The last fields of either struct."""
    flags = {name: s.below(2) for name in ("use_sigmoid", "pre_act", "renormalize")}
    return {"scaling_factor": 2.0, "dtype": s.below(3), "num_threads": s.below(4), **flags}


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    groups, size = s.between(1, 5), s.between(1, 5)
    experts, kept = groups * size, s.between(1, groups + 1)
    slots = s.between(1, kept * size + 1)
    return TopkParams(
        num_tokens=s.T,
        topk=slots,
        num_experts=experts,
        num_groups=groups,
        topk_groups=kept,
        scores_per_group=s.between(1, 5),
        gating=s.data(s.T, experts),
        gating_row_stride=experts,
        correction_bias=s.data(1, experts)[0],
        weights=output((s.T, slots), np.float32),
        ids=output((s.T, slots), np.int64),
        scores=output((s.T, experts), np.float32),
        **_flags(s),
    )


def _fuzzed_backward(core: Core, output: MakeOutput, s: Draw) -> Params:
    return TopkBackwardParams(
        **s.sizes("num_tokens topk num_experts"),
        gating=s.data(s.T, s.E),
        gating_row_stride=s.E,
        ids=s.ints((s.T, s.K), s.E, np.int64),
        d_weights=s.data(s.T, s.K),
        d_scores=s.data(s.T, s.E),
        d_gating=output((s.T, s.E), np.float32),
        **_flags(s),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return topk(core, large.router, num_threads=num_threads)


def _work_backward(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    weights, ids, scores = large.chosen
    return (topk_backward(core, large.router, ids, weights, scores, num_threads=num_threads),)


_BAD_FIELDS: dict[str, tuple[float, ...]] = {
    "num_tokens": (-1, TOO_MANY),
    "topk": (-1, TOO_MANY // 5 + 1),
    "num_experts": (0, TOO_MANY_EXPERTS),
    "dtype": (-1, 3, 5),
}

OPERATORS = (
    Operator(
        name="topk",
        valid=_valid,
        bad_fields={
            **_BAD_FIELDS,
            "topk": (*_BAD_FIELDS["topk"], 0, 3),  # of 4 experts in 2 groups of which 1 is kept
            "num_groups": (0, -2, 3, 8),
            "topk_groups": (0, 3),
            "scores_per_group": (0, -1),
        },
        required=("gating", "weights", "ids"),
        aligned=("gating", "correction_bias", "weights", "ids", "scores"),
        fuzzed=_fuzzed,
        work=_work,
    ),
    Operator(
        name="topk_backward",
        valid=_valid_backward,
        bad_fields=_BAD_FIELDS,
        required=("gating", "ids", "d_gating"),
        aligned=("gating", "ids", "d_weights", "d_scores", "d_gating"),
        fuzzed=_fuzzed_backward,
        work=_work_backward,
    ),
)
