# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The measurement itself: for every case and operation, check each implementation, then time them in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .device import Body, Captured, Device, Implementation, Unsupported
from .model import minimum_bytes
from .problem import Problem, make_problem
from .results import Row
from .shapes import Case, Operation
from .timing import stats_of

__all__ = ["Settings", "measure"]


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        modes: Out of the device's modes.
        colds: Whether the operands are out of the caches; both may be asked for.
        samples: Samples of each row, taken in ``rounds`` turns with the other implementations.
        rounds: Turns.
        probes: Whether the device's ceiling kernels are measured for each operation.
    """

    modes: Sequence[str]
    colds: Sequence[bool] = (True,)
    samples: int = 60
    rounds: int = 3
    probes: bool = True


@dataclass
class _Candidate:
    """An implementation that passed its check, and the samples taken of it so far."""

    row: Row
    captured: Captured
    samples: list[float] = field(default_factory=list)


def measure(
    device: Device,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    operations: Sequence[Operation],
    settings: Settings,
    copy_gbps: float,
    report: Callable[[Row], None],
) -> list[Row]:
    """Measure everything; ``report`` gets every row as soon as it is complete.

    An implementation whose result differs from the oracle's is not timed: its row says what differs.
    """
    rows = []
    for case in cases:
        problem = make_problem(case)
        inputs = device.load(problem)
        for operation in operations:
            for row in _measure_operation(device, implementations, problem, inputs, operation, settings, copy_gbps):
                rows.append(row)
                report(row)
            device.release()
        del inputs
        device.release()
    return rows


def _measure_operation(
    device: Device,
    implementations: Sequence[Implementation],
    problem: Problem,
    inputs: Any,
    operation: Operation,
    settings: Settings,
    copy_gbps: float,
) -> list[Row]:
    probe = device.probe(operation, problem, settings.samples) if settings.probes else None
    finished: list[Row] = []
    candidates: list[_Candidate] = []
    for implementation in implementations:
        empty = _empty_row(implementation.name, operation, problem)
        try:
            body = implementation.prepare(operation, inputs)
        except Unsupported as reason:
            finished.append(replace(empty, mode=settings.modes[0], check=f"skipped: {reason}"))
            continue
        for mode in settings.modes:
            row = replace(empty, mode=mode, note=body.note)
            captured, failure = _checked(device, operation, inputs, body, mode)
            if captured is None:
                finished.append(replace(row, check=failure))
                continue
            row = replace(row, check=body.exactness, launches=captured.launches)
            candidates += [_Candidate(replace(row, cold=cold), captured) for cold in settings.colds]
    # In turns, so that a clock that drifts drifts for all of them.
    for _ in range(settings.rounds):
        for candidate in candidates:
            count = -(-settings.samples // settings.rounds)
            candidate.samples += device.sample(candidate.captured, count, candidate.row.cold)
    return [*finished, *(_timed(candidate, probe, copy_gbps) for candidate in candidates)]


def _checked(device: Device, operation: Operation, inputs: Any, body: Body, mode: str) -> tuple[Captured | None, str]:
    """The body ready to be timed, or None and why it must not be."""
    try:
        captured = device.capture(body, mode)
        difference = device.check(operation, inputs, captured, body.exactness)
    except RuntimeError as error:
        return None, f"failed: {error}"
    return (captured, "") if difference is None else (None, f"failed: {difference}")


def _timed(candidate: _Candidate, probe: tuple[str, float] | None, copy_gbps: float) -> Row:
    stats = stats_of(candidate.samples)
    row = candidate.row
    gbps = (row.min_bytes or 0) / stats.median / 1e3
    row = replace(
        row,
        us=stats.median,
        p5=stats.p5,
        p95=stats.p95,
        samples=stats.samples,
        gbps=gbps,
        frac_copy=gbps / copy_gbps,
    )
    if probe is None:
        return row
    name, probe_us = probe
    return replace(row, probe=name, probe_us=probe_us, frac_probe=probe_us / stats.median)


def _empty_row(implementation: str, operation: Operation, problem: Problem) -> Row:
    case = problem.case
    return Row(
        op=operation.op,
        variant=operation.variant,
        impl=implementation,
        shape=case.shape.name,
        tokens=case.shape.num_tokens,
        topk=case.shape.topk,
        experts=case.shape.num_experts,
        hidden=case.shape.hidden,
        routing=case.routing,
        alignment=case.alignment,
        fill=case.fill,
        capacity=case.capacity,
        routed_rows=problem.routed_rows,
        buffer_rows=problem.plan.num_rows,
        dtype=operation.dtype,
        mode="",
        cold=True,
        check="",
        min_bytes=minimum_bytes(operation, problem).total,
    )
