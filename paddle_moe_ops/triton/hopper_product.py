# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The grouped products that the compiled library has for Hopper, launched as a Triton kernel is.

csrc/cuda/gemm/swap_ab.cu multiplies hardly any rows that are not there, and can gather the rows of tokens.
csrc/cuda/gemm/pingpong.cu makes plain products, and stores a tile while the next one is multiplied. `chosen_rows`
says where each is faster than the Triton kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .gemm.types import Gpu, Rows, Schedule, Target
from .launch.device import ITEM_BYTES, Array, Device, address, cdiv, vector_elements

__all__ = [
    "GATED",
    "GRADIENT",
    "LIBRARY_DTYPES",
    "PLAIN",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "TURNED_ROWS",
    "WIDE_COLUMNS",
    "LibraryKernel",
    "chosen_rows",
    "fitting_columns",
    "grouped_product_of",
    "has_fast_memory",
    "hopper_product",
    "library_kernel",
    "library_rows",
    "most_library_rows",
    "tile_columns",
]

PLAIN, GATED, GRADIENT = range(3)  # pmo_grouped_result
TILE_ROWS, TILE_COLUMNS, WIDE_COLUMNS = 128, 128, 192
TURNED_ROWS = 160  # of csrc/cuda/gemm/swap_ab.cu
LIBRARY_DTYPES = {"float16": 1, "bfloat16": 2}  # pmo_dtype
_INTEGERS = (
    *("num_rows", "num_sources", "num_experts", "inner", "outer"),
    *("first_column", "width", "first_row", "window_rows"),
)
_ARRAYS = (
    *("matrix", "row_to_token", "weights", "first", "stop", "tiles", "window"),
    *("out", "hidden", "counters", "d_weights"),
)
_OPTIONS = ("dtype", "result", "transpose", "tile_rows", "gathers", "tile_columns")

# Swap-AB kernel (tiles of 160 rows): minimum of the mean rows per expert, and of K. Below this K, a tile's epilogue
# takes about as long as its mainloop, and the two do not overlap.
_MIN_SWAP_AB_ROWS, _MIN_SWAP_AB_INNER = 128, 768
# Pingpong kernel (tiles of 128 rows): minimum of the mean rows per expert; with 128 rows per expert, the wider tiles of
# the Triton kernels read each matrix less often. From this K on, the swap-AB kernel is faster.
_MIN_PINGPONG_ROWS, _MIN_SWAP_AB_INNER_OF_PLAIN = 512, 512
# With many rows per expert, the pingpong kernel also wins for longer K, since its epilogue overlaps the next mainloop.
# Its smaller tiles read operands more often than 160 x 256 ones, so K has a maximum: one for tiles of 192 columns, one
# for 128 columns on GPUs with at least this many GB/s per SM (H200: 37, H100: 25; no other GPU was measured).
_MANY_ROWS, _MAX_INNER_OF_WIDE, _MAX_INNER_OF_NARROW, _FAST_GBPS_PER_SM = 1024, 3072, 2048, 35
# Tiles of 192 columns are faster if they divide the width, and up to this K if at most 1/16 of the columns is wasted.
_MAX_INNER_WITH_WASTE = 1024


class GroupedProductParams(ctypes.Structure):
    """pmo_grouped_product_params."""

    _fields_ = (
        ("struct_size", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("x", ctypes.c_void_p),
        ("x_row_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int32) for name in _OPTIONS),
    )


_TYPES = (*["i64"] * len(_INTEGERS), "*i8", "i64", *["*i8"] * len(_ARRAYS), *["i32"] * len(_OPTIONS))


class LibraryKernel:
    """A CUDA entry point of the C core, with what `kernel_cache.KernelCache.run` needs of a compiled Triton kernel.

    Args:
        name: of the launch.
        entry: the function; its arguments are a struct and a stream.
        params: the struct, without whose size the launch's arguments are its fields.
        last_error: returns the text of the last failure.
    """

    function = packed_metadata = None

    def __init__(self, name: str, entry: Any, params: type[ctypes.Structure], last_error: Any) -> None:
        self.__name__ = name
        self._entry, self._params, self._last_error = entry, params, last_error

    def addresses(self) -> tuple[int, int]:
        """Addresses of the entry point and of the function that returns the text of the last failure."""
        entry, last_error = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (self._entry, self._last_error))
        return entry, last_error

    def run(self, programs: int, rows: int, depth: int, stream: int, *arguments: Any) -> None:
        """Enqueue the kernel; of the arguments, the first five are those of Triton's launches."""
        params = self._params(ctypes.sizeof(self._params), *arguments[5:])
        if self._entry(ctypes.byref(params), ctypes.c_void_p(stream)):
            raise RuntimeError(f"{self.__name__}: {self._last_error().decode()}")


def library_kernel(library: Any, name: str, params: type[ctypes.Structure]) -> LibraryKernel | None:
    """A kernel for Hopper of a library that `ctypes` has loaded, or None where it has none."""
    entry = f"pmo_{name}_cuda"
    if not hasattr(library, entry) or not library.pmo_grouped_product_cuda_is_built():
        return None
    last_error = library.pmo_last_error
    last_error.restype = ctypes.c_char_p
    return LibraryKernel(name, getattr(library, entry), params, last_error)


def grouped_product_of(library: Any) -> LibraryKernel | None:
    """The grouped product of a library, or None."""
    return library_kernel(library, "grouped_product", GroupedProductParams)


def has_fast_memory(gpu: Gpu) -> bool:
    """Return whether memory bandwidth per SM is high: it is on an H200, not on an H100."""
    return gpu.memory_gbps >= _FAST_GBPS_PER_SM * gpu.num_sms


def tile_columns(inner: int, columns: int) -> int:
    """Return the tile width of the pingpong kernel: 192 or 128 columns.

    Args:
        inner: length of the contraction.
        columns: of the result, or of a window of them.
    """
    wasted = -columns % WIDE_COLUMNS
    is_wide = not wasted or (wasted <= columns // 16 and inner <= _MAX_INNER_WITH_WASTE)
    return WIDE_COLUMNS if is_wide else TILE_COLUMNS


def fitting_columns(inner: int, most: int) -> int:
    """Return the largest multiple of 192 columns up to ``most`` for a window of a plain product; 0: no need."""
    if inner > _MAX_INNER_WITH_WASTE or tile_columns(inner, most) == WIDE_COLUMNS:
        return 0
    return most // WIDE_COLUMNS * WIDE_COLUMNS


def chosen_rows(gpu: Gpu, result: int, mean_rows: int, inner: int, columns: int) -> int:
    """The rows of the tiles of the fastest kernel of the library; 0: a Triton kernel is faster.

    Args:
        gpu: the GPU.
        result: PLAIN, GATED or GRADIENT.
        mean_rows: of an expert, on average.
        inner: length of the contraction.
        columns: of the result, or of a window of them.
    """
    if result == PLAIN and mean_rows >= _MIN_PINGPONG_ROWS:
        most = _MIN_SWAP_AB_INNER_OF_PLAIN - 1
        if mean_rows >= _MANY_ROWS and tile_columns(inner, columns) == WIDE_COLUMNS:
            most = _MAX_INNER_OF_WIDE
        elif mean_rows >= _MANY_ROWS and has_fast_memory(gpu):
            most = _MAX_INNER_OF_NARROW
        return TILE_ROWS if inner <= most else TURNED_ROWS
    return TURNED_ROWS if inner >= _MIN_SWAP_AB_INNER and mean_rows >= _MIN_SWAP_AB_ROWS else 0


def library_rows(
    device: Device,
    gpu: Gpu,
    result: int,
    num_rows: int,
    w: Array,
    inner: int,
    outer: int,
    arrays: Sequence[Array],
    columns: int = 0,
) -> int:
    """The rows of the tiles of the library's kernel that makes a product; 0: the Triton kernel does.

    Args:
        device: where to.
        gpu: the GPU there.
        result: PLAIN, GATED or GRADIENT.
        num_rows: M.
        w: the matrices.
        inner: length of the contraction.
        outer: columns of the result.
        arrays: operands and results, whose rows follow each other.
        columns: of a window of the result; 0: all.
    """
    if not most_library_rows(device, gpu) or not num_rows or inner % 8 or outer % 8:
        return 0
    item = ITEM_BYTES[device.dtype_name(w)]
    if vector_elements(item, *(address(each) for each in (w, *arrays))) == 1:
        return 0
    return chosen_rows(gpu, result, num_rows // w.shape[0], inner, columns or outer)


def most_library_rows(device: Device, gpu: Gpu) -> int:
    """The most rows that a tile of the library's kernels has, where it has kernels for the GPU; else 0."""
    return 0 if device.grouped_product is None or gpu.capability != 90 else TURNED_ROWS


def hopper_product(
    device: Device,
    source: Rows,
    w: Array,
    tables: Schedule,
    num_rows: int,
    out: Target,
    result: int,
    *,
    transpose: bool,
    tile_rows: int,
    weights: Array | None = None,
    hidden: Array | None = None,
    row_to_token: Array | None = None,
    gathers: bool = False,
    window: int | None = None,
    d_weights: Array | None = None,
) -> Any:
    """Launch the kernel; what a result is, is in csrc/include/pmo/grouped.h.

    Args:
        device: where to; it has a kernel.
        source: the rows to multiply.
        w: [E, N, D], or [E, D, N] without ``transpose``.
        tables: `schedule` of tiles of ``tile_rows`` rows; no other launch may use its counters meanwhile.
        num_rows: M, rows in all.
        out: [M, width] elements at least.
        result: PLAIN, GATED or GRADIENT.
        transpose: whether the matrices are stored transposed.
        tile_rows: TURNED_ROWS, or TILE_ROWS for the other kernel, whose results are PLAIN.
        weights: float32 [M] or None.
        hidden: [M, 2 width] or None.
        row_to_token: int32 [M], for a gradient, and to gather.
        gathers: whether ``source`` holds the tokens; not for a PLAIN result.
        window: of rows, which one ``source`` holds; None: all.
        d_weights: what the call for another window returned.

    Returns:
        float32 [M, tiles of columns] for a GRADIENT with weights, else None. Its sums by row are the gradients of the
        weights; rows of no expert are not written.
    """
    dtype = device.dtype_name(w)
    item = ITEM_BYTES[dtype]
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    if result == GRADIENT and weights is not None and d_weights is None:
        d_weights = device.empty([num_rows, cdiv(out.width, TILE_COLUMNS)], "float32")
    windows = tables.num_chunks
    rows_here = num_rows if window is None else min(num_rows, source.height)
    begin = address(tables.chunk_tiles) + ITEM_BYTES["int32"] * (windows + 1 if window is None else window)
    device.launch(
        device.grouped_product,
        1,
        _TYPES,
        (
            *(num_rows, source.height, experts, inner, outer, out.first_column, out.width, source.first_row, rows_here),
            *(source.address(item), source.stride, *map(address, (w, row_to_token, weights))),
            *(*map(address, (tables.group_starts, tables.group_ends, tables.tile_starts)), begin),
            *map(address, (out.array, hidden, tables.counters, d_weights)),
            *(LIBRARY_DTYPES[dtype], result, int(transpose), tile_rows, int(gathers), tile_columns(inner, out.width)),
        ),
        (),
        1,
    )
    return d_weights
