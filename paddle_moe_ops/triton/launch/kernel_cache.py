# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled kernels: launches without Triton's dispatch.

``kernel[grid](...)`` inspects every argument of every call to find the compiled code, which takes longer than a small
kernel. Launchers state what the code depends on (types, constants, warps), so one dictionary lookup finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["KernelCache"]

# Triton specialises code by example values: multiples of 16, 1, and sizes beyond 32 bits.
_EXAMPLES = {"i32": 3, "i64": 2**40 + 3}


class _Example:
    """A placeholder for a tensor while a kernel compiles: an aligned or unaligned address, and a dtype."""

    def __init__(self, kind: str) -> None:
        self.dtype, _, aligned = kind.removeprefix("*").partition(":")
        self.address = 16 if aligned else 1

    def data_ptr(self) -> int:
        return self.address


class KernelCache:
    """The compiled kernels of one device.

    Args:
        compiling: returns the context in which Triton compiles and loads a kernel.
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
        """`device.Device.launch` on a stream of the current device."""
        self.run(self.compiled(kernel, types, constants, warps), stream, programs, (*arguments, *constants))

    def compiled(self, kernel: Any, types: tuple[str, ...], constants: tuple, warps: int) -> Any:
        """The compiled kernel for these argument types and constants, an argument of `run`."""
        key = (kernel, types, constants, warps)
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._compile(*key)
        return found

    @staticmethod
    def run(compiled: Any, stream: int, programs: int, arguments: Sequence[Any]) -> None:
        """Enqueue a kernel on a stream of the current device; constants follow the other arguments."""
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,  # argument of the launch hooks, and the hooks
            None,
            None,
            *arguments,
        )

    def _compile(self, kernel: Any, types: tuple[str, ...], constants: tuple, warps: int) -> Any:
        examples = [_Example(kind) if kind.startswith("*") else _EXAMPLES[kind] for kind in types]
        with self._compiling():
            # Without fusion: fused multiply-adds are explicit in the source.
            compiled = kernel.warmup(*examples, *constants, grid=(1,), num_warps=warps, enable_fp_fusion=False)
            _ = compiled.run  # loads the code
        return compiled
