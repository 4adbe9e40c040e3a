# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A guard for PyLayers, which Paddle 3.3 lets backward() use once.

Their context is freed by the first backward(), whatever ``retain_graph`` says, and the next one reads it: the process
ends. A hook on the node's outputs runs before that.
"""

from __future__ import annotations

import weakref
from typing import Any

from paddle import Tensor
from paddle.autograd import PyLayer

__all__ = ["OneTurn", "applied_once"]


class _Witness:
    """Lives as long as the context of a node, which is Paddle's own."""


class OneTurn:
    """Knows whether backward() has used a node of a PyLayer."""

    def __init__(self) -> None:
        self._witness: weakref.ref[_Witness] | None = None

    def watch(self, ctx: Any) -> None:
        """Watch the node's context; for its forward function."""
        ctx.witness = _Witness()
        self._witness = weakref.ref(ctx.witness)

    def is_over(self) -> bool:
        """Whether the context is gone."""
        return self._witness is not None and self._witness() is None


def applied_once(
    layer: type[PyLayer], *arguments: Any, function: str = "", where: str = "", instead: str = ""
) -> tuple[Tensor, ...]:
    """The outputs of a PyLayer; a second backward() through them raises.

    Args:
        layer: what to apply. Its forward function takes a `OneTurn` as ``turn``, and lets it watch the context.
        *arguments: the others that it takes.
        function: the name that begins the error text, if there is one.
        where: under which circumstances the graph can be used once, for the text.
        instead: what to do instead, for its end.
    """
    turn, begin = OneTurn(), f"{function}: " if function else ""
    made = layer.apply(*arguments, turn=turn)
    outputs = made if isinstance(made, tuple) else (made,)

    def refuse_another_turn(_: Tensor | None) -> None:
        if turn.is_over():
            raise RuntimeError(
                f"{begin}backward() has used this graph, and {where}nothing can use it again, "
                f"even with retain_graph=True{instead}"
            )

    for output in outputs:
        if not output.stop_gradient:
            output.register_hook(refuse_another_turn)
    return outputs
