# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for float16 training with expert parallelism."""

from __future__ import annotations

import inspect
from typing import Any

import paddle
from paddle import Tensor, _legacy_C_ops
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.utils.hybrid_parallel_util import obtain_optimizer_parameters_list

from .. import _checks
from ..backends.deferred import refuse_pending
from .agreement import group_of
from .transports import DEFAULT_TIMEOUT_S, Rendezvous, checked_timeout

__all__ = ["GradScaler"]

_NAME = "GradScaler"


class GradScaler(paddle.amp.GradScaler):
    """`paddle.amp.GradScaler` for a model whose experts are on several ranks.

    A gradient of an expert is on one rank, so only that rank finds an infinity in it. With Paddle's class that rank
    alone skips the step and lowers its scale. Then other parameters differ between ranks, and so do the scales of
    gradients that `average_gradients` adds up. With this class all ranks skip the step, and have the same scale.

    Gradients in ``main_grad`` are divided and checked, too, which Paddle's class leaves alone. Every rank must call
    `unscale_`, `step`, `minimize` and `load_state_dict` alike. One all-reduce of three numbers for each optimizer and
    step, for which the host waits. On a CPU it has no effect, as Paddle's class has none.

    Args:
        *arguments: those of `paddle.amp.GradScaler`.
        group: the ranks that skip a step together; None: all ranks, which is right if they train one model.
        timeout: seconds that a rank waits for the others.
        **options: those of `paddle.amp.GradScaler`.

    Raises:
        TypeError: ``group`` is not a group of `paddle.distributed`; ``timeout``, a scale or a ratio is not a number.
        ValueError: this rank does not belong to the group; ``timeout`` is out of range; a scale or a ratio is not above
            0.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import GradScaler, average_gradients
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model, scaler = MoELayer(64, 32, num_experts=8, topk=2), GradScaler()  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> scaler.scale(model(paddle.randn([16, 64])).square().mean()).backward()
        >>> average_gradients(model.parameters())
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    _found_inf: Tensor  # of Paddle's class: one bool, which decides on the step
    _scale: Tensor  # [1]

    def __init__(
        self, *arguments: Any, group: Group | None = None, timeout: float = DEFAULT_TIMEOUT_S, **options: Any
    ) -> None:
        given = inspect.signature(paddle.amp.GradScaler.__init__).bind(self, *arguments, **options).arguments
        for name in ("init_loss_scaling", "incr_ratio", "decr_ratio"):
            if _checks.number(_NAME, name, given.get(name, 1.0)) <= 0:
                _checks.bad_value(_NAME, name, "above 0", given[name])
        super().__init__(*arguments, **options)
        self._group, self._seconds = group_of(_NAME, group), checked_timeout(_NAME, timeout)

    def __repr__(self) -> str:
        state = "enabled" if self.is_enable() else "disabled"
        return f"GradScaler({state}, rank={self._group.rank} of {self._group.nranks})"

    def unscale_(self, optimizer: paddle.optimizer.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, once before its step.

        Raises:
            ValueError: on every rank, if their scales differ, as after `load_state_dict` on some of them.
            RuntimeError: another rank did not arrive in time; the message names it.
        """
        self._unscale(optimizer)

    def _unscale(self, optimizer: paddle.optimizer.Optimizer) -> None:  # called by Paddle's `step` and `minimize`
        refuse_pending(_NAME, getattr(optimizer, "_parameter_list", None) or ())
        if not self.is_enable():
            return
        if getattr(optimizer, "comm_overlap", False):  # other ranks may add to a gradient that is divided here
            _checks.bad_value(_NAME, "comm_overlap of the optimizer", "False with loss scaling", True)
        if hasattr(optimizer, "update_slice"):  # sharding of stage 3 completes the gradients of its parts
            optimizer.update_slice()
            optimizer.update_scaler = True
        super()._unscale(optimizer)
        parameters = obtain_optimizer_parameters_list(optimizer)
        main = [each.main_grad for each in parameters if getattr(each, "main_grad", None) is not None]
        if main:  # Paddle's method divides `grad` alone
            found_inf = paddle.zeros_like(self._found_inf)
            _legacy_C_ops.check_finite_and_unscale(main, self._scale, main, found_inf)
            self._found_inf = paddle.logical_or(self._found_inf, found_inf)
        if self._group.nranks == 1:
            return
        scale = self._scale.reshape([1])
        numbers = paddle.concat([self._found_inf.astype("float32"), scale, -scale])
        Rendezvous(self._group, self._seconds).largest(_NAME, numbers)
        found, most, least = numbers.tolist()
        if most != -least:
            expected = "the same on all ranks, as after load_state_dict on each of them"
            _checks.bad_value(_NAME, "the scale", expected, f"{-least:g} to {most:g}")
        self._found_inf = paddle.full_like(self._found_inf, found > 0)

    def _update(self) -> None:  # called by Paddle's `update` and `minimize`
        # When Paddle 3.3.1 lowers the scale it prints float(scale), which NumPy 2.4 refuses for [1] but not for [].
        if self.is_enable():
            self._scale = self._scale.reshape([])
            super()._update()
            self._scale = self._scale.reshape([1])
