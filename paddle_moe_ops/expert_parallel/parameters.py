# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of experts that are spread over ranks: how others know them, and their checkpoints."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight, shard_weight

from .. import _checks
from .._graphs import without_gradients
from .gathering import Part, agree_on_parts, copied, destination_of, gather_parts
from .groups import expert_group_of, group_of, groups_of_experts, raising_together
from .mixing import refuse_to_mix_experts

__all__ = [
    "copy_marks",
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
def gather_state_dict(
    layer: nn.Layer, group: Any = None, *, dst: int | None = None, to_cpu: bool = False
) -> dict[str, Tensor]:
    """Gather the state that a model would have in one process, with the experts of all ranks. All ranks must call it.

    Not differentiable. Bit-exact copies; the host waits for the other ranks. Parameters of experts are gathered one
    after the other.

    Args:
        layer: the model, or what `paddle.DataParallel` or ``fleet.distributed_model`` made of it; what
            `mark_expert_parameters` marked is gathered.
        group: the ranks that share the experts, as `ExpertParallel` takes it. None: each parameter is gathered from the
            group that it was marked with, so layers may have different groups, and from all ranks if it has none; then
            all ranks must call this.
        dst: the only rank that gets the state, a number of `paddle.distributed`, as in `paddle.distributed.gather`.
            None: all ranks get it.
        to_cpu: whether the tensors are returned in the host's memory. Each goes there before the next one is gathered,
            so a GPU has one whole parameter of experts at a time.

    Returns:
        ``layer.state_dict()``, in which stacked parameters [E / P, ...] of experts are [E, ...]; on other ranks than
        ``dst`` an empty dict.

    Raises:
        TypeError: the layer is not a layer, the group not a group, ``dst`` not an int, or ``to_cpu`` not a bool.
        ValueError: this process is not one of the group's ranks, other ranks share the experts, or ``dst`` is not one
            of the ranks; on every rank, if ranks that share experts have different parameters of them, or ``dst``
            differs.
        RuntimeError: another rank raised an error.
    """
    function = "gather_state_dict"
    everyone = group_of(function, group)
    with raising_together(function, everyone):
        destination = destination_of(function, everyone, dst, to_cpu)
        layer = without_wrapper(function, layer)
        state = dict(layer.state_dict())
        marked = _marked(layer)
        label = "layer.state_dict()[{!r}]"
        shared_by = groups_of_experts(function, label, marked, everyone, is_given=group is not None)
        parts = {name: Part(state[name], shared_by[name]) for name in marked}
    agree_on_parts(function, everyone, label, parts, destination)
    whole = gather_parts(parts, destination)
    if not destination.is_here:
        return {}
    return {name: whole[name] if name in whole else copied(value, destination) for name, value in state.items()}


def shard_state_dict(state: Mapping[str, Tensor], layer: nn.Layer, group: Any = None) -> dict[str, Tensor]:
    """Cut this rank's part out of a whole state, for ``layer.set_state_dict``: a checkpoint fits any number of ranks.

    Ranks do not communicate. Bit-exact copies of experts; all other tensors are those of ``state``.

    Args:
        state: that of one process, or from `gather_state_dict`. It has all experts of the layer; other tensors may be
            missing.
        layer: the model that it is for, wrapped or not.
        group: the ranks that share the experts, as `ExpertParallel` takes it. None: for each parameter the group that
            it was marked with, or all ranks if it has none.

    Returns:
        ``state``, in which each stacked parameter [E, ...] of experts is [E / P, ...].

    Raises:
        TypeError: the state is not a dict, the layer not a layer, or the group not a group.
        ValueError: the state lacks experts of the layer, or its keys have a prefix such as ``_layers.``; a tensor does
            not have the shape that the layer's has, or a parameter of experts not those of all ranks; other ranks than
            the group's share the experts; this process is not one of the group's ranks.
    """
    name = "shard_state_dict"
    everyone, layer = group_of(name, group), without_wrapper(name, layer)
    _checks.instance(name, "state", state, Mapping, "a dict of tensors, as gather_state_dict gives it")
    part, own, marked = dict(state), layer.state_dict(), _marked(layer)
    groups = groups_of_experts(name, "layer.state_dict()[{!r}]", marked, everyone, is_given=group is not None)
    _check_keys(name, part, own, marked)
    for key in sorted(own.keys() & part.keys()):
        given, shape = list(part[key].shape), list(own[key].shape)
        if key not in marked:
            if given != shape:
                _checks.bad_value(name, f"state[{key!r}]", f"of shape {shape}", given)
            continue
        count, *others = shape
        shared_by = groups[key]
        whole = [count * shared_by.nranks, *others]
        if given != whole:
            expected = f"of shape {whole}, the experts of {shared_by.nranks} ranks"
            _checks.bad_value(name, f"state[{key!r}]", expected, given)
        part[key] = part[key][shared_by.rank * count : (shared_by.rank + 1) * count]
    return part


def _check_keys(
    function: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor], experts: Mapping[str, Tensor]
) -> None:
    """Refuse a state of which ``layer.set_state_dict`` would load no experts, or nothing, with a warning at most."""
    missing = [key for key in experts if key not in state]
    if not missing and (not own or not own.keys().isdisjoint(state)):
        return
    key = next(iter(missing or own))
    for other in state:
        if other.endswith(f".{key}") and other not in own:
            expected, prefix = f"with keys of layer.state_dict(), such as {key!r}", other.removesuffix(key)
            _checks.bad_value(function, "state", expected, f"{other!r}, which has the prefix {prefix!r}")
    of_what = "all experts of the layer" if missing else "tensors of the layer"
    _checks.bad_value(function, "state", f"one with {of_what}", f"one without {key!r}")


def _marked(layer: nn.Layer) -> dict[str, Tensor]:
    """The parameters of experts by their keys in a state, in which layers used twice are twice."""
    own = nn.Layer.state_dict(layer, use_hook=False)  # hooks may return other tensors, without marks
    return {name: own[name] for name in sorted(own) if is_expert_parameter(own[name])}
