# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The routing of a case, and the oracle's plan of it, which every implementation must reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import GENERATORS, expert_parallel_sparse, random_probs

from .shapes import Case

__all__ = ["SCALE_GROUP", "Problem", "make_problem"]

SCALE_GROUP = 128  # columns that share a scale
_SEED = 20260913


@dataclass(frozen=True)
class Problem:
    """A case with its ids int32 [T, K], probabilities float32 [T, K] and the oracle's plan."""

    case: Case
    ids: NDArray
    probs: NDArray
    plan: reference.Plan

    @property
    def routed_rows(self) -> int:
        """Rows that hold a token; the plan's num_rows counts the padding too."""
        return int(self.plan.tokens_per_expert.sum())

    @property
    def fill_padding(self) -> str:
        """The zeroed part of padding rows: "all" or "none"."""
        return "all" if self.case.fill else "none"

    def array(self, name: str) -> NDArray:
        """An array of the problem or of its plan; AttributeError if neither has it."""
        return getattr(self if hasattr(self, name) else self.plan, name)

    @property
    def scale_cols(self) -> int:
        return -(-self.case.shape.hidden // SCALE_GROUP)

    @property
    def chunk_sizes(self) -> NDArray:
        """int32 [E]: the buffer as a rank gets it from an all-to-all, in chunks by (rank, expert)."""
        return self.plan.tokens_per_expert

    @cached_property
    def chunk_order(self) -> NDArray:
        """int32 [E]: the chunks by (expert, rank), for as many ranks as share the experts evenly, up to 8."""
        ranks = max(ranks for ranks in range(1, 9) if self.plan.num_experts % ranks == 0)
        return np.arange(self.plan.num_experts, dtype=np.int32).reshape(ranks, -1).T.flatten()

    @cached_property
    def source_to_dest(self) -> NDArray:
        """int32 [M]: the new place of every row of the buffer when its chunks are sorted."""
        return reference.chunk_sort_map(self.chunk_sizes, self.chunk_order, self.plan.num_rows)

    @cached_property
    def dest_to_source(self) -> NDArray:
        """int32 [M]"""
        return np.argsort(self.source_to_dest).astype(np.int32)

    @cached_property
    def gating(self) -> NDArray:
        """float32 [T, E]: logits whose scores are far enough apart for every router to choose the same experts."""
        shape = self.case.shape
        order = np.random.default_rng(_SEED).random((shape.num_tokens, shape.num_experts), np.float32).argsort(axis=1)
        return order.astype(np.float32) / 16

    @property
    def chosen_per_token(self) -> int:
        """The experts that a router chooses, which cannot be more than there are."""
        return min(self.case.shape.topk, self.case.shape.num_experts)

    @cached_property
    def chosen(self) -> tuple[NDArray, NDArray]:
        """Weights float32 and ids int64 [T, K] of a softmax over the logits, the weights divided by their sum."""
        weights, ids, _ = reference.calculate_topk(self.gating, self.chosen_per_token, False, True)
        return weights, np.ascontiguousarray(ids)

    @cached_property
    def rowmap(self) -> NDArray:
        """int32 [T, E], the map that Paddle's moe_permute returns."""
        return reference.plan_to_rowmap(self.plan)


def make_problem(case: Case) -> Problem:
    """Draw the routing of a case, the same one in every run, and route it with the oracle."""
    shape = case.shape
    rng = np.random.default_rng(_SEED)
    sizes = (rng, shape.num_tokens, shape.topk, shape.num_experts)
    if case.routing == "expert_parallel_sparse":
        ids = expert_parallel_sparse(*sizes, mean_valid=shape.mean_valid)
    else:
        ids = GENERATORS[case.routing](*sizes)
    probs = random_probs(rng, ids)
    capacity = shape.num_tokens * shape.topk + shape.num_experts * (case.alignment - 1)
    plan = reference.route(
        ids,
        probs,
        num_experts=shape.num_experts,
        padding_alignment=case.alignment,
        buffer_size=capacity if case.capacity else -1,
    )
    return Problem(case, ids, probs, plan)
