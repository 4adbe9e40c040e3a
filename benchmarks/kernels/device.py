# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's interface of a device: implementations, a check and a timer. One module per device implements it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from .problem import Problem
from .results import Row
from .shapes import Operation

__all__ = ["BFLOAT16_SUMS", "BITS", "FLOAT32_SUMS", "Body", "Captured", "Device", "Implementation", "Unsupported"]

# Comparisons of a result with the oracle's. Dot products, which are float32 sums, have a tolerance in any case.
BITS = "bits"
FLOAT32_SUMS = "float32 sums"  # float32 sums in another order than the oracle's
BFLOAT16_SUMS = "bfloat16 sums"  # sums that are rounded to bfloat16 after every addition

Outputs = dict[str, Any]


def as_they_are(outputs: Outputs) -> Outputs:
    return outputs


class Unsupported(Exception):  # noqa: N818 it is an answer, not an error
    """An implementation cannot do one of its operations on a problem; the text says why."""


class Body(NamedTuple):
    """One call, ready to run.

    Attributes:
        run: Enqueues the call and returns its outputs, by name.
        exactness: Comparison of sums.
        note: A remark for readers of the result.
        results: Converts the call's outputs to the names and layouts of the check; not timed.
    """

    run: Callable[[], Outputs]
    exactness: str = BITS
    note: str = ""
    results: Callable[[Outputs], Outputs] = as_they_are


class Captured(NamedTuple):
    """A body in the form that is timed, the outputs that a launch writes, and its kernels, copies and memsets."""

    launch: Callable[[], None]
    outputs: Callable[[], Outputs]
    launches: int | None


@dataclass(frozen=True)
class Implementation:
    """One way to do some operations.

    Attributes:
        name: Its name in rows and filters.
        operations: Patterns of the keys of operations that it offers.
        prepare: Makes a body for a problem's inputs, or raises Unsupported for a problem that it cannot do.
    """

    name: str
    operations: tuple[str, ...]
    prepare: Callable[[Operation, Any], Body]

    def offers(self, operation: Operation) -> bool:
        return any(fnmatch.fnmatchcase(operation.key, pattern) for pattern in self.operations)

    def over(self, inputs_of: Callable[[Any], Any], to_numpy: Callable[[Any], Any]) -> Implementation:
        """The same for NumPy arrays, as a library sees them that has arrays of its own."""

        def prepare(operation: Operation, inputs: Any) -> Body:
            body = self.prepare(operation, inputs_of(inputs))

            def results(outputs: Outputs) -> Outputs:
                return {name: to_numpy(array) for name, array in body.results(outputs).items()}

            return body._replace(results=results)

        return replace(self, prepare=prepare)


class Device(Protocol):
    """A device as the runner sees it.

    Attributes:
        name: As ``--device`` calls it.
        modes: Modes of launching calls; the targets are about the first.
        implementations: Implementations that can be measured.
        left_out: Implementations that cannot run here, and why.
    """

    name: str
    modes: tuple[str, ...]
    implementations: list[Implementation]
    left_out: dict[str, str]

    def machine(self) -> dict[str, Any]:
        """Facts about the machine that belong to the results."""

    def measure_ceilings(self, samples: int) -> dict[str, Any]:
        """Speeds of plain copies in this process; ``copy_gbps`` (bytes read and written) is always there."""

    def load(self, problem: Problem) -> Any:
        """The inputs of a problem in the device's memory."""

    def capture(self, body: Body, mode: str) -> Captured:
        """Bring a body into the form that is timed."""

    def check(self, operation: Operation, inputs: Any, captured: Captured, body: Body) -> str | None:
        """Overwrite the outputs, launch, and compare with the oracle; the difference, or None."""

    def sample(self, captured: Captured, count: int, cold: bool) -> list[float]:
        """Microseconds of ``count`` launches."""

    def probe(self, operation: Operation, problem: Problem, samples: int) -> tuple[str, float] | None:
        """Name and median microseconds of the device's own kernel that moves the same bytes without any map."""

    def published(self, empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
        """Peers known from elsewhere only: name, microseconds at this copy speed, and source."""

    def release(self) -> None:
        """Give back the memory of the last problem."""
