# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The launches of a call, written down once and made again for other arrays of the same sizes.

A launcher computes configurations, grids, alignments and buffer sizes from the sizes, dtypes, strides and alignments of
its arrays alone. This takes several times longer on the host than the launches themselves. So a `Recorder` stands for
the device in the first call. It notes each launch, and for each address which array it lies in and how far from its
start. From then on a call of the same key allocates memory, fills in addresses and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .launch.allocator import scratch_memory
from .launch.device import ITEM_BYTES, MAX_CACHED_CALLS, Array, Device, address, alignment_bits, cdiv
from .native_recording import WORKSPACE_ALIGNMENT, native_recording

__all__ = ["facts_of", "recorded"]


def facts_of(device: Device, *arrays: Array | None) -> list[Hashable]:
    """The facts about arrays that launchers read, for a key of `recorded`."""
    native = getattr(device, "native", None)
    if native is not None and (found := native.functions.facts(*arrays)) is not None:
        return [found]
    facts: list[Hashable] = []
    for array in arrays:
        if array is None:
            facts.append(None)
            continue
        shape, stride = tuple(array.shape), 0
        if len(shape) == 2:
            stride = device.row_stride(array)
        facts += (shape, device.dtype_name(array), alignment_bits(array.data_ptr()), stride)
    return facts


def recorded(
    device: Device, key: Hashable, inputs: Sequence[Array | None], call: Callable[[Device], Sequence[Array | None]]
) -> Sequence[Any]:
    """Return the results of a call; if a call of this key was recorded, repeat its launches.

    Args:
        device: the device. Without ``recordings`` it runs ``call`` each time.
        key: what the call depends on: its options, and `facts_of` the inputs.
        inputs: every array that its launches read or write, besides those it makes.
        call: launches on a device and returns its results, each a new array or None.
    """
    recordings = getattr(device, "recordings", None)
    if recordings is None:
        return call(device)
    recording = recordings.get(key)
    if recording is not None:
        return recording.repeat(device, inputs)
    if key in recordings:  # None: it cannot be repeated
        return call(device)
    recorder = Recorder(device, inputs)
    made = call(recorder)
    if len(recordings) >= MAX_CACHED_CALLS:
        recordings.clear()
    recordings[key] = recorder.recording(made)
    return made


class Launch(NamedTuple):
    """One launch.

    Attributes:
        compiled: the kernel.
        programs: size of the grid.
        types: of the arguments that are no constants.
        arguments: with the constants, and 0 for each address.
        places: of each address: its argument, its array and the bytes before it there.
    """

    compiled: Any
    programs: int
    types: tuple[str, ...]
    arguments: list[Any]
    places: list[tuple[int, int, int]]


class _Recording(NamedTuple):
    """A call.

    Attributes:
        launches: in order.
        results: shape and dtype of each array that the call returns, or None.
        workspace: bytes that all others take together.
        offsets: of these in the workspace, in the order in which they are numbered.
        native: what the compiled library repeats, or None.
    """

    launches: list[Launch]
    results: list[tuple[Sequence[int], str] | None]
    workspace: int
    offsets: list[int]
    native: Any = None

    def repeat(self, device: Any, inputs: Sequence[Array | None]) -> Sequence[Any]:
        """Repeat the launches; arrays are numbered: inputs, then results, then arrays in the workspace."""
        if self.native is not None:
            made = device.native.functions.repeat(self.native, device.stream(), *inputs)
            if made is not None:  # else launches of this thread go elsewhere
                return made
        results = [None if each is None else device.empty(*each) for each in self.results]
        starts = [0 if each is None else each.data_ptr() for each in (*inputs, *results)]
        if self.workspace:
            workspace = device.empty([self.workspace // 4], "int32")
            start = workspace.data_ptr()
            starts += [start + offset for offset in self.offsets]
        with device.ready(), scratch_memory(device):
            stream = device.stream()
            for compiled, programs, _, template, places in self.launches:
                arguments = template.copy()
                for position, number, offset in places:
                    arguments[position] = starts[number] + offset
                device.run(compiled, stream, programs, arguments)
        return results


class _Noted(NamedTuple):
    """A launch in a recording that is not finished: each address with its argument."""

    compiled: Any
    programs: int
    types: tuple[str, ...]
    arguments: list[Any]
    pointers: list[tuple[int, int]]


class Recorder:
    """A device that notes what is launched on another one."""

    def __init__(self, device: Any, inputs: Sequence[Array | None]) -> None:
        self._device = device
        self._inputs = inputs
        self._made: list[tuple[Any, Sequence[int], str]] = []
        self._launches: list[_Noted] = []
        self._is_repeatable = True

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        made = self._device.empty(shape, dtype)
        self._made.append((made, tuple(shape), dtype))
        return made

    def dtype_name(self, array: Any) -> str:
        return self._device.dtype_name(array)

    def row_stride(self, array: Any) -> int:
        return self._device.row_stride(array)

    def reshape(self, array: Any, shape: Sequence[int]) -> Any:
        return self._device.reshape(array, shape)

    def read_int(self, array: Any, index: int) -> int:
        self._is_repeatable = False  # what follows depends on data
        return self._device.read_int(array, index)

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        self._device.launch(kernel, programs, types, arguments, constants, warps)
        pointers = [(index, arguments[index]) for index, kind in enumerate(types) if kind.startswith("*")]
        compiled = self._device.compiled(kernel, types, constants, warps)
        self._launches.append(_Noted(compiled, programs, types, [*arguments, *constants], pointers))

    def recording(self, made: Sequence[Array | None]) -> _Recording | None:
        """Return the recording of the noted launches, or None if the call cannot be repeated."""
        numbers = {id(each[0]): number for number, each in enumerate(self._made)}
        returned = [None if each is None else numbers.get(id(each), -1) for each in made]
        if not self._is_repeatable or -1 in returned:
            return None
        results = [None if number is None else self._made[number][1:] for number in returned]
        others = [number for number in range(len(self._made)) if number not in returned]
        offsets, workspace = [], 0
        for number in others:
            _, shape, dtype = self._made[number]
            offsets.append(workspace)
            size = ITEM_BYTES[dtype]
            for length in shape:
                size *= length
            workspace += cdiv(size, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        arrays = [*self._inputs, *made, *(self._made[number][0] for number in others)]
        ranges = [self._range(each) for each in arrays]
        launches = []
        for compiled, programs, types, arguments, pointers in self._launches:
            places = []
            for position, pointer in pointers:
                arguments[position] = 0
                if pointer == 0:
                    continue
                owners = [number for number, (start, end) in enumerate(ranges) if start <= pointer < end]
                if len(owners) != 1:  # in none, or in arrays that share memory in this call and may not in the next
                    return None
                places.append((position, owners[0], pointer - ranges[owners[0]][0]))
            launches.append(Launch(compiled, programs, types, arguments, places))
        what = launches, results, workspace, offsets
        native = getattr(self._device, "native", None)
        return _Recording(*what, native and native_recording(native, *what, len(self._inputs)))

    def _range(self, array: Array | None) -> tuple[int, int]:
        """The addresses of an array, from the first one on and before the last one."""
        if array is None:
            return 0, 0
        start = address(array)
        shape, item = list(array.shape), ITEM_BYTES[self._device.dtype_name(array)]
        if 0 in shape:
            return start, start
        if len(shape) == 2:
            return start, start + ((shape[0] - 1) * self._device.row_stride(array) + shape[1]) * item
        size = item
        for length in shape:
            size *= length
        return start, start + size
