# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of functions under Paddle, captured by the driver: Paddle's own are for its GPU builds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["Graph"]

# Paddle's allocator may ask the driver for memory meanwhile, which stays what it is until the process ends.
_RELAXED = 2


class Graph:
    """A CUDA graph of a function, captured and not yet launched.

    Args:
        stream: address of the stream on which the function launches.
        call: the function, which must have run before, so that all memory is there.

    Attributes:
        made: what the function returned; its tensors are written by each launch.
        nodes: how many kernels, copies and fills there are.
    """

    def __init__(self, stream: int, call: Callable[[], Any]) -> None:
        self._driver, self._stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(stream)
        graph, count, self._program = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        try:
            self.made = call()
        except Exception:
            self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._program), graph, ctypes.c_ulonglong(0))
        self.nodes = count.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name} answered {status}"

    def replay(self) -> None:
        """Launch what was captured."""
        self._call("cuGraphLaunch", self._program, self._stream)

    def launch(self) -> None:
        """Run what was captured, and wait for it."""
        self.replay()
        self._call("cuStreamSynchronize", self._stream)
