# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts with float8 operands whose activation and biases are outside of its GEMMs."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from ._activations import activate
from ._graphs import beside, float32, is_graph_value, to_dtype, without_autocast
from ._matrices import stacked
from .backends import GemmSpec, Matrices, MlpSpec, float8_parts, has_operators, resolve, stack_or_view
from .backends.experts import check_unchanged, made_by
from .backends.float8_products import float8_product

__all__ = ["float8_rows", "why_not_float8"]

_NAME = "moe_mlp"


def why_not_float8(tokens: Tensor, backend: str) -> str | None:
    """Return the reason why `float8_rows` cannot run with a backend of grouped GEMMs, or None if it can."""
    if is_graph_value(tokens):
        return "in a graph only SwiGLU without biases multiplies float8 operands"
    if backend != "reference" and not has_operators(tokens):
        return "the compiled library has no operators there"
    return None


def float8_rows(
    tokens: Tensor,
    matrices: tuple[Matrices, Matrices],
    weights: Tensor | None,
    biases: tuple[Matrices | None, Matrices | None],
    activation: str,
    spec: MlpSpec,
) -> Tensor:
    """Return the weighted rows of a layer with float8 operands, differentiable, before they are added up.

    Args:
        tokens: [T, d].
        matrices: gate_up and down.
        weights: of each row, float32 [M], or None.
        biases: those of both GEMMs, or None.
        activation: the activation.
        spec: all that has no gradient.
    """
    plan, verbs = spec.plan, resolve("permute", tokens)
    parts = float8_parts(verbs.name)
    with without_autocast():
        gate_up, down = (each if isinstance(each, Tensor) else stack_or_view(each, _NAME) for each in matrices)
        values = gate_up.detach(), down.detach()

        def quantize() -> tuple[Tensor, ...]:
            return (*parts.codes_of(values[0]), *parts.codes_of(values[1]))

        codes = quantize() if spec.quantized is None else made_by(spec.quantized, parts.name, quantize)
        if spec.quantized is not None:
            check_unchanged(spec.quantized, parts, *values, codes, spec.validation)
        groups = GemmSpec(plan.tokens_per_expert, plan.expert_offsets, spec.transpose, None, spec.validation)
        rows = verbs.permute(tokens, None, plan, "all")[0]
        hidden = float8_product(parts, rows, gate_up, None, codes[:2], groups)
        if biases[0] is not None:
            hidden = hidden + _bias_of_rows(biases[0], hidden, groups)
        act = activate(to_dtype(hidden, tokens.dtype), activation)
        made = float8_product(parts, act, down, weights, codes[2:], groups)
        if biases[1] is not None:
            of_rows = _bias_of_rows(biases[1], made, groups)
            made = made + (of_rows if weights is None else of_rows * weights.unsqueeze(-1))
        return to_dtype(made, tokens.dtype)


def _bias_of_rows(bias: Any, rows: Tensor, groups: GemmSpec) -> Tensor:
    """The bias of each row, and 0 in rows of no group: a grouped GEMM with one column of ones, whose wgrad is a sum."""
    ones = beside(paddle.ones([rows.shape[0], 1], "float32"), rows)
    spec = groups._replace(transpose=False)
    return resolve("grouped_gemm", ones).grouped_gemm(ones, float32(stacked(bias)).unsqueeze(1), None, None, spec)
