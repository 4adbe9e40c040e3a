# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models with expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

from .. import _checks
from .._graphs import beside, without_gradients
from .agreement import group_of, raising_together, values_of_ranks
from .parameters import groups_of_experts, is_expert_parameter
from .placement import Placement, placement_of_parameter

__all__ = [
    "Part",
    "agree_on_parts",
    "copied",
    "destination_of",
    "gather_parts",
    "gather_state_dict",
    "of_rank_with_experts",
    "shard_state_dict",
    "without_wrapper",
]


class Part(NamedTuple):
    """A tensor of this rank.

    Attributes:
        value: any shape; with a placement the experts of this rank, [experts, ...].
        group: the ranks that must have tensors of the same name and dtype, and of the same shape or placement.
        placement: of the experts whose tensor it is; None: it is none of experts.
        is_stacked: whether it has a row for each expert. Otherwise ranks with experts have the same; other ranks may
            have another one, since optimizers skip parameters without elements.
    """

    value: Tensor
    group: Group
    placement: Placement | None = None
    is_stacked: bool = True

    def is_missing_on_a_rank(self) -> bool:
        """True if it is of experts, and a rank has none."""
        return self.placement is not None and 0 in self.placement.counts

    def layout(self) -> str:
        """The text of its layout, the same on all ranks of the group."""
        dtype, shape = _checks.dtype_name(self.value.dtype), list(self.value.shape)
        if self.placement is None or self.placement.is_even or not self.is_stacked:
            return f"{dtype} {shape}"
        return f"{dtype} {[len(self.placement.ranks), *shape[1:]]} placed on ranks {self.placement}"


class Destination(NamedTuple):
    """The ranks that receive whole tensors, and the memory of these.

    Attributes:
        rank: of `paddle.distributed`; None: all ranks.
        is_here: whether this rank receives them.
        to_cpu: whether they are in host memory.
    """

    rank: int | None
    is_here: bool
    to_cpu: bool


def destination_of(function: str, group: Group, dst: Any, to_cpu: Any) -> Destination:
    """Check the arguments ``dst`` and ``to_cpu`` of a function.

    Args:
        function: name that begins the messages.
        group: the ranks that call it.
        dst: a rank of `paddle.distributed`, or None for all.
        to_cpu: a bool.

    Raises:
        TypeError: ``dst`` is no int, or ``to_cpu`` no bool.
        ValueError: ``dst`` is not in the group.
    """
    to_cpu = _checks.flag(function, "to_cpu", to_cpu)
    if dst is None:
        return Destination(None, True, to_cpu)
    if isinstance(dst, bool) or not isinstance(dst, int):
        _checks.bad_type(function, "dst", "an int, or None", type(dst).__name__)
    if dst not in group.ranks:
        _checks.bad_value(function, "dst", f"one of the ranks {group.ranks}, or None", dst)
    return Destination(dst, dst == group.ranks[group.rank], to_cpu)


def agree_on_parts(
    function: str, everyone: Group, label: str, parts: Mapping[str, Part], destination: Destination
) -> None:
    """Check that the ranks of each group have tensors of the same names, dtypes and shapes.

    All ranks exchange their parts, so an error in one group is raised on the ranks of every group.

    Args:
        function: name that begins the message.
        everyone: the ranks of all groups; each of them must call this.
        label: the message's term for a tensor, with {!r} in place of its name.
        parts: of this rank.
        destination: must be the same rank for all.

    Raises:
        ValueError: on every rank, if they differ.
    """
    if everyone.nranks == 1:
        return
    own = {"dst": (str(destination.rank), tuple(everyone.ranks))}
    for name, part in parts.items():
        shared_by = "" if part.group.ranks == everyone.ranks else f" of ranks {part.group.ranks}"
        own[label.format(name)] = (part.layout() + shared_by, tuple(part.group.ranks))
    of_ranks: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    paddle.distributed.all_gather_object(of_ranks, own, group=everyone)
    by_rank = dict(zip(everyone.ranks, of_ranks, strict=True))
    groups = {(name, ranks): None for each in of_ranks for name, (_, ranks) in each.items()}
    for name, ranks in groups:
        layouts = {rank: by_rank[rank].get(name, (None,))[0] for rank in ranks}
        if len(set(layouts.values())) > 1:
            given = values_of_ranks(map(repr, layouts.values()), layouts)
            _checks.bad_value(function, name, "the same on all ranks of the group", given)


def gather_parts(parts: Mapping[str, Part], destination: Destination) -> dict[str, Tensor]:
    """Gather stacked tensors of experts as [E, ...], one after the other; every rank must call it.

    The groups' collectives follow the order of names. The ranks of a group have the same names, so groups that overlap
    cannot wait for each other.

    Args:
        parts: agreed on by the ranks.
        destination: of the whole tensors.

    Returns:
        whole tensors, copies; an empty dict on other ranks than the destination.
    """
    whole = {}
    for name in sorted(parts):
        gathered = _gathered(parts[name], destination)
        if gathered is not None:
            whole[name] = gathered
    return whole


def _gathered(part: Part, destination: Destination) -> Tensor | None:
    value, group, placement, is_stacked = part
    if group.nranks == 1:
        return copied(value, destination) if destination.is_here else None
    if placement is None:
        raise AssertionError("only tensors of experts are gathered")
    if not is_stacked:
        value = of_rank_with_experts(value, group, placement)
        return copied(value, destination) if destination.is_here else None
    if value.shape[0] < placement.slots_per_rank:  # collectives need one shape
        missing = paddle.zeros([placement.slots_per_rank - value.shape[0], *value.shape[1:]], value.dtype)
        # A tensor without elements may be on the host. The current device is that of collectives.
        value = paddle.concat([value, beside(missing, value)]) if value.shape[0] else missing
    of_ranks: list[Tensor] = []
    if destination.rank is None:
        paddle.distributed.all_gather(of_ranks, value, group=group)
    elif destination.rank in group.ranks:
        paddle.distributed.gather(value, of_ranks if destination.is_here else None, destination.rank, group)
    if not destination.is_here:
        return None
    of_ranks = [each[:count] for each, count in zip(of_ranks, placement.counts, strict=True)]
    if destination.to_cpu:
        of_ranks = [each.cpu() for each in of_ranks]
    return placement.whole(of_ranks)


def of_rank_with_experts(value: Tensor, group: Group, placement: Placement) -> Tensor:
    """Return the small tensor of the first rank that has experts; every rank must call it."""
    of_ranks: list[Any] = []
    paddle.distributed.all_gather_object(of_ranks, value.numpy(), group=group)  # it may be on the host
    return paddle.to_tensor(of_ranks[placement.first_rank], place=value.place)


def copied(value: Tensor, destination: Destination) -> Tensor:
    """Return a copy of a tensor in the memory of the destination."""
    if destination.to_cpu and not value.place.is_cpu_place():
        return value.cpu()
    return beside(value.clone(), value)


def without_wrapper(function: str, layer: Any) -> nn.Layer:
    """Return the model inside the wrapper of `paddle.DataParallel`, Fleet or `group_sharded_parallel`, if any.

    Raises:
        TypeError: it is not a layer; the message begins with the function's name.
    """
    _checks.instance(function, "layer", layer, nn.Layer, "a Layer")
    sharded = GroupShardedStage2, GroupShardedStage3
    while isinstance(layer, (paddle.DataParallel, MetaParallelBase, MixPrecisionLayer, *sharded)):
        layer = layer._layer if isinstance(layer, sharded) else layer._layers
    return layer


@without_gradients
def gather_state_dict(
    layer: nn.Layer, group: Any = None, *, dst: int | None = None, to_cpu: bool = False
) -> dict[str, Tensor]:
    """Gather the one-process state of a model, with the experts of all ranks. All ranks must call it.

    Not differentiable. Bit-exact copies; the host waits for the other ranks. Parameters of experts are gathered one
    after the other.

    Args:
        layer: the model, or its wrapper by `paddle.DataParallel` or ``fleet.distributed_model``. Parameters marked by
            `mark_expert_parameters` are gathered.
        group: the ranks that share the experts, as in `ExpertParallel`. None: each parameter is gathered from the group
            of its mark, so layers may have different groups, or from all ranks if it has none; then all ranks must call
            this.
        dst: the only rank that receives the state, a number of `paddle.distributed`, as in `paddle.distributed.gather`.
            None: all ranks receive it.
        to_cpu: whether the tensors are returned in host memory. Each is copied to the host before the next one is
            gathered, so a GPU contains one whole parameter of experts at a time.

    Returns:
        ``layer.state_dict()``, in which stacked parameters of experts are [E, ...], in the order of experts for any
        placement; on other ranks than ``dst`` an empty dict.

    Raises:
        TypeError: the layer is not a layer, the group not a group, ``dst`` not an int, or ``to_cpu`` not a bool.
        ValueError: this process is not one of the group's ranks, other ranks share the experts, or ``dst`` is not one
            of the ranks; on every rank, if ranks that share experts have different parameters of them, or ``dst``
            differs.
        RuntimeError: another rank raised an error.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import gather_state_dict
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> state = gather_state_dict(model, dst=0, to_cpu=True)  # then on rank 0: paddle.save(state, path)
        >>> state["experts.gate_up"].shape
        [8, 64, 64]
    """
    function = "gather_state_dict"
    everyone = group_of(function, group)
    with raising_together(function, everyone):
        destination = destination_of(function, everyone, dst, to_cpu)
        layer = without_wrapper(function, layer)
        state = dict(layer.state_dict())
        _check_gathered(function, state)
        marked = _marked(layer)
        label = "layer.state_dict()[{!r}]"
        shared_by = groups_of_experts(function, label, marked, everyone, is_given=group is not None)
        parts = {
            name: Part(state[name], shared_by[name], placement_of_parameter(each, shared_by[name]))
            for name, each in marked.items()
        }
    agree_on_parts(function, everyone, label, parts, destination)
    whole = gather_parts(parts, destination)
    if not destination.is_here:
        return {}
    return {name: whole[name] if name in whole else copied(value, destination) for name, value in state.items()}


def shard_state_dict(state: Mapping[str, Tensor], layer: nn.Layer, group: Any = None) -> dict[str, Tensor]:
    """Cut this rank's part out of a whole state, for ``layer.set_state_dict``: a checkpoint fits any ranks.

    Neither the number of ranks nor the placement of experts has to be that of the model that was saved.

    Ranks do not communicate. Bit-exact copies of experts; all other tensors are those of ``state``.

    Args:
        state: a one-process state, or the result of `gather_state_dict`. It contains all experts of the layer; other
            tensors may be missing.
        layer: the model that loads it, wrapped or not.
        group: the ranks that share the experts, as in `ExpertParallel`. None: for each parameter the group of its mark,
            or all ranks if it has none.

    Returns:
        ``state``, in which each stacked parameter [E, ...] of experts has those of this rank.

    Raises:
        TypeError: the state is not a dict, the layer not a layer, or the group not a group.
        ValueError: the state lacks experts of the layer, or its keys have a prefix such as ``_layers.``; a tensor does
            not have the shape that the layer's has, or a parameter of experts not those of all ranks; other ranks than
            the group's share the experts; this process is not one of the group's ranks.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import gather_state_dict, shard_state_dict
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> state = gather_state_dict(model)  # or paddle.load(path)
        >>> missing, unexpected = model.set_state_dict(shard_state_dict(state, model))
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
        shared_by = groups[key]
        placement = placement_of_parameter(marked[key], shared_by)
        whole = [len(placement.ranks), *shape[1:]]
        if given != whole:
            expected = f"of shape {whole}, the experts of {shared_by.nranks} ranks"
            _checks.bad_value(name, f"state[{key!r}]", expected, given)
        part[key] = placement.part(part[key], shared_by.rank)
    return part


def _check_keys(
    function: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor], experts: Mapping[str, Tensor]
) -> None:
    """Raise for a state of which ``layer.set_state_dict`` would load no experts and at most warn."""
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


def _check_gathered(function: str, state: Mapping[str, Tensor]) -> None:
    """Raise for tensors that sharding of stage 3 has divided between ranks."""
    for name, each in state.items():
        if each.size and not each._is_initialized():
            expected = "gathered by get_all_parameters() of the model on all ranks, or saved by save_checkpoint"
            _checks.bad_value(function, f"layer.state_dict()[{name!r}]", expected, "divided between ranks")


def _marked(layer: nn.Layer) -> dict[str, Tensor]:
    """Return the parameters of experts by their keys in a state; a layer that is used twice has two keys."""
    own = nn.Layer.state_dict(layer, use_hook=False)  # hooks may return other tensors, without marks
    return {name: own[name] for name in sorted(own) if is_expert_parameter(own[name])}
