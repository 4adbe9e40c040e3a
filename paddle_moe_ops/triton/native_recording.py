# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded calls for the compiled library, which repeats them without Python (csrc/paddle/recording.cc).

Triton's launchers parse a call's arguments one by one, several dozen for each launch. The library receives them once,
as the bytes of the kernel's parameters, and launches through CUDA's driver. Triton's interface does not define the
hidden parameters of its kernels, so the driver is asked for the parameters of each kernel. If they differ from the
expected ones, or a kernel is launched in another way, Python repeats the recording.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from .launch.device import ITEM_BYTES, Array, Device, cdiv

__all__ = ["WORKSPACE_ALIGNMENT", "Driver", "Functions", "Repeater", "native_recording", "repeated"]

WORKSPACE_ALIGNMENT = 256  # of arrays in the workspace, as of memory from an allocator

_LAUNCHERS = "triton.backends.nvidia.driver"
_WARP = 32
_MAX_SHARED_BYTES = 227 << 10  # of a plain launch; Triton sets a launch attribute for more
# Attributes of Triton's launchers that are set if a launch is more than a plain one.
_PECULIARITIES = ("profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "gsan_enabled")
_DTYPES = {name: number for number, name in enumerate(ITEM_BYTES)}


class Functions(Protocol):
    """The library's functions for recordings; they return None if it cannot record or repeat a call."""

    def facts(self, *arrays: Any) -> bytes | None:
        """The facts about arrays that launchers read, as bytes for a key."""

    def new_recording(self, words: bytes) -> Any:
        """Create a recording from its encoding as 64-bit integers."""

    def repeat(self, recording: Any, stream: int, *inputs: Any) -> Sequence[Any] | None:
        """The results of a recording for these inputs."""


class Driver(NamedTuple):
    """CUDA's driver on one device.

    Attributes:
        current_context: address of the function that returns a thread's context.
        launch_kernel: address of the function that launches.
        error_text: address of the function that returns the text of a status.
        context: the device's context.
        parameter_sizes: bytes of each parameter of a kernel, or None if the driver cannot report them.
    """

    current_context: int
    launch_kernel: int
    error_text: int
    context: int
    parameter_sizes: Callable[[int], list[int] | None]


class Repeater(NamedTuple):
    """The functions of the compiled library and the driver that repeat recorded calls on a device."""

    functions: Functions
    driver: Driver


def repeated(device: Device, options: tuple[Hashable, ...], inputs: Sequence[Array | None]) -> Sequence[Any] | None:
    """Repeat the recorded call of these options and inputs, or return None if there is no recording.

    The inputs may have any strides, since strides are part of a recording's key.
    """
    native = getattr(device, "native", None)
    facts = None if native is None else native.functions.facts(*inputs)
    recording = None if facts is None else device.recordings.get((*options, facts))  # type: ignore[attr-defined]
    return None if recording is None else recording.repeat(device, inputs)


class _Target(NamedTuple):
    """The part of a launch that depends on its kernel alone, for `new_recording`.

    Attributes:
        function: handle.
        threads: threads of a program.
        shared_bytes: shared memory of a program.
        scratch_bytes: memory that each program needs.
        sizes: bytes of each parameter.
    """

    function: int
    threads: int
    shared_bytes: int
    scratch_bytes: int
    sizes: list[int]


def native_recording(
    native: Repeater,
    launches: Sequence[Any],
    results: Sequence[Any],
    workspace: int,
    offsets: Sequence[int],
    inputs: int,
) -> Any:
    """The recording that the library repeats, or None where Python must repeat it.

    Args:
        native: the library and the driver.
        launches: `recording.Launch` in order.
        results: shape and dtype of each result, or None.
        workspace: bytes of arrays that are neither inputs nor results.
        offsets: where these arrays are in the workspace.
        inputs: number of inputs.
    """
    targets: list[_Target] = []
    for each in launches:
        target = _target(native.driver, each.compiled, each.types)
        if target is None:
            return None
        targets.append(target)
    scratch_number = inputs + len(results) + len(offsets)
    # Launches run one after the other, so they may all use the same scratch.
    pairs = zip(targets, launches, strict=True)
    scratch = max((target.scratch_bytes * launch.programs for target, launch in pairs), default=0)
    if scratch:
        offsets = [*offsets, workspace]
        workspace += cdiv(scratch, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    words = [*native.driver[:4], len(results)]
    for result in results:
        words += [-1] if result is None else [_DTYPES[result[1]], *_counted(result[0])]
    words += [workspace, *_counted(offsets), len(launches)]
    for launch, target in zip(launches, targets, strict=True):
        words += _launch_words(launch, target, scratch_number)
    return native.functions.new_recording(array.array("q", words).tobytes())


def _counted(values: Sequence[int]) -> list[int]:
    return [len(values), *values]


def _launch_words(launch: Any, target: _Target, scratch_number: int) -> list[int]:
    """One launch, with its parameters as a kernel gets them."""
    positions, end = [], 0
    for size in target.sizes:
        positions.append(cdiv(end, size) * size)
        end = positions[-1] + size
    parameters = bytearray(cdiv(end, 8) * 8)
    values = launch.arguments[: len(launch.types)]
    for position, size, value in zip(positions, target.sizes, values, strict=False):
        struct.pack_into("<q" if size == 8 else "<i", parameters, position, value)
    places = [(positions[index], number, offset) for index, number, offset in launch.places]
    if target.scratch_bytes:
        places.append((positions[len(values)], scratch_number, 0))
    words = [target.function, launch.programs, target.threads, target.shared_bytes]
    words += _counted(array.array("q", bytes(parameters)))
    words += [*_counted(positions), len(places), *(word for place in places for word in place)]
    return words


def _target(driver: Driver, compiled: Any, types: Sequence[str]) -> _Target | None:
    sizes = [4 if kind == "i32" else 8 for kind in types]
    launcher = compiled.run
    if type(launcher).__module__ != _LAUNCHERS or not hasattr(launcher, "global_scratch_size"):
        return None
    if any(getattr(launcher, name, 0) for name in _PECULIARITIES):
        return None
    warps, programs_of_cluster, shared_bytes = compiled.packed_metadata[:3]
    if programs_of_cluster != 1 or shared_bytes > _MAX_SHARED_BYTES:
        return None
    scratch_bytes = launcher.global_scratch_size
    if scratch_bytes and launcher.global_scratch_align > WORKSPACE_ALIGNMENT:
        return None
    # After its own arguments a kernel gets scratch, and from Triton 3.5 on another one, for profilers.
    sizes += [8, 8] if hasattr(launcher, "profile_scratch_size") else [8]
    if driver.parameter_sizes(compiled.function) != sizes:
        return None
    return _Target(compiled.function, _WARP * warps, shared_bytes, scratch_bytes, sizes)
