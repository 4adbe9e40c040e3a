# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of experts between ranks, with the optimizer's states, between two steps."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from .. import _checks
from .._graphs import without_gradients
from .agreement import Mode, group_of, raising_together
from .checkpoint import Destination, Part, agree_on_parts, of_rank_with_experts, without_wrapper
from .dispatch import ExpertParallel
from .optimizers import states_of_experts
from .parameters import check_group_of_experts, is_expert_parameter, replace_value
from .placement import Placement, as_option, no_experts, placement_of
from .transports import transport_for

__all__ = ["move_experts"]

_NAME = "move_experts"


class _Move(NamedTuple):
    """The move of the experts of one `ExpertParallel`.

    Attributes:
        parallel: the exchange of their tokens.
        layers: those that have it.
        parameters: the stacked parameters of the experts, by their names in the model.
        placement: the new one.
    """

    parallel: ExpertParallel
    layers: list[nn.Layer]
    parameters: dict[str, Tensor]
    placement: Placement


@without_gradients
def move_experts(model: nn.Layer, placement: Any, optimizer: Any = None) -> None:
    """Move the experts of a model's layers to other ranks, between two steps.

    All ranks of the layers' group must call it; if layers have several groups, all ranks of the program.

    Parameters keep their identity and their names, and get another number of experts. The optimizer's accumulators and
    master weights move with them, so training goes on as if the experts had been there from the start. Layers are those
    with an `ExpertParallel` as an attribute, such as `nn.MoELayer`; their experts' parameters are marked by
    `mark_expert_parameters`. After the move the method ``experts_moved`` of each of their sublayers is called without
    arguments, if it has one.

    Tensors travel one after the other, and the host waits for each. A move needs memory for a few copies of the largest
    tensor. Gradients of the experts, which must be None or zeros, are None afterwards. A backward pass through a graph
    from before the move raises. CUDA graphs of earlier calls must not be replayed.

    Args:
        model: a layer or a model, or its wrapper by `paddle.DataParallel` or ``fleet.distributed_model``.
        placement: the rank of each expert, as in `ExpertParallel`, for all layers, or a dict of placements by the names
            of layers in ``model.named_sublayers(include_self=True)``; layers that it does not name stay as they are.
        optimizer: the one that updates the experts, of `paddle.optimizer`; Fleet's around it if it divides no states.
            None: there is none, or it has neither run a step nor loaded a state.

    Raises:
        TypeError: the model is not a layer, or a placement not a list of ints.
        ValueError: the model has no experts on ranks, or no layer of a given name; a placement does not have E ranks of
            the group; experts have gradients, or codes in place of weights; the optimizer divides its states between
            ranks; ranks have other placements or tensors than this one.
        RuntimeError: another rank raised an error, or does not answer.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import move_experts
        >>> from paddle_moe_ops.nn import MoELayer
        >>> group = paddle.distributed.new_group([0])  # with ranks: all of them
        >>> model = MoELayer(64, 32, num_experts=8, topk=2, group=group)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
        >>> move_experts(model, [0] * 8, optimizer)  # the rank of each expert
    """
    with _checks.renaming(_NAME, _NAME, layer="model"):
        model = without_wrapper(_NAME, model)
    parallels = _parallels_in(model)
    if not parallels:
        _checks.bad_value(_NAME, "model", "one with experts on the ranks of a group", "none")
    groups = {tuple(each.group.ranks): each.group for each in parallels.values()}
    everyone = next(iter(groups.values())) if len(groups) == 1 else group_of(_NAME, None)
    asked = {name: as_option(each) for name, each in placement.items()} if isinstance(placement, Mapping) else placement
    with raising_together(_NAME, everyone, {"placement": as_option(asked)}):
        moves = _moves(model, parallels, as_option(asked))
        states = {} if optimizer is None else states_of_experts(_NAME, optimizer, model)
        _refuse(moves)
    parts = [
        {
            key: Part(value, move.parallel.group, move.parallel._placement, is_stacked)
            for name, parameter in move.parameters.items()
            for key, (value, is_stacked) in {name: (parameter, True), **states.get(name, {})}.items()
        }
        for move in moves
    ]
    agree_on_parts(_NAME, everyone, "{}", dict(ChainMap(*parts)), Destination(None, True, False))
    for move, of_move in zip(moves, parts, strict=True):
        _run(move, of_move, optimizer)


def _parallels_in(model: nn.Layer) -> dict[str, ExpertParallel]:
    """Return the `ExpertParallel` of each layer that has one, by the layer's name."""
    return {
        name: each
        for name, layer in model.named_sublayers(include_self=True)
        for each in vars(layer).values()
        if isinstance(each, ExpertParallel)
    }


def _moves(model: nn.Layer, parallels: Mapping[str, ExpertParallel], placement: Any) -> list[_Move]:
    asked = placement if isinstance(placement, dict) else dict.fromkeys(parallels, placement)
    for name in asked:
        if name not in parallels:
            expected = f"a list, or a dict with names of layers with experts, of {list(parallels)}"
            _checks.bad_value(_NAME, "placement", expected, f"the name {name!r}")
    layers, moves = dict(model.named_sublayers(include_self=True)), dict[int, _Move]()
    for name, ranks in asked.items():
        parallel = parallels[name]
        if ranks is None:
            _checks.bad_type(_NAME, "placement", "a list of the rank of each expert", "None")
        target = placement_of(_NAME, ranks, parallel.num_experts, parallel.group.nranks)
        move = moves.setdefault(id(parallel), _Move(parallel, [], {}, target))
        if move.placement != target:
            _checks.bad_value(_NAME, "placement", f"the same for layers that share {parallel!r}", f"{target}")
        move.layers.append(layers[name])
    for name, parameter in model.named_parameters():
        if is_expert_parameter(parameter):
            owners = [each for each in parallels if not each or name.startswith(f"{each}.")]
            owner = id(parallels[max(owners, key=len)]) if owners else None
            if owner in moves:
                moves[owner].parameters[name] = parameter
    return [each for each in moves.values() if each.placement != each.parallel._placement]


def _refuse(moves: Sequence[_Move]) -> None:
    """Raise for experts that cannot be moved."""
    for move in moves:
        check_group_of_experts(_NAME, "{!r}", move.parameters, move.parallel.group)
        for layer in move.layers:
            for each in layer.sublayers(include_self=True):
                if getattr(each, "matrix_format", None) is not None:
                    _checks.bad_value(_NAME, "model", "one with weights of experts", f"codes in {each.matrix_format!r}")
        for name, parameter in move.parameters.items():
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if gradient is not None and bool((gradient != 0).any()):
                    expected = "None or zeros, as after optimizer.clear_grad()"
                    _checks.bad_value(_NAME, f"the gradient of {name!r}", expected, "others")


def _run(move: _Move, parts: Mapping[str, Part], optimizer: Any) -> None:
    parallel, rank = move.parallel, move.parallel.group.rank
    old, new = parallel._placement, move.placement
    sent = [[each for each in old.experts[rank] if new.ranks[each] == other] for other in range(old.num_ranks)]
    received = [[each for each in experts if new.ranks[each] == rank] for experts in old.experts]
    own = {expert: number for number, expert in enumerate(old.experts[rank])}
    arrived = [each for part in received for each in part]
    going = [own[each] for part in sent for each in part]
    order = sorted(range(len(arrived)), key=arrived.__getitem__)
    transport = transport_for("auto", parallel.group, parallel.timeout)
    step = parallel._step((0, 0, 0, True), Mode.NONE)
    for _, part in sorted(parts.items()):
        if part.is_stacked:
            lines = transport.exchange(_rows(part.value, going), [*map(len, sent)], [*map(len, received)], step)
            _store(part.value, _rows(lines, order), optimizer)
        elif part.is_missing_on_a_rank():
            part.value.set_value(of_rank_with_experts(part.value, part.group, old))
    for parameter in move.parameters.values():
        if parameter.grad is not None:
            parameter.grad = paddle.zeros_like(parameter)  # Paddle keeps a gradient without elements
            parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad = None
        parameter.expert_placement = new.ranks
    parallel._move(new)
    for layer in move.layers:
        for each in layer.sublayers(include_self=True):
            if hasattr(each, "experts_moved"):
                each.experts_moved()


def _rows(value: Tensor, order: Sequence[int]) -> Tensor:
    """Return rows of a tensor of any dtype."""
    if not order:
        return no_experts(value)
    return paddle.concat([value[number : number + 1] for number in order])


def _store(tensor: Tensor, value: Tensor, optimizer: Any) -> None:
    """Replace a tensor, or the entry of a loaded state, which belongs to the caller."""
    each = optimizer
    while each is not None:
        loaded = getattr(each, "__dict__", {}).get("_accumulators_holder", {})
        for key in [key for key, entry in loaded.items() if entry is tensor]:
            loaded[key] = value
            return
        each = getattr(each, "__dict__", {}).get("_inner_opt")
    replace_value(tensor, value)
