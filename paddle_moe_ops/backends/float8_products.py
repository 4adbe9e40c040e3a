# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts with float8 operands whose activation and biases are outside of its GEMMs.

Quantised values are multiplied in float32, on every device.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import reference
from .._activations import activate
from .._graphs import float32, to_dtype, without_autocast
from . import compiled
from .arrays import to_numpy, to_tensor
from .autograd import Call, Gradients, connect, first_order_only
from .base import GemmSpec, Matrices, MlpSpec, QuantizeSpec, Tensors, Validation
from .experts import check_unchanged, made_by
from .layers import dequantized, quantized_matrices
from .matmul import add_bias
from .quantized import FLOAT8_FORMAT, QuantizedMatrices
from .reference import ReferenceKernels
from .stacking import stack_or_view

__all__ = ["float8_layer"]

_NAME = "moe_mlp"
_ROWS = QuantizeSpec(False, "row", reference.FLOAT8_AMAX_MIN)


class _Compiled:
    """Quantised operands by the compiled library."""

    name = "matmul"  # of the codes in a `Float8Matrices`, which `LayerKernels` without kernels reads as well

    def codes_of(self, matrix: Tensor) -> Tensors:
        return quantized_matrices(matrix)

    def values(self, codes: Tensors, num_inputs: int, transpose: bool) -> Tensor:
        matrices = QuantizedMatrices(codes[0], codes[1], FLOAT8_FORMAT, transpose)
        return dequantized(matrices, num_inputs, paddle.float32)

    def rows(self, rows: Tensor) -> Tensor:
        codes, scales = compiled.backend.quantize_1x128(rows, _ROWS)
        return compiled.backend.dequantize_1x128(codes, scales, "row", paddle.float32)

    def gemm(self, rows: Tensor, matrices: Tensor, transpose: bool, spec: GemmSpec) -> Tensor:
        groups = spec.m_sizes, spec.expert_offsets, transpose, False
        return compiled.direct("grouped_product", rows, matrices, *groups, True, False, False)[0]

    def wgrad(self, rows: Tensor, d_out: Tensor, shape: list[int], spec: GemmSpec) -> Tensor:
        groups = spec.m_sizes, spec.expert_offsets, spec.transpose, False
        return compiled.direct("grouped_wgrad", rows, to_dtype(d_out, rows.dtype), *groups)[0]


class _Oracle:
    """The same by the NumPy oracle."""

    name = "reference"
    _kernels = ReferenceKernels()

    def codes_of(self, matrix: Tensor) -> Tensors:
        codes = reference.quantize_128x128(to_numpy(matrix), amax_min=reference.FLOAT8_AMAX_MIN)
        return tuple(to_tensor(each, matrix.place) for each in codes)

    def values(self, codes: Tensors, num_inputs: int, transpose: bool) -> Tensor:
        arrays = [to_numpy(each) for each in codes]
        return to_tensor(reference.dequantize_128x128(*arrays, dtype="float32"), codes[0].place)

    def rows(self, rows: Tensor) -> Tensor:
        codes, scales = self._kernels.quantize_1x128(rows, _ROWS)
        return self._kernels.dequantize_1x128(codes, scales, "row", paddle.float32)

    def gemm(self, rows: Tensor, matrices: Tensor, transpose: bool, spec: GemmSpec) -> Tensor:
        return self._kernels.grouped_gemm(rows, matrices, None, None, spec._replace(transpose=transpose))

    def wgrad(self, rows: Tensor, d_out: Tensor, shape: list[int], spec: GemmSpec) -> Tensor:
        return self._kernels.grouped_wgrad(to_dtype(d_out, rows.dtype), rows, shape, spec)


class _Product(Call):
    """A grouped GEMM of quantised rows and matrices, in float32, times a weight of each row.

    The wgrad GEMM has the weighted rows as they are.
    """

    function = _NAME

    def __init__(
        self, kernels: Any, rows: Tensor, matrices: Tensor, weights: Tensor | None, codes: Tensors, spec: GemmSpec
    ) -> None:
        super().__init__(kernels, rows, matrices, weights)
        self.watch(spec.m_sizes, spec.expert_offsets)
        self.operands: Any = rows.detach(), weights
        self.codes, self.spec, self.shape = codes, spec, matrices.shape

    def run(self) -> Tensors:
        (rows, weights), self.operands = self.operands, None
        self.save(rows, weights)
        product = self._gemm(rows, self.spec.transpose)
        return (product if weights is None else product * weights.unsqueeze(-1),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        (rows, *given), (d_out,) = self.saved, gradients
        scaled = rows
        made: list[Tensor | None] = [None] * len(self.wanted)
        if self.wanted[0] or True in self.wanted[2:]:
            d_rows = self._gemm(d_out, not self.spec.transpose)
        if given:
            weights = given[0].unsqueeze(-1)
            scaled = to_dtype(float32(rows) * weights, rows.dtype)
            if self.wanted[2]:
                made[2] = (float32(rows) * d_rows).sum(axis=1)
            if self.wanted[0]:
                d_rows = d_rows * weights
        if self.wanted[0]:
            made[0] = to_dtype(d_rows, rows.dtype)
        if self.wanted[1]:
            made[1] = self.kernels.wgrad(scaled, d_out, self.shape, self.spec)
        return first_order_only(self, tuple(made), d_out, rows, *given)

    def _gemm(self, rows: Tensor, transpose: bool) -> Tensor:
        num_inputs = self.shape[2 if self.spec.transpose else 1]
        values = self.kernels.values(self.codes, num_inputs, self.spec.transpose)
        return self.kernels.gemm(self.kernels.rows(rows), values, transpose, self.spec)


def float8_layer(
    tokens: Tensor,
    matrices: tuple[Matrices, Matrices],
    weights: Tensor | None,
    biases: tuple[Matrices | None, Matrices | None],
    activation: str,
    spec: MlpSpec,
    verbs: Any,
) -> Tensor:
    """Return the weighted rows of a layer with float8 operands, differentiable, before they are added up.

    Args:
        tokens: [T, d].
        matrices: gate_up and down.
        weights: of each row, [M], or None.
        biases: those of both GEMMs, or None.
        activation: the activation.
        spec: all that has no gradient.
        verbs: the backend that permutes rows; "reference" also quantises and multiplies.
    """
    plan, transpose = spec.plan, spec.transpose
    kernels = _Oracle() if verbs.name == _Oracle.name else _Compiled()
    with without_autocast():
        gate_up, down = (each if isinstance(each, Tensor) else stack_or_view(each, _NAME) for each in matrices)
        values = gate_up.detach(), down.detach()

        def quantize() -> Tensors:
            return (*kernels.codes_of(values[0]), *kernels.codes_of(values[1]))

        codes = quantize() if spec.quantized is None else made_by(spec.quantized, kernels.name, quantize)
        if spec.quantized is not None and spec.validation != Validation.OFF:
            check_unchanged(spec.quantized, _NAME, *values)
        groups = GemmSpec(plan.tokens_per_expert, plan.expert_offsets, transpose, None, spec.validation)
        rows = verbs.permute(tokens, None, plan, "all")[0]
        first_bias, second_bias = (None if each is None else _stacked(each) for each in biases)
        hidden = connect(_Product(kernels, rows, gate_up, None, codes[:2], groups), rows, gate_up)[0]
        if first_bias is not None:
            hidden = add_bias(hidden, first_bias, groups)
        act = activate(to_dtype(hidden, tokens.dtype), activation)
        made = connect(_Product(kernels, act, down, weights, codes[2:], groups), act, down, weights)[0]
        if second_bias is not None:
            of_rows = add_bias(paddle.zeros_like(made), second_bias, groups)
            made = made + (of_rows if weights is None else of_rows * weights.unsqueeze(-1))
        return to_dtype(made, tokens.dtype)


def _stacked(given: Matrices) -> Tensor:
    return given if isinstance(given, Tensor) else paddle.stack(list(given))
