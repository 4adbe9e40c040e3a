# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch with float8 rows, ``moe_gate_dispatch_and_quant`` of ``paddle.incubate.nn.functional``.

The rule of Paddle's quantisation, for each 128 columns of a row:

* ``a`` is the largest magnitude; NaN is left out.
* ``s`` is 448 / a in float32, rounded once; 1 if a is 0; the largest bfloat16 number if the quotient overflows.
  With ``use_pow2_scale`` it is the power of two below, or s itself.
* The scale is 1 / s in float32: the factor that dequantises. If a is infinite, it is infinite.
* A code is the float8_e4m3fn number nearest to RN(x * s), ties to even, at most 448 in magnitude. NaN is 0x7F.

`quantize_1x128` of this package has another rule: its scales are RN(a / 448), with a lower limit of ``a``.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value, public, without_autocast
from ..backends import resolve
from ._incubate_slots import maps_of_dispatch

__all__ = ["moe_gate_dispatch_and_quant"]

_GROUP = 128
_DTYPES = (paddle.bfloat16, paddle.float16)
_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F
_LARGEST = (2 - 2.0**-7) * 2.0**127  # of bfloat16
_EXPONENT_BITS = 0x7F800000  # of float32


@public()
def moe_gate_dispatch_and_quant(
    x: Tensor,
    gate_logits: Tensor,
    corr_bias: Tensor | None,
    k: int,
    capacity: int,
    use_pad: bool,
    use_pow2_scale: bool,
) -> tuple[Tensor, ...]:
    """Dispatch as `moe_gate_dispatch` does, with rows as float8 codes and a scale for each 128 columns.

    No result has a gradient; a backward pass written by hand calls `moe_gate_dispatch_grad`. Each token is quantised
    once. Deterministic. No host synchronisation. Graphs are refused.

    Args:
        x: [T, H] bfloat16 or float16, H a multiple of 128.
        gate_logits: float32 [T, E], usually probabilities.
        corr_bias: float32 [E], added to the scores for the choice of experts only, or None.
        k: K.
        capacity: rows that an expert gets at most.
        use_pad: as in `moe_gate_dispatch`.
        use_pow2_scale: whether scales are powers of two.

    Returns:
        codes float8_e4m3fn [E * capacity or T*K, H]; scales float32 [rows, H / 128]; then combine_weights,
        scatter_index, expert_offset and expert_id of `moe_gate_dispatch`. Rows of no slot have codes 0 and scales 1.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "moe_gate_dispatch_and_quant"
    if is_graph_value(x):
        _checks.bad_type(name, "x", "a tensor, outside of graphs", "a value of a static graph")
    _checks.flag(name, "use_pow2_scale", use_pow2_scale)
    maps, results = maps_of_dispatch(name, x, gate_logits, corr_bias, k, capacity, use_pad, _DTYPES)
    if x.shape[1] % _GROUP:
        _checks.bad_value(name, "x", f"of shape [num_tokens, hidden] with hidden % {_GROUP} == 0", list(x.shape))
    with without_autocast():
        codes, scales = _quantized(x, use_pow2_scale)
        codes, scales = resolve("permute", codes).permute(codes, scales, maps, "all")
        is_free = (maps.row_to_token < 0).unsqueeze(-1)
        scales = paddle.where(is_free, paddle.ones_like(scales), scales)
    return codes, scales, *results


def _quantized(x: Tensor, use_pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [T, H] and scales float32 [T, H / 128]."""
    num_tokens, hidden = x.shape
    groups = x.astype("float32").reshape([num_tokens, hidden // _GROUP, _GROUP])
    amax = _without_nan(groups).abs().max(-1)
    factors = _quotient(_E4M3_MAX, amax)
    factors = paddle.where(paddle.isinf(factors), paddle.full_like(factors, _LARGEST), factors)
    # Paddle's == of floats is true for all numbers below 1e-8.
    factors = paddle.where(amax > 0, factors, paddle.ones_like(factors))
    if use_pow2_scale:
        factors = (factors.view("int32") & paddle.full_like(factors, _EXPONENT_BITS, "int32")).view("float32")
    scaled = groups * factors.unsqueeze(-1)
    # Paddle's cast to float8 on a CPU is right only up to 464, and loses NaN.
    codes = _without_nan(scaled).clip(-_E4M3_MAX, _E4M3_MAX).astype(paddle.float8_e4m3fn).view("uint8")
    codes = codes | (paddle.isnan(scaled).astype("int32") * _E4M3_NAN).astype("uint8")
    return codes.reshape([num_tokens, hidden]).view(paddle.float8_e4m3fn), _quotient(1.0, factors)


def _without_nan(values: Tensor) -> Tensor:
    return paddle.where(paddle.isnan(values), paddle.zeros_like(values), values)


def _quotient(numerator: float, values: Tensor) -> Tensor:
    """The quotient in float32, rounded once: float64 has more than twice its digits, and divides exactly on a GPU."""
    return (numerator / values.astype("float64")).astype("float32")
