# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`topk_backward`: the gradient of a router's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Float, Int, Int64s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ...routers import Router
    from ..binding import Core
    from ..inputs import Draw, Large, Small


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
    gating, ids = np.ones((s.T, s.E), np.float32), np.zeros((s.T, s.K), np.int64)
    d_gating, d_weights = output(gating.shape, np.float32), np.ones(ids.shape, np.float32)
    return topk_backward_params(gating, ids, d_gating, d_weights, gating, pre_act=1)


def fuzzed_flags(s: Draw) -> dict[str, Any]:
    """The last fields of either struct."""
    flags = {name: s.below(2) for name in ("use_sigmoid", "pre_act", "renormalize")}
    return {"scaling_factor": 2.0, "dtype": s.below(3), "num_threads": s.below(4), **flags}


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    return TopkBackwardParams(
        **s.sizes("num_tokens topk num_experts"),
        gating=s.data(s.T, s.E),
        gating_row_stride=s.E,
        ids=s.ints((s.T, s.K), s.E, np.int64),
        d_weights=s.data(s.T, s.K),
        d_scores=s.data(s.T, s.E),
        d_gating=output((s.T, s.E), np.float32),
        **fuzzed_flags(s),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    weights, ids, scores = large.chosen
    return (topk_backward(core, large.router, ids, weights, scores, num_threads=num_threads),)


BAD_FIELDS: dict[str, tuple[float, ...]] = {
    "num_tokens": (-1, TOO_MANY),
    "topk": (-1, TOO_MANY // 5 + 1),
    "num_experts": (0, TOO_MANY_EXPERTS),
    "dtype": (-1, 3, 5),
}

OPERATORS = (
    Operator(
        name="topk_backward",
        valid=_valid,
        bad_fields=BAD_FIELDS,
        required=("gating", "ids", "d_gating"),
        aligned=("gating", "ids", "d_weights", "d_scores", "d_gating"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
