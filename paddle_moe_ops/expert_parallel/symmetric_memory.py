# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers: memory that the ranks of one machine share.

A symmetric buffer has P regions at each rank, one for each rank that writes to it. It has two views:

- ``arrived``: the P regions in this rank's memory;
- ``peers``: the regions that this rank writes; part p is its region at rank p.

Each view is one range of addresses, so kernels without code for ranks can write to and read from all regions. On a CPU
regions are files in memory, on a GPU memory of the driver that other processes map. In both cases a rank sends a file
descriptor to the rank that maps the region.

A region stays allocated as long as one rank maps it, so ranks may free buffers in any order.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from ..backends import direct
from .agreement import raising_together

__all__ = [
    "BufferShape",
    "allocate",
    "granularity",
    "mapped",
    "memory_of",
]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIMEOUT_S = 120.0  # for ranks to send their file descriptors
_PAGE = mmap.PAGESIZE
_NO_ACCESS, _IN_PLACE = 0, 0x10  # PROT_NONE and MAP_FIXED, which Python does not name
# Enum values of the driver's virtual memory API.
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_RECOMMENDED_GRANULARITY = 1


class BufferShape(NamedTuple):
    """The shape of a symmetric buffer: a tensor [rows, columns] in P regions.

    Attributes:
        region_bytes: a multiple of `granularity`.
        rows: a multiple of P.
        columns: of a row.
        dtype: of the tensor.
    """

    region_bytes: int
    rows: int
    columns: int
    dtype: Any


class Views(NamedTuple):
    """The two views of a symmetric buffer, [rows, columns] each. The last tensor over a view unmaps it.

    Attributes:
        arrived: the regions that the ranks wrote for this one.
        peers: this rank's regions at all ranks.
    """

    arrived: Tensor
    peers: Tensor


def granularity(place: Any) -> int:
    """Return the granularity of a region's size in bytes."""
    return _PAGE if place.is_cpu_place() else _Driver.get().granularity(_device_of(place))


def allocate(group: Group, like: Tensor, shape: BufferShape) -> Views:
    """Allocate a symmetric buffer on the device of a tensor; all ranks of the group call it with the same shape.

    The memory is initialised with zeros. A rank may drop its views while others use theirs: a region stays allocated as
    long as one rank maps it. On a GPU the rank that unmaps a view waits for its own kernels.

    Args:
        group: the ranks.
        like: a tensor on the device of the buffer.
        shape: of the buffer.

    Raises:
        ValueError: the ranks are not on one machine.
        RuntimeError: a rank or the driver did not answer.
    """
    with contextlib.ExitStack() as opened:
        own: list[int] = []  # by the rank that writes the region
        descriptors: list[int] = []
        with raising_together("ExpertParallel", group):
            memory = memory_of(like.place, shape.region_bytes)
            for _ in range(group.nranks):
                own.append(memory.make())
                opened.callback(memory.forget, own[-1])
                descriptors.append(memory.export(own[-1]))
                opened.callback(os.close, descriptors[-1])
        received = _exchange_descriptors(group, descriptors)
        theirs = list(own)
        for rank, each in enumerate(received):
            if rank != group.rank:
                opened.callback(os.close, each)
        with raising_together("ExpertParallel", group):
            for rank, each in enumerate(received):
                if rank != group.rank:
                    theirs[rank] = memory.take(each)
                    opened.callback(memory.forget, theirs[rank])
            views = Views(*(mapped(memory, regions, like, shape) for regions in (own, theirs)))
    return views


def mapped(memory: _HostMemory | _DeviceMemory, regions: Sequence[int], like: Tensor, shape: BufferShape) -> Tensor:
    """Map regions at adjacent addresses, and return them as a tensor that unmaps them."""
    (made,) = direct("window", like, memory.map(regions), shape.rows, shape.columns, shape.dtype.value)
    return made


def _exchange_descriptors(group: Group, descriptors: Sequence[int]) -> list[int]:
    """Send each rank its file descriptor, and return the received ones, by rank."""
    rank, received = group.rank, {group.rank: descriptors[group.rank]}
    name = f"\0paddle_moe_ops-{uuid.uuid4().hex}"  # abstract address, without a file
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(name)
        server.listen(group.nranks)
        server.settimeout(_TIMEOUT_S)
        told: list[tuple[str, str]] = []
        paddle.distributed.all_gather_object(told, (_machine(), name), group=group)
        elsewhere = [group.ranks[other] for other, (machine, _) in enumerate(told) if machine != told[rank][0]]
        if elsewhere:
            expected = "a group whose ranks are on one machine"
            _checks.bad_value("ExpertParallel", "transport='peer' needs", expected, f"ranks {elsewhere} on others")
        try:
            for other, (_, address) in enumerate(told):
                if other == rank:
                    continue
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_other:
                    to_other.settimeout(_TIMEOUT_S)
                    to_other.connect(address)
                    socket.send_fds(to_other, [rank.to_bytes(4, "little")], [descriptors[other]])
            while len(received) < group.nranks:
                with server.accept()[0] as from_other:
                    sender, files, _, _ = socket.recv_fds(from_other, 4, 1)
                    received[int.from_bytes(sender, "little")] = files[0]
        except (OSError, IndexError) as error:
            raise RuntimeError(f"ExpertParallel: the ranks of {group.ranks} could not share memory: {error}") from error
    return [received[other] for other in range(group.nranks)]


def _machine() -> str:
    """Return the identity of the machine and network namespace; processes that can share memory have the same."""
    network = os.readlink("/proc/self/ns/net")
    return f"{_BOOT.read_text().strip()} {network}"


def memory_of(place: Any, region_bytes: int) -> _HostMemory | _DeviceMemory:
    """Return the allocator of shareable regions of memory on a place."""
    return _HostMemory(region_bytes) if place.is_cpu_place() else _DeviceMemory(_device_of(place), region_bytes)


class _HostMemory:
    """The allocator of regions in host memory, as unnamed files."""

    def __init__(self, region_bytes: int) -> None:
        self._bytes = region_bytes
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]

    def make(self) -> int:
        made = os.memfd_create("paddle_moe_ops window")
        os.ftruncate(made, self._bytes)
        return made

    def export(self, region: int) -> int:
        return os.dup(region)

    def take(self, descriptor: int) -> int:
        return os.dup(descriptor)

    def map(self, regions: Sequence[int]) -> int:
        """Map regions at adjacent addresses."""
        total = self._bytes * len(regions)
        base = self._map(None, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, _NO_ACCESS)
        for number, region in enumerate(regions):
            self._map(base + number * self._bytes, self._bytes, mmap.MAP_SHARED | _IN_PLACE, region)
        return base

    def forget(self, region: int) -> None:
        """Close a file; its mappings stay."""
        os.close(region)

    def _map(
        self, address: int | None, size: int, flags: int, file: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE
    ) -> int:
        mapped = self._library.mmap(address, size, access, flags, file, 0)
        if mapped == ctypes.c_void_p(-1).value:
            raise RuntimeError(f"ExpertParallel: no memory to share: {os.strerror(ctypes.get_errno())}")
        return int(mapped)


def _device_of(place: Any) -> int:
    """Return the driver's number of a GPU."""
    return place.gpu_device_id() if place.is_gpu_place() else place.custom_device_id()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Driver:
    """The functions of the CUDA driver for memory that processes share."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    @staticmethod
    @functools.cache
    def get() -> _Driver:
        return _Driver()

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"ExpertParallel: GPUs cannot share memory: {name} answered {status}")

    def granularity(self, device: int) -> int:
        size = ctypes.c_size_t()
        properties = shareable(device)
        self.call(
            "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), _RECOMMENDED_GRANULARITY
        )
        return size.value


def shareable(device: int) -> _Properties:
    """Return the properties of memory on a device that other processes can map."""
    return _Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_ON_DEVICE, device))


class _DeviceMemory:
    """The allocator of regions in a GPU's memory."""

    def __init__(self, device: int, region_bytes: int) -> None:
        self._driver, self._device, self._bytes = _Driver.get(), device, region_bytes

    def make(self) -> int:
        handle, properties = ctypes.c_uint64(), shareable(self._device)
        size = ctypes.c_size_t(self._bytes)
        self._driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
        return handle.value

    def export(self, region: int) -> int:
        made = ctypes.c_int(-1)
        handle, no_flags = ctypes.c_uint64(region), ctypes.c_uint64(0)
        self._driver.call("cuMemExportToShareableHandle", ctypes.byref(made), handle, _FILE_DESCRIPTOR, no_flags)
        return made.value

    def take(self, descriptor: int) -> int:
        handle = ctypes.c_uint64()
        name, file = "cuMemImportFromShareableHandle", ctypes.c_void_p(descriptor)
        self._driver.call(name, ctypes.byref(handle), file, _FILE_DESCRIPTOR)
        return handle.value

    def map(self, regions: Sequence[int]) -> int:
        """Map regions at adjacent addresses, for this rank's device."""
        zero, size = ctypes.c_uint64(0), ctypes.c_size_t(self._bytes)
        base, total = ctypes.c_uint64(), ctypes.c_size_t(self._bytes * len(regions))
        self._driver.call("cuMemAddressReserve", ctypes.byref(base), total, ctypes.c_size_t(0), zero, zero)
        for number, region in enumerate(regions):
            address = ctypes.c_uint64(base.value + number * self._bytes)
            self._driver.call("cuMemMap", address, size, ctypes.c_size_t(0), ctypes.c_uint64(region), zero)
        access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE)
        self._driver.call("cuMemSetAccess", base, total, ctypes.byref(access), ctypes.c_size_t(1))
        return base.value

    def forget(self, region: int) -> None:
        """Release a handle; its mappings stay."""
        self._driver.call("cuMemRelease", ctypes.c_uint64(region))
