# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers and gradient clipping of Fleet that keep the experts of different ranks apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from ..backends.deferred import refuse_pending
from .parameters import gradient_of
from .training import ClipGradByGlobalNorm, rounded_once, widened

__all__ = ["FleetClip", "FleetOptimizer", "Place", "Sharding", "innermost_of"]


def innermost_of(optimizer: Any) -> Any:
    """Return the optimizer of `paddle.optimizer` inside the wrappers of Fleet, if any."""
    while "_inner_opt" in vars(optimizer):
        optimizer = optimizer._inner_opt
    return optimizer


class Place(NamedTuple):
    """The ranks of one stage of Fleet's topology that have the same experts as this rank.

    Attributes:
        copies: within the sharding group; their gradients are added up, and they divide the updates.
        replicas: the other groups between which gradients are added up: data parallel, sep parallel, or none.
        mirrors: the model parallel group, if all its ranks compute the same gradients of experts.
        share: factor of a gradient, 1 / number of ranks whose losses are averaged.
        splits_parameters: whether sharding divides each parameter.
    """

    copies: Group
    replicas: tuple[Group, ...]
    mirrors: tuple[Group, ...]
    share: float
    splits_parameters: bool


class FleetOptimizer(HybridParallelOptimizer):
    """Fleet's optimizer, which adds up the gradients of experts between ranks with the same experts alone."""

    _experts: dict[str, Tensor]
    _frozen: list[Tensor]  # dense ones, at the start
    _place: Place

    def keep_apart(self, experts: Sequence[Tensor], place: Place, parameters: Sequence[Tensor]) -> None:
        """Set the parameters of experts, the ranks that have the same, and all parameters."""
        self._experts, self._place = {each.name: each for each in experts}, place
        self._frozen = [each for each in parameters if each.stop_gradient and each.name not in self._experts]

    def _hybrid_sync_grad(self, parameter_list: list[Tensor]) -> None:
        refuse_pending("distributed_optimizer", parameter_list)
        for each in self._frozen if self._use_dp_mode else ():
            if not each.stop_gradient:
                expected = "True as at the start, since paddle.DataParallel adds up no gradients of frozen parameters"
                _checks.bad_value("distributed_optimizer", f"stop_gradient of {each.name!r}", expected, False)
        dense = [each for each in parameter_list if each.name not in self._experts]
        if self._sharding_enable:
            self._inner_opt.reduce_gradients(parameter_list, self._hcg)
        if isinstance(self._inner_opt, DygraphShardingOptimizerV2):
            self._scale_buffers()
            return
        if self._sharding_enable:
            dense = self._inner_opt.filter_parameters(dense, self._hcg)
        if self._dp_enable or self._sep_enable:
            fused_allreduce_gradients(dense, self._hcg)
        if not self._sharding_enable:  # `Sharding.reduce_gradients` has added up the others
            for each in self._experts.values():
                _add_up(each, self._place)

    def _scale_buffers(self) -> None:
        """Complete this rank's parts of the sharding optimizer's buffers, which are means over their ranks."""
        place, data = self._place, self._hcg.get_data_parallel_group()
        of_dense = [data] if self._dp_enable else []
        if self._sep_enable:
            of_dense.append(self._hcg.get_sep_parallel_group())
        for buffer in self._inner_opt._comm_buffer_list:
            if not buffer.need_reduce_scale_sync():
                continue
            is_of_experts = buffer.params[0].name in self._experts
            share, groups = 1.0 / data.nranks, of_dense
            if is_of_experts:
                share, groups = place.share * place.copies.nranks, list(place.replicas)
            own = _own_part(buffer)
            own.scale_(share)
            for group in groups:
                paddle.distributed.all_reduce(own, group=group)

    def _mp_filter_fn(self, param: Tensor, strategy: Any) -> bool:
        is_alike = param.name not in self._experts or bool(self._place.mirrors)
        return is_alike and super()._mp_filter_fn(param, strategy)


def _own_part(buffer: Any) -> Tensor:
    """Return the view of a sharding optimizer's buffer with the gradients that this rank applies."""
    whole, group = buffer.grad_storage, buffer._comm_group
    count = whole.shape[0] // group.nranks
    start = count * max(group.rank, 0)
    return whole._slice(start, start + count)


def _add_up(parameter: Tensor, place: Place, owner: int | None = None) -> None:
    """Add up the gradient of experts between the ranks with the same, scaled to the mean of all ranks' losses.

    Args:
        parameter: of experts.
        place: the ranks.
        owner: the rank among the copies that updates the parameter; None without sharding.
    """
    if parameter.stop_gradient:
        return
    gradient = gradient_of(parameter)
    if gradient is None and place.copies.nranks == 1 and not place.replicas:
        return
    if gradient is None:  # this rank did not use the layer
        attribute, dtype = ("main_grad", "float32") if hasattr(parameter, "main_grad") else ("grad", parameter.dtype)
        setattr(parameter, attribute, paddle.zeros_like(parameter, dtype=dtype))
        gradient = getattr(parameter, attribute)  # `grad` keeps a copy of the zeros
    with rounded_once(gradient) as total:
        total.scale_(place.share)
        if place.copies.nranks > 1:
            paddle.distributed.reduce(total, dst=owner, group=place.copies)
        for group in place.replicas if owner in (None, paddle.distributed.get_rank()) else ():
            paddle.distributed.all_reduce(total, group=group)


class Sharding(DygraphShardingOptimizer):
    """Fleet's first sharding optimizer, which divides experts only between the ranks with copies of them."""

    _owners: dict[str, int]  # by the name of a parameter of experts, the rank of the world that updates it
    _place: Place
    _parameter_list: list[Tensor]
    _broadcast_order_params: list[Tensor] | None  # None: Fleet found no order

    def keep_apart(self, experts: Sequence[Tensor], place: Place) -> None:
        """Divide the parameters between ranks again, experts separately."""
        whole, names = self._parameter_list, {each.name for each in experts}
        self._place = place
        self._owners = {
            each.name: place.copies.ranks[number % place.copies.nranks] for number, each in enumerate(experts)
        }
        self._parameter_list = [each for each in whole if each.name not in names]
        self._rank2params = self._partition_parameters()
        self._parameter_list = whole
        order = whole if self._broadcast_order_params is None else self._broadcast_order_params
        self._broadcast_order_params = [each for each in order if each.name not in names]
        this = paddle.distributed.get_rank()
        self._rank2experts = [each for each in experts if self._owners[each.name] == this]
        self._param2rank = self._map_param_to_rank()
        for each in experts:
            self._param2rank[each.name] = self._sharding_rank if self._owners[each.name] == this else -1
        self._rank2params[self._sharding_rank] += self._rank2experts
        for name in ("_parameter_list", "_param_groups"):
            self._set_inner_opt_attr(name, self._rank2params[self._sharding_rank])

    def reduce_gradients(self, parameter_list: list[Tensor], hcg: Any) -> None:
        super().reduce_gradients([each for each in parameter_list if each.name not in self._owners], hcg)
        for each in self._experts_of(parameter_list):
            _add_up(each, self._place, self._owners[each.name])

    def _sharding_sync_parameters(self) -> None:
        own = self._rank2params[self._sharding_rank]
        self._rank2params[self._sharding_rank] = [each for each in own if each.name not in self._owners]
        super()._sharding_sync_parameters()
        self._rank2params[self._sharding_rank] = own
        copies = self._place.copies
        for each in self._experts_of(self._parameter_list) if copies.nranks > 1 else ():
            paddle.distributed.broadcast(each, src=self._owners[each.name], group=copies)

    def _experts_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [each for each in parameters if each.name in self._owners and not each.stop_gradient]


class FleetClip(ClipGradByGlobalNorm):
    """`paddle.nn.ClipGradByGlobalNorm` over all ranks of Fleet's topology.

    Each rank adds up the squares of its own gradients that no rank before it has, and one all-reduce adds these up.

    Args:
        clip_norm: the largest norm that the gradients may have.
        counted: names of the parameters whose gradients this rank counts.
    """

    def __init__(self, clip_norm: float, counted: frozenset[str]) -> None:
        super().__init__(clip_norm)
        self._counted = counted

    def get_l2_norm_pow(
        self, params_grads: Iterable[tuple[Tensor, Tensor | None]], sum_dtype: Any = None
    ) -> tuple[Tensor, Any]:
        """Return the square of the norm, and its dtype; all ranks must call it."""
        pairs = [(each, gradient) for each, gradient in params_grads if gradient is not None]
        dtype = "float64" if any(gradient.dtype == paddle.float64 for _, gradient in pairs) else "float32"
        own = ((each, widened(gradient)) for each, gradient in pairs if each.name in self._counted)
        square, _ = ClipGradForMOEByGlobalNorm.get_l2_norm_pow(own, dtype)
        total = paddle.zeros([1], dtype) if square is None else square.reshape([1])
        paddle.distributed.all_reduce(total)
        return total, dtype
