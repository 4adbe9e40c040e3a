# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`route`: all maps of a routing, and no rows."""

from __future__ import annotations

from typing import Any

from tests.core.operators.row_id_map import make_row_id_map_params

from ..core import CoreCalls
from ..device import Body, Outputs, Unsupported
from ..inputs import Inputs
from ..model import WORD, Bytes
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import PLAIN, TRANSFORMER_ENGINE, Library, Operator, Variant, Way
from .moving import slot_bytes, without_padding
from .routing import MAPS, core_maps, core_route_params, plain_routing, triton_route

_ALL_MAPS = (*MAPS, "row_to_slot", "row_to_expert")
# Maps of a mask. Maps by slot differ from the oracle's: slots are in the order of the experts, not of the ids.
_MASK_MAPS = ("token_rows", "row_to_token", "row_probs", "tokens_per_expert")


def _least_bytes(_: Operation, problem: Problem) -> Bytes:
    """read 4TK (ids) + 4TK (probs), written maps 8TK + 12M, probabilities 4M, counts and offsets 8E"""
    slots = 2 * slot_bytes(problem)
    return Bytes(slots, slots + 4 * WORD * problem.plan.num_rows + 2 * WORD * problem.case.shape.num_experts)


def _core(core: CoreCalls, _: Operation, inputs: Inputs) -> Body:
    maps = core_maps(inputs, _ALL_MAPS)
    params = core_route_params(core, inputs, maps, inputs.ids, inputs.probs)
    return core.body(lambda: core.run("route_permute", params, None), maps)


def _core_row_id_map(core: CoreCalls, _: Operation, inputs: Any) -> Body:
    """TransformerEngine's map, as it makes it."""
    plan = inputs.problem.plan
    if plan.topk > plan.num_experts:
        raise Unsupported("a mask names an expert once")
    maps = core_maps(inputs, ("token_rows", "row_to_expert"))
    route = core_route_params(core, inputs, maps, inputs.mask, inputs.probs_by_expert)
    row_id_map = inputs.empty(plan.num_tokens, 2 * plan.num_experts + 1)
    make = core.params(make_row_id_map_params, maps["token_rows"], maps["row_to_expert"], row_id_map)

    def run() -> Outputs:
        core.run("route_permute", route, None)
        core.run("make_row_id_map", make)
        return {"row_id_map": row_id_map}

    return Body(run, results=lambda outputs: _token_rows(inputs, outputs), note="from a mask [T, E]")


def _token_rows(inputs: Any, outputs: Outputs) -> Outputs:
    """token_rows [T, K] out of TransformerEngine's map [T, 2E + 1], which begins with the rows, descending."""
    import torch

    row_id_map, none = outputs["row_id_map"], torch.iinfo(torch.int32).max
    width = min(inputs.problem.plan.topk, inputs.problem.plan.num_experts)
    listed = torch.arange(width, device=inputs.device) < row_id_map[:, -1:]
    ascending = torch.where(listed, row_id_map[:, :width], none).sort(1).values
    token_rows = torch.full_like(inputs.token_rows, -1)
    token_rows[:, :width] = torch.where(ascending == none, -1, ascending)
    return {"token_rows": token_rows}


def _triton(device: Any, _: Operation, inputs: Any) -> Body:
    return Body(triton_route(device, inputs, _ALL_MAPS, inputs.ids, inputs.probs))


def _triton_mask(device: Any, _: Operation, inputs: Any) -> Body:
    return Body(triton_route(device, inputs, _MASK_MAPS, inputs.mask, inputs.probs_by_expert, by_mask=True))


def _transformer_engine(engine: Any, _: Operation, inputs: Any) -> Body:
    maps = engine.maps(inputs)
    if maps.pad_offsets is not None:
        raise Unsupported("its maps know no padding")
    return Body(
        lambda: {"row_id_map": maps.map()},
        results=lambda outputs: _token_rows(inputs, outputs),
        note="from a mask [T, E]",
    )


def _public(_: Any, __: Operation, inputs: Any) -> Body:
    def run() -> Outputs:
        plan = inputs.route()
        return {name: getattr(plan, name) for name in _ALL_MAPS}

    return Body(run)


def _plain(paddle: Any, _: Operation, inputs: Any) -> Body:
    without_padding(inputs, "gathering")

    def run() -> Outputs:
        tokens, maps = plain_routing(paddle, inputs)
        row_to_expert = paddle.gather(inputs.ids.flatten(), maps["row_to_slot"])
        return {**maps, "row_to_token": tokens.astype("int32"), "row_to_expert": row_to_expert}

    return Body(run, note="no ascending list of a token's rows, no check of ids")


OPERATOR = Operator(
    "route",
    {"maps": Variant("bfloat16")},
    least_bytes=_least_bytes,
    ways=(
        Way(OURS, Library.CORE, _core),
        Way("core, row_id_map", Library.CORE_OTHERWISE, _core_row_id_map, gpu_only=True),
        Way(TRITON, Library.TRITON, _triton),
        Way("triton, from a mask", Library.TRITON, _triton_mask),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
    ),
)
