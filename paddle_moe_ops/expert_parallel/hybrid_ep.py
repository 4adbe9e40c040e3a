# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by a module with the interface of HybridEP, the branch hybrid-ep of DeepEP.

The code follows the public interface of the class HybridEPBuffer and was tested with a fake module on a CPU. It has not
run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import filled
from .protocol import DispatchedTokens, TokenTransport
from .symmetric_buffers import buffers_of

__all__ = ["HybridEP"]

_NAME = "ExpertParallel"
_LOCAL_MAP = 4  # place of the map of local experts in HybridEP's handle


class _Route(NamedTuple):
    """The route of dispatched tokens.

    Attributes:
        buffer: the buffer.
        handle: of its dispatch.
        ids: int64 [T, K], of the sent tokens.
        received: R.
        columns: experts of all ranks that share an NVLink domain with this one.
        first: the column of this rank's first expert.
    """

    buffer: Any
    handle: Any
    ids: Tensor
    received: int
    columns: int
    first: int


class HybridEP(TokenTransport):
    """The transport through a module with HybridEP's interface; not yet run on a GPU.

    Tokens are bfloat16. HybridEP sends the same number of tokens from every rank, so each rank's are padded to
    ``max_tokens`` by tokens without an expert. The layers of a group share a buffer for each width and number of
    experts.

    Args:
        module: a module whose class ``HybridEPBuffer`` has the constructor and the methods ``dispatch`` and ``combine``
            of DeepEP's branch hybrid-ep, for tensors of Paddle, such as ``paddlefleet_ops.hybrid_ep``.
        max_tokens: the largest number of tokens of a rank.

    Raises:
        TypeError: the module has no class ``HybridEPBuffer``; ``max_tokens`` is not an int.
        ValueError: ``max_tokens`` is below 1.

    Examples:
        >>> from types import SimpleNamespace
        >>> from paddle_moe_ops.expert_parallel import ExpertParallel, HybridEP
        >>> hybrid_ep = SimpleNamespace(HybridEPBuffer=object)  # from paddlefleet_ops import hybrid_ep
        >>> transport = HybridEP(hybrid_ep, max_tokens=4096)
        >>> parallel = ExpertParallel(8, combine="reduced", transport=transport)  # with ranks: group=group
    """

    def __init__(self, module: Any, max_tokens: int) -> None:
        if not hasattr(module, "HybridEPBuffer"):
            _checks.bad_type("HybridEP", "module", "a module with a class HybridEPBuffer", type(module).__name__)
        self._module = module
        self.max_tokens = _checks.integer("HybridEP", "max_tokens", max_tokens, 1)
        self._group, self._num_experts = Group(0, -1, [0]), 0
        self._shared: Any = None  # the buffers of the group

    def connect(self, group: Group, num_experts: int) -> HybridEP:
        """Return the transport of one layer."""
        made = HybridEP(self._module, self.max_tokens)
        made._group, made._num_experts, made._shared = group, num_experts, buffers_of(group)
        return made

    def check(self, function: str, argument: str, rows: Tensor) -> None:
        if rows.dtype != paddle.bfloat16:
            _checks.bad_type(function, argument, "of dtype bfloat16 with HybridEP", _checks.dtype_name(rows.dtype))

    def dispatch(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> DispatchedTokens:
        if tokens.shape[0] > self.max_tokens:
            expected = f"of at most {self.max_tokens} tokens, HybridEP's max_tokens"
            _checks.bad_value(f"{_NAME}.dispatch", "x", expected, tokens.shape[0])
        buffer, local = self._buffer(tokens.shape[1]), self._num_experts // self._group.nranks
        routing_map, of_experts = self._maps(ids, probs)
        arrived, their_probs, _, handle = buffer.dispatch(
            hidden=self._padded(tokens), routing_map=routing_map, probs=of_experts
        )
        received, columns = arrived.shape[0], their_probs.shape[1]
        first = self._group.rank * local % columns
        is_here = handle[_LOCAL_MAP][:received]
        experts = paddle.arange(local, dtype="int32").expand([received, local])
        local_ids = paddle.where(is_here, experts, paddle.full_like(experts, -1))
        theirs = their_probs[:, first : first + local]
        theirs = paddle.where(is_here, theirs, paddle.zeros_like(theirs))
        return DispatchedTokens(arrived, local_ids, theirs, _Route(buffer, handle, ids, received, columns, first))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        sums, _ = handle.buffer.combine(hidden=rows, handle=handle.handle)
        return sums[: handle.ids.shape[0]]

    def dispatch_again(self, rows: Tensor, handle: Any) -> Tensor:
        made = handle.buffer.dispatch(
            hidden=self._padded(rows), handle=handle.handle, num_dispatched_tokens=handle.received
        )
        arrived: Tensor = made[0]
        return arrived

    def combine_with_probs(self, rows: Tensor, probs: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        last = handle.first + probs.shape[1]
        widths = handle.first, handle.columns - last
        before, after = (filled([probs.shape[0], width], 0, "float32", like=probs) for width in widths)
        whole = paddle.concat([each for each in (before, probs, after) if each.shape[1]], axis=1)
        sums, of_experts = handle.buffer.combine(hidden=rows, probs=whole, handle=handle.handle)
        count, is_kept = handle.ids.shape[0], handle.ids >= 0
        picked = paddle.take_along_axis(of_experts[:count], handle.ids.clip(min=0), axis=1, broadcast=False)
        return sums[:count], paddle.where(is_kept, picked, paddle.zeros_like(picked))

    def _maps(self, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each of the padded tokens goes to each expert, and its probability there."""
        rows, count = self.max_tokens, self._num_experts
        more = rows - ids.shape[0]
        column = paddle.where(ids >= 0, ids, paddle.full_like(ids, count))  # slots without an expert share the last one
        if more:
            shape = [more, ids.shape[1]]
            column = paddle.concat([column, filled(shape, count, "int64", like=ids)])
            probs = paddle.concat([probs, filled(shape, 0, "float32", like=probs)])
        empty = filled([rows, count + 1], 0, "float32", like=probs)
        chosen = paddle.put_along_axis(empty, column, paddle.ones_like(probs), 1, broadcast=False)
        weights = paddle.put_along_axis(empty, column, probs, 1, broadcast=False)
        return chosen[:, :count].astype("bool"), weights[:, :count]

    def _padded(self, rows: Tensor) -> Tensor:
        more = self.max_tokens - rows.shape[0]
        return rows if more == 0 else paddle.concat([rows, filled([more, rows.shape[1]], 0, rows.dtype, like=rows)])

    def _buffer(self, width: int) -> Any:
        """Return the buffer for tokens of a width; all ranks call it."""
        made, experts = self._module.HybridEPBuffer, self._num_experts // self._group.nranks
        key = made, width, self.max_tokens, experts
        given = {"hidden_dim": width, "max_num_of_tokens_per_rank": self.max_tokens, "num_local_experts": experts}
        return self._shared.find(key) or self._shared.keep(key, made(group=self._group, **given))
