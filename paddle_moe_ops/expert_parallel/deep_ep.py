# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine by a module with DeepEP's interface: that of Paddle's wheels for GPUs, or PaddleFleet's.

The code follows the documented interface of these modules and was tested with a fake module on a CPU. It has not run on
a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .protocol import DispatchedTokens, TokenTransport
from .symmetric_buffers import buffers_of

__all__ = ["DeepEP"]

_NAME = "ExpertParallel"
_MODULE = "paddle.distributed.communication.deep_ep"
_COLUMNS = 8  # bfloat16 columns per copy of DeepEP


class DeepEP(TokenTransport):
    """The transport through a module with DeepEP's interface; not yet run on a GPU.

    Tokens are bfloat16 with a multiple of 8 columns. Calls are synchronous (``async_finish=False``), so the current
    stream has their results. The layers of a group share one buffer of the module, which is replaced where rows are
    wider than before.

    Args:
        module: a module whose class ``Buffer`` has the constructor and the methods ``get_dispatch_config``,
            ``get_combine_config``, ``get_dispatch_layout``, ``dispatch`` and ``combine`` of DeepEP, for tensors of
            Paddle, such as ``paddlefleet_ops.deep_ep``. None: ``paddle.distributed.communication.deep_ep``, as with
            ``transport="deepep"``.

    Raises:
        TypeError: the module has no class ``Buffer``.

    Examples:
        >>> from types import SimpleNamespace
        >>> from paddle_moe_ops.expert_parallel import DeepEP, ExpertParallel
        >>> deep_ep = SimpleNamespace(Buffer=object)  # from paddlefleet_ops import deep_ep
        >>> parallel = ExpertParallel(8, combine="reduced", transport=DeepEP(deep_ep))  # with ranks: group=group
    """

    def __init__(self, module: Any = None) -> None:
        if module is not None and not hasattr(module, "Buffer"):
            _checks.bad_type("DeepEP", "module", "a module with a class Buffer, or None", type(module).__name__)
        self._module = module
        self._buffers: Any = None  # the class of buffers
        self._group, self._num_experts = Group(0, -1, [0]), 0
        self._settings: list[Any] = []
        self._shared: Any = None

    def connect(self, group: Group, num_experts: int) -> DeepEP:
        """Return the transport of one layer.

        Raises:
            ValueError: this Paddle has no DeepEP, or DeepEP has no settings for the number of ranks.
        """
        made = DeepEP(self._module)
        try:
            made._buffers = (self._module or importlib.import_module(_MODULE)).Buffer
        except (ImportError, AttributeError) as error:
            expected = f"one other than 'deepep', since {_MODULE} cannot be imported here ({error})"
            _checks.bad_value(_NAME, "transport", expected, "'deepep'")
        made._group, made._num_experts = group, num_experts
        try:
            choices = made._buffers.get_dispatch_config, made._buffers.get_combine_config
            made._settings = [settings_for(group.nranks) for settings_for in choices]
        except AssertionError:
            expected = "of a number of ranks that DeepEP has settings for"
            _checks.bad_value(_NAME, "group", expected, group.nranks)
        made._shared = buffers_of(group)
        return made

    def check(self, function: str, argument: str, rows: Tensor) -> None:
        needs = "with DeepEP"
        if rows.dtype != paddle.bfloat16:
            _checks.bad_type(function, argument, f"of dtype bfloat16 {needs}", _checks.dtype_name(rows.dtype))
        if rows.shape[1] % _COLUMNS:
            _checks.bad_value(function, argument, f"of a multiple of {_COLUMNS} columns {needs}", list(rows.shape))

    def dispatch(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> DispatchedTokens:
        buffer = self._buffer(tokens.shape[1] * tokens.element_size())
        per_rank, per_node, per_expert, goes_there, _ = buffer.get_dispatch_layout(ids, self._num_experts)
        arrived, local_ids, their_probs, _, handle, _ = buffer.dispatch(
            tokens,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_there,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=probs,
        )
        return DispatchedTokens(arrived, local_ids, their_probs, (buffer, handle))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        buffer, route = handle
        return buffer.combine(rows, route)[0]

    def dispatch_again(self, rows: Tensor, handle: Any) -> Tensor:
        buffer, route = handle
        return buffer.dispatch(rows, handle=route)[0]

    def combine_with_probs(self, rows: Tensor, probs: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        buffer, route = handle
        sums, of_probs, _ = buffer.combine(rows, route, topk_weights=probs)
        return sums, of_probs

    def _buffer(self, row_bytes: int) -> Any:
        """Return the buffer of the group, reallocated if rows are wider than before; all ranks call it."""
        size = self._group.nranks
        over_nvlink = max(each.get_nvl_buffer_size_hint(row_bytes, size) for each in self._settings)
        over_rdma = max(each.get_rdma_buffer_size_hint(row_bytes, size) for each in self._settings)
        made = self._shared.find(self._buffers)
        if made is None or made.num_nvl_bytes < over_nvlink or made.num_rdma_bytes < over_rdma:
            made = self._shared.keep(self._buffers, self._buffers(self._group, over_nvlink, over_rdma))
        return made
