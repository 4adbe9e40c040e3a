# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of launchers to a framework, and the access widths that addresses and strides allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "ITEM_BYTES",
    "MAX_CACHED_CALLS",
    "Array",
    "CopyWords",
    "Device",
    "address",
    "addresses",
    "alignment_bits",
    "cdiv",
    "copy_words",
    "next_power_of_2",
    "vector_elements",
]

# Launch arguments that are functions of a call's sizes are cached for this number of calls per operator: computing them
# takes longer on the host than a small kernel on the GPU.
MAX_CACHED_CALLS = 1024


# Triton's names of dtypes, and their sizes.
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
_VECTOR_BYTES = 16


def alignment_bits(*byte_counts: int) -> int:
    """Low bits of addresses and strides in bytes, or-ed: alignment depends on nothing else."""
    found = 0
    for number in byte_counts:
        found |= number
    return found % _VECTOR_BYTES


class Array(Protocol):
    """A tensor of any framework in device memory."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""

    def data_ptr(self) -> int:
        """Address of its first element."""


class Device(Protocol):
    """Memory and launches of one framework on one device."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new array, contents undefined; ``dtype`` is a key of `ITEM_BYTES`."""

    def dtype_name(self, array: Any) -> str:
        """The key of `ITEM_BYTES` for the dtype of an array."""

    def row_stride(self, array: Any) -> int:
        """Row stride of a matrix in elements; elements of a row are contiguous."""

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        """The elements of a contiguous array in another shape."""

    def read_int(self, array: Any, index: int) -> int:
        """One element of an integer array; synchronises with the device."""

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        """Enqueue a kernel on the current stream.

        Args:
            kernel: a function decorated with triton.jit, whose constexpr parameters come last.
            programs: size of the one-dimensional grid, at least 1.
            types: one per argument: "i32", "i64" or a pointer as "*i32", with ":16" after it if all addresses are
                multiples of 16.
            arguments: integers and addresses.
            constants: values of the constexpr parameters.
            warps: warps per program.
        """


class CopyWords(NamedTuple):
    """Access width of a row copy: integers of ``unit`` bytes, ``vector`` of them per access."""

    unit: int
    vector: int
    groups: int  # a row has groups * vector integers

    @property
    def length(self) -> int:
        """Words per row."""
        return self.groups * self.vector

    @property
    def pointer(self) -> str:
        return f"*i{8 * self.unit}" + (":16" if self.unit * self.vector == _VECTOR_BYTES else "")


def copy_words(row_bytes: int, *addresses_and_strides: int) -> CopyWords:
    """The widest words for rows of ``row_bytes`` bytes at these addresses and strides (in bytes)."""
    bits = alignment_bits(row_bytes, *addresses_and_strides)
    if bits == 0:
        return CopyWords(4, 4, row_bytes // _VECTOR_BYTES)
    unit = 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1
    return CopyWords(unit, 1, row_bytes // unit)


def vector_elements(item_bytes: int, *byte_counts: int) -> int:
    """Elements per access of a summing kernel: 16 bytes if addresses and strides allow it, otherwise one."""
    return _VECTOR_BYTES // item_bytes if alignment_bits(*byte_counts) == 0 else 1


def address(array: Any) -> int:
    """Address of an optional array; 0 for None."""
    return 0 if array is None else array.data_ptr()


def addresses(*arrays: Any) -> list[int]:
    """`address` of each array."""
    return [0 if array is None else array.data_ptr() for array in arrays]


def cdiv(size: int, block: int) -> int:
    """Ceiling division: the number of blocks that cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
