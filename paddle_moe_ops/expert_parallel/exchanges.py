# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks as autograd nodes: one node, or two nodes between which other work runs.

With two nodes, `Flight`, the first one begins the exchange and the second one ends it. In the backward pass the second
node begins the exchange of gradients, and the first one ends it. So work between the nodes overlaps both exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import paddle
from paddle import Tensor

from .._graphs import dense, placed
from .._native import native
from ..backends.autograd import Call, Gradients, as_node, connect, first_order_only, wants_gradient
from ..backends.base import Tensors
from ..backends.deferred import owned

__all__ = ["AtOnce", "End", "Exchange", "ExchangeHandle", "Flight", "Leg", "Then", "exchanged"]

End = Callable[[], Tensors]
_Result = TypeVar("_Result")


class Leg(Protocol):
    """One direction of an exchange."""

    @property
    def run(self) -> Callable[..., Tensors]:
        """Sends tensors, and returns the received ones."""

    def start(self, *values: Tensor) -> End:
        """Begin to send tensors, and return the end of the exchange.

        The end is called at most once. It lets the current stream wait for the exchange, and returns the received
        tensors. The memory of the exchange lives until then, also if the end is dropped.
        """


class AtOnce(NamedTuple):
    """A leg that is over when it has begun."""

    run: Callable[..., Tensors]

    def start(self, *values: Tensor) -> End:
        made = self.run(*values)
        return lambda: made


class Then(NamedTuple):
    """A leg with work on the current stream after it.

    Attributes:
        leg: the leg.
        after: returns the results from the received tensors.
        more: further tensors that the leg sends.
    """

    leg: Leg
    after: Callable[..., Tensors]
    more: Tensors = ()

    def run(self, *values: Tensor) -> Tensors:
        return self.after(*self.leg.run(*values, *self.more))

    def start(self, *values: Tensor) -> End:
        end, after = self.leg.start(*values, *self.more), self.after
        return lambda: after(*end())


class Exchange(NamedTuple):
    """An exchange of tensors, and the exchange of their gradients.

    Attributes:
        function: the name that begins an error text.
        there: sends the tensors.
        back: returns the leg of gradients of the received tensors, in the backward pass.
        again: returns the leg of gradients of ``back``; None: it is ``there``.
        is_linear: whether ``back`` has gradients; otherwise they raise.
        read: the tensors that ``back`` reads. If one was changed in place, the backward pass raises.
    """

    function: str
    there: Leg
    back: Callable[[], Leg]
    again: Callable[[], Leg] | None = None
    is_linear: bool = True
    read: Tensors = ()

    def transposed(self) -> Exchange:
        """Return the exchange of gradients; only that of a linear exchange has gradients, too."""
        there = self.there
        return Exchange(self.function, self.back(), self.again or (lambda: there))


def exchanged(exchange: Exchange, *values: Tensor) -> Tensors:
    """Run an exchange, and return the received tensors; differentiable."""
    if not wants_gradient(*values):
        return exchange.there.run(*values)
    return as_node(_Whole(exchange, *values), [*values])


class _Whole(Call):
    """An exchange as one node."""

    def __init__(self, exchange: Exchange, *values: Tensor) -> None:
        super().__init__(None, *values)
        if exchange.read:
            self.watch(*exchange.read)
        self.function, self.exchange = exchange.function, exchange
        self.values = values

    def run(self) -> Tensors:
        values, self.values = self.values, ()
        return self.exchange.there.run(*values)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        if not paddle.is_grad_enabled():
            return self.exchange.back().run(*gradients)
        if self.exchange.is_linear:
            return exchanged(self.exchange.transposed(), *gradients)
        return first_order_only(self, self.exchange.back().run(*gradients), *gradients)


_tickets: dict[str, Tensor] = {}


def _ticket(place: Any) -> Tensor:
    """Return the tensor that connects the two nodes of a flight; nothing reads it, so a device has one."""
    key = str(place)
    if key not in _tickets:
        _tickets[key] = placed(paddle.zeros([1]), place)
    return _tickets[key]


def _over() -> Gradients:
    """Return nothing, since no exchange is in flight."""
    return ()


class _Sending(_Whole):
    """The first node of a flight: it begins the exchange, and ends that of gradients.

    Attributes:
        end: of the exchange in flight.
        end_back: of the exchange of gradients in flight.
        while_returning: functions to call before the end of the exchange of gradients.
    """

    def __init__(self, exchange: Exchange, *values: Tensor) -> None:
        super().__init__(exchange, *values)
        self.end: Callable[[], Any] = _over
        self.end_back: Callable[[], Gradients] = _over
        self.while_returning: list[Callable[[], Any]] = []

    def run(self) -> Tensors:
        values, self.values = self.values, ()
        self.end = self.exchange.there.start(*values)
        return (_alias(_ticket(self.place)),)

    def arrived(self) -> Tensors:
        """Return the received tensors."""
        end, self.end = self.end, _over
        made: Tensors = end()
        return made

    def returns(self, gradients: Tensors) -> None:
        """Begin the exchange of gradients."""
        if paddle.is_grad_enabled():  # their gradients would need two nodes of their own
            made = super().differentiate(*gradients)
            self.end_back = lambda: made
        else:
            if self.place.is_gpu_place():  # where Paddle's engine may add to a gradient after the node has returned
                gradients = tuple(map(owned, gradients))
            self.end_back = self.exchange.back().start(*gradients)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        for function in self.while_returning:
            function()
        end, self.end_back = self.end_back, _over
        return end()


class _Arriving(Call):
    """The second node of a flight: it ends the exchange, and begins that of gradients."""

    def __init__(self, sending: _Sending, ticket: Tensor) -> None:
        super().__init__(None, ticket)
        self.function, self.sending, self._watched = sending.function, sending, sending._watched

    def run(self) -> Tensors:
        return self.sending.arrived()

    def differentiate(self, *gradients: Tensor) -> Gradients:
        self.sending.returns(gradients)
        return (_ticket(self.place),)


class _Between(Call):
    """A node between the two nodes of a flight; the first one runs after it in the backward pass."""

    def __init__(self, ticket: Tensor, x: Tensor) -> None:
        super().__init__(None, ticket, x)
        self.values: Tensors = (ticket, x)

    def run(self) -> Tensors:
        (ticket, x), self.values = self.values, ()
        return _alias(ticket), _alias(x)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        return gradients


def _alias(x: Tensor) -> Tensor:
    """Return another tensor on the same memory. Paddle takes `detach` of a node's input for the input itself."""
    x = dense(x)
    return x.view(x.shape) if x.size else placed(x.clone(), x.place)  # the clone may be on the host


class Flight:
    """An exchange as two nodes.

    Args:
        exchange: the exchange.
        values: the tensors to send.
        given: the caller's tensor, whose values these are. It must stay as it is until `wait`, whether or not the
            transport reads it.
    """

    def __init__(self, exchange: Exchange, values: Tensors, given: Tensor) -> None:
        self._call = _Sending(exchange, *values)
        self._given: Tensors = (given,)
        self._watched = native.watch(given)
        (self._ticket,) = connect(self._call, *values)

    def overlapped(self, x: Tensor) -> Tensor:
        """Return x, through a node between the two of this flight."""
        if not (wants_gradient(x) and wants_gradient(self._ticket)):
            return x
        self._ticket, x = connect(_Between(self._ticket, x), self._ticket, x)
        return x

    def overlap_backward(self, function: Callable[[], Any]) -> None:
        """Let the backward pass call a function while gradients travel."""
        self._call.while_returning.append(function)

    def wait(self) -> Tensors:
        """Return the received tensors; called once."""
        if native.was_changed(self._watched):
            raise RuntimeError(
                f"{self._call.function}: the sent tensor was changed in place before wait(); change it later, or send "
                "a copy"
            )
        self._given = ()
        return connect(_Arriving(self._call, self._ticket), self._ticket)


class ExchangeHandle(Generic[_Result]):
    """A dispatch or a combine in flight, from `ExpertParallel` with ``async_op=True``.

    Work enqueued before `wait` overlaps the exchange. All ranks begin exchanges in the same order; the order of `wait`
    is free. Until `wait`, the sent tensor must not be changed in place. A handle that is dropped ends its exchange
    without a result.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import flush_dw, moe_mlp
        >>> from paddle_moe_ops.expert_parallel import ExpertParallel
        >>> parallel = ExpertParallel(8, combine="reduced")  # with ranks: group=group
        >>> x, ids, probs = paddle.randn([16, 64]), paddle.randint(0, 8, [16, 1]), paddle.ones([16, 1])
        >>> gate_up, down = (paddle.create_parameter(s, "float32") for s in ([8, 64, 96], [8, 48, 64]))
        >>> x.stop_gradient = False
        >>> handle = parallel.dispatch(x, ids, probs, async_op=True)
        >>> handle.overlap_backward(flush_dw)
        >>> received = handle.wait()
        >>> out = moe_mlp(received.tokens, received.plan, received.probs, gate_up, down, defer_dw=True)
        >>> handle = parallel.combine(out, received, async_op=True)
        >>> shared = paddle.nn.functional.silu(handle.overlapped(x))  # overlaps both exchanges of combine
        >>> (handle.wait() + shared).sum().backward()
        >>> gate_up.grad.shape
        [8, 64, 96]
    """

    def __init__(self, flight: Flight, finish: Callable[..., _Result]) -> None:
        self._flight: Flight | None = flight
        self._finish, self._function = finish, flight._call.function

    def _in_flight(self, method: str) -> Flight:
        if self._flight is None:
            raise RuntimeError(f"{self._function}: {method} after wait(), which returns the result once")
        return self._flight

    def wait(self) -> _Result:
        """Let the current stream wait for the exchange, and return its result, once.

        Returns:
            a `Received` after dispatch, and a tensor [T, d] after combine, with the bits of a call without
            ``async_op``. Differentiable: the backward pass begins the exchange of gradients here, and ends it where
            this exchange began.

        Raises:
            RuntimeError: a second call; the sent tensor was changed in place; a rank did not answer.
        """
        flight = self._in_flight("wait()")
        self._flight = None
        return self._finish(*flight.wait())

    def overlapped(self, x: Tensor) -> Tensor:
        """Return x for work between begin and `wait`, whose backward pass then runs while gradients travel.

        Without it, Paddle's engine may run that backward pass before or after. ``x`` is any tensor that the work reads,
        such as the tokens of shared experts; the work's result must be a part of the loss.

        Args:
            x: any tensor.

        Returns:
            the same values, in the same memory if that is contiguous. Differentiable.

        Raises:
            RuntimeError: after `wait`.
        """
        return self._in_flight("overlapped()").overlapped(x)

    def overlap_backward(self, function: Callable[[], Any]) -> None:
        """Let the backward pass call a function while gradients travel, before it waits for them.

        With `flush_dw`, the wgrad of matrices that ``defer_dw=True`` deferred overlaps the exchange of gradients. A
        handle without a backward pass calls nothing.

        Args:
            function: without arguments; its result is dropped.

        Raises:
            RuntimeError: after `wait`.
        """
        self._in_flight("overlap_backward()").overlap_backward(function)
