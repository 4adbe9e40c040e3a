# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of optimizer states with expert parallelism.

Paddle names an optimizer's tensors after the parameter's ``.name``, which contains a counter of created parameters.
These names differ between two models of one process, so a gathered state also contains the model's own names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from .. import _checks
from .._graphs import beside, without_gradients
from .agreement import group_of, raising_together
from .checkpoint import Part, agree_on_parts, copied, destination_of, gather_parts, without_wrapper
from .parameters import groups_of_experts, is_expert_parameter
from .placement import Placement, placement_of_parameter

__all__ = [
    "Entry",
    "entries_of",
    "gather_optimizer_state_dict",
    "is_power",
    "shard_optimizer_state_dict",
    "states_of_experts",
]

_MASTERS, _SCHEDULER = "master_weights", "LR_Scheduler"  # Paddle's entries that are not tensors
_NAMES = "parameter_names"  # entry of this package
_SHOWN_KEYS = 8
_INSTEAD_OF_GATHERING = "; save those that Fleet's sharding spreads over ranks with save_checkpoint"
# Suffix of a parameter's name: an accumulator's name and its number, after the master weight's if there is one.
_ENDING = re.compile(r"_.+_\d+")
# Adam's powers have shape [1] for parameters of any shape.
_POWER = re.compile(r".*_pow_acc_\d+")


class Entry(NamedTuple):
    """A tensor of a state.

    Attributes:
        label: its place in the state, for messages.
        parameter: the model's name for its parameter.
        ending: the rest of its name after the parameter's.
        value: the tensor.
        is_master: whether it is the parameter's master weight, not an accumulator.
    """

    label: str
    parameter: str
    ending: str
    value: Tensor
    is_master: bool

    @property
    def name(self) -> str:
        """A name that is the same on all ranks."""
        return self.parameter + self.ending


@without_gradients
def gather_optimizer_state_dict(
    optimizer: Any, layer: nn.Layer, group: Any = None, *, dst: int | None = None, to_cpu: bool = False
) -> dict[str, Any]:
    """Gather the one-process state of an optimizer. All ranks must call it.

    Its tensors are copies, so the optimizer may continue. Tensors of experts are gathered one after the other.

    Args:
        optimizer: one of `paddle.optimizer`; it need not have run a step.
        layer: the model, wrapped or not, with all parameters of the optimizer.
        group: the ranks that share the experts, as in `ExpertParallel`. None: for each parameter the group of its mark,
            so layers may have different groups, or all ranks if it has none; then all ranks must call this.
        dst: the only rank that receives the state, see `gather_state_dict`.
        to_cpu: whether the tensors are returned in host memory, see `gather_state_dict`.

    Returns:
        ``optimizer.state_dict()`` with [E, ...] tensors for stacked parameters of experts. One entry is added:
        ``"parameter_names"``, a dict from the names of ``layer.named_parameters()`` to the ``.name`` that keys begin
        with. `shard_optimizer_state_dict` removes it. On other ranks than ``dst`` an empty dict.

    Raises:
        TypeError: the optimizer has no ``state_dict``, the layer is not a layer, ``dst`` not an int, or ``to_cpu`` not
            a bool.
        ValueError: the optimizer is one of Fleet's that store parts of states on each rank; it has a tensor of none of
            the layer's parameters; its tensor for an expert's parameter has neither the shape of that parameter nor one
            element; other ranks than the group's share the experts; ``dst`` is not one of the ranks; the ranks' states
            or their ``dst`` differ.
        RuntimeError: another rank raised one of these errors.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import gather_optimizer_state_dict
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> optimizer.step()
        >>> state = gather_optimizer_state_dict(optimizer, model, dst=0, to_cpu=True)  # then on rank 0: paddle.save
        >>> name = state["parameter_names"]["experts.gate_up"]
        >>> state[f"{name}_moment1_0"].shape
        [8, 64, 64]
    """
    function = "gather_optimizer_state_dict"
    everyone = group_of(function, group)
    with raising_together(function, everyone):
        destination = destination_of(function, everyone, dst, to_cpu)
        layer = without_wrapper(function, layer)
        source, state = "optimizer.state_dict()", _state_of(function, optimizer, _INSTEAD_OF_GATHERING)
        names = _names_in(layer)
        entries = {each.name: each for each in entries_of(function, source, state, names, names)}
        shared_by = _groups_of_experts(function, layer, everyone, group is not None)
        placements, stacked = placements_in(layer, shared_by), _stacked(function, entries.values(), layer, {})
        parts = {}
        for name, each in entries.items():
            place = placements.get(each.parameter)
            parts[name] = Part(each.value, shared_by.get(each.parameter, everyone), place, name in stacked)
    agree_on_parts(function, everyone, source + " of {!r}", parts, destination)
    gathered = {name: each for name, each in parts.items() if each.is_stacked or each.is_missing_on_a_rank()}
    whole = gather_parts(gathered, destination)
    if not destination.is_here:
        return {}
    made = [
        each._replace(value=whole[name] if name in whole else copied(each.value, destination))
        for name, each in entries.items()
    ]
    return {**_state(made, state, names), _NAMES: names}


@without_gradients
def shard_optimizer_state_dict(state: Mapping[str, Any], layer: nn.Layer, group: Any = None) -> dict[str, Any]:
    """Cut this rank's part out of an optimizer's whole state, for ``optimizer.set_state_dict``.

    A checkpoint fits any ranks and placement, also one process. Ranks do not communicate. The optimizer's tensors are
    renamed after the present names of the layer's parameters. They keep their numbers, so load them into the first
    optimizer of these parameters. Master weights are moved to the device of their parameter.

    Args:
        state: from `gather_optimizer_state_dict`, or the ``state_dict()`` of an optimizer in one process whose
            parameters have the ``.name`` of the layer's. It contains tensors, as `paddle.load` returns them.
        layer: the model of the optimizer.
        group: the ranks that share the experts, as in `ExpertParallel`. None: for each parameter the group of its mark,
            or all ranks if it has none.

    Returns:
        the state, with this rank's part of the [E, ...] tensors of stacked parameters of experts. Its tensors are
        copies, since an optimizer stores and changes the tensors that it loads.

    Raises:
        TypeError: the state is not a mapping or has values that are not tensors; the layer is not a layer.
        ValueError: a key belongs to none of the layer's parameters; a tensor of an expert's parameter has neither the
            parameter's shape with the experts of all ranks nor one number; other ranks than the group's share the
            experts.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import gather_optimizer_state_dict, shard_optimizer_state_dict
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> optimizer.step()
        >>> state = gather_optimizer_state_dict(optimizer, model)  # or paddle.load(path)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> optimizer.set_state_dict(shard_optimizer_state_dict(state, model))
    """
    function = "shard_optimizer_state_dict"
    everyone = group_of(function, group)
    _checks.instance(function, "state", state, Mapping, "a dict, as gather_optimizer_state_dict returns it")
    layer = without_wrapper(function, layer)
    names = _names_in(layer)
    entries = entries_of(function, "state", state, state.get(_NAMES, names), names)
    shared_by = _groups_of_experts(function, layer, everyone, group is not None)
    placements = placements_in(layer, shared_by)
    stacked = _stacked(function, entries, layer, {name: len(each.ranks) for name, each in placements.items()})
    places, parts = {name: each.place for name, each in layer.named_parameters()}, []
    for each in entries:
        value = each.value
        if each.name in stacked:
            value = placements[each.parameter].part(value, shared_by[each.parameter].rank)
        value = beside(value.clone(), value)
        # Paddle's set_state_dict stores the tensor itself
        parts.append(each._replace(value=value.to(places[each.parameter]) if each.is_master else value))
    return _state(parts, state, names)


def states_of_experts(function: str, optimizer: Any, layer: nn.Layer) -> dict[str, dict[str, tuple[Tensor, bool]]]:
    """Return an optimizer's own tensors for experts, by the name of the parameter and by their own.

    A tensor has a flag: whether it is stacked, with a row per expert.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it divides its states between ranks, or has a tensor of none of the layer's parameters.
    """
    state, names = _state_of(function, optimizer, ""), _names_in(layer)
    entries = entries_of(function, "optimizer.state_dict()", state, names, names)
    stacked = _stacked(function, entries, layer, {})
    found: dict[str, dict[str, tuple[Tensor, bool]]] = {}
    for each in entries:
        found.setdefault(each.parameter, {})[each.name] = each.value, each.name in stacked
    return found


def _state_of(function: str, optimizer: Any, instead: str) -> dict[str, Any]:
    """Return an optimizer's state; raises if it divides its states, or their parameters, between ranks.

    Args:
        function: name that begins the messages.
        optimizer: any optimizer.
        instead: the end of the message, with the alternative.
    """
    if not callable(getattr(optimizer, "state_dict", None)):
        _checks.bad_type(function, "optimizer", "an optimizer of paddle.optimizer", type(optimizer).__name__)
    each = optimizer
    while each is not None:
        divides = DygraphShardingOptimizer, DygraphShardingOptimizerV2, GroupShardedOptimizerStage2
        if isinstance(each, divides) or hasattr(each, "update_slice"):  # of stage 3
            expected = f"one that keeps whole states on every rank{instead}"
            _checks.bad_value(function, "optimizer", expected, type(each).__name__)
        each = getattr(each, "__dict__", {}).get("_inner_opt")
    state: dict[str, Any] = optimizer.state_dict()
    return state


def placements_in(layer: nn.Layer, groups: Mapping[str, Group]) -> dict[str, Placement]:
    """Return the placement of each parameter of experts of a layer, by name."""
    parameters = dict(layer.named_parameters())
    return {name: placement_of_parameter(parameters[name], group) for name, group in groups.items()}


def _groups_of_experts(function: str, layer: nn.Layer, group: Group, is_given: bool) -> dict[str, Group]:
    parameters = {name: each for name, each in layer.named_parameters() if is_expert_parameter(each)}
    return groups_of_experts(function, "layer.named_parameters() {!r}", parameters, group, is_given=is_given)


def _names_in(layer: nn.Layer) -> dict[str, str]:
    return {name: parameter.name for name, parameter in layer.named_parameters()}


def entries_of(
    function: str, argument: str, state: Mapping[str, Any], names: Mapping[str, str], known: Collection[str]
) -> list[Entry]:
    """The tensors of a state.

    Args:
        function: name that begins the messages.
        argument: their term for the state.
        state: of an optimizer.
        names: the ``.name`` that keys begin with, by the model's name for the parameter.
        known: the model's names for its parameters.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: a key belongs to no parameter of the model.
    """
    _checks.instance(function, f"{argument}[{_NAMES!r}]", names, Mapping, "a dict of names")
    masters = state.get(_MASTERS, {})
    _checks.instance(function, f"{argument}[{_MASTERS!r}]", masters, Mapping, "a dict of tensors")
    owners = {key: name for name, key in names.items() if name in known}
    entries, unknown = [], []
    for key, value in masters.items():
        label = f"{argument}[{_MASTERS!r}][{key!r}]"
        _checks.instance(function, label, value, Tensor, "a tensor")
        if key in owners and value.name.startswith(key):
            entries.append(Entry(label, owners[key], value.name[len(key) :], value, True))
        else:
            unknown.append(f"{_MASTERS}: {key}")
    for key, value in state.items():
        if key in (_MASTERS, _SCHEDULER, _NAMES):
            continue
        owner = _owner(key, owners)
        if owner is None:
            unknown.append(key)
            continue
        label = f"{argument}[{key!r}]"
        _checks.instance(function, label, value, Tensor, "a tensor")
        entries.append(Entry(label, owners[owner], key[len(owner) :], value, False))
    if unknown:
        more = f" and {len(unknown) - _SHOWN_KEYS} more" if len(unknown) > _SHOWN_KEYS else ""
        expected = "what an optimizer keeps for parameters of the layer"
        _checks.bad_value(function, argument, expected, f"keys of no parameter: {unknown[:_SHOWN_KEYS]}{more}")
    return entries


def _owner(key: str, owners: Mapping[str, str]) -> str | None:
    """The longest name of a parameter that a key begins with."""
    end = key.rfind("_")
    while end > 0:
        if key[:end] in owners and _ENDING.fullmatch(key, end):
            return key[:end]
        end = key.rfind("_", 0, end)
    return None


def is_power(entry: Entry) -> bool:
    """True for a power of a decay rate, which has one element for a parameter of any shape."""
    return list(entry.value.shape) == [1] and _POWER.fullmatch(entry.ending) is not None


def _stacked(function: str, entries: Iterable[Entry], layer: nn.Layer, num_experts: Mapping[str, int]) -> set[str]:
    """Return the names of entries with a row per expert; other entries of experts must have one element.

    Args:
        function: name that begins the messages.
        entries: of a state.
        layer: the model.
        num_experts: their number in the entries of a parameter, by its name; by default that of this rank.
    """
    parameters = {name: each for name, each in layer.named_parameters() if is_expert_parameter(each)}
    found = set()
    for entry in entries:
        if entry.parameter not in parameters:
            continue
        count, *others = parameters[entry.parameter].shape
        shape, whole = list(entry.value.shape), [num_experts.get(entry.parameter, count), *others]
        if shape == whole and not is_power(entry):
            found.add(entry.name)
        elif shape not in ([], [1]):
            expected = f"of shape {whole}, as its parameter {entry.parameter!r} of experts is, or one number"
            _checks.bad_value(function, entry.label, expected, shape)
    return found


def _state(entries: Iterable[Entry], state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries as a state dict of Paddle, under the keys in ``names``, with the scheduler of ``state``."""
    made: dict[str, Any] = {}
    masters: dict[str, Tensor] = {}
    for entry in entries:
        key = names[entry.parameter]
        if entry.is_master:
            masters[key] = entry.value
            entry.value.name = key + entry.ending  # which its accumulators' keys begin with
        else:
            made[key + entry.ending] = entry.value
    if _MASTERS in state:
        made[_MASTERS] = masters
    if _SCHEDULER in state:
        made[_SCHEDULER] = state[_SCHEDULER]
    return made
