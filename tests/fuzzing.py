# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of fuzz tests: each has a generator of its own, so that one case repeats alone, and sizes around limits."""

from __future__ import annotations

import os
import shlex
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

__all__ = [
    "FEW_EXPERTS",
    "MANY_EXPERTS",
    "MAX_ROWS",
    "ROWS_AT_LIMITS",
    "DrawnLayer",
    "draw_layer",
    "draw_rows",
    "run_cases",
]

# Threads of a warp or a CTA, and entries of tables in shared memory, with both neighbours of each.
MANY_EXPERTS = (255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049)
FEW_EXPERTS = 40
# Rows of an expert: none, a step of K, tiles of 128 and 160 rows, with both neighbours of each, and several tiles.
ROWS_AT_LIMITS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 159, 160, 161, 1025)
MAX_ROWS = 1500  # of a layer, so that the oracle is fast
MAX_ELEMENTS = 1 << 20  # E d n, unless the least d and n exceed it


def run_cases(
    request: pytest.FixtureRequest, check: Callable[[np.random.Generator], None], max_cases: int = 1 << 30
) -> int:
    """Call ``check`` with the generator of each case, at most ``max_cases``; returns the number of cases.

    The generator depends on --fuzz-seed, the test's id and the case's number. If a case fails, the command that repeats
    it is printed and kept in the report of the run.
    """
    seed, first, count = (request.config.getoption(f"--fuzz-{name}") for name in ("seed", "first", "cases"))
    node, count = request.node, min(count, max_cases)
    for number in range(first, first + count):
        try:
            check(np.random.default_rng([seed, zlib.crc32(node.nodeid.encode()), number]))
        except Exception:
            command = _command(request.config, node.nodeid, seed, number)
            node.user_properties.append(("repeat", command))
            print(f"case {number} of seed {seed} failed; repeat it by\n  {command}")
            raise
    node.user_properties.append(("fuzz_cases", count))
    return count


def _command(config: pytest.Config, nodeid: str, seed: int, number: int) -> str:
    library = os.environ.get("PMO_CORE_LIBRARY")
    words = ["env", f"PMO_CORE_LIBRARY={library}"] if library else []
    words += ["python3", "-m", "pytest", nodeid, f"--core-device={config.getoption('--core-device')}"]
    return shlex.join([*words, f"--fuzz-seed={seed}", f"--fuzz-first={number}", "--fuzz-cases=1"])


class DrawnLayer(NamedTuple):
    """T tokens of d columns, K slots, E experts of inner size n, and the experts of each slot, -1 for none."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int
    alignment: int
    buffer: int
    ids: NDArray

    @property
    def unassigned(self) -> float:
        """Share of slots without an expert."""
        return float((self.ids < 0).mean()) if self.ids.size else 0.0


def draw_rows(rng: np.random.Generator, experts: int) -> list[int]:
    """Rows of each expert: up to four have a number around a limit, the others at most two."""
    rows = rng.integers(0, 3, experts) * (rng.random(experts) < rng.choice([0.0, 0.1, 1.0]))
    if experts > FEW_EXPERTS:
        rows[rng.random(experts) < 0.8] = 0
    for expert in rng.choice(experts, min(experts, int(rng.integers(0, 5))), replace=False):
        number = int(rng.choice(ROWS_AT_LIMITS))
        rows[expert] = number if rows.sum() + number <= MAX_ROWS else 1
    return [int(each) for each in rows]


def _skewed_ids(rng: np.random.Generator, tokens: int, experts: int, topk: int) -> NDArray:
    """Different experts of each token, by a Zipf distribution: few experts have most rows."""
    scores = -rng.choice([0.5, 1.0, 2.0]) * np.log1p(rng.permutation(experts)) + rng.gumbel(size=(tokens, experts))
    return np.argsort(-scores, axis=1)[:, :topk]


def draw_layer(
    rng: np.random.Generator,
    hidden: tuple[int, ...],
    inner: tuple[int, ...],
    share_of_many: float = 0.2,
    few_experts: int = FEW_EXPERTS,
    max_tokens: int = MAX_ROWS,
) -> DrawnLayer:
    """A layer whose experts and rows lie around limits.

    Args:
        rng: the generator of the case.
        hidden: d is one of these.
        inner: n is one of these.
        share_of_many: share of layers whose E is one of MANY_EXPERTS.
        few_experts: E of the other layers, at most.
        max_tokens: T at most.
    """
    has_many = rng.random() < share_of_many
    experts = int(rng.choice(MANY_EXPERTS)) if has_many else int(rng.integers(1, few_experts + 1))
    if rng.random() < 0.5:
        rows = draw_rows(rng, experts)
        ids = rng.permutation(np.repeat(np.arange(experts), rows))[:, None]
    else:
        topk = int(rng.choice([each for each in (1, 2, 4) if each <= experts]))
        ids = _skewed_ids(rng, int(rng.integers(0, 60 if has_many else 300)), experts, topk)
    ids = ids[:max_tokens]
    ids = np.where(rng.random(ids.shape) < rng.choice([0.0, 0.0, 0.0, 0.2, 1.0]), -1, ids).astype(np.int32)
    alignment, buffer = 1, -1
    if not has_many and rng.random() < 0.3:
        alignment = int(rng.choice([8, 16]))
    elif not has_many and rng.random() < 0.3:
        buffer = int(rng.integers(0, 2 * ids.size + 2))
    sizes = [(d, n) for d in hidden for n in inner if experts * d * n <= MAX_ELEMENTS] or [(min(hidden), min(inner))]
    return DrawnLayer(len(ids), *sizes[rng.integers(len(sizes))], experts, ids.shape[1], alignment, buffer, ids)
