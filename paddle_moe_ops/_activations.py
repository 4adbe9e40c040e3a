# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Activations between an expert's two GEMMs, by Paddle's operators: in dygraph and in graphs, differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ._graphs import float32, in_float32, to_dtype, without_autocast
from ._options import Activation

try:
    from paddle.nn.functional import swiglu
except ImportError:  # Paddle 3.2
    from paddle.incubate.nn.functional import swiglu

__all__ = ["ACTIVATIONS", "FUNCTIONS", "activate", "swiglu"]

# The constants of gpt_oss's clamped SwiGLU.
_ALPHA, _LIMIT = 1.702, 7.0


def activate(hidden: Tensor, activation: str) -> Tensor:
    """The rows that the second matrices multiply, [M, n] of [M, 2n], the gate's columns first.

    Args:
        hidden: bfloat16, float16 or float32; computed in float32 and rounded once.
        activation: one of `ACTIVATIONS`.
    """
    return FUNCTIONS[activation](hidden)


def _composed(function: Callable[[Tensor, Tensor], Tensor], hidden: Tensor) -> Tensor:
    """An activation of a gate and the columns that it gates, in float32 and rounded once."""
    with without_autocast():
        gate, up = paddle.chunk(float32(hidden), 2, axis=-1)
        return to_dtype(function(gate, up), hidden.dtype)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate=True) * up


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = paddle.clip(gate, max=_LIMIT)
    return (paddle.clip(up, -_LIMIT, _LIMIT) + 1.0) * gate * F.sigmoid(_ALPHA * gate)


# `activate` of each activation, by its name.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functools.partial(in_float32, swiglu),
    "geglu": functools.partial(_composed, _geglu),
    "geglu_tanh": functools.partial(_composed, _geglu_tanh),
    "swiglu_oai": functools.partial(_composed, _swiglu_oai),
}
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
