# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The C core as operators call it, on a CPU and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.binding import Core
from tests.core.structs import Params

from .device import Body, Outputs
from .inputs import Inputs

__all__ = ["CoreCalls"]


class CoreCalls:
    """The core, with the device's arrays and streams for its calls.

    Attributes:
        run: Calls an operator with its params, both as in `tests.core.binding.Core`.
    """

    def __init__(self, core: Core, note: str = "", as_array: Callable[[Any], Any] = lambda value: value) -> None:
        """Wrap a loaded core.

        Args:
            core: The library.
            note: A remark for readers of all its results.
            as_array: Converts an array of the device for the binding.
        """
        self.run = core.run
        self._core, self._note, self._as_array = core, note, as_array

    def params(self, make: Callable[..., Any], *arrays: Any, **fields: Any) -> Any:
        """Call a function of the binding that makes params, with arrays of the device."""
        named = {name: self._as_array(value) for name, value in fields.items()}
        return make(*map(self._as_array, arrays), **named)

    def add_workspace(self, operator: str, params: Params, inputs: Inputs) -> None:
        """Give params the workspace that the operator needs on this device, if any."""
        size = self._core.workspace_bytes(operator, params)
        if size is not None:
            memory = inputs.empty(max(size, 1), dtype="uint8")
            memory[...] = 0xA5  # earlier values must not affect the call
            workspace = self._as_array(memory)
            params.arrays["workspace"] = workspace
            params.workspace, params.workspace_bytes = workspace.ctypes.data, size

    def body(self, run: Callable[[], None], outputs: Outputs) -> Body:
        """A call that writes to outputs which exist."""

        def call() -> Outputs:
            run()
            return outputs

        return Body(call, note=self._note)
