# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fits the numbers of a machine to results by least squares; none is written by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.results import Row, load_run
from benchmarks.layer.shapes import SHAPES, Shape

from .exchanges import Exchanges
from .fitting import fitted
from .machines import Local, Machine, Nccl, Peer, Products
from .measured import Measured, load_exchanges, load_lines
from .traces import Trace, uniform_ids
from .traffic import Layout, Step, Traffic, count, steps

__all__ = [
    "COLLECTIVE_WHATS",
    "PEER_WHATS",
    "Exchange",
    "calibrated",
    "collective_us",
    "corrected",
    "exchanges_of",
    "local_of",
    "peer_us",
    "products_of",
]

PEER_WHATS = ("dispatch", "dispatch_without_copy", "combine")  # measurements of ranks that write to each other's memory
COLLECTIVE_WHATS = ("alltoall_single", "rows_alltoall")
_LAYER = {"impl": "ours", "mode": "graph", "routing": "even"}  # with the buffer that layers between GPUs have
_MOVING = ("permute:bf16", "unpermute:plain", "sort_chunks:forward", "sort_chunks:backward")
_ROUTING = "route:maps"
_OURS = "core"


def local_of(rows: Sequence[Row]) -> Local:
    """Fit row movement and routing to measurements of the operators."""
    ours = [row for row in rows if row.impl == _OURS and row.plain and row.us and row.min_bytes]
    moving = [row for row in ours if row.key in _MOVING]
    launch_us, us_per_byte = fitted([[1, float(row.min_bytes or 0)] for row in moving], [row.us or 0 for row in moving])
    routing = [row for row in ours if row.key == _ROUTING]
    slots = [[1, float(row.tokens * row.topk)] for row in routing]
    _, slot_us = fitted(slots, [row.us or 0 for row in routing])
    return Local(float(launch_us), float(1 / us_per_byte / 1e3), float(slot_us))


def products_of(lines: Sequence[dict[str, Any]], backward: bool) -> Products:
    """Fit one pass to measurements of whole layers on one GPU."""
    which = "backward" if backward else "forward"
    kept = [line for line in lines if all(line.get(key) == value for key, value in _LAYER.items())]
    work, us = [], []
    for line in kept:
        shape = SHAPES[line["shape"]]
        rows = shape.tokens * shape.topk
        work.append(Products.work(rows, shape.hidden, shape.inner, shape.experts, backward))
        us.append(line[f"{which}_us"])
    return Products(tuple(float(each) for each in fitted(work, us)))


class Exchange:
    """A measurement of an exchange, with the model's inputs to predict it.

    Attributes:
        line: the measurement.
        shape: sizes of the layer.
        traffic: counts of its routing, drawn as the benchmark draws it.
        steps: exchanges of a layer with combine="reduced".
        by_hand: exchanges of a layer that sends a row for each slot.
    """

    def __init__(self, line: Measured, traffic: Traffic) -> None:
        self.line, self.traffic = line, traffic
        self.shape = Shape(line.tokens, line.hidden, line.inner, line.experts, line.topk)
        self.steps = steps(traffic, line.hidden, combine="reduced")
        self.by_hand = steps(traffic, line.hidden, combine="reduced", dedup=False)

    def on(self, machine: Machine, transport: str = "peer") -> Exchanges:
        """Return the exchanges with room for all tokens, as in the benchmark."""
        given: dict[str, Any] = {"combine": "reduced", "capacity": self.line.tokens}
        return Exchanges(machine, self.traffic, self.line.hidden, transport=transport, **given)


def exchanges_of(lines: Sequence[Measured]) -> list[Exchange]:
    """Give each measurement its traffic."""
    return [Exchange(line, uniform_traffic(line.tokens, line.experts, line.topk, line.ranks)) for line in lines]


@functools.cache
def uniform_traffic(tokens: int, experts: int, topk: int, ranks: int) -> Traffic:
    """Return the traffic of a benchmark in one machine, whose tokens have even experts."""
    ids = np.stack([uniform_ids(rank, tokens, experts, topk) for rank in range(ranks)])
    return count(Trace("uniform", experts, ids), Layout.of(ranks, ranks))


def calibrated(results: Path, exchanges: Path, *, without: str | None = None) -> Machine:
    """Return the machine of a result file of `benchmarks.expert_parallel`.

    Args:
        results: the folder with the measurements on one such GPU.
        exchanges: the file.
        without: a shape whose lines are left out, to predict it from the others.

    Raises:
        ValueError: there are no results of one such GPU.
    """
    about, lines = load_exchanges(exchanges)
    gpu = about["gpus"][0]
    layers = [
        made for path in sorted(results.glob("*-layer.jsonl")) for made in [load_lines(path)] if made[0]["gpu"] == gpu
    ]
    operators = [path for path in sorted(results.glob("*-targets.jsonl")) if load_lines(path)[0].get("gpu") == gpu]
    if not layers or not operators:
        raise ValueError(f"calibrated: {results} must have *-layer.jsonl and *-targets.jsonl of {gpu}, but has not")
    machine = Machine(
        name=gpu,
        local=local_of(load_run(operators[-1]).rows),
        forward=products_of(layers[-1][1], backward=False),
        backward=products_of(layers[-1][1], backward=True),
        peer=Peer(1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0),
        nccl=Nccl(1.0, 0.0),
    )
    return with_exchanges(machine, exchanges_of([line for line in lines if line.shape != without]))


def corrected(machine: Machine, exchanges: Path) -> Machine:
    """Return the machine with the speeds at which ranks send to several others.

    Args:
        machine: calibrated with two ranks.
        exchanges: a file of more ranks.

    Raises:
        ValueError: the file has no exchanges between more than two ranks.
    """
    found = [each for each in exchanges_of(load_exchanges(exchanges)[1]) if each.line.ranks > 2]
    if not {each.line.what for each in found} >= {*PEER_WHATS, *COLLECTIVE_WHATS}:
        raise ValueError(f"corrected: {exchanges} must have all exchanges between more than two ranks, but has not")
    peer, nccl = replace(machine.peer, several=1.0), replace(machine.nccl, several=1.0)
    machine = replace(machine, peer=peer, nccl=nccl)

    def several(whats: Sequence[str], links: Peer | Nccl, predict: Callable[[Machine, Exchange], float]) -> float:
        lines = [each for each in found if each.line.what in whats]
        link_us = [links.link_us(_step_of(each).busiest(), each.line.ranks) for each in lines]
        known = [predict(machine, each) - us for each, us in zip(lines, link_us, strict=True)]
        return 1 / float(fitted([[us] for us in link_us], _us(lines), known)[0])

    peer = replace(peer, several=several(PEER_WHATS, peer, peer_us))
    return replace(machine, peer=peer, nccl=replace(nccl, several=several(COLLECTIVE_WHATS, nccl, collective_us)))


def _step_of(each: Exchange) -> Step:
    """Return the step of a measured exchange."""
    if each.line.what == "rows_alltoall":
        return each.by_hand[0]
    step = each.steps[each.line.what == "combine"]
    # the benchmark sends the tokens alone
    return step._replace(line_bytes=step.row_bytes) if each.line.what == "alltoall_single" else step


def peer_us(machine: Machine, each: Exchange) -> float:
    """Predict a dispatch or a combine through memory of peers, in microseconds."""
    step, peer = _step_of(each), each.on(machine)
    return peer.us(step) - (peer.keep_us(step) if each.line.what == "dispatch_without_copy" else 0)


def collective_us(machine: Machine, each: Exchange) -> float:
    """Predict an all-to-all, alone or by hand, in microseconds."""
    if each.line.what == "rows_alltoall":
        return each.on(machine, "rows").rows_us(_step_of(each))
    return each.on(machine, "alltoall").all_to_all_us(_step_of(each))


def with_exchanges(machine: Machine, found: Sequence[Exchange]) -> Machine:
    """Return the machine with numbers fitted to exchanges between GPUs."""
    by_what: dict[str, list[Exchange]] = {}
    for each in found:
        by_what.setdefault(each.line.what, []).append(each)
    machine = replace(machine, peer=_peer(machine, by_what), nccl=_nccl(machine, by_what))
    return replace(machine, forward=_layer(machine, by_what, "forward"), backward=_layer(machine, by_what, "backward"))


def _us(found: Sequence[Exchange]) -> list[float]:
    return [each.line.us for each in found]


def _gbps(us_per_byte: float) -> float:
    return float("inf") if us_per_byte == 0 else float(1 / us_per_byte / 1e3)


def _peer(machine: Machine, found: dict[str, list[Exchange]]) -> Peer:
    copies = found["p2p_copy"]
    copy_us, per_byte = fitted([[1, each.line.bytes] for each in copies], _us(copies))
    features, known, us = [], [], []
    for what in PEER_WHATS:
        for each in found[what]:
            dispatch, combine = each.steps[:2]
            exchanges = each.on(machine)
            if what == "combine":
                summed = (combine.lines.sum(0).max() + each.line.tokens) * combine.row_bytes
                features.append([0, 1, combine.busiest(), summed, 0])
                known.append(0.0)
            else:
                slots = (each.line.tokens + exchanges.buffer_rows) * each.line.topk
                kept = exchanges.kept_bytes(dispatch) if what == "dispatch" else 0
                features.append([1, 0, dispatch.busiest(), 0, kept])
                known.append(machine.local.slot_us * slots)
            us.append(each.line.us)
    dispatch_us, combine_us, *per_bytes = fitted(features, us, known)
    moved, summed, kept = map(_gbps, per_bytes)
    return Peer(_gbps(per_byte), float(copy_us), moved, float(dispatch_us), float(combine_us), summed, kept)


def _nccl(machine: Machine, found: dict[str, list[Exchange]]) -> Nccl:
    features, known, us = [], [], []
    free = replace(machine, nccl=Nccl(float("inf"), 0.0))
    for each in [one for what in COLLECTIVE_WHATS for one in found[what]]:
        known.append(collective_us(free, each))
        features.append([1, _step_of(each).busiest()])
        us.append(each.line.us)
    call_us, per_byte = fitted(features, us, known)
    return Nccl(_gbps(per_byte), float(call_us))


def _layer(machine: Machine, found: dict[str, list[Exchange]], which: str) -> Products:
    """Fit slowdown and fixed time of a pass between GPUs."""
    backward = which == "backward"
    products = machine.products(backward)
    features, known, us = [], [], []
    for each in found.get(f"layer_{which}", []):
        exchanges = each.on(machine)
        known.append(sum(exchanges.us(step) for step in each.steps if step.backward == backward))
        rows, shape = float(each.traffic.rows_received.max()), each.shape
        features.append([products.us(rows, shape.hidden, shape.inner, shape.experts // each.line.ranks, backward), 1])
        us.append(each.line.us)
    if not features:
        return products
    slowdown, fixed_us = fitted(features, us, known)
    return replace(products, slowdown=float(slowdown), fixed_us=float(fixed_us))
