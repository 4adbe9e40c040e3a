# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernels as the benchmark calls them. Outputs and workspaces are allocated in the call, as by every peer;
inside a CUDA graph that costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paddle_moe_ops.triton.permute import permute
from paddle_moe_ops.triton.quantize import quantize
from paddle_moe_ops.triton.route import Routing, route
from paddle_moe_ops.triton.rowmap import clean_rowmap, gather_slots
from paddle_moe_ops.triton.sort_chunks import chunk_map, sort_chunks, sort_chunks_backward
from paddle_moe_ops.triton.topk import topk
from paddle_moe_ops.triton.unpermute import unpermute
from paddle_moe_ops.triton.unpermute_backward import unpermute_backward

from .device import Body, Implementation, Outputs
from .shapes import Operation
from .targets import TRITON
from .tensors import TensorInputs
from .torch_device import TorchDevice

__all__ = ["triton_implementations"]

Calls = dict[str, Callable[[TorchDevice, Operation, TensorInputs], Outputs]]

# What is compared with the oracle's, as for the core.
_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "tokens_per_expert", "expert_offsets", "overflow")
_ALL_MAPS = (*_MAPS, "row_to_slot", "row_to_expert")
_PADDLE_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "overflow", "rowmap")


def triton_implementations() -> list[Implementation]:
    """ "triton": every operation by the kernels of `paddle_moe_ops.triton`. "triton, from a mask": as TransformerEngine
    routes; "triton, quantise, then permute" and the other way round: what quantising while permuting is compared with.
    """
    device = TorchDevice()

    def of(name: str, calls: Calls, *operations: str) -> Implementation:
        def prepare(operation: Operation, inputs: TensorInputs) -> Body:
            run = calls[operation.op]
            return Body(lambda: run(device, operation, inputs))

        return Implementation(name, operations or tuple(f"{op}:*" for op in calls), prepare)

    return [
        of(TRITON, _CALLS),
        of("triton, from a mask", {"route": _route_mask}, "route:maps"),
        of(
            "triton, quantise, then permute",
            {"permute_quantized": _quantize_then_permute},
            *("permute_quantized:row", "permute_quantized:ue8m0"),
        ),
    ]


def _maps(device: TorchDevice, inputs: TensorInputs, names: tuple[str, ...]) -> Outputs:
    plan = inputs.problem.plan
    sizes = plan.num_tokens, plan.topk, plan.num_experts, plan.padding_alignment
    problem = Routing(inputs.ids, inputs.probs, *sizes, False, True)
    maps = route(device, problem, plan.num_rows, with_rowmap="rowmap" in names)
    return {name: getattr(maps, name) for name in names}


def _moved(device: TorchDevice, operation: Operation, inputs: TensorInputs, maps: Outputs) -> Outputs:
    fp8 = operation.variant == "fp8"
    fill = "all" if inputs.problem.case.fill else "none"
    source, scale = (inputs.x_fp8, inputs.scale) if fp8 else (inputs.x, None)
    rows, scales = permute(device, source, scale, maps["token_rows"], maps["row_to_token"], fill)
    return {"rows": rows, "row_scales": scales} if fp8 else {"rows": rows}


def _route(device: TorchDevice, _: Operation, inputs: TensorInputs) -> Outputs:
    return _maps(device, inputs, _ALL_MAPS)


def _route_mask(device: TorchDevice, _: Operation, inputs: TensorInputs) -> Outputs:
    plan = inputs.problem.plan
    sizes = plan.num_tokens, plan.topk, plan.num_experts, plan.padding_alignment
    maps = route(device, Routing(inputs.mask, inputs.probs_by_expert, *sizes, True, True), plan.num_rows)
    # In the order of the experts, not of the ids: what stands by slot differs from the oracle's.
    return {name: getattr(maps, name) for name in ("token_rows", "row_to_token", "row_probs", "tokens_per_expert")}


def _route_permute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    maps = _maps(device, inputs, _MAPS)
    return {**maps, **_moved(device, operation, inputs, maps)}


def _moe_permute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    maps = _maps(device, inputs, _PADDLE_MAPS)
    return {**maps, **_moved(device, operation, inputs, maps)}


def _permute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    maps = {"token_rows": inputs.token_rows, "row_to_token": inputs.row_to_token}
    return _moved(device, operation, inputs, maps)


def _permute_quantized(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    codes, scales = quantize(
        device,
        inputs.x,
        inputs.token_rows,
        inputs.row_to_token,
        ue8m0=operation.variant == "ue8m0",
        scale_layout="col" if operation.variant == "col" else "row",
        amax_min=1e-4,
        fill_padding="all" if inputs.problem.case.fill else "none",
    )
    return {"codes": codes.view(torch.uint8), "scales": scales}


def _quantize_then_permute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    codes, scales = quantize(
        device, inputs.x, ue8m0=operation.variant == "ue8m0", scale_layout="row", amax_min=1e-4, fill_padding="none"
    )
    fill = "all" if inputs.problem.case.fill else "none"
    rows, row_scales = permute(device, codes, scales, inputs.token_rows, inputs.row_to_token, fill)
    return {"codes": rows.view(torch.uint8), "scales": row_scales}


def _unpermute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    weights = inputs.row_probs if operation.variant == "weighted" else None
    return {"out": unpermute(device, inputs.rows, inputs.token_rows, weights)}


def _moe_unpermute(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    num_rows = inputs.problem.plan.num_rows
    token_rows, _, slot_to_row = clean_rowmap(device, inputs.rowmap, inputs.ids, num_rows, first_duplicate_only=True)
    weights = inputs.row_probs if operation.variant == "weighted" else None
    slot_probs = gather_slots(device, inputs.row_probs, slot_to_row)
    return {"out": unpermute(device, inputs.rows, token_rows, weights), "slot_probs": slot_probs}


def _unpermute_backward(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    need_weights = operation.variant in ("weighted", "dprob")
    d_rows, d_weights = unpermute_backward(
        device,
        inputs.d_out,
        inputs.token_rows,
        inputs.row_to_token,
        inputs.rows if need_weights else None,
        inputs.row_probs if operation.variant != "plain" else None,
        need_rows=operation.variant != "dprob",
    )
    return {name: each for name, each in (("d_rows", d_rows), ("d_weights", d_weights)) if each is not None}


def _sort_chunks(device: TorchDevice, operation: Operation, inputs: TensorInputs) -> Outputs:
    if operation.variant == "backward":
        return {"sorted_rows": sort_chunks_backward(device, inputs.rows, inputs.source_to_dest)}
    source_to_dest = chunk_map(device, inputs.chunk_sizes, inputs.chunk_order, len(inputs.rows))
    return {"sorted_rows": sort_chunks(device, inputs.rows, None, source_to_dest)[0], "source_to_dest": source_to_dest}


def _topk(device: TorchDevice, _: Operation, inputs: TensorInputs) -> Outputs:
    weights, ids, _scores = topk(
        device,
        inputs.gating,
        None,
        top_k=inputs.problem.chosen_per_token,
        use_sigmoid=False,
        renormalize=True,
        pre_act=True,
        num_groups=1,
        topk_groups=1,
        scores_per_group=1,
        scaling_factor=1.0,
        return_scores=False,
    )
    return {"router_weights": weights, "router_ids": ids}


_CALLS: Calls = {
    "route": _route,
    "route_permute": _route_permute,
    "permute": _permute,
    "moe_permute": _moe_permute,
    "permute_quantized": _permute_quantized,
    "unpermute": _unpermute,
    "moe_unpermute": _moe_unpermute,
    "unpermute_backward": _unpermute_backward,
    "sort_chunks": _sort_chunks,
    "topk": _topk,
}
