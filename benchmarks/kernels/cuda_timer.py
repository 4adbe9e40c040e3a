# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Timing on an NVIDIA GPU with device events, around replays of a CUDA graph or around plain calls.

A sample: flush the caches (or warm them), record an event, launch, record an event. All samples are queued before
any is read. Work before the first event keeps the GPU busy while the host queues the rest, so the time between the
events contains no waiting for the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .device import Body, Captured, Outputs

__all__ = ["CudaTimer", "count_launches"]

# Several times the L2 of any GPU of today, so that nothing of the operands is left there.
_FLUSH_BYTES = 512 << 20
_SPIN_CYCLES = 100_000  # about 50 us
_WARM_UP_CALLS = 3
# CUgraphNodeType of nodes that run on the device: kernel, memcpy, memset.
_LAUNCHES = (0, 1, 2)


class CudaTimer:
    """Captures bodies and takes samples on the current device."""

    def __init__(self) -> None:
        self.scratch = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self.sum = torch.empty((), dtype=torch.float32, device="cuda")

    def capture(self, body: Body, mode: str) -> Captured:
        """A body as a CUDA graph of one call ("graph") or as it is ("eager").

        Raises:
            RuntimeError: the graph of the call is empty.
        """
        latest: Outputs = {}

        def call() -> None:
            latest.clear()
            latest.update(body.run())

        if mode == "eager":
            return Captured(call, lambda: latest, None)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            call()
        launches = count_launches(graph.raw_cuda_graph())
        if launches == 0:
            raise RuntimeError("the captured CUDA graph must hold kernels, but it is empty")
        graph.instantiate()
        return Captured(graph.replay, lambda: latest, launches)

    def sample(self, launch: Callable[[], None], count: int, cold: bool) -> list[float]:
        """Microseconds of each of ``count`` launches, after a read of 512 MB (cold) or after the last launch."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        launch()
        for start, end in events:
            if cold:  # by reading: dirty lines of a write would be written back to memory during the sample
                torch.sum(self.scratch, dim=0, out=self.sum)
            else:
                torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in events]


def count_launches(graph: int) -> int:
    """Kernels, copies and memsets among the nodes of a cudaGraph_t."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    _succeed(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        _succeed(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        _succeed(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kinds.append(kind.value)
    return sum(kind in _LAUNCHES for kind in kinds)


def _succeed(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver must answer 0, but its status is {status}")
