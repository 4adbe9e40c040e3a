# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How public functions enter a static graph, and what stands for a tensor there."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import paddle
from paddle.jit.marker import unified

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def traceable(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Mark a function that works on tensors and on graph values alike.

    paddle.jit.to_static then calls it while it builds the program instead of rewriting its source, so that the checks
    run once, at build time, where shapes are known.
    """
    return unified(function)


def is_graph_value(value: object) -> bool:
    """Whether the value stands for a tensor of a static graph."""
    return isinstance(value, paddle.pir.Value)
