# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by the DeepEP module of Paddle's wheels for GPUs.

The code follows the documented interface of that module and was tested with a fake module on a CPU. It has not run on a
GPU.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import dense, filled
from ..backends.autograd import Call, Gradients, connect, first_order_only, linear
from ..backends.base import Tensors
from ..routing import Plan
from .agreement import Step
from .alltoall import local_plan
from .symmetric_buffers import buffers_of

__all__ = ["DeepEP"]

_NAME = "ExpertParallel"
_DISPATCH, _COMBINE = f"{_NAME}.dispatch", f"{_NAME}.combine"
_MODULE = "paddle.distributed.communication.deep_ep"
_COLUMNS = 8  # bfloat16 columns per copy of DeepEP


class ArrivedTokens(NamedTuple):
    """The R tokens that a rank received.

    Attributes:
        tokens: bfloat16 [R, d].
        plan: the local plan of the R tokens.
        probs: float32 [R, K].
        dropped: 0-D int32, zero.
        trip: the argument of `DeepEP.combine`.
    """

    tokens: Tensor
    plan: Plan
    probs: Tensor
    dropped: Tensor
    trip: _Trip


class _Trip(NamedTuple):
    """The route of dispatched tokens, which DeepEP can repeat in both directions."""

    buffer: Any
    handle: Any

    def there(self, rows: Tensor) -> Tensor:
        """Send a row of each token to the ranks of its experts."""
        return self.buffer.dispatch(dense(rows), handle=self.handle)[0]

    def back(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows of all ranks."""
        return self.buffer.combine(dense(rows), self.handle)[0]

    def back_with_probs(self, rows: Tensor, probs: Tensor) -> Tensors:
        """Return the same, and the sums of the gradients of their probabilities."""
        sums, of_probs, _ = self.buffer.combine(dense(rows), self.handle, topk_weights=dense(probs))
        return sums, of_probs


class _Dispatch(Call):
    """A call that sends tokens and probabilities; with one node, all ranks send the gradients in one order."""

    function = _DISPATCH

    def __init__(self, x: Tensor, ids: Tensor, probs: Tensor, num_experts: int, buffer: Any) -> None:
        super().__init__(None, x, probs)
        self.given: Tensors = (dense(x.detach()), ids, dense(probs.detach()))
        self.num_experts, self.buffer = num_experts, buffer
        self.ids = ids
        self.trip: Any = None

    def run(self) -> Tensors:
        (x, ids, probs), self.given = self.given, ()
        ids = dense(ids.astype("int64"))
        per_rank, per_node, per_expert, goes_there, _ = self.buffer.get_dispatch_layout(ids, self.num_experts)
        tokens, local_ids, their_probs, _, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_there,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=probs,
        )
        self.ids, self.trip = local_ids.astype("int32"), _Trip(self.buffer, handle)
        return tokens, their_probs

    def differentiate(self, *gradients: Tensor) -> Gradients:
        return first_order_only(self, self.trip.back_with_probs(*gradients), *gradients)


class DeepEP:
    """The exchanges of one group through DeepEP.

    Args:
        group: the ranks; each creates this object.
        num_experts: of all ranks.

    Raises:
        ValueError: this Paddle has no DeepEP, or DeepEP has no settings for the number of ranks.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        try:
            self._buffers: Any = importlib.import_module(_MODULE).Buffer
        except (ImportError, AttributeError) as error:
            expected = f"one other than 'deepep', since {_MODULE} cannot be imported here ({error})"
            _checks.bad_value(_NAME, "transport", expected, "'deepep'")
        self._group, self._num_experts = group, num_experts
        try:
            choices = self._buffers.get_dispatch_config, self._buffers.get_combine_config
            self._settings = [settings_for(group.nranks) for settings_for in choices]
        except AssertionError:
            expected = "of a number of ranks that DeepEP has settings for, with transport='deepep'"
            _checks.bad_value(_NAME, "group", expected, group.nranks)
        self._shared = buffers_of(group)

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor, step: Step) -> ArrivedTokens:
        """Send tokens to the ranks of their experts; differentiable in x and probs.

        Args:
            x: bfloat16 [T, d].
            ids: [T, K], -1 for slots that do not count.
            probs: float32 [T, K].
            step: unused: DeepEP exchanges no calls.
        """
        needs = "for transport='deepep'"
        if x.dtype != paddle.bfloat16:
            _checks.bad_type(_DISPATCH, "x", f"of dtype bfloat16 {needs}", _checks.dtype_name(x.dtype))
        if x.shape[1] % _COLUMNS:
            _checks.bad_value(_DISPATCH, "x", f"of a multiple of {_COLUMNS} columns {needs}", list(x.shape))
        call = _Dispatch(x, ids, probs, self._num_experts, self._buffer(x.shape[1] * x.element_size()))
        tokens, their_probs = connect(call, x, probs)
        plan = local_plan(call.ids, self._num_experts // self._group.nranks)
        return ArrivedTokens(tokens, plan, their_probs, filled([], 0, "int32", like=x), call.trip)

    def combine(self, out: Tensor, trip: _Trip) -> Tensor:
        """Return the sums of each token's rows of all ranks; differentiable.

        Args:
            out: bfloat16 [R, d] in the order of the received tokens.
            trip: from `dispatch`.
        """
        if out.dtype != paddle.bfloat16:
            given = _checks.dtype_name(out.dtype)
            _checks.bad_type(_COMBINE, "out", "of dtype bfloat16 for transport='deepep'", given)
        return linear(_COMBINE, None, out, trip.back, trip.there)

    def _buffer(self, row_bytes: int) -> Any:
        """Return the buffer of the group, reallocated if rows are wider than before; all ranks call it."""
        size = self._group.nranks
        over_nvlink = max(each.get_nvl_buffer_size_hint(row_bytes, size) for each in self._settings)
        over_rdma = max(each.get_rdma_buffer_size_hint(row_bytes, size) for each in self._settings)
        made = self._shared.find(DeepEP)
        if made is None or made.num_nvl_bytes < over_nvlink or made.num_rdma_bytes < over_rdma:
            made = self._shared.keep(DeepEP, self._buffers(self._group, over_nvlink, over_rdma))
        return made
