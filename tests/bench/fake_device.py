# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A device whose clock is a list and whose implementations are right or wrong as a test likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels.device import Body, Captured, Device, Implementation, Outputs
from benchmarks.kernels.problem import Problem
from benchmarks.kernels.published import published_rows
from benchmarks.kernels.results import Row
from benchmarks.kernels.shapes import Operation
from paddle_moe_ops import reference

COPY_GBPS = 1000.0


class FakeDevice:
    """Sums rows by the oracle; a launch of an implementation takes the microseconds in ``medians``."""

    name = "cuda"
    modes: tuple[str, ...] = ("graph", "eager")

    def __init__(self, implementations: list[Implementation], medians: dict[str, float] | None = None) -> None:
        self.implementations = implementations
        self.medians = medians or {}
        self.left_out = {"some library": "it is not installed"}
        self.sampled: list[tuple[str, bool, int]] = []

    def machine(self) -> dict[str, Any]:
        return {"gpu": "Imagined GPU", "sm_clock": "1 MHz"}

    def measure_ceilings(self, samples: int) -> dict[str, Any]:
        return {"copy_gbps": COPY_GBPS, "write_gbps": 1100.0, "floor_one_launch_us": 3.5}

    def load(self, problem: Problem) -> Problem:
        return problem

    def capture(self, body: Body, mode: str) -> Captured:
        outputs = body.run()
        return Captured(lambda: None, lambda: outputs, 2)

    def check(self, operation: Operation, inputs: Problem, captured: Captured, body: Body) -> str | None:
        right = np.array_equal(captured.outputs()["out"], sums(inputs))
        return None if right else "out: something else"

    def sample(self, captured: Captured, count: int, cold: bool) -> list[float]:
        name = str(captured.outputs()["name"])
        self.sampled.append((name, cold, count))
        return [self.medians.get(name, 10.0)] * count

    def probe(self, operation: Operation, problem: Problem, samples: int) -> tuple[str, float] | None:
        return "reduce", 8.0

    def published(self, empty: Row, copy_gbps: float) -> list[tuple[str, float, str]]:
        return published_rows(empty, copy_gbps)

    def release(self) -> None:
        pass


class CheckingDevice(FakeDevice):
    """Loads, launches and checks as another device does; only its clock is not one."""

    def __init__(self, device: Device, implementations: list[Implementation]) -> None:
        super().__init__(implementations)
        self.load, self.capture, self.check = device.load, device.capture, device.check

    def sample(self, captured: Captured, count: int, cold: bool) -> list[float]:
        self.sampled.append((str(captured.outputs()), cold, count))
        return [10.0] * count


Spoil = Callable[[Any], None]


def spoilt(implementation: Implementation, name: str, output: str, spoil: Spoil) -> Implementation:
    """The implementation under another name, with one of its outputs changed after each call."""

    def prepare(operation: Operation, inputs: Any) -> Body:
        body = implementation.prepare(operation, inputs)

        def results(outputs: Outputs) -> Outputs:
            named = {key: np.array(value) for key, value in body.results(outputs).items()}
            spoil(named[output])
            return named

        return body._replace(results=results)

    return Implementation(name, implementation.operations, prepare)


def places(shape: tuple[int, ...], plan: reference.Plan) -> dict[str, tuple[int, ...]]:
    """Elements of an output: both ends, the middle, and one in a row without a token and in a token without rows."""
    size = int(np.prod(shape))
    found = {"first": 0, "last": size - 1, "middle": size // 2}
    padding = np.flatnonzero(plan.row_to_token < 0)
    empty = np.flatnonzero((plan.slot_to_row < 0).all(axis=1))
    for name, lines, count in (("padding", padding, plan.num_rows), ("empty", empty, plan.num_tokens)):
        if len(lines) and shape[:1] == (count,):
            found[name] = int(lines[0]) * (size // count)
    return {name: tuple(map(int, np.unravel_index(place, shape))) for name, place in found.items()}


def sums(problem: Problem) -> NDArray:
    """The plain sums of rows that all hold their own numbers."""
    rows = np.arange(problem.plan.num_rows, dtype=np.float32)[:, None]
    return reference.unpermute(rows, problem.plan)


def implementation(name: str, error: float = 0.0, operations: tuple[str, ...] = ("unpermute:*",)) -> Implementation:
    """Sums rows, and adds ``error`` to every sum."""

    def prepare(operation: Operation, inputs: Problem) -> Body:
        return Body(lambda: {"out": sums(inputs) + np.float32(error), "name": name})

    return Implementation(name, operations, prepare)
