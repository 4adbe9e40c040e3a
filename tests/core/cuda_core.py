# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The core's CUDA operators behind the interface of `Core`: the same tests run on the GPU.

Tests hand over NumPy arrays. Around every call the memory behind them, guard bands included, is mirrored in GPU
memory, so that a stray write on the GPU shows in the bands just as one on the CPU does. PyTorch serves as allocator and
stream.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .cuda_entries import CudaEntries
from .structs import (
    NOWHERE,
    Check,
    CleanRowmapParams,
    Params,
    PermuteParams,
    RouteFindings,
    RouteParams,
    RowmapFindings,
    SortChunksParams,
    TopkParams,
)

# Read on the host by the reports, never by a kernel.
HOST_ARRAYS = ("expected_per_expert",)


def memory_of(array: NDArray) -> NDArray:
    """The whole allocation that an array is a view of, as bytes."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def mirrored(*structs: Params) -> Iterator[None]:
    """Inside, the structs point into GPU memory; at the end what stands there is copied back."""
    mirrors: dict[int, tuple[NDArray, torch.Tensor]] = {}
    replaced: list[tuple[Params, str, int]] = []
    for params in structs:
        types: dict[str, Any] = dict(type(params)._fields_)
        for name, array in params.arrays.items():
            address = ctypes.cast(getattr(params, name), ctypes.c_void_p).value
            memory = memory_of(array)
            start = memory.ctypes.data
            # a test may have put another pointer there, or none
            if name in HOST_ARRAYS or address is None or not start <= address <= start + memory.size:
                continue
            if start not in mirrors:
                lead = start % 16  # CUDA allocations are aligned: an address keeps its place relative to 16 bytes
                mirror = torch.empty(lead + memory.size + 16, dtype=torch.uint8, device="cuda")[
                    lead : lead + memory.size
                ]
                mirror.copy_(torch.from_numpy(memory))
                mirrors[start] = memory, mirror
            replaced.append((params, name, address))
            setattr(params, name, ctypes.cast(mirrors[start][1].data_ptr() + address - start, types[name]))
    try:
        yield
    finally:
        for params, name, address in replaced:
            setattr(params, name, ctypes.cast(address, dict(type(params)._fields_)[name]))
    for memory, mirror in mirrors.values():
        memory[...] = mirror.cpu().numpy()


class CudaCore(CudaEntries):
    """`Core` whose calls run on the current GPU."""

    def route_workspace(self, params: RouteParams) -> NDArray:
        return self._make_workspace(params, self.library.pmo_route_cuda_workspace_bytes(ctypes.byref(params)))

    def _make_workspace(self, params: Params, size: int) -> NDArray:
        workspace = np.full(size, 0xA5, np.uint8)
        params.arrays["workspace"] = workspace
        params.workspace, params.workspace_bytes = workspace.ctypes.data, size
        return workspace

    def run(self, operator: str, params: Params | None, stream: int | None = None) -> None:
        if params is None:
            super().run(operator, params, stream)
            return
        if isinstance(params, CleanRowmapParams) and params.workspace is None:
            self._make_workspace(params, self.library.pmo_clean_rowmap_cuda_workspace_bytes(ctypes.byref(params)))
        if isinstance(params, SortChunksParams):
            if params.checks:
                self.sort_chunks_report(params)
            if params.workspace is None:
                self._make_workspace(params, self.library.pmo_sort_chunks_cuda_workspace_bytes(ctypes.byref(params)))
        if isinstance(params, TopkParams) and params.workspace is None:
            self._make_workspace(params, self.library.pmo_topk_cuda_workspace_bytes(ctypes.byref(params)))
        if isinstance(params, RouteParams) and operator == "route" and params.checks & Check.OVERFLOW:
            nothing = RouteFindings(bad_place=NOWHERE, duplicate_place=NOWHERE, nan_place=NOWHERE)
            self.route_report(params, nothing, params.arrays["routed_per_expert"])
        with mirrored(params):
            super().run(operator, params, stream or torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
        self._report(operator, params)

    def route_permute(self, route: RouteParams, permute: PermuteParams | None = None) -> None:
        with mirrored(*(params for params in (route, permute) if params is not None)):
            stream = torch.cuda.current_stream().cuda_stream
            pointer = None if permute is None else ctypes.byref(permute)
            self._check(self.entry("route_permute")(ctypes.byref(route), pointer, stream))
            torch.cuda.synchronize()

    def _report(self, operator: str, params: Any) -> None:
        """Raise what the CPU operators raise by themselves."""
        if operator == "route_count" and params.checks:
            checks, params.checks = params.checks, params.checks & ~Check.OVERFLOW
            try:
                findings = RouteFindings.from_buffer_copy(params.arrays["workspace"])
                self.route_report(params, findings, params.arrays["routed_per_expert"])
            finally:
                params.checks = checks
        if operator == "clean_rowmap" and params.checks:
            self.clean_rowmap_report(params, RowmapFindings.from_buffer_copy(params.arrays["workspace"]))
