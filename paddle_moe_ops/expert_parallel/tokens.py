# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by a `TokenTransport`, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import beside, dense, filled
from ..backends.base import Tensors
from ..routing import Plan
from .agreement import Step
from .alltoall import local_plan
from .exchanges import AtOnce, Exchange
from .protocol import DispatchedTokens, TokenTransport

__all__ = ["TokenExchange"]

_NAME = "ExpertParallel"
_DISPATCH, _COMBINE = f"{_NAME}.dispatch", f"{_NAME}.combine"


class ArrivedTokens(NamedTuple):
    """The R tokens that a rank received, apart from the tokens and probabilities themselves.

    Attributes:
        plan: the local plan of the R tokens.
        dropped: 0-D int32, zero.
        trip: the argument of `TokenExchange.combine`.
    """

    plan: Plan
    dropped: Tensor
    trip: Any  # a `_Trip`


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
        made = self.transport.combine(dense(rows.detach()), self.handle)
        return _checked("the result of transport.combine", made, rows.dtype, [self.sent, rows.shape[1]])

    def there(self, rows: Tensor) -> Tensor:
        """Send a row of each token to the ranks of its experts."""
        made = self.transport.dispatch_again(dense(rows.detach()), self.handle)
        return _checked("the result of transport.dispatch_again", made, rows.dtype, [self.received, rows.shape[1]])

    def back_with_probs(self, rows: Tensor, probs: Tensor, topk: int) -> Tensors:
        """Return the same as `back`, and the gradients [T, K] of probabilities."""
        made = self.transport.combine_with_probs(dense(rows.detach()), dense(probs.detach()), self.handle)
        name = "the result of transport.combine_with_probs"
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            _checks.bad_type(_NAME, name, "two tensors", type(made).__name__)
        sums = _checked(f"{name}, [0],", made[0], rows.dtype, [self.sent, rows.shape[1]])
        return sums, _checked(f"{name}, [1],", made[1], paddle.float32, [self.sent, topk])


def _check_dispatched(made: Any, sent: Tensor) -> None:
    """Check the result of `TokenTransport.dispatch`."""
    name = "of the result of transport.dispatch"
    _checks.instance(_NAME, name.removeprefix("of "), made, DispatchedTokens, "DispatchedTokens")
    _checks.tensor(_NAME, f"tokens {name}", made.tokens, (sent.dtype,), ["received", sent.shape[1]])
    received = made.tokens.shape[0]
    _checks.tensor(_NAME, f"ids {name}", made.ids, _checks.ID_DTYPES, [received, "columns"])
    _checks.tensor(_NAME, f"probs {name}", made.probs, (paddle.float32,), made.ids.shape)


def _checked(name: str, made: Any, dtype: Any, shape: list[int]) -> Tensor:
    return _checks.tensor(_NAME, name, made, (dtype,), shape)


class TokenExchange:
    """The exchanges of one layer by a transport of tokens.

    Args:
        transport: connected to the group.
        slots_per_rank: the largest number of experts of a rank.
    """

    def __init__(self, transport: TokenTransport, slots_per_rank: int) -> None:
        self._transport, self._slots = transport, slots_per_rank

    def dispatch(self, x: Tensor, ids: Tensor, step: Step) -> tuple[Exchange, Callable[[], ArrivedTokens]]:
        """Return the exchange of tokens and probabilities, and the function that returns the rest of what arrives.

        Args:
            x: [T, d].
            ids: [T, K], slots of experts, -1 for slots that do not count.
            step: unused: these transports exchange no calls.
        """
        self._transport.check(_DISPATCH, "x", x)
        sent_ids, topk, transport, found = dense(ids.astype("int64")), ids.shape[1], self._transport, []

        def there(tokens: Tensor, probs: Tensor) -> Tensors:
            made = transport.dispatch(dense(tokens.detach()), sent_ids, dense(probs.detach()))
            _check_dispatched(made, tokens)
            found.append(
                (made.ids.astype("int32"), _Trip(transport, made.handle, tokens.shape[0], made.tokens.shape[0]))
            )
            return made.tokens, made.probs

        def back(rows: Tensor, probs: Tensor) -> Tensors:
            return found[0][1].back_with_probs(rows, probs, topk)

        def arrived() -> ArrivedTokens:
            local_ids, trip = found[0]
            plan = local_plan(beside(local_ids, x), self._slots)
            return ArrivedTokens(plan, filled([], 0, "int32", like=x), trip)

        return Exchange(_DISPATCH, AtOnce(there), lambda: AtOnce(back), is_linear=False), arrived

    def combine(self, out: Tensor, trip: _Trip) -> Exchange:
        """Return the exchange of rows [R, d], in the order of the received tokens, for the sums of each token's rows.

        Args:
            out: the rows.
            trip: from `dispatch`.
        """
        self._transport.check(_COMBINE, "out", out)
        there, back = AtOnce(lambda rows: (trip.back(rows),)), AtOnce(lambda rows: (trip.there(rows),))
        return Exchange(_COMBINE, there, lambda: back)
