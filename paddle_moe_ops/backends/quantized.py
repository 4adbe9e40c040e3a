# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of experts as codes."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import paddle
from paddle import Tensor

from .._options import MatrixFormat

__all__ = ["FLOAT8_FORMAT", "FORMATS", "QuantizedMatrices", "as_quantized"]

FLOAT8_FORMAT: MatrixFormat = "fp8_128x128"
FORMATS: tuple[MatrixFormat, ...] = get_args(MatrixFormat)


class QuantizedMatrices(NamedTuple):
    """The matrices of E experts as codes and scales; `moe_mlp` takes it for ``gate_up`` and ``down``.

    A matrix has D inputs and N outputs, and the value of a code is code * scale. `quantize_experts` computes codes;
    those of a checkpoint are used as they are:

    ==============  ================================  =============================  ========================
    format          codes                             scales, float32                one scale for
    ==============  ================================  =============================  ========================
    "int8"          int8 [E, D, N]                    [E, N]                         an output
    "int4"          uint8 [E, 16 * ceil(D / 32), N]   [E, N]                         an output
    "int4_1x128"    uint8 [E, 16 * ceil(D / 32), N]   [E, ceil(D / 128), N]          128 inputs of an output
    "fp8_128x128"   float8_e4m3fn [E, D, N]           [E, ceil(D/128), ceil(N/128)]  128 x 128 elements
    ==============  ================================  =============================  ========================

    Two int4 codes, of -8 to 7 in two's complement, are in one byte, in the order in which tensor cores read them:
    byte j of 32 inputs has the code of input ``16 * (j % 2) + j // 2`` in the low half, and of the input 8 further in
    the high half. `paddle_moe_ops.reference.pack_int4` packs int8 codes [E, D, N] in NumPy. Bytes with the codes of two
    neighbouring inputs have the same shape if D is a multiple of 32, and other values. Float8 codes may be bytes, uint8
    or int8, too: `paddle.load` returns float8 tensors as int8.

    Attributes:
        codes: see the table. With ``transpose`` the last two dimensions are swapped, in codes and in scales.
        scales: see the table; of "fp8_128x128" also uint8 exponents of powers of two, biased by 127 (ue8m0).
        format: see the table.
        transpose: whether the matrices are stored transposed, as the weight of a torch Linear is. Float8 kernels read
            such codes as they are in the forward pass, and transpose others in each call.

    Examples:
        DeepSeek-V3's checkpoint has ``weight`` [N, D] and ``weight_scale_inv`` [N / 128, D / 128] for each expert:

        >>> import paddle
        >>> from paddle_moe_ops import QuantizedMatrices
        >>> weights = paddle.ones([8, 256, 128]).astype("float8_e4m3fn")  # of 8 experts
        >>> matrices = QuantizedMatrices(weights, paddle.ones([8, 2, 1]), "fp8_128x128", transpose=True)
        >>> matrices
        QuantizedMatrices(8 of 128 inputs and 256 outputs, format='fp8_128x128', transpose=True)
    """

    codes: Tensor
    scales: Tensor
    format: MatrixFormat
    transpose: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """The bytes of float8 codes in place of the codes, which Paddle cannot unpickle."""
        dtype = getattr(self.codes, "dtype", None)
        is_float8 = dtype == paddle.float8_e4m3fn
        return _restored, (self.codes.view("int8") if is_float8 else self.codes, *self[1:], is_float8)

    def __repr__(self) -> str:
        if getattr(self.codes, "ndim", 0) != 3 or self.format not in FORMATS:
            return f"QuantizedMatrices(format={self.format!r})"
        inputs, outputs = self._stored(self.codes.shape)
        text = f"up to {2 * inputs}" if self.format.startswith("int4") else str(inputs)
        transposed = ", transpose=True" if self.transpose else ""
        sizes = f"{self.codes.shape[0]} of {text} inputs and {outputs} outputs"
        return f"QuantizedMatrices({sizes}, format={self.format!r}{transposed})"

    def _stored(self, shape: Any) -> tuple[int, int]:
        """Inputs and outputs, as codes have them."""
        *_, first, last = shape
        return (last, first) if self.transpose else (first, last)

    @property
    def num_outputs(self) -> int:
        """N."""
        return self._stored(self.codes.shape)[1]


def _restored(codes: Tensor, scales: Tensor, matrix_format: Any, transpose: bool, is_float8: bool) -> QuantizedMatrices:
    return QuantizedMatrices(codes.view("float8_e4m3fn") if is_float8 else codes, scales, matrix_format, transpose)


def as_quantized(value: Any) -> Any:
    """The value, as `QuantizedMatrices` if it is one: tracing by bytecode passes it as a plain tuple."""
    if type(value) is tuple and len(value) == len(QuantizedMatrices._fields) and isinstance(value[2], str):
        return QuantizedMatrices._make(value)
    return value
