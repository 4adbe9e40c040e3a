# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The shared expert: a gated MLP for every token."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn
from paddle.jit import not_to_static

from .. import _checks
from .._activations import swiglu
from .._graphs import in_float32, of_shape, public, ready_for_matmul
from ._common import described, sizes, weight


class SwiGLU(nn.Layer):
    """Gated MLP ``(silu(x W_gate) * x W_up) W_down`` without biases; as a shared expert it sees every token.

    Deterministic as far as Paddle's matmul is. No host synchronisation.

    Args:
        hidden_size: H.
        intermediate_size: I.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size below 1.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = sizes(
            "SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        self.gate_up = weight(self, [self.hidden_size, 2 * self.intermediate_size], fan_in=self.hidden_size)
        self.down = weight(self, [self.intermediate_size, self.hidden_size], fan_in=self.intermediate_size)

    @not_to_static
    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [..., H]; the result has the same shape and dtype. Differentiable in x and the weights.

        Raises:
            TypeError: x is not a tensor of the weights' dtype.
            ValueError: the last dimension of x is not H.
        """
        return _swiglu_mlp(x, self.gate_up, self.down, self.hidden_size, self.intermediate_size)

    def extra_repr(self) -> str:
        """Return what ``print(layer)`` says of it."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        return described(self.gate_up, **sizes)


@public("x", "gate_up", "down")
def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, hidden: int, intermediate: int) -> Tensor:
    gate_up, down = of_shape(gate_up, [hidden, 2 * intermediate]), of_shape(down, [intermediate, hidden])
    rank = max(getattr(x, "ndim", 1), 1)
    _checks.operand("SwiGLU", "x", x, gate_up, [*["size"] * (rank - 1), hidden], f"[..., {hidden}]")
    return in_float32(_multiply_twice, x, gate_up, down)


def _multiply_twice(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return paddle.matmul(swiglu(paddle.matmul(ready_for_matmul(x, gate_up), gate_up)), down)
