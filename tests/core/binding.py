# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The C core through ctypes, on NumPy arrays and without Paddle.

A ``*_params`` function fills a struct from arrays: sizes, strides and
element types are those of the arrays, and outputs are arrays too, written in place. Nothing here checks
values or sizes; that is the core's task.

    core = Core("build/core/libpmo_core.so")
    core.run("permute", permute_params(x, slot_to_row, row_to_token, rows))
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import _env

from .structs import (
    DTYPES,
    CleanRowmapParams,
    DequantizeParams,
    Duplicates,
    Fill,
    Int,
    Int32s,
    Params,
    PermuteParams,
    QuantizeParams,
    RouteFindings,
    RouteParams,
    RoutingKind,
    RowIdMapParams,
    RowmapFindings,
    ScaleLayout,
    Size,
    SlotsParams,
    SortChunksParams,
    Status,
    UnpermuteBackwardParams,
    UnpermuteParams,
    row_stride,
)

__all__ = [
    "OPERATORS",
    "Core",
    "CoreError",
    "clean_rowmap_params",
    "dequantize_params",
    "make_row_id_map_params",
    "permute_params",
    "quantize_params",
    "read_row_id_map_params",
    "route_params",
    "slots_params",
    "sort_chunks_params",
    "unpermute_backward_params",
    "unpermute_params",
]


OPERATORS = (
    "route_count",
    "route",
    "clean_rowmap",
    "gather_slots",
    "scatter_slots",
    "permute",
    "unpermute",
    "unpermute_backward",
    "sort_chunks",
    "make_row_id_map",
    "read_row_id_map",
    "quantize",
    "dequantize",
    "topk",
    "topk_backward",
)


class CoreError(RuntimeError):
    """A call of the core that did not return PMO_OK: its status and the text of pmo_last_error()."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(f"{status.name}: {text}")
        self.status = status
        self.text = text


class Core:
    """A loaded ``libpmo_core.so``. PADDLE_MOE_OPS_MAX_CPU_ISA holds here, too."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.library = ctypes.CDLL(os.fspath(path))
        for operator in OPERATORS:
            self._declare(f"pmo_{operator}_cpu", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._declare("pmo_route_permute_cpu", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._declare("pmo_route_cpu_workspace_bytes", Size, ctypes.c_void_p)
        self._declare("pmo_route_report", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, Int32s)
        self._declare("pmo_clean_rowmap_report", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._declare("pmo_sort_chunks_report", ctypes.c_int, ctypes.c_void_p)
        self._declare("pmo_padded_rows", Size, Int32s, Size, Size)
        self._declare("pmo_last_error", ctypes.c_char_p)
        self._declare("pmo_set_num_threads", None, Int)
        self._declare("pmo_num_threads", Int)
        self._declare("pmo_set_max_cpu_isa", None, Int)
        self._declare("pmo_used_cpu_isa", Int)
        self._declare("pmo_cpu_set_streaming_bytes", None, Size)
        self.set_max_cpu_isa(_env.CPU_ISAS[_env.max_cpu_isa()])

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self.library, name)
        function.restype, function.argtypes = result, arguments

    def entry(self, operator: str) -> Any:
        """The CPU entry point of an operator, such as "permute"."""
        return getattr(self.library, f"pmo_{operator}_cpu")

    def run(self, operator: str, params: Params | None, stream: int | None = None) -> None:
        """Call an operator; raise CoreError unless it returns PMO_OK."""
        self._check(self.entry(operator)(None if params is None else ctypes.byref(params), stream))

    def route_permute(self, route: RouteParams, permute: PermuteParams | None = None) -> None:
        """Count, route and move rows in one call; raise CoreError unless it returns PMO_OK."""
        entry = self.entry("route_permute")
        self._check(entry(ctypes.byref(route), None if permute is None else ctypes.byref(permute), None))

    def route_workspace(self, params: RouteParams) -> NDArray:
        """Make the workspace that routing needs and enter it into ``params``."""
        size = self.library.pmo_route_cpu_workspace_bytes(ctypes.byref(params))
        workspace = np.empty(size, np.uint8)
        params.arrays["workspace"] = workspace
        params.workspace, params.workspace_bytes = workspace.ctypes.data, size
        return workspace

    def route_report(self, params: RouteParams, findings: RouteFindings, routed_per_expert: NDArray) -> None:
        """Raise CoreError for what findings and int32 counts [E] say, as far as the params' checks ask."""
        counts = routed_per_expert.ctypes.data_as(Int32s)
        self._check(self.library.pmo_route_report(ctypes.byref(params), ctypes.byref(findings), counts))

    def clean_rowmap_report(self, params: CleanRowmapParams, findings: RowmapFindings) -> None:
        """Raise CoreError for what findings say, as far as the params' checks ask."""
        self._check(self.library.pmo_clean_rowmap_report(ctypes.byref(params), ctypes.byref(findings)))

    def sort_chunks_report(self, params: SortChunksParams) -> None:
        """Raise CoreError for what the params' checks ask; sizes and order must lie in host memory."""
        self._check(self.library.pmo_sort_chunks_report(ctypes.byref(params)))

    def padded_rows(self, counts: NDArray, padding_alignment: int) -> int:
        """Rows of a buffer that holds int32 ``counts`` [E], each padded to the alignment."""
        return self.library.pmo_padded_rows(counts.ctypes.data_as(Int32s), len(counts), padding_alignment)

    def last_error(self) -> str:
        """Text of the last failure on this thread."""
        return self.library.pmo_last_error().decode()

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of operators whose params say 0; a value below 1 restores the default."""
        self.library.pmo_set_num_threads(num_threads)

    def num_threads(self) -> int:
        return self.library.pmo_num_threads()

    def set_max_cpu_isa(self, isa: str) -> None:
        """The best of `_env.CPU_ISAS` that operators use, where the processor has it."""
        self.library.pmo_set_max_cpu_isa(_env.CPU_ISAS.index(isa))

    def used_cpu_isa(self) -> str:
        return _env.CPU_ISAS[self.library.pmo_used_cpu_isa()]

    def set_streaming_bytes(self, size: int) -> None:
        """Bytes beyond which CPU outputs are written past the caches; a negative size restores the machine's."""
        self.library.pmo_cpu_set_streaming_bytes(size)

    def _check(self, status: int) -> None:
        if status != Status.OK:
            raise CoreError(Status(status), self.last_error())


def route_params(
    routing: NDArray,
    probs: NDArray | None = None,
    *,
    num_experts: int | None = None,
    topk: int | None = None,
    duplicates: str = "first",
    **fields: Any,
) -> RouteParams:
    """Params of "route_count" and "route".

    Args:
        routing: int32 or int64 ids [T, K], or a bool or uint8 mask [T, E].
        probs: float32 in the shape of ``routing``.
        num_experts: E, needed for ids.
        topk: K of a mask, by default E.
        duplicates: "first" or "each".
        fields: Any other field of the struct; arrays for pointers. padding_alignment is 1 unless given.
    """
    kinds = {np.dtype(np.int32): RoutingKind.IDS32, np.dtype(np.int64): RoutingKind.IDS64}
    kind = kinds.get(routing.dtype, RoutingKind.MASK)
    columns = routing.shape[1]
    if kind == RoutingKind.MASK:
        num_experts, topk = columns, columns if topk is None else topk
    return RouteParams(
        **{
            "num_tokens": len(routing),
            "topk": columns if topk is None else topk,
            "num_experts": num_experts,
            "padding_alignment": 1,
            "routing": routing,
            "probs": probs,
            "routing_kind": kind,
            "duplicates": Duplicates[duplicates.upper()],
            **fields,
        }
    )


def clean_rowmap_params(
    rowmap: NDArray, ids: NDArray | None = None, *, topk: int = 0, duplicates: str = "first", **fields: Any
) -> CleanRowmapParams:
    """Params of "clean_rowmap" for a rowmap [T, E] and ids [T, K]; num_rows and outputs are ``fields``.

    Without ids, topk = E says that slots are experts.
    """
    num_tokens, num_experts = rowmap.shape
    return CleanRowmapParams(
        num_tokens=num_tokens,
        topk=topk if ids is None else ids.shape[1],
        num_experts=num_experts,
        rowmap=rowmap,
        ids=ids,
        ids_kind=RoutingKind.IDS64 if ids is not None and ids.dtype == np.int64 else RoutingKind.IDS32,
        duplicates=Duplicates[duplicates.upper()],
        **fields,
    )


def make_row_id_map_params(
    token_rows: NDArray, row_to_expert: NDArray, row_id_map: NDArray, pad_offsets: NDArray | None = None, **fields: Any
) -> RowIdMapParams:
    """Params of "make_row_id_map", which writes row_id_map [T, 2E + 1]."""
    num_tokens, topk = token_rows.shape
    return RowIdMapParams(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=row_id_map.shape[1] // 2,
        num_rows=len(row_to_expert),
        token_rows=token_rows,
        row_to_expert=row_to_expert,
        pad_offsets=pad_offsets,
        row_id_map=row_id_map,
        **fields,
    )


def read_row_id_map_params(
    row_id_map: NDArray, rowmap: NDArray, pad_offsets: NDArray | None = None, **fields: Any
) -> RowIdMapParams:
    """Params of "read_row_id_map", which writes rowmap [T, E]."""
    num_tokens, num_experts = rowmap.shape
    return RowIdMapParams(
        num_tokens=num_tokens,
        num_experts=num_experts,
        pad_offsets=pad_offsets,
        row_id_map=row_id_map,
        rowmap=rowmap,
        **fields,
    )


def slots_params(
    slot_to_row: NDArray, row_values: NDArray, slot_values: NDArray, row_to_expert: NDArray | None = None, **fields: Any
) -> SlotsParams:
    """Params of "gather_slots" and "scatter_slots"; slot_values is [T, E] when row_to_expert is given."""
    num_tokens, topk = slot_to_row.shape
    return SlotsParams(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=0 if row_to_expert is None else slot_values.shape[1],
        num_rows=len(row_values),
        slot_to_row=slot_to_row,
        row_to_expert=row_to_expert,
        row_values=row_values,
        slot_values=slot_values,
        **fields,
    )


def permute_params(
    x: NDArray,
    slot_to_row: NDArray,
    row_to_token: NDArray,
    rows: NDArray | None,
    scale: NDArray | None = None,
    row_scales: NDArray | None = None,
    *,
    fill: int = Fill.ALL,
    num_threads: int = 0,
) -> PermuteParams:
    """Params of "permute". Rows of ``x`` and ``scale`` may lie apart; rows None moves the scales only."""
    num_tokens, topk = slot_to_row.shape
    return PermuteParams(
        num_tokens=num_tokens,
        topk=topk,
        num_rows=len(row_to_token),
        hidden=x.shape[1],
        scale_cols=0 if scale is None else scale.shape[1],
        x=x,
        x_row_stride=row_stride(x),
        scale=scale,
        scale_row_stride=0 if scale is None else row_stride(scale),
        slot_to_row=slot_to_row,
        row_to_token=row_to_token,
        rows=rows,
        row_scales=row_scales,
        dtype=DTYPES[x.dtype],
        scale_dtype=0 if scale is None else DTYPES[scale.dtype],
        fill=fill,
        num_threads=num_threads,
    )


def quantize_params(
    x: NDArray,
    codes: NDArray,
    scales: NDArray,
    slot_to_row: NDArray | None = None,
    row_to_token: NDArray | None = None,
    *,
    layout: ScaleLayout = ScaleLayout.ROW,
    ue8m0: bool = False,
    amax_min: float = 1e-4,
    fill: int = Fill.ALL,
    num_threads: int = 0,
    workspace: NDArray | None = None,
) -> QuantizeParams:
    """Params of "quantize". Rows of ``x`` may lie apart; without maps row t is token t."""
    num_tokens, topk = (len(x), 1) if slot_to_row is None else slot_to_row.shape
    return QuantizeParams(
        num_tokens=num_tokens,
        topk=topk,
        num_rows=len(codes),
        hidden=x.shape[1],
        x=x,
        x_row_stride=row_stride(x),
        slot_to_row=slot_to_row,
        row_to_token=row_to_token,
        codes=codes,
        scales=scales,
        dtype=DTYPES[x.dtype],
        ue8m0=ue8m0,
        scale_layout=layout,
        fill=fill,
        amax_min=amax_min,
        num_threads=num_threads,
        workspace=workspace,
        workspace_bytes=0 if workspace is None else workspace.nbytes,
    )


def dequantize_params(
    codes: NDArray, scales: NDArray, out: NDArray, *, layout: ScaleLayout = ScaleLayout.ROW, num_threads: int = 0
) -> DequantizeParams:
    """Params of "dequantize". Rows of ``codes`` may lie apart; int32 scales are packed ue8m0."""
    return DequantizeParams(
        num_rows=len(codes),
        hidden=codes.shape[1],
        codes=codes,
        codes_row_stride=row_stride(codes),
        scales=scales,
        out=out,
        dtype=DTYPES[out.dtype],
        ue8m0=scales.dtype == np.int32,
        scale_layout=layout,
        num_threads=num_threads,
    )


def unpermute_params(
    rows: NDArray,
    token_rows: NDArray,
    out: NDArray,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    *,
    copy_single_row: bool = False,
    num_threads: int = 0,
) -> UnpermuteParams:
    """Params of "unpermute". Rows of ``rows`` [N, H] may lie apart; weights may have any shape."""
    num_tokens, max_rows_per_token = token_rows.shape
    return UnpermuteParams(
        num_tokens=num_tokens,
        max_rows_per_token=max_rows_per_token,
        num_rows=len(rows),
        num_weights=0 if weights is None else weights.size,
        hidden=rows.shape[1],
        rows=rows,
        rows_row_stride=row_stride(rows),
        token_rows=token_rows,
        weights=weights,
        weight_index=weight_index,
        out=out,
        dtype=DTYPES[rows.dtype],
        copy_single_row=copy_single_row,
        num_threads=num_threads,
    )


def unpermute_backward_params(
    d_out: NDArray,
    token_rows: NDArray,
    row_to_token: NDArray,
    d_rows: NDArray | None = None,
    rows: NDArray | None = None,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    d_weights: NDArray | None = None,
    *,
    copy_single_row: bool = False,
    num_threads: int = 0,
) -> UnpermuteBackwardParams:
    """Params of "unpermute_backward"; d_rows or d_weights None: not wanted."""
    num_tokens, max_rows_per_token = token_rows.shape
    return UnpermuteBackwardParams(
        num_tokens=num_tokens,
        max_rows_per_token=max_rows_per_token,
        num_rows=len(row_to_token),
        num_weights=0 if weights is None else weights.size,
        hidden=d_out.shape[1],
        d_out=d_out,
        d_out_row_stride=row_stride(d_out),
        rows=rows,
        rows_row_stride=0 if rows is None else row_stride(rows),
        token_rows=token_rows,
        row_to_token=row_to_token,
        weights=weights,
        weight_index=weight_index,
        d_rows=d_rows,
        d_weights=d_weights,
        dtype=DTYPES[d_out.dtype],
        copy_single_row=copy_single_row,
        num_threads=num_threads,
    )


def sort_chunks_params(
    x: NDArray,
    split_sizes: NDArray,
    order: NDArray,
    out: NDArray | None,
    probs: NDArray | None = None,
    probs_out: NDArray | None = None,
    source_to_dest: NDArray | None = None,
    **fields: Any,
) -> SortChunksParams:
    """Params of "sort_chunks". Rows of ``x`` may lie apart; outputs that are None are not wanted."""
    num_rows, hidden = x.shape
    kinds = {np.dtype(np.int32): RoutingKind.IDS32, np.dtype(np.int64): RoutingKind.IDS64}
    return SortChunksParams(
        num_rows=num_rows,
        num_chunks=len(split_sizes),
        hidden=hidden,
        x=x,
        x_row_stride=row_stride(x),
        split_sizes=split_sizes,
        order=order,
        probs=probs,
        out=out,
        probs_out=probs_out,
        source_to_dest=source_to_dest,
        dtype=DTYPES[x.dtype],
        split_sizes_kind=kinds[split_sizes.dtype],
        order_kind=kinds[order.dtype],
        **fields,
    )
