# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from .. import _checks
from .._graphs import filled, is_graph_value, public, untraced, without_autocast
from ..backends.autograd import OneShotGuard, applied_once


@public("scores")
def load_balance_loss(
    scores: Tensor, ids: Tensor | None = None, *, mask: Tensor | None = None, load: Tensor | None = None
) -> Tensor:
    """Compute the auxiliary loss against imbalance, 1 at even load: ``E * sum_e share_e * mean_t scores[t, e]``.

    ``share_e`` is the share of all slots that name expert e; it carries no gradient. Formula: Switch Transformer
    (arXiv:2101.03961, equations 4 to 6) for K experts per token. Scores must sum to 1: divide those of a sigmoid by
    their sum over the experts, as DeepSeek-V3 does (arXiv:2412.19437, equations 17 to 20); from logits this is
    ``softmax(log_sigmoid(logits))``, however small the sigmoids are. Scores [B, S, E] give the loss of each sequence,
    averaged (complementary sequence-wise loss, same equations). Deterministic; no host synchronisation.

    Args:
        scores: scores of the router, [T, E] or [B, S, E], bfloat16, float16 or float32, differentiable.
        ids: chosen experts, int32 or int64 [T, K] or [B, S, K], -1 for an empty slot. Empty slots and tokens without
            any other slot are not counted. On a CPU the ids are checked. None with ``load``.
        mask: bool [T] or [B, S], False for tokens that do not count, such as padding. None: all tokens count.
        load: slots that name each expert, int32, int64 or float32, [E] or [B, E], in place of ``ids``: that of a
            global batch, for example, summed over ranks or micro-batches.

    Returns:
        scalar, float32; 0 without tokens.

    Raises:
        TypeError: an argument of the wrong type or dtype; neither or both of ``ids`` and ``load``.
        ValueError: an argument of the wrong shape; on a CPU, an id outside [-1, E).

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import load_balance_loss
        >>> scores = paddle.full([4, 2], 0.5)
        >>> load_balance_loss(scores, paddle.to_tensor([[0], [1], [1], [-1]])).item()
        1.0
        >>> load_balance_loss(scores, load=paddle.to_tensor([30, 10])).item()
        1.0
    """
    name = "load_balance_loss"
    _checks.instance(name, "scores", scores, Tensor, "a paddle.Tensor")
    shape: list[Any] = ["B", "S", "E"] if scores.ndim == 3 else ["T", "E"]
    _checks.tensor(name, "scores", scores, _checks.SUM_DTYPES, shape, "[T, E] or [B, S, E]")
    *tokens, num_experts = scores.shape
    if mask is not None:
        _checks.tensor(name, "mask", mask, (paddle.bool,), tokens)
    if (ids is None) == (load is None):
        _checks.bad_type(name, "exactly one of ids and load", "given", "both" if ids is not None else "neither")
    if load is not None:
        _checks.tensor(name, "load", load, (*_checks.ID_DTYPES, paddle.float32), [*tokens[:-1], num_experts])
        return loss_of_load(scores, load, mask)
    ids = _checks.tensor(name, "ids", ids, _checks.ID_DTYPES, [*tokens, "K"])
    if not is_graph_value(ids) and ids.place.is_cpu_place() and ids.size > 0:
        least, most = int(ids.min()), int(ids.max())
        if least < -1 or most >= num_experts:
            _checks.bad_value(name, "ids", f"in [-1, {num_experts})", least if least < -1 else most)
    ids = ids.astype("int64")
    if mask is not None:
        ids = paddle.where(mask.unsqueeze(-1), ids, paddle.full_like(ids, -1))
    load = F.one_hot(ids + 1, num_experts + 1).sum(axis=[-3, -2])[..., 1:]  # the first are empty slots
    return loss_of_load(scores, load, (ids >= 0).any(axis=-1))


def attach_loss(x: Tensor, loss: Tensor, scaler: Any = None) -> Tensor:
    """Return ``x``, whose backward pass starts that of ``loss`` as well, as if the loss were added to the program's.

    So a layer can have a loss of its own where only its output leaves it: in a stage of a pipeline, in a recomputed
    function, in a model whose code stays as it is. The loss gets the gradient 1, so multiply it by its weight, and
    under gradient accumulation divide it by the number of micro-batches. It works in dygraph and under
    paddle.jit.to_static with full_graph=False; leave it out in ``eval()`` mode, so that the layer can be saved. Use
    ``backward()``, or name in `paddle.grad` tensors behind ``x`` and ones behind the loss. Deterministic; no host
    synchronisation, no copy of ``x``.

    Args:
        x: any tensor of floats on the way to the program's loss, such as the output of a `MoELayer`.
        loss: a scalar.
        scaler: the GradScaler of the program's loss, by whose current scale the loss is multiplied. None: no scale.

    Returns:
        a tensor with the values of ``x``, in its memory.

    Raises:
        TypeError: ``x`` or ``loss`` is not a tensor of floats, or is one of a graph; the scaler is not one.
        ValueError: the loss has more than one element.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import MoELayer, attach_loss
        >>> class Block(paddle.nn.Layer):  # of a pipeline
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.moe = MoELayer(64, 32, num_experts=8, topk=2)
        ...
        ...     def forward(self, x):
        ...         out = x + self.moe(x)
        ...         return attach_loss(out, 1e-3 * self.moe.aux_loss) if self.training else out
        >>> x = paddle.randn([16, 64])
        >>> x.stop_gradient = False
        >>> Block()(x).square().mean().backward()
    """
    return untraced(_attached, x, loss, scaler)


def _attached(x: Tensor, loss: Tensor, scaler: Any) -> Tensor:
    name = "attach_loss"
    for argument, value in {"x": x, "loss": loss}.items():
        _checks.of_dygraph(name, argument, value)
        _checks.instance(name, argument, value, Tensor, "a paddle.Tensor")
        _checks.tensor(name, argument, value, (*_checks.SUM_DTYPES, paddle.float64), value.shape)
    if loss.size != 1:
        _checks.bad_value(name, "loss", "a scalar", f"one of shape {list(loss.shape)}")
    if scaler is not None and not hasattr(scaler, "_scale"):
        _checks.bad_type(name, "scaler", "a GradScaler or None", type(scaler).__name__)
    return x if loss.stop_gradient else applied_once(_WithLoss, x, loss, scaler, function=name)[0]


class _WithLoss(PyLayer):
    """The identity of its first input; in the backward pass the second input gets the scale as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scaler: Any, *, guard: OneShotGuard) -> Tensor:
        guard.watch(ctx)
        ctx.of_loss, ctx.scaler, ctx.goes_on = (list(loss.shape), loss.dtype), scaler, not x.stop_gradient
        return x.view(x.shape) if x.size > 0 else x.clone()  # Paddle has no view of a tensor without elements

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor]:
        shape, dtype = ctx.of_loss
        is_scaled = ctx.scaler is not None and ctx.scaler.is_enable()
        d_loss = ctx.scaler._scale.astype(dtype).reshape(shape) if is_scaled else filled(shape, 1, dtype, like=d_out)
        return d_out if ctx.goes_on else None, d_loss


@public("scores")
def loss_of_load(scores: Tensor, load: Tensor, mask: Tensor | None) -> Tensor:
    """`load_balance_loss` of each expert's number of slots.

    Args:
        scores: scores of the router, [T, E] or [B, S, E].
        load: slots that name each expert, [E] or [B, E].
        mask: bool [T] or [B, S], True for tokens that count; None: all.
    """
    with without_autocast():
        load = load.astype("float32")
        share = load / load.sum(axis=-1, keepdim=True).clip(min=1.0)
        loss = scores.shape[-1] * (share * _mean(scores.astype("float32"), mask)).sum(axis=-1)
        return loss if loss.ndim == 0 else _mean(loss, None)


@public("scores", "logits")
def normalised(scores: Tensor, logits: Tensor, is_sigmoid: bool) -> Tensor:
    """Scores that sum to 1: those of a softmax, or sigmoids divided by their sum, however small."""
    if not is_sigmoid:
        return scores
    with without_autocast():
        return F.softmax(F.log_sigmoid(logits.astype("float32")), axis=-1)


@public("logits")
def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the auxiliary loss against large logits: the mean over tokens of ``logsumexp(logits)**2``.

    Formula: ST-MoE (arXiv:2202.08906, equation 5). Deterministic; no host synchronisation.

    Args:
        logits: logits of the router, [T, E], bfloat16, float16 or float32, differentiable.
        mask: bool [T], False for tokens that do not count, such as padding. None: all tokens count.

    Returns:
        scalar, float32; 0 without tokens.

    Raises:
        TypeError: logits or mask is not a tensor of these dtypes.
        ValueError: logits is not [T, E], or mask not [T].

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import router_z_loss
        >>> router_z_loss(paddle.zeros([3, 1])).item()
        0.0
    """
    _checks.tensor("router_z_loss", "logits", logits, _checks.SUM_DTYPES, ["T", "E"])
    if mask is not None:
        _checks.tensor("router_z_loss", "mask", mask, (paddle.bool,), [logits.shape[0]])
    with without_autocast():
        return _mean(paddle.logsumexp(logits.astype("float32"), axis=-1).square(), mask)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over tokens, 0 without any: along the axis before the last one, or along the only one."""
    axis = max(values.ndim - 2, 0)
    if mask is not None:
        counts = mask.astype("float32")
        count = counts.sum(axis=-1, keepdim=axis > 0).clip(min=1.0)
        if 0 not in values.shape:  # Paddle's backward pass of where fails if recompute by hooks saved no elements
            counted = mask if values.ndim == mask.ndim else mask.unsqueeze(-1)
            values = paddle.where(counted, values, paddle.zeros_like(values))
        return values.sum(axis=axis) / count
    if values.shape[axis] >= 0:
        return values.sum(axis=axis) / max(values.shape[axis], 1)
    return values.sum(axis=axis) / paddle.shape(values)[axis].clip(min=1).astype("float32")
