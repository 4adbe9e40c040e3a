# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet's optimizers for models with expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelOptimizer
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from ..backends.deferred import refuse_pending
from .parameters import expert_group_of, fleet_guard_lifted, gradient_of, is_expert_parameter, sharding_color
from .training import ClipGradByGlobalNorm, rounded_once

__all__ = ["distributed_optimizer"]

_NAME = "distributed_optimizer"


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> Any:
    """Return the optimizer of ``fleet.distributed_optimizer`` for a model with expert parallelism.

    The losses are those of one process: ``step()`` turns the gradients into those of the mean over all ranks' losses.
    Gradients of experts are added up only between ranks with copies of the same experts. So do not call
    `average_gradients`, and do not scale gradients. Clipping by the global norm counts each expert once: pass
    `paddle.nn.ClipGradByGlobalNorm` or ``ClipGradForMOEByGlobalNorm`` to the optimizer; either is converted to the one
    that the strategy needs. All copies of experts start with the values of the first. ``step()`` does not synchronise
    with the host. All ranks create the optimizer at the same time.

    These topologies of ``fleet.init`` work, with all other degrees 1; the named group shares the experts:

    * ``dp_degree``: the data parallel group, with the model from ``fleet.distributed_model``;
    * ``sharding_degree``, with or without ``dp_degree``: the sharding group;
    * ``sharding_degree = moe_sharding_degree * ep_degree``: the expert parallel group.

    Sharding is stage 1: ``DygraphShardingOptimizer``, without ``tensor_fusion`` and ``comm_overlap``, or with
    ``split_param`` ``DygraphShardingOptimizerV2``, without ``dp_degree`` and for parameters with ``main_grad``.

    Args:
        optimizer: one of `paddle.optimizer`, with a list of parameters, or Fleet's ``MixPrecisionOptimizer`` of one.
            Parameters marked by `mark_expert_parameters` are those of experts.
        strategy: see Fleet.

    Returns:
        Fleet's optimizer.

    Raises:
        TypeError: the optimizer has no list of parameters.
        ValueError: Fleet was not started, or its topology or strategy is not one of these; experts are shared by ranks
            of several groups, or by other ranks than the topology's.

    Examples:
        >>> import paddle
        >>> from paddle.distributed import fleet
        >>> from paddle_moe_ops.expert_parallel import distributed_optimizer
        >>> from paddle_moe_ops.nn import MoELayer
        >>> fleet.init(is_collective=True)  # with ranks: strategy=strategy
        <paddle.distributed.fleet.fleet.Fleet object at 0x...>
        >>> group = fleet.get_hybrid_communicate_group().get_data_parallel_group()
        >>> model = MoELayer(64, 32, num_experts=8, topk=2, group=group)  # then fleet.distributed_model(model)
        >>> optimizer = distributed_optimizer(paddle.optimizer.AdamW(parameters=model.parameters()))
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> optimizer.step()
    """
    parameters = getattr(optimizer, "_parameter_list", None)
    if not parameters or isinstance(parameters[0], dict):
        expected = "an optimizer of paddle.optimizer with a list of parameters"
        _checks.bad_type(_NAME, "optimizer", expected, type(optimizer).__name__)
    experts = [each for each in parameters if expert_group_of(each) is not None]
    if getattr(fleet.fleet, "_hcg" if experts else "_role_maker", None) is None:
        _checks.bad_value(_NAME, "Fleet", "started by fleet.init", "none")
    if not experts:
        return fleet.distributed_optimizer(optimizer, strategy)
    place, innermost = _place_of(experts, strategy), optimizer
    while "_inner_opt" in vars(innermost):  # of mix_precision_utils.MixPrecisionOptimizer
        innermost = innermost._inner_opt
    innermost._grad_clip = _clip(innermost._grad_clip, place)
    if place.splits_parameters:
        if not all(hasattr(each, "main_grad") for each in parameters):
            expected = (
                "ones with main_grad with split_param, as Fleet's MixPrecisionLayer makes them: clear_grad() parts"
            )
            _checks.bad_value(_NAME, "parameters", f"{expected} other gradients from Fleet's buffers", "ones without")
        for each in experts:
            each.color = sharding_color(place.copies)
    with paddle.no_grad(), fleet_guard_lifted():
        for group in (place.copies, *place.replicas):
            for each in experts if group.nranks > 1 else ():
                paddle.distributed.broadcast(each, src=group.ranks[0], group=group)
        made = fleet.distributed_optimizer(optimizer, strategy)
    made.__class__ = _Optimizer
    made._experts, made._share = experts, 1.0 / place.group.nranks
    if isinstance(made._inner_opt, DygraphShardingOptimizer):
        made._inner_opt.__class__ = _Sharding
        made._inner_opt.keep_apart(experts, place.copies, made._share)
    return made


class _Place(NamedTuple):
    """The groups of the experts in Fleet's topology.

    Attributes:
        group: the ranks that share them.
        copies: within the sharding group, the ranks that have copies of this rank's.
        replicas: the data parallel group, if its ranks have copies, too.
        is_sharded: whether there is a sharding group.
        splits_parameters: whether sharding divides each parameter.
    """

    group: Group
    copies: Group
    replicas: tuple[Group, ...]
    is_sharded: bool
    splits_parameters: bool


def _place_of(experts: Sequence[Tensor], strategy: Any) -> _Place:
    """Return the place of the experts; raises for an unsupported topology or strategy of Fleet."""
    environment, hcg = fleet.fleet, fleet.fleet._hcg
    groups = {id(group): group for group in map(expert_group_of, experts) if group is not None}
    group = next(iter(groups.values()))
    if len(groups) > 1:
        given = ", ".join(str(each.ranks) for each in groups.values())
        _checks.bad_value(_NAME, "experts", "shared by the ranks of one group", f"groups of ranks {given}")
    strategy = environment._user_defined_strategy if strategy is None else strategy
    if strategy.heter_ccl_mode:
        _checks.bad_value(_NAME, "heter_ccl_mode", "False for experts on several ranks", True)
    configs = strategy.hybrid_configs
    for name in ("mp_degree", "pp_degree", "sep_degree"):
        if configs[name] > 1:
            _checks.bad_value(_NAME, name, "1 for experts on several ranks", configs[name])
    alone, data = hcg.get_model_parallel_group(), hcg.get_data_parallel_group()
    sharding = configs["sharding_configs"]
    if hcg.get_sharding_parallel_world_size() == 1:
        _check_ranks(group, data, "data parallel")
        return _Place(group, alone, (), False, False)
    if sharding.split_param and data.nranks > 1:
        _checks.bad_value(_NAME, "dp_degree", "1 with split_param", data.nranks)
    for name in ("tensor_fusion", "comm_overlap"):
        if getattr(sharding, name) and not sharding.split_param:
            _checks.bad_value(_NAME, name, "False without split_param", True)
    copies = hcg.get_moe_sharding_parallel_group() if hasattr(hcg, "get_expert_parallel_group") else alone
    if copies is alone:
        _check_ranks(group, hcg.get_sharding_parallel_group(), "sharding")
    else:
        _check_ranks(group, hcg.get_expert_parallel_group(), "expert parallel")
    return _Place(group, copies, (data,), True, bool(sharding.split_param))


def _check_ranks(group: Group, expected: Group, name: str) -> None:
    if sorted(group.ranks) != sorted(expected.ranks):
        text = f"shared by Fleet's {name} group, ranks {expected.ranks}"
        _checks.bad_value(_NAME, "experts", text, f"by ranks {group.ranks}")


def _clip(clip: Any, place: _Place) -> Any:
    """Convert gradient clipping to clipping by the norm over all ranks and their different experts."""
    if place.is_sharded:  # Fleet adds up the squares of the gradients that each rank updates
        return nn.ClipGradByGlobalNorm(clip.clip_norm) if isinstance(clip, ClipGradForMOEByGlobalNorm) else clip
    if isinstance(clip, (nn.ClipGradByGlobalNorm, ClipGradForMOEByGlobalNorm)):
        return ClipGradByGlobalNorm(clip.clip_norm)
    return clip


class _Optimizer(HybridParallelOptimizer):
    """Fleet's optimizer, which also divides the gradients of experts by the number of ranks that contribute tokens."""

    _experts: Sequence[Tensor]
    _share: float

    def _hybrid_sync_grad(self, parameter_list: list[Tensor]) -> None:
        refuse_pending("distributed_optimizer", parameter_list)
        super()._hybrid_sync_grad(parameter_list)
        if isinstance(self._inner_opt, _Sharding):
            return  # `_Sharding.reduce_gradients` scales them
        if isinstance(self._inner_opt, DygraphShardingOptimizerV2):
            buffers = [each for each in self._inner_opt._comm_buffer_list if is_expert_parameter(each.params[0])]
            gradients = [each.grad_storage for each in buffers]
        else:
            gradients = [gradient_of(each) for each in self._experts if not each.stop_gradient]
        for gradient in gradients:
            if gradient is not None:
                with rounded_once(gradient) as quotient:
                    quotient.scale_(self._share)


class _Sharding(DygraphShardingOptimizer):
    """Fleet's first sharding optimizer, which divides experts only between the ranks with copies of them."""

    _owners: dict[str, int]  # by the name of a parameter of experts, the rank of the world that updates it
    _copies: Group
    _share: float
    _parameter_list: list[Tensor]
    _broadcast_order_params: list[Tensor] | None  # None: Fleet found no order

    def keep_apart(self, experts: Sequence[Tensor], copies: Group, share: float) -> None:
        """Divide the parameters between ranks again, experts separately.

        Args:
            experts: the parameters of experts.
            copies: the ranks that have copies of this rank's.
            share: factor of their gradients, 1 / number of ranks that share the experts.
        """
        whole, names = self._parameter_list, {each.name for each in experts}
        self._copies, self._share = copies, share
        self._owners = {each.name: copies.ranks[number % copies.nranks] for number, each in enumerate(experts)}
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
            gradient = gradient_of(each)
            if gradient is None and self._copies.nranks == 1:
                continue
            if gradient is None:  # this rank did not use the layer
                attribute, dtype = ("main_grad", "float32") if hasattr(each, "main_grad") else ("grad", each.dtype)
                setattr(each, attribute, paddle.zeros_like(each, dtype=dtype))
                gradient = getattr(each, attribute)  # `grad` keeps a copy of the zeros
            with rounded_once(gradient) as total:
                total.scale_(self._share / self._copies.nranks)
                if self._copies.nranks > 1:
                    paddle.distributed.reduce(total, dst=self._owners[each.name], group=self._copies)

    def _sharding_sync_parameters(self) -> None:
        own = self._rank2params[self._sharding_rank]
        self._rank2params[self._sharding_rank] = [each for each in own if each.name not in self._owners]
        super()._sharding_sync_parameters()
        self._rank2params[self._sharding_rank] = own
        for each in self._experts_of(self._parameter_list) if self._copies.nranks > 1 else ():
            paddle.distributed.broadcast(each, src=self._owners[each.name], group=self._copies)

    def _experts_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [each for each in parameters if each.name in self._owners and not each.stop_gradient]
