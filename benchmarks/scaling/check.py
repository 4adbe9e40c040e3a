# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Compares predictions with measurements between GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .calibration import COLLECTIVE_WHATS, PEER_WHATS, Exchange, calibrated, collective_us, exchanges_of, peer_us
from .layers import predict
from .machines import Machine, microseconds
from .measured import load_exchanges

__all__ = ["MOST_ERROR", "Comparison", "compare", "compared", "foretold", "predicted_us"]

MOST_ERROR = 0.10


class Comparison(NamedTuple):
    """One line.

    Attributes:
        shape: name of the layer.
        what: the measured quantity.
        measured_us: in microseconds.
        predicted_us: by a machine that all lines calibrate.
        held_out_us: by one that this shape's lines did not calibrate; None if no other shape did.
        bytes_match: True if the bytes that cross are exactly those of a rank in the model.
    """

    shape: str
    what: str
    measured_us: float
    predicted_us: float
    held_out_us: float | None
    bytes_match: bool

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    @property
    def held_out_error(self) -> float | None:
        return None if self.held_out_us is None else self.held_out_us / self.measured_us - 1

    @property
    def passed(self) -> bool:
        return abs(self.error) <= MOST_ERROR and self.bytes_match


def predicted_us(machine: Machine, each: Exchange) -> float:
    """Predict a line, in microseconds."""
    line = each.line
    if line.what == "p2p_copy":
        return machine.peer.copy_us + microseconds(line.bytes, machine.peer.copy_gbps)
    if line.what in COLLECTIVE_WHATS:
        return collective_us(machine, each)
    if line.what in PEER_WHATS:
        return peer_us(machine, each)
    layer = predict(machine, each.shape, each.traffic, transport="peer", capacity=line.tokens)
    return {"layer_forward": layer.forward.us, "layer_backward": layer.backward.us, "layer": layer.us}[line.what]


def _bytes_match(each: Exchange) -> bool:
    """Return True if a rank sends as many bytes of rows. The line is the slowest rank's, which it does not name."""
    step = (each.by_hand if each.line.what == "rows_alltoall" else each.steps)[0]
    times = {"layer_forward": 2, "layer_backward": 2, "layer": 4}.get(each.line.what, 1)
    return each.line.bytes in set(times * step._replace(line_bytes=step.row_bytes).bytes_sent())


def compare(machine: Machine, each: Exchange, held_out: Machine | None) -> Comparison:
    """One line."""
    line = each.line
    other = None if held_out is None else predicted_us(held_out, each)
    return Comparison(line.shape, line.what, line.us, predicted_us(machine, each), other, _bytes_match(each))


def foretold(machine: Machine, exchanges: Path) -> list[Comparison]:
    """All lines of a file, predicted by a machine that other measurements calibrate."""
    return [compare(machine, each, None) for each in exchanges_of(load_exchanges(exchanges)[1])]


def compared(results: Path, exchanges: Path) -> tuple[Machine, list[Comparison]]:
    """All lines of a file, predicted by the machine that it calibrates."""
    _, lines = load_exchanges(exchanges)
    machine = calibrated(results, exchanges)
    shapes = list(dict.fromkeys(line.shape for line in lines))
    others = {shape: calibrated(results, exchanges, without=shape) if len(shapes) > 1 else None for shape in shapes}
    return machine, [compare(machine, each, others[each.line.shape]) for each in exchanges_of(lines)]
