# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Activations between an expert's two GEMMs, and their gradients, in float64.

The first GEMM's columns are the gate's, then those that it gates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .arithmetic import round_float64

__all__ = ["ACTIVATIONS", "activate", "activation_factors", "swiglu"]

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai")
_ALPHA, _LIMIT = 1.702, 7.0  # constants of gpt_oss

_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
_erf = np.vectorize(math.erf, otypes=[np.float64])


def activate(hidden: NDArray, activation: str) -> NDArray:
    """The rows that the second matrices multiply, [M, n] of [M, 2n], in the dtype of ``hidden``."""
    gate, up = _halves(hidden)
    if activation == "swiglu":
        made = gate * _sigmoid(gate) * up
    elif activation == "swiglu_oai":
        gate = np.minimum(gate, _LIMIT)
        made = (np.clip(up, -_LIMIT, _LIMIT) + 1) * gate * _sigmoid(_ALPHA * gate)
    else:
        made = _gelu(gate, activation == "geglu_tanh")[0] * up
    return round_float64(made, hidden.dtype)


def activation_factors(hidden: NDArray, activation: str) -> tuple[NDArray, NDArray]:
    """Factors of a row's gradient for the gate's columns and for the others, [M, n] each, float64."""
    gate, up = _halves(hidden)
    if activation == "swiglu":
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        return up * (sigmoid + silu * (1 - sigmoid)), silu
    if activation == "swiglu_oai":
        free_gate, free_up = gate <= _LIMIT, np.abs(up) <= _LIMIT
        gate, up = np.minimum(gate, _LIMIT), np.clip(up, -_LIMIT, _LIMIT)
        sigmoid = _sigmoid(_ALPHA * gate)
        slope = sigmoid + _ALPHA * gate * sigmoid * (1 - sigmoid)
        return free_gate * (up + 1) * slope, free_up * gate * sigmoid
    gelu, slope = _gelu(gate, activation == "geglu_tanh")
    return up * slope, gelu


def swiglu(hidden: NDArray) -> NDArray:
    """``silu(gate) * up`` of the halves of the columns, in the dtype of ``hidden``."""
    return activate(hidden, "swiglu")


def _halves(hidden: NDArray) -> tuple[NDArray, NDArray]:
    gate, up = np.split(hidden.astype(np.float64), 2, axis=1)
    return gate, up


def _sigmoid(x: NDArray) -> NDArray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _gelu(x: NDArray, by_tanh: bool) -> tuple[NDArray, NDArray]:
    """GELU and its slope, exact or as its usual approximation by a hyperbolic tangent."""
    if by_tanh:
        tanh = np.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3))
        inner_slope = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x**2)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner_slope
    share = 0.5 * (1 + _erf(x / math.sqrt(2)))
    return x * share, share + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
