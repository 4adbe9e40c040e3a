# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The core's CUDA operators behind the interface of `Core`: the same tests run on the GPU.

Tests hand over NumPy arrays. Around every call the memory behind them, guard bands included, is mirrored in GPU
memory, so that a stray write on the GPU shows in the bands just as one on the CPU does. PyTorch serves as allocator and
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from .binding import Core
from .structs import Params

# Read on the host, never by a kernel.
HOST_ARRAYS = ("expected_per_expert", "call", "barrier_call")


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
        for name, array in params.arrays.items():
            address = params.address(name)
            memory = memory_of(array)
            start = memory.ctypes.data
            # a test may have put another pointer there, or none
            if name in HOST_ARRAYS or not start <= address <= start + memory.size:
                continue
            if start not in mirrors:
                lead = start % 16  # CUDA allocations are aligned: an address keeps its place relative to 16 bytes
                mirror = torch.empty(lead + memory.size + 16, dtype=torch.uint8, device="cuda")[
                    lead : lead + memory.size
                ]
                mirror.copy_(torch.from_numpy(memory))
                mirrors[start] = memory, mirror
            replaced.append((params, name, address))
            params.point_at(**{name: mirrors[start][1].data_ptr() + address - start})
    try:
        yield
    finally:
        for params, name, address in replaced:
            params.point_at(**{name: address})
    for memory, mirror in mirrors.values():
        memory[...] = mirror.cpu().numpy()


class CudaCore(Core):
    """`Core` whose calls run on the current GPU."""

    device = "cuda"

    @contextlib.contextmanager
    def on_device(self, *params: Params) -> Iterator[int | None]:
        with mirrored(*params):
            yield torch.cuda.current_stream().cuda_stream
            torch.cuda.synchronize()

    def run(self, operator: str, *params: Params | None, stream: int | None = None) -> None:
        given = [each for each in params if each is not None]
        for each in given:
            each.before_cuda(self, operator)
            if each.needs_cuda_workspace and each.workspace is None:
                self.add_workspace(operator, each)
        with self.on_device(*given) as current:
            super().run(operator, *params, stream=stream or current)
        for each in given:
            each.after_cuda(self, operator)
