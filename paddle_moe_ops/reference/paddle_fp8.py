# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The float8 operators of ``paddle.incubate.nn.functional``, group by group.

The rule for one group of elements, in float32:

* amax is the largest magnitude, NaN left out, and at least ``epsilon``. A group of NaN alone has amax 0.
* The multiplier of the data is RN(448 / amax): 1 for amax 0, 0 for amax Inf. If the quotient overflows, it is the
  largest finite number of the operator's dtype. With pow2 only its exponent remains, so the mantissa is cut off.
* The stored scale is RN(1 / multiplier), which dequantises.
* The code is the float8 nearest to RN(x * multiplier), ties to even. Magnitudes beyond the largest code become the
  largest code, NaN becomes 0x7F, and -0 stays.

`quantize_1x128` of this package has another rule: its scale is RN(amax / 448), and amax has a lower limit.

Codes and scales are exact. SwiGLU and the GEMM are computed in float64 and rounded at the end, so that an
implementation agrees within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .arithmetic import round_float64, to_float32

__all__ = [
    "SwigluGradients",
    "fp8_gemm_blockwise",
    "fp8_quant_blockwise",
    "fused_act_dequant",
    "fused_stack_transpose_quant",
    "fused_swiglu_weighted_bwd",
    "fused_transpose_split_quant",
    "fused_transpose_wlch_split_quant",
    "fused_weighted_swiglu_act_quant",
]

GROUP = 128
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST_CODE = {E4M3: 448.0, E5M2: 57344.0}
NAN_CODE = 0x7F
BFLOAT16_MAX = np.float32(float.fromhex("0x1.FEp127"))
FLOAT32_MAX = np.finfo(np.float32).max
EXPONENT_BITS = np.uint32(0x7F800000)


class SwigluGradients(NamedTuple):
    """The results of `fused_swiglu_weighted_bwd` in their order."""

    do1: NDArray
    probs_grad: NDArray
    o2_s: NDArray


def fp8_quant_blockwise(
    x: NDArray,
    epsilon: float = 0.0,
    input_transpose: bool = False,
    output_scale_transpose: bool = True,
    return_transpose_only: bool = False,
    using_pow2_scale: bool = True,
    using_ue8m0_scale: bool = False,
    quant_method: str = "1x128",
    dtype: DTypeLike = E4M3,
) -> tuple[NDArray, ...]:
    """Return codes and scales of ``x`` [M, N], then those of its transpose, as Paddle's function does.

    With G = ceil(N / 128), scales are float32 [M, G] for "1x128" and [M / 128, G] for "128x128". For ue8m0 they are
    int32 [M, ceil(G / 4)] for both. ``output_scale_transpose`` transposes them.
    """
    tile_rows = 1 if quant_method == "1x128" else GROUP
    pow2 = using_pow2_scale or using_ue8m0_scale

    def quantized(matrix: NDArray) -> tuple[NDArray, NDArray]:
        codes, scales = _quantize(to_float32(matrix), tile_rows, epsilon, pow2, dtype=dtype)
        if using_ue8m0_scale:
            scales = _packed_exponents(np.repeat(scales, tile_rows, axis=0))
        return codes, np.ascontiguousarray(scales.T) if output_scale_transpose else scales

    nothing = np.zeros(0, dtype), np.zeros(0, np.int32 if using_ue8m0_scale else np.float32)
    straight = nothing if return_transpose_only else quantized(x)
    if not input_transpose:
        return straight
    transposed = quantized(x.T)
    return transposed if return_transpose_only else (*straight, *transposed)


def fused_stack_transpose_quant(x: Sequence[NDArray], transpose: bool = True) -> tuple[NDArray, NDArray]:
    """Return codes and scales of matrices [M, K], one below the other, with 128 x 128 elements for a group."""
    stacked = np.concatenate([matrix.T if transpose else matrix for matrix in x])
    return _quantize(to_float32(stacked), GROUP, 0.0, False)


def fused_transpose_split_quant(
    x: NDArray, input_scales: NDArray | None, tokens_per_expert: Sequence[int], pow_2_scales: bool = False
) -> tuple[list[NDArray], list[NDArray]]:
    """Return for each expert the codes [H, t] of its transposed rows, and scales [t / 128, H].

    Codes with ``input_scales`` [M, ceil(H / 128)] become bfloat16 before they are quantised again.
    """
    if x.size == 0:
        return [], []
    rows = x if input_scales is None else fused_act_dequant(x, input_scales)
    return _split(rows, tokens_per_expert, pow_2_scales)


def fused_transpose_wlch_split_quant(
    x: NDArray, tokens_per_expert: Sequence[int], pow_2_scales: bool = False
) -> tuple[list[NDArray], list[NDArray]]:
    """Return the same for ``x`` [W, L, C, H], whose rows are ordered by L, then W, then C."""
    rows = x.swapaxes(0, 1).reshape(-1, x.shape[3])
    return _split(rows, tokens_per_expert, pow_2_scales)


def fused_act_dequant(x: NDArray, x_scale: NDArray) -> NDArray:
    """Return bfloat16 RN(code * scale) of codes [M, N] and scales float32 [M, G] or int32 ue8m0 [M, ceil(G / 4)].

    An exponent of 0 is a scale of 0, and one of 255 is Inf.
    """
    if x_scale.dtype == np.int32:
        exponents = np.ascontiguousarray(x_scale).view(np.uint8)
        x_scale = (exponents.astype(np.uint32) << 23).view(np.float32)
    factors = np.repeat(x_scale, GROUP, axis=1)[:, : x.shape[1]]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (to_float32(x) * factors).astype(ml_dtypes.bfloat16)


def fused_swiglu_weighted_bwd(o1: NDArray, do2_s: NDArray, unzipped_probs: NDArray) -> SwigluGradients:
    """Return the gradients of SwiGLU times a probability, and its output.

    Args:
        o1: [..., 2 I], the gate's half first.
        do2_s: [..., I], the gradient of the weighted output.
        unzipped_probs: float32, one for each row.
    """
    gate, up = np.split(o1.astype(np.float64), 2, axis=-1)
    given = do2_s.astype(np.float64)
    probs = unzipped_probs.astype(np.float64).reshape(*o1.shape[:-1], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
        silu = gate * sigmoid
        out = silu * up
        weighted = given * probs
        gate_gradient = weighted * up * sigmoid * (1 + gate - silu)
        do1 = np.concatenate([gate_gradient, weighted * silu], axis=-1)
        probs_grad = (given * out).sum(axis=-1).reshape(unzipped_probs.shape)
        rounded = [
            round_float64(each, dtype)
            for each, dtype in (
                (do1, ml_dtypes.bfloat16),
                (probs_grad, np.float32),
                (out * probs, ml_dtypes.bfloat16),
            )
        ]
    return SwigluGradients(*rounded)


def fused_weighted_swiglu_act_quant(
    x: NDArray, prob: NDArray | None = None, using_pow2_scaling: bool = False
) -> tuple[NDArray, NDArray]:
    """Return codes [rows, I] of SwiGLU times a probability, and scales float32 [rows, ceil(I / 128)].

    Args:
        x: [..., 2 I], the gate's half first.
        prob: float32, one for each row, or None.
        using_pow2_scaling: scales that are powers of two.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(np.float64)
    gate, up = np.split(rows, 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        y = gate / (1 + np.exp(-gate)) * up
        if prob is not None:
            y = y * prob.astype(np.float64).reshape(-1, 1)
        rounded = y.astype(np.float32)
    return _quantize(rounded, 1, 0.0, using_pow2_scaling, overflow=FLOAT32_MAX)


def fp8_gemm_blockwise(
    a: NDArray,
    a_decode_scale: NDArray,
    b: NDArray,
    b_decode_scale: NDArray,
    out_dtype: DTypeLike,
    out: NDArray | None = None,
    is_a_1d_scaled: bool = True,
    is_b_1d_scaled: bool = True,
) -> tuple[NDArray, NDArray]:
    """Return ``out + a b^T`` [M, N], and the sums of the absolute values of its terms.

    Args:
        a: codes [M, K].
        a_decode_scale: float32 [K / 128, M] if 1d, else [M / 128, K / 128].
        b: codes [N, K].
        b_decode_scale: the same for b.
        out_dtype: dtype of the result.
        out: [M, N], which is added, or None.
        is_a_1d_scaled: whether the scale of ``a`` is 1d.
        is_b_1d_scaled: whether the scale of ``b`` is 1d.
    """
    left = _dequantized(a, a_decode_scale, is_a_1d_scaled)
    right = _dequantized(b, b_decode_scale, is_b_1d_scaled)
    added = np.zeros((len(a), len(b))) if out is None else out.astype(np.float64)
    magnitude = np.abs(left) @ np.abs(right).T + np.abs(added)
    return round_float64(added + left @ right.T, out_dtype), magnitude


def _dequantized(codes: NDArray, scale: NDArray, is_1d: bool) -> NDArray:
    """Codes [R, K] times their scales, in float64."""
    rows, columns = codes.shape
    factors = scale.T if is_1d else np.repeat(scale, GROUP, axis=0)[:rows]
    return codes.astype(np.float64) * np.repeat(factors.astype(np.float64), GROUP, axis=1)[:, :columns]


def _split(rows: NDArray, tokens_per_expert: Sequence[int], pow2: bool) -> tuple[list[NDArray], list[NDArray]]:
    codes, scales, start = [], [], 0
    for count in tokens_per_expert:
        own = to_float32(rows[start : start + count].T)
        own_codes, own_scales = _quantize(own, 1, 0.0, pow2)
        codes.append(own_codes)
        scales.append(np.ascontiguousarray(own_scales.T))
        start += count
    return codes, scales


def _quantize(
    x: NDArray,
    tile_rows: int,
    epsilon: float,
    pow2: bool,
    *,
    overflow: np.floating = BFLOAT16_MAX,
    dtype: DTypeLike = E4M3,
) -> tuple[NDArray, NDArray]:
    """Codes of a float32 matrix and the stored scales, one for ``tile_rows`` rows and 128 columns."""
    num_rows, columns = x.shape
    high, wide = num_rows // tile_rows, -(-columns // GROUP)
    filled = np.zeros((num_rows, wide * GROUP), np.float32)
    filled[:, :columns] = x
    tiles = filled.reshape(high, tile_rows, wide, GROUP)
    magnitudes = np.where(np.isnan(tiles), np.float32(0), np.abs(tiles))
    amax = np.maximum(magnitudes.max(axis=(1, 3), initial=0), np.float32(epsilon))
    largest = LARGEST_CODE[dtype]
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        multipliers = np.float32(largest) / amax
        multipliers = np.where(np.isinf(multipliers), np.float32(overflow), multipliers)
        multipliers = np.where(amax == 0, np.float32(1), multipliers)
        if pow2:
            multipliers = (multipliers.view(np.uint32) & EXPONENT_BITS).view(np.float32)
        scaled = (tiles * multipliers[:, None, :, None]).reshape(filled.shape)[:, :columns]
        codes = np.clip(scaled, -largest, largest).astype(dtype)
        scales = np.float32(1) / multipliers
    bits = np.where(np.isnan(scaled), np.uint8(NAN_CODE), codes.view(np.uint8))
    return bits.view(dtype), scales


def _packed_exponents(scales: NDArray) -> NDArray:
    """The exponents of scales [R, G], four to an int32, the lowest group in the lowest byte; unused bytes are 0."""
    rows, groups = scales.shape
    exponents = np.zeros((rows, -(-groups // 4) * 4), np.uint8)
    exponents[:, :groups] = scales.view(np.uint32) >> 23
    return exponents.view("<i4")
