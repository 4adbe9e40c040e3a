# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sharding of stages 2 and 3 for models with expert parallelism: Paddle's for dense parameters, none for experts."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from .agreement import group_of, raising_together
from .fleet_optimizers import FleetClip, innermost_of
from .fully_sharded import FullyShardedModel
from .loss_scaling import GradScaler
from .parameters import connect_copies, copies_of, is_expert_parameter
from .training import average_gradients

__all__ = ["group_sharded_parallel"]

_NAME = "group_sharded_parallel"
_STAGE_3 = "p_g_os"
_LEVELS = ("os", "os_g", _STAGE_3)
_OF_WHOLE_PARAMETERS = paddle.optimizer.Lamb, paddle.optimizer.LBFGS
_ELEMENTWISE_CLIPS = nn.ClipGradByGlobalNorm, ClipGradForMOEByGlobalNorm, nn.ClipGradByValue


class _Optimizer(GroupShardedOptimizerStage2):
    """Paddle's optimizer of stage 2 for dense parameters; experts are updated on each rank that has them.

    Attributes:
        experts: parameters of experts, which Paddle's class does not know.
    """

    experts: list[Tensor]
    _parameter_list: list[Tensor]  # with experts, since a scaler of losses divides the gradients of this list

    def step(self) -> None:
        """Add up the gradients of copies of experts, update this rank's parameters, and broadcast dense ones."""
        average_gradients(self.experts)
        super().step()


class _Model(GroupShardedStage2):
    """Paddle's model of stage 2, which reduces the gradients of dense parameters in the backward pass."""

    def _init_internal_storage(self, needs_fresh: bool) -> None:
        self._check_gradients()
        super()._init_internal_storage(needs_fresh)

    def _grad_scale(self) -> None:  # begins the optimizer's step
        self._check_gradients()
        super()._grad_scale()

    def _check_gradients(self) -> None:
        """Raise if Paddle did not, or would not, reduce the gradients of all dense parameters."""
        names = {id(each): name for name, each in self._layer.named_parameters()}
        trained = {id(each) for each in self._trainable_params}
        for each in self._all_params:
            if (id(each) in trained) == each.stop_gradient:
                name = names.get(id(each), each.name)
                expected = f"{not each.stop_gradient} as at the start, since the buckets of dense gradients stay"
                _checks.bad_value(_NAME, f"stop_gradient of {name!r}", expected, each.stop_gradient)
        states = list(zip(self._trainable_params, self._grad_reduced, self._has_grad_storage, strict=False))
        if all(waits for _, waits, _ in states):  # there was no backward pass
            return
        missing = {id(each) for each, waits, has_bucket in states if waits and has_bucket}
        for number, name in names.items():
            if number in missing:  # Paddle then reduces no gradient of the bucket
                expected = (
                    "computed in each backward pass; freeze the parameter at the start, or pass buffer_max_size=0"
                )
                _checks.bad_value(_NAME, f"the gradient of {name!r}", expected, "none")

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        for each in self._sharding_optimizers[0].experts:
            if getattr(each, "main_grad", None) is not None:
                each.main_grad.zero_()
            elif each.grad is not None:
                each.clear_gradient()


def group_sharded_parallel(
    model: nn.Layer,
    optimizer: Any,
    level: str,
    scaler: Any = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Any = None,
) -> tuple[nn.Layer, Any, Any]:
    """Shard states, gradients and values of dense parameters, as ``paddle.distributed.sharding`` does.

    All ranks call it. Experts are not sharded further: a rank keeps the gradients and states of its experts. ``step()``
    adds up the gradients of copies of the same experts, as `average_gradients` does. The losses are those of one
    process, and clipping by the global norm counts each expert once. The ranks of ``group`` and ``dp_group`` are all
    ranks. Paddle needs a GPU or a custom device. `save_checkpoint` and `load_checkpoint` accept both results.

    In stage 3 a rank has a part of each dense parameter above ``segment_size`` elements. Ranks gather the values of a
    layer while the one before it runs, in both passes, and free them afterwards. A dense layer with such parameters
    must be called, not only read. The result is the given optimizer, whose ``step`` and ``clear_grad`` are replaced.
    ``model.get_all_parameters()`` gathers all values until the next backward pass.

    Args:
        model: has layers of experts on any ranks, see `mark_expert_parameters`.
        optimizer: of `paddle.optimizer`, with a list of parameters, or Fleet's ``MixPrecisionOptimizer`` of one.
        level: "os" or "os_g", which are the same in Paddle: stage 2. "p_g_os": stage 3.
        scaler: a `GradScaler` of this package over all ranks; None: there is none.
        group: the ranks that share gradients and states; None: all ranks.
        offload: must be False. Paddle's offload updates one buffer of dense parameters in place of the list, so experts
            would not change.
        sync_buffers: see Paddle.
        buffer_max_size: of stage 2, see Paddle. 0: no buckets, so a backward pass may leave out parameters.
        segment_size: of stage 3: the most elements of a dense parameter that all ranks keep.
        sync_comm: of stage 3: whether a layer is gathered when it runs, not while the one before it runs.
        dp_group: the ranks with the same part of the states, or None.
        exclude_layer: of stage 3: a list of names of classes, and ids of layers, whose parameters all ranks keep.

    Returns:
        the model and the optimizer that take the place of both, and the scaler.

    Raises:
        TypeError: the model is not a layer, the optimizer has no list of parameters, the scaler is another one, or an
            argument of stage 3 has another type.
        ValueError: another level; offload; groups, or a scaler's group, that are not all ranks. In stage 3: the
            optimizer's parameters are not those of the model, it or its clipping needs whole parameters, or it was
            sharded before; on every rank, if dense parameters differ. Later the model and the optimizer raise it if a
            dense parameter was frozen or unfrozen; in stage 2 if a backward pass computed no gradient of a parameter
            that has a bucket; in stage 3 if values were set, or are read while they are divided.
        RuntimeError: another rank raised one of these.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import group_sharded_parallel
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> # with ranks: model, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g")
    """
    everyone = group_of(_NAME, None)
    with raising_together(_NAME, everyone):
        _checks.instance(_NAME, "model", model, nn.Layer, "a Layer")
        parameters = getattr(optimizer, "_parameter_list", None)
        if not parameters or isinstance(parameters[0], dict):
            expected = "an optimizer of paddle.optimizer with a list of parameters"
            _checks.bad_type(_NAME, "optimizer", expected, type(optimizer).__name__)
        if level not in _LEVELS:
            _checks.bad_value(_NAME, "level", f"one of {_LEVELS}", repr(level))
        if offload:
            expected = "False, since Paddle's offload updates dense parameters and no experts"
            _checks.bad_value(_NAME, "offload", expected, repr(offload))
        if scaler is not None:
            _check_scaler(scaler, everyone)
        sharing = group_of(_NAME, group)
        count = sharing.nranks * (1 if dp_group is None else group_of(_NAME, dp_group).nranks)
        if count != everyone.nranks or count == 1:
            given = f"groups of {count} of {everyone.nranks} ranks"
            _checks.bad_value(_NAME, "group and dp_group", "all ranks together, at least two", given)
        if level == _STAGE_3:
            _check_stage_3(model, optimizer, segment_size, exclude_layer)
    experts = [each for each in parameters if is_expert_parameter(each)]
    names = {each.name: name for name, each in model.named_parameters()}
    connect_copies(_NAME, {f"parameter {names.get(each.name, each.name)!r}": each for each in experts}, everyone)
    innermost = innermost_of(optimizer)
    clip, innermost._grad_clip = innermost._grad_clip, None  # Paddle's would count experts of one rank
    with paddle.no_grad():
        for each in experts:
            copies = copies_of(each, everyone)
            if copies is not None:
                paddle.distributed.broadcast(each, src=copies.ranks[0], group=copies)
    shared = {
        "group": sharing,
        "sync_buffers": sync_buffers,
        "dp_group": dp_group,
        "device": paddle.get_device().partition(":")[0],
    }
    made: Any
    sharded: Any
    if level == _STAGE_3:
        options = {"segment_size": segment_size, "sync_comm": sync_comm, "exclude_layer": exclude_layer}
        made = FullyShardedModel(model, optimizer, experts, everyone, **shared, **options)
        sharded, counted = optimizer, made.counted()
    else:
        made, sharded = _stage_2(model, optimizer, experts, buffer_max_size, shared)
        counted = {name for name, rank in sharded.param2rank.items() if rank == sharded._rank}
    if isinstance(clip, (nn.ClipGradByGlobalNorm, ClipGradForMOEByGlobalNorm)):
        own = {each.name for each in experts if _is_first(copies_of(each, everyone))}
        innermost._grad_clip = FleetClip(clip.clip_norm, frozenset(own | counted if _is_first(dp_group) else own))
    else:
        innermost._grad_clip = clip
    return made, sharded, scaler


def _stage_2(
    model: nn.Layer, optimizer: Any, experts: list[Tensor], buffer_max_size: int, shared: dict[str, Any]
) -> tuple[_Model, _Optimizer]:
    names = {each.name for each in experts}
    dense = [each for each in optimizer._parameter_list if each.name not in names]
    of_optimizer = {name: each for name, each in shared.items() if name != "sync_buffers"}
    sharded = _Optimizer(params=dense, optim=optimizer, **of_optimizer)
    sharded.experts, sharded._parameter_list = experts, list(optimizer._parameter_list)
    return _Model(model, sharded, buffer_max_size=buffer_max_size, **shared), sharded


def _check_stage_3(model: nn.Layer, optimizer: Any, segment_size: Any, exclude_layer: Any) -> None:
    """Check arguments that Paddle's stage 3 would train differently from one process."""
    if not hasattr(GroupShardedStage3, "init_slice_param"):
        expected = "'os_g' under Paddle 3.2, whose stage 3 has no layers with several outputs, such as routers"
        _checks.bad_value(_NAME, "level", expected, repr(_STAGE_3))
    if hasattr(optimizer, "update_slice"):
        _checks.bad_value(_NAME, "optimizer", "one that was not sharded before", "the optimizer of another model")
    _checks.integer(_NAME, "segment_size", segment_size, 0)
    if exclude_layer is not None:
        expected = "a list of names of classes or ids of layers"
        for each in _checks.listed(_NAME, "exclude_layer", exclude_layer, expected):
            if not isinstance(each, (str, int)):
                _checks.bad_type(_NAME, "exclude_layer", expected, f"one with a {type(each).__name__}")
    inner = innermost_of(optimizer)
    if not isinstance(inner._grad_clip, (type(None), *_ELEMENTWISE_CLIPS)):  # its norms would be those of parts
        expected = "clipping by the global norm or by value, or none, with level='p_g_os'"
        _checks.bad_value(_NAME, "grad_clip of the optimizer", expected, type(inner._grad_clip).__name__)
    if isinstance(inner, _OF_WHOLE_PARAMETERS):
        expected = "one that updates each element alone, with level='p_g_os'"
        _checks.bad_value(_NAME, "optimizer", expected, type(inner).__name__)
    listed = {each.name for each in optimizer._parameter_list}
    names = {each.name: name for name, each in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.name not in listed and not parameter.stop_gradient and not is_expert_parameter(parameter):
            expected = "all trained parameters of the model, since Paddle's stage 3 trains all"
            _checks.bad_value(_NAME, "parameters of the optimizer", expected, f"ones without {name!r}")
    for each in optimizer._parameter_list:
        if each.name not in names:
            expected = "parameters of the model, with level='p_g_os'"
            _checks.bad_value(_NAME, "parameters of the optimizer", expected, f"{each.name!r} of another layer")


def _check_scaler(scaler: Any, everyone: Group) -> None:
    """Check that all ranks skip a step together."""
    kind = type(scaler)
    if not isinstance(scaler, GradScaler):
        expected = "a paddle_moe_ops.expert_parallel.GradScaler, which skips a step on all ranks, or None"
        _checks.bad_type(_NAME, "scaler", expected, f"{kind.__module__}.{kind.__name__}")
    if scaler._group.ranks != everyone.ranks:
        _checks.bad_value(_NAME, "the group of scaler", f"all ranks {everyone.ranks}", f"ranks {scaler._group.ranks}")


def _is_first(group: Group | None) -> bool:
    return group is None or group.ranks[0] == paddle.distributed.get_rank()
