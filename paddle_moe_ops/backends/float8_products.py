# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of quantised values, multiplied in float32, as autograd nodes."""

from __future__ import annotations

from typing import Any, Protocol

from paddle import Tensor

from .._graphs import float32, to_dtype
from .autograd import Call, Gradients, connect, first_order_only
from .base import GemmSpec, Tensors

__all__ = ["Float8Parts", "float8_product"]


class Float8Parts(Protocol):
    """The kernels of `float8_product`.

    Attributes:
        name: of the codes in a `Float8Matrices`.
    """

    name: str

    def new_samples(self, like: Tensor) -> Any:
        """Return a `samples.DeviceSamples`, or None if nothing is compared on the device."""

    def codes_of(self, matrix: Tensor) -> Tensors:
        """Return float8 codes of [E, A, B] matrices, and a scale for each 128 x 128 elements."""

    def values(self, codes: Tensors, num_inputs: int, transpose: bool) -> Tensor:
        """Return the float32 values of codes."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return float32 values of rows, quantised with a scale for each 128 columns."""

    def gemm(self, rows: Tensor, matrices: Tensor, transpose: bool, spec: GemmSpec) -> Tensor:
        """Return a grouped GEMM in float32; ``spec.transpose`` isn't read."""

    def wgrad(self, rows: Tensor, d_out: Tensor, shape: list[int], spec: GemmSpec) -> Tensor:
        """Return the gradient of matrices of a shape, in the dtype of the rows."""


class _Product(Call):
    """A grouped GEMM of quantised rows and matrices, in float32, times a weight of each row.

    The wgrad GEMM has the weighted rows as they are.
    """

    function = "moe_mlp"

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


def float8_product(
    parts: Float8Parts, rows: Tensor, matrices: Tensor, weights: Tensor | None, codes: Tensors, spec: GemmSpec
) -> Tensor:
    """Return a grouped GEMM of quantised rows and matrices in float32, differentiable.

    Args:
        parts: the kernels.
        rows: [M, D].
        matrices: [E, D, N], or transposed; only their gradient counts.
        weights: of each row, float32 [M], or None.
        codes: of the matrices.
        spec: groups of the rows, and whether the matrices are transposed.
    """
    return connect(_Product(parts, rows, matrices, weights, codes, spec), rows, matrices, weights)[0]
