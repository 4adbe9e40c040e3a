# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle on the CPU: our public functions, and plain operators that do the same job.

Both allocate their outputs in the call, as all of Paddle does. The plain forms are the fastest that were found among
gather, index_select, index_add, add_n, sum and bmm; on the CPU most of these refuse bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.utils.dlpack import from_dlpack

import paddle_moe_ops
from paddle_moe_ops.backends.arrays import to_numpy

from .cpu_arrays import BFLOAT16, FLOAT8, ArrayInputs
from .device import Body, Implementation, Outputs, Unsupported
from .operators import Library, implementations

__all__ = ["PaddleInputs", "PlainGradient", "gradients", "paddle_implementations"]

_VIEWS = {BFLOAT16: (np.int16, "bfloat16"), FLOAT8: (np.int8, "float8_e4m3fn")}


def paddle_implementations() -> list[Implementation]:
    return [each.over(PaddleInputs, to_numpy) for each in implementations(Library.PADDLE, paddle)]


def as_tensor(array: NDArray) -> Tensor:
    """A tensor over the array's memory."""
    carrier, dtype = _VIEWS.get(array.dtype, (array.dtype, None))
    tensor = from_dlpack(array.view(carrier))
    return tensor if dtype is None else tensor.view(dtype)


class PaddleInputs:
    """The inputs of a problem as tensors over the arrays' memory."""

    def __init__(self, inputs: ArrayInputs) -> None:
        if inputs.problem.case.capacity:
            raise Unsupported("a buffer larger than the rows")
        self.problem = inputs.problem
        self._arrays = inputs

    def __getattr__(self, name: str) -> Tensor:
        """A tensor, which is then kept."""
        tensor = as_tensor(getattr(self._arrays, name))
        setattr(self, name, tensor)
        return tensor

    @cached_property
    def plan(self) -> Any:
        return self.route()

    @cached_property
    def has_gaps(self) -> bool:
        """True if there are unassigned slots."""
        return bool((self.problem.ids < 0).any())

    def route(self) -> Any:
        plan = self.problem.plan
        return paddle_moe_ops.route(
            self.ids, self.probs, num_experts=plan.num_experts, padding_alignment=plan.padding_alignment
        )

    def leaf(self, name: str, gradient: bool = True) -> Tensor:
        """An input that gradients are asked of."""
        tensor = as_tensor(getattr(self._arrays, name)).detach()
        tensor.stop_gradient = not gradient
        return tensor


class _Arrives(paddle.autograd.PyLayer):
    """Hands over a gradient as the next operator does. Paddle first copies one that is given to `paddle.grad`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, d_out: Tensor) -> Tensor:
        ctx.d_out = d_out
        return paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.d_out, None


def gradients(out: Tensor, d_out: Tensor, leaves: dict[str, Tensor]) -> Body:
    """The gradient alone: the forward call has been made, and its graph is kept."""
    end = _Arrives.apply(out, d_out)

    def run() -> Outputs:
        return dict(zip(leaves, paddle.grad(end, list(leaves.values()), retain_graph=True), strict=True))

    return Body(run)


class PlainGradient(paddle.autograd.PyLayer):
    """Plain operators as the gradient of a function that is never computed, so that they are called as ours are."""

    @staticmethod
    def forward(ctx: Any, gradient: Callable[[Tensor], Any], like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.gradient = gradient
        return paddle.empty_like(like)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return None, *ctx.gradient(d_out)
