# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Triton on Paddle's tensors, devices and streams; the only module that uses Triton's drivers.

Triton gets the current device and stream from a process-wide driver, which uses PyTorch. PyTorch may be missing or have
streams of its own. So kernels are compiled and loaded under this module's driver, which uses Paddle and is active for
that time only. A launch names its stream itself and needs no driver. If no driver is active, ours is during a launch:
newer versions of Triton read it anyway, and would create PyTorch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any

import paddle
from paddle import Tensor

from ..native_recording import Driver, Functions, Repeater
from .kernel_cache import KernelCache

__all__ = ["PaddleDevice", "cannot_run_on", "device_of", "unavailable"]

_OLDEST_TRITON = (3, 2)
_OLDEST_CAPABILITY = (8, 0)
RIG = "cuda_rig"  # name of the plug-in for NVIDIA GPUs under a CPU build of Paddle (tools/gpu_rig)

_CAPABILITY_ATTRIBUTES = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NO_CONTEXT = contextlib.nullcontext()
_lock = threading.RLock()


def _is_nvidia_gpu(place: Any) -> bool:
    """True if these kernels can run on tensors at a place."""
    return place.is_gpu_place() or (place.is_custom_place() and place.custom_device_type() == RIG)


def unavailable() -> str | None:
    """The reason why no Triton kernel can run in this process, or None."""
    return _no_gpu() or _no_triton() or _no_fit_gpu()


def cannot_run_on(tensor: Tensor) -> str | None:
    """The reason why no kernel can run on a tensor in a process where kernels run, or None."""
    place = tensor.place
    if _is_nvidia_gpu(place):
        return _unfit_gpu(_index_of(place))
    return f"Triton kernels need tensors on an NVIDIA GPU, but these are on {place}"


@functools.cache
def _no_gpu() -> str | None:
    if paddle.is_compiled_with_cuda():
        return None if paddle.device.cuda.device_count() > 0 else "Paddle finds no NVIDIA GPU"
    if RIG in paddle.device.get_all_custom_device_type():
        return None
    return "Triton kernels need an NVIDIA GPU, and this is a build of Paddle without GPUs"


@functools.cache
def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it with: pip install 'triton>=3.2'"
    version = metadata.version("triton")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_TRITON:
        return f"Triton must be at least {'.'.join(map(str, _OLDEST_TRITON))}, but is {version}"
    try:
        from triton import knobs
    except ImportError:  # before Triton 3.4
        return None
    return "TRITON_INTERPRET is set, which takes kernels off the GPU" if knobs.runtime.interpret else None


def _no_fit_gpu() -> str | None:
    try:
        reasons = [_unfit_gpu(index) for index in range(_CudaDriver.get().device_count)]
    except (OSError, RuntimeError) as error:
        return f"the NVIDIA driver cannot be asked for the GPU: {error}"
    return None if None in reasons else reasons[0]


@functools.cache
def _unfit_gpu(index: int) -> str | None:
    capability = _CudaDriver.get().capability(index)
    if capability >= _OLDEST_CAPABILITY:
        return None
    return f"the GPU must have compute capability 8.0 or newer, but has {capability[0]}.{capability[1]}"


class _CudaDriver:
    """The functions of the CUDA driver that neither Paddle nor Triton offers at every place."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._check(self._library.cuInit(0))
        count = ctypes.c_int(0)
        self._check(self._library.cuDeviceGetCount(ctypes.byref(count)))
        self.device_count = count.value
        self._primaries: dict[int, int] = {}

    @staticmethod
    @functools.cache
    def get() -> _CudaDriver:
        return _CudaDriver()

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver must answer 0, but its status is {status}")

    def capability(self, device: int) -> tuple[int, int]:
        found = []
        for attribute in _CAPABILITY_ATTRIBUTES:
            value = ctypes.c_int(0)
            self._check(self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
            found.append(value.value)
        return found[0], found[1]

    def _primary(self, device: int) -> int:
        """Primary context of a device, which the CUDA runtime and Paddle use; retained from then on."""
        context = self._primaries.get(device)
        if context is None:
            found = ctypes.c_void_p()
            self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(found), device))
            context = self._primaries[device] = found.value or 0
        return context

    def _current(self) -> int:
        found = ctypes.c_void_p()
        self._check(self._library.cuCtxGetCurrent(ctypes.byref(found)))
        return found.value or 0

    def is_current(self, device: int) -> bool:
        """True if launches of this thread reach a device."""
        return self._current() == self._primary(device)

    def launch_functions(self, device: int) -> Driver:
        """Driver functions for launches by the library."""
        functions = self._library.cuCtxGetCurrent, self._library.cuLaunchKernel, self._library.cuGetErrorString
        current, launch, text = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)

        def parameter_sizes(kernel: int) -> list[int] | None:
            with self.current(device):
                return self._parameter_sizes(kernel)

        return Driver(current, launch, text, self._primary(device), parameter_sizes)

    def _parameter_sizes(self, kernel: int) -> list[int] | None:
        """Bytes of each parameter of a kernel on the current device, or None before CUDA 12.4."""
        try:
            ask = self._library.cuFuncGetParamInfo
        except AttributeError:
            return None
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
        while not ask(ctypes.c_void_p(kernel), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make the primary context of a device the thread's current one."""
        before = self._current()
        try:
            self._check(self._library.cuCtxSetCurrent(ctypes.c_void_p(self._primary(device))))
            yield
        finally:
            if before:
                self._check(self._library.cuCtxSetCurrent(ctypes.c_void_p(before)))


def _make_driver(device: int, stream: Callable[[], int]) -> Any:
    """A Triton driver for one device, on Paddle's current stream there."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class PaddleDriver(CudaDriver):
        def __init__(self) -> None:  # not CudaDriver's, which imports torch
            self.utils = CudaUtils()
            self.launcher_cls = CudaLauncher
            self.get_current_device = lambda: device
            self.get_current_stream = lambda _: stream()
            self.set_current_device = lambda _: None
            self.get_device_capability = _CudaDriver.get().capability

    return PaddleDriver()


class PaddleDevice:
    """A `device.Device`: memory and streams of Paddle on one GPU. Returned by `device_of`.

    Args:
        place: place of the tensors.
        index: index of the GPU.
        stream: returns the handle of Paddle's current stream there.
        functions: those of the compiled library that repeat recorded calls, or None.

    Attributes:
        recordings: recordings of `recording.recorded`.
        native: repeats them without Python, or None.
    """

    def __init__(self, place: Any, index: int, stream: Callable[[], int], functions: Functions | None = None) -> None:
        self._place = place
        self._index = index
        self.stream = stream
        self._kernels = KernelCache(self._compiling)
        self.compiled, self.run = self._kernels.compiled, self._kernels.run
        self.recordings: dict[Any, Any] = {}
        self._several_gpus = _CudaDriver.get().device_count > 1
        self.native = None if functions is None else Repeater(functions, _CudaDriver.get().launch_functions(index))

    @functools.cached_property
    def _driver(self) -> Any:
        return _make_driver(self._index, self.stream)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Our driver as the active one; afterwards the previous one, or none."""
        with _lock:
            before = _active_driver()
            _drivers().set_active(self._driver)
            try:
                yield
            finally:
                _drivers().set_active(before)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with _CudaDriver.get().current(self._index), self._active():
            yield

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        return paddle._C_ops.empty(list(shape), _dtypes()[dtype], self._place)

    def dtype_name(self, array: Tensor) -> str:
        return _names()[array.dtype]

    def row_stride(self, array: Tensor) -> int:
        strides = getattr(array, "strides", None)  # Paddle 2 has none: all its tensors are contiguous
        return strides[0] if strides else array.shape[1]

    def reshape(self, array: Tensor, shape: Sequence[int]) -> Tensor:
        return array.reshape(list(shape))

    def read_int(self, array: Tensor, index: int) -> int:
        return int(array.numpy()[index])

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        what = self.stream(), kernel, programs, types, arguments, constants, warps
        with self.ready():
            self._kernels.launch(*what)

    def ready(self) -> AbstractContextManager:
        """The context in which launches of this thread reach this device."""
        elsewhere = self._several_gpus and not _CudaDriver.get().is_current(self._index)
        driver_missing = _active_driver() is None
        if not elsewhere and not driver_missing:  # an empty ExitStack would double the time of a launch
            return _NO_CONTEXT
        contexts = contextlib.ExitStack()
        if elsewhere:
            contexts.enter_context(_CudaDriver.get().current(self._index))
        if driver_missing:
            contexts.enter_context(self._active())
        return contexts


@functools.cache
def _drivers() -> Any:
    """The module that holds Triton's active driver."""
    from triton.runtime import driver

    return driver


def _active_driver() -> Any:
    """The active driver, or None."""
    return vars(_drivers()).get("_active")


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Paddle's dtypes by name; Paddle 2 has no float8."""
    names = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "bool")
    return {name: getattr(paddle, name) for name in names if hasattr(paddle, name)}


@functools.cache
def _names() -> dict[Any, str]:
    return {dtype: name for name, dtype in _dtypes().items()}


_devices: dict[tuple[bool, int], PaddleDevice] = {}


def _index_of(place: Any) -> int:
    return place.gpu_device_id() if place.is_gpu_place() else place.custom_device_id()


def device_of(tensor: Tensor, functions: Functions | None = None) -> PaddleDevice:
    """The device that contains a tensor; `cannot_run_on` must have returned None for it, or for one of the previous
    call.

    Args:
        tensor: any.
        functions: those of the compiled library that repeat recorded calls, or None.
    """
    place = tensor.place
    is_gpu, index = place.is_gpu_place(), _index_of(place)
    device = _devices.get((is_gpu, index))
    if device is None:
        if not _is_nvidia_gpu(place):
            raise RuntimeError(f"Triton kernels need a tensor on an NVIDIA GPU, but all of this call are on {place}")
        core = paddle.base.core
        if is_gpu:
            stream = lambda: core._get_current_stream(index).cuda_stream  # noqa: E731
        else:
            stream = lambda: core._get_current_custom_device_stream(RIG, index).raw_stream  # noqa: E731
        device = _devices[is_gpu, index] = PaddleDevice(place, index, stream, functions)
    return device
