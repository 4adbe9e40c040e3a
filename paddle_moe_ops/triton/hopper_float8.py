# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The float8 kernels that the compiled library has for Hopper, launched as Triton kernels are.

csrc/include/pmo/grouped_float8.h says what they make.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from .gemm.types import Gpu, Schedule, Target
from .hopper_product import LibraryKernel, library_kernel
from .launch.device import ITEM_BYTES, Array, Device, address, cdiv

__all__ = [
    "AMAX_MIN",
    "Codes",
    "GroupedFloat8Params",
    "QuantizeBlocksParams",
    "float8_kernels_of",
    "float8_product",
    "quantize_blocks",
    "quantize_both_forms",
    "suits_float8",
]

# The least that kernels take, since gradients may be small.
AMAX_MIN = 2.0**-100
GROUP = 128
_ALIGNMENT = 16  # of rows of codes

_INTEGERS = (
    *("num_rows", "num_sources", "num_experts", "inner", "outer"),
    *("first_column", "width", "first_row", "window_rows"),
)
_ARRAYS = (
    *("x", "x_scales", "matrix", "matrix_scales", "row_to_token", "weights", "first", "stop", "tiles", "window"),
    *("out", "hidden", "hidden_codes", "hidden_scales", "codes", "scales", "d_weights", "counters"),
)


class GroupedFloat8Params(ctypes.Structure):
    """pmo_grouped_float8_params; ``amax_min`` by its bits."""

    _fields_ = (
        ("struct_size", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("amax_min", ctypes.c_int32),
        ("result", ctypes.c_int32),
    )


_TYPES = (*["i64"] * len(_INTEGERS), *["*i8"] * len(_ARRAYS), "i32", "i32")

_BLOCK_INTEGERS = ("num_matrices", "num_rows", "num_columns")
_BLOCK_ARRAYS = ("x", "codes", "scales", "turned_codes", "turned_scales")
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # pmo_dtype


class QuantizeBlocksParams(ctypes.Structure):
    """pmo_quantize_blocks_params; ``amax_min`` by its bits."""

    _fields_ = (
        ("struct_size", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _BLOCK_INTEGERS),
        *((name, ctypes.c_void_p) for name in _BLOCK_ARRAYS),
        ("dtype", ctypes.c_int32),
        ("amax_min", ctypes.c_int32),
    )


_BLOCK_TYPES = (*["i64"] * len(_BLOCK_INTEGERS), *["*i8"] * len(_BLOCK_ARRAYS), "i32", "i32")


class Codes(NamedTuple):
    """Numbers in float8.

    Attributes:
        codes: float8_e4m3fn [M, columns], or [E, rows, columns].
        scales: float32 [M, columns / 128], or [E, rows / 128, columns / 128], rounded up.
    """

    codes: Array
    scales: Array


def float8_kernels_of(library: Any) -> tuple[LibraryKernel, LibraryKernel] | None:
    """The product and the quantisation of matrices of a library that `ctypes` has loaded, or None."""
    product = library_kernel(library, "grouped_float8", GroupedFloat8Params)
    matrices = library_kernel(library, "quantize_blocks", QuantizeBlocksParams)
    return None if product is None or matrices is None else (product, matrices)


def suits_float8(device: Device, gpu: Gpu, dtype: str, hidden: int, inner: int) -> bool:
    """Return whether the library's kernels support hidden size d and inner size n."""
    if device.grouped_float8 is None or gpu.capability != 90 or dtype != "bfloat16":
        return False
    return hidden % _ALIGNMENT == 0 and inner % GROUP == 0 and hidden > 0 and inner > 0


def quantize_blocks(device: Device, w: Array, turned: bool) -> Codes:
    """Matrices [E, A, B] in float8 with a scale for each 128 x 128 elements, or with ``turned`` their transposes."""
    return _quantize_blocks(device, w, (turned,))[0]


def quantize_both_forms(device: Device, w: Array) -> tuple[Codes, Codes]:
    """Matrices and their transposes, by one launch, which reads them once."""
    straight, turned = _quantize_blocks(device, w, (False, True))
    return straight, turned


def _quantize_blocks(device: Device, w: Array, forms: tuple[bool, ...]) -> list[Codes]:
    experts, height, width = w.shape
    made, results = [], [None, None, None, None]
    for turned in forms:
        sides = (width, height) if turned else (height, width)
        codes = device.empty([experts, *sides], "float8_e4m3fn")
        scales = device.empty([experts, *(cdiv(side, GROUP) for side in sides)], "float32")
        made.append(Codes(codes, scales))
        results[2 * turned : 2 * turned + 2] = codes, scales
    arguments = experts, height, width, *map(address, (w, *results)), _DTYPES[device.dtype_name(w)], bits_of(AMAX_MIN)
    device.launch(device.grouped_float8[1], 1, _BLOCK_TYPES, arguments, (), 1)
    return made


def float8_product(
    device: Device,
    source: Codes,
    rows: tuple[int, int],
    matrix: Codes,
    tables: Schedule,
    num_rows: int,
    out: Target,
    result: int,
    *,
    weights: Array | None = None,
    hidden: Array | None = None,
    hidden_codes: Codes | None = None,
    made: Codes | None = None,
    row_to_token: Array | None = None,
    window: int | None = None,
    d_weights: Array | None = None,
) -> None:
    """Launch the product.

    Args:
        device: where to; it has the kernel.
        source: memory that begins with the rows to multiply and their scales.
        rows: the first of these rows, and how many there are.
        matrix: [E, N, D], where D is the length of the contraction.
        tables: `schedule` of tiles of 128 rows; no other launch may use its counters meanwhile.
        num_rows: M, rows in all.
        out: [M, width] elements at least; its array is None if a gated result is wanted in float8 alone.
        result: PLAIN, GATED or GRADIENT.
        weights: float32 [M] or None.
        hidden: [M, 2 width] or None.
        hidden_codes: [M, 2 width] or None. A gated result puts ``hidden`` there instead; a gradient reads it there.
        made: where a gated result goes in float8, or the gradient of ``hidden``; or None. The latter may be
            ``hidden_codes``.
        row_to_token: int32 [M], for a gradient.
        window: of rows, which one ``source`` holds; None: all.
        d_weights: float32 [M, width / 128] or None; of a gradient, the sums by row are the gradients of the weights.
    """
    experts, outer, inner = matrix.codes.shape
    windows = tables.chunk_tiles.shape[0] - 3
    begin = address(tables.chunk_tiles) + ITEM_BYTES["int32"] * (windows + 1 if window is None else window)
    sizes = num_rows, rows[1], experts, inner, outer, out.first_column, out.width, rows[0], min(num_rows, rows[1])
    arrays = (*source, *matrix, row_to_token, weights, tables.group_starts, tables.group_ends, tables.tile_starts)
    results = out.array, hidden, *(hidden_codes or (None, None)), *(made or (None, None)), d_weights, tables.counters
    arguments = (*sizes, *map(address, arrays), begin, *map(address, results), bits_of(AMAX_MIN), result)
    device.launch(device.grouped_float8[0], 1, _TYPES, arguments, (), 1)


def bits_of(value: float) -> int:
    """The bits of a number that is rounded to float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]
