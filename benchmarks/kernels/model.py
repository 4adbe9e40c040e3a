# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The units of the bytes that operators must move, and the probes that move as much without any map.

The least number of bytes counts each input once, read, and each output once, written. In the formulas of the operators
T is tokens, K slots, E experts, H columns, N routed rows, M rows of the buffer (the N and the padding), b bytes per
element, and S scales per row (float32). M counts only if padding rows are written, N otherwise.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["WORD", "Bytes", "Kind", "Work"]

WORD = 4  # int32, float32


class Bytes(NamedTuple):
    """Bytes that must be read and bytes that must be written."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


class Kind(IntEnum):
    """The kernels of ceilings.cu, which move rows as operations do but follow no map."""

    EMPTY = 0
    WRITE = 1
    READ = 2
    FANOUT = 3
    REDUCE = 4
    EXCHANGE = 5


class Work(NamedTuple):
    """The bytes that a probe moves.

    Attributes:
        kind: The kernel.
        shared: Bytes of the side that is touched once: read by FANOUT and EXCHANGE, written by REDUCE; all there is
            of READ and WRITE.
        streamed: Bytes of the other side: written by FANOUT, read by REDUCE, read and written by EXCHANGE.
    """

    kind: Kind
    shared: int
    streamed: int

    @property
    def name(self) -> str:
        return self.kind.name.lower()

    @property
    def total(self) -> int:
        """Bytes read and bytes written."""
        return self.shared + (2 if self.kind == Kind.EXCHANGE else 1) * self.streamed
