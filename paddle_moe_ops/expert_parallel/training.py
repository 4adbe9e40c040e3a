# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Training with expert parallelism: averages of gradients and gradient clipping."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from .. import _checks
from .._graphs import context_manager, without_gradients
from ..backends.deferred import refuse_pending
from .agreement import agree, group_of, raising_together, values_of_ranks
from .parameters import (
    are_copies_connected,
    connect_copies,
    copies_of,
    expert_group_of,
    gradient_of,
    group_of_experts,
    groups_of_experts,
    is_expert_parameter,
)
from .placement import placement_of_parameter
from .transports import DEFAULT_TIMEOUT_S, Rendezvous, checked_timeout

__all__ = ["ClipGradByGlobalNorm", "average_gradients", "rounded_once"]

BUCKET_BYTES = 25 * 2**20
_SUM_BYTES = 4  # of float32, the dtype of sums of 16-bit gradients
_AVERAGE = "average_gradients"
_NO_GRADIENT, _NOT_TRAINED = "none", "not trained"
_READY, _LACKS_COPIES, _RAISES = range(3)  # states of a rank
_HASH_BYTES = 7  # of a positive int64


def widened(gradient: Tensor) -> Tensor:
    """Return a float32 copy of a dense gradient of 16 bits, or any other gradient itself."""
    return gradient.astype("float32") if _is_narrow(gradient) else gradient


@context_manager
def rounded_once(gradient: Tensor) -> Iterator[Tensor]:
    """Yield the tensor to reduce and scale in place; afterwards the gradient has its values, in its own dtype."""
    total = widened(gradient)
    yield total
    if total is not gradient:
        paddle.assign(total.astype(gradient.dtype), gradient)


def reduce_in_buckets(gradients: Sequence[Tensor], reduce: Callable[[Tensor], None]) -> None:
    """Reduce gradients in place, in buckets of at most `BUCKET_BYTES`; copies need the memory of one bucket.

    The buckets depend on the sizes and dtypes alone, so they are the same on all ranks. A large gradient has no copy,
    or if it has 16 bits a copy of one bucket at a time.

    Args:
        gradients: dense, of one dtype and on one device.
        reduce: function that changes a tensor in place, elementwise. It receives float32 for gradients of 16 bits.
    """
    for bucket in _buckets(gradients):
        first = bucket[0]
        if len(bucket) > 1 or not first.is_contiguous():
            _reduce_packed(bucket, reduce)
        elif _is_narrow(first):
            _reduce_slices(first, reduce)
        else:
            reduce(first)


def _is_narrow(gradient: Tensor) -> bool:
    return gradient.dtype in (paddle.float16, paddle.bfloat16) and gradient.is_dense()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive gradients whose sums fit into a bucket; a larger gradient is alone."""
    bucket: list[Tensor] = []
    room = BUCKET_BYTES
    for each in gradients:
        size = math.prod(each.shape) * max(each.element_size(), _SUM_BYTES)  # Tensor.size is slow
        if bucket and size > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append(each)
        room -= size
    if bucket:
        yield bucket


def _reduce_packed(bucket: Sequence[Tensor], reduce: Callable[[Tensor], None]) -> None:
    packed = paddle.concat([each.reshape([-1]) for each in bucket])
    with rounded_once(packed) as total:
        reduce(total)
    start = 0
    for each in bucket:
        end = start + math.prod(each.shape)
        paddle.assign(packed[start:end].reshape(each.shape), each)
        start = end


def _reduce_slices(gradient: Tensor, reduce: Callable[[Tensor], None]) -> None:
    flat, step = gradient.view([-1]), BUCKET_BYTES // _SUM_BYTES
    for start in range(0, flat.size, step):
        total = widened(flat[start : start + step])
        reduce(total)
        flat[start : start + step] = total.astype(gradient.dtype)


class _Kinds(NamedTuple):
    """The kinds of a rank's parameters and gradients, in the order of its parameters.

    Attributes:
        layout: the kind of each parameter; the same on all ranks.
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
    gradients of parameters that all ranks have are averaged. Gradients of experts are complete on their rank, since
    they include the tokens of all ranks; they are divided by the number of ranks. ``main_grad`` is used if it is set.
    Gradients of float16 and bfloat16 are summed and divided in float32 and rounded once: the mean of finite gradients
    is finite.

    Gradients of one dtype are copied into buckets of 25 MiB of their sums, and one all_reduce adds up a bucket. This
    needs memory for one bucket and a half; a larger gradient of float32 is reduced in place.

    Deterministic as far as ``paddle.distributed.all_reduce`` is. From three ranks on, its order of summation may depend
    on an element's place in the bucket, so the last bit may differ from an all_reduce of the gradient alone. Each call
    first compares the kinds of the ranks: one all_reduce of five numbers, for which the host waits, and another one
    with ``copies``. A second exchange follows only if a rank lacks gradients that others have, or an error is raised,
    and in the first call for a parameter whose experts have copies.

    Args:
        parameters: the same on all ranks, in the same order; duplicates count once.
        group: the ranks that share the experts, as in `ExpertParallel`. None: for each parameter the group of its mark,
            or all ranks if it has none. The mean then is over all ranks, and gradients of experts are added up between
            the ranks of the same index in their groups, which have copies. The first call connects them.
        copies: with a group, if several groups of one size train one model: the ranks with copies of this rank's
            experts, one of each group. The mean then is over the ranks of all groups, and gradients of experts are
            added up between copies. None: there is one group.
        timeout: seconds that a rank waits for the others in the first exchange.

    Raises:
        TypeError: a parameter is not a tensor, the timeout is not a number, or a group is not a group.
        ValueError: the timeout is out of range; this rank is not in a group, or not the only one that its groups have
            in common; other ranks than the group's share the experts of a parameter. On every rank, before any gradient
            changes: the ranks have different numbers of parameters, or train different ones, or parameters or gradients
            differ in shape or dtype; on several ranks a gradient is not dense; the groups of a parameter overlap.
        RuntimeError: the arguments of another rank are bad, or it did not arrive in time; the message names it. A
            parameter has gradients that wait for `flush_dw`.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import average_gradients
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> average_gradients(model.parameters())  # before the optimizer's step
    """
    is_given, group = group is not None, group_of(_AVERAGE, group)
    others, error = _copies(group, copies), None
    seconds = DEFAULT_TIMEOUT_S
    tensors: list[Tensor] = []
    try:
        seconds = checked_timeout(_AVERAGE, timeout)
        tensors = _tensors(parameters)
        refuse_pending(_AVERAGE, tensors)
        groups_of_experts(_AVERAGE, "parameters[{!r}]", dict(enumerate(tensors)), group, is_given=is_given)
        if group.nranks > 1 or others is not None:
            _check_dense(tensors)
    except (TypeError, ValueError, RuntimeError) as caught:
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
                with Rendezvous(each, seconds).naming_ranks(_AVERAGE, counts=True):
                    paddle.distributed.all_reduce(total, group=each)
            total.scale_(share)

        reduce_in_buckets(gradients, reduce)


def _by_sums(
    tensors: Sequence[Tensor], group: Group, others: Group | None
) -> list[tuple[Sequence[Group], list[Tensor]]]:
    """Group gradients by dtype and device, with the groups over which they are added up; alike on all ranks."""
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
    """Return the ranks with copies of this rank's experts, or None if there are no others."""
    if copies is None:
        return None
    with _checks.renaming(_AVERAGE, _AVERAGE, group="copies"):
        others = group_of(_AVERAGE, copies)
    shared = sorted(set(group.ranks) & set(others.ranks))
    if len(shared) != 1:
        expected = "ranks of which only this one is in the group"
        _checks.bad_value(_AVERAGE, "copies", expected, f"ranks {others.ranks} for a group of {group.ranks}")
    return None if others.nranks == 1 else others


def _settle(error: Exception | None, tensors: Sequence[Tensor], group: Group, seconds: float) -> None:
    """Raise on all ranks of a group if one has an error or other parameters; otherwise add missing gradients."""
    if group.nranks == 1:
        if error is not None:
            raise error
        return
    apart = {} if error is not None else _experts_apart(tensors, group)
    kinds = _Kinds([], []) if error is not None else _kinds(tensors, group)
    state = _READY if all(are_copies_connected(each, group) for each in apart.values()) else _LACKS_COPIES
    state, same_layout, same_gradients = _compared(_RAISES if error is not None else state, kinds, group, seconds)
    if state == _RAISES:
        with raising_together(_AVERAGE, group):
            if error is not None:
                raise error
    if not same_layout:
        agree(_AVERAGE, group, {f"parameters[{number}]": each for number, each in enumerate(kinds.layout)})
    if state == _LACKS_COPIES:
        connect_copies(_AVERAGE, apart, group)
    if not same_gradients:
        _add_missing(tensors, kinds.gradients, group, group)


def _settle_between_groups(
    error: Exception | None, tensors: Sequence[Tensor], group: Group, copies: Group, seconds: float
) -> None:
    """As `_settle`, in a group and then between copies; all ranks of a group raise together."""
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
        raise RuntimeError(f"{_AVERAGE}: ranks of another group raised an error in this call, which says more")
    if not same_layout:
        agree(_AVERAGE, copies, {f"parameters[{number}]": each for number, each in enumerate(kinds.layout)})
    if not same_gradients:
        _add_missing(tensors, kinds.gradients, copies, group)


def _tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    if not isinstance(parameters, Iterable):  # a tensor is none
        _checks.bad_type(_AVERAGE, "parameters", "tensors, as layer.parameters() gives them", type(parameters).__name__)
    tensors = list(parameters)
    for number, each in enumerate(tensors):
        _checks.instance(_AVERAGE, f"parameters[{number}]", each, Tensor, "a paddle.Tensor")
    return list({id(each): each for each in tensors}.values())


def _check_dense(tensors: Sequence[Tensor]) -> None:
    for number, each in enumerate(tensors):
        gradient = None if each.stop_gradient else gradient_of(each)
        if gradient is not None and not gradient.is_dense():
            expected = "dense on several ranks, as that of Embedding(sparse=False) is"
            _checks.bad_value(_AVERAGE, f"the gradient of parameters[{number}]", expected, "SelectedRows")


def _experts_apart(tensors: Sequence[Tensor], group: Group) -> dict[str, Tensor]:
    """Return trained parameters whose experts other ranks than the group's share, by their names in messages."""
    return {
        f"parameters[{number}]": each
        for number, each in enumerate(tensors)
        if not each.stop_gradient and not _is_shared_by(each, group, group)
    }


def _is_shared_by(parameter: Tensor, group: Group, otherwise: Group) -> bool:
    return group_of_experts(parameter, otherwise).ranks == group.ranks


def _kinds(tensors: Sequence[Tensor], group: Group) -> _Kinds:
    layout, gradients = [], []
    for each in tensors:
        owner, shape = "", list(each.shape)
        if is_expert_parameter(each):
            own = group_of_experts(each, group)
            owner = " of experts" if own.ranks == group.ranks else f" of experts on {own.nranks} ranks"
            placement = placement_of_parameter(each, own)
            if not placement.is_even:  # ranks have different numbers of experts
                shape[0] = len(placement.ranks)
                owner += f" placed on ranks {placement}"
        kind = f"{_checks.dtype_name(each.dtype)} {shape}{owner}"
        layout.append(_NOT_TRAINED if each.stop_gradient else kind)
        gradient = None if each.stop_gradient else gradient_of(each)
        if gradient is None:
            gradients.append(_NO_GRADIENT)
        else:
            attribute = "grad" if getattr(each, "main_grad", None) is None else "main_grad"
            gradients.append(f"{attribute} {_checks.dtype_name(gradient.dtype)}")
    return _Kinds(layout, gradients)


def _compared(state: int, kinds: _Kinds, group: Group, seconds: float) -> tuple[int, bool, bool]:
    """Return the largest state of a rank, and whether all have the same layout and the same gradients.

    The exchange has a fixed size: ranks with different sizes would end or wait instead of raising an error.
    """
    layout, gradients = _number(kinds.layout), _number(kinds.gradients)
    numbers = paddle.to_tensor([state, layout, -layout, gradients, -gradients], dtype="int64")
    Rendezvous(group, seconds).largest(_AVERAGE, numbers)
    state, most, least, most_gradients, least_gradients = numbers.tolist()
    return state, most == -least, most_gradients == -least_gradients


def _number(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:_HASH_BYTES], "little")


def _add_missing(tensors: Sequence[Tensor], gradients: Sequence[str], group: Group, experts: Group) -> None:
    """Set missing gradients to zeros if another rank has them; every rank must call it.

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
            _checks.bad_value(_AVERAGE, f"the gradient of parameters[{number}]", expected, given)
        if found and own == _NO_GRADIENT:
            missing.append((parameter, next(iter(found))))
    for parameter, kind in missing:
        attribute, dtype = kind.split()
        setattr(parameter, attribute, paddle.zeros_like(parameter, dtype=dtype))


class ClipGradByGlobalNorm(ClipGradForMOEByGlobalNorm):
    """`paddle.nn.ClipGradByGlobalNorm` for a model whose layers have their experts on any groups of ranks.

    The norm is that of one process with all experts: for each layer it includes the gradients of the experts on all
    ranks of that layer's group. Other parameters are taken to be the same on every rank, and count once. Every rank of
    a group must have gradients of the same parameters, which `average_gradients` ensures. Gradients of 16 bits are
    squared, summed and scaled in float32 and rounded once. Sums are rounded in another order than in one process; all
    ranks of a group clip by the same number. No host synchronisation; one all-reduce of one number for each group.

    Args:
        clip_norm: the largest norm that the gradients may have, 0 or more.

    Raises:
        TypeError: ``clip_norm`` is not a number.
        ValueError: it is negative or not finite.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.expert_parallel import ClipGradByGlobalNorm
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0))
    """

    def __init__(self, clip_norm: float) -> None:
        norm = _checks.number("ClipGradByGlobalNorm", "clip_norm", clip_norm)
        if norm < 0:  # it would reverse all gradients
            _checks.bad_value("ClipGradByGlobalNorm", "clip_norm", "0 or more", clip_norm)
        super().__init__(norm)

    @paddle.no_grad()
    def _dygraph_clip(self, params_grads: Sequence[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
        refuse_pending("ClipGradByGlobalNorm", [each for each, _ in params_grads])
        # Paddle's method would round the factor to float16 for float16, and return bfloat16 as float32.
        square, dtype = self.get_l2_norm_pow(params_grads)
        if square is None:
            return list(params_grads)
        limit = paddle.full([1], self.clip_norm, dtype)
        factor = limit / paddle.maximum(square.sqrt(), limit)
        return [
            (each, gradient if getattr(each, "need_clip", True) is False else _scaled(gradient, factor))
            for each, gradient in params_grads
            if gradient is not None
        ]

    def get_l2_norm_pow(
        self, params_grads: Iterable[tuple[Tensor, Tensor | None]], sum_dtype: Any = None
    ) -> tuple[Tensor | None, Any]:
        """Return the square of the norm, and its dtype."""
        groups: dict[int, Group] = {}
        of_groups: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        for parameter, gradient in params_grads:
            group = expert_group_of(parameter)
            number = -1 if group is None else group.id
            if group is not None:
                groups[number] = group
            of_groups.setdefault(number, []).append((parameter, gradient))
        squares = []
        for number in sorted(of_groups):  # in the same order on all ranks
            # A generator, so that one gradient at a time has a copy.
            of_group = ((each, None if grad is None else widened(grad)) for each, grad in of_groups[number])
            square, dtype = super().get_l2_norm_pow(of_group, sum_dtype)
            if square is None:
                continue
            if number in groups:
                paddle.distributed.all_reduce(square, group=groups[number])
            squares.append(square)
            sum_dtype = "float64" if "float64" in (sum_dtype, dtype) else dtype
        if not squares:
            return None, None
        return paddle.add_n([each.astype(sum_dtype) for each in squares]), sum_dtype


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    wide = widened(gradient)
    product = paddle.multiply(wide, factor)
    return product if wide is gradient else product.astype(gradient.dtype)
