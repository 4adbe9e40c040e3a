# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's description of an operator, and its implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ..check import Compare
from ..device import Body
from ..model import Bytes, Work
from ..problem import Problem
from ..shapes import Operation

__all__ = [
    "NUMPY",
    "PADDLE",
    "PADDLE_STATIC",
    "PLAIN",
    "TORCH",
    "TRANSFORMER_ENGINE",
    "Library",
    "Operator",
    "Published",
    "Variant",
    "Way",
]

# Names of peers that do several operators; `targets` has ours.
NUMPY = "numpy take"  # rows by index into a new array
PLAIN = "paddle ops"  # the fastest plain operators of Paddle that were found for the same job
TORCH = "torch gather"  # indexes rows and adds them up in float32
TRANSFORMER_ENGINE = "te triton"
PADDLE = "paddle (published, scaled)"  # its own kernels
PADDLE_STATIC = "paddle static buffer (published, scaled)"


class Library(Enum):
    """The library that a way calls. The comments name its argument besides the operation and its inputs."""

    CORE = "core"  # core.CoreCalls
    CORE_OTHERWISE = "core, otherwise"  # the same; ways that the first one is compared with
    TRITON = "triton"  # torch_device.TorchDevice
    TORCH = "torch"  # the module
    TRANSFORMER_ENGINE = "te triton"  # transformer_engine.TransformerEngine
    PADDLE = "paddle"  # the module; the inputs are cpu_paddle.PaddleInputs
    NUMPY = "numpy"  # the module


class Way(NamedTuple):
    """An implementation of an operator.

    Attributes:
        name: Its name in rows and filters.
        library: The library that it calls.
        prepare: Returns a body, or raises Unsupported; does the untimed work.
        variants: Those that it offers; an empty tuple means all.
        gpu_only: True if it is measured on GPUs only, although its library runs on a CPU.
    """

    name: str
    library: Library
    prepare: Callable[[Any, Operation, Any], Body]
    variants: tuple[str, ...] = ()
    gpu_only: bool = False


class Published(NamedTuple):
    """Times from elsewhere, of a peer that cannot run here: microseconds by the name of the shape."""

    impl: str
    medians: Mapping[str, float]


class Variant(NamedTuple):
    """A variant of an operator.

    Attributes:
        dtype: Element type of the rows, or logits, that are read; float8 rows have a float32 scale per 128 columns.
        due: Outputs that every way gives; maps and probabilities come from some only.
        mostly_read: True if it writes far less than it reads, so that reading alone is measured too.
        picture: Its title in the picture of a run; without one it is left out there.
        published: Peers known from elsewhere only.
    """

    dtype: str
    due: tuple[str, ...] = ()
    mostly_read: bool = False
    picture: str = ""
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes:
        name: As in filters and results.
        variants: Variants by name.
        least_bytes: The bytes of an operation that must move, in the units of `model`.
        ways: Its implementations.
        checks: Comparison of each output. An output without an entry is a map; it is compared with the oracle's map
            of the same name.
        probe: The probe that moves the rows of an operation; None if there are no rows to move.
    """

    name: str
    variants: Mapping[str, Variant]
    least_bytes: Callable[[Operation, Problem], Bytes]
    ways: tuple[Way, ...]
    checks: Mapping[str, Compare] = field(default_factory=dict)
    probe: Callable[[Operation, Problem], Work] | None = None
