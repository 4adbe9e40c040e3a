# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers that the operators on rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.operators.permute import PermuteParams, permute_params
from tests.core.structs import Fill

from ..check import Check, Compare
from ..core import CoreCalls
from ..device import Outputs, Unsupported
from ..inputs import Inputs
from ..model import WORD, Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from .base import Variant

BF16 = Variant("bfloat16", ("rows",))
FP8 = Variant("float8_e4m3fn", ("rows", "row_scales"))

# ---- bytes


def row_bytes(operation: Operation, problem: Problem) -> int:
    """Bytes of one row in bfloat16, or in float8 with the scales that travel with it."""
    hidden = problem.case.shape.hidden
    return hidden + problem.scale_cols * WORD if operation.variant == "fp8" else 2 * hidden


def written_rows(problem: Problem) -> int:
    """Rows of the buffer that are written; an operator that does not fill leaves padding as it is."""
    return problem.plan.num_rows if problem.case.fill else problem.routed_rows


def slot_bytes(problem: Problem) -> int:
    """Bytes of a map [T, K]."""
    return WORD * problem.case.shape.num_tokens * problem.case.shape.topk


def permuted_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read T(Hb + 4S) + 4TK (map), written M(Hb + 4S)"""
    row = row_bytes(operation, problem)
    return Bytes(problem.case.shape.num_tokens * row + slot_bytes(problem), written_rows(problem) * row)


def fanout(operation: Operation, problem: Problem) -> Work:
    """A row of each token is read, and all rows of the buffer are written."""
    row = row_bytes(operation, problem)
    return Work(Kind.FANOUT, problem.case.shape.num_tokens * row, written_rows(problem) * row)


# ---- checks


def _unlike_moved(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    source = sources(operation, check.inputs)[name]
    return check.gathered(name, actual, source, padding=check.inputs.problem.case.fill)


MOVED: dict[str, Compare] = {"rows": _unlike_moved, "row_scales": _unlike_moved}


# ---- inputs and calls


def sources(operation: Operation, inputs: Any) -> dict[str, Any]:
    """The arrays that are moved: rows, and the scales of float8 rows."""
    if operation.variant == "fp8":
        return {"rows": inputs.x_fp8, "row_scales": inputs.scale}
    return {"rows": inputs.x}


def without_padding(inputs: Any, how: str) -> None:
    """Raise Unsupported for problems whose rows are padded."""
    if inputs.problem.plan.num_rows != inputs.problem.routed_rows:
        raise Unsupported(f"{how} leaves no padding rows")


def core_fill(inputs: Inputs) -> Fill:
    return Fill[inputs.problem.fill_padding.upper()]


def core_permute_params(
    core: CoreCalls, inputs: Inputs, source: dict[str, Any], slot_to_row: Any, row_to_token: Any
) -> tuple[PermuteParams, Outputs]:
    """Params that move ``rows`` and maybe ``row_scales`` to new rows, which come back by the same names."""
    moved = {name: inputs.empty(len(row_to_token), each.shape[1], dtype=each.dtype) for name, each in source.items()}
    scales = source.get("row_scales"), moved.get("row_scales")
    arrays = source["rows"], slot_to_row, row_to_token, moved["rows"], *scales
    return core.params(permute_params, *arrays, fill=core_fill(inputs)), moved


def triton_move(device: Any, operation: Operation, inputs: Any) -> Callable[[Outputs], Outputs]:
    """A call that enqueues moving the rows by maps."""
    from paddle_moe_ops.triton.ops.permute import permute

    source, fill = sources(operation, inputs), inputs.problem.fill_padding

    def run(maps: Outputs) -> Outputs:
        arrays = source["rows"], source.get("row_scales"), maps["token_rows"], maps["row_to_token"]
        return dict(zip(source, permute(device, *arrays, fill), strict=False))

    return run


def byte_sources(operation: Operation, inputs: Any, byte: Any) -> dict[str, Any]:
    """The same, float8 as integers of this type: neither PyTorch nor Paddle gathers float8 rows."""
    source = sources(operation, inputs)
    return {**source, "rows": source["rows"].view(byte)} if operation.variant == "fp8" else source


def float8_again(library: Any) -> Callable[[Outputs], Outputs]:
    """Turns gathered rows of `byte_sources` into float8 again."""

    def results(outputs: Outputs) -> Outputs:
        rows = outputs["rows"]
        is_bytes = rows.dtype in (library.int8, library.uint8)
        return {**outputs, "rows": rows.view(library.float8_e4m3fn)} if is_bytes else outputs

    return results
