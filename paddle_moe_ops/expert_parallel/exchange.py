# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges with gradients. A backward pass sends every line's gradient to where the line came from.

Every rank of a group must run the backward pass of each exchange, even a rank that sent and received nothing: gradients
are exchanged like values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paddle import Tensor

from .. import _checks
from ..backends.base import Tensors
from ..backends.nodes import Call, Gradients, connect, linear, wants_gradient
from ..functional import permute, sort_chunks, unpermute
from ..quantization import dequantize_1x128, quantize_1x128
from ..routing import Plan
from .calls import Kind, LayerCall, Mode, Step
from .transports import Transport

__all__ = ["Chunks", "Counts", "backward_step", "combine_step", "exchange", "exchange_with_probs", "rows_of_tokens"]

_DISPATCH, _COMBINE = "ExpertParallel.dispatch", "ExpertParallel.combine"


class Counts(NamedTuple):
    """How many lines travel.

    Attributes:
        transport: what moves them.
        sent: lines for each rank.
        received: lines from each rank.
        float8: what tokens travel as, a format of `permute`, or None for their own dtype.
    """

    transport: Transport
    sent: list[int]
    received: list[int]
    float8: str | None = None

    def there(self, payload: Tensor, step: Step) -> Tensor:
        """The lines that arrive when lines [sum(sent), ...] are sent in a pass of a call."""
        return self.transport.exchange(payload, self.sent, self.received, step)

    def tokens_there(self, tokens: Tensor, step: Step) -> Tensor:
        """The tokens that arrive when tokens [sum(sent), d] are sent, which may travel as float8."""
        if self.float8 is None:
            return self.there(tokens, step)
        codes, scales = quantize_1x128(tokens, ue8m0=self.float8 == _checks.UE8M0)
        return dequantize_1x128(self.there(codes, step), self.there(scales, step), dtype=tokens.dtype)

    def back(self, payload: Tensor, step: Step) -> Tensor:
        """The lines that arrive when lines [sum(received), ...] go the other way."""
        return self.transport.exchange(payload, self.received, self.sent, step)


class Chunks(NamedTuple):
    """The rows of the local experts in chunks, one for each expert and rank.

    Attributes:
        sizes: int32 [C], rows of each chunk in the order (expert, rank), which is that of the local plan.
        to_ranks: int32 [C], the chunks in the order (rank, expert), in which they travel.
    """

    sizes: Tensor
    to_ranks: Tensor

    def by_rank(self, rows: Tensor) -> Tensor:
        """The rows in the order in which they travel; differentiable."""
        return sort_chunks(rows, self.sizes, self.to_ranks)[0]


class _TokensAndProbs(Call):
    """Tokens and their probabilities in one node, so that all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(self, tokens: Tensor, probs: Tensor, counts: Counts, step: Step) -> None:
        super().__init__(None, tokens, probs)
        self.payload: Tensors = (tokens, probs)
        self.counts, self.step = counts, step

    def run(self) -> Tensors:
        (tokens, probs), self.payload = self.payload, ()
        return self.counts.tokens_there(tokens, self.step), self.counts.there(probs, self.step)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        step = backward_step(self.step.call, Kind.DISPATCH_BACKWARD)
        there, back = _in(step, self.counts.there), _in(step, self.counts.back)
        return tuple(linear(_DISPATCH, None, each, back, there) for each in gradients)


def backward_step(call: LayerCall, kind: Kind) -> Step:
    """The step of a backward pass.

    Raises:
        RuntimeError: some ranks do not run it, as far as the host knows.
    """
    step = Step(call, kind)
    step.check_modes()
    return step


def combine_step(call: LayerCall, out: Tensor) -> Step:
    """The step of a combine of expert outputs."""
    call = call._replace(width=out.shape[1], dtype=_checks.SUM_DTYPES.index(out.dtype))
    return Step(call, Kind.COMBINE, Mode.COMBINE_BACKWARD if wants_gradient(out) else Mode.NONE)


def _in(step: Step, way: Callable[[Tensor, Step], Tensor]) -> Callable[[Tensor], Tensor]:
    """A way of lines in a step."""
    return lambda payload: way(payload, step)


def exchange(rows: Tensor, counts: Counts, step: Step) -> Tensor:
    """Send rows to their ranks; differentiable."""

    def back(gradient: Tensor) -> Tensor:
        return counts.back(gradient, backward_step(step.call, Kind.COMBINE_BACKWARD))

    return linear(_COMBINE, None, rows, _in(step, counts.there), back)


def exchange_with_probs(tokens: Tensor, probs: Tensor, counts: Counts, step: Step) -> Tensors:
    """Send tokens [R, d] and probabilities [R, K] to their ranks; differentiable."""
    return connect(_TokensAndProbs(tokens, probs, counts, step), tokens, probs)


def rows_of_tokens(
    x: Tensor, plan: Plan, to_ranks: Plan, tokens: Counts, local: Plan, chunks: Chunks, rows: Counts, step: Step
) -> Tensor:
    """The rows of the local experts, in expert order; differentiable in x.

    Tokens travel once and become rows where they arrive. In the backward pass every row's gradient travels, so that a
    token's gradient is one sum over its rows, rounded once, as it is where one rank has all experts.

    Args:
        x: [T, d], this rank's tokens.
        plan: their plan over all experts.
        to_ranks: which tokens go to which rank.
        tokens: how many tokens travel.
        local: the plan of the tokens that arrive, over the local experts.
        chunks: the rows of that plan by rank.
        rows: how many rows go back to each rank, and come from there.
        step: the dispatch.
    """

    # Detached, since compiled operators would record a graph of their own in here.
    def there(x: Tensor) -> Tensor:
        return permute(tokens.tokens_there(permute(x.detach(), to_ranks)[0], step), local)[0]

    def back(gradient: Tensor) -> Tensor:
        travelling = chunks.by_rank(gradient.detach())
        return unpermute(rows.there(travelling, backward_step(step.call, Kind.DISPATCH_BACKWARD)), plan)

    return linear(_DISPATCH, None, x, there, back)
