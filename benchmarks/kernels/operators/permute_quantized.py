# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`permute` that quantises rows to float8 on their way."""

from __future__ import annotations

from typing import Any

import paddle_moe_ops
from paddle_moe_ops.reference.quantization import COLUMN_ALIGNMENT
from tests.core.operators.quantize import QuantizeParams, quantize_params
from tests.core.structs import Fill, ScaleLayout

from ..check import Check
from ..core import CoreCalls
from ..device import Body, Outputs, Unsupported
from ..inputs import Inputs
from ..model import WORD, Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import Library, Operator, Variant, Way
from .moving import core_fill, core_permute_params, permuted_bytes, written_rows

_AMAX_MIN = 1e-4
_BY_ROW = ("row", "ue8m0")
_VARIANT = Variant("bfloat16", ("codes", "scales"))


def _written_bytes(operation: Operation, problem: Problem) -> int:
    """M(H + 4S); ue8m0 packs four scales to a word."""
    words = -(-problem.scale_cols // 4) if operation.variant == "ue8m0" else problem.scale_cols
    return written_rows(problem) * (problem.case.shape.hidden + words * WORD)


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read THb + 4TK, written M(H + 4S), with packed ue8m0 scales M(H + S)"""
    return Bytes(permuted_bytes(operation, problem).read, _written_bytes(operation, problem))


def _probe(operation: Operation, problem: Problem) -> Work:
    shape = problem.case.shape
    return Work(Kind.FANOUT, 2 * shape.num_tokens * shape.hidden, _written_bytes(operation, problem))


def _unlike_codes(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    codes, _ = check.inputs.quantized(operation.variant == "ue8m0")
    return check.gathered(name, actual, codes, padding=check.inputs.problem.case.fill)


def _unlike_scales(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    """Scales by row, or by column, where columns after the last row fill up a multiple of four."""
    problem = check.inputs.problem
    fill, num_rows = problem.case.fill, problem.plan.num_rows
    _, source = check.inputs.quantized(operation.variant == "ue8m0")
    if operation.variant != "col":
        return check.gathered(name, actual, source, padding=fill)
    columns = -(-num_rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    found = check.unlike(name, actual, source.dtype, (source.shape[1], columns))
    found = found or check.gathered(name, actual[:, :num_rows].T, source, padding=fill)
    if found or not fill:
        return found
    after = actual[:, num_rows:]
    zeros = check.inputs.empty(*after.shape, dtype=after.dtype)
    zeros[...] = 0
    return check.unequal(f"{name} after the last row", after, zeros)


def _core_params(
    core: CoreCalls, operation: Operation, inputs: Inputs, x: Any, *maps: Any, fill: Fill = Fill.ALL
) -> tuple[QuantizeParams, Outputs]:
    """Params for the rows of x as they are, or for those that maps lead to."""
    groups, num_rows = inputs.problem.scale_cols, len(maps[1]) if maps else len(x)
    ue8m0, by_column = operation.variant == "ue8m0", operation.variant == "col"
    shape = (groups, -(-num_rows // 4) * 4) if by_column else (num_rows, -(-groups // 4) if ue8m0 else groups)
    outputs = {
        "codes": inputs.empty(num_rows, x.shape[1], dtype="float8_e4m3fn"),
        "scales": inputs.empty(*shape, dtype="int32" if ue8m0 else "float32"),
    }
    layout = ScaleLayout.COLUMN if by_column else ScaleLayout.ROW
    options = {"layout": layout, "ue8m0": ue8m0, "fill": fill, "amax_min": _AMAX_MIN}
    params = core.params(quantize_params, x, *outputs.values(), *maps, **options)
    core.add_workspace("quantize", params, inputs)
    return params, outputs


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    maps = inputs.slot_to_row, inputs.row_to_token
    params, outputs = _core_params(core, operation, inputs, inputs.x, *maps, fill=core_fill(inputs))
    return core.body(lambda: core.run("quantize", params), outputs)


def _core_quantize_then_permute(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    quantize, tokens = _core_params(core, operation, inputs, inputs.x)
    source = {"rows": tokens["codes"], "row_scales": tokens["scales"]}
    permute, moved = core_permute_params(core, inputs, source, inputs.slot_to_row, inputs.row_to_token)

    def run() -> None:
        core.run("quantize", quantize)
        core.run("permute", permute)

    return core.body(run, {"codes": moved["rows"], "scales": moved["row_scales"]})


def _core_permute_then_quantize(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    if inputs.problem.case.fill and (inputs.problem.plan.row_to_token < 0).any():
        raise Unsupported("gives padding rows the scale of zeros, which is not 0")
    permute, moved = core_permute_params(core, inputs, {"rows": inputs.x}, inputs.slot_to_row, inputs.row_to_token)
    quantize, outputs = _core_params(core, operation, inputs, moved["rows"], fill=core_fill(inputs))

    def run() -> None:
        core.run("permute", permute)
        core.run("quantize", quantize)

    return core.body(run, outputs)


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.quantize import quantize

    arrays = inputs.x, inputs.token_rows, inputs.row_to_token
    ue8m0, layout = operation.variant == "ue8m0", "col" if operation.variant == "col" else "row"
    options = {"amax_min": _AMAX_MIN, "fill_padding": inputs.problem.fill_padding}

    def run() -> Outputs:
        codes, scales = quantize(device, *arrays, ue8m0=ue8m0, scale_layout=layout, **options)
        return {"codes": codes, "scales": scales}

    return Body(run)


def _triton_quantize_then_permute(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.permute import permute
    from paddle_moe_ops.triton.ops.quantize import quantize

    maps, ue8m0 = (inputs.token_rows, inputs.row_to_token), operation.variant == "ue8m0"
    fill = inputs.problem.fill_padding

    def run() -> Outputs:
        quantized = quantize(device, inputs.x, ue8m0=ue8m0, scale_layout="row", amax_min=_AMAX_MIN, fill_padding="none")
        codes, scales = permute(device, *quantized, *maps, fill)
        return {"codes": codes, "scales": scales}

    return Body(run)


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    x, plan, fill = inputs.x, inputs.plan, inputs.problem.fill_padding
    options: dict[str, Any] = {
        "quantize": "fp8_1x128_ue8m0" if operation.variant == "ue8m0" else "fp8_1x128",
        "scale_layout": "col" if operation.variant == "col" else "row",
    }

    def run() -> Outputs:
        codes, scales = paddle_moe_ops.permute(x, plan, fill_padding=fill, **options)
        return {"codes": codes, "scales": scales}

    return Body(run)


OPERATOR = Operator(
    "permute_quantized",
    {"row": _VARIANT, "col": _VARIANT, "ue8m0": _VARIANT},
    least_bytes=_least_bytes,
    probe=_probe,
    checks={"codes": _unlike_codes, "scales": _unlike_scales},
    # The peer of quantising while permuting: two launches in sequence.
    ways=(
        Way(OURS, Library.CORE, _core),
        Way("quantise, then permute", Library.CORE_OTHERWISE, _core_quantize_then_permute, _BY_ROW),
        Way("permute, then quantise", Library.CORE_OTHERWISE, _core_permute_then_quantize, ("row",), gpu_only=True),
        Way(TRITON, Library.TRITON, _triton),
        Way("triton, quantise, then permute", Library.TRITON, _triton_quantize_then_permute, _BY_ROW),
        Way(PUBLIC, Library.PADDLE, _public),
    ),
)
