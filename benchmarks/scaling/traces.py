# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routing traces: the experts of each token, recorded or drawn."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Trace", "drawn", "load", "uniform_ids", "write"]

_SEED = 20261124


class Trace(NamedTuple):
    """Experts of tokens.

    Attributes:
        name: origin.
        experts: E.
        ids: int32 [sources, T, K]: the experts of the tokens of each source rank, -1 for none.
    """

    name: str
    experts: int
    ids: np.ndarray

    @property
    def topk(self) -> int:
        return int(self.ids.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens of one source."""
        return int(self.ids.shape[1])

    def split(self, sources: int) -> Trace:
        """Divide the tokens among ``sources`` ranks in their order, without the remainder."""
        flat = self.ids.reshape(-1, self.topk)
        tokens = len(flat) // sources
        if tokens == 0:
            raise ValueError(f"Trace.split: sources must be at most {len(flat)}, the tokens, but got {sources}")
        return self._replace(ids=flat[: sources * tokens].reshape(sources, tokens, self.topk))


def uniform_ids(seed: int, tokens: int, experts: int, topk: int) -> np.ndarray:
    """Return experts drawn evenly, int32 [T, K]: with the rank as the seed those of `benchmarks.expert_parallel`."""
    scores = np.random.default_rng(seed).random((tokens, experts), np.float32)
    return np.argpartition(scores, topk, 1)[:, :topk].astype(np.int32)


def drawn(kind: str, experts: int, topk: int, sources: int, tokens: int) -> Trace:
    """Draw the experts of each token, without repeats.

    Args:
        kind: "uniform": evenly; "zipf": with weights 1, 1/2, 1/3, ... in random order, so that the experts with most
            tokens lie on different ranks.
        experts: E, more than K.
        topk: K.
        sources: ranks that have tokens.
        tokens: T of each rank.
    """
    if kind == "uniform":
        ids = np.stack([uniform_ids(source, tokens, experts, topk) for source in range(sources)])
        return Trace(kind, experts, ids)
    rng = np.random.default_rng(_SEED)
    weights = 1 / (1 + rng.permutation(experts))
    made = []
    for _ in range(sources):
        # The first K of a race whose waiting times are exponential: a draw without repeats, by weight.
        times = rng.standard_exponential((tokens, experts), np.float32) / weights.astype(np.float32)
        made.append(np.argpartition(times, topk - 1, 1)[:, :topk].astype(np.int32))
    return Trace(kind, experts, np.stack(made))


def write(path: Path, machine: dict[str, Any], traces: Sequence[Trace]) -> None:
    """Write recorded traces as JSON lines; the experts of a token are sorted, since their order makes no difference."""
    lines: list[dict[str, Any]] = [{"machine": True, **machine}]
    for trace in traces:
        sorted_ids = np.sort(trace.ids, axis=2).astype("<i2")
        packed = base64.b64encode(zlib.compress(sorted_ids.tobytes(), 9)).decode("ascii")
        lines.append({"name": trace.name, "experts": trace.experts, "shape": list(trace.ids.shape), "ids": packed})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def load(path: Path) -> list[Trace]:
    """Read a file of `write`.

    Raises:
        ValueError: an expert that is none of the trace's.
    """
    traces = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("machine"):
            continue
        ids = np.frombuffer(zlib.decompress(base64.b64decode(record["ids"])), "<i2").astype(np.int32)
        trace = Trace(record["name"], record["experts"], ids.reshape(record["shape"]))
        if ids.size and not -1 <= ids.min() <= ids.max() < trace.experts:
            raise ValueError(f"{path}: experts of {trace.name} must be -1 to {trace.experts - 1}, but got {ids.max()}")
        traces.append(trace)
    return traces
