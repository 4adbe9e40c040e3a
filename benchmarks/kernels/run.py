# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The measurement: for every case and operation, check each implementation, then time them in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .device import Body, Captured, Device, Implementation, Unsupported
from .operators import minimum_bytes, variant_of
from .problem import Problem, make_problem
from .results import Row
from .shapes import Case, Operation
from .timing import stats_of

__all__ = ["Runner", "Settings", "empty_row"]


@dataclass(frozen=True)
class Settings:
    """The extent of a measurement.

    Attributes:
        modes: Out of the device's modes.
        colds: True: operands out of the caches; both values may be given.
        samples: Samples of each row, taken in ``rounds`` rounds that alternate with the other implementations.
        rounds: Number of rounds.
        probes: True to measure the device's ceiling kernels for each operation.
        published: True to add rows of peers with published figures only.
    """

    modes: Sequence[str]
    colds: Sequence[bool] = (True,)
    samples: int = 60
    rounds: int = 5
    probes: bool = True
    published: bool = True


@dataclass
class _Candidate:
    """An implementation that passed its check, and the samples taken of it so far."""

    row: Row
    captured: Captured
    body: Body  # owns the operands: a captured graph has only their addresses
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Runner:
    """Measures implementations on a device whose copies run at ``copy_gbps``.

    An implementation whose result differs from the oracle's is not timed: its row describes the difference.
    """

    device: Device
    implementations: Sequence[Implementation]
    settings: Settings
    copy_gbps: float

    def measure(
        self, cases: Sequence[Case], operations: Sequence[Operation], report: Callable[[Row], None]
    ) -> list[Row]:
        """Measure everything; ``report`` gets every row as soon as it is complete."""
        rows = []
        for case in cases:
            problem = make_problem(case)
            inputs = self.device.load(problem)
            for operation in operations:
                for row in self._measure_operation(problem, inputs, operation):
                    rows.append(row)
                    report(row)
                self.device.release()
            del inputs
            self.device.release()
        return rows

    def _measure_operation(self, problem: Problem, inputs: Any, operation: Operation) -> Iterator[Row]:
        settings, empty = self.settings, empty_row(operation, problem)
        probe = self.device.probe(operation, problem, settings.samples) if settings.probes else None
        candidates: list[_Candidate] = []
        for implementation in self.implementations:
            if not implementation.offers(operation):
                continue
            row = replace(empty, impl=implementation.name)
            try:
                body = implementation.prepare(operation, inputs)
            except Unsupported as reason:
                yield replace(row, mode=settings.modes[0], check=f"skipped: {reason}")
                continue
            for mode in settings.modes:
                captured, failure = self._checked(operation, inputs, body, mode)
                checked = replace(row, mode=mode, note=body.note, check=failure or body.exactness)
                if captured is None:
                    yield checked
                    continue
                checked = replace(checked, launches=captured.launches)
                candidates += [_Candidate(replace(checked, cold=cold), captured, body) for cold in settings.colds]
        # Interleaved, so that a drifting clock affects all of them.
        for _ in range(settings.rounds):
            for candidate in candidates:
                count = -(-settings.samples // settings.rounds)
                candidate.samples += self.device.sample(candidate.captured, count, candidate.row.cold)
        for candidate in candidates:
            stats = stats_of(candidate.samples)
            row = replace(candidate.row, p5=stats.p5, p95=stats.p95, samples=stats.samples)
            row = replace(row, min_us=stats.least, max_us=stats.most)
            yield self._timed(row, stats.median, probe)
        for impl, median, source in self._published(empty):
            row = replace(empty, impl=impl, mode=self.device.modes[0], check="published", note=source)
            yield self._timed(row, median, probe)

    def _checked(self, operation: Operation, inputs: Any, body: Body, mode: str) -> tuple[Captured | None, str]:
        """The body ready to be timed, or None and why it must not be."""
        try:
            captured = self.device.capture(body, mode)
            difference = self.device.check(operation, inputs, captured, body)
        except RuntimeError as error:
            return None, f"failed: {error}"
        return (captured, "") if difference is None else (None, f"failed: {difference}")

    def _timed(self, row: Row, median: float, probe: tuple[str, float] | None) -> Row:
        gbps = (row.min_bytes or 0) / median / 1e3
        row = replace(row, us=median, gbps=gbps, frac_copy=gbps / self.copy_gbps)
        if probe is None:
            return row
        name, probe_us = probe
        return replace(row, probe=name, probe_us=probe_us, frac_probe=probe_us / median)

    def _published(self, empty: Row) -> list[tuple[str, float, str]]:
        if not (self.settings.published and empty.own_case):
            return []
        return self.device.published(empty, self.copy_gbps)


def empty_row(operation: Operation, problem: Problem) -> Row:
    """A row of the measured case, without implementation, mode and times."""
    case = problem.case
    return Row(
        op=operation.op,
        variant=operation.variant,
        impl="",
        shape=case.shape.name,
        tokens=case.shape.num_tokens,
        topk=case.shape.topk,
        experts=case.shape.num_experts,
        hidden=case.shape.hidden,
        routing=case.routing,
        alignment=case.alignment,
        fill=case.fill,
        capacity=case.capacity,
        own_case=case == Case(case.shape, case.shape.routing),
        routed_rows=problem.routed_rows,
        buffer_rows=problem.plan.num_rows,
        dtype=variant_of(operation).dtype,
        mode="",
        cold=True,
        check="",
        min_bytes=minimum_bytes(operation, problem).total,
    )
