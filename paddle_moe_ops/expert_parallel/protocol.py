# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The protocols of transports, which users may implement."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import dense

__all__ = [
    "CheckedLines",
    "DispatchedTokens",
    "LineTransport",
    "TokenTransport",
    "Transport",
    "connected",
    "overlaps",
    "transport_option",
]

_NAME = "ExpertParallel"


class Transport:
    """A way for tokens to travel between the ranks of a group, for ``ExpertParallel(transport=...)``.

    Subclass `LineTransport` for collectives that send lines to ranks, or `TokenTransport` for a library that sends
    tokens to the ranks of their experts, such as DeepEP. The built-in transports are instances of them, except "peer".
    The package adds plans, gradients and checks; the tensors that methods receive want no gradient.

    All ranks call the same methods in the same order, also ranks without tokens, and backward passes call them in the
    order of autograd. Other dispatches may come between a dispatch and its combine or its backward pass. A method
    returns new tensors, ready for the current stream: a library that runs on a stream of its own lets the current
    stream wait for its event first, as DeepEP's ``event.current_stream_wait()`` does.

    A group of one rank calls none of the methods. Copies of a layer share its transport. One object may serve several
    layers; `connect` is called for each of them, and again for a layer after `move_experts`. Arguments of `connect` and
    results are checked by the package, ``timeout`` is up to the transport.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import DeepEP, Transport
        >>> isinstance(DeepEP(), Transport)
        True
    """

    def connect(self, group: Group, num_experts: int) -> Transport:
        """Return the transport of one layer, of the same kind; by default this one.

        Args:
            group: the ranks, several.
            num_experts: E of all ranks, a multiple of their number P. Rank r has the experts from r * E / P on. With
                uneven placements some of these numbers belong to no expert, and no token names them.

        Raises:
            TypeError, ValueError: it cannot serve this group. All ranks raise alike, otherwise the others wait.
        """
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Transport:
        """Return the transport itself: connections are not copied."""
        return self


class LineTransport(Transport, abc.ABC):
    """A transport that sends lines of a tensor to ranks; it supports every ``combine``, ``payload`` and size of parts.

    Examples:
        >>> import numpy as np
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import ExpertParallel, LineTransport
        >>> class OverAllGather(LineTransport):
        ...     def connect(self, group, num_experts):
        ...         self.group = group
        ...         return self
        ...
        ...     def exchange(self, lines, sent, received, step):  # of float32 and integers
        ...         of_ranks, parts = [], np.split(lines.numpy(), np.cumsum(sent)[:-1])
        ...         paddle.distributed.all_gather_object(of_ranks, parts, group=self.group)
        ...         return paddle.to_tensor(np.concatenate([each[self.group.rank] for each in of_ranks]))
        >>> parallel = ExpertParallel(8, transport=OverAllGather())  # with ranks: group=group
    """

    @abc.abstractmethod
    def exchange(self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Any) -> Tensor:
        """Send each rank its lines, and receive those for this rank.

        Args:
            lines: [sum(sent), ...] of any dtype, also float8; contiguous; lines for rank 0, then for rank 1, ...
            sent: number of lines for each rank, this one included; any of them may be 0.
            received: number of lines from each rank, this one included.
            step: the pass of a call. ``step.words()`` are 8 ints, of which all but the last are equal on ranks in the
                same pass. A transport may send them along, and pass those of all ranks to ``step.check``, which raises
                if they differ; others ignore it.

        Returns:
            [sum(received), ...] in the order of the ranks, with the dtype and place of ``lines``.

        Raises:
            RuntimeError: a rank did not answer.
        """

    def start_exchange(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Any
    ) -> Callable[[], Tensor]:
        """Begin an exchange for ``async_op=True``; by default it runs `exchange`, and nothing overlaps.

        Args:
            lines: as in `exchange`; it does not change until the end.
            sent: as in `exchange`.
            received: as in `exchange`.
            step: as in `exchange`.

        Returns:
            a function, called at most once: it lets the current stream wait for the exchange, and returns the result of
            `exchange`. If it is deleted without a call, the exchange still ends before its memory is used again.
        """
        arrived = self.exchange(lines, sent, received, step)
        return lambda: arrived

    def exchange_numbers(self, numbers: Tensor, step: Any) -> Tensor:
        """Send each rank its line, and receive those for this rank; by default with `exchange`.

        Args:
            numbers: int32 [P, ...], contiguous.
            step: as above. The caller compares the words of all ranks, which are in the numbers.

        Returns:
            the same shape.

        Raises:
            RuntimeError: a rank did not answer, or did not arrive in time.
        """
        ones = [1] * numbers.shape[0]
        return self.exchange(numbers, ones, ones, step)


class DispatchedTokens(NamedTuple):
    """The R tokens that a rank received from all ranks, from `TokenTransport.dispatch`.

    Attributes:
        tokens: [R, d] of the dtype that was sent, in any order that is the same in every run.
        ids: int32 or int64 [R, J], experts of this rank, counted from its first one; -1 for experts of other ranks. J
            is K, or another number: a multi-hot map has a column for each expert of the rank.
        probs: float32 [R, J], 0 where the id is -1.
        handle: the route, for the other methods.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import DispatchedTokens
        >>> tokens, ids = paddle.randn([2, 64]), paddle.to_tensor([[0, -1], [1, 0]])  # of experts 0 and 1 of this rank
        >>> DispatchedTokens(tokens, ids, probs=paddle.to_tensor([[0.5, 0.0], [0.5, 0.5]]), handle=None).ids.shape
        [2, 2]
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    handle: Any


class TokenTransport(Transport, abc.ABC):
    """A transport that sends tokens to the ranks of their experts, and adds up what these return.

    It serves ``combine="reduced"`` without ``payload`` and ``tokens_per_rank``. `DeepEP` and `HybridEP` are such;
    libraries with a dispatch and a combine fit. The package compares neither calls nor gradient modes of ranks: all
    ranks run the same backward passes.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import DispatchedTokens, ExpertParallel, TokenTransport
        >>> class OverBuffer(TokenTransport):
        ...     def connect(self, group, num_experts):
        ...         self.buffer, self.num_experts = make_buffer(group), num_experts
        ...         return self
        ...
        ...     def dispatch(self, tokens, ids, probs):
        ...         return DispatchedTokens(*self.buffer.dispatch(tokens, ids, probs, self.num_experts))
        ...
        ...     def combine(self, rows, handle):
        ...         return self.buffer.combine(rows, handle)
        ...
        ...     def dispatch_again(self, rows, handle):
        ...         return self.buffer.dispatch_cached(rows, handle)
        ...
        ...     def combine_with_probs(self, rows, probs, handle):
        ...         return self.buffer.combine(rows, handle, probs)
        >>> parallel = ExpertParallel(8, combine="reduced", transport=OverBuffer())  # with ranks: group=group
    """

    def check(self, function: str, argument: str, rows: Tensor) -> None:
        """Raise for rows of a dtype or width that it does not send; by default it sends all.

        Args:
            function: name that begins the message, of `ExpertParallel`.
            argument: the name of its argument.
            rows: tokens, or expert outputs.
        """

    @abc.abstractmethod
    def dispatch(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> DispatchedTokens:
        """Send each token once to each rank that has one of its experts.

        Args:
            tokens: [T, d], contiguous.
            ids: int64 [T, K], contiguous; -1 for slots without an expert.
            probs: float32 [T, K], contiguous.
        """

    @abc.abstractmethod
    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return [T, d], the sums of each token's rows of all ranks.

        Args:
            rows: [R, d] in the order of the received tokens.
            handle: from `dispatch`.
        """

    @abc.abstractmethod
    def dispatch_again(self, rows: Tensor, handle: Any) -> Tensor:
        """Return [R, d]: rows [T, d] of the tokens, sent on the route of `dispatch`; the gradient of `combine`."""

    @abc.abstractmethod
    def combine_with_probs(self, rows: Tensor, probs: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        """Return `combine` of the rows, and of ``probs`` float32 [R, J] as [T, K]; the gradient of `dispatch`.

        Element [t, k] of the latter is the gradient of that probability: that of the one received element which
        `dispatch` filled with it, and 0 if the id was -1.
        """


class CheckedLines(LineTransport):
    """A user's transport of lines, whose results are checked."""

    def __init__(self, transport: LineTransport) -> None:
        self._transport = transport

    def exchange(self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Any) -> Tensor:
        lines = dense(lines.detach())
        made = self._transport.exchange(lines, sent, received, step)
        return self._checked("transport.exchange", made, lines, received)

    def start_exchange(
        self, lines: Tensor, sent: Sequence[int], received: Sequence[int], step: Any
    ) -> Callable[[], Tensor]:
        lines = dense(lines.detach())
        end = self._transport.start_exchange(lines, sent, received, step)
        if not callable(end):
            _checks.bad_type(_NAME, "the result of transport.start_exchange", "a function", type(end).__name__)
        return lambda: self._checked("the function of transport.start_exchange", end(), lines, received)

    def _checked(self, function: str, made: Any, lines: Tensor, received: Sequence[int]) -> Tensor:
        shape = [sum(received), *lines.shape[1:]]
        return _checks.tensor(_NAME, f"the result of {function}", made, (lines.dtype,), shape)

    def exchange_numbers(self, numbers: Tensor, step: Any) -> Tensor:
        made = self._transport.exchange_numbers(numbers, step)
        _checks.tensor(_NAME, "the result of transport.exchange_numbers", made, (paddle.int32,), numbers.shape)
        return made


def overlaps(transport: LineTransport) -> bool:
    """Return whether exchanges in flight overlap other work, by the transport's own `LineTransport.start_exchange`."""
    if isinstance(transport, CheckedLines):
        transport = transport._transport
    return getattr(type(transport), "start_exchange", None) is not LineTransport.start_exchange


def connected(transport: LineTransport | TokenTransport, group: Group, num_experts: int) -> Any:
    """Return a transport's connection to a group, of the same kind, so that the options checked for it fit.

    Raises:
        TypeError: `connect` returned something else.
    """
    made = transport.connect(group, num_experts)
    kind = TokenTransport if isinstance(transport, TokenTransport) else LineTransport
    _checks.instance(_NAME, "the result of transport.connect", made, kind, f"a {kind.__name__}")
    return made


def transport_option(transport: Any) -> Any:
    """Return an argument ``transport`` in a form that ranks can compare: the class of an object."""
    if isinstance(transport, Transport):
        return f"{type(transport).__module__}.{type(transport).__qualname__}"
    return transport
