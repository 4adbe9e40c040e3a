# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers that the routing operators share; some of these permute rows in the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.operators.route import RouteParams, route_params

from ..core import CoreCalls
from ..device import Body, Outputs
from ..inputs import Inputs
from ..model import WORD, Bytes
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, TRITON
from .base import Library, Way
from .moving import core_permute_params, permuted_bytes, slot_bytes, sources, triton_move

# Outputs of the routing operators, for the gradients and for the caller.
MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "tokens_per_expert", "expert_offsets", "overflow")


def routed_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read T(Hb + 4S) + 8TK (ids, probs), written M(Hb + 4S) + maps 8TK + 4M, probabilities 4M, 8E"""
    rows, slots = permuted_bytes(operation, problem), slot_bytes(problem)
    maps = 2 * slots + 2 * WORD * problem.plan.num_rows + 2 * WORD * problem.case.shape.num_experts
    return Bytes(rows.read + slots, rows.written + maps)


def core_maps(inputs: Inputs, names: tuple[str, ...]) -> Outputs:
    arrays = {name: inputs.problem.array(name) for name in names}
    return {name: inputs.empty(*array.shape, dtype=array.dtype.name) for name, array in arrays.items()}


def core_route_params(core: CoreCalls, inputs: Inputs, maps: Outputs, routing: Any, probs: Any) -> RouteParams:
    plan = inputs.problem.plan
    params = core.params(
        route_params,
        routing,
        probs,
        num_experts=plan.num_experts,
        topk=plan.topk,
        padding_alignment=plan.padding_alignment,
        num_rows=plan.num_rows,
        routed_per_expert=inputs.empty(plan.num_experts, dtype="int32"),
        **maps,
    )
    core.add_workspace("route", params, inputs)
    return params


def triton_route(
    device: Any, inputs: Any, names: tuple[str, ...], routing: Any, probs: Any, *, by_mask: bool = False
) -> Callable[[], Outputs]:
    """A call that enqueues making these maps."""
    from paddle_moe_ops.triton.ops.route import Routing, route

    plan = inputs.problem.plan
    sizes = plan.num_tokens, plan.topk, plan.num_experts, plan.padding_alignment
    problem = Routing(routing, probs, *sizes, by_mask, True)

    def run() -> Outputs:
        maps = route(device, problem, plan.num_rows, with_rowmap="rowmap" in names)
        return {name: getattr(maps, name) for name in names}

    return run


def ways_in_one_call(names: tuple[str, ...]) -> tuple[Way, ...]:
    """The core and Triton, which give these maps and the rows in one call."""

    def core_way(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
        maps = core_maps(inputs, names)
        route = core_route_params(core, inputs, maps, inputs.ids, inputs.probs)
        source = sources(operation, inputs)
        permute, moved = core_permute_params(core, inputs, source, maps["slot_to_row"], maps["row_to_token"])
        return core.body(lambda: core.run("route_permute", route, permute), {**maps, **moved})

    def triton_way(device: Any, operation: Operation, inputs: Any) -> Body:
        route = triton_route(device, inputs, names, inputs.ids, inputs.probs)
        move = triton_move(device, operation, inputs)

        def run() -> Outputs:
            maps = route()
            return {**maps, **move(maps)}

        return Body(run)

    return Way(OURS, Library.CORE, core_way), Way(TRITON, Library.TRITON, triton_way)


def plain_routing(paddle: Any, inputs: Any) -> tuple[Any, Outputs]:
    """The tokens of the rows, with the inverse map, probabilities and counts.

    Unassigned slots sort after the last expert and are cut off.
    """
    plan = inputs.problem.plan
    ids = inputs.ids.flatten()
    experts = paddle.where(ids < 0, paddle.full_like(ids, plan.num_experts), ids) if inputs.has_gaps else ids
    order = paddle.argsort(experts, stable=True)[: plan.num_rows]
    nowhere = paddle.full([plan.num_tokens * plan.topk], -1, order.dtype)
    slots = paddle.scatter(nowhere, order, paddle.arange(plan.num_rows, dtype=order.dtype))
    return order // plan.topk, {
        "row_to_slot": order.astype("int32"),
        "slot_to_row": slots.astype("int32").reshape(inputs.ids.shape),
        "row_probs": paddle.gather(inputs.probs.flatten(), order),
        "tokens_per_expert": paddle.bincount(experts, minlength=plan.num_experts)[: plan.num_experts].astype("int32"),
    }
