# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A repeated call goes straight to its code: nothing is compiled or looked up in Triton."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from paddle_moe_ops.triton.launch.kernel_cache import KernelCache


class Kernel:
    """Stands for a kernel: what it was compiled for, and what was launched of it."""

    compiling = False

    def __init__(self) -> None:
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def warmup(self, *arguments: Any, grid: tuple[int], num_warps: int, enable_fp_fusion: bool) -> Code:
        assert Kernel.compiling
        assert (grid, enable_fp_fusion) == ((1,), False)
        self.compiled.append((*arguments, num_warps))
        return Code(self, len(self.compiled))


class Code:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.function, self.packed_metadata = kernel, f"code {number}", f"metadata {number}"

    def run(self, *arguments: Any) -> None:
        assert not Kernel.compiling
        self.kernel.launched.append(arguments)


@contextlib.contextmanager
def compiling():
    Kernel.compiling = True
    yield
    Kernel.compiling = False


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def kernels():
    return KernelCache(compiling)


CALL = {"types": ("*i32:16", "*i8", "i32", "i64"), "constants": (True, 256), "warps": 4}


def launch(kernels, kernel, stream=7, programs=3, arguments=(16, 5, 2, 1), **changed):
    call = {**CALL, **changed}
    kernels.launch(stream, kernel, programs, call["types"], arguments, call["constants"], call["warps"])


def test_code_is_made_once_and_launched_with_what_each_call_says(kernels, kernel):
    launch(kernels, kernel)
    launch(kernels, kernel, stream=8, programs=1, arguments=(32, 16, 1, 2**33))
    assert len(kernel.compiled) == 1
    first, second = kernel.launched
    assert first == (3, 1, 1, 7, "code 1", "metadata 1", None, None, None, 16, 5, 2, 1, True, 256)
    assert second == (1, 1, 1, 8, "code 1", "metadata 1", None, None, None, 32, 16, 1, 2**33, True, 256)


@pytest.mark.parametrize(
    "changed",
    [
        {"types": ("*i32", "*i8", "i32", "i64")},
        {"types": ("*i32:16", "*i8", "i32", "i32")},
        {"constants": (False, 256)},
        {"constants": (True, 128)},
        {"warps": 8},
    ],
    ids=["alignment", "width", "a flag", "a size", "warps"],
)
def test_another_kind_of_call_has_its_own_code(kernels, kernel, changed):
    launch(kernels, kernel)
    launch(kernels, kernel, **changed)
    launch(kernels, kernel)
    assert [each[4] for each in kernel.launched] == ["code 1", "code 2", "code 1"]


def test_another_kernel_and_another_device_have_their_own_code(kernels, kernel):
    other = Kernel()
    for device in (kernels, KernelCache(compiling)):
        launch(device, kernel)
        launch(device, other)
    assert len(kernel.compiled) == len(other.compiled) == 2


def test_code_serves_any_number_and_address_of_its_type(kernels, kernel):
    """Triton would compile anew for a 1, for a multiple of 16 and beyond 32 bits; so none of these is an example."""
    launch(kernels, kernel)
    pointer, odd_pointer, number, wide, *_ = kernel.compiled[0]
    assert pointer.data_ptr() % 16 == 0
    assert odd_pointer.data_ptr() % 16 != 0
    assert (pointer.dtype, odd_pointer.dtype) == ("i32", "i8")
    assert 1 < number < 2**31
    assert number % 16 != 0
    assert wide >= 2**31
    assert wide % 16 != 0
