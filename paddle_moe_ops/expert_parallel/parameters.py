# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of distributed experts: their marks, the ranks that share them, and the Fleet guard.

Fleet guard: optimizers of Fleet that assume the same parameters on all ranks raise for experts, which differ.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .. import _checks
from .._graphs import context_manager
from .agreement import group_of
from .blocks import Box, Piece
from .placement import placement_of, placement_of_parameter

__all__ = [
    "are_copies_connected",
    "connect_copies",
    "copies_of",
    "copy_marks",
    "expert_group_of",
    "fleet_guard_lifted",
    "gradient_of",
    "group_of_experts",
    "groups_of_experts",
    "is_expert_parameter",
    "mark_expert_parameters",
    "pieces_of",
    "replace_value",
    "sharded_state_in_pieces",
    "sharded_state_of_experts",
    "sharding_color",
    "start_as_one",
]

_MAKER = "paddle_moe_ops.expert_parallel.distributed_optimizer"
_STAGE_1 = f"parameters that all its ranks have; make the optimizer with {_MAKER}"
_STAGES_2_AND_3 = "parameters that all its ranks have; use paddle_moe_ops.expert_parallel.group_sharded_parallel"
_guards: contextvars.ContextVar[bool] = contextvars.ContextVar("paddle_moe_ops_fleet_guard", default=True)
_in_pieces: contextvars.ContextVar[bool] = contextvars.ContextVar("paddle_moe_ops_in_pieces", default=False)
_SHARDING_COLOR = "moe_expert"  # the usual name in programs for Fleet
_NO_COPIES = -1
_connected: dict[tuple[int, ...], Group] = {}  # the same on all ranks, since all connect each of them


@context_manager
def fleet_guard_lifted() -> Iterator[None]:
    """Lift the Fleet guard for a caller that keeps the experts of different ranks apart itself."""
    token = _guards.set(False)
    try:
        yield
    finally:
        _guards.reset(token)


@functools.cache
def set_fleet_guard() -> None:
    """Install the Fleet guard: constructing an optimizer that would mix experts of several ranks raises ValueError."""
    _check_first(DygraphShardingOptimizer, lambda optimizer, *_, **__: optimizer._parameter_list, _STAGE_1)
    _check_first(DygraphShardingOptimizerV2, _without_color, _STAGE_1)
    _check_first(HybridParallelOptimizer, _without_color, _STAGE_1)  # it may clip by another norm on each rank
    _check_first(GroupShardedOptimizerStage2, lambda params, *_, **__: params, _STAGES_2_AND_3)
    _check_first(GroupShardedStage3, lambda layer, *_, **__: layer.parameters(), _STAGES_2_AND_3)


def _without_color(optimizer: Any, *_: Any, **__: Any) -> list[Tensor]:
    """Return the parameters without a color, which names the ranks with copies to the second sharding optimizer."""
    listed = optimizer._parameter_list or ()
    groups = [each["params"] if isinstance(each, dict) else [each] for each in listed]
    return [each for group in groups for each in group if not isinstance(getattr(each, "color", None), dict)]


def _check_first(kind: type, parameters_of: Callable[..., Any], expected: str) -> None:
    """Check the parameters in the constructor of a class."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        for each in parameters_of(*arguments, **options) if _guards.get() else ():
            group = expert_group_of(each)
            if group is not None:
                given = f"{each.name!r}, of experts on ranks {group.ranks}, each of which has others"
                _checks.bad_value(kind.__name__, "parameters", expected, given)
        make(self, *arguments, **options)

    kind.__init__ = checked  # type: ignore[misc]


def mark_expert_parameters(
    experts: nn.Layer, sharding_group: Any = None, *, group: Any = None, placement: Sequence[int] | None = None
) -> None:
    """Mark the parameters of a layer as those of experts that only this rank has; `MoELayer` marks its own.

    The marks are attributes that Paddle reads:

    * ``no_sync``: `paddle.DataParallel` neither broadcasts the parameters nor adds up their gradients;
    * ``expert``: Fleet treats them as experts;
    * ``color``, with a sharding group.

    Paddle's deep copies of parameters lose attributes: mark a copy again, unless its experts are `nn.SwiGLUExperts`.

    With a group, ``sharded_state_dict()`` of the layer, and of a model that contains it, has the shapes of the experts
    of all ranks and the offsets of this rank's, for `paddle.distributed.save_state_dict`. A class that defines
    ``sharded_state_dict`` keeps its own.

    Args:
        experts: a layer of stacked parameters, [experts of this rank, ...].
        sharding_group: the ranks with copies of the same experts. Fleet's ``DygraphShardingOptimizerV2`` divides
            optimizer states and averages gradients between them. None: the attribute does not change, and
            `distributed_optimizer` sets it if necessary.
        group: the ranks that share the experts, as in `ExpertParallel`. `distributed_optimizer` and
            ``sharded_state_dict()`` need it. If it has several ranks, constructing an optimizer of Fleet that would mix
            their experts raises a ValueError. None: the group does not change.
        placement: with a group, the rank of each expert, as in `ExpertParallel`; a rank's experts are ascending. None:
            each rank has as many experts as this one, in the order of ranks.

    Raises:
        TypeError: the layer is not a layer, a group is not a group, or the placement not a list of ints.
        ValueError: this process is not one of a group's ranks; a placement without a group, or one that gives this rank
            another number of experts than a parameter has.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import is_expert_parameter, mark_expert_parameters
        >>> from paddle_moe_ops.nn import SwiGLUExperts
        >>> experts = SwiGLUExperts(8, 64, 32)
        >>> mark_expert_parameters(experts)  # with ranks: group=group
        >>> all(map(is_expert_parameter, experts.parameters()))
        True
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
            set_fleet_guard()
    ranks = None if placement is None else _ranks_of(function, placement, experts, shared_by)
    for parameter in experts.parameters():
        parameter.no_sync = parameter.expert = True
        if color is not None:
            parameter.color = dict(color)
        if shared_by is not None:  # a number, since parameters are copied with their attributes
            parameter.expert_group_id, parameter.expert_placement = shared_by.id, ranks
    for each in experts.sublayers(include_self=True):
        if type(each).sharded_state_dict is nn.Layer.sharded_state_dict:
            each.sharded_state_dict = types.MethodType(_sharded_state_of_marked, each)


def _ranks_of(function: str, placement: Any, experts: nn.Layer, group: Group | None) -> tuple[int, ...]:
    """Check the placement of a layer's experts, and return the rank of each."""
    if group is None:
        _checks.bad_value(function, "placement", "None without a group", "one")
    ranks = _checks.listed(function, "placement", placement, "a list of the rank of each expert, or None")
    made = placement_of(function, ranks, len(ranks), group.nranks)
    for name, parameter in experts.named_parameters():
        if parameter.shape[0] != made.counts[group.rank]:
            expected = f"one in which rank {group.rank} has {parameter.shape[0]} experts, as {name!r} has"
            _checks.bad_value(function, "placement", expected, made.counts[group.rank])
    return made.ranks


def copy_marks(source: nn.Layer, target: nn.Layer) -> None:
    """Copy the marks of a layer's parameters to those of its copy: Paddle copies parameters without attributes."""
    for mine, other in zip(source.parameters(), target.parameters(), strict=True):
        for name in ("no_sync", "expert", "color", "expert_group_id", "expert_placement"):
            if hasattr(mine, name):
                setattr(other, name, getattr(mine, name))


class _Pieces(ShardedWeight):
    """A rank's part of a tensor, which need not be one block of it."""

    def __init__(self, key: str, part: Tensor, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
        super().__init__(key, part, tuple(part.shape), shape, (0,) * len(shape))
        self.pieces = pieces


def pieces_of(weight: ShardedWeight) -> tuple[Piece, ...]:
    """Return the pieces of a result of `sharded_state_in_pieces`."""
    if isinstance(weight, _Pieces):
        return weight.pieces
    shape = tuple(weight.local_shape)
    return (Piece(Box((0,) * len(shape), shape), tuple(weight.global_offset)),)


def sharded_state_in_pieces(layer: nn.Layer) -> dict[str, ShardedWeight]:
    """Return ``layer.sharded_state_dict()`` for `pieces_of`, so experts of a rank need not be one block."""
    token = _in_pieces.set(True)
    try:
        return layer.sharded_state_dict()
    finally:
        _in_pieces.reset(token)


def sharded_state_of_experts(layer: nn.Layer, structured_name_prefix: str = "") -> dict[str, ShardedWeight]:
    """Return Paddle's ``sharded_state_dict()`` of a layer, with global shapes and offsets of marked parameters.

    Args:
        layer: has stacked parameters of experts, [experts of this rank, ...]. If model parallel ranks split them, its
            ``split_axes`` has for each name the axis, and the number of matrices along it that are split alike;
            otherwise a parameter's ``split_axis`` is the axis, as in Fleet's layers.
        structured_name_prefix: begins all keys.

    Raises:
        ValueError: a parameter was marked without a group; a rank has no experts, or those of a rank are not one block;
            experts are split along an unknown axis.
    """
    state: dict[str, ShardedWeight] = nn.Layer.sharded_state_dict(layer, structured_name_prefix)
    own = nn.Layer.state_dict(layer, include_sublayers=False, use_hook=False)
    for name, parameter in own.items():
        if not is_expert_parameter(parameter):
            continue
        group, key = expert_group_of(parameter), structured_name_prefix + name
        model = _model_parallel_group() if parameter.is_distributed else None
        if group is not None or model is not None:
            axis, matrices = getattr(layer, "split_axes", {}).get(name, (getattr(parameter, "split_axis", None), 1))
            columns = None if model is None else _columns_of(key, parameter, model, axis, matrices)
            state[key] = _sharded_weight(key, state[key].local_tensor, parameter, group, columns)
        elif not hasattr(parameter, "expert_group_id") and paddle.distributed.get_world_size() > 1:
            expected = f"the ranks that share the experts of {key!r}"
            _checks.bad_value("sharded_state_dict", "group of mark_expert_parameters", expected, None)
    return state


def _model_parallel_group() -> Group | None:
    """Return the ranks of Fleet that split parameters with ``is_distributed``; None if there are no others."""
    topology = getattr(fleet.fleet, "_hcg", None)
    if topology is None or topology.get_model_parallel_world_size() == 1:
        return None
    group: Group = topology.get_model_parallel_group()
    return group


class _Columns(NamedTuple):
    """The columns of each expert that a model parallel rank has.

    Attributes:
        axis: of the stacked parameter.
        size: the number of columns of all ranks.
        ranges: of each matrix the first own column, the first column in the whole expert, and the number of columns.
    """

    axis: int
    size: int
    ranges: list[tuple[int, int, int]]


def _columns_of(key: str, parameter: Tensor, model: Group, axis: int | None, matrices: int) -> _Columns:
    """Return the columns of a parameter that the model parallel ranks split."""
    if axis is None or not 0 < axis < len(parameter.shape):
        expected = f"an axis of an expert on {key!r}, which model parallel ranks split (is_distributed)"
        _checks.bad_value("sharded_state_dict", "split_axis", expected, axis)
    if matrices > 1 and not _in_pieces.get():
        expected = f"one block on each rank for {key!r}, which has columns of {matrices} matrices; use save_checkpoint"
        _checks.bad_value("sharded_state_dict", "experts", expected, f"experts split between ranks {model.ranks}")
    count = parameter.shape[axis] // matrices
    ranges = [(n * count, (n * model.nranks + model.rank) * count, count) for n in range(matrices)]
    return _Columns(axis, parameter.shape[axis] * model.nranks, ranges)


def _sharded_weight(
    key: str, part: Tensor, parameter: Tensor, group: Group | None, columns: _Columns | None
) -> ShardedWeight:
    """Return a rank's part of a tensor, which Paddle's checkpoints need as one block.

    Args:
        key: of the tensor.
        part: the tensor.
        parameter: the parameter with the marks.
        group: the ranks that share the experts; None: this rank has all.
        columns: of each expert, if model parallel ranks split them.
    """
    placement = placement_of_parameter(parameter, group or Group(0, -1, [0]))
    if not placement.is_in_blocks and not _in_pieces.get():
        expected = (
            f"one in which each rank has experts that follow each other, for {key!r}; use save_checkpoint, or "
            "move_experts before you save"
        )
        _checks.bad_value("sharded_state_dict", "placement", expected, placement)
    shape, rest = [len(placement.ranks), *part.shape[1:]], part.shape[1:]
    pieces, first = [], 0
    for start, end in placement.runs(group.rank if group is not None else 0):
        box = Box((first, *(0 for _ in rest)), (end - start, *rest))
        pieces.append(Piece(box, (start, *(0 for _ in rest))))
        first += end - start
    if columns is not None:
        shape[columns.axis] = columns.size
        pieces = [_columns_in(piece, columns.axis, *each) for piece in pieces for each in columns.ranges]
    if _in_pieces.get():
        return _Pieces(key, part, tuple(shape), tuple(pieces))
    ((box, offset),) = pieces
    return ShardedWeight(key, part, box.shape, tuple(shape), offset)


def _columns_in(piece: Piece, axis: int, own: int, offset: int, count: int) -> Piece:
    """Return some columns of experts."""
    start, shape, place = (list(each) for each in (*piece.box, piece.offset))
    start[axis], shape[axis], place[axis] = own, count, offset
    return Piece(Box(tuple(start), tuple(shape)), tuple(place))


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


def sharding_color(copies: Group) -> dict[str, Any]:
    """Return the ``color`` by which Fleet's ``DygraphShardingOptimizerV2`` divides experts between ``copies``."""
    return {"color": _SHARDING_COLOR, "group": copies}


def is_expert_parameter(parameter: Tensor) -> bool:
    """Return True if `mark_expert_parameters` marked a parameter.

    `paddle.incubate.distributed.models.moe.ClipGradForMOEByGlobalNorm`, which clips by the norm over all ranks, accepts
    this function.

    Examples:
        >>> from paddle_moe_ops.expert_parallel import is_expert_parameter, mark_expert_parameters
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)
        >>> mark_expert_parameters(model.experts)  # with ranks: group=group
        >>> [name for name, each in model.named_parameters() if is_expert_parameter(each)]
        ['experts.gate_up', 'experts.down']
    """
    return bool(getattr(parameter, "expert", False))


def replace_value(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another value, of any shape; graphs that have read it raise in their backward pass."""
    tensor._bump_inplace_version()
    tensor.data = value


def start_as_one(layers: Iterable[nn.Layer | None], group: Group) -> None:
    """Broadcast the parameters and buffers of layers from the first rank of the group."""
    if group.nranks == 1:
        return
    for layer in layers:
        for _, value in sorted(layer.state_dict().items()) if layer is not None else ():
            paddle.distributed.broadcast(value, src=group.ranks[0], group=group)


def group_of_experts(parameter: Tensor, otherwise: Group) -> Group:
    """Return the group of a parameter's mark, whose ranks share its experts; ``otherwise`` if the mark has none."""
    number = getattr(parameter, "expert_group_id", None)
    if number is None:
        return otherwise
    if number < 0:  # this rank alone, as returned by `group_of`
        return Group(0, -1, [paddle.distributed.get_rank()], name="expert_parallel_alone")
    return paddle.distributed.get_group(number) or otherwise


def expert_group_of(parameter: Tensor) -> Group | None:
    """Return the group that shares the experts of a parameter if it has several ranks, otherwise None."""
    group = group_of_experts(parameter, Group(0, -1, [0]))
    return None if group.nranks == 1 else group


def check_group_of_experts(function: str, label: str, parameters: Mapping[Any, Tensor], group: Group) -> None:
    """Check that a group is the one whose ranks share the experts.

    Args:
        function: name that begins the message.
        label: the term for a parameter, with {!r} in place of its key.
        parameters: any parameters, by key.
        group: the group that the caller passed.

    Raises:
        ValueError: a parameter is marked as that of experts which other ranks share.
    """
    for key, parameter in parameters.items():
        own = group_of_experts(parameter, group)
        if own.ranks != group.ranks:
            expected = f"the group that shares the experts of {label.format(key)}, ranks {own.ranks}"
            _checks.bad_value(function, "group", expected, f"ranks {group.ranks}")


def groups_of_experts(
    function: str, label: str, parameters: Mapping[Any, Tensor], group: Group, *, is_given: bool
) -> dict[Any, Group]:
    """Return the ranks that share the experts of each parameter.

    Args:
        function: name that begins the message.
        label: the term for a parameter, with {!r} in place of its key.
        parameters: parameters of experts, by key.
        group: of a parameter whose mark names none.
        is_given: whether the caller chose the group, so that it must be that of each mark.

    Raises:
        ValueError: a parameter is marked as that of experts which other ranks share.
    """
    if is_given:
        check_group_of_experts(function, label, parameters, group)
    return {key: group_of_experts(each, group) for key, each in parameters.items()}


def are_copies_connected(parameter: Tensor, everyone: Group) -> bool:
    """True if `connect_copies` has connected the copies of a parameter whose experts only some ranks share."""
    return getattr(parameter, "expert_copies", (None,))[0] == group_of_experts(parameter, everyone).id


def copies_of(parameter: Tensor, everyone: Group) -> Group | None:
    """Return the ranks with copies of this rank's experts, one per group; None if there are no others."""
    if group_of_experts(parameter, everyone).ranks == everyone.ranks:
        return None
    number: int = parameter.expert_copies[1]
    return None if number == _NO_COPIES else paddle.distributed.get_group(number)


def connect_copies(function: str, experts: Mapping[str, Tensor], everyone: Group) -> None:
    """Connect the copies of parameters for `copies_of`; every rank must call it, with the same order of parameters.

    Groups of a parameter have one size on all ranks.

    Args:
        function: name that begins the message.
        experts: parameters by their names in messages.
        everyone: all ranks.

    Raises:
        ValueError: on every rank, if the groups of a parameter overlap.
    """
    of_ranks: list[Any] = []
    own = [group_of_experts(each, everyone) for each in experts.values()]
    paddle.distributed.all_gather_object(of_ranks, [tuple(each.ranks) for each in own], group=everyone)
    this = everyone.ranks[everyone.rank]
    for number, (label, parameter) in enumerate(experts.items()):
        groups = [each[number] for each in of_ranks]
        parts = sorted(set(groups))
        if any(groups[everyone.ranks.index(rank)] != part for part in parts for rank in part):
            expected = "shared by groups that have each rank once"
            _checks.bad_value(function, label, expected, f"groups of ranks {[list(each) for each in parts]}")
        for copies in zip(*parts, strict=True):
            group = _group_of(copies, everyone)
            if this in copies:
                parameter.expert_copies = (own[number].id, _NO_COPIES if group is None else group.id)


def _group_of(copies: tuple[int, ...], everyone: Group) -> Group | None:
    if len(copies) == 1:
        return None
    if list(copies) == everyone.ranks:
        return everyone
    if copies not in _connected:
        _connected[copies] = paddle.distributed.new_group(list(copies))
        paddle.distributed.barrier(group=everyone)  # gloo needs it between groups
    return _connected[copies]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return ``main_grad`` of a parameter if it is set, otherwise its ``grad``."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
