# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of parameters that all ranks train, some of which are experts of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import without_gradients
from .buckets import reduce_in_buckets
from .copies import are_copies_connected, connect_copies, copies_of
from .groups import agree, group_of, group_of_experts, groups_of_experts, raising_together, values_of_ranks
from .meetings import DEFAULT_TIMEOUT_S, Meeting, checked_timeout
from .parameters import is_expert_parameter

__all__ = ["average_gradients", "gradient_of"]

_NAME = "average_gradients"
_NO_GRADIENT, _NOT_TRAINED = "none", "not trained"
_READY, _LACKS_COPIES, _RAISES = range(3)  # what a rank says of itself
_HASH_BYTES = 7  # of a positive int64


class _Kinds(NamedTuple):
    """What a rank has, in the order of its parameters.

    Attributes:
        layout: what each parameter is; the same on all ranks.
        gradients: the attribute and the dtype of each gradient. A rank without tokens may lack some.
    """

    layout: list[str]
    gradients: list[str]


@without_gradients
def average_gradients(
    parameters: Iterable[Tensor], group: Any = None, *, copies: Any = None, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Turn the gradients of each rank's mean loss into those of the mean over all ranks.

    Call it after ``backward()`` and before the optimizer's step, on all ranks, in place of `paddle.DataParallel`. The
    gradients of parameters that all ranks have are averaged. Those of experts are complete on their rank, since the
    tokens of all ranks are in them; they are divided by the number of ranks. ``main_grad`` is used where it is set.
    Gradients of float16 and bfloat16 are summed and divided in float32 and rounded once: the mean of finite gradients
    is finite.

    Gradients of one dtype are copied into buckets of 25 MiB of their sums, and one all_reduce adds up a bucket. This
    needs memory for one bucket and a half; a larger gradient of float32 is reduced where it is.

    Deterministic as far as ``paddle.distributed.all_reduce`` is. From three ranks on, the order in which it adds up
    ranks may depend on an element's place in the bucket, so the last bit may differ from an all_reduce of the gradient
    alone. Each call first compares what the ranks have: one all_reduce of five numbers, for which the host waits, and
    another one with ``copies``. A second exchange follows only where a rank lacks gradients that others have, or an
    error is raised, and in the first call for a parameter whose experts have copies.

    Args:
        parameters: the same on all ranks, in the same order; what is named twice counts once.
        group: the ranks that share the experts, as `ExpertParallel` takes it. None: for each parameter the group that
            it was marked with, or all ranks if it has none. The mean then is over all ranks, and gradients of experts
            are added up between those of the same place in their groups, which have copies. The first call connects
            them.
        copies: with a group, where several of one size train one model: the ranks that have copies of this rank's
            experts, one of each group. The mean then is over the ranks of all groups, and gradients of experts are
            added up between copies. None: there is one group.
        timeout: seconds that a rank waits for the others in the first exchange.

    Raises:
        TypeError: a parameter is not a tensor, the timeout is not a number, or a group is not a group.
        ValueError: the timeout is out of range; this rank is not in a group, or not the only one that its groups have
            in common; other ranks than the group's share the experts of a parameter. On every rank, before any gradient
            changes: the ranks have different numbers of parameters, or train different ones, or parameters or gradients
            differ in shape or dtype; on several ranks a gradient is not dense; the groups of a parameter overlap.
        RuntimeError: the arguments of another rank are bad, or it did not come in time; the message names it.
    """
    is_given, group = group is not None, group_of(_NAME, group)
    others, error = _copies(group, copies), None
    seconds = DEFAULT_TIMEOUT_S
    tensors: list[Tensor] = []
    try:
        seconds = checked_timeout(_NAME, timeout)
        tensors = _tensors(parameters)
        groups_of_experts(_NAME, "parameters[{!r}]", dict(enumerate(tensors)), group, is_given=is_given)
        if group.nranks > 1 or others is not None:
            _check_dense(tensors)
    except (TypeError, ValueError) as caught:
        error = caught
    if others is None:
        _settle(error, tensors, group, seconds)
    else:
        _settle_between_groups(error, tensors, group, others, seconds)
    if group.nranks == 1 and others is None:
        return
    share = 1.0 / (group.nranks * (1 if others is None else others.nranks))
    for sums, gradients in _by_sums(tensors, group, others):

        def reduce(total: Tensor, sums: Sequence[Group] = sums) -> None:
            for each in sums:
                with Meeting(each, seconds).naming_ranks(_NAME, counts=True):
                    paddle.distributed.all_reduce(total, group=each)
            total.scale_(share)

        reduce_in_buckets(gradients, reduce)


def _by_sums(
    tensors: Sequence[Tensor], group: Group, others: Group | None
) -> list[tuple[Sequence[Group], list[Tensor]]]:
    """Gradients of one dtype and device, and the groups over which they are added up; alike on all ranks."""
    found: dict[tuple[Any, ...], tuple[Sequence[Group], list[Tensor]]] = {}
    for parameter in tensors:
        gradient = None if parameter.stop_gradient else gradient_of(parameter)
        if gradient is None or 0 in gradient.shape:
            continue
        same = copies_of(parameter, group) if is_expert_parameter(parameter) else group
        sums = [each for each in (same, others) if each is not None and each.nranks > 1]
        key = (*(each.id for each in sums), gradient.dtype, str(gradient.place))
        found.setdefault(key, (sums, []))[1].append(gradient)
    return list(found.values())


def _copies(group: Group, copies: Any) -> Group | None:
    """The several ranks that have copies of this rank's experts, or None."""
    if copies is None:
        return None
    with _checks.renaming(_NAME, _NAME, group="copies"):
        others = group_of(_NAME, copies)
    shared = sorted(set(group.ranks) & set(others.ranks))
    if len(shared) != 1:
        expected = "ranks of which only this one is in the group"
        _checks.bad_value(_NAME, "copies", expected, f"ranks {others.ranks} for a group of {group.ranks}")
    return None if others.nranks == 1 else others


def _settle(error: Exception | None, tensors: Sequence[Tensor], group: Group, seconds: float) -> None:
    """Let all ranks of a group raise if one has an error or other parameters, and add the gradients that some lack."""
    if group.nranks == 1:
        if error is not None:
            raise error
        return
    apart = {} if error is not None else _experts_apart(tensors, group)
    kinds = _Kinds([], []) if error is not None else _kinds(tensors, group)
    state = _READY if all(are_copies_connected(each, group) for each in apart.values()) else _LACKS_COPIES
    state, same_layout, same_gradients = _compared(_RAISES if error is not None else state, kinds, group, seconds)
    if state == _RAISES:
        with raising_together(_NAME, group):
            if error is not None:
                raise error
    if not same_layout:
        agree(_NAME, group, {f"parameters[{number}]": each for number, each in enumerate(kinds.layout)})
    if state == _LACKS_COPIES:
        connect_copies(_NAME, apart, group)
    if not same_gradients:
        _add_missing(tensors, kinds.gradients, group, group)


def _settle_between_groups(
    error: Exception | None, tensors: Sequence[Tensor], group: Group, copies: Group, seconds: float
) -> None:
    """The same in a group and then between copies. The ranks of a group raise together, so the others need not ask."""
    told: Exception | None = None
    try:
        _settle(error, tensors, group, seconds)
    except (TypeError, ValueError, RuntimeError) as caught:
        told = caught
    kinds = _Kinds([], []) if told is not None else _kinds(tensors, group)
    state = _READY if told is None else _RAISES
    state, same_layout, same_gradients = _compared(state, kinds, copies, seconds)
    if told is not None:
        raise told
    if state == _RAISES:
        raise RuntimeError(f"{_NAME}: ranks of another group raised an error in this call, which says more")
    if not same_layout:
        agree(_NAME, copies, {f"parameters[{number}]": each for number, each in enumerate(kinds.layout)})
    if not same_gradients:
        _add_missing(tensors, kinds.gradients, copies, group)


def _tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        _checks.bad_type(_NAME, "parameters", "tensors, as layer.parameters() gives them", type(parameters).__name__)
    tensors = list(parameters)
    for number, each in enumerate(tensors):
        _checks.instance(_NAME, f"parameters[{number}]", each, Tensor, "a paddle.Tensor")
    return list({id(each): each for each in tensors}.values())


def _check_dense(tensors: Sequence[Tensor]) -> None:
    for number, each in enumerate(tensors):
        gradient = None if each.stop_gradient else gradient_of(each)
        if gradient is not None and not gradient.is_dense():
            expected = "dense on several ranks, as that of Embedding(sparse=False) is"
            _checks.bad_value(_NAME, f"the gradient of parameters[{number}]", expected, "SelectedRows")


def _experts_apart(tensors: Sequence[Tensor], group: Group) -> dict[str, Tensor]:
    """The trained parameters whose experts are shared by other ranks than the group's, by what messages call them."""
    return {
        f"parameters[{number}]": each
        for number, each in enumerate(tensors)
        if is_expert_parameter(each) and not each.stop_gradient and not _is_shared_by(each, group, group)
    }


def _is_shared_by(parameter: Tensor, group: Group, otherwise: Group) -> bool:
    return group_of_experts(parameter, otherwise).ranks == group.ranks


def _kinds(tensors: Sequence[Tensor], group: Group) -> _Kinds:
    layout, gradients = [], []
    for each in tensors:
        owner = ""
        if is_expert_parameter(each):
            own = group_of_experts(each, group)
            owner = " of experts" if own.ranks == group.ranks else f" of experts on {own.nranks} ranks"
        kind = f"{_checks.dtype_name(each.dtype)} {list(each.shape)}{owner}"
        layout.append(_NOT_TRAINED if each.stop_gradient else kind)
        gradient = None if each.stop_gradient else gradient_of(each)
        if gradient is None:
            gradients.append(_NO_GRADIENT)
        else:
            attribute = "grad" if getattr(each, "main_grad", None) is None else "main_grad"
            gradients.append(f"{attribute} {_checks.dtype_name(gradient.dtype)}")
    return _Kinds(layout, gradients)


def _compared(state: int, kinds: _Kinds, group: Group, seconds: float) -> tuple[int, bool, bool]:
    """The largest state of a rank, and whether all have the same layout and the same gradients; one exchange.

    Its size depends on nothing, since ranks that exchange different sizes do not get an error but end, or wait.
    """
    layout, gradients = _number(kinds.layout), _number(kinds.gradients)
    numbers = paddle.to_tensor([state, layout, -layout, gradients, -gradients], dtype="int64")
    Meeting(group, seconds).largest(_NAME, numbers)
    state, most, least, most_gradients, least_gradients = numbers.tolist()
    return state, most == -least, most_gradients == -least_gradients


def _number(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:_HASH_BYTES], "little")


def _add_missing(tensors: Sequence[Tensor], gradients: Sequence[str], group: Group, experts: Group) -> None:
    """Give parameters gradients of zeros where another rank has one; every rank must call it.

    Args:
        tensors: the parameters.
        gradients: of this rank, see `_Kinds`.
        group: the ranks that compare them.
        experts: the ranks that share experts whose mark names none.
    """
    of_ranks: list[list[str]] = []
    paddle.distributed.all_gather_object(of_ranks, list(gradients), group=group)
    missing: list[tuple[Tensor, str]] = []
    for number, (parameter, own) in enumerate(zip(tensors, gradients, strict=True)):
        found = {each[number]: rank for rank, each in zip(group.ranks, of_ranks, strict=True)}
        found.pop(_NO_GRADIENT, None)
        is_added_up = not is_expert_parameter(parameter) or not _is_shared_by(parameter, group, experts)
        if len(found) > 1 and is_added_up:
            given = values_of_ranks(map(repr, found), found.values())
            expected = "one that all ranks keep in the same attribute and dtype"
            _checks.bad_value(_NAME, f"the gradient of parameters[{number}]", expected, given)
        if found and own == _NO_GRADIENT:
            missing.append((parameter, next(iter(found))))
    for parameter, kind in missing:
        attribute, dtype = kind.split()
        setattr(parameter, attribute, paddle.zeros_like(parameter, dtype=dtype))


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, in ``main_grad`` where that is set."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
