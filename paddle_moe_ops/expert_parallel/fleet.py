# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet's optimizers for models with expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import paddle
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import is_sequence_parallel_parameter
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from ..backends.experts import keep_by_default
from .agreement import raising_together
from .fleet_optimizers import FleetClip, FleetOptimizer, Place, Sharding, innermost_of
from .parameters import expert_group_of, fleet_guard_lifted, sharding_color
from .placement import placement_of_parameter

__all__ = ["distributed_optimizer"]

_NAME = "distributed_optimizer"
_AXES = {"data": "data parallel", "sharding": "sharding", "sep": "sep parallel", "model": "model parallel"}
_OVERLAPS = "dp_comm_overlap", "sharding_comm_overlap"


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> Any:
    """Return the optimizer of ``fleet.distributed_optimizer`` for a model with expert parallelism.

    The losses are those of one process: ``step()`` turns the gradients into those of the mean over all ranks' losses.
    Gradients of experts are added up only between ranks with copies of the same experts. So do not call
    `average_gradients`, and do not scale gradients. Clipping by the global norm counts each expert once: pass
    `paddle.nn.ClipGradByGlobalNorm` or ``ClipGradForMOEByGlobalNorm`` to the optimizer; either is converted to the one
    that the strategy needs. All copies of experts start with the values of the first. ``step()`` does not synchronise
    with the host. All ranks create the optimizer at the same time.

    The experts may be shared by the ranks of Fleet's data parallel, sharding, sep parallel or model parallel group, or
    of several of these axes together. With ``ep_degree`` they are shared by the expert parallel group. Ranks of the
    other axes have copies, and stages of a pipeline have experts of their own. The model is that of
    ``fleet.distributed_model``. If model parallel ranks share the experts, they have tokens of their own (sequence
    parallelism), and ``mark_as_sequence_parallel_parameter`` marks the router. If experts have the attribute
    ``is_distributed``, each model parallel rank has a part of each expert.

    Sharding is stage 1: ``DygraphShardingOptimizer`` without ``comm_overlap``, or with ``split_param``
    ``DygraphShardingOptimizerV2`` for parameters with ``main_grad``, without ``free_grads_in_comm``.
    ``tensor_fusion``, ``dp_comm_overlap``, ``sharding_comm_overlap``, ``cp_degree`` and ``heter_ccl_mode`` are refused.

    Layers of these parameters with ``compute="fp8_1x128"`` quantise their matrices once in a step, as after
    `nn.keep_float8_matrices`.

    Args:
        optimizer: one of `paddle.optimizer`, with a list of parameters, or Fleet's ``MixPrecisionOptimizer`` of one.
            Parameters marked by `mark_expert_parameters` are those of experts.
        strategy: see Fleet.

    Returns:
        Fleet's optimizer.

    Raises:
        TypeError: the optimizer has no list of parameters.
        ValueError: Fleet was not started, or its topology or strategy is not one of these; experts are shared by ranks
            of several groups, or by other ranks than the topology's; the marks of sequence parallelism are missing.
        RuntimeError: another stage of the pipeline raised.

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
    keep_by_default(parameters)
    experts = [each for each in parameters if expert_group_of(each) is not None]
    if getattr(fleet.fleet, "_hcg" if experts else "_role_maker", None) is None:
        _checks.bad_value(_NAME, "Fleet", "started by fleet.init", "none")
    place = _agreed_place(experts, parameters, strategy)
    if place is None:
        return fleet.distributed_optimizer(optimizer, strategy)
    innermost = innermost_of(optimizer)
    if isinstance(innermost._grad_clip, (nn.ClipGradByGlobalNorm, ClipGradForMOEByGlobalNorm)):
        innermost._grad_clip = FleetClip(innermost._grad_clip.clip_norm, _counted(parameters, place))
    if place.splits_parameters:
        for each in experts:
            each.color = sharding_color(place.copies)
    with paddle.no_grad(), fleet_guard_lifted():
        for each in experts:
            groups = place.copies, *place.replicas, *(() if each.is_distributed else place.mirrors)
            for group in groups:
                if group.nranks > 1:
                    paddle.distributed.broadcast(each, src=group.ranks[0], group=group)
        made = fleet.distributed_optimizer(optimizer, strategy)
    made.__class__ = FleetOptimizer
    made.keep_apart(experts, place, parameters)
    if experts and isinstance(made._inner_opt, DygraphShardingOptimizer):
        made._inner_opt.__class__ = Sharding
        made._inner_opt.keep_apart(experts, place)
    return made


def _agreed_place(experts: Sequence[Tensor], parameters: Sequence[Tensor], strategy: Any) -> Place | None:
    """Return the place of the experts, or None if no stage of the pipeline has any; raises on all stages alike."""
    hcg = getattr(fleet.fleet, "_hcg", None)
    if hcg is None or hcg.get_pipe_parallel_world_size() == 1:
        return _place_of(experts, parameters, strategy) if experts else None
    stages = hcg.get_pipe_parallel_group()
    count = paddle.to_tensor([len(experts)], dtype="int32")
    paddle.distributed.all_reduce(count, op=paddle.distributed.ReduceOp.MAX, group=stages)
    if not count.item():
        return None
    with raising_together(_NAME, stages):
        return _place_of(experts, parameters, strategy)


def _place_of(experts: Sequence[Tensor], parameters: Sequence[Tensor], strategy: Any) -> Place:
    """Return the place of this rank's experts; raises for an unsupported topology or strategy of Fleet."""
    environment, hcg = fleet.fleet, fleet.fleet._hcg
    groups = {id(group): group for group in map(expert_group_of, experts) if group is not None}
    if len(groups) > 1:
        given = ", ".join(str(each.ranks) for each in groups.values())
        _checks.bad_value(_NAME, "experts", "shared by the ranks of one group", f"groups of ranks {given}")
    strategy = environment._user_defined_strategy if strategy is None else strategy
    _check_strategy(strategy, parameters)
    axes = _axes_of(next(iter(groups.values()), None), hcg)
    _check_sequence_parallel(axes, experts, parameters)
    alone = Group(0, -1, [paddle.distributed.get_rank()], name="expert_parallel_alone")
    has_copies = alone
    if hasattr(hcg, "get_expert_parallel_group"):
        has_copies = hcg.get_moe_sharding_parallel_group()
    elif "sharding" not in axes:
        has_copies = hcg.get_sharding_parallel_group()
    others = {"data": hcg.get_data_parallel_group(), "model": hcg.get_model_parallel_group()}
    if hcg.get_sep_parallel_world_size() > 1:
        others["sep"] = hcg.get_sep_parallel_group()
    apart = {axis: each for axis, each in others.items() if axis not in axes and each.nranks > 1}
    return Place(
        copies=has_copies if has_copies.nranks > 1 else alone,
        replicas=tuple(apart[axis] for axis in ("data", "sep") if axis in apart),
        mirrors=tuple(apart[axis] for axis in ("model",) if axis in apart),
        share=1.0 / (hcg.get_data_parallel_world_size() * hcg.get_sharding_parallel_world_size()),
        splits_parameters=_splits_parameters(strategy),
    )


def _splits_parameters(strategy: Any) -> bool:
    is_sharded = fleet.fleet._hcg.get_sharding_parallel_world_size() > 1
    return is_sharded and bool(strategy.hybrid_configs["sharding_configs"].split_param)


def _check_strategy(strategy: Any, parameters: Sequence[Tensor]) -> None:
    """Check the options of Fleet's strategy that would mix experts, or lose gradients."""
    if strategy.heter_ccl_mode:
        _checks.bad_value(_NAME, "heter_ccl_mode", "False for experts on several ranks", True)
    configs = strategy.hybrid_configs
    if configs["cp_degree"] > 1:
        _checks.bad_value(_NAME, "cp_degree", "1 for experts on several ranks", configs["cp_degree"])
    for name in _OVERLAPS:
        if getattr(configs["pp_configs"], name):
            _checks.bad_value(_NAME, name, "False for experts on several ranks", True)
    sharding = configs["sharding_configs"]
    if fleet.fleet._hcg.get_sharding_parallel_world_size() == 1:
        return
    for each in parameters:
        group = expert_group_of(each)
        if group is not None and 0 in (placement := placement_of_parameter(each, group)).counts:
            # Fleet divides no parameters without elements
            _checks.bad_value(_NAME, "placement", "one in which each rank has experts, with sharding", placement)
    if sharding.tensor_fusion:
        _checks.bad_value(_NAME, "tensor_fusion", "False for experts on several ranks", True)
    if sharding.comm_overlap and not sharding.split_param:
        _checks.bad_value(_NAME, "comm_overlap", "False without split_param", True)
    if not sharding.split_param:
        return
    if sharding.free_grads_in_comm:  # leaves no buffer to scale
        _checks.bad_value(_NAME, "free_grads_in_comm", "False for experts on several ranks", True)
    if configs["pp_configs"].delay_scale_loss:  # replaces gradients by others than those in Fleet's buffers
        _checks.bad_value(_NAME, "delay_scale_loss", "False with split_param", True)
    if not all(hasattr(each, "main_grad") for each in parameters):
        expected = "ones with main_grad with split_param, as Fleet's MixPrecisionLayer makes them: clear_grad() parts"
        _checks.bad_value(_NAME, "parameters", f"{expected} other gradients from Fleet's buffers", "ones without")


def _axes_of(group: Group | None, hcg: Any) -> frozenset[str]:
    """Return the axes of Fleet's topology that the group of the experts spans; none for a stage without experts."""
    has_expert_axis = hasattr(hcg, "get_expert_parallel_group")
    if group is None:
        return frozenset()
    if has_expert_axis:
        expected = hcg.get_expert_parallel_group()
        if sorted(group.ranks) != sorted(expected.ranks):
            _raise_for_ranks(group, f"Fleet's expert parallel group, ranks {expected.ranks}")
        return frozenset(("sharding", "model"))
    topology = hcg.topology()
    places = [topology.get_coord(rank)._asdict() for rank in group.ranks]
    axes = frozenset(axis for axis in places[0] if len({each[axis] for each in places}) > 1)
    if axes <= _AXES.keys() and math.prod(map(topology.get_dim, axes)) == group.nranks:
        return axes
    found = {axis: topology.get_comm_list(axis) for axis in _AXES if topology.get_dim(axis) > 1}
    this = paddle.distributed.get_rank()
    groups = [f"{_AXES[axis]} group, ranks {ranks}" for axis, each in found.items() for ranks in each if this in ranks]
    _raise_for_ranks(group, f"Fleet's {' or '.join(groups)}")


def _raise_for_ranks(group: Group, expected: str) -> NoReturn:
    _checks.bad_value(_NAME, "experts", f"shared by {expected}", f"by ranks {group.ranks}")


def _check_sequence_parallel(axes: frozenset[str], experts: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Check the marks that say whether the ranks of the model parallel group have tokens of their own."""
    if not experts or fleet.fleet._hcg.get_model_parallel_world_size() == 1:
        return
    names = {each.name for each in experts}
    is_in_parts = any(is_sequence_parallel_parameter(each) for each in parameters if each.name not in names)
    for each in experts:
        mark = getattr(each, "sequence_parallel", None)
        is_divided = "model" in axes or each.is_distributed
        if is_divided and mark:  # a hook would add up different experts
            expected = "unmarked if model parallel ranks share or split the experts"
            _checks.bad_value(_NAME, "sequence_parallel of experts", expected, mark)
        if not is_divided and is_in_parts and mark is None:
            expected = "set on the experts as on their router, True for tokens of one rank or False for tokens of all"
            _checks.bad_value(_NAME, "sequence_parallel", expected, f"no such attribute of {each.name!r}")
    if not is_in_parts and ("model" in axes or any(each.is_distributed for each in experts)):
        expected = (
            "set by mark_as_sequence_parallel_parameter on the router if model parallel ranks share or split experts"
        )
        _checks.bad_value(_NAME, "sequence_parallel", expected, "none of the parameters marked")


def _counted(parameters: Sequence[Tensor], place: Place) -> frozenset[str]:
    """Return the names of the parameters that this rank counts in the norm: no rank before it has the same part."""
    hcg, this = fleet.fleet._hcg, paddle.distributed.get_rank()
    is_first = all(group.ranks[0] == this for group in place.replicas)
    is_first_of_mirrors = all(group.ranks[0] == this for group in place.mirrors)
    is_first_of_data = hcg.get_data_parallel_rank() == hcg.get_sep_parallel_rank() == 0
    is_first_of_model = hcg.get_model_parallel_rank() == 0

    def is_counted(each: Tensor) -> bool:
        if expert_group_of(each) is not None:
            return is_first and (is_first_of_mirrors or each.is_distributed)
        is_first_of_stages = getattr(each, "is_firstly_shared", True)
        return is_first_of_data and (is_first_of_model or each.is_distributed) and is_first_of_stages

    return frozenset(each.name for each in parameters if is_counted(each))
