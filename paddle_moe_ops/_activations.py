# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Activations between an expert's two GEMMs, by Paddle's operators: in dygraph and in graphs, differentiable."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ._graphs import float32, in_float32, to_dtype, without_autocast

try:
    from paddle.nn.functional import swiglu
except ImportError:  # Paddle 3.2
    from paddle.incubate.nn.functional import swiglu

__all__ = ["ACTIVATIONS", "activate", "swiglu"]

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai")
# The constants of gpt_oss's clamped SwiGLU.
_ALPHA, _LIMIT = 1.702, 7.0


def activate(hidden: Tensor, activation: str) -> Tensor:
    """The rows that the second matrices multiply, [M, n] of [M, 2n], the gate's columns first.

    Args:
        hidden: bfloat16, float16 or float32; computed in float32 and rounded once.
        activation: one of `ACTIVATIONS`.
    """
    if activation == "swiglu":
        return in_float32(swiglu, hidden)
    with without_autocast():
        gate, up = paddle.chunk(float32(hidden), 2, axis=-1)
        if activation == "swiglu_oai":
            gate = paddle.clip(gate, max=_LIMIT)
            made = (paddle.clip(up, -_LIMIT, _LIMIT) + 1.0) * gate * F.sigmoid(_ALPHA * gate)
        else:
            made = F.gelu(gate, approximate=activation == "geglu_tanh") * up
        return to_dtype(made, hidden.dtype)
