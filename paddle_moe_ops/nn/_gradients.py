# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The options of experts about the gradients of their matrices, in dygraph and in graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

from paddle import Tensor

from .. import _checks
from .._graphs import GraphValue
from ..backends.deferred import Deferral, deferral_of, detached


class GradientOptions(NamedTuple):
    """The options of `moe_mlp` about the gradients of matrices, False for a graph, which has neither."""

    accumulate: bool
    defer_dw: bool | str


PLAIN_GRADIENTS = GradientOptions(False, False)


def operand_of(how: GradientOptions, matrices: Tensor) -> tuple[Any, Deferral | None]:
    """The operand of a GEMM, and the deferral of its gradient or None."""
    accumulate, defer_dw = how  # a plain tuple where bytecode is traced
    deferral = deferral_of(defer_dw, accumulate, matrices)
    return (matrices, None) if deferral is None else (detached(matrices), deferral.of(0))


def gradient_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in GradientOptions._fields}


def gradients_of_call(name: str, rows: Tensor, training: bool, **options: Any) -> GradientOptions:
    """The options for a call; those that a graph cannot have raise there in ``train()`` mode."""
    if not isinstance(rows, GraphValue):
        return GradientOptions(**options)
    for option, value in options.items():
        if value and training:
            _checks.bad_value(name, option, "False, or the layer in eval() mode, in a static graph", repr(value))
    return GradientOptions(False, False)
