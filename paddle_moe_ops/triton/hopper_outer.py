# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of experts' matrices that the compiled library makes on Hopper, launched as a Triton kernel is.

csrc/cuda/gemm/wgrad.cu can gather the rows of tokens. `takes_outer` says where it takes the place of the Triton
kernel.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .gemm.types import Gpu, Rows, Schedule
from .hopper_product import LIBRARY_DTYPES, LibraryKernel, library_kernel
from .launch.device import ITEM_BYTES, Array, Device, address, vector_elements

__all__ = ["grouped_outer_of", "hopper_outer", "takes_outer"]

_INTEGERS = (
    *("num_rows", "num_experts", "p_columns", "q_columns", "out_rows", "out_columns"),
    *("first_p", "first_q", "p_row_stride", "q_row_stride"),
)
_ARRAYS = ("p", "q", "first", "stop", "out")
_OPTIONS = ("dtype", "gathered")
_NONE, _P, _Q = range(3)  # pmo_grouped_gathered


class GroupedOuterParams(ctypes.Structure):
    """pmo_grouped_outer_params."""

    _fields_ = (
        ("struct_size", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("num_sources", ctypes.c_int64),
        ("row_to_token", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in _OPTIONS),
    )


_TYPES = (*["i64"] * len(_INTEGERS), *["*i8"] * len(_ARRAYS), "i64", "*i8", "*i8", *["i32"] * len(_OPTIONS))


def grouped_outer_of(library: Any) -> LibraryKernel | None:
    """The kernel of a library that `ctypes` has loaded, or None where it has none."""
    return library_kernel(library, "grouped_outer", GroupedOuterParams)


def takes_outer(device: Device, gpu: Gpu, num_rows: int, p: Rows, q: Rows, out: Array, adds: bool) -> bool:
    """Return whether the library's wgrad kernel supports the call: it overwrites, and stores the dtype of the rows.

    Args:
        device: where to.
        gpu: the GPU there.
        num_rows: M.
        p: as in `hopper_outer`.
        q: as in `hopper_outer`.
        out: as in `hopper_outer`.
        adds: whether to accumulate into ``out``.
    """
    if adds or device.dtype_name(out) != device.dtype_name(p.array) or num_rows == 0:
        return False
    if device.grouped_outer is None or gpu.capability != 90:
        return False
    item = ITEM_BYTES[device.dtype_name(p.array)]
    sizes = [size * item for size in (p.width, p.stride, q.width, q.stride, out.shape[-1])]
    return vector_elements(item, p.address(item), q.address(item), address(out), *sizes) != 1


def hopper_outer(
    device: Device,
    p: Rows,
    q: Rows,
    tables: Schedule,
    num_rows: int,
    out: Array,
    *,
    window: tuple[int, int] = (0, 0),
    gathered: tuple[Array, bool] | None = None,
) -> None:
    """Launch the kernel: out[e, i : i + P, j : j + Q] = p^T q of each expert's rows.

    Args:
        device: where to; it has a kernel.
        p: [M, P]; if it is gathered, the tokens [T, P].
        q: [M, Q]; if it is gathered, the tokens [T, Q].
        tables: `schedule` for any tiles; no other launch may use its counters meanwhile.
        num_rows: M.
        out: [E, ...], dtype of ``p``.
        window: i and j; the latter a multiple of 8.
        gathered: row_to_token and whether q holds the tokens, else p does; None: neither.
    """
    row_to_token, q_is_gathered = gathered or (None, False)
    which = _NONE if gathered is None else _Q if q_is_gathered else _P
    sources = q.height if q_is_gathered else p.height
    dtype = device.dtype_name(p.array)
    item = ITEM_BYTES[dtype]
    device.launch(
        device.grouped_outer,
        1,
        _TYPES,
        (
            *(num_rows, out.shape[0], p.width, q.width, out.shape[1], out.shape[2], *window, p.stride, q.stride),
            *(p.address(item), q.address(item), address(tables.group_starts), address(tables.group_ends), address(out)),
            *(sources, address(row_to_token), address(tables.counters), LIBRARY_DTYPES[dtype], which),
        ),
        (),
        1,
    )
