# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Other libraries doing the same work in the same process: PyTorch's indexing and TransformerEngine's Triton kernels.

Every peer allocates its outputs in the call; inside a CUDA graph that costs nothing. None of those measured here waits
for the GPU: the number of rows, which their public functions may read back, is given.
"""

from __future__ import annotations

import importlib
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .device import BFLOAT16_SUMS, FLOAT32_SUMS, Body, Implementation, Outputs, Unsupported
from .shapes import Operation
from .tensors import TensorInputs

__all__ = ["torch_implementations", "transformer_engine_implementation"]

_TE_OPERATIONS = (
    *(f"{op}:*" for op in ("route", "route_permute", "permute", "unpermute")),
    "unpermute_backward:plain",
    "unpermute_backward:weighted",
    "sort_chunks:*",
)
_TE_PACKAGES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.triton",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.triton",
)


def torch_implementations() -> list[Implementation]:
    """ "torch gather" indexes rows and adds them up in float32; "torch index_add" adds into bfloat16 with atomics.

    "torch softmax and topk" is a router of three calls.
    """
    return [
        Implementation("torch gather", tuple(f"{op}:*" for op in _TORCH_BODIES), _torch_gather),
        Implementation("torch index_add", ("unpermute:*",), _torch_index_add),
        Implementation("torch softmax and topk", ("topk:*",), _torch_topk),
    ]


def _without_padding(inputs: TensorInputs) -> None:
    plan = inputs.problem.plan
    if plan.num_rows != inputs.problem.routed_rows:
        raise Unsupported("indexing leaves no padding rows")


def _torch_gather(operation: Operation, inputs: TensorInputs) -> Body:
    if operation.op != "sort_chunks":
        _without_padding(inputs)
    return _TORCH_BODIES[operation.op](operation, inputs)


def _moved(operation: Operation, inputs: TensorInputs) -> list[tuple[str, torch.Tensor]]:
    """What travels: rows, and their scales. PyTorch indexes float8 only as bytes."""
    if operation.variant != "fp8":
        return [("rows", inputs.x)]
    return [("rows", inputs.x_fp8.view(torch.uint8)), ("row_scales", inputs.scale)]


def _as_float8(outputs: Outputs) -> Outputs:
    rows = outputs.get("rows")
    if rows is None or rows.dtype != torch.uint8:
        return outputs
    return {**outputs, "rows": rows.view(torch.float8_e4m3fn)}


def _torch_permute(operation: Operation, inputs: TensorInputs) -> Body:
    sources, index = _moved(operation, inputs), inputs.row_to_token.long()

    def run() -> Outputs:
        return {name: source.index_select(0, index) for name, source in sources}

    return Body(run, note="gather by a given map", results=_as_float8)


def _torch_route_permute(operation: Operation, inputs: TensorInputs) -> Body:
    sources, plan = _moved(operation, inputs), inputs.problem.plan

    def run() -> Outputs:
        ids = inputs.ids.reshape(-1)
        # Unassigned slots sort behind the last expert and are cut off.
        order = torch.where(ids < 0, plan.num_experts, ids).argsort(stable=True)[: plan.num_rows]
        tokens = order // plan.topk
        moved = {name: source.index_select(0, tokens) for name, source in sources}
        return {**moved, "row_probs": inputs.probs.reshape(-1).index_select(0, order)}

    return Body(run, note="stable argsort and gather; no map from slots to rows, no counts", results=_as_float8)


def _torch_gather_sum(operation: Operation, inputs: TensorInputs) -> Body:
    plan, hidden = inputs.problem.plan, inputs.problem.case.shape.hidden
    if inputs.problem.routed_rows != plan.num_tokens * plan.topk:
        raise Unsupported("gathering all slots needs every slot assigned")
    index = inputs.slot_to_row.reshape(-1).long()
    shape = (plan.num_tokens, plan.topk, hidden)
    weights = inputs.probs[:, :, None]

    def run() -> Outputs:
        gathered = inputs.rows.index_select(0, index).view(shape)
        if operation.variant == "plain":
            return {"out": gathered.sum(1)}
        return {"out": (gathered * weights).sum(1).to(torch.bfloat16)}

    return Body(run, FLOAT32_SUMS)


def _torch_backward(operation: Operation, inputs: TensorInputs) -> Body:
    variant, index = operation.variant, inputs.row_to_token.long()
    weights = inputs.row_probs[:, None]

    def run() -> Outputs:
        gathered = inputs.d_out.index_select(0, index)
        if variant == "plain":
            return {"d_rows": gathered}
        outputs: Outputs = {}
        if variant != "dprob":
            outputs["d_rows"] = (gathered * weights).to(torch.bfloat16)
        if variant != "dx":
            outputs["d_weights"] = (gathered.float() * inputs.rows).sum(1)
        return outputs

    return Body(run)


def _torch_sort_chunks(operation: Operation, inputs: TensorInputs) -> Body:
    index = (inputs.dest_to_source if operation.variant == "forward" else inputs.source_to_dest).long()
    return Body(lambda: {"sorted_rows": inputs.rows.index_select(0, index)}, note="gather by a given map")


def _torch_index_add(operation: Operation, inputs: TensorInputs) -> Body:
    _without_padding(inputs)
    index, weights = inputs.row_to_token, inputs.row_probs[:, None]

    def run() -> Outputs:
        rows = inputs.rows if operation.variant == "plain" else (inputs.rows * weights).to(torch.bfloat16)
        return {"out": torch.zeros_like(inputs.d_out).index_add_(0, index, rows)}

    return Body(run, BFLOAT16_SUMS, note="not deterministic")


def _torch_topk(_: Operation, inputs: TensorInputs) -> Body:
    def run() -> Outputs:
        weights, ids = inputs.gating.softmax(-1).topk(inputs.problem.chosen_per_token)
        return {"router_weights": weights / weights.sum(-1, keepdim=True), "router_ids": ids}

    return Body(run)


_TORCH_BODIES: dict[str, Callable[[Operation, TensorInputs], Body]] = {
    "route_permute": _torch_route_permute,
    "permute": _torch_permute,
    "unpermute": _torch_gather_sum,
    "unpermute_backward": _torch_backward,
    "sort_chunks": _torch_sort_chunks,
}


def transformer_engine_implementation(folder: Path) -> Implementation:
    """TransformerEngine's kernels, called as its PyTorch functions call them.

    Only the two files with the Triton kernels are loaded, from the wheel; the package itself needs a compiled library.

    Args:
        folder: Where the wheel lies, or what is in it.

    Raises:
        ValueError: there is no wheel in the folder.
        ImportError: Triton or something else is missing.
    """
    functions = _load_transformer_engine(folder)

    def prepare(operation: Operation, inputs: TensorInputs) -> Body:
        return _TE_BODIES[operation.op](functions, operation, inputs)

    return Implementation("te triton", _TE_OPERATIONS, prepare)


def _load_transformer_engine(folder: Path) -> Any:
    """The module with the functions over the Triton kernels."""
    if not (folder / "transformer_engine").is_dir():
        wheels = sorted(folder.glob("transformer_engine-*.whl"))
        if not wheels:
            raise ValueError(f"{folder} holds neither a transformer_engine wheel nor what is in one")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(folder / "unpacked")
        folder = folder / "unpacked"
    for name in _TE_PACKAGES:
        # Empty parents, so that the packages' own __init__ does not run.
        package = types.ModuleType(name)
        package.__path__ = [str(folder / Path(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("transformer_engine.pytorch.triton.permutation")


class _TeMaps:
    """A problem in TransformerEngine's form: a mask and probabilities [T, E], offsets for padding."""

    def __init__(self, functions: Any, inputs: TensorInputs) -> None:
        plan = inputs.problem.plan
        if inputs.problem.case.capacity:
            raise Unsupported("a buffer larger than the rows")
        self.functions, self.inputs = functions, inputs
        self.tokens, self.experts, self.rows = plan.num_tokens, plan.num_experts, plan.num_rows
        self.hidden = inputs.problem.case.shape.hidden
        self.mask, self.probs = inputs.mask, inputs.probs_by_expert
        self.pad_offsets = None
        if plan.num_rows != inputs.problem.routed_rows:
            counts = torch.from_numpy(plan.tokens_per_expert).to(inputs.device)
            starts = torch.from_numpy(plan.expert_offsets[:-1]).to(inputs.device)
            self.pad_offsets = starts - (counts.cumsum(0) - counts)

    def map(self) -> torch.Tensor:
        return self.functions.make_row_id_map(self.mask, self.tokens, self.experts)

    def permute(self, source: torch.Tensor, row_id_map: torch.Tensor, probs: Any = None, scale: Any = None) -> Outputs:
        rows, scales, row_probs = self.functions.permute_with_mask_map(
            source,
            row_id_map,
            probs,
            scale,
            self.pad_offsets,
            self.tokens,
            self.experts,
            self.rows,
            self.hidden,
            0 if scale is None else scale.shape[1],
        )
        named = {"rows": rows, "row_scales": scales, "row_probs": row_probs}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _te_route(functions: Any, _: Operation, inputs: TensorInputs) -> Body:
    maps = _TeMaps(functions, inputs)

    def results(outputs: Outputs) -> Outputs:
        return {"token_rows": inputs.token_rows_of(outputs["row_id_map"])}

    if maps.pad_offsets is not None:
        raise Unsupported("its maps know no padding")
    return Body(lambda: {"row_id_map": maps.map()}, results=results, note="from a mask [T, E]")


def _te_route_permute(functions: Any, operation: Operation, inputs: TensorInputs) -> Body:
    maps = _TeMaps(functions, inputs)
    source, *scale = (tensor for _, tensor in _moved(operation, inputs))

    def run() -> Outputs:
        return maps.permute(source, maps.map(), maps.probs, *scale)

    return Body(run, results=_as_float8, note="from a mask [T, E]")


def _te_permute(functions: Any, operation: Operation, inputs: TensorInputs) -> Body:
    maps = _TeMaps(functions, inputs)
    row_id_map = maps.map()
    source, *scale = (tensor for _, tensor in _moved(operation, inputs))
    return Body(lambda: maps.permute(source, row_id_map, None, *scale), results=_as_float8)


def _te_unpermute(functions: Any, operation: Operation, inputs: TensorInputs) -> Body:
    maps = _TeMaps(functions, inputs)
    row_id_map = maps.map()
    weights = maps.probs if operation.variant == "weighted" else None

    def run() -> Outputs:
        sums, _ = functions.unpermute_with_mask_map(
            inputs.rows, row_id_map, weights, None, maps.pad_offsets, maps.tokens, maps.experts, maps.hidden
        )
        return {"out": sums}

    return Body(run, FLOAT32_SUMS, note="sums by descending expert")


def _te_unpermute_backward(functions: Any, operation: Operation, inputs: TensorInputs) -> Body:
    maps = _TeMaps(functions, inputs)
    row_id_map = maps.map()
    if operation.variant == "plain":
        return Body(lambda: {"d_rows": maps.permute(inputs.d_out, row_id_map)["rows"]})

    def run() -> Outputs:
        d_rows, d_probs = functions.unpermute_with_mask_map_bwd_with_merging_probs(
            inputs.d_out,
            row_id_map,
            inputs.rows,
            maps.probs,
            maps.pad_offsets,
            maps.tokens,
            maps.experts,
            maps.rows,
            maps.hidden,
        )
        return {"d_rows": d_rows, "d_probs": d_probs}

    def results(outputs: Outputs) -> Outputs:
        tokens, experts = inputs.row_to_token.long(), inputs.row_to_expert.long()
        by_row = outputs["d_probs"][tokens.clamp(min=0), experts.clamp(min=0)]
        return {"d_rows": outputs["d_rows"], "d_weights": torch.where(tokens < 0, 0.0, by_row)}

    return Body(run, results=results)


def _te_sort_chunks(functions: Any, operation: Operation, inputs: TensorInputs) -> Body:
    forward = operation.variant == "forward"
    (num_rows, hidden), sizes, order = inputs.rows.shape, inputs.chunk_sizes, inputs.chunk_order

    def run() -> Outputs:
        chunk_map = inputs.source_to_dest
        if forward:
            chunk_map = functions.make_chunk_sort_map(sizes, order, num_rows, len(sizes))
        rows, _ = functions.sort_chunks_by_map(inputs.rows, chunk_map, None, num_rows, hidden, forward)
        return {"sorted_rows": rows, **({"source_to_dest": chunk_map} if forward else {})}

    return Body(run, note="" if forward else "by a given map")


_TE_BODIES: dict[str, Callable[[Any, Operation, TensorInputs], Body]] = {
    "route": _te_route,
    "route_permute": _te_route_permute,
    "permute": _te_permute,
    "unpermute": _te_unpermute,
    "unpermute_backward": _te_unpermute_backward,
    "sort_chunks": _te_sort_chunks,
}
