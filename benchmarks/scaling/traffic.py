# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Traffic between ranks: exact counts of a trace, and the bytes of a layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .traces import Trace

__all__ = ["Layout", "Step", "Traffic", "count", "steps"]

_ID_BYTES = _PROB_BYTES = 4
_COLUMNS_OF_SCALE = 128


class Layout(NamedTuple):
    """Ranks of a group and their domains.

    Attributes:
        ranks: P.
        domain: ranks of the group in one NVLink domain; rank r is in domain r // domain.
    """

    ranks: int
    domain: int

    @classmethod
    def of(cls, ranks: int, domain: int) -> Layout:
        """Ranks in domains of a size. As many go into each, so of 72 GPUs a group of 128 takes 64."""
        fits = max(size for size in range(1, min(ranks, domain) + 1) if ranks % size == 0)
        return cls(ranks, fits)

    @property
    def domains(self) -> int:
        return self.ranks // self.domain

    def near(self) -> np.ndarray:
        """bool [P, P]: pairs of ranks in one domain."""
        of_ranks = np.arange(self.ranks) // self.domain
        return of_ranks[:, None] == of_ranks


class Traffic(NamedTuple):
    """Counts by rank that has the tokens and rank, or domain, that has the experts.

    Attributes:
        layout: the ranks.
        tokens_per_rank: T.
        topk: K.
        rows: [P, P], slots: a token counts for each of its experts there.
        tokens: [P, P], tokens that have an expert there.
        of_domains: [P, domains], tokens that have an expert in that domain.
    """

    layout: Layout
    tokens_per_rank: float
    topk: int
    rows: np.ndarray
    tokens: np.ndarray
    of_domains: np.ndarray

    def scaled(self, tokens: int) -> Traffic:
        """Return the same mix with ``tokens`` tokens a rank; counts may be fractions."""
        factor = tokens / self.tokens_per_rank
        scaled = {name: getattr(self, name) * factor for name in ("rows", "tokens", "of_domains")}
        return self._replace(tokens_per_rank=tokens, **scaled)

    @property
    def rows_received(self) -> np.ndarray:
        """Rows of each rank's experts."""
        return self.rows.sum(0)

    @property
    def imbalance(self) -> float:
        """Rows of the rank that has most, over the mean."""
        return float(self.rows_received.max() / self.rows_received.mean())


def count(trace: Trace, layout: Layout) -> Traffic:
    """Count a trace's tokens between ranks. With fewer sources than ranks the sources repeat.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    ranks, experts = layout.ranks, trace.experts
    if experts % ranks:
        raise ValueError(f"count: layout.ranks must divide {experts} experts, but got {ranks}")
    rows, tokens, of_domains = [], [], []
    for ids in trace.ids[:ranks]:
        rank = np.where(ids >= 0, ids // (experts // ranks), ranks)  # one column more takes slots without an expert
        goes = np.zeros((len(ids), ranks + 1), bool)
        np.put_along_axis(goes, rank, True, 1)
        goes = goes[:, :ranks]
        rows.append(np.bincount(rank.reshape(-1), minlength=ranks + 1)[:ranks])
        tokens.append(goes.sum(0))
        of_domains.append(goes.reshape(len(ids), layout.domains, layout.domain).any(2).sum(0))
    source = np.arange(ranks) % len(rows)
    return Traffic(
        layout=layout,
        tokens_per_rank=trace.tokens,
        topk=trace.topk,
        rows=np.stack(rows)[source],
        tokens=np.stack(tokens)[source],
        of_domains=np.stack(of_domains)[source],
    )


class Step(NamedTuple):
    """One exchange of a layer.

    Attributes:
        name: "dispatch" or "combine", which also stand for the exchanges of gradients that go the same way.
        backward: True in the backward pass.
        lines: [P, P], from the first index to the second one.
        line_bytes: size of a line.
        row_bytes: size of its token or row.
        from_owner: True if the first index is the rank that has the tokens.
        by_row: True if a line is a row, False if it is a token.
    """

    name: str
    backward: bool
    lines: np.ndarray
    line_bytes: float
    row_bytes: float
    from_owner: bool
    by_row: bool

    def bytes_sent(self, only: np.ndarray | None = None) -> np.ndarray:
        """Bytes [P] that each rank sends to others; ``only`` to those of a mask [P, P]."""
        return self._crossing(only).sum(1) * self.line_bytes

    def bytes_received(self, only: np.ndarray | None = None) -> np.ndarray:
        """Bytes [P] that each rank receives from others."""
        return self._crossing(only).sum(0) * self.line_bytes

    def busiest(self, only: np.ndarray | None = None) -> float:
        """Bytes through the busiest rank, in the busier direction."""
        return float(max(self.bytes_sent(only).max(), self.bytes_received(only).max()))

    def messages(self, only: np.ndarray | None = None) -> int:
        """Largest number of ranks that a rank sends to."""
        return int((self._crossing(only) > 0).sum(1).max())

    def _crossing(self, only: np.ndarray | None) -> np.ndarray:
        lines = np.where(np.eye(len(self.lines), dtype=bool), 0, self.lines)
        return lines if only is None else np.where(only, lines, 0)


def steps(traffic: Traffic, hidden: int, *, combine: str, payload: str = "bf16", dedup: bool = True) -> list[Step]:
    """The exchanges of both passes of a layer, in their order.

    Args:
        traffic: the counts.
        hidden: d.
        combine: "exact": rows come back, and go as rows in the backward pass; "reduced": one sum for each token and
            rank, both ways.
        payload: "bf16", or "fp8" for the dispatch of tokens, with a float32 scale for each 128 columns. All else is
            bfloat16.
        dedup: True to send a token to a rank once. False: a row for each slot all the way, as permute and an
            all-to-all do it.
    """
    wide = 2 * hidden
    first = wide if payload == "bf16" else hidden + 4 * math.ceil(hidden / _COLUMNS_OF_SCALE)
    rows, tokens = traffic.rows, traffic.tokens
    if not dedup:
        there, back = (rows, first, first, True, True), (rows.T, wide, wide, False, True)
        gradient = (rows, wide, wide, True, True)
        return [
            Step("dispatch", False, *there),
            Step("combine", False, *back),
            Step("dispatch", True, *gradient),
            Step("combine", True, *back),
        ]
    ids, probs = _ID_BYTES * traffic.topk, _PROB_BYTES * traffic.topk
    if combine == "exact":
        return [
            Step("dispatch", False, tokens, first + ids, first, True, False),
            Step("combine", False, rows.T, wide, wide, False, True),
            Step("dispatch", True, rows, wide, wide, True, True),
            Step("combine", True, rows.T, wide, wide, False, True),
        ]
    return [
        Step("dispatch", False, tokens, first + ids + probs, first, True, False),
        Step("combine", False, tokens.T, wide, wide, False, False),
        Step("dispatch", True, tokens, wide, wide, True, False),
        Step("combine", True, tokens.T, wide + probs, wide, False, False),
    ]
