# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Time of whole layers on many GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.layer.shapes import Shape

from .exchanges import Exchanges
from .machines import Machine, microseconds
from .traffic import Traffic, steps

__all__ = ["CHUNKS", "Pass", "Prediction", "best_overlap", "gradient_us", "overlapped", "pipeline", "predict"]

CHUNKS = (1, 2, 4, 8)
# The share of a GPU that exchanges leave to GEMMs while both run: DeepEP's V1 takes 24 of 132 multiprocessors.
_LEFT_TO_PRODUCTS = 108 / 132


class Pass(NamedTuple):
    """One pass of a layer, microseconds of the slowest rank.

    Attributes:
        dispatch_us: the first exchange.
        products_us: the experts.
        combine_us: the second exchange.
        flops: mean of the ranks.
    """

    dispatch_us: float
    products_us: float
    combine_us: float
    flops: float

    @property
    def us(self) -> float:
        return self.dispatch_us + self.products_us + self.combine_us


class Prediction(NamedTuple):
    """A layer on one group of ranks.

    Attributes:
        forward: one pass.
        backward: the other one.
        sent_bytes: that the busiest rank sends or receives in both passes.
        far_bytes: those of them that cross the network.
        imbalance: rows of the rank that has most, over the mean.
    """

    forward: Pass
    backward: Pass
    sent_bytes: float
    far_bytes: float
    imbalance: float

    @property
    def us(self) -> float:
        return self.forward.us + self.backward.us

    @property
    def tflops(self) -> float:
        """TFLOP/s of each GPU, over both passes."""
        return (self.forward.flops + self.backward.flops) / self.us / 1e6


def predict(
    machine: Machine,
    shape: Shape,
    traffic: Traffic,
    *,
    transport: str,
    combine: str = "reduced",
    payload: str = "bf16",
    capacity: int | None = None,
) -> Prediction:
    """Predict a layer whose exchanges do not overlap with its GEMMs, as the package runs it.

    Args:
        machine: numbers of GPUs and links.
        shape: d, n, E and K; T is that of the traffic.
        traffic: counts between ranks.
        transport: as in `Exchanges`; so is ``capacity``.
        combine: as in `steps`; so is ``payload``.
        capacity: tokens that a rank may send to each.
    """
    ranks = traffic.layout.ranks
    exchanges = Exchanges(machine, traffic, shape.hidden, combine=combine, transport=transport, capacity=capacity)
    all_steps = steps(traffic, shape.hidden, combine=combine, payload=payload, dedup=transport != "rows")
    rows = float(traffic.rows_received.max())
    passes = []
    for backward in (False, True):
        dispatch, combining = (
            exchanges.us(step) if ranks > 1 else 0.0 for step in all_steps if step.backward == backward
        )
        products = machine.products(backward).us(rows, shape.hidden, shape.inner, shape.experts // ranks, backward)
        flops = (12 if backward else 6) * traffic.rows_received.mean() * shape.hidden * shape.inner
        passes.append(Pass(dispatch, products, combining, float(flops)))
    sent, far = sum(step.busiest() for step in all_steps), sum(step.busiest(~exchanges.near) for step in all_steps)
    if transport == "by_domain":
        # Tokens cross once for each domain; the busiest rank is the one that sends most.
        of_rank = traffic.of_domains.copy().astype(float)
        of_rank[np.arange(ranks), np.arange(ranks) // traffic.layout.domain] = 0
        far = float(of_rank.sum(1).max()) * sum(step.line_bytes for step in all_steps)
    return Prediction(passes[0], passes[1], sent, far, traffic.imbalance)


def overlapped(
    machine: Machine, shape: Shape, traffic: Traffic, chunks: int, *, transport: str, payload: str = "bf16"
) -> Prediction:
    """Predict a layer that runs its tokens in chunks, so that a chunk's exchange overlaps another's GEMMs.

    The package does not do that yet. Every chunk pays for launches, routing and tiles that are not full. While both
    run, GEMMs have the multiprocessors that exchanges leave.
    """
    whole = predict(machine, shape, traffic, transport=transport, payload=payload)
    if chunks == 1:
        return whole
    part_traffic = traffic.scaled(max(round(traffic.tokens_per_rank / chunks), 1))
    part = predict(machine, shape, part_traffic, transport=transport, payload=payload)

    def piped(one: Pass, all_of_it: Pass) -> Pass:
        us = pipeline(one.dispatch_us, one.products_us / _LEFT_TO_PRODUCTS, one.combine_us, chunks)
        # The exposed time counts as exchanges, half before and half after.
        seen = max(us - all_of_it.products_us, 0.0)
        return Pass(seen / 2, us - seen, seen / 2, all_of_it.flops)

    passes = piped(part.forward, whole.forward), piped(part.backward, whole.backward)
    return whole._replace(forward=passes[0], backward=passes[1])


def pipeline(dispatch: float, products: float, combine: float, chunks: int) -> float:
    """End of the last chunk's combine, if exchanges run in sequence and so do GEMMs.

    A chunk's dispatch goes before the combine of the chunk before it.
    """
    link = arrived = dispatch
    multiplied = 0.0
    for chunk in range(chunks):
        multiplied = max(multiplied, arrived) + products
        if chunk + 1 < chunks:
            link = arrived = link + dispatch
        link = max(link, multiplied) + combine
    return link


def best_overlap(make: Callable[[int], Prediction], chunks: Sequence[int] = CHUNKS) -> tuple[int, Prediction]:
    """Return the fastest number of chunks and its prediction."""
    made = {each: make(each) for each in chunks}
    best = min(made, key=lambda each: made[each].us)
    return best, made[best]


def gradient_us(machine: Machine, shape: Shape, ranks: int, gpus: int) -> float:
    """Predict the all-reduce over the network of the bfloat16 gradients of a rank's experts, if groups repeat.

    Args:
        machine: its network counts.
        shape: sizes of the layer.
        ranks: P of one group.
        gpus: all of them, a multiple of P.
    """
    replicas = gpus // ranks
    if replicas == 1:
        return 0.0
    size = 2 * 3 * shape.hidden * shape.inner * shape.experts / ranks
    return microseconds(2 * (replicas - 1) / replicas * size, machine.network.gbps)
