# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`clean_rowmap`: trusted maps of a user's row map, whose slots are ids or experts."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..guards import MakeOutput, guarded_outputs
from ..structs import Bytes, Duplicates, Findings, Floats, Int, Int32s, Params, RoutingKind, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class CleanRowmapParams(Params):
    """pmo_clean_rowmap_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts num_rows"),
        (Int32s, "rowmap"),
        (Bytes, "ids"),
        (Floats, "row_values"),
        (Int, "ids_kind duplicates checks num_threads"),
        (Int32s, "token_rows row_to_token slot_to_row"),
        (Floats, "slot_values"),
        (Int32s, "row_to_slot row_to_expert"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
    )
    needs_cuda_workspace = True

    def after_cuda(self, core: Core, operator: str) -> None:
        if self.checks:
            clean_rowmap_report(core, self, RowmapFindings.from_buffer_copy(self.arrays["workspace"].data))


class RowmapFindings(Findings):
    """pmo_rowmap_findings"""

    _fields_ = fields((Size, "bad_id_place bad_id bad_row_place bad_row repeat_place repeat_row repeat_first"))


BY_ROW = ("row_to_token", "row_to_slot", "row_to_expert")


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


def clean_rowmap_report(core: Core, params: CleanRowmapParams, findings: RowmapFindings) -> None:
    """Raise CoreError for findings that the params' checks cover."""
    report = core.function("pmo_clean_rowmap_report", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    core.check(report(ctypes.byref(params), ctypes.byref(findings)))


def clean_rowmap(
    core: Core, rowmap: NDArray, num_rows: int, ids: NDArray | None = None, **fields: Any
) -> tuple[NDArray, NDArray, NDArray | None]:
    """token_rows [T, E], row_to_token [N] and, with ids, slot_to_row [T, K]."""
    with guarded_outputs() as output:
        token_rows, row_to_token = output(rowmap.shape, np.int32), output(num_rows, np.int32)
        slot_to_row = None if ids is None else output(ids.shape, np.int32)
        maps: dict[str, Any] = {"token_rows": token_rows, "row_to_token": row_to_token, "slot_to_row": slot_to_row}
        core.run("clean_rowmap", clean_rowmap_params(rowmap, ids, num_rows=num_rows, **maps, **fields))
    return token_rows, row_to_token, slot_to_row


def slot_values_of_rowmap(core: Core, rowmap: NDArray, row_values: NDArray, ids: NDArray, **fields: Any) -> NDArray:
    """[T, K], of clean_rowmap without slot_to_row."""
    with guarded_outputs() as output:
        values = output(ids.shape, np.float32)
        params = clean_rowmap_params(
            rowmap,
            ids,
            num_rows=len(row_values),
            row_values=row_values,
            token_rows=output(rowmap.shape, np.int32),
            row_to_token=output(len(row_values), np.int32),
            slot_values=values,
            **fields,
        )
        core.run("clean_rowmap", params)
    return values


def read_rowmap(core: Core, rowmap: NDArray, num_rows: int, **fields: Any) -> reference.RowMaps:
    """clean_rowmap where slots are experts."""
    with guarded_outputs() as output:
        slot_to_row, token_rows = output(rowmap.shape, np.int32), output(rowmap.shape, np.int32)
        by_row = {name: output(num_rows, np.int32) for name in BY_ROW}
        maps: dict[str, Any] = {"slot_to_row": slot_to_row, "token_rows": token_rows, **by_row}
        params = clean_rowmap_params(rowmap, topk=rowmap.shape[1], num_rows=num_rows, **maps, **fields)
        core.run("clean_rowmap", params)
    return reference.RowMaps(**maps)


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    return clean_rowmap_params(
        np.full((s.T, s.E), -1, np.int32),
        s.ids(np.int64),
        num_rows=s.N,
        row_values=np.zeros(s.N, np.float32),
        token_rows=output((s.T, s.E), np.int32),
        row_to_token=output(s.N, np.int32),
        slot_to_row=output((s.T, s.K), np.int32),
        slot_values=output((s.T, s.K), np.float32),
    )


def _valid_by_expert(core: Core, output: MakeOutput, s: Small) -> Params:
    by_row: dict[str, Any] = {name: output(s.N, np.int32) for name in BY_ROW}
    return clean_rowmap_params(
        np.full((s.T, s.E), -1, np.int32),
        topk=s.E,
        num_rows=s.N,
        token_rows=output((s.T, s.E), np.int32),
        slot_to_row=output((s.T, s.E), np.int32),
        **by_row,
    )


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    return CleanRowmapParams(
        **s.sizes("num_tokens topk num_experts num_rows"),
        rowmap=s.ints((s.T, s.E), s.N),
        ids=s.ints((s.T, s.K), s.E, np.int64),
        row_values=s.rng.random(s.N, np.float32),
        **s.choices(ids_kind=2, duplicates=2),
        checks=s.checks(4),
        token_rows=output((s.T, s.E), np.int32),
        row_to_token=output(s.N, np.int32),
        slot_to_row=output((s.T, s.K), np.int32),
        slot_values=output((s.T, s.K), np.float32),
    )


def _fuzzed_by_expert(core: Core, output: MakeOutput, s: Draw) -> Params:
    return CleanRowmapParams(
        num_tokens=s.T,
        topk=s.E,
        **s.sizes("num_experts num_rows"),
        rowmap=s.ints((s.T, s.E), s.N),
        checks=s.checks(4),
        token_rows=output((s.T, s.E), np.int32),
        row_to_token=output(s.N, np.int32),
        slot_to_row=output((s.T, s.E), np.int32),
        row_to_slot=output(s.N, np.int32),
        row_to_expert=output(s.N, np.int32),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    routing, _, _, plan = large.routed
    rowmap = reference.plan_to_rowmap(plan)
    token_rows, row_to_token, slot_to_row = clean_rowmap(core, rowmap, plan.num_rows, routing, num_threads=num_threads)
    ends = np.cumsum(token_rows == -1, axis=1) > 0  # what follows the first -1 is undefined
    assert slot_to_row is not None
    return np.where(ends, -1, token_rows), row_to_token, slot_to_row


OPERATORS = (
    Operator(
        name="clean_rowmap",
        valid=_valid,
        bad_fields={
            "num_tokens": (-1, TOO_MANY),
            "topk": (-1, TOO_MANY // 5 + 1),
            "num_experts": (0, TOO_MANY_EXPERTS),
            "num_rows": (-1, TOO_MANY),
            "ids_kind": (-1, 2),
            "duplicates": (-1, 2),
        },
        required=("rowmap", "ids", "row_values", "token_rows", "row_to_token"),
        aligned=("rowmap", "ids", "row_values", "token_rows", "row_to_token", "slot_to_row", "slot_values"),
        fuzzed=_fuzzed,
        work=_work,
    ),
    Operator(
        name="clean_rowmap",
        form="by_expert",
        valid=_valid_by_expert,
        bad_fields={"num_experts": (0,)},
        aligned=("slot_to_row", "row_to_slot", "row_to_expert"),
        fuzzed=_fuzzed_by_expert,
    ),
)
