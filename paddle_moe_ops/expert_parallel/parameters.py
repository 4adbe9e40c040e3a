# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of experts that are spread over ranks: how others know them, and their checkpoints."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight, shard_weight

from .. import _checks
from .._graphs import without_gradients
from .groups import agree, check_group_of_experts, expert_group_of, group_of, raising_together
from .mixing import refuse_to_mix_experts

__all__ = [
    "agree_on_tensors",
    "copy_marks",
    "gather_experts",
    "gather_state_dict",
    "is_expert_parameter",
    "mark_expert_parameters",
    "shard_state_dict",
    "sharded_state_of_experts",
    "sharding_color",
    "start_as_one",
    "without_wrapper",
]

_SHARDING_COLOR = "moe_expert"  # what programs for Fleet call it


def mark_expert_parameters(experts: nn.Layer, sharding_group: Any = None, *, group: Any = None) -> None:
    """Mark the parameters of a layer as those of experts that only this rank has. `MoELayer` does so for its own.

    They get the attributes that Paddle looks at: ``no_sync``, so that `paddle.DataParallel` neither broadcasts them nor
    adds up their gradients, ``expert``, by which Fleet knows them, and with a sharding group ``color``.
    Paddle's deep copies of parameters lose attributes: mark a copy again, unless its experts are `nn.SwiGLUExperts`.

    With a group, ``sharded_state_dict()`` of the layer, and of a model that contains it, has the shapes of the experts
    of all ranks and the offsets of this rank's, for `paddle.distributed.save_state_dict`. A class that defines
    ``sharded_state_dict`` keeps its own.

    Args:
        experts: a layer of stacked parameters, [E / P, ...].
        sharding_group: the ranks that hold copies of the same experts, between which Fleet's
            ``DygraphShardingOptimizerV2`` divides their optimizer states and averages their gradients. None: the
            attribute stays as it is, and `distributed_optimizer` sets it where it is needed.
        group: the ranks that share the experts, as `ExpertParallel` takes it. `distributed_optimizer` and
            ``sharded_state_dict()`` need it. If it has several ranks, optimizers of Fleet that would mix their experts
            raise a ValueError when they are made. None: it stays as it is.

    Raises:
        TypeError: the layer is not a layer, or a group is not a group.
        ValueError: this process is not one of a group's ranks.
    """
    function = "mark_expert_parameters"
    _checks.instance(function, "experts", experts, nn.Layer, "a Layer")
    color = shared_by = None
    if sharding_group is not None:
        with _checks.renaming(function, function, group="sharding_group"):
            color = sharding_color(group_of(function, sharding_group))
    if group is not None:
        shared_by = group_of(function, group)
        if shared_by.nranks > 1:
            refuse_to_mix_experts()
    for parameter in experts.parameters():
        parameter.no_sync = parameter.expert = True
        if color is not None:
            parameter.color = dict(color)
        if shared_by is not None:  # a number, since parameters are copied with their attributes
            parameter.expert_group_id = shared_by.id
    for each in experts.sublayers(include_self=True):
        if type(each).sharded_state_dict is nn.Layer.sharded_state_dict:
            each.sharded_state_dict = types.MethodType(_sharded_state_of_marked, each)


def copy_marks(source: nn.Layer, target: nn.Layer) -> None:
    """Mark the parameters of a copy as those of the layer are: Paddle copies parameters without attributes."""
    for mine, other in zip(source.parameters(), target.parameters(), strict=True):
        for name in ("no_sync", "expert", "color", "expert_group_id"):
            if hasattr(mine, name):
                setattr(other, name, getattr(mine, name))


def sharded_state_of_experts(layer: nn.Layer, structured_name_prefix: str = "") -> dict[str, ShardedWeight]:
    """Return Paddle's ``sharded_state_dict()`` of a layer, with global shapes and offsets of marked parameters.

    Args:
        layer: has stacked parameters of experts, [E / P, ...].
        structured_name_prefix: begins all keys.

    Raises:
        ValueError: a parameter was marked without a group.
    """
    state: dict[str, ShardedWeight] = nn.Layer.sharded_state_dict(layer, structured_name_prefix)
    own = nn.Layer.state_dict(layer, include_sublayers=False, use_hook=False)
    for name, parameter in own.items():
        if not is_expert_parameter(parameter):
            continue
        group, key = expert_group_of(parameter), structured_name_prefix + name
        if group is not None:
            state[key] = shard_weight(key, state[key].local_tensor, 0, group)
        elif not hasattr(parameter, "expert_group_id") and paddle.distributed.get_world_size() > 1:
            expected = f"the ranks that share the experts of {key!r}"
            _checks.bad_value("sharded_state_dict", "group of mark_expert_parameters", expected, None)
    return state


def _sharded_state_of_marked(layer: nn.Layer, structured_name_prefix: str = "") -> dict[str, ShardedWeight]:
    """Return `sharded_state_of_experts` of a layer that `mark_expert_parameters` marked.

    Raises:
        ValueError: a parameter has no mark, as in a deep copy; its experts would be lost.
    """
    for name, parameter in layer.named_parameters(include_sublayers=False):
        if not is_expert_parameter(parameter):
            expected = "one that mark_expert_parameters marked, again after a deep copy"
            _checks.bad_value("sharded_state_dict", f"parameter {structured_name_prefix + name!r}", expected, "no mark")
    return sharded_state_of_experts(layer, structured_name_prefix)


def without_wrapper(function: str, layer: Any) -> nn.Layer:
    """The model that `paddle.DataParallel` or ``fleet.distributed_model`` wrapped, whose states have its names.

    Raises:
        TypeError: it is not a layer; the message begins with the function's name.
    """
    _checks.instance(function, "layer", layer, nn.Layer, "a Layer")
    while isinstance(layer, (paddle.DataParallel, MetaParallelBase)):
        layer = layer._layers
    return layer


def sharding_color(copies: Group) -> dict[str, Any]:
    """What tells Fleet's ``DygraphShardingOptimizerV2`` between which ranks to divide experts."""
    return {"color": _SHARDING_COLOR, "group": copies}


def is_expert_parameter(parameter: Tensor) -> bool:
    """Tell whether `mark_expert_parameters` marked a parameter.

    For `paddle.incubate.distributed.models.moe.ClipGradForMOEByGlobalNorm`, which clips by the norm over all ranks.
    """
    return bool(getattr(parameter, "expert", False))


def start_as_one(layers: Iterable[nn.Layer | None], group: Group) -> None:
    """Give the parameters and buffers of layers the values that the first rank of the group has."""
    if group.nranks == 1:
        return
    for layer in layers:
        for _, value in sorted(layer.state_dict().items()) if layer is not None else ():
            paddle.distributed.broadcast(value, src=group.ranks[0], group=group)


@without_gradients
def gather_state_dict(layer: nn.Layer, group: Any = None) -> dict[str, Tensor]:
    """Gather the state that a model would have in one process, with the experts of all ranks. All ranks must call it.

    Not differentiable. Bit-exact copies; the host waits for the other ranks.

    Args:
        layer: the model, or what `paddle.DataParallel` or ``fleet.distributed_model`` made of it; what
            `mark_expert_parameters` marked is gathered.
        group: the ranks that share the experts, as `ExpertParallel` takes it.

    Returns:
        on every rank ``layer.state_dict()``, in which stacked parameters [E / P, ...] of experts are [E, ...].

    Raises:
        TypeError: the layer is not a layer, or the group not a group.
        ValueError: this process is not one of its ranks, or other ranks share the experts; on every rank, if the ranks
            have different parameters of experts.
        RuntimeError: another rank raised an error.
    """
    function = "gather_state_dict"
    group = group_of(function, group)
    with raising_together(function, group):
        layer = without_wrapper(function, layer)
        state = dict(layer.state_dict())
        own = {name: state[name] for name in _expert_names(layer)}
        check_group_of_experts(function, "layer.state_dict()[{!r}]", own, group)
    agree_on_tensors(function, "layer.state_dict()[{!r}]", own, group)
    whole = state | gather_experts(own, group)
    return {name: value.clone() if value is state[name] else value for name, value in whole.items()}


def agree_on_tensors(function: str, label: str, tensors: Mapping[str, Tensor], group: Group) -> None:
    """Check that all ranks have tensors of the same names, dtypes and shapes; every rank must call it.

    Args:
        function: name that begins the message.
        label: what the message calls a tensor, with a place for its name.
        tensors: of this rank.
        group: the ranks.

    Raises:
        ValueError: on every rank, if they differ.
    """
    layout = {name: f"{_checks.dtype_name(each.dtype)} {list(each.shape)}" for name, each in tensors.items()}
    agree(function, group, {label.format(name): each for name, each in layout.items()})


def gather_experts(parts: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Gather stacked tensors [E / P, ...], which all ranks have, as [E, ...]; every rank must call it."""
    whole = dict(parts)
    for name in sorted(parts) if group.nranks > 1 else ():
        of_ranks: list[Tensor] = []
        paddle.distributed.all_gather(of_ranks, parts[name], group=group)
        whole[name] = paddle.concat(of_ranks)
    return whole


def shard_state_dict(state: Mapping[str, Tensor], layer: nn.Layer, group: Any = None) -> dict[str, Tensor]:
    """Cut this rank's part out of a whole state, for ``layer.set_state_dict``: a checkpoint fits any number of ranks.

    Ranks do not communicate. Bit-exact copies of experts; all other tensors are those of ``state``.

    Args:
        state: that of one process, or from `gather_state_dict`.
        layer: the model that it is for, wrapped or not.
        group: the ranks that share the experts, as `ExpertParallel` takes it.

    Returns:
        ``state``, in which each stacked parameter [E, ...] of experts is [E / P, ...].

    Raises:
        TypeError: the state is not a dict, the layer not a layer, or the group not a group.
        ValueError: a tensor does not have the shape that the layer's has, or a parameter of experts not those of all
            ranks; this process is not one of the group's ranks.
    """
    name = "shard_state_dict"
    group, layer = group_of(name, group), without_wrapper(name, layer)
    _checks.instance(name, "state", state, Mapping, "a dict of tensors, as gather_state_dict gives it")
    part, own, of_experts = dict(state), layer.state_dict(), set(_expert_names(layer))
    for key in sorted(own.keys() & part.keys()):
        given, shape = list(part[key].shape), list(own[key].shape)
        if key not in of_experts:
            if given != shape:
                _checks.bad_value(name, f"state[{key!r}]", f"of shape {shape}", given)
            continue
        count, *others = shape
        whole = [count * group.nranks, *others]
        if given != whole:
            _checks.bad_value(name, f"state[{key!r}]", f"of shape {whole}, the experts of {group.nranks} ranks", given)
        part[key] = part[key][group.rank * count : (group.rank + 1) * count]
    return part


def _expert_names(layer: nn.Layer) -> Sequence[str]:
    """The keys of parameters of experts in a state, in which layers used twice are twice."""
    own = nn.Layer.state_dict(layer, use_hook=False)  # hooks may return other tensors, without marks
    return sorted(name for name, value in own.items() if is_expert_parameter(value))
