# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by a `TokenTransport`, with their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import beside, dense, filled
from ..backends.autograd import Call, Gradients, connect, first_order_only, linear
from ..backends.base import Tensors
from ..routing import Plan
from .agreement import Step
from .alltoall import local_plan
from .protocol import DispatchedTokens, TokenTransport

__all__ = ["TokenExchange"]

_NAME = "ExpertParallel"
_DISPATCH, _COMBINE = f"{_NAME}.dispatch", f"{_NAME}.combine"


class ArrivedTokens(NamedTuple):
    """The R tokens that a rank received.

    Attributes:
        tokens: [R, d].
        plan: the local plan of the R tokens.
        probs: float32 [R, J].
        dropped: 0-D int32, zero.
        trip: the argument of `TokenExchange.combine`.
    """

    tokens: Tensor
    plan: Plan
    probs: Tensor
    dropped: Tensor
    trip: _Trip


class _Trip(NamedTuple):
    """The route of dispatched tokens, by which rows go in both directions; results of the transport are checked.

    Attributes:
        transport: the transport.
        handle: of its dispatch.
        sent: T.
        received: R.
    """

    transport: TokenTransport
    handle: Any
    sent: int
    received: int

    def back(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows of all ranks."""
        made = self.transport.combine(dense(rows), self.handle)
        return _checked("the result of transport.combine", made, rows.dtype, [self.sent, rows.shape[1]])

    def there(self, rows: Tensor) -> Tensor:
        """Send a row of each token to the ranks of its experts."""
        made = self.transport.dispatch_again(dense(rows), self.handle)
        return _checked("the result of transport.dispatch_again", made, rows.dtype, [self.received, rows.shape[1]])

    def back_with_probs(self, rows: Tensor, probs: Tensor, topk: int) -> Tensors:
        """Return the same as `back`, and the gradients [T, K] of probabilities."""
        made = self.transport.combine_with_probs(dense(rows), dense(probs), self.handle)
        name = "the result of transport.combine_with_probs"
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            _checks.bad_type(_NAME, name, "two tensors", type(made).__name__)
        sums = _checked(f"{name}, [0],", made[0], rows.dtype, [self.sent, rows.shape[1]])
        return sums, _checked(f"{name}, [1],", made[1], paddle.float32, [self.sent, topk])


def _checked(name: str, made: Any, dtype: Any, shape: list[int]) -> Tensor:
    return _checks.tensor(_NAME, name, made, (dtype,), shape)


class _Dispatch(Call):
    """A call that sends tokens and probabilities; with one node, all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(self, x: Tensor, ids: Tensor, probs: Tensor, transport: TokenTransport) -> None:
        super().__init__(None, x, probs)
        self.given: Tensors = (dense(x.detach()), dense(ids.astype("int64")), dense(probs.detach()))
        self.transport, self.ids, self.topk = transport, ids, ids.shape[1]
        self.trip = _Trip(transport, None, x.shape[0], 0)

    def run(self) -> Tensors:
        made = self.transport.dispatch(*self.given)
        (tokens, _, _), self.given = self.given, ()
        name = "of the result of transport.dispatch"
        _checks.instance(_NAME, name.removeprefix("of "), made, DispatchedTokens, "DispatchedTokens")
        _checks.tensor(_NAME, f"tokens {name}", made.tokens, (tokens.dtype,), ["received", tokens.shape[1]])
        received = made.tokens.shape[0]
        _checks.tensor(_NAME, f"ids {name}", made.ids, _checks.ID_DTYPES, [received, "columns"])
        _checks.tensor(_NAME, f"probs {name}", made.probs, (paddle.float32,), made.ids.shape)
        self.ids = made.ids.astype("int32")
        self.trip = self.trip._replace(handle=made.handle, received=received)
        return made.tokens, made.probs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        rows, probs = gradients
        return first_order_only(self, self.trip.back_with_probs(rows, probs, self.topk), rows, probs)


class TokenExchange:
    """The exchanges of one layer by a transport of tokens.

    Args:
        transport: connected to the group.
        slots_per_rank: the largest number of experts of a rank.
    """

    def __init__(self, transport: TokenTransport, slots_per_rank: int) -> None:
        self._transport, self._slots = transport, slots_per_rank

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor, step: Step) -> ArrivedTokens:
        """Send tokens to the ranks of their experts; differentiable in x and probs.

        Args:
            x: [T, d].
            ids: [T, K], slots of experts, -1 for slots that do not count.
            probs: float32 [T, K].
            step: unused: these transports exchange no calls.
        """
        self._transport.check(_DISPATCH, "x", x)
        call = _Dispatch(x, ids, probs, self._transport)
        tokens, their_probs = connect(call, x, probs)
        plan = local_plan(beside(call.ids, x), self._slots)
        return ArrivedTokens(tokens, plan, their_probs, filled([], 0, "int32", like=x), call.trip)

    def combine(self, out: Tensor, trip: _Trip) -> Tensor:
        """Return the sums of each token's rows of all ranks; differentiable.

        Args:
            out: [R, d] in the order of the received tokens.
            trip: from `dispatch`.
        """
        self._transport.check(_COMBINE, "out", out)
        return linear(_COMBINE, None, out, trip.back, trip.there)
