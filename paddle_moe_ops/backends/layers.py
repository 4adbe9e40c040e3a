# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of SwiGLU experts by the compiled library: as one operator, or as a node that calls its passes.

The operator serves dygraph and graphs alike. In dygraph a node does what operators cannot: it adds gradients of
matrices to existing ones, keeps quantised matrices from one call to the next, and the first GEMM's output as codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .._graphs import GraphValue, constant, dense, float32, to_dtype, without_autocast
from .._native import native
from . import compiled
from .accumulation import put
from .base import FLOAT8_ROWS, GemmSpec, Matrices, MlpSpec, Tensors, Validation, maps_of_layer
from .experts import connected_mlp
from .groups import check_plan_groups
from .quantized import FLOAT8_FORMAT, FORMATS, QuantizedMatrices
from .samples import DeviceSamples
from .stacking import stack_or_view

__all__ = [
    "LayerOperators",
    "dequantized",
    "float8_parts",
    "has_layer_kernels",
    "layer_operators",
    "quantized_layer",
    "quantized_matrices",
]

_NAME = "moe_mlp"
_OPERATOR = f"the operator {_NAME} of the compiled library"
_RECOMPUTES, _KEEPS, _KEEPS_CODES = range(3)  # pmo_layer_hidden
_KERNELS = {160: "swap-AB", 128: "ping-pong", 64: "few rows"}  # by tile rows, PMO_GROUPED_*
_FORMS = 4  # codes and scales of two matrices for one pass
_EXPONENT_BIT = 1 << 23  # of float32


def has_layer_kernels(x: Tensor, down: Matrices, spec: MlpSpec) -> bool:
    """Return whether the library has kernels for all GEMMs of a layer, on the device of its tokens."""
    matrix = down if isinstance(down, Tensor) else down[0]
    if not compiled.has_operators(x) or matrix.dtype != x.dtype:
        return False
    inner = matrix.shape[-1 if spec.transpose else -2]
    return native.layer_takes(x, spec.plan.num_rows, len(down), x.shape[1], inner, int(spec.compute is not None))


def why_not_by_library(x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
    """Return the reason why the library does not run a layer as one, or None if it does."""
    if not compiled.has_operators(x):
        return "the compiled library has no operators there"
    if spec.compute is not None or (not isinstance(x, GraphValue) and has_layer_kernels(x, down, spec)):
        return None
    if spec.accumulates:
        return "without kernels, the library's operator does not accumulate"
    for each in (gate_up, down):
        if not isinstance(each, (Tensor, GraphValue)) or each.dtype != x.dtype:
            return "the library's operator takes one tensor each of gate_up and down, of the tokens' dtype"
    return None


def layer_by_library(x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
    """`Backend.moe_mlp` where `why_not_by_library` has no reason against it."""
    in_graph = isinstance(x, GraphValue)
    if spec.validation != Validation.OFF and not in_graph:
        check_plan_groups(spec.plan)
    with without_autocast():
        if in_graph or (spec.compute is None and not spec.accumulates and spec.deferral is None):
            return _by_operator(x, gate_up, down, weights, spec, in_graph)
        tokens, gate_up, down = _in_one_dtype(x, gate_up, down)
        kernels = _on_kernels if has_layer_kernels(tokens, down, spec) else _by_matmul
        return to_dtype(connected_mlp(kernels, tokens, gate_up, down, weights, spec), x.dtype)


def _by_operator(
    x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec, in_graph: bool
) -> Tensor:
    tokens, gate_up, down = _in_one_dtype(x, _stacked(gate_up, in_graph), _stacked(down, in_graph))
    # a graph may run its backward pass twice, and checks no versions
    out = compiled.moe_mlp(
        tokens,
        gate_up,
        down,
        _ones(spec.plan) if weights is None else weights,
        spec.plan,
        transpose=spec.transpose,
        keeps_hidden=spec.keeps_hidden,
        workspace=spec.workspace,
        in_place=not in_graph,
        by_slot=weights is not None and spec.weights_by_slot,
        float8=spec.compute is not None,
        float8_wgrads=spec.float8_wgrads,
    )
    return to_dtype(out, x.dtype)


def _stacked(given: Matrices, in_graph: bool) -> Tensor:
    if isinstance(given, (Tensor, GraphValue)):
        return given
    return paddle.stack(given) if in_graph else stack_or_view(given, _NAME)


def _in_one_dtype(x: Tensor, gate_up: Matrices, down: Matrices) -> tuple[Any, ...]:
    """The operands, in float32 unless they have one dtype."""
    given: Any = gate_up, down
    if all(part.dtype == x.dtype for each in given for part in (each if isinstance(each, (list, tuple)) else [each])):
        return x, gate_up, down
    return float32(x), _wide(gate_up), _wide(down)


def _wide(given: Matrices) -> Matrices:
    return [float32(each) for each in given] if isinstance(given, (list, tuple)) else float32(given)


def _ones(plan: Any) -> Tensor:
    return paddle.ones_like(plan.row_to_token, dtype="float32")


class LayerKernels:
    """The passes of a layer in dygraph, of `base.Kernels`.

    Args:
        has_kernels: whether the library has kernels for the layers. Otherwise GEMMs are Paddle's matmul, and both
            passes dequantise the same codes.
    """

    def __init__(self, has_kernels: bool) -> None:
        self.name = "compiled" if has_kernels else "matmul"
        self.overwrites_hidden = has_kernels
        self.defers_wgrads = True

    def quantize_experts(self, gate_up: Tensor, down: Tensor, transpose: bool, both: bool) -> Tensors:
        """Codes and scales of both matrices for the forward pass, then the backward pass, which may share them."""
        if not self.overwrites_hidden:
            return tuple(part for each in (gate_up, down) for part in quantized_matrices(each))
        forward: list[Tensor] = []
        backward: list[Tensor] = []
        for each in (gate_up, down):
            straight_and_turned = compiled.direct("quantize_matrices", each, transpose or both, both or not transpose)
            pairs = straight_and_turned[:2], straight_and_turned[2:]
            forward += pairs[0 if transpose else 1]
            backward += pairs[1 if transpose else 0]
        return (*forward, *backward) if both else tuple(forward)

    def for_both_passes(self, quantized: Tensors) -> Tensors:
        if len(quantized) != _FORMS or not self.overwrites_hidden:
            return quantized
        return (*quantized, *map(_transposed, quantized))

    def new_samples(self, like: Tensor) -> DeviceSamples:
        return DeviceSamples(like)

    def for_backward(self, quantized: Tensors, keeps_hidden: bool) -> tuple[Tensor | None, ...]:
        if not self.overwrites_hidden:
            return quantized
        unread: list[Tensor | None] = [None] * _FORMS
        if not keeps_hidden:  # the first GEMM runs again
            unread[:2] = quantized[:2]
        return (*unread, *quantized[_FORMS:])

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, None]:
        keep = _RECOMPUTES
        if keeps and spec.keeps_hidden:
            keep = _KEEPS_CODES if spec.hidden_in_float8 else _KEEPS
        gate_up_codes, down_codes, *_ = self._codes(spec)
        numbers = *self._options(weights, spec), keep
        operands = _operands(x, gate_up, down, weights, spec)
        out, *hidden = compiled.direct("layer_forward", *operands, *gate_up_codes, *down_codes, *numbers)
        return out, tuple(each for each in hidden if each is not None), weights, None

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        sums, operands = self._sums(destinations), (d_out, x, gate_up, down, weights, hidden)
        d_x, *matrices, d_weights = self._backward(*operands, spec, sums, wanted, False)
        return d_x, *_put(destinations, matrices), d_weights

    def moe_mlp_dgrads(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: None,
        spec: MlpSpec,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor]]:
        all_wanted = wanted[0], False, False, wanted[1]
        made = self._backward(d_out, x, gate_up, down, weights, hidden, spec, (None, None), all_wanted, True)
        d_x, _, _, d_weights, d_hidden, scaled = made
        return d_x, d_weights, (d_hidden, scaled)

    def moe_mlp_wgrads(
        self,
        kept: tuple[Tensor | None, Tensor | None],
        d_out: Tensor,
        x: Tensor,
        inner: int,
        tables: None,
        spec: MlpSpec,
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        maps, options = maps_of_layer(spec.plan), (inner, spec.transpose, spec.workspace)
        float8 = spec.compute is not None, spec.float8_wgrads
        made = compiled.direct("layer_wgrads", x, *maps, *kept, d_out, *self._sums(destinations), *options, *float8)
        d_gate_up, d_down = _put(destinations, made)
        return d_gate_up, d_down

    def _backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        spec: MlpSpec,
        sums: Sequence[Tensor | None],
        wanted: tuple[bool, bool, bool, bool],
        defers: bool,
    ) -> tuple[Any, ...]:
        gate_up_codes, _, turned_gate_up, turned_down = self._codes(spec)
        return compiled.direct(
            "layer_backward",
            *_operands(x, gate_up, down, weights, spec),
            *(*gate_up_codes, *turned_gate_up, *turned_down, *(*hidden, None, None)[:2]),
            *(d_out, *sums, *self._options(weights, spec), spec.float8_wgrads, *wanted, defers),
        )

    def _sums(self, destinations: tuple[Any, Any]) -> list[Tensor | None]:
        """The tensors that kernels add to."""
        return [None if each is None or not self.overwrites_hidden else each.tensor for each in destinations]

    def _codes(self, spec: MlpSpec) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """Codes and scales of gate_up and down, then those of the backward pass; None where a pass quantises them."""
        given = spec.quantized
        if given is None:
            return ((None, None),) * 4
        pairs = [(given[place], given[place + 1]) for place in range(0, len(given), 2)]
        if not self.overwrites_hidden:
            return (*pairs, *pairs)
        return (*pairs, *[(None, None)] * (4 - len(pairs)))

    def _options(self, weights: Tensor | None, spec: MlpSpec) -> tuple[bool, bool, int, bool]:
        by_slot = weights is not None and spec.weights_by_slot
        return spec.transpose, by_slot, spec.workspace, spec.compute is not None


_on_kernels, _by_matmul = LayerKernels(True), LayerKernels(False)


def _put(destinations: tuple[Any, Any], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients of matrices to their destinations, unless kernels have; return those without one."""
    for destination, gradient in zip(destinations, gradients, strict=True):
        if destination is not None and gradient is not None:
            put(destination, gradient)
    pairs = zip(destinations, gradients, strict=True)
    return [gradient if destination is None else None for destination, gradient in pairs]


def quantized_matrices(matrices: Tensor) -> tuple[Tensor, ...]:
    """Float8 codes of matrices [E, A, B], and a scale for each 128 x 128 elements."""
    return compiled.direct("quantize_matrices", matrices, True, False)[:2]


class _LibraryFloat8:
    """`Float8Parts` of the library."""

    name = "matmul"  # `LayerKernels` without kernels has the same codes

    def new_samples(self, like: Tensor) -> DeviceSamples:
        return DeviceSamples(like)

    def codes_of(self, matrix: Tensor) -> Tensors:
        return quantized_matrices(matrix)

    def values(self, codes: Tensors, num_inputs: int, transpose: bool) -> Tensor:
        matrices = QuantizedMatrices(codes[0], codes[1], FLOAT8_FORMAT, transpose)
        return dequantized(matrices, num_inputs, paddle.float32)

    def rows(self, rows: Tensor) -> Tensor:
        codes, scales = compiled.backend.quantize_1x128(rows, FLOAT8_ROWS)
        return compiled.backend.dequantize_1x128(codes, scales, "row", paddle.float32)

    def gemm(self, rows: Tensor, matrices: Tensor, transpose: bool, spec: GemmSpec) -> Tensor:
        groups = spec.m_sizes, spec.expert_offsets, transpose, False
        return compiled.direct("grouped_product", rows, matrices, *groups, True, False, False)[0]

    def wgrad(self, rows: Tensor, d_out: Tensor, shape: list[int], spec: GemmSpec) -> Tensor:
        groups = spec.m_sizes, spec.expert_offsets, spec.transpose, False
        return compiled.direct("grouped_wgrad", rows, to_dtype(d_out, rows.dtype), *groups)[0]


float8_parts = _LibraryFloat8()


def _operands(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec) -> tuple[Tensor, ...]:
    return x, gate_up, down, _ones(spec.plan) if weights is None else weights, *maps_of_layer(spec.plan)


def _transposed(codes_or_scales: Tensor) -> Tensor:
    """Codes or scales of the transposed matrices."""
    dtype = codes_or_scales.dtype
    numbers = codes_or_scales.view("uint8") if dtype == paddle.float8_e4m3fn else codes_or_scales
    return dense(numbers.transpose([0, 2, 1])).view(dtype)


def explain_library(x: Tensor, down: Matrices, spec: MlpSpec, wanted: tuple[bool, bool, bool, bool]) -> list[str]:
    """The lines of `explain` on chunks and kernels of a layer, on a GPU with kernels."""
    float8 = spec.compute is not None
    inner = down[0].shape[-1 if spec.transpose else -2]
    keep = (_KEEPS_CODES if spec.hidden_in_float8 else _KEEPS) if spec.keeps_hidden and any(wanted) else _RECOMPUTES
    sizes = x.shape[0], spec.plan.num_rows, len(down), x.shape[1], inner, spec.workspace
    options = keep, wanted[3], float8, spec.quantized is not None, spec.float8_wgrads
    plans = [_Choices(*native.layer_plan(*sizes, backward, *options)) for backward in (0, 1)]
    by_node = float8 or spec.accumulates or spec.deferral is not None
    how = "both passes of the compiled library, called by a node" if by_node else _OPERATOR
    lines = [f"runs as: {how}"]
    for name, plan in zip(("forward", "backward")[: 1 + any(wanted)], plans, strict=False):
        chunks = plan.row_chunks or "none, GEMMs gather token rows"
        sums = "float8" if float8 else _KERNELS[plan.sum_tile_rows]
        columns = -(-x.shape[1] // plan.chunk_columns)
        lines.append(
            f"{name}: workspace {plan.num_bytes / 2**20:.1f} MiB; chunks of rows: {chunks}; "
            f"chunks of columns: {columns}; the GEMM of summed rows: {sums}"
        )
    return lines


class _Choices(NamedTuple):
    """The result of `Native.layer_plan`."""

    row_chunks: int
    chunk_columns: int
    num_bytes: int
    sum_tile_rows: int


class LayerOperators:
    """A layer of experts by the library, for a backend that runs on every device."""

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        return why_not_by_library(x, gate_up, down, spec)

    def explain_moe_mlp(
        self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec, wanted: Any
    ) -> list[str]:
        if isinstance(x, GraphValue) or not has_layer_kernels(x, down, spec):
            return ["GEMMs: the library's kernels or Paddle's matmul, by the table in docs/backends.md"]
        return explain_library(x, down, spec, wanted)

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        return layer_by_library(x, gate_up, down, weights, spec)


layer_operators = LayerOperators()


def dequantized(matrices: QuantizedMatrices, num_inputs: int, dtype: Any) -> Tensor:
    """The values of matrices of D = ``num_inputs``, RN(code * scale) rounded to ``dtype``: [E, D, N], or transposed."""
    how = matrices.transpose, FORMATS.index(matrices.format), dtype
    return compiled.dequantize_matrices(*_constants(matrices), num_inputs, matrices.num_outputs, *how)


def _constants(matrices: QuantizedMatrices) -> tuple[Tensor, Tensor]:
    """Codes, and scales in float32."""
    codes, scales = constant(matrices.codes), constant(matrices.scales)
    if scales.dtype == paddle.uint8:
        scales = (scales.astype("int32") * _EXPONENT_BIT).view("float32")
    return codes, scales


class QuantizedLayer:
    """The layer of SwiGLU experts whose matrices are codes, by one operator of the compiled library.

    It has the part of a `Backend` that `moe_mlp` calls.
    """

    name = "compiled"

    def cannot_run_on(self, x: Tensor) -> str | None:
        """Return the reason why no layer of quantised matrices runs on the device of a tensor, or None if one does."""
        return None if compiled.has_operators(x) else "the compiled library has no operators there"

    def moe_mlp(
        self, x: Tensor, gate_up: QuantizedMatrices, down: QuantizedMatrices, weights: Tensor | None, spec: MlpSpec
    ) -> Tensor:
        in_graph = isinstance(x, GraphValue)
        if spec.validation != Validation.OFF and not in_graph:
            check_plan_groups(spec.plan)
        with without_autocast():
            return compiled.moe_mlp_quantized(
                x,
                *(*_constants(gate_up), *_constants(down)),
                _ones(spec.plan) if weights is None else weights,
                spec.plan,
                transpose=gate_up.transpose,
                keeps_hidden=spec.keeps_hidden,
                workspace=spec.workspace,
                in_place=not in_graph,
                by_slot=weights is not None and spec.weights_by_slot,
                matrix_format=FORMATS.index(gate_up.format),
            )

    def explain_moe_mlp(self, *_: Any) -> list[str]:
        return ["runs as: the operator moe_mlp_quantized of the compiled library"]


quantized_layer = QuantizedLayer()
