# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`route` and `permute` in one call."""

from __future__ import annotations

from typing import Any

import paddle_moe_ops

from ..device import Body, Outputs
from ..inputs import Inputs
from ..shapes import Operation
from ..targets import PUBLIC
from . import moe_permute
from .base import NUMPY, PLAIN, TORCH, TRANSFORMER_ENGINE, Library, Operator, Way
from .moving import BF16, FP8, MOVED, byte_sources, fanout, float8_again, sources, without_padding
from .routing import MAPS, plain_routing, routed_bytes, ways_in_one_call


def _torch(torch: Any, operation: Operation, inputs: Any) -> Body:
    without_padding(inputs, "indexing")
    source, plan = byte_sources(operation, inputs, torch.uint8), inputs.problem.plan

    def run() -> Outputs:
        ids = inputs.ids.reshape(-1)
        # Unassigned slots sort after the last expert and are cut off.
        order = torch.where(ids < 0, plan.num_experts, ids).argsort(stable=True)[: plan.num_rows]
        tokens = order // plan.topk
        moved = {name: each.index_select(0, tokens) for name, each in source.items()}
        return {**moved, "row_probs": inputs.probs.reshape(-1).index_select(0, order)}

    note = "stable argsort and gather; no map from slots to rows, no counts"
    return Body(run, note=note, results=float8_again(torch))


def _transformer_engine(engine: Any, operation: Operation, inputs: Any) -> Body:
    maps = engine.maps(inputs)
    source = byte_sources(operation, inputs, engine.torch.uint8)
    return Body(
        lambda: maps.permute(maps.map(), maps.probs, *source.values()),
        results=float8_again(engine.torch),
        note="from a mask [T, E]",
    )


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    source, fill = sources(operation, inputs), inputs.problem.fill_padding
    x, scale = source["rows"], source.get("row_scales")

    def run() -> Outputs:
        plan = inputs.route()
        moved = zip(source, paddle_moe_ops.permute(x, plan, scale, fill_padding=fill), strict=False)
        return {**dict(moved), "token_rows": plan.token_rows, "row_probs": plan.row_probs}

    return Body(run)


def _plain(paddle: Any, operation: Operation, inputs: Any) -> Body:
    without_padding(inputs, "gathering")
    source = byte_sources(operation, inputs, paddle.int8)

    def run() -> Outputs:
        tokens, maps = plain_routing(paddle, inputs)
        return {**{name: paddle.gather(each, tokens) for name, each in source.items()}, **maps}

    note = "argsort, scatter, bincount and gather; no check of ids"
    return Body(run, results=float8_again(paddle), note=note)


def _numpy(numpy: Any, operation: Operation, inputs: Inputs) -> Body:
    without_padding(inputs, "taking")
    source, plan = sources(operation, inputs), inputs.problem.plan
    ids, probs = inputs.ids.reshape(-1), inputs.probs.reshape(-1)

    def run() -> Outputs:
        order = numpy.argsort(numpy.where(ids < 0, plan.num_experts, ids), kind="stable")[: plan.num_rows]
        moved = {name: numpy.take(each, order // plan.topk, axis=0) for name, each in source.items()}
        return {**moved, "row_probs": numpy.take(probs, order)}

    return Body(run, note="argsort and take; no map from slots to rows, no counts")


OPERATOR = Operator(
    "route_permute",
    # Paddle's moe_permute makes its maps as well, so its times are compared with these, too.
    {
        "bf16": BF16._replace(picture="Route and permute, with probabilities", published=(moe_permute.PUBLISHED_BF16,)),
        "fp8": FP8._replace(published=(moe_permute.PUBLISHED_FP8,)),
    },
    least_bytes=routed_bytes,
    probe=fanout,
    checks=MOVED,
    ways=(
        *ways_in_one_call(MAPS),
        Way(TORCH, Library.TORCH, _torch),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
        Way(NUMPY, Library.NUMPY, _numpy),
    ),
)
