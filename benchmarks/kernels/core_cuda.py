# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Our CUDA operators as the benchmark calls them: the C core's structs with the addresses of PyTorch tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.core.binding import (
    DTYPES,
    CleanRowmapParams,
    Fill,
    Params,
    PermuteParams,
    QuantizeParams,
    RouteParams,
    RoutingKind,
    RowIdMapParams,
    ScaleLayout,
    SortChunksParams,
    UnpermuteBackwardParams,
    UnpermuteParams,
)
from tests.core.cuda_entries import CudaEntries
from tests.core.structs import TopkParams

from .device import Body, Implementation, Outputs, Unsupported
from .shapes import Operation
from .tensors import TensorInputs, to_numpy

__all__ = ["CudaCore", "core_implementation", "row_id_map_implementation", "two_passes_implementations"]

_FLOAT8 = DTYPES[np.dtype(ml_dtypes.float8_e4m3fn)]
# What the gradients need, and what a caller reads; the row map is Paddle's own form of the first.
_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "tokens_per_expert", "expert_offsets", "overflow")
_ALL_MAPS = (*_MAPS, "row_to_slot", "row_to_expert")


class CudaCore(CudaEntries):
    """The CUDA entries on the current stream of PyTorch."""

    def call(self, operator: str, params: Params) -> None:
        """Enqueue an operator on the current stream."""
        self.run(operator, params, torch.cuda.current_stream().cuda_stream)

    def route_permute(self, route: RouteParams, permute: PermuteParams | None = None) -> None:
        """Enqueue the routing and, if asked, the moving of its rows."""
        moved = None if permute is None else ctypes.byref(permute)
        self._check(self.entry("route_permute")(ctypes.byref(route), moved, torch.cuda.current_stream().cuda_stream))


def core_implementation(core: CudaCore) -> Implementation:
    """ "core": every operation by the core's own kernels, with outputs allocated beforehand."""

    def prepare(operation: Operation, inputs: TensorInputs) -> Body:
        return _BODIES[operation.op](core, operation, inputs)

    return Implementation("core", tuple(f"{op}:*" for op in _BODIES), prepare)


def two_passes_implementations(core: CudaCore) -> list[Implementation]:
    """What quantising while permuting is compared with: our own operators, one after the other."""

    def of(name: str, make: Callable[[CudaCore, Operation, TensorInputs], Body], *operations: str) -> Implementation:
        return Implementation(name, operations, lambda operation, inputs: make(core, operation, inputs))

    rows = "permute_quantized:row", "permute_quantized:ue8m0"
    return [
        of("quantise, then permute", _quantize_then_permute, *rows),
        of("permute, then quantise", _permute_then_quantize, "permute_quantized:row"),
    ]


def row_id_map_implementation(core: CudaCore) -> Implementation:
    """What TransformerEngine's map from a mask is compared with: ours, in the same form."""
    return Implementation("core, row_id_map", ("route:maps",), lambda _, inputs: _row_id_map(core, inputs))


def _point(params: Any, **tensors: torch.Tensor | None) -> Any:
    """Enter the addresses of tensors into a struct, which keeps the tensors alive."""
    types: dict[str, Any] = {name: kind for name, kind, *_ in type(params)._fields_}
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(params, name, ctypes.cast(tensor.data_ptr(), types[name]))
            params.arrays[name] = tensor
    return params


def _point_at_workspace(params: Any, size_of: Callable[..., int], inputs: TensorInputs) -> Any:
    """Give a struct its workspace; what stands there before the call must not matter."""
    size = size_of(ctypes.byref(params))
    params.workspace_bytes = size
    return _point(params, workspace=torch.full((max(size, 1),), 0xA5, dtype=torch.uint8, device=inputs.device))


def _dtype_code(tensor: torch.Tensor) -> int:
    return DTYPES[to_numpy(tensor[:0]).dtype]


def _maps(inputs: TensorInputs, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    plan = inputs.problem.plan
    shapes = {
        "slot_to_row": (plan.num_tokens, plan.topk),
        "token_rows": (plan.num_tokens, plan.topk),
        "tokens_per_expert": (plan.num_experts,),
        "expert_offsets": (plan.num_experts + 1,),
        "overflow": (1,),
        "rowmap": (plan.num_tokens, plan.num_experts),
    }
    return {
        name: inputs.empty(
            *shapes.get(name, (plan.num_rows,)), dtype=torch.float32 if name == "row_probs" else torch.int32
        )
        for name in names
    }


def _route_params(
    core: CudaCore, inputs: TensorInputs, maps: dict[str, torch.Tensor], *, by_mask: bool = False
) -> RouteParams:
    plan = inputs.problem.plan
    routing, probs = (inputs.mask, inputs.probs_by_expert) if by_mask else (inputs.ids, inputs.probs)
    params = RouteParams(
        num_tokens=plan.num_tokens,
        topk=plan.topk,
        num_experts=plan.num_experts,
        padding_alignment=plan.padding_alignment,
        num_rows=plan.num_rows,
        routing_kind=RoutingKind.MASK if by_mask else RoutingKind.IDS32,
    )
    counts = inputs.empty(plan.num_experts)
    _point(params, routing=routing, probs=probs, routed_per_expert=counts, **maps)
    return _point_at_workspace(params, core.library.pmo_route_cuda_workspace_bytes, inputs)


def _permute_params(
    operation: Operation, inputs: TensorInputs, slot_to_row: torch.Tensor, row_to_token: torch.Tensor
) -> tuple[PermuteParams, Outputs]:
    plan, fp8 = inputs.problem.plan, operation.variant == "fp8"
    x = inputs.x_fp8 if fp8 else inputs.x
    scale = inputs.scale if fp8 else None
    outputs = {"rows": inputs.empty(plan.num_rows, x.shape[1], dtype=x.dtype)}
    if scale is not None:
        outputs["row_scales"] = inputs.empty(plan.num_rows, scale.shape[1], dtype=scale.dtype)
    params = PermuteParams(
        num_tokens=plan.num_tokens,
        topk=plan.topk,
        num_rows=plan.num_rows,
        hidden=x.shape[1],
        scale_cols=0 if scale is None else scale.shape[1],
        x_row_stride=x.stride(0),
        scale_row_stride=0 if scale is None else scale.stride(0),
        dtype=_dtype_code(x),
        scale_dtype=0 if scale is None else _dtype_code(scale),
        fill=Fill.ALL if inputs.problem.case.fill else Fill.NONE,
    )
    maps = {"slot_to_row": slot_to_row, "row_to_token": row_to_token}
    return _point(params, x=x, scale=scale, **maps, **outputs), outputs


def _body(run: Callable[[], None], outputs: Outputs) -> Body:
    def call() -> Outputs:
        run()
        return outputs

    return Body(call)


def _route(core: CudaCore, _: Operation, inputs: TensorInputs) -> Body:
    maps = _maps(inputs, _ALL_MAPS)
    params = _route_params(core, inputs, maps)
    return _body(lambda: core.route_permute(params, None), maps)


def _row_id_map(core: CudaCore, inputs: TensorInputs) -> Body:
    plan = inputs.problem.plan
    maps = _maps(inputs, ("token_rows", "row_to_expert"))
    route = _route_params(core, inputs, maps, by_mask=True)
    row_id_map = inputs.empty(plan.num_tokens, 2 * plan.num_experts + 1)
    sizes = {name: getattr(plan, name) for name in ("num_tokens", "topk", "num_experts", "num_rows")}
    make = _point(RowIdMapParams(**sizes), row_id_map=row_id_map, **maps)

    def run() -> Outputs:
        core.route_permute(route)
        core.call("make_row_id_map", make)
        return {"row_id_map": row_id_map}

    def results(outputs: Outputs) -> Outputs:
        return {"token_rows": inputs.token_rows_of(outputs["row_id_map"])}

    return Body(run, results=results, note="from a mask [T, E]")


def _route_permute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    return _route_and_move(core, operation, inputs, _MAPS)


def _moe_permute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    names = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "overflow", "rowmap")
    return _route_and_move(core, operation, inputs, names)


def _route_and_move(core: CudaCore, operation: Operation, inputs: TensorInputs, names: tuple[str, ...]) -> Body:
    maps = _maps(inputs, names)
    route = _route_params(core, inputs, maps)
    permute, moved = _permute_params(operation, inputs, maps["slot_to_row"], maps["row_to_token"])
    return _body(lambda: core.route_permute(route, permute), {**maps, **moved})


def _permute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    params, outputs = _permute_params(operation, inputs, inputs.slot_to_row, inputs.row_to_token)
    return _body(lambda: core.call("permute", params), outputs)


def _quantize_params(
    core: CudaCore, operation: Operation, inputs: TensorInputs, x: torch.Tensor, *, is_moved: bool
) -> tuple[QuantizeParams, Outputs]:
    """Params for the rows of x as they are, or for those that the plan's maps lead to."""
    plan, groups = inputs.problem.plan, inputs.problem.scale_cols
    ue8m0, by_column = operation.variant == "ue8m0", operation.variant == "col"
    num_rows = plan.num_rows if is_moved else len(x)
    shape = (groups, -(-num_rows // 4) * 4) if by_column else (num_rows, -(-groups // 4) if ue8m0 else groups)
    outputs = {
        "codes": inputs.empty(num_rows, x.shape[1], dtype=torch.uint8),
        "scales": inputs.empty(*shape, dtype=torch.int32 if ue8m0 else torch.float32),
    }
    params = QuantizeParams(
        num_tokens=len(x),
        topk=plan.topk if is_moved else 1,
        num_rows=num_rows,
        hidden=x.shape[1],
        x_row_stride=x.stride(0),
        dtype=_dtype_code(x),
        ue8m0=ue8m0,
        scale_layout=ScaleLayout.COLUMN if by_column else ScaleLayout.ROW,
        fill=Fill.ALL if inputs.problem.case.fill else Fill.NONE,
        amax_min=1e-4,
    )
    maps = {"slot_to_row": inputs.slot_to_row, "row_to_token": inputs.row_to_token} if is_moved else {}
    _point(params, x=x, **maps, **outputs)
    return _point_at_workspace(params, core.library.pmo_quantize_cuda_workspace_bytes, inputs), outputs


def _permute_quantized(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    params, outputs = _quantize_params(core, operation, inputs, inputs.x, is_moved=True)
    return _body(lambda: core.call("quantize", params), outputs)


def _quantize_then_permute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    plan = inputs.problem.plan
    quantize, tokens = _quantize_params(core, operation, inputs, inputs.x, is_moved=False)
    codes, scales = tokens["codes"], tokens["scales"]
    outputs = {
        name: inputs.empty(plan.num_rows, tensor.shape[1], dtype=tensor.dtype) for name, tensor in tokens.items()
    }
    permute = PermuteParams(
        num_tokens=plan.num_tokens,
        topk=plan.topk,
        num_rows=plan.num_rows,
        hidden=codes.shape[1],
        scale_cols=scales.shape[1],
        x_row_stride=codes.stride(0),
        scale_row_stride=scales.stride(0),
        dtype=_FLOAT8,
        scale_dtype=_dtype_code(scales),
        fill=Fill.ALL if inputs.problem.case.fill else Fill.NONE,
    )
    _point(
        permute,
        x=codes,
        scale=scales,
        slot_to_row=inputs.slot_to_row,
        row_to_token=inputs.row_to_token,
        rows=outputs["codes"],
        row_scales=outputs["scales"],
    )

    def run() -> None:
        core.call("quantize", quantize)
        core.call("permute", permute)

    return _body(run, outputs)


def _permute_then_quantize(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    if inputs.problem.case.fill and (inputs.problem.plan.row_to_token < 0).any():
        raise Unsupported("gives padding rows the scale of zeros, which is not 0")
    params, moved = _permute_params(operation, inputs, inputs.slot_to_row, inputs.row_to_token)
    quantize, outputs = _quantize_params(core, operation, inputs, moved["rows"], is_moved=False)

    def run() -> None:
        core.call("permute", params)
        core.call("quantize", quantize)

    return _body(run, outputs)


def _unpermute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    params, outputs = _unpermute_params(operation, inputs, inputs.token_rows)
    return _body(lambda: core.call("unpermute", params), outputs)


def _unpermute_params(
    operation: Operation, inputs: TensorInputs, token_rows: torch.Tensor
) -> tuple[UnpermuteParams, Outputs]:
    weighted = operation.variant == "weighted"
    outputs = {"out": torch.empty_like(inputs.d_out)}
    sizes = {**_summing_sizes(inputs, weighted), "max_rows_per_token": token_rows.shape[1]}
    params = _point(
        UnpermuteParams(**sizes, rows_row_stride=inputs.rows.stride(0)),
        rows=inputs.rows,
        token_rows=token_rows,
        weights=inputs.row_probs if weighted else None,
        **outputs,
    )
    return params, outputs


def _moe_unpermute(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    """From a user's row map, which is not trusted, to the sums and the probabilities by slot."""
    plan = inputs.problem.plan
    sizes = {name: getattr(plan, name) for name in ("num_tokens", "topk", "num_experts", "num_rows")}
    maps = _maps(inputs, ("row_to_token",))
    maps["token_rows"] = inputs.empty(plan.num_tokens, plan.num_experts)
    slot_probs = inputs.empty(plan.num_tokens, plan.topk, dtype=torch.float32)
    clean = _point(
        CleanRowmapParams(**sizes),
        rowmap=inputs.rowmap,
        ids=inputs.ids,
        row_values=inputs.row_probs,
        slot_values=slot_probs,
        **maps,
    )
    _point_at_workspace(clean, core.library.pmo_clean_rowmap_cuda_workspace_bytes, inputs)
    unpermute, outputs = _unpermute_params(operation, inputs, maps["token_rows"])

    def run() -> None:
        core.call("clean_rowmap", clean)
        core.call("unpermute", unpermute)

    return _body(run, {**outputs, "slot_probs": slot_probs})


def _unpermute_backward(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    weighted, num_rows = operation.variant != "plain", inputs.problem.plan.num_rows
    outputs: Outputs = {}
    if operation.variant != "dprob":
        outputs["d_rows"] = torch.empty_like(inputs.rows)
    if operation.variant in ("weighted", "dprob"):
        outputs["d_weights"] = inputs.empty(num_rows, dtype=torch.float32)
    params = _point(
        UnpermuteBackwardParams(
            **_summing_sizes(inputs, weighted),
            d_out_row_stride=inputs.d_out.stride(0),
            rows_row_stride=inputs.rows.stride(0),
        ),
        d_out=inputs.d_out,
        rows=inputs.rows if "d_weights" in outputs else None,
        token_rows=inputs.token_rows,
        row_to_token=inputs.row_to_token,
        weights=inputs.row_probs if weighted else None,
        **outputs,
    )
    return _body(lambda: core.call("unpermute_backward", params), outputs)


def _sort_chunks(core: CudaCore, operation: Operation, inputs: TensorInputs) -> Body:
    forward, rows = operation.variant == "forward", inputs.rows
    outputs: Outputs = {"sorted_rows": torch.empty_like(rows)}
    if forward:
        outputs["source_to_dest"] = inputs.empty(len(rows))
    params = SortChunksParams(
        num_rows=len(rows),
        num_chunks=len(inputs.chunk_sizes),
        hidden=rows.shape[1],
        x_row_stride=rows.stride(0),
        dtype=_dtype_code(rows),
        inverse=not forward,
    )
    chunks = {"split_sizes": inputs.chunk_sizes, "order": inputs.chunk_order}
    _point(params, x=rows, out=outputs["sorted_rows"], source_to_dest=outputs.get("source_to_dest"), **chunks)
    _point_at_workspace(params, core.library.pmo_sort_chunks_cuda_workspace_bytes, inputs)
    return _body(lambda: core.call("sort_chunks", params), outputs)


def _topk(core: CudaCore, _: Operation, inputs: TensorInputs) -> Body:
    gating, topk = inputs.gating, inputs.problem.chosen_per_token
    outputs: Outputs = {
        "router_weights": inputs.empty(len(gating), topk, dtype=gating.dtype),
        "router_ids": inputs.empty(len(gating), topk, dtype=torch.int64),
    }
    params = TopkParams(
        num_tokens=len(gating),
        topk=topk,
        num_experts=gating.shape[1],
        num_groups=1,
        topk_groups=1,
        scores_per_group=1,
        gating_row_stride=gating.stride(0),
        dtype=_dtype_code(gating),
        pre_act=True,
        renormalize=True,
        scaling_factor=1.0,
    )
    _point(params, gating=gating, weights=outputs["router_weights"], ids=outputs["router_ids"])
    _point_at_workspace(params, core.library.pmo_topk_cuda_workspace_bytes, inputs)
    return _body(lambda: core.call("topk", params), outputs)


def _summing_sizes(inputs: TensorInputs, weighted: bool) -> dict[str, int]:
    plan = inputs.problem.plan
    return {
        "num_tokens": plan.num_tokens,
        "max_rows_per_token": plan.topk,
        "num_rows": plan.num_rows,
        "num_weights": plan.num_rows if weighted else 0,
        "hidden": inputs.rows.shape[1],
        "dtype": _dtype_code(inputs.rows),
    }


_BODIES: dict[str, Callable[[CudaCore, Operation, TensorInputs], Body]] = {
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
