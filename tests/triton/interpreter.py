# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on NumPy arrays, in Triton's interpreter: no GPU, no framework.

TRITON_INTERPRET=1 must be set in the environment before a module of `paddle_moe_ops.triton` is imported. Index
arithmetic, copies and sums are exact there from Triton 3.9 on.

    device = NumpyDevice()
    rows, _ = permute(device, device.array(x), None, device.array(slot_to_row), device.array(row_to_token), "all")
    device.numpy(rows)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.triton.launch.device import ITEM_BYTES

from . import interpreter_costs
from .sanitizing import checked_accesses

__all__ = ["DTYPES", "NumpyArray", "NumpyDevice"]

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ITEM_BYTES}
_ALIGNMENT = 16
_POISON = 0xA5
# Around each array: floats that are NaN, so that reading there shows as well, and no -1, which kernels write.
_GUARD, _GUARD_BYTES = (0xFE, 0xFF), 256


class NumpyArray:
    """An array with the few methods that launchers ask of a tensor."""

    def __init__(self, values: NDArray) -> None:
        self.values = values
        self.shape = values.shape

    def data_ptr(self) -> int:
        return self.values.ctypes.data


class _Pointer:
    """A stand-in for a tensor in host memory, which the interpreter uses without a copy."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> _Pointer:
        return self

    def cpu(self) -> _Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Pointer:
        return _Pointer(self.address, self.dtype)

    def set_(self, *_: Any) -> None:
        pass

    def copy_(self, _: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    def stride(self) -> tuple[int, ...]:
        return ()


@contextlib.contextmanager
def _bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Lets the interpreter round bfloat16 to nearest, which it would cut off, and multiply matrices of it."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def cast_to_nearest(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(DTYPES["bfloat16"]).view(np.uint16), tl.bfloat16)
        return cast(self, source, dtype)

    def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        operands = (self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return create_dot(self, *operands, *others)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot_of_numbers, cast_to_nearest
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast


class NumpyDevice:
    """A `paddle_moe_ops.triton.launch.device.Device` in host memory, where new arrays hold garbage on purpose.

    A launch that writes beyond an array, or has no programs, raises.

    Attributes:
        launches: names of the kernels launched so far.
    """

    grouped_product: Any = None
    grouped_outer: Any = None
    grouped_float8: Any = None

    def __init__(self) -> None:
        self.launches: list[str] = []
        self._guarded: list[tuple[weakref.ref[NDArray], int, int, tuple[bytes, bytes]]] = []

    def array(self, values: NDArray, *, offset: int = 0) -> NumpyArray:
        """A copy that lies ``offset`` bytes beyond a multiple of 16; rows of a matrix keep their distance."""
        dense = np.require(values, requirements="C")
        copy = self._memory(dense.nbytes, offset).view(dense.dtype).reshape(dense.shape)
        copy[...] = dense
        return NumpyArray(copy)

    def columns(self, array: NumpyArray, count: int) -> NumpyArray:
        """The first columns of a matrix, where they lie."""
        return NumpyArray(array.values[:, :count])

    def numpy(self, array: NumpyArray) -> NDArray:
        return array.values

    def empty(self, shape: Sequence[int], dtype: str) -> NumpyArray:
        kind = DTYPES[dtype]
        return NumpyArray(self._memory(int(np.prod(shape)) * kind.itemsize, 0).view(kind).reshape(shape))

    def dtype_name(self, array: NumpyArray) -> str:
        return array.values.dtype.name

    def row_stride(self, array: NumpyArray) -> int:
        return array.values.strides[0] // array.values.itemsize

    def reshape(self, array: NumpyArray, shape: Sequence[int]) -> NumpyArray:
        return NumpyArray(array.values.reshape(shape))

    def read_int(self, array: NumpyArray, index: int) -> int:
        return int(array.values[index])

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        self.launches.append(kernel.fn.__name__)
        values: list[Any] = []
        for kind, value in zip(types, arguments, strict=True):
            if kind.startswith("*"):
                dtype, _, aligned = kind[1:].partition(":")
                if aligned and value % _ALIGNMENT:
                    raise ValueError(f"{self.launches[-1]}: {value:#x} is not aligned")
                values.append(_Pointer(value, dtype))
            elif kind == "i32" and not -(2**31) <= value < 2**31:
                raise ValueError(f"{self.launches[-1]}: {value} does not fit into int32")
            else:
                values.append(value)
        if programs < 1:  # which CUDA refuses
            raise ValueError(f"{self.launches[-1]}: {programs} programs")
        checked = checked_accesses(self.launches[-1])
        # errstate: a GPU does not tell either
        with _bfloat16_as_on_a_gpu(), interpreter_costs.lowered(), checked, np.errstate(all="ignore"):
            kernel[(programs,)](*values, *constants)
        self._check_guards()

    # what repeats a recorded launch

    def compiled(self, *what: Any) -> tuple[Any, ...]:
        return what

    def run(self, compiled: tuple[Any, ...], stream: int, programs: int, arguments: Sequence[Any]) -> None:
        kernel, types, constants, warps = compiled
        assert tuple(arguments[len(types) :]) == constants
        self.launch(kernel, programs, types, arguments[: len(types)], constants, warps)

    def ready(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def stream(self) -> int:
        return 0

    def _memory(self, size: int, offset: int) -> NDArray:
        raw = np.empty(size + 2 * _GUARD_BYTES + 2 * _ALIGNMENT, np.uint8)
        for index, byte in enumerate(_GUARD):
            raw[index :: len(_GUARD)] = byte
        start = -raw.ctypes.data % _ALIGNMENT + _GUARD_BYTES + offset
        memory = raw[start : start + size]
        memory[...] = _POISON
        self._guarded.append((weakref.ref(raw), start, size, self._guards(raw, start, size)))
        return memory

    @staticmethod
    def _guards(raw: NDArray, start: int, size: int) -> tuple[bytes, bytes]:
        return raw[:start].tobytes(), raw[start + size :].tobytes()

    def _check_guards(self) -> None:
        self._guarded = [each for each in self._guarded if each[0]() is not None]
        for reference, start, size, guards in self._guarded:
            raw = reference()
            if raw is not None and self._guards(raw, start, size) != guards:
                raise ValueError(f"{self.launches[-1]}: written outside of an array of {size} bytes")
