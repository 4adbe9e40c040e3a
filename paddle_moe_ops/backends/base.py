# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend is: the verbs it offers and the arguments they take."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

from paddle import Tensor

Tensors = tuple[Tensor, ...]


class Validation(enum.IntEnum):
    """How much of the data is looked at; the higher levels include the lower ones."""

    OFF = 0  # bad ids and map entries count as -1, NaN is copied, overflow is counted
    DATA = 1  # ids, duplicates, NaN and maps raise
    ALL = 2  # dropped slots raise too

    def as_argument(self) -> bool | None:
        """The value of a public ``validate`` argument that means this level on the CPU."""
        return {Validation.OFF: False, Validation.DATA: None, Validation.ALL: True}[self]


class RouteSpec(NamedTuple):
    """Everything about a routing that is not a tensor."""

    num_experts: int
    topk: int  # slots per token of a mask; -1 for ids, whose columns say it
    padding_alignment: int
    counts: tuple[int, ...] | None  # rows per expert as host integers; None: counted, or in a tensor
    buffer_size: int  # rows of a static buffer, -1 without
    duplicates: str  # "first" or "each"
    validation: Validation


class MoePermuteSpec(NamedTuple):
    """Everything about a moe_permute call that is not a tensor."""

    route: RouteSpec
    do_gather: bool
    return_expert_indices: bool
    fill_padding: str  # "all", "meta" or "none"


class MoeUnpermuteSpec(NamedTuple):
    """Everything about a moe_unpermute call that is not a tensor."""

    num_experts: int
    weighted: bool
    compat_paddle: bool
    validation: Validation


class Backend(Protocol):
    """One implementation of the verbs over Paddle tensors, whose arguments are checked already.

    `route` returns the ten tensors of a Plan in its order, `row_probs` with 0 elements without probabilities.
    `moe_permute` returns hidden_states_unzipped, zipped_expertwise_rowmap, token_prob_unzipped, scale_unzipped,
    expert_indices, overflow, slot_to_row and token_rows; outputs that were not asked for have 0 elements.

    A backend that is not `differentiable` also has the ``*_backward`` verbs, which PyLayers call; ``wanted`` tells
    those that make several gradients which of the forward's tensor inputs want one.
    """

    name: str
    differentiable: bool

    def unavailable(self) -> str | None:
        """Why the backend cannot run here, or None when it can."""

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        """Why the backend, where it can run, cannot do so on the device of a tensor; None when it can."""

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        """Make the maps of a plan."""

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        """Rows and scales in expert order; scales have 0 elements without a scale."""

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        """The sum of each token's rows."""

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        """Route and permute in one call."""

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        """The sum of each token's rows, and the probabilities per slot."""
