# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Our CPU operators without Paddle: the C core on NumPy arrays, whose outputs exist before the call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.core.binding import (
    Core,
    Fill,
    PermuteParams,
    QuantizeParams,
    RouteParams,
    ScaleLayout,
    UnpermuteParams,
    clean_rowmap_params,
    permute_params,
    quantize_params,
    route_params,
    sort_chunks_params,
    unpermute_backward_params,
    unpermute_params,
)
from tests.core.topk_binding import topk_params

from .cpu_arrays import FLOAT8, ArrayInputs, empty
from .device import Body, Implementation, Outputs
from .shapes import Operation
from .targets import OURS

__all__ = ["core_implementation", "two_passes_implementation"]

# What the gradients need, and what a caller reads; the row map is Paddle's own form of the first.
_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "tokens_per_expert", "expert_offsets", "overflow")
_ALL_MAPS = (*_MAPS, "row_to_slot", "row_to_expert")
_MOE_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "overflow", "rowmap")


def core_implementation(core: Core) -> Implementation:
    """ "core": every operation, on outputs whose pages are there."""

    def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
        return _BODIES[operation.op](core, operation, inputs)

    return Implementation(OURS, tuple(f"{op}:*" for op in _BODIES), prepare)


def two_passes_implementation(core: Core) -> Implementation:
    """What quantising while permuting is compared with: our own quantise, then our own permute."""

    def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
        return _quantize_then_permute(core, operation, inputs)

    return Implementation("quantise, then permute", ("permute_quantized:row", "permute_quantized:ue8m0"), prepare)


def _touched(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    array = empty(shape, dtype)
    array.view(np.uint8)[...] = 0xA5
    return array


def _body(run: Callable[[], None], outputs: Outputs) -> Body:
    def call() -> Outputs:
        run()
        return outputs

    return Body(call, note="outputs are there before the call")


def _route_params(core: Core, inputs: ArrayInputs, names: tuple[str, ...]) -> tuple[RouteParams, Outputs]:
    plan = inputs.problem.plan
    like = {name: inputs.problem.rowmap if name == "rowmap" else getattr(plan, name) for name in names}
    maps: Outputs = {name: _touched(array.shape, array.dtype) for name, array in like.items()}
    params = route_params(
        inputs.problem.ids,
        inputs.problem.probs,
        num_experts=plan.num_experts,
        padding_alignment=plan.padding_alignment,
        num_rows=plan.num_rows,
        routed_per_expert=np.empty(plan.num_experts, np.int32),
        **maps,
    )
    core.route_workspace(params)
    return params, maps


def _permute_params(
    operation: Operation, inputs: ArrayInputs, slot_to_row: NDArray, row_to_token: NDArray
) -> tuple[PermuteParams, Outputs]:
    fp8 = operation.variant == "fp8"
    x, scale = (inputs.x_fp8, inputs.scale) if fp8 else (inputs.x, None)
    outputs = {"rows": _touched((len(row_to_token), x.shape[1]), x.dtype)}
    if scale is not None:
        outputs["row_scales"] = _touched((len(row_to_token), scale.shape[1]), scale.dtype)
    fill = Fill.ALL if inputs.problem.case.fill else Fill.NONE
    params = permute_params(x, slot_to_row, row_to_token, outputs["rows"], scale, outputs.get("row_scales"), fill=fill)
    return params, outputs


def _route(core: Core, _: Operation, inputs: ArrayInputs) -> Body:
    params, maps = _route_params(core, inputs, _ALL_MAPS)
    return _body(lambda: core.route_permute(params), maps)


def _route_permute(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    names = _MOE_MAPS if operation.op == "moe_permute" else _MAPS
    route, maps = _route_params(core, inputs, names)
    permute, moved = _permute_params(operation, inputs, maps["slot_to_row"], maps["row_to_token"])
    return _body(lambda: core.route_permute(route, permute), {**maps, **moved})


def _permute(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    plan = inputs.problem.plan
    params, outputs = _permute_params(operation, inputs, plan.slot_to_row, plan.row_to_token)
    return _body(lambda: core.run("permute", params), outputs)


def _quantize_params(x: NDArray, variant: str, fill: int = Fill.ALL, *maps: NDArray) -> tuple[QuantizeParams, Outputs]:
    """Params for the rows of x, or for the rows that the maps lead to."""
    num_rows, groups = len(maps[1]) if maps else len(x), -(-x.shape[1] // 128)
    ue8m0, by_column = variant == "ue8m0", variant == "col"
    shape = (groups, -(-num_rows // 4) * 4) if by_column else (num_rows, -(-groups // 4) if ue8m0 else groups)
    outputs = {
        "codes": _touched((num_rows, x.shape[1]), FLOAT8),
        "scales": _touched(shape, np.dtype(np.int32 if ue8m0 else np.float32)),
    }
    layout = ScaleLayout.COLUMN if by_column else ScaleLayout.ROW
    params = quantize_params(x, outputs["codes"], outputs["scales"], *maps, layout=layout, ue8m0=ue8m0, fill=fill)
    return params, outputs


def _permute_quantized(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    plan, fill = inputs.problem.plan, Fill.ALL if inputs.problem.case.fill else Fill.NONE
    params, outputs = _quantize_params(inputs.x, operation.variant, fill, plan.slot_to_row, plan.row_to_token)
    return _body(lambda: core.run("quantize", params), outputs)


def _quantize_then_permute(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    plan, fill = inputs.problem.plan, Fill.ALL if inputs.problem.case.fill else Fill.NONE
    quantize, tokens = _quantize_params(inputs.x, operation.variant)
    codes = _touched((plan.num_rows, inputs.x.shape[1]), FLOAT8)
    scales = _touched((plan.num_rows, tokens["scales"].shape[1]), tokens["scales"].dtype)
    maps = plan.slot_to_row, plan.row_to_token
    permute = permute_params(tokens["codes"], *maps, codes, tokens["scales"], scales, fill=fill)

    def run() -> None:
        core.run("quantize", quantize)
        core.run("permute", permute)

    return _body(run, {"codes": codes, "scales": scales})


def _unpermute_params(
    operation: Operation, inputs: ArrayInputs, token_rows: NDArray
) -> tuple[UnpermuteParams, Outputs]:
    out = _touched(inputs.d_out.shape, inputs.d_out.dtype)
    weights = inputs.row_probs if operation.variant == "weighted" else None
    return unpermute_params(inputs.rows, token_rows, out, weights), {"out": out}


def _unpermute(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    params, outputs = _unpermute_params(operation, inputs, inputs.problem.plan.token_rows)
    return _body(lambda: core.run("unpermute", params), outputs)


def _moe_unpermute(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    """From a user's row map, which is not trusted, to the sums and the probabilities by slot."""
    plan, ids, rowmap = inputs.problem.plan, inputs.problem.ids, inputs.problem.rowmap
    token_rows = _touched(rowmap.shape, rowmap.dtype)
    slot_probs = _touched(ids.shape, np.dtype(np.float32))
    clean = clean_rowmap_params(
        rowmap,
        ids,
        num_rows=plan.num_rows,
        token_rows=token_rows,
        row_to_token=np.empty(plan.num_rows, np.int32),
        row_values=inputs.row_probs,
        slot_values=slot_probs,
    )
    unpermute, outputs = _unpermute_params(operation, inputs, token_rows)

    def run() -> None:
        core.run("clean_rowmap", clean)
        core.run("unpermute", unpermute)

    return _body(run, {**outputs, "slot_probs": slot_probs})


def _unpermute_backward(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    plan, variant = inputs.problem.plan, operation.variant
    outputs: Outputs = {}
    if variant != "dprob":
        outputs["d_rows"] = _touched(inputs.rows.shape, inputs.rows.dtype)
    if variant in ("weighted", "dprob"):
        outputs["d_weights"] = _touched((plan.num_rows,), np.dtype(np.float32))
    params = unpermute_backward_params(
        inputs.d_out,
        plan.token_rows,
        plan.row_to_token,
        outputs.get("d_rows"),
        inputs.rows if "d_weights" in outputs else None,
        None if variant == "plain" else inputs.row_probs,
        d_weights=outputs.get("d_weights"),
    )
    return _body(lambda: core.run("unpermute_backward", params), outputs)


def _sort_chunks(core: Core, operation: Operation, inputs: ArrayInputs) -> Body:
    forward, problem = operation.variant == "forward", inputs.problem
    outputs: Outputs = {"sorted_rows": _touched(inputs.rows.shape, inputs.rows.dtype)}
    if forward:
        outputs["source_to_dest"] = _touched((problem.plan.num_rows,), np.dtype(np.int32))
    params = sort_chunks_params(
        inputs.rows,
        problem.chunk_sizes,
        problem.chunk_order,
        outputs["sorted_rows"],
        source_to_dest=outputs.get("source_to_dest"),
        inverse=not forward,
    )
    return _body(lambda: core.run("sort_chunks", params), outputs)


def _topk(core: Core, _: Operation, inputs: ArrayInputs) -> Body:
    gating = inputs.problem.gating
    shape = len(gating), inputs.problem.chosen_per_token
    outputs: Outputs = {
        "router_weights": _touched(shape, gating.dtype),
        "router_ids": _touched(shape, np.dtype(np.int64)),
    }
    params = topk_params(gating, *outputs.values(), pre_act=True, renormalize=True)
    return _body(lambda: core.run("topk", params), outputs)


_BODIES: dict[str, Callable[[Core, Operation, ArrayInputs], Body]] = {
    "route": _route,
    "route_permute": _route_permute,
    "permute": _permute,
    "moe_permute": _route_permute,
    "permute_quantized": _permute_quantized,
    "unpermute": _unpermute,
    "moe_unpermute": _moe_unpermute,
    "unpermute_backward": _unpermute_backward,
    "sort_chunks": _sort_chunks,
    "topk": _topk,
}
