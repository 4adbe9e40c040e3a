# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing what an implementation wrote with what the oracle says, on the device, at any size.

Maps are compared with the oracle's. Rows that are copied are compared with a gather by the oracle's map. Sums and
scaled rows are computed again with the oracle's arithmetic in PyTorch, every element, and for a sample of tokens the
oracle itself computes them too, so that a mistake of the recomputation shows. Gradients of probabilities are dot
products whose order is free; they are compared with float64 within `testing.tolerances`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from paddle_moe_ops.reference.permutation import sum_rows, sum_rows_backward
from paddle_moe_ops.reference.quantization import COLUMN_ALIGNMENT
from paddle_moe_ops.testing.tolerances import Tolerance, dot_chain, dtype_tols, score_tols

from .device import BFLOAT16_SUMS, BITS, Outputs
from .shapes import Operation
from .tensors import TensorInputs, to_numpy

__all__ = ["difference", "fma32", "poison"]

_CHUNK_ELEMENTS = 1 << 26
_SAMPLED_TOKENS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BFLOAT16_ROUNDOFF = 2.0**-8


def poison(outputs: Outputs) -> None:
    """Overwrite outputs with a pattern that no operator writes: NaN as floats, -1515870811 as int32."""
    for tensor in outputs.values():
        bits = tensor.view(torch.uint8) if tensor.is_contiguous() else tensor
        bits.fill_(0xA5)


def difference(operation: Operation, inputs: TensorInputs, outputs: Outputs, exactness: str) -> str | None:
    """The first difference between outputs and the oracle as a text, or None.

    Args:
        operation: What was computed.
        inputs: From what.
        outputs: Tensors by name: fields of the plan, ``rowmap``, ``rows``, ``row_scales``, ``codes`` as bytes,
            ``scales``, ``out``, ``slot_probs`` [T, K], ``d_rows``, ``d_weights`` [M], ``sorted_rows``,
            ``source_to_dest`` [M], ``router_weights`` and ``router_ids`` [T, K].
        exactness: Of sums: `device.BITS`, FLOAT32_SUMS or BFLOAT16_SUMS.
    """
    if not outputs:
        return "there are no outputs to check"
    ue8m0 = operation.variant == "ue8m0"
    for name, tensor in outputs.items():
        if name in ("rows", "row_scales"):
            found = _copied_rows(name, tensor, inputs, operation)
        elif name == "codes":
            found = _gathered_rows(name, tensor, inputs.quantized(ue8m0)[0], inputs, padding=inputs.problem.case.fill)
        elif name == "scales":
            found = _scales(tensor, inputs, inputs.quantized(ue8m0)[1], operation.variant == "col")
        elif name == "out":
            found = _summed_rows(tensor, inputs, operation.variant == "weighted", exactness)
        elif name == "d_rows":
            found = _scaled_rows(tensor, inputs, operation.variant != "plain")
        elif name == "d_weights":
            found = _dot_products(tensor, inputs)
        elif name == "sorted_rows":
            found = _sorted_rows(tensor, inputs, operation.variant)
        elif name == "source_to_dest":
            found = _equal_arrays(name, tensor, inputs.problem.source_to_dest)
        elif name == "slot_probs":
            plan, probs = inputs.problem.plan, inputs.problem.probs
            found = _equal_arrays(name, tensor, np.where(plan.slot_to_row >= 0, probs, np.float32(0)))
        elif name == "router_ids":
            found = _equal_arrays(name, tensor, inputs.problem.chosen[1])
        elif name == "router_weights":
            found = _router_weights(tensor, inputs)
        elif name == "rowmap":
            found = _equal_arrays(name, tensor, inputs.problem.rowmap)
        else:
            found = _equal_arrays(name, tensor, getattr(inputs.problem.plan, name))
        if found:
            return found
    return None


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """RN(a * b + c) of float32 tensors, rounded once: `reference.fma32` in PyTorch."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    inexact = torch.isfinite(total) & (error != 0)
    bits = total.view(torch.int64)
    rounded_away = torch.signbit(error) != torch.signbit(total)
    odd_bits = torch.where(inexact, (bits - rounded_away.long()) | 1, bits)
    return odd_bits.view(torch.float64).float()


def _chunks(count: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(width, 1))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _unequal(name: str, actual: torch.Tensor, expected: torch.Tensor, offset: int = 0) -> str | None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        given, due = f"{actual.dtype} {list(actual.shape)}", f"{expected.dtype} {list(expected.shape)}"
        return f"{name}: {given} instead of {due}"
    bits = _BITS[actual.element_size()]
    differs = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if not bool(differs.any()):
        return None
    place = torch.nonzero(differs)[0].tolist()
    got, due = (value[tuple(place)].item() for value in (actual, expected))
    place[0] += offset
    return f"{name}: {got!r} instead of {due!r} at {place}, one of {int(differs.sum())} that differ"


def _equal_arrays(name: str, actual: torch.Tensor, expected: NDArray) -> str | None:
    return _unequal(name, actual, torch.from_numpy(np.ascontiguousarray(expected)).to(actual.device))


def _expected_shape(name: str, actual: torch.Tensor, count: int, width: int, dtype: torch.dtype) -> str | None:
    if (actual.dtype, tuple(actual.shape)) == (dtype, (count, width)):
        return None
    return f"{name}: {actual.dtype} {list(actual.shape)} instead of {dtype} {[count, width]}"


def _copied_rows(name: str, actual: torch.Tensor, inputs: TensorInputs, operation: Operation) -> str | None:
    source = {"rows": inputs.x_fp8 if operation.variant == "fp8" else inputs.x, "row_scales": inputs.scale}[name]
    return _gathered_rows(name, actual, source, inputs, padding=inputs.problem.case.fill)


def _gathered_rows(
    name: str, actual: torch.Tensor, source: torch.Tensor, inputs: TensorInputs, padding: bool
) -> str | None:
    """Rows of ``source`` by the oracle's map; padding rows are compared with zeros, or not at all."""
    count, width = inputs.problem.plan.num_rows, source.shape[1]
    wrong = _expected_shape(name, actual, count, width, source.dtype)
    if wrong:
        return wrong
    bits = _BITS[source.element_size()]
    for rows in _chunks(count, width):
        tokens = inputs.row_to_token[rows].long()
        expected = source.view(bits)[tokens.clamp(min=0)]
        got = actual.view(bits)[rows]
        if padding:
            expected[tokens < 0] = 0
        else:
            got = torch.where((tokens < 0)[:, None], expected, got)
        found = _unequal(name, got.view(source.dtype), expected.view(source.dtype), rows.start)
        if found:
            return found
    return None


def _scales(actual: torch.Tensor, inputs: TensorInputs, source: torch.Tensor, by_column: bool) -> str | None:
    """Scales by row, or by column, where columns behind the last row fill up a multiple of four."""
    fill, num_rows = inputs.problem.case.fill, inputs.problem.plan.num_rows
    if not by_column:
        return _gathered_rows("scales", actual, source, inputs, padding=fill)
    columns = -(-num_rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    found = _expected_shape("scales", actual, source.shape[1], columns, source.dtype)
    found = found or _gathered_rows("scales", actual[:, :num_rows].T, source, inputs, padding=fill)
    behind = actual[:, num_rows:]
    return found or (_unequal("scales behind the last row", behind, torch.zeros_like(behind)) if fill else None)


def _sorted_rows(actual: torch.Tensor, inputs: TensorInputs, variant: str) -> str | None:
    """Rows of the buffer where the oracle puts them, or from there."""
    sources = inputs.dest_to_source if variant == "forward" else inputs.source_to_dest
    count, width = inputs.rows.shape
    wrong = _expected_shape("sorted_rows", actual, count, width, inputs.rows.dtype)
    if wrong:
        return wrong
    for rows in _chunks(count, width):
        found = _unequal("sorted_rows", actual[rows], inputs.rows[sources[rows].long()], rows.start)
        if found:
            return found
    return None


def _summed_rows(actual: torch.Tensor, inputs: TensorInputs, weighted: bool, exactness: str) -> str | None:
    shape = inputs.problem.case.shape
    wrong = _expected_shape("out", actual, shape.num_tokens, shape.hidden, inputs.rows.dtype)
    if wrong:
        return wrong
    for tokens in _chunks(shape.num_tokens, 4 * shape.hidden):
        exact, magnitude = _sums(inputs, tokens, weighted)
        if exactness == BITS:
            found = _unequal("out", actual[tokens], exact, tokens.start)
        else:
            tolerance = dtype_tols(_to_numpy_dtype(exact), shape.topk)
            if exactness == BFLOAT16_SUMS:
                tolerance = tolerance._replace(of_magnitude=2 * (shape.topk + 1) * _BFLOAT16_ROUNDOFF)
            found = _too_far("out", actual[tokens], exact, magnitude, tolerance, tokens.start)
        if found:
            return found
    return _unlike_the_oracle(actual, inputs, weighted) if exactness == BITS else None


def _sums(inputs: TensorInputs, tokens: slice, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of some tokens by the oracle's rule, and the sums of the absolute values of their terms."""
    listed, rows = inputs.token_rows[tokens].long(), inputs.rows
    total = torch.full((len(listed), rows.shape[1]), -0.0, device=rows.device)
    magnitude = torch.zeros_like(total)
    for rank in range(listed.shape[1]):
        row = listed[:, rank]
        live = (row >= 0)[:, None]
        values = rows[row.clamp(min=0)].float() if len(rows) else torch.zeros_like(total)
        if weighted and len(rows):
            weights = inputs.row_probs[row.clamp(min=0)][:, None]
            added = fma32(values, weights, total)
            values = values * weights
        else:
            added = total + values
        total = torch.where(live, added, total)
        magnitude += torch.where(live, values.abs(), 0.0)
    counts = (listed >= 0).sum(1, keepdim=True)
    # No rows give +0.0. A single unweighted row, which is copied, comes out of -0.0 + v with its bits.
    return torch.where(counts > 0, total, 0.0).to(rows.dtype), magnitude


def _sampled_tokens(num_tokens: int) -> np.ndarray:
    return np.unique(np.linspace(0, num_tokens - 1, _SAMPLED_TOKENS).astype(np.int64))


def _unlike_the_oracle(actual: torch.Tensor, inputs: TensorInputs, weighted: bool) -> str | None:
    plan = inputs.problem.plan
    tokens = _sampled_tokens(plan.num_tokens)
    listed = plan.token_rows[tokens]
    live = listed >= 0
    used = listed[live]
    listed = np.where(live, np.cumsum(live.reshape(-1)).reshape(live.shape) - 1, -1)
    values = to_numpy(inputs.rows[torch.from_numpy(used).long().to(actual.device)])
    weights = plan.row_probs[used] if weighted and plan.row_probs is not None else None
    expected = torch.from_numpy(sum_rows(values, listed, weights).view(np.int16)).view(actual.dtype)
    sampled = actual[torch.from_numpy(tokens).to(actual.device)].cpu()
    return _unequal("out of sampled tokens", sampled, expected)


def _scaled_rows(actual: torch.Tensor, inputs: TensorInputs, weighted: bool) -> str | None:
    """d_rows[r] = d_out[t] times the row's weight, rounded once; rows without a token are zeros."""
    if not weighted:
        return _gathered_rows("d_rows", actual, inputs.d_out, inputs, padding=True)
    plan, width = inputs.problem.plan, inputs.d_out.shape[1]
    wrong = _expected_shape("d_rows", actual, plan.num_rows, width, inputs.d_out.dtype)
    if wrong:
        return wrong
    for rows in _chunks(plan.num_rows, 2 * width):
        tokens = inputs.row_to_token[rows].long()
        scaled = (inputs.d_out[tokens.clamp(min=0)].float() * inputs.row_probs[rows][:, None]).to(actual.dtype)
        scaled[tokens < 0] = 0
        found = _unequal("d_rows", actual[rows], scaled, rows.start)
        if found:
            return found
    sample = _sampled_tokens(plan.num_rows)
    index = torch.from_numpy(sample).to(actual.device)
    of_rows = np.where(plan.row_to_token[sample] >= 0, np.arange(len(sample)), -1)
    gradients = to_numpy(inputs.d_out[inputs.row_to_token[index].long().clamp(min=0)])
    expected, _ = sum_rows_backward(gradients, of_rows, None, to_numpy(inputs.row_probs[index]))
    return _unequal(
        "d_rows of sampled rows", actual[index].cpu(), torch.from_numpy(expected.view(np.int16)).view(actual.dtype)
    )


def _dot_products(actual: torch.Tensor, inputs: TensorInputs) -> str | None:
    count, width = inputs.problem.plan.num_rows, inputs.d_out.shape[1]
    if (actual.dtype, tuple(actual.shape)) != (torch.float32, (count,)):
        return f"d_weights: {actual.dtype} {list(actual.shape)} instead of torch.float32 {[count]}"
    for rows in _chunks(count, 4 * width):
        tokens = inputs.row_to_token[rows].long()
        terms = inputs.d_out[tokens.clamp(min=0)].double() * inputs.rows[rows].double()
        terms[tokens < 0] = 0
        expected = terms.sum(1).float()
        found = _too_far(
            "d_weights",
            actual[rows],
            expected,
            terms.abs().sum(1),
            dtype_tols(np.float32, dot_chain(width)),
            rows.start,
        )
        if found:
            return found
    return None


def _router_weights(actual: torch.Tensor, inputs: TensorInputs) -> str | None:
    expected = torch.from_numpy(inputs.problem.chosen[0]).to(actual.device)
    wrong = _expected_shape("router_weights", actual, len(expected), expected.shape[1], expected.dtype)
    tolerance = score_tols(np.float32, inputs.problem.case.shape.num_experts)
    return wrong or _too_far("router_weights", actual, expected, expected, tolerance, 0)


def _too_far(
    name: str, actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, tolerance: Tolerance, offset: int
) -> str | None:
    got, due = actual.double(), expected.double()
    allowed = tolerance.of_result * due.abs() + tolerance.of_magnitude * magnitude.double() + tolerance.absolute
    excess = torch.nan_to_num((got - due).abs() / allowed, nan=float("inf"))
    if not excess.numel() or excess.max() <= 1:
        return None
    place = list(np.unravel_index(int(excess.argmax()), tuple(excess.shape)))
    text = f"{got[tuple(place)].item()!r} instead of {due[tuple(place)].item()!r}"
    worst = excess[tuple(place)].item()
    return f"{name}: {text} at {[int(place[0]) + offset, *map(int, place[1:])]}, {worst:.3g} times the allowed error"


def _to_numpy_dtype(tensor: torch.Tensor) -> np.dtype:
    return to_numpy(tensor[:0]).dtype
