# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`moe_permute`, as Paddle has it: `route` and `permute` in one call, which gives the row map [T, E]."""

from __future__ import annotations

from typing import Any

import paddle_moe_ops

from ..device import Body, Outputs
from ..model import WORD, Bytes
from ..problem import Problem
from ..shapes import Operation
from ..targets import PUBLIC
from .base import PADDLE, PADDLE_STATIC, Library, Operator, Published, Way
from .moving import BF16, FP8, MOVED, fanout, sources
from .routing import routed_bytes, ways_in_one_call

_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "overflow", "rowmap")

PUBLISHED_BF16 = Published(
    PADDLE,
    {
        "tileops-32": 78.7,
        "tileops-128": 81.9,
        "tileops-512": 83.3,
        "tileops-4096": 171.0,
        "dsv3": 174.5,
        "ernie-300b": 703.6,
        "ernie-21b": 188.6,
        "paddle-production": 492.8,
    },
)
PUBLISHED_FP8 = Published(
    PADDLE,
    {
        "tileops-32": 53.3,
        "tileops-128": 58.0,
        "tileops-512": 58.8,
        "tileops-4096": 103.3,
        "dsv3": 107.0,
        "ernie-300b": 381.0,
        "ernie-21b": 118.7,
        "paddle-production": 315.1,
    },
)


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """as `route_permute`, and the row map 4TE is written"""
    routed = routed_bytes(operation, problem)
    rowmap = WORD * problem.case.shape.num_tokens * problem.case.shape.num_experts
    return routed._replace(written=routed.written + rowmap)


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    source, plan, fill = sources(operation, inputs), inputs.problem.plan, inputs.problem.fill_padding
    x, scale = source["rows"], source.get("row_scales")
    sizes = (plan.num_experts, None, plan.padding_alignment)

    def run() -> Outputs:
        rows, rowmap, row_probs, scales = paddle_moe_ops.moe_permute(
            x, scale, inputs.ids, inputs.probs, *sizes, fill_padding=fill
        )
        return {**dict(zip(source, (rows, scales), strict=False)), "rowmap": rowmap, "row_probs": row_probs}

    return Body(run)


OPERATOR = Operator(
    "moe_permute",
    {
        "bf16": BF16._replace(
            published=(PUBLISHED_BF16, Published(PADDLE_STATIC, {"paddle-production": 615.0})),
        ),
        "fp8": FP8._replace(
            published=(PUBLISHED_FP8, Published(PADDLE_STATIC, {"paddle-production": 437.0})),
        ),
    },
    least_bytes=_least_bytes,
    probe=fanout,
    checks=MOVED,
    ways=(*ways_in_one_call(_MAPS), Way(PUBLIC, Library.PADDLE, _public)),
)
