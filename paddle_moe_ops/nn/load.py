# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The load of a model's experts over its layers, micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor, nn

from .. import _checks
from .._graphs import GraphValue, filled, without_gradients
from ..expert_parallel.agreement import group_of, raising_together
from .layer import MoELayer
from .losses import loss_of_load, normalised

__all__ = ["ExpertLoad"]

_NAME = "ExpertLoad"


class ExpertLoad:
    """The load of the experts of all `MoELayer` of a model, added up over micro-batches and ranks.

    A forward pass in training counts once its gradient arrives at the router's logits. So a pass that is recomputed
    counts once, with either kind of recompute, and so does one whose backward pass runs twice; passes without gradients
    do not count. All layers share one all_reduce. Training is for dygraph; layers in ``eval()`` mode can be traced and
    saved. No host synchronisation beyond that of the all_reduce.

    Args:
        model: a model that contains a `MoELayer`. With pipeline parallelism the layers of this rank's stage.
        group: ranks whose tokens belong to one batch, a group of `paddle.distributed`: all ranks that have these
            layers, also those that share the experts. Every rank constructs the object. None: all ranks, or this
            process alone.

    Raises:
        TypeError: the model is not a `paddle.nn.Layer`, or the group is not a group.
        ValueError: no layer is a `MoELayer`; this rank is not in the group; the ranks have different layers.
        RuntimeError: another rank raised.

    Examples:
        Balance the experts without an auxiliary loss, as DeepSeek-V3 does, with two micro-batches per step:

        >>> import paddle
        >>> from paddle_moe_ops.nn import ExpertLoad, MoELayer
        >>> model = paddle.nn.Sequential(MoELayer(64, 32, num_experts=8, topk=2), MoELayer(64, 32, 8, 2))
        >>> load = ExpertLoad(model)  # with ranks: group=group
        >>> for micro_batch in paddle.randn([2, 16, 64]):
        ...     model(micro_batch).square().mean().backward()
        >>> [int(each.sum()) for each in load.total()]
        [64, 64]
        >>> load.update_correction_biases(rate=1e-3)  # after the optimizer's step
        >>> int(load.total()[0].sum())
        0
    """

    def __init__(self, model: nn.Layer, group: Any = None) -> None:
        self._group = group = group_of(_NAME, group)
        layers: dict[str, MoELayer] = {}
        settings: dict[str, Any] = {}
        with raising_together(_NAME, group, settings):
            _checks.instance(_NAME, "model", model, nn.Layer, "a paddle.nn.Layer")
            layers = {
                name: each for name, each in model.named_sublayers(include_self=True) if isinstance(each, MoELayer)
            }
            if not layers:
                _checks.bad_value(_NAME, "model", "one with a MoELayer", type(model).__name__)
            settings["the layers and their experts"] = [
                (name, each.router.num_experts) for name, each in layers.items()
            ]
        self._layers = list(layers.values())
        self._counts = [LoadCount() for _ in self._layers]
        for layer, count in zip(self._layers, self._counts, strict=True):
            layer._load_count = count

    def total(self) -> list[Tensor]:
        """Return the loads since the last update or `reset`, summed over the ranks: int64 [E] for each layer.

        All ranks call it. Layers are in the order of ``model.sublayers()``. Dropped slots are included.

        Raises:
            RuntimeError: a later `ExpertLoad` counts the layers, or this is a copy.
        """
        return self._over_ranks(self._counted())

    @without_gradients
    def update_correction_biases(self, rate: float = 1e-3) -> None:
        """Call ``router.update_correction_bias(load, rate)`` for each layer with its total load, and `reset`.

        All ranks call it, once per step of the optimizer. Routers without a correction bias are left out.

        Args:
            rate: size of the step.

        Raises:
            TypeError: the rate is not a number.
            ValueError: no router has a correction bias.
            RuntimeError: a later `ExpertLoad` counts the layers, or this is a copy.
        """
        name = f"{_NAME}.update_correction_biases"
        rate = _checks.number(name, "rate", rate)
        if all(each.router.correction_bias is None for each in self._layers):
            _checks.bad_value(name, "the routers", "one with a correction bias at least", "none")
        for layer, load in zip(self._layers, self.total(), strict=True):
            if layer.router.correction_bias is not None:
                layer.router.update_correction_bias(load, rate)
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        for each in self._counts:
            each.load = None

    def aux_losses(self, *, of_step: bool = False) -> Tensor:
        """Return the `load_balance_loss` of each layer's last forward pass with the load of all ranks.

        Experts specialise more if the load is balanced over a large batch (arXiv:2501.11873). The mean of this loss
        over the ranks is the loss of their tokens together: a rank with more tokens has a larger part. Add a multiple
        of its sum to the loss of each rank, and average gradients as usual. Without tokens it is 0. Deterministic.

        All ranks call it after the same forward passes; with pipeline parallelism each rank reads ``layer.aux_loss``
        instead, since the passes of a stage end at different times.

        Args:
            of_step: whether to include in the load the passes counted since the last update or reset, which are the
                earlier micro-batches of a step. Call it before the backward pass, which counts the last pass, too.

        Returns:
            float32 [number of layers], differentiable in the scores of this rank's tokens.

        Raises:
            TypeError: ``of_step`` is not a bool.
            RuntimeError: a layer has run no forward pass, or was last run in a graph; a later `ExpertLoad` counts the
                layers, or this is a copy.
        """
        _checks.flag(f"{_NAME}.aux_losses", "of_step", of_step)
        counted = self._counted()
        passes = []
        for layer in self._layers:
            last = layer._last_pass()
            if last is None:
                raise RuntimeError(f"{_NAME}.aux_losses: call it after a forward pass of every MoELayer")
            layer._warn_of_lost_graph("aux_loss", last)
            passes.append(last)
        parts = []
        for earlier, (load, _, scores, _, mask) in zip(counted, passes, strict=True):
            load = load.astype("int64")
            tokens = paddle.full([1], scores.shape[0], "int64") if mask is None else mask.astype("int64").sum()
            parts += [load + earlier if of_step else load, tokens.reshape([1])]
        parts = self._over_ranks(parts)
        losses = []
        for number, (layer, (_, _, scores, logits, mask)) in enumerate(zip(self._layers, passes, strict=True)):
            load, tokens = parts[2 * number : 2 * number + 2]
            own = scores.shape[0] if mask is None else mask.astype("float32").sum()
            loss = loss_of_load(normalised(scores, logits, layer.router.scoring == "sigmoid"), load, mask)
            if self._group.nranks > 1:
                loss = loss * (own * self._group.nranks / tokens.astype("float32").clip(min=1.0)).reshape([])
            losses.append(loss)
        return paddle.stack(losses)

    def _counted(self) -> list[Tensor]:
        """This rank's loads."""
        loads = []
        for layer, count in zip(self._layers, self._counts, strict=True):
            if layer._load_count is None:
                raise RuntimeError(f"{_NAME}: no {_NAME} counts the load of copied layers until one is constructed")
            if layer._load_count is not count:
                raise RuntimeError(f"{_NAME}: a later {_NAME} counts the load of these layers")
            nothing = filled([layer.router.num_experts], 0, "int64", like=layer.router.weight)
            loads.append(nothing if count.load is None else count.load)
        return loads

    def _over_ranks(self, parts: list[Tensor]) -> list[Tensor]:
        """The sums of int64 vectors over the ranks, by one all_reduce."""
        if self._group.nranks == 1:
            return parts
        total = paddle.concat(parts)
        paddle.distributed.all_reduce(total, group=self._group)
        return total.split([len(each) for each in parts])


class LoadCount:
    """The load of one layer since the last update.

    Hooks of gradients refer to this, not to a layer: Python could not free a layer whose tensors refer to it.

    Attributes:
        load: int64 [E], or None if nothing was counted.
    """

    def __init__(self) -> None:
        self.load: Tensor | None = None

    def count(self, load: Tensor, logits: Tensor, training: bool) -> None:
        """Count the load of a forward pass once the gradient of its logits is known."""
        if not training:
            return
        if isinstance(load, GraphValue):
            expected = f"a tensor in dygraph, or the layer in eval() mode, since an {_NAME} counts its load"
            _checks.bad_type("MoELayer", "x", expected, "a graph value")
        if logits.stop_gradient:
            return
        is_counted = False

        def arrived(_: Tensor) -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                more = load.astype("int64")
                self.load = more if self.load is None else self.load + more

        logits.register_hook(arrived)
