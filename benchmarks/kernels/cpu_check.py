# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing what an implementation wrote into CPU memory with the NumPy oracle, every element."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.reference.quantization import COLUMN_ALIGNMENT
from paddle_moe_ops.testing.tolerances import Tolerance, dot_chain, dtype_tols, score_tols

from .cpu_arrays import BFLOAT16, ArrayInputs, chunks
from .device import BFLOAT16_SUMS, BITS, Outputs
from .shapes import Operation

__all__ = ["difference"]

_BFLOAT16_ROUNDOFF = 2.0**-8


def difference(operation: Operation, inputs: ArrayInputs, outputs: Outputs, exactness: str) -> str | None:
    """The first difference between outputs and the oracle as a text, or None.

    Args:
        operation: What was computed.
        inputs: From what.
        outputs: Arrays by name: fields of the plan, ``rowmap``, ``rows``, ``row_scales``, ``codes``,
            ``scales``, ``out``, ``slot_probs`` [T, K], ``d_rows``, ``d_weights`` [M], ``sorted_rows`` and
            ``source_to_dest`` [M], ``router_weights`` and ``router_ids`` [T, K], ``copy`` of ones.
        exactness: Of sums: `device.BITS`, FLOAT32_SUMS or BFLOAT16_SUMS.
    """
    if not outputs:
        return "there are no outputs to check"
    missing = [name for name in _due(operation) if name not in outputs]
    if missing and "copy" not in outputs:
        return f"there is no {' and no '.join(missing)} to check"
    ue8m0 = operation.variant == "ue8m0"
    plan, weighted = inputs.problem.plan, operation.variant not in ("plain", "bf16", "fp8", "maps")
    for name, array in outputs.items():
        if name == "rows":
            source = inputs.x_fp8 if operation.variant == "fp8" else inputs.x
            found = _moved_rows(name, array, source, inputs, inputs.problem.case.fill)
        elif name == "row_scales":
            found = _moved_rows(name, array, inputs.scale, inputs, inputs.problem.case.fill)
        elif name == "codes":
            found = _moved_rows(name, array, inputs.quantized(ue8m0)[0], inputs, inputs.problem.case.fill)
        elif name == "scales":
            found = _scales(array, inputs, inputs.quantized(ue8m0)[1], operation.variant == "col")
        elif name == "out":
            found = _sums(array, inputs, weighted, exactness)
        elif name == "d_rows":
            found = _scaled(array, inputs) if weighted else _moved_rows(name, array, inputs.d_out, inputs, True)
        elif name == "d_weights":
            found = _dot_products(array, inputs)
        elif name == "sorted_rows":
            found = _sorted(array, inputs, operation.variant)
        elif name == "source_to_dest":
            found = _unequal(name, array, inputs.problem.source_to_dest)
        elif name == "router_ids":
            found = _unequal(name, array, inputs.problem.chosen[1])
        elif name == "router_weights":
            found = _router_weights(array, inputs)
        elif name == "copy":
            found = _unequal(name, array, np.ones_like(array))
        elif name == "slot_probs":
            probs = np.where(plan.slot_to_row >= 0, inputs.problem.probs, np.float32(0))
            found = _unequal(name, array, probs)
        else:
            found = _unequal(name, array, inputs.problem.rowmap if name == "rowmap" else getattr(plan, name))
        if found:
            return found
    return None


def _due(operation: Operation) -> tuple[str, ...]:
    """What every implementation of an operation gives; maps and probabilities only some of them."""
    if operation.op == "unpermute_backward":
        return {"plain": ("d_rows",), "dx": ("d_rows",), "dprob": ("d_weights",)}.get(
            operation.variant, ("d_rows", "d_weights")
        )
    moved = ("rows", "row_scales") if operation.variant == "fp8" else ("rows",)
    return {
        "route_permute": moved,
        "permute": moved,
        "moe_permute": moved,
        "permute_quantized": ("codes", "scales"),
        "unpermute": ("out",),
        "moe_unpermute": ("out",),
        "sort_chunks": ("sorted_rows",),
        "topk": ("router_weights", "router_ids"),
    }.get(operation.op, ())


def _bits(array: NDArray) -> NDArray:
    return array.view(np.dtype(f"u{array.itemsize}"))


def _unlike(name: str, actual: NDArray, dtype: np.dtype, shape: tuple[int, ...]) -> str | None:
    if (actual.dtype, actual.shape) == (dtype, shape):
        return None
    return f"{name}: {actual.dtype} {list(actual.shape)} instead of {dtype} {list(shape)}"


def _unequal(name: str, actual: NDArray, expected: NDArray, offset: int = 0) -> str | None:
    wrong = _unlike(name, actual, expected.dtype, expected.shape)
    if wrong:
        return wrong
    differs = _bits(np.ascontiguousarray(actual)) != _bits(np.ascontiguousarray(expected))
    if not differs.any():
        return None
    place = [int(index) for index in np.argwhere(differs)[0]]
    got, due = (value[tuple(place)].item() for value in (actual, expected))
    place[0] += offset
    return f"{name}: {got!r} instead of {due!r} at {place}, one of {int(differs.sum())} that differ"


def _moved_rows(name: str, actual: NDArray, source: NDArray, inputs: ArrayInputs, padding: bool) -> str | None:
    """Rows of ``source`` by the oracle's map; padding rows are compared with zeros, or not at all."""
    row_to_token = inputs.problem.plan.row_to_token
    wrong = _unlike(name, actual, source.dtype, (len(row_to_token), source.shape[1]))
    if wrong:
        return wrong
    for rows in chunks(*actual.shape):
        tokens = row_to_token[rows]
        expected = source[np.maximum(tokens, 0)]
        expected[tokens < 0] = 0 if padding else actual[rows][tokens < 0]
        found = _unequal(name, actual[rows], expected, rows.start)
        if found:
            return found
    return None


def _scales(actual: NDArray, inputs: ArrayInputs, source: NDArray, by_column: bool) -> str | None:
    """Scales by row, or by column, where columns behind the last row fill up a multiple of four."""
    fill, num_rows = inputs.problem.case.fill, inputs.problem.plan.num_rows
    if not by_column:
        return _moved_rows("scales", actual, source, inputs, fill)
    columns = -(-num_rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    found = _unlike("scales", actual, source.dtype, (source.shape[1], columns))
    found = found or _moved_rows("scales", actual[:, :num_rows].T, source, inputs, fill)
    behind = actual[:, num_rows:]
    return found or (_unequal("scales behind the last row", behind, np.zeros_like(behind)) if fill else None)


def _sums(actual: NDArray, inputs: ArrayInputs, weighted: bool, exactness: str) -> str | None:
    exact, magnitude = inputs.sums(weighted)
    wrong = _unlike("out", actual, exact.dtype, exact.shape)
    if wrong:
        return wrong
    tolerance = dtype_tols(BFLOAT16, inputs.problem.case.shape.topk)
    if exactness == BFLOAT16_SUMS:
        tolerance = tolerance._replace(of_magnitude=2 * (inputs.problem.case.shape.topk + 1) * _BFLOAT16_ROUNDOFF)
    for tokens in chunks(*exact.shape):
        if exactness == BITS:
            found = _unequal("out", actual[tokens], exact[tokens], tokens.start)
        else:
            found = _too_far("out", actual[tokens], exact[tokens], magnitude[tokens], tolerance, tokens.start)
        if found:
            return found
    return None


def _scaled(actual: NDArray, inputs: ArrayInputs) -> str | None:
    wrong = _unlike("d_rows", actual, BFLOAT16, (inputs.problem.plan.num_rows, inputs.d_out.shape[1]))
    if wrong:
        return wrong
    for rows in chunks(*actual.shape):
        found = _unequal("d_rows", actual[rows], inputs.scaled(rows), rows.start)
        if found:
            return found
    return None


def _sorted(actual: NDArray, inputs: ArrayInputs, variant: str) -> str | None:
    """Rows of the buffer where the oracle puts them, or from there."""
    problem = inputs.problem
    sources = problem.dest_to_source if variant == "forward" else problem.source_to_dest
    wrong = _unlike("sorted_rows", actual, inputs.rows.dtype, inputs.rows.shape)
    if wrong:
        return wrong
    for rows in chunks(*actual.shape):
        found = _unequal("sorted_rows", actual[rows], inputs.rows[sources[rows]], rows.start)
        if found:
            return found
    return None


def _dot_products(actual: NDArray, inputs: ArrayInputs) -> str | None:
    row_to_token, width = inputs.problem.plan.row_to_token, inputs.d_out.shape[1]
    wrong = _unlike("d_weights", actual, np.dtype(np.float32), row_to_token.shape)
    if wrong:
        return wrong
    tolerance = dtype_tols(np.float32, dot_chain(width))
    for rows in chunks(len(row_to_token), width):
        tokens = row_to_token[rows]
        terms = inputs.d_out[np.maximum(tokens, 0)].astype(np.float64) * inputs.rows[rows].astype(np.float64)
        terms[tokens < 0] = 0
        expected = terms.sum(1).astype(np.float32)
        magnitude = np.abs(terms).sum(1)
        found = _too_far("d_weights", actual[rows], expected, magnitude, tolerance, rows.start)
        if found:
            return found
    return None


def _router_weights(actual: NDArray, inputs: ArrayInputs) -> str | None:
    expected = inputs.problem.chosen[0]
    wrong = _unlike("router_weights", actual, expected.dtype, expected.shape)
    tolerance = score_tols(np.float32, inputs.problem.case.shape.num_experts)
    return wrong or _too_far("router_weights", actual, expected, expected, tolerance, 0)


def _too_far(
    name: str, actual: NDArray, expected: NDArray, magnitude: NDArray, tolerance: Tolerance, offset: int
) -> str | None:
    got, due = actual.astype(np.float64), expected.astype(np.float64)
    allowed = tolerance.of_result * np.abs(due) + tolerance.of_magnitude * magnitude + tolerance.absolute
    excess = np.nan_to_num(np.abs(got - due) / allowed, nan=np.inf)
    if not excess.size or excess.max() <= 1:
        return None
    place = np.unravel_index(int(excess.argmax()), excess.shape)
    where = [int(place[0]) + offset, *map(int, place[1:])]
    return f"{name}: {got[place]!r} instead of {due[place]!r} at {where}, {excess[place]:.3g} times the allowed error"
