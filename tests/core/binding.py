# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The C core through ctypes, on NumPy arrays and without Paddle.

The modules of `operators` make params from arrays: sizes, strides and element types are those of the arrays, and
outputs are arrays too, written in place. Nothing there checks values or sizes; that is the core's task.

    core = Core("build/core/libpmo_core.so")
    core.run("permute", permute_params(x, slot_to_row, row_to_token, rows))
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import _env

from .structs import Int, Params, Size, Status

__all__ = ["Core", "CoreError"]


class CoreError(RuntimeError):
    """A call of the core that did not return PMO_OK: its status and the text of pmo_last_error()."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(f"{status.name}: {text}")
        self.status = status
        self.text = text


class Core:
    """A loaded ``libpmo_core.so``. PADDLE_MOE_OPS_MAX_CPU_ISA holds here, too.

    Attributes:
        library: The library.
        device: "cpu" or "cuda", as its functions are called.
    """

    device = "cpu"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.library = ctypes.CDLL(os.fspath(path))
        self._entries: dict[str, Any] = {}
        self.function("pmo_last_error", ctypes.c_char_p)
        self.function("pmo_set_num_threads", None, Int)
        self.function("pmo_num_threads", Int)
        self.function("pmo_set_max_cpu_isa", None, Int)
        self.function("pmo_used_cpu_isa", Int)
        self.function("pmo_cpu_set_streaming_bytes", None, Size)
        self.set_max_cpu_isa(_env.CPU_ISAS[_env.max_cpu_isa()])

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the library, with the types of its result and arguments."""
        function = getattr(self.library, name)
        function.restype, function.argtypes = result, arguments
        return function

    def entry(self, operator: str, num_structs: int = 1) -> Any:
        """The entry point of an operator, such as "permute": it takes params structs and a stream."""
        return self.entry_of(f"pmo_{operator}_{self.device}", num_structs)

    def entry_of(self, name: str, num_structs: int) -> Any:
        """A function that takes structs and a stream."""
        if name not in self._entries:
            self._entries[name] = self.function(name, ctypes.c_int, *[ctypes.c_void_p] * (num_structs + 1))
        return self._entries[name]

    @contextlib.contextmanager
    def on_device(self, *params: Params) -> Iterator[int | None]:
        """Inside, params point into memory of the device; gives the stream for calls."""
        yield None

    def run(self, operator: str, *params: Params | None, stream: int | None = None) -> None:
        """Call an operator with its params; raise CoreError unless it returns PMO_OK."""
        pointers = [None if each is None else ctypes.byref(each) for each in params]
        self.check(self.entry(operator, len(params))(*pointers, stream))

    def check(self, status: int) -> None:
        """Raise CoreError unless a status is PMO_OK."""
        if status != Status.OK:
            raise CoreError(Status(status), self.last_error())

    def workspace_bytes(self, operator: str, params: Params | None) -> int | None:
        """The size of an operator's workspace; None for an operator that needs none on this device."""
        name = f"pmo_{operator}_{self.device}_workspace_bytes"
        if not hasattr(self.library, name):
            return None
        return self.function(name, Size, ctypes.c_void_p)(None if params is None else ctypes.byref(params))

    def add_workspace(self, operator: str, params: Params) -> NDArray:
        """Make the workspace that an operator needs and enter it into its params."""
        workspace = np.full(self.workspace_bytes(operator, params) or 0, 0xA5, np.uint8)
        params.arrays["workspace"] = workspace
        params.workspace, params.workspace_bytes = workspace.ctypes.data, workspace.nbytes
        return workspace

    def last_error(self) -> str:
        """Text of the last failure on this thread."""
        return self.library.pmo_last_error().decode()

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of operators whose params say 0; a value below 1 restores the default."""
        self.library.pmo_set_num_threads(num_threads)

    def num_threads(self) -> int:
        return self.library.pmo_num_threads()

    def set_max_cpu_isa(self, isa: str) -> None:
        """The best of `_env.CPU_ISAS` that operators use, where the processor has it."""
        self.library.pmo_set_max_cpu_isa(_env.CPU_ISAS.index(isa))

    def used_cpu_isa(self) -> str:
        return _env.CPU_ISAS[self.library.pmo_used_cpu_isa()]

    def set_streaming_bytes(self, size: int) -> None:
        """Bytes beyond which CPU outputs are written past the caches; a negative size restores the machine's."""
        self.library.pmo_cpu_set_streaming_bytes(size)
