# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Constants of the C core and the common base of its structs, as ``csrc/include/pmo/*.h`` declares them.

The docstrings of enumerations and structs are their names in C. Each struct is in `operators`.
"""

from __future__ import annotations

import ctypes
import enum
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .binding import Core


class Status(enum.IntEnum):
    """pmo_status"""

    OK = 0
    INVALID_ARGUMENT = 1
    INVALID_DATA = 2
    INTERNAL = 3


class Check(enum.IntFlag):
    """pmo_check"""

    NONE = 0
    RANGE = 1
    DUPLICATES = 2
    NAN = 4
    OVERFLOW = 8
    COUNTS = 16
    ALL = 31


class Fill(enum.IntFlag):
    """pmo_fill"""

    NONE = 0
    ROWS = 1
    SCALES = 2
    ALL = 3


class RoutingKind(enum.IntEnum):
    """pmo_routing_kind"""

    IDS32 = 0
    IDS64 = 1
    MASK = 2


class Duplicates(enum.IntEnum):
    """pmo_duplicates"""

    FIRST = 0
    EACH = 1


class ScaleLayout(enum.IntEnum):
    """pmo_scale_layout"""

    ROW = 0
    COLUMN = 1


# pmo_dtype
DTYPES: dict[np.dtype, int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 3,
    np.dtype(ml_dtypes.float8_e5m2): 4,
    np.dtype(np.int32): 5,
}

IDS_KINDS = {np.dtype(np.int32): RoutingKind.IDS32, np.dtype(np.int64): RoutingKind.IDS64}

# PMO_NOWHERE
NOWHERE = (1 << 63) - 1

Int = ctypes.c_int32
Size = ctypes.c_int64
Float = ctypes.c_float
Bytes = ctypes.c_void_p
Int32s = ctypes.POINTER(ctypes.c_int32)
Int64s = ctypes.POINTER(ctypes.c_int64)
Floats = ctypes.POINTER(ctypes.c_float)
_ELEMENTS = {Int32s: np.dtype(np.int32), Int64s: np.dtype(np.int64), Floats: np.dtype(np.float32)}


def fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields of a struct, from types and the names that have them."""
    return [(name, kind) for kind, names in groups for name in names.split()]


def _row_stride(matrix: NDArray) -> int:
    """Elements from one row to the next; inside a row they must be neighbours."""
    if matrix.size > len(matrix) and matrix.strides[1] != matrix.itemsize:
        raise ValueError(f"rows must be contiguous, but got strides {matrix.strides}")
    return matrix.strides[0] // matrix.itemsize


class Params(ctypes.Structure):
    """A params struct of the core. It keeps the arrays alive whose addresses it holds, and takes strides from them.

    The CPU entries of some operators check data, which the CUDA entries leave to their callers. `before_cuda` and
    `after_cuda` raise the same errors around a call of a CUDA entry.

    Attributes:
        needs_cuda_workspace: True if a test that passes no workspace gets one on a GPU, too.
    """

    needs_cuda_workspace: ClassVar[bool] = False

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.arrays: dict[str, NDArray] = {}
        self.struct_size = ctypes.sizeof(self)
        types = self._types()
        for name, value in fields.items():
            if name not in types:
                raise TypeError(f"{type(self).__name__} has no field {name}")
            stride = f"{name}_row_stride"
            if isinstance(value, np.ndarray):
                expected = _ELEMENTS.get(types[name], value.dtype)
                if value.dtype != expected:
                    raise TypeError(f"{name} must be {expected}, but got {value.dtype}")
                if not value.flags.c_contiguous and stride not in types:
                    raise ValueError(f"{name} must be contiguous, but got strides {value.strides}")
                self.arrays[name] = value
                if stride in types and stride not in fields:
                    setattr(self, stride, _row_stride(value))
                value = ctypes.cast(value.ctypes.data, types[name])
            setattr(self, name, value)

    def _types(self) -> dict[str, Any]:
        return {name: kind for name, kind, *_ in self._fields_}

    def address(self, name: str) -> int:
        """The address in a pointer; 0 for NULL."""
        return ctypes.cast(getattr(self, name), ctypes.c_void_p).value or 0

    def point_at(self, **addresses: int) -> None:
        """Set pointers, by name."""
        types = self._types()
        for name, address in addresses.items():
            setattr(self, name, ctypes.cast(address, types[name]))

    def before_cuda(self, core: Core, operator: str) -> None:
        """Check what is known before the call."""

    def after_cuda(self, core: Core, operator: str) -> None:
        """Check what the call found."""


class Findings(ctypes.Structure):
    """The findings of an operator's checks; on CUDA, at the beginning of its workspace."""
