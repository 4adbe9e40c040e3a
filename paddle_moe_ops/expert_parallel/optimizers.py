# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of optimizers whose parameters are spread over ranks.

Paddle names what an optimizer keeps after the parameter's ``.name``, and numbers parameters as they are made. These
names differ between two models of one process, so a gathered state also says what the model itself calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from .. import _checks
from .._graphs import without_gradients
from .agreement import group_of, raising_together
from .checkpoint import Part, agree_on_parts, copied, destination_of, gather_parts, without_wrapper
from .parameters import groups_of_experts, is_expert_parameter

__all__ = ["gather_optimizer_state_dict", "shard_optimizer_state_dict"]

_MASTERS, _SCHEDULER = "master_weights", "LR_Scheduler"  # Paddle's entries that are not tensors
_NAMES = "parameter_names"  # and ours
_SHOWN_KEYS = 8
# What follows a parameter's name: an accumulator's name and its number, with the master weight's before them.
_ENDING = re.compile(r"_.+_\d+")
# Adam's powers have shape [1] whatever the parameter's shape is.
_POWER = re.compile(r".*_pow_acc_\d+")


class _Entry(NamedTuple):
    """A tensor of a state.

    Attributes:
        label: where the state has it, for messages.
        parameter: what the model calls its parameter.
        ending: of its name, after the parameter's.
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
        """The same on all ranks."""
        return self.parameter + self.ending


@without_gradients
def gather_optimizer_state_dict(
    optimizer: Any, layer: nn.Layer, group: Any = None, *, dst: int | None = None, to_cpu: bool = False
) -> dict[str, Any]:
    """Gather the state that an optimizer would have in one process. All ranks must call it.

    Its tensors are copies, so the optimizer may go on. Those of experts are gathered one after the other.

    Args:
        optimizer: one of `paddle.optimizer`; it need not have taken a step.
        layer: the model, wrapped or not, with all parameters of the optimizer.
        group: the ranks that share the experts, as `ExpertParallel` takes it. None: for each parameter the group that
            it was marked with, so layers may have different groups, and all ranks if it has none; then all ranks must
            call this.
        dst: the only rank that gets the state, see `gather_state_dict`.
        to_cpu: whether the tensors are returned in the host's memory, see `gather_state_dict`.

    Returns:
        ``optimizer.state_dict()``, in which what the optimizer keeps for stacked parameters [E / P, ...] of experts is
        [E, ...], with one more entry: ``"parameter_names"``, a dict from the names of ``layer.named_parameters()`` to
        the ``.name`` that keys begin with. `shard_optimizer_state_dict` takes it out. On other ranks than ``dst`` an
        empty dict.

    Raises:
        TypeError: the optimizer has no ``state_dict``, the layer is not a layer, ``dst`` not an int, or ``to_cpu`` not
            a bool.
        ValueError: the optimizer is one of Fleet's that keep parts of states on each rank, or has something that
            belongs to none of the layer's parameters, or keeps for an expert's parameter neither a tensor of its shape
            nor one number; other ranks than the group's share the experts; ``dst`` is not one of the ranks; the ranks'
            states or their ``dst`` differ.
        RuntimeError: another rank raised one of these errors.
    """
    function = "gather_optimizer_state_dict"
    everyone = group_of(function, group)
    with raising_together(function, everyone):
        destination = destination_of(function, everyone, dst, to_cpu)
        layer = without_wrapper(function, layer)
        if not callable(getattr(optimizer, "state_dict", None)):
            _checks.bad_type(function, "optimizer", "an optimizer of paddle.optimizer", type(optimizer).__name__)
        _refuse_parts_of_fleet(function, optimizer)
        source, state = "optimizer.state_dict()", optimizer.state_dict()
        names = _names_in(layer)
        entries = {each.name: each for each in _entries(function, source, state, names, layer)}
        shared_by = _groups_of_experts(function, layer, everyone, group is not None)
        stacked = _stacked(function, entries.values(), layer, {})
        parts = {name: Part(each.value, shared_by.get(each.parameter, everyone)) for name, each in entries.items()}
    agree_on_parts(function, everyone, source + " of {!r}", parts, destination)
    whole = gather_parts({name: parts[name] for name in stacked}, destination)
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

    A checkpoint fits any number of ranks, one process too. Ranks do not communicate. The optimizer's tensors get the
    names that the layer's parameters have now, whatever they had when the state was gathered; they keep their numbers,
    so load them into the first optimizer of these parameters. Master weights go to the device of their parameter.

    Args:
        state: from `gather_optimizer_state_dict`, or the ``state_dict()`` of an optimizer in one process whose
            parameters have the ``.name`` of the layer's. It holds tensors, as `paddle.load` gives them.
        layer: the model that the optimizer is for.
        group: the ranks that share the experts, as `ExpertParallel` takes it. None: for each parameter the group that
            it was marked with, or all ranks if it has none.

    Returns:
        the state, in which what belongs to stacked parameters of experts is [E / P, ...] instead of [E, ...]. Its
        tensors are copies, since an optimizer keeps and changes what it is given.

    Raises:
        TypeError: the state is not a mapping or has values that are not tensors; the layer is not a layer.
        ValueError: a key belongs to none of the layer's parameters; a tensor of an expert's parameter has neither the
            parameter's shape with the experts of all ranks nor one number; other ranks than the group's share the
            experts.
    """
    function = "shard_optimizer_state_dict"
    everyone = group_of(function, group)
    _checks.instance(function, "state", state, Mapping, "a dict, as gather_optimizer_state_dict returns it")
    layer = without_wrapper(function, layer)
    names = _names_in(layer)
    entries = _entries(function, "state", state, state.get(_NAMES, names), layer)
    shared_by = _groups_of_experts(function, layer, everyone, group is not None)
    stacked = _stacked(function, entries, layer, {name: each.nranks for name, each in shared_by.items()})
    places, parts = {name: each.place for name, each in layer.named_parameters()}, []
    for each in entries:
        value = each.value
        if each.name in stacked:
            value = _part(value, shared_by[each.parameter])
        value = value.clone()
        # Paddle's set_state_dict keeps the tensor itself
        parts.append(each._replace(value=value.to(places[each.parameter]) if each.is_master else value))
    return _state(parts, state, names)


def _refuse_parts_of_fleet(function: str, optimizer: Any) -> None:
    """Refuse an optimizer that keeps a part of each state, or states of a part of the parameters, on each rank."""
    each = optimizer
    while each is not None:
        if isinstance(each, (DygraphShardingOptimizer, DygraphShardingOptimizerV2, GroupShardedOptimizerStage2)):
            expected = (
                "one that keeps whole states on every rank; save those that Fleet's sharding spreads over ranks with "
                "paddle.distributed.save_state_dict, from sharded_state_dict() of the model and of the optimizer"
            )
            _checks.bad_value(function, "optimizer", expected, type(each).__name__)
        each = getattr(each, "__dict__", {}).get("_inner_opt")


def _groups_of_experts(function: str, layer: nn.Layer, group: Group, is_given: bool) -> dict[str, Group]:
    parameters = {name: each for name, each in layer.named_parameters() if is_expert_parameter(each)}
    return groups_of_experts(function, "layer.named_parameters() {!r}", parameters, group, is_given=is_given)


def _names_in(layer: nn.Layer) -> dict[str, str]:
    return {name: parameter.name for name, parameter in layer.named_parameters()}


def _entries(
    function: str, argument: str, state: Mapping[str, Any], names: Mapping[str, str], layer: nn.Layer
) -> list[_Entry]:
    """The tensors of a state.

    Args:
        function: name that begins the messages.
        argument: what they call the state.
        state: of an optimizer.
        names: the ``.name`` that keys begin with, by what the model calls the parameter.
        layer: the model.
    """
    _checks.instance(function, f"{argument}[{_NAMES!r}]", names, Mapping, "a dict of names")
    masters = state.get(_MASTERS, {})
    _checks.instance(function, f"{argument}[{_MASTERS!r}]", masters, Mapping, "a dict of tensors")
    known = {name for name, _ in layer.named_parameters()}
    owners = {key: name for name, key in names.items() if name in known}
    entries, unknown = [], []
    for key, value in masters.items():
        label = f"{argument}[{_MASTERS!r}][{key!r}]"
        _checks.instance(function, label, value, Tensor, "a tensor")
        if key in owners and value.name.startswith(key):
            entries.append(_Entry(label, owners[key], value.name[len(key) :], value, True))
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
        entries.append(_Entry(label, owners[owner], key[len(owner) :], value, False))
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


def _stacked(function: str, entries: Iterable[_Entry], layer: nn.Layer, num_parts: Mapping[str, int]) -> set[str]:
    """The names of those that have a row for each expert, by their shape; others of experts must be one number.

    Args:
        function: name that begins the messages.
        entries: of a state.
        layer: the model.
        num_parts: how many times as many experts as this rank's they have, by the name of the parameter; 1 by default.
    """
    parameters = {name: each for name, each in layer.named_parameters() if is_expert_parameter(each)}
    found = set()
    for entry in entries:
        if entry.parameter not in parameters:
            continue
        count, *others = parameters[entry.parameter].shape
        shape, whole = list(entry.value.shape), [count * num_parts.get(entry.parameter, 1), *others]
        is_power = shape == [1] and _POWER.fullmatch(entry.ending) is not None
        if shape == whole and not is_power:
            found.add(entry.name)
        elif shape not in ([], [1]):
            expected = f"of shape {whole}, as its parameter {entry.parameter!r} of experts is, or one number"
            _checks.bad_value(function, entry.label, expected, shape)
    return found


def _part(whole: Tensor, group: Group) -> Tensor:
    count = whole.shape[0] // group.nranks
    return whole[group.rank * count : (group.rank + 1) * count]


def _state(entries: Iterable[_Entry], state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A state as Paddle has it, of parameters with these names; what is in another one besides tensors stays."""
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
