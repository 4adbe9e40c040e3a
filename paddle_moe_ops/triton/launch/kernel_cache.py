# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Launching compiled kernels without Triton's dispatch.

``kernel[grid](...)`` looks at every argument of every call to find the code that was compiled for it, which costs more
than a small kernel takes. Here the launchers say what a call depends on (types, constants, warps), so a dictionary
leads from a call to its code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..hopper_product import LibraryKernel

__all__ = ["Handles"]

# Triton compiles for what it can tell from an example: multiples of 16, ones and sizes beyond 32 bits.
_EXAMPLES = {"i32": 3, "i64": 2**40 + 3}


class _Example:
    """Stands for a tensor while a kernel is compiled: an address that is aligned or is not, and a dtype."""

    def __init__(self, kind: str) -> None:
        self.dtype, _, aligned = kind.removeprefix("*").partition(":")
        self.address = 16 if aligned else 1

    def data_ptr(self) -> int:
        return self.address


class Handles:
    """The compiled kernels of one device.

    Args:
        compiling: makes the context in which Triton compiles and loads a kernel.
    """

    def __init__(self, compiling: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._compiling = compiling
        self._compiled: dict[tuple, Any] = {}

    def launch(
        self,
        stream: int,
        kernel: Any,
        programs: int,
        types: tuple[str, ...],
        arguments: Sequence[int],
        constants: tuple,
        warps: int,
    ) -> None:
        """As `launching.Device.launch`, on a stream of the current device."""
        self.run(self.compiled(kernel, types, constants, warps), stream, programs, (*arguments, *constants))

    def compiled(self, kernel: Any, types: tuple[str, ...], constants: tuple, warps: int) -> Any:
        """A kernel for arguments of these types and for these constants, which `run` takes."""
        key = (kernel, types, constants, warps)
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = kernel if isinstance(kernel, LibraryKernel) else self._compile(*key)
        return found

    @staticmethod
    def run(compiled: Any, stream: int, programs: int, arguments: Sequence[Any]) -> None:
        """Enqueue a kernel on a stream of the current device; the constants come after the other arguments."""
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,  # what hooks would get, and the hooks
            None,
            None,
            *arguments,
        )

    def _compile(self, kernel: Any, types: tuple[str, ...], constants: tuple, warps: int) -> Any:
        examples = [_Example(kind) if kind.startswith("*") else _EXAMPLES[kind] for kind in types]
        with self._compiling():
            # Without fusion: where a multiplication and an addition are one, the source says so.
            compiled = kernel.warmup(*examples, *constants, grid=(1,), num_warps=warps, enable_fp_fusion=False)
            _ = compiled.run  # loads the code
        return compiled
