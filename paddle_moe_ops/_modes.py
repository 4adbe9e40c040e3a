# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's two modes: an error that names a dygraph tensor in static mode, or a value of a static graph in dygraph.

Operators of C++ end the process if they are added to a program with a dygraph tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.base.framework import global_var as modes

__all__ = ["GraphValue", "mixed_modes", "modes"]

GraphValue = paddle.pir.Value  # stands for a tensor of a static graph
_IN_STATIC_MODE = "a value of the static graph in static mode (paddle.disable_static() ends it)", "a tensor of dygraph"
_IN_DYGRAPH = "a paddle.Tensor in dygraph", "a value of a static graph"


def mixed_modes(
    function: str, names: Sequence[str], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> TypeError | None:
    """The error of the first tensor that is of the other mode than Paddle, or None if there is none.

    Args:
        function: the name that begins the message.
        names: of the positional arguments; further arguments are items of the last one.
        arguments: the positional arguments.
        keywords: the others.
    """
    last = len(names) - 1
    extra = [(f"{names[last]}[{index}]", each) for index, each in enumerate(arguments[len(names) :], 1)]
    pairs = [*zip(names, arguments, strict=False), *extra, *keywords.items()]
    is_static = modes._dygraph_tracer_ is None
    kind: type = Tensor if is_static else GraphValue
    for name, each in _tensors_of(pairs):
        if isinstance(each, kind):
            expected, given = _IN_STATIC_MODE if is_static else _IN_DYGRAPH
            return TypeError(f"{function}: {name} must be {expected}, but got {given}")
    return None


def _tensors_of(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each value that is no container, with its name in messages."""
    for name, value in pairs:
        if isinstance(value, (list, tuple, nn.ParameterList)):
            fields = getattr(value, "_fields", None)
            labels = (
                [f"[{index}]" for index in range(len(value))] if fields is None else [f".{each}" for each in fields]
            )
            yield from _tensors_of((name + label, each) for label, each in zip(labels, value, strict=True))
        elif isinstance(value, dict):
            yield from _tensors_of((f"{name}[{key!r}]", each) for key, each in value.items())
        else:
            yield name, value
