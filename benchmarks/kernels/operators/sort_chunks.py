# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`sort_chunks`: chunks of rows in another order, and back."""

from __future__ import annotations

from typing import Any

import paddle_moe_ops
from tests.core.operators.sort_chunks import sort_chunks_params

from ..check import Check
from ..core import CoreCalls
from ..device import Body, Outputs
from ..inputs import Inputs
from ..model import WORD, Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import NUMPY, PLAIN, TORCH, TRANSFORMER_ENGINE, Library, Operator, Variant, Way
from .moving import row_bytes

_VARIANT = Variant("bfloat16", ("sorted_rows",))
_NOTE = "gather by a given map"


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """read MHb + 8E (sizes, order), written MHb; forward also the map 4M"""
    num_rows = problem.plan.num_rows
    rows = num_rows * row_bytes(operation, problem)
    chunk_map = WORD * num_rows if operation.variant == "forward" else 0
    return Bytes(rows + 2 * WORD * problem.case.shape.num_experts, rows + chunk_map)


def _probe(operation: Operation, problem: Problem) -> Work:
    rows = problem.plan.num_rows * row_bytes(operation, problem)
    return Work(Kind.FANOUT, rows, rows)


def _sources(operation: Operation, inputs: Any) -> Any:
    """The rows that sorted ones come from."""
    return inputs.dest_to_source if operation.variant == "forward" else inputs.source_to_dest


def _unlike_sorted(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    return check.gathered(name, actual, check.inputs.rows, _sources(operation, check.inputs))


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    forward, rows = operation.variant == "forward", inputs.rows
    outputs: Outputs = {"sorted_rows": inputs.empty(*rows.shape, dtype=rows.dtype)}
    if forward:
        outputs["source_to_dest"] = inputs.empty(len(rows))
    params = core.params(
        sort_chunks_params,
        *(rows, inputs.chunk_sizes, inputs.chunk_order, outputs["sorted_rows"]),
        source_to_dest=outputs.get("source_to_dest"),
        inverse=not forward,
    )
    core.add_workspace("sort_chunks", params, inputs)
    return core.body(lambda: core.run("sort_chunks", params), outputs)


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.sort_chunks import chunk_map, sort_chunks, sort_chunks_backward

    rows, sizes, order = inputs.rows, inputs.chunk_sizes, inputs.chunk_order

    def run() -> Outputs:
        source_to_dest = chunk_map(device, sizes, order, rows.shape[0])
        return {"sorted_rows": sort_chunks(device, rows, None, source_to_dest)[0], "source_to_dest": source_to_dest}

    if operation.variant == "forward":
        return Body(run)
    source_to_dest = inputs.source_to_dest
    return Body(lambda: {"sorted_rows": sort_chunks_backward(device, rows, source_to_dest)})


def _torch(_: Any, operation: Operation, inputs: Any) -> Body:
    index = _sources(operation, inputs).long()
    return Body(lambda: {"sorted_rows": inputs.rows.index_select(0, index)}, note=_NOTE)


def _transformer_engine(engine: Any, operation: Operation, inputs: Any) -> Body:
    forward, functions = operation.variant == "forward", engine.functions
    (num_rows, hidden), sizes, order = inputs.rows.shape, inputs.chunk_sizes, inputs.chunk_order

    def run() -> Outputs:
        chunk_map = inputs.source_to_dest
        if forward:
            chunk_map = functions.make_chunk_sort_map(sizes, order, num_rows, len(sizes))
        rows, _ = functions.sort_chunks_by_map(inputs.rows, chunk_map, None, num_rows, hidden, forward)
        return {"sorted_rows": rows, **({"source_to_dest": chunk_map} if forward else {})}

    return Body(run, note="" if forward else "by a given map")


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    from ..cpu_paddle import gradients

    forward = operation.variant == "forward"
    sizes, order, rows = inputs.chunk_sizes, inputs.chunk_order, inputs.leaf("rows", gradient=not forward)

    def run() -> Outputs:
        out, _, source_to_dest = paddle_moe_ops.sort_chunks(rows, sizes, order)
        return {"sorted_rows": out, "source_to_dest": source_to_dest}

    return Body(run) if forward else gradients(run()["sorted_rows"], rows.detach(), {"sorted_rows": rows})


def _plain(paddle: Any, operation: Operation, inputs: Any) -> Body:
    rows, index = inputs.rows, _sources(operation, inputs)
    return Body(lambda: {"sorted_rows": paddle.gather(rows, index)}, note=_NOTE)


def _numpy(numpy: Any, operation: Operation, inputs: Inputs) -> Body:
    index = _sources(operation, inputs)
    return Body(lambda: {"sorted_rows": numpy.take(inputs.rows, index, axis=0)}, note="take by a given map")


OPERATOR = Operator(
    "sort_chunks",
    {"forward": _VARIANT, "backward": _VARIANT},
    least_bytes=_least_bytes,
    probe=_probe,
    checks={"sorted_rows": _unlike_sorted},
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way(TORCH, Library.TORCH, _torch),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
        Way(NUMPY, Library.NUMPY, _numpy),
    ),
)
