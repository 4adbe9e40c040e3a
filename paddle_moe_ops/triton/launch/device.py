# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What the launchers need from a framework, and how rows are cut into what a kernel takes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "CALLS_KEPT",
    "ITEM_BYTES",
    "Array",
    "Device",
    "Words",
    "address",
    "addresses",
    "blocks",
    "low_bits",
    "next_power_of_2",
    "sum_vector",
    "words_of",
]

# What follows from the sizes of a call is worked out once and kept for so many calls of an operator: a launcher takes
# longer on the host than a small kernel on the GPU.
CALLS_KEPT = 1024


# The names of dtypes, as Triton takes them, and their sizes.
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


def low_bits(*byte_counts: int) -> int:
    """What alignment depends on: the lowest bits of addresses and strides in bytes, as if of one number."""
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
        """The address of its first element."""


class Device(Protocol):
    """Memory and launches of one framework on one device."""

    @property
    def grouped_product(self) -> Any:
        """What `hopper_product` launches, or None."""

    @property
    def grouped_outer(self) -> Any:
        """What `hopper_outer` launches, or None."""

    @property
    def grouped_float8(self) -> Any:
        """What `hopper_float8` launches, two kernels, or None."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new array, contents undefined; ``dtype`` is a key of `ITEM_BYTES`."""

    def dtype_name(self, array: Any) -> str:
        """The key of `ITEM_BYTES` that stands for the dtype of an array."""

    def row_stride(self, array: Any) -> int:
        """Elements from one row of a matrix to the next; inside a row they are neighbours."""

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        """The same elements of a contiguous array in another shape."""

    def read_int(self, array: Any, index: int) -> int:
        """One element of an integer array; waits for the device."""

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        """Enqueue a kernel on the current stream.

        Args:
            kernel: a function decorated with triton.jit, whose constexpr parameters come last, or a
                `hopper_product.LibraryKernel`, which sees to its grid itself.
            programs: size of the one-dimensional grid, at least 1.
            types: one per argument: "i32", "i64" or a pointer as "*i32", with ":16" after it if all addresses are
                multiples of 16.
            arguments: integers and addresses.
            constants: the values of the constexpr parameters.
            warps: per program.
        """


class Words(NamedTuple):
    """How the rows of matrices are copied: as integers of ``unit`` bytes, ``vector`` of them at a time."""

    unit: int
    vector: int
    groups: int  # a row has groups * vector integers

    @property
    def length(self) -> int:
        """Words of a row."""
        return self.groups * self.vector

    @property
    def pointer(self) -> str:
        return f"*i{8 * self.unit}" + (":16" if self.unit * self.vector == _VECTOR_BYTES else "")


def words_of(row_bytes: int, *addresses_and_strides: int) -> Words:
    """The widest words that fit rows of so many bytes at these addresses, strides (in bytes) included."""
    bits = low_bits(row_bytes, *addresses_and_strides)
    if bits == 0:
        return Words(4, 4, row_bytes // _VECTOR_BYTES)
    unit = 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1
    return Words(unit, 1, row_bytes // unit)


def sum_vector(item_bytes: int, *byte_counts: int) -> int:
    """Elements per access where rows are added: 16 bytes if addresses and strides allow it, else one."""
    return _VECTOR_BYTES // item_bytes if low_bits(*byte_counts) == 0 else 1


def address(array: Any) -> int:
    """Where an optional array lies; 0 for None."""
    return 0 if array is None else array.data_ptr()


def addresses(*arrays: Any) -> list[int]:
    """`address` of each."""
    return [0 if array is None else array.data_ptr() for array in arrays]


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
