# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of tensors of this family, and their dequantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from ... import _checks
from ..._graphs import is_graph_value
from ...backends import direct

__all__ = ["GROUP", "dequantized", "dygraph_tensor"]

GROUP = 128


def dygraph_tensor(function: str, argument: str, value: Any, dtypes: Sequence[Any], shape: Sequence[int | str]) -> Any:
    """Check a tensor as `_checks.tensor` does, and that it is no value of a static graph."""
    if is_graph_value(value):
        _checks.bad_type(function, argument, "a paddle.Tensor", "a value of a static graph, which is not supported")
    return _checks.tensor(function, argument, value, dtypes, shape)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 RN(code * scale) of codes [M, N], and scales float32 [M, ceil(N / 128)] or packed int32."""
    return direct("dequantize_1x128", codes, scales, False, paddle.bfloat16.value)[0]
