# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`AsyncLoad` of ``paddle.incubate.tensor.manipulation`` for CPU-only builds of Paddle, which lack it.

ERNIE's models use it on every device to copy counts to the host.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

__all__ = ["AsyncLoad"]


class _Done:
    """The task of a finished copy."""

    def is_completed(self) -> bool:
        """True: the copy is finished."""
        return True

    def cpu_wait(self) -> None:
        """Wait on the host: for nothing."""

    def cuda_wait(self) -> None:
        """Wait on a GPU: for nothing."""


class AsyncLoad:
    """Paddle's ``AsyncLoad`` for host memory only: copies are synchronous, without gradients."""

    def offload(self, destination: Tensor, source: Tensor) -> _Done:
        """Copy a tensor to one that has no memory yet."""
        with paddle.no_grad():
            paddle.assign(source, output=destination)
        return _Done()

    reload = offload

    def offload_with_offset(
        self, destination: Tensor, source: Tensor, destination_offset: int, source_offset: int, size: int
    ) -> _Done:
        """Copy a part of a vector to a part of another."""
        with paddle.no_grad():
            part = source[source_offset : source_offset + size]
            destination[destination_offset : destination_offset + size] = part
        return _Done()
