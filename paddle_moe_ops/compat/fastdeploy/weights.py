# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of experts in the int8 and int4 layouts of ``paddle.nn.quant.weight_quantize``, and as plain codes.

Plain codes are int8 [E, in, out], from -127 to 127 or from -7 to 7, with a scale for each output channel [E, out], or
for each group of rows and channel [E, groups, out]: w = code * scale. The layouts are those for GPUs of compute
capability 7.5 and above, the same for all of them: permutations of the codes, stored without a sign.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import float32, is_graph_value, public, to_dtype
from ...backends import Validation

__all__ = ["QUANTIZED", "dequantized", "from_weight_quantize", "to_weight_quantize"]

_TILE = 64  # rows of an interleaved tile
_BYTE = 8


class _Layout(NamedTuple):
    """A layout: bits of a code, neighbouring outputs whose tiles alternate, the code that is stored as 0, negated."""

    bits: int
    interleaved: int
    zero: int


QUANTIZED = {"weight_only_int8": _Layout(8, 2, 128), "weight_only_int4": _Layout(4, 4, 8)}
_METHODS = tuple(QUANTIZED)


@public()
def from_weight_quantize(packed: Tensor, algo: str) -> Tensor:
    """Return the plain codes of matrices that `paddle.nn.quant.weight_quantize` packed, stacked over experts.

    No gradient. Deterministic. No host synchronisation.

    Args:
        packed: int8 [E, out, in] for "weight_only_int8", [E, out / 2, in] for "weight_only_int4"; in must be a multiple
            of 64, out of 2 or 4.
        algo: "weight_only_int8" or "weight_only_int4".

    Returns:
        int8 [E, in, out].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "from_weight_quantize"
    layout = QUANTIZED[_checks.choice(name, "algo", algo, _METHODS)]
    _checks.tensor(name, "packed", packed, (paddle.int8,), ["num_experts", "out", "in"])
    check_packed(name, "packed", packed, layout)
    return plain_codes(packed, layout)


@public()
def to_weight_quantize(codes: Tensor, algo: str) -> Tensor:
    """Return plain codes in the layout of `paddle.nn.quant.weight_quantize`.

    No gradient. Deterministic. No host synchronisation, except on a GPU under PADDLE_MOE_OPS_VALIDATE.

    Args:
        codes: int8 [E, in, out], from -8 to 7 for int4; in must be a multiple of 64, out of 2 for int8 and of 4 for
            int4.
        algo: "weight_only_int8" or "weight_only_int4".

    Returns:
        int8 [E, out, in], or [E, out / 2, in] with two codes in a byte.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; on a CPU also int4 codes that do not fit 4 bits.
    """
    name = "to_weight_quantize"
    layout = QUANTIZED[_checks.choice(name, "algo", algo, _METHODS)]
    _checks.tensor(name, "codes", codes, (paddle.int8,), ["num_experts", "in", "out"])
    experts, inner, outer = codes.shape
    if inner % _TILE or outer % layout.interleaved:
        expected = f"of shape [num_experts, in, out], in a multiple of {_TILE} and out of {layout.interleaved}"
        _checks.bad_value(name, "codes", expected, list(codes.shape))
    is_checked = not is_graph_value(codes) and _checks.validation(name, None, codes) != Validation.OFF
    if is_checked and layout.bits != _BYTE and codes.numel() > 0:
        numbers = codes.astype("int32")
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < -layout.zero or highest >= layout.zero:
            given = lowest if lowest < -layout.zero else highest
            _checks.bad_value(name, "codes", f"from {-layout.zero} to {layout.zero - 1} for {algo}", given)
    pairs, per_register = 32 // layout.bits // 2, 4
    # The rows of a block: 8 * b + 2 * a + c goes to place a, b, c.
    shape = [experts, inner // (per_register * pairs * 2), pairs, per_register, 2, outer]
    rows = codes.reshape(shape).transpose([0, 5, 1, 3, 2, 4])
    rows = rows.reshape([experts, outer // layout.interleaved, layout.interleaved, inner // _TILE, _TILE])
    units = rows.transpose([0, 1, 3, 2, 4]).reshape([-1, *_unit(layout)]).transpose([0, 2, 1])
    stored = units.astype("int32") + layout.zero
    if layout.bits != _BYTE:
        nibbles = stored.reshape([-1, 2])
        stored = nibbles[:, 0] + nibbles[:, 1] * 16
    # Bytes from 128 on are negative in int8.
    signed = (stored + 128) % 256 - 128
    return signed.astype("int8").reshape([experts, outer * layout.bits // _BYTE, inner])


def plain_codes(packed: Tensor, layout: _Layout) -> Tensor:
    """`from_weight_quantize` of a checked tensor."""
    experts, outer, inner = packed.shape[0], packed.shape[1] * _BYTE // layout.bits, packed.shape[2]
    stored = packed.astype("int32") % 256
    if layout.bits != _BYTE:
        stored = paddle.stack([stored % 16, stored // 16], -1)
    units = (stored - layout.zero).astype("int8").reshape([-1, *reversed(_unit(layout))]).transpose([0, 2, 1])
    tiles = units.reshape([experts, outer // layout.interleaved, inner // _TILE, layout.interleaved, _TILE])
    pairs, per_register = 32 // layout.bits // 2, 4
    shape = [experts, outer, inner // (per_register * pairs * 2), per_register, pairs, 2]
    rows = tiles.transpose([0, 1, 3, 2, 4]).reshape(shape).transpose([0, 2, 4, 3, 5, 1])
    return rows.reshape([experts, inner, outer])


def check_packed(function: str, argument: str, packed: Tensor, layout: _Layout) -> None:
    """Check the sizes of packed matrices [E, rows, in]."""
    rows = layout.interleaved * layout.bits // _BYTE
    if packed.shape[2] % _TILE or packed.shape[1] % rows:
        expected = f"of shape [num_experts, rows, in], rows a multiple of {rows} and in of {_TILE}"
        _checks.bad_value(function, argument, expected, list(packed.shape))


def dequantized(codes: Tensor, scales: Tensor, dtype: Any) -> Tensor:
    """Matrices [E, in, out]: the product of code and scale in float32, rounded to the dtype.

    Args:
        codes: int8 [E, in, out].
        scales: [E, out], or [E, groups, out] for groups of consecutive rows.
        dtype: that of the rows to be multiplied.
    """
    scales = float32(scales)
    if scales.ndim == 2:
        return to_dtype(codes.astype("float32") * scales.unsqueeze(1), dtype)
    experts, inner, outer = codes.shape
    groups = codes.astype("float32").reshape([experts, scales.shape[1], -1, outer])
    return to_dtype((groups * scales.unsqueeze(2)).reshape([experts, inner, outer]), dtype)


def _unit(layout: _Layout) -> list[int]:
    """Codes that are stored in another order, as [a, b] of which the transpose is stored."""
    return [2, 2] if layout.bits == _BYTE else [4, 2]
