# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Memory layout of the parameters of experts that are separate layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle import Tensor, nn

from .. import _checks
from .._matrices import listed
from ..backends import lay_side_by_side as lay
from ..backends import shared_memory

__all__ = ["lay_side_by_side"]

_NAME = "lay_side_by_side"


def lay_side_by_side(parameters: Sequence[Tensor] | nn.ParameterList) -> None:
    """Put the parameters of E experts in one allocation, back to back.

    `moe_mlp` and `grouped_gemm` then use a list of these parameters on a GPU without copying them to one tensor first.

    Only the memory changes. The parameters stay the same objects with the same names, values, gradients and optimizer
    states, and checkpoints are saved and loaded as before. Call it once, after the layers are on their device and in
    their dtype. Optimizers, `set_value` and `set_state_dict` write to this memory. A change of the dtype or the device,
    and a deep copy, move parameters to memory of their own. Results stay correct, but lists are copied in each call
    until this function is called again.

    Not differentiable. Deterministic. No host synchronisation. While it runs, the parameters take twice their memory.
    No speedup on a CPU, which does not copy lists.

    Args:
        parameters: E tensors of one shape, of any number of dimensions, bfloat16, float16 or float32, on one device, in
            the order of the experts. Each has memory of its own: parameters in a sharding optimizer's or another fused
            buffer cannot move.

    Raises:
        TypeError: not a list of tensors, or tensors of other dtypes than the first.
        ValueError: an empty list, tensors of other shapes or places than the first, a tensor that is in the list twice,
            or one whose memory is part of a larger allocation.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_mlp, route
        >>> from paddle_moe_ops.nn import SwiGLU, lay_side_by_side
        >>> experts = paddle.nn.LayerList([SwiGLU(64, 32) for _ in range(8)])
        >>> gate_up, down = [each.gate_up for each in experts], [each.down for each in experts]
        >>> for matrices in (gate_up, down):
        ...     lay_side_by_side(matrices)
        >>> plan = route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        >>> moe_mlp(paddle.randn([16, 64]), plan, None, gate_up, down).shape
        [16, 64]
    """
    parameters = listed(parameters)
    if not isinstance(parameters, Sequence) or isinstance(parameters, str):
        expected = "a list or a paddle.nn.ParameterList of tensors"
        _checks.bad_type(_NAME, "parameters", expected, type(parameters).__name__)
    if not parameters:
        _checks.bad_value(_NAME, "parameters", "a list of one tensor for each expert", "0 of them")
    named: dict[str, Any] = {f"parameters[{index}]": each for index, each in enumerate(parameters)}
    dtypes: Sequence[Any] = _checks.SUM_DTYPES
    shape, seen = None, set()
    for name, each in named.items():
        if not isinstance(each, Tensor):
            _checks.bad_type(_NAME, name, "a paddle.Tensor", type(each).__name__)
        _checks.tensor(_NAME, name, each, dtypes, each.shape if shape is None else shape)
        dtypes, shape = (each.dtype,), each.shape
        if id(each) in seen:
            _checks.bad_value(_NAME, name, "a tensor that is not in the list before", "one that is")
        seen.add(id(each))
    _checks.same_place(_NAME, **named)
    for name, each in named.items():
        problem = shared_memory(each)
        if problem is not None:
            _checks.bad_value(_NAME, name, "a tensor with memory of its own", problem)
    lay(parameters)
