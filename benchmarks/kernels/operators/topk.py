# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A router: the experts with the highest scores of a softmax, and weights whose sum is 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_moe_ops.testing.tolerances import score_tols
from tests.core.operators.topk import topk_params

from ..check import Check
from ..core import CoreCalls
from ..device import Body, Outputs
from ..inputs import Inputs
from ..model import WORD, Bytes
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import PLAIN, Library, Operator, Variant, Way


def _least_bytes(_: Operation, problem: Problem) -> Bytes:
    """read 4TE (logits), written 12TK (ids, weights)"""
    shape = problem.case.shape
    return Bytes(WORD * shape.num_tokens * shape.num_experts, 3 * WORD * shape.num_tokens * problem.chosen_per_token)


def _unlike_ids(check: Check, _: Operation, name: str, actual: Any) -> str | None:
    return check.unlike_array(name, actual, check.inputs.problem.chosen[1])


def _unlike_weights(check: Check, _: Operation, name: str, actual: Any) -> str | None:
    problem = check.inputs.problem
    expected = check.inputs.from_numpy(problem.chosen[0])
    tolerance = score_tols(np.float32, problem.case.shape.num_experts)
    wrong = check.unlike(name, actual, expected.dtype, expected.shape)
    return wrong or check.too_far(name, actual, expected, expected, tolerance)


def _named(weights: Any, ids: Any) -> Outputs:
    return {"router_weights": weights, "router_ids": ids}


def _core(core: CoreCalls, _: Operation, inputs: Inputs) -> Body:
    gating = inputs.gating
    shape = len(gating), inputs.problem.chosen_per_token
    outputs = _named(inputs.empty(*shape, dtype=gating.dtype), inputs.empty(*shape, dtype="int64"))
    params = core.params(topk_params, gating, *outputs.values(), pre_act=True, renormalize=True)
    core.add_workspace("topk", params, inputs)
    return core.body(lambda: core.run("topk", params), outputs)


def _triton(device: Any, _: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.topk import topk

    gating, chosen = inputs.gating, inputs.problem.chosen_per_token
    softmax: dict[str, Any] = {"use_sigmoid": False, "renormalize": True, "pre_act": True, "scaling_factor": 1.0}
    no_groups: dict[str, Any] = {"num_groups": 1, "topk_groups": 1, "scores_per_group": 1}

    def run() -> Outputs:
        weights, ids, _ = topk(device, gating, None, top_k=chosen, **softmax, **no_groups, return_scores=False)
        return _named(weights, ids)

    return Body(run)


def _torch(_: Any, __: Operation, inputs: Any) -> Body:
    def run() -> Outputs:
        weights, ids = inputs.gating.softmax(-1).topk(inputs.problem.chosen_per_token)
        return _named(weights / weights.sum(-1, keepdim=True), ids)

    return Body(run)


def _public(_: Any, __: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.routing import calculate_topk

    gating, chosen = inputs.gating, inputs.problem.chosen_per_token
    return Body(lambda: _named(*calculate_topk(gating, chosen, False, True)))


def _plain(paddle: Any, _: Operation, inputs: Any) -> Body:
    gating, chosen = inputs.gating, inputs.problem.chosen_per_token

    def run() -> Outputs:
        weights, ids = paddle.topk(paddle.nn.functional.softmax(gating), chosen)
        return _named(weights / weights.sum(axis=-1, keepdim=True), ids)

    return Body(run)


OPERATOR = Operator(
    "topk",
    {"softmax": Variant("float32", ("router_weights", "router_ids"))},
    least_bytes=_least_bytes,
    checks={"router_weights": _unlike_weights, "router_ids": _unlike_ids},
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way("torch softmax and topk", Library.TORCH, _torch, gpu_only=True),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
    ),
)
