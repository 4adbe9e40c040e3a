# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`unpermute`: the sums of each token's rows, plain or weighted."""

from __future__ import annotations

from typing import Any

import ml_dtypes

import paddle_moe_ops
from paddle_moe_ops.testing.tolerances import dtype_tols
from tests.core.operators.unpermute import UnpermuteParams, unpermute_params

from ..check import Check
from ..core import CoreCalls
from ..device import BFLOAT16_SUMS, BITS, FLOAT32_SUMS, Body, Outputs, Unsupported
from ..inputs import Inputs
from ..model import WORD, Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import PADDLE, PLAIN, TORCH, TRANSFORMER_ENGINE, Library, Operator, Published, Variant, Way
from .moving import row_bytes, slot_bytes, without_padding

_BFLOAT16_ROUNDOFF = 2.0**-8
_NOT_EVERY_SLOT = "gathering all slots needs every slot assigned"

# Paddle's kernel reads a row map [T, E], so its times are compared with ours of both operators.
PUBLISHED = Published(
    PADDLE,
    {
        "tileops-32": 28.4,
        "tileops-128": 30.3,
        "tileops-512": 38.8,
        "tileops-4096": 160.3,
        "dsv3": 265.6,
        "ernie-300b": 588.5,
        "ernie-21b": 172.8,
        "paddle-production": 394.3,
    },
)


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read NHb + 4TK (map), and weighted 4N; written THb"""
    row, routed = row_bytes(operation, problem), problem.routed_rows
    weights = WORD * routed if operation.variant == "weighted" else 0
    return Bytes(routed * row + slot_bytes(problem) + weights, problem.case.shape.num_tokens * row)


def reduce(operation: Operation, problem: Problem) -> Work:
    """All rows are read, and a row of each token is written."""
    row = row_bytes(operation, problem)
    return Work(Kind.REDUCE, problem.case.shape.num_tokens * row, problem.routed_rows * row)


def unlike_sums(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    """Compare sums, bit for bit or within the tolerance of another order."""
    inputs, weighted = check.inputs, operation.variant == "weighted"
    wrong = check.unlike(name, actual, inputs.rows.dtype, inputs.d_out.shape)
    if wrong:
        return wrong
    topk = inputs.problem.case.shape.topk
    tolerance = dtype_tols(ml_dtypes.bfloat16, topk)
    if check.exactness == BFLOAT16_SUMS:
        tolerance = tolerance._replace(of_magnitude=2 * (topk + 1) * _BFLOAT16_ROUNDOFF)
    tokens, hidden = actual.shape
    for part in check.chunks(tokens, 4 * hidden):
        exact, magnitude = check.sums(part, weighted)
        if check.exactness == BITS:
            found = check.unequal(name, actual[part], exact, part.start)
        else:
            found = check.too_far(name, actual[part], exact, magnitude, tolerance, part.start)
        if found:
            return found
    return check.unlike_sampled_sums(actual, weighted) if check.exactness == BITS else None


def core_sum_params(
    core: CoreCalls, operation: Operation, inputs: Inputs, token_rows: Any
) -> tuple[UnpermuteParams, Outputs]:
    out = inputs.empty(*inputs.d_out.shape, dtype=inputs.d_out.dtype)
    weights = inputs.row_probs if operation.variant == "weighted" else None
    return core.params(unpermute_params, inputs.rows, token_rows, out, weights), {"out": out}


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    params, outputs = core_sum_params(core, operation, inputs, inputs.token_rows)
    return core.body(lambda: core.run("unpermute", params), outputs)


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.unpermute import unpermute

    weights = inputs.row_probs if operation.variant == "weighted" else None
    return Body(lambda: {"out": unpermute(device, inputs.rows, inputs.token_rows, weights)})


def _torch(torch: Any, operation: Operation, inputs: Any) -> Body:
    without_padding(inputs, "indexing")
    plan, hidden = inputs.problem.plan, inputs.problem.case.shape.hidden
    if inputs.problem.routed_rows != plan.num_tokens * plan.topk:
        raise Unsupported(_NOT_EVERY_SLOT)
    index = inputs.slot_to_row.reshape(-1).long()
    shape = (plan.num_tokens, plan.topk, hidden)
    weights = inputs.probs[:, :, None]

    def run() -> Outputs:
        gathered = inputs.rows.index_select(0, index).view(shape)
        if operation.variant == "plain":
            return {"out": gathered.sum(1)}
        return {"out": (gathered * weights).sum(1).to(torch.bfloat16)}

    return Body(run, FLOAT32_SUMS)


def _torch_index_add(torch: Any, operation: Operation, inputs: Any) -> Body:
    """Adds into bfloat16 with atomics."""
    without_padding(inputs, "indexing")
    index, weights = inputs.row_to_token, inputs.row_probs[:, None]

    def run() -> Outputs:
        rows = inputs.rows if operation.variant == "plain" else (inputs.rows * weights).to(torch.bfloat16)
        return {"out": torch.zeros_like(inputs.d_out).index_add_(0, index, rows)}

    return Body(run, BFLOAT16_SUMS, note="not deterministic")


def _transformer_engine(engine: Any, operation: Operation, inputs: Any) -> Body:
    maps = engine.maps(inputs)
    row_id_map = maps.map()
    weights = maps.probs if operation.variant == "weighted" else None

    def run() -> Outputs:
        sums, _ = engine.functions.unpermute_with_mask_map(
            inputs.rows, row_id_map, weights, None, maps.pad_offsets, maps.tokens, maps.experts, maps.hidden
        )
        return {"out": sums}

    return Body(run, FLOAT32_SUMS, note="sums by descending expert")


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    rows, plan = inputs.rows, inputs.plan
    weights = inputs.row_probs if operation.variant == "weighted" else None
    return Body(lambda: {"out": paddle_moe_ops.unpermute(rows, plan, weights)})


def _plain(paddle: Any, operation: Operation, inputs: Any) -> Body:
    without_padding(inputs, "gathering")
    if inputs.has_gaps:
        raise Unsupported(_NOT_EVERY_SLOT)
    rows, plan = inputs.rows, inputs.problem.plan
    by_rank = [places.contiguous() for places in inputs.slot_to_row.unbind(1)]
    index, weights = inputs.slot_to_row.flatten(), inputs.probs.unsqueeze(1)

    def run_plain() -> Outputs:
        return {"out": paddle.add_n([paddle.gather(rows, places) for places in by_rank])}

    def run_weighted() -> Outputs:
        gathered = paddle.gather(rows, index).astype("float32").reshape([plan.num_tokens, plan.topk, -1])
        return {"out": paddle.bmm(weights, gathered).squeeze(1).astype("bfloat16")}

    if operation.variant == "weighted":
        return Body(run_weighted, FLOAT32_SUMS, note="gather, cast, bmm, cast")
    return Body(run_plain, BFLOAT16_SUMS, note="add_n of gathers")


OPERATOR = Operator(
    "unpermute",
    {
        "plain": Variant("bfloat16", ("out",), mostly_read=True),
        "weighted": Variant(
            "bfloat16", ("out",), mostly_read=True, picture="Unpermute, weighted", published=(PUBLISHED,)
        ),
    },
    least_bytes=_least_bytes,
    probe=reduce,
    checks={"out": unlike_sums},
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way(TORCH, Library.TORCH, _torch),
        Way("torch index_add", Library.TORCH, _torch_index_add, gpu_only=True),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
    ),
)
