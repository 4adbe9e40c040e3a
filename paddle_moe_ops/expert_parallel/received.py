# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The result of a dispatch, and its state for `combine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle import Tensor

from ..backends import resolve
from ..routing import Plan
from .agreement import LayerCall
from .alltoall import Chunks, Counts
from .peer import Peers
from .tokens import TokenExchange

__all__ = ["Received", "WayBack", "WayBackToPeers"]


@dataclass(frozen=True, eq=False)
class Received:
    """The tokens that a rank received for its experts: T are its own tokens, R the received ones, N their rows.

    Attributes:
        plan: the local plan, which maps the R tokens to rows of this rank's experts.
        rows: with ``combine="exact"`` [N, d], the rows of the local experts in expert order; otherwise None.
        tokens: with ``combine="reduced"`` [R, d], the received tokens, in the order of ranks; otherwise None.
        probs: with ``combine="reduced"`` float32 [R, K], their probabilities; otherwise None. A `TokenTransport` may
            return tokens in another order, and probabilities of another number of columns.
        tokens_per_expert: rows of each local expert, ints for `grouped_gemm`. With ``tokens_per_rank`` an int32 tensor;
            ``rows`` on a GPU then may have more rows than its sum. On a rank without experts it is empty, and the plan
            has 0 experts.
        routed_per_expert: int32 [E], slots of this rank's own tokens by expert, dropped ones included.
        dropped_slots: 0-D int32, number of them dropped by ``capacity`` or ``tokens_per_rank``.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import ExpertParallel
        >>> parallel = ExpertParallel(2)
        >>> received = parallel.dispatch(paddle.randn([3, 64]), paddle.to_tensor([[0], [1], [0]]), paddle.ones([3, 1]))
        >>> received.rows.shape, received.tokens_per_expert
        ([3, 64], [2, 1])
    """

    plan: Plan
    rows: Tensor | None
    tokens: Tensor | None
    probs: Tensor | None
    tokens_per_expert: list[int] | Tensor
    routed_per_expert: Tensor
    dropped_slots: Tensor
    _way_back: WayBack | WayBackToPeers


@dataclass(frozen=True, eq=False)
class WayBack:
    """The state of a dispatch for `combine`."""

    counts: Counts  # of the rows, or tokens, to send back
    chunks: Chunks | None
    plan: Plan  # of the rows, or parts, that return to this rank's tokens
    weights: Tensor | None  # by row of the plan, a copy: the caller may overwrite the originals
    call: LayerCall

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sums of each token's rows; differentiable."""
        return resolve("unpermute", rows).unpermute(rows, self.weights, self.plan)


@dataclass(frozen=True, eq=False)
class WayBackToPeers:
    """The state of a dispatch for `combine` with transport "peer" or a `TokenTransport`."""

    peers: Peers | TokenExchange
    trip: Any
    num_lines: int  # received tokens or rows, or their maximum
    plan: Plan | None  # of the rows that return, with combine="exact"
    weights: Tensor | None  # by row of the plan

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sums of each token's rows, which arrive as sums without a plan; differentiable."""
        return rows if self.plan is None else resolve("unpermute", rows).unpermute(rows, self.weights, self.plan)
