# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch and combine for auto parallel, the ``paddle._C_ops.moe_*_auto``, on dense tensors.

Arguments and results are those of Paddle's operators, in Paddle's order. T tokens, E experts, K slots per token, H
hidden size. Distributed tensors raise TypeError, also in `paddle.incubate.nn.functional.moe_gate_dispatch`, which
passes them here. All are deterministic, and raise TypeError or ValueError for arguments of the wrong type, dtype, value
or shape. The host waits as in the functions without ``_auto``.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import known_sizes, public
from ..backends import resolve
from ._incubate_slots import combine, gradients_of_combine, maps_of_dispatch
from .incubate_backward import gradients_of_dispatch

__all__ = [
    "moe_combine_auto",
    "moe_combine_auto_grad",
    "moe_gate_dispatch_auto",
    "moe_gate_dispatch_auto_grad",
]


@public("x", "gate_logits")
def moe_gate_dispatch_auto(
    x: Tensor, gate_logits: Tensor, corr_bias: Tensor | None, k: int, capacity: int, use_pad: bool
) -> tuple[Tensor, ...]:
    """Dispatch as `moe_gate_dispatch` does, into rows by expert or by slot.

    Differentiable in ``x`` and ``gate_logits``. No host synchronisation.

    Args:
        x: [T, H] bfloat16, float16 or float32.
        gate_logits: float32 [T, E].
        corr_bias: float32 [E] or None.
        k: K.
        capacity: rows that an expert gets at most, without ``use_pad`` only.
        use_pad: whether each expert has T*K // E rows, whatever ``capacity`` is. T must be known then.

    Returns:
        y [E, T*K // E, H], without ``use_pad`` [T, K, H]; the rest as in `moe_gate_dispatch`.
    """
    name = "moe_gate_dispatch_auto"
    capacity = _checks.integer(name, "capacity", capacity, 0)
    _checks.flag(name, "use_pad", use_pad)
    _checks.rows(name, "x", x, _checks.SUM_DTYPES, "num_tokens")
    _checks.tensor(name, "gate_logits", gate_logits, (paddle.float32,), [x.shape[0], "num_experts"])
    k = _checks.integer(name, "k", k, 1)
    num_experts = max(gate_logits.shape[1], 1)
    if use_pad:
        if x.shape[0] < 0:
            _checks.bad_value(name, "x", "of a known number of tokens with use_pad", list(x.shape))
        capacity = x.shape[0] * k // num_experts
    maps, results = maps_of_dispatch(name, x, gate_logits, corr_bias, k, capacity, use_pad)
    y = resolve("permute", x).permute(x, None, maps, "all")[0]
    return y.reshape([num_experts, capacity, x.shape[1]] if use_pad else [known_sizes(x)[0], k, x.shape[1]]), *results


@public()
def moe_gate_dispatch_auto_grad(
    combine_weights: Tensor,
    scatter_index: Tensor,
    expert_id: Tensor,
    y_grad: Tensor,
    combine_weights_grad: Tensor,
    k: int,
    capacity: int,
    use_pad: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `moe_gate_dispatch_auto`. Not differentiable itself.

    Args:
        combine_weights: float32 [T, K], the result of the dispatch.
        scatter_index: int32 or int64 [K, T], the result of the dispatch.
        expert_id: int32 or int64 [T, K], the result of the dispatch.
        y_grad: [E, T*K // E, H], without ``use_pad`` [T, K, H]; bfloat16, float16 or float32.
        combine_weights_grad: float32 [T, K].
        k: K.
        capacity: as in the dispatch.
        use_pad: as in the dispatch. Without it E is found as in `moe_gate_dispatch_grad`.

    Returns:
        the gradient of x [T, H], dtype of ``y_grad``, and that of gate_logits, float32 [T, E].
    """
    name = "moe_gate_dispatch_auto_grad"
    capacity = _checks.integer(name, "capacity", capacity, 0)
    k = _checks.integer(name, "k", k, 1)
    of_experts, of_slots = ("num_experts", "rows", "hidden"), ("num_tokens", k, "hidden")
    shape = of_experts if _checks.flag(name, "use_pad", use_pad) else of_slots
    _checks.tensor(name, "y_grad", y_grad, _checks.SUM_DTYPES, shape)
    first, second, hidden = known_sizes(y_grad)
    rows = y_grad.reshape([first * second, hidden])
    return gradients_of_dispatch(
        name,
        combine_weights,
        scatter_index,
        expert_id,
        rows,
        combine_weights_grad,
        k,
        y_grad.shape[1] if use_pad else capacity,
        use_pad,
    )


@public("x", "combine_weights")
def moe_combine_auto(x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    """Sum the rows of each token, weighted, as `moe_combine` does; differentiable in the same arguments.

    Args:
        x: [N, H] bfloat16, float16 or float32.
        combine_weights: [T, K] bfloat16, float16 or float32.
        scatter_index: int32 or int64 [T, K], the row of each slot.

    Returns:
        [T, H], dtype of ``x``.
    """
    return combine("moe_combine_auto", x, combine_weights, scatter_index)


@public()
def moe_combine_auto_grad(
    x: Tensor, combine_weights: Tensor, scatter_index: Tensor, y_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `moe_combine_auto`. Not differentiable itself.

    Args:
        x: [N, H] as in `moe_combine_auto`.
        combine_weights: [T, K].
        scatter_index: [T, K].
        y_grad: [T, H], dtype of ``x``.

    Returns:
        the gradient of ``x`` [N, H]; that of ``combine_weights`` [T, K], for slots of weight 0 as well; int32 zeros
        [T, K], as Paddle returns for ``scatter_index``.
    """
    name = "moe_combine_auto_grad"
    d_x, products = gradients_of_combine(name, x, combine_weights, scatter_index, y_grad, "y_grad")
    return d_x, products.sum(-1).astype(combine_weights.dtype), paddle.zeros_like(scatter_index, "int32")
