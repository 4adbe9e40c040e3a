# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`moe_unpermute`, as Paddle has it: from a user's row map, which is not trusted, to sums and probabilities by slot."""

from __future__ import annotations

from typing import Any

import numpy as np

import paddle_moe_ops
from tests.core.operators.clean_rowmap import clean_rowmap_params

from ..check import Check
from ..core import CoreCalls
from ..device import Body, Outputs
from ..inputs import Inputs
from ..model import WORD, Bytes
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import Library, Operator, Variant, Way
from .moving import row_bytes, slot_bytes
from .routing import core_maps
from .unpermute import PUBLISHED, core_sum_params, reduce, unlike_sums


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read NHb + 4TE (row map) + 4TK + 4N, written THb + 4TK"""
    row, slots, shape = row_bytes(operation, problem), slot_bytes(problem), problem.case.shape
    rowmap = WORD * shape.num_tokens * shape.num_experts
    return Bytes(problem.routed_rows * (row + WORD) + rowmap + slots, shape.num_tokens * row + slots)


def _unlike_probs(check: Check, _: Operation, name: str, actual: Any) -> str | None:
    problem = check.inputs.problem
    return check.unlike_array(name, actual, np.where(problem.plan.slot_to_row >= 0, problem.probs, np.float32(0)))


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    maps = core_maps(inputs, ("row_to_token",))
    maps["token_rows"] = inputs.empty(*inputs.rowmap.shape)
    slot_probs = inputs.empty(*inputs.probs.shape, dtype=inputs.probs.dtype)
    values = {"row_values": inputs.row_probs, "slot_values": slot_probs}
    num_rows = inputs.problem.plan.num_rows
    clean = core.params(clean_rowmap_params, inputs.rowmap, inputs.ids, num_rows=num_rows, **values, **maps)
    core.add_workspace("clean_rowmap", clean, inputs)
    unpermute, outputs = core_sum_params(core, operation, inputs, maps["token_rows"])

    def run() -> None:
        core.run("clean_rowmap", clean)
        core.run("unpermute", unpermute)

    return core.body(run, {**outputs, "slot_probs": slot_probs})


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.rowmap import clean_rowmap, gather_slots
    from paddle_moe_ops.triton.ops.unpermute import unpermute

    num_rows = inputs.problem.plan.num_rows
    weights = inputs.row_probs if operation.variant == "weighted" else None

    def run() -> Outputs:
        maps = clean_rowmap(device, inputs.rowmap, inputs.ids, num_rows, first_duplicate_only=True)
        token_rows, _, slot_to_row = maps
        slot_probs = gather_slots(device, inputs.row_probs, slot_to_row)
        return {"out": unpermute(device, inputs.rows, token_rows, weights), "slot_probs": slot_probs}

    return Body(run)


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    rows, rowmap = inputs.rows, inputs.rowmap
    plan, weighted = inputs.problem.plan, operation.variant == "weighted"

    def run() -> Outputs:
        out, slot_probs = paddle_moe_ops.moe_unpermute(
            *(rows, rowmap, inputs.ids, inputs.row_probs, plan.num_tokens, plan.num_experts),
            using_weighted_combine=weighted,
        )
        return {"out": out, "slot_probs": slot_probs}

    return Body(run)


OPERATOR = Operator(
    "moe_unpermute",
    {
        "plain": Variant("bfloat16", ("out",), mostly_read=True),
        "weighted": Variant("bfloat16", ("out",), mostly_read=True, published=(PUBLISHED,)),
    },
    least_bytes=_least_bytes,
    probe=reduce,
    checks={"out": unlike_sums, "slot_probs": _unlike_probs},
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way(PUBLIC, Library.PADDLE, _public),
    ),
)
