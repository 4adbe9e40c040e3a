# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Device, stream and active driver of a launch, without a GPU: CUDA and the compiled code are stand-ins."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest

from paddle_moe_ops.triton.launch import paddle_device

pytestmark = pytest.mark.cpu_only

KERNEL_CALL = ("kernel", 1, ("i32",), (5,), (), 4)


class Library:
    """libcuda: one current context; that of device d is 100 + d."""

    def __init__(self) -> None:
        self.context, self.retained, self.sets = 0, [], []
        self.capabilities = ((7, 5), (9, 0))

    def cuCtxGetCurrent(self, out):  # noqa: N802
        out._obj.value = self.context or None
        return 0

    def cuDevicePrimaryCtxRetain(self, out, device):  # noqa: N802
        self.retained.append(device)
        out._obj.value = 100 + device
        return 0

    def cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        out._obj.value = self.capabilities[device][attribute - 75]
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.context = context.value
        self.sets.append(context.value)
        return 0


class Kernels:
    """Records the context and the driver of every launch."""

    def __init__(self, library) -> None:
        self.library, self.seen = library, []

    def launch(self, *call) -> None:
        self.seen.append((self.library.context, paddle_device._active_driver(), call))


@pytest.fixture
def library(monkeypatch):
    library = Library()
    cuda = paddle_device._CudaDriver.__new__(paddle_device._CudaDriver)
    cuda._library, cuda._primaries, cuda.device_count = library, {}, 2
    monkeypatch.setattr(paddle_device._CudaDriver, "get", lambda: cuda)
    monkeypatch.setattr(paddle_device, "_make_driver", lambda index, stream: f"our driver of {index}")
    return library


@pytest.fixture
def device(library):
    device = paddle_device.PaddleDevice("place", 1, lambda: 77)
    device._kernels = Kernels(library)
    return device


@contextlib.contextmanager
def active(driver):
    config = paddle_device._drivers()
    before = paddle_device._active_driver()
    config.set_active(driver)
    try:
        yield
        assert paddle_device._active_driver() is driver
    finally:
        config.set_active(before)


def test_a_launch_names_paddles_stream_and_leaves_a_foreign_driver_active(device, library):
    library.context = 101
    with active("theirs"):
        device.launch(*KERNEL_CALL)
    assert device._kernels.seen == [(101, "theirs", (77, *KERNEL_CALL))]
    assert library.sets == []


def test_where_nobody_has_set_a_driver_ours_stands_in_for_the_launch(device, library):
    library.context = 101
    with active(None):
        device.launch(*KERNEL_CALL)
    assert device._kernels.seen[0][:2] == (101, "our driver of 1")


@pytest.mark.parametrize("before", [100, 0], ids=["another GPU", "none"])
@pytest.mark.parametrize("driver", ["theirs", None])
def test_a_launch_goes_to_the_gpu_of_its_tensors(device, library, before, driver):
    library.context = before
    with active(driver):
        for _ in range(2):
            device.launch(*KERNEL_CALL)
    assert [seen[0] for seen in device._kernels.seen] == [101, 101]
    assert library.context == (before or 101)
    assert library.retained == [1]


def test_an_error_puts_driver_and_context_back(device, library, monkeypatch):
    library.context = 100

    def broken(*_):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(device._kernels, "launch", broken)
    with active(None), pytest.raises(RuntimeError, match="out of resources"):
        device.launch(*KERNEL_CALL)
    assert library.context == 100


def test_the_driver_is_asked_for_the_parameters_of_a_kernel_until_it_knows_no_more(library):
    asked = []

    def sizes(kernel, index, offset, size):
        asked.append((kernel.value, library.context))
        size._obj.value = (8, 4, 8)[index.value] if index.value < 3 else 0
        return 0 if index.value < 3 else 1

    library.cuFuncGetParamInfo = sizes
    library.cuLaunchKernel = library.cuGetErrorString = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    library.cuCtxGetCurrent, python = library.cuLaunchKernel, library.cuCtxGetCurrent
    driver = paddle_device._CudaDriver.get().launch_functions(1)
    library.cuCtxGetCurrent, library.context = python, 100
    assert driver.parameter_sizes(77) == [8, 4, 8]
    assert set(asked) == {(77, 101)}
    assert (driver.context, library.context) == (101, 100)
    assert driver.launch_kernel == driver.error_text == driver.current_context != 0


def test_older_drivers_do_not_tell_them(library):
    assert paddle_device._CudaDriver.get()._parameter_sizes(77) is None


def test_a_driver_that_cannot_be_loaded_is_a_reason_to_run_elsewhere(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(paddle_device, "_no_gpu", lambda: None)
    monkeypatch.setattr(paddle_device, "_no_triton", lambda: None)
    monkeypatch.setattr(paddle_device._CudaDriver, "get", staticmethod(paddle_device._CudaDriver))
    monkeypatch.setattr(paddle_device.ctypes, "CDLL", missing)
    assert paddle_device.unavailable() == (
        "the NVIDIA driver cannot be asked for the GPU: libcuda.so.1: cannot open shared object file"
    )


@pytest.fixture
def with_triton(library, monkeypatch):
    for name in ("_no_gpu", "_no_triton"):
        monkeypatch.setattr(paddle_device, name, lambda: None)
    paddle_device._unfit_gpu.cache_clear()
    yield library
    paddle_device._unfit_gpu.cache_clear()


def tensor_on(index):
    place = SimpleNamespace(is_gpu_place=lambda: True, gpu_device_id=lambda: index)
    return SimpleNamespace(place=place)


TOO_OLD = "the GPU must have compute capability 8.0 or newer, but has 7.5"


def test_the_gpu_of_the_tensor_decides_whether_it_is_new_enough(with_triton):
    assert paddle_device.unavailable() is None
    assert paddle_device.cannot_run_on(tensor_on(0)) == TOO_OLD
    assert paddle_device.cannot_run_on(tensor_on(1)) is None


def test_without_a_gpu_that_is_new_enough_triton_is_not_there(with_triton):
    with_triton.capabilities = ((7, 5), (7, 5))
    assert paddle_device.unavailable() == TOO_OLD
