# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Agreement of the ranks of a group on the group, on arguments, and on the current call.

Each exchange also sends the call; ranks in different calls raise. Layers are numbered per group in the order of their
creation, and calls per layer. If a rank has another gradient mode than the others, it is in the same call: all ranks
receive their values, and the backward pass of the others raises before it waits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import context_manager
from ..backends.autograd import wants_gradient

__all__ = [
    "CALL_WORDS",
    "Kind",
    "LayerCall",
    "LayerNumber",
    "Mode",
    "Step",
    "agree",
    "backward_step",
    "check_calls",
    "combine_step",
    "group_of",
    "is_gloo",
    "number_of_layer",
    "raise_for_modes",
    "raising_together",
    "values_of_ranks",
]

CALL_WORDS = 8  # PMO_CALL_WORDS
_NAME = "ExpertParallel"
_DISPATCH = f"{_NAME}.dispatch"
_CALLS, _COPIES = 1 << 20, 1 << 10  # range of the numbers in a code; higher ones wrap around


def group_of(function: str, group: Any) -> Group:
    """Return the group of an argument ``group``.

    Args:
        function: name that begins the messages.
        group: a group of `paddle.distributed` or of Fleet's ``get_expert_parallel_group()``. None: all ranks, or this
            process alone if `paddle.distributed` was not initialised.

    Raises:
        TypeError: it is not a group.
        ValueError: this process is not one of its ranks.
    """
    if group is None:
        # Without initialisation, Paddle would create a group of all ranks that the environment names.
        if not paddle.distributed.is_initialized():
            return Group(0, -1, [0], name="expert_parallel_alone")
        group = paddle.distributed.get_group(0)
    _checks.instance(function, "group", group, Group, "a group of paddle.distributed, or None")
    if group.rank < 0 and group.ranks == [paddle.distributed.get_rank()]:  # Paddle says so of groups of one rank
        return Group(0, -1, group.ranks, name="expert_parallel_alone")
    if group.rank < 0:
        _checks.bad_value(function, "group", "a group that this rank belongs to", f"one of ranks {group.ranks}")
    return group


def is_gloo(group: Group) -> bool:
    """True if gloo connects the ranks."""
    return str(group.backend).lower() == "gloo"


def agree(function: str, group: Group, settings: Mapping[str, Any]) -> None:
    """Check that all ranks of a group have the same settings; every rank must call it.

    Raises:
        ValueError: on every rank, if the settings differ, or some ranks lack one.
    """
    with raising_together(function, group, settings):
        pass


def values_of_ranks(values: Iterable[Any], ranks: Iterable[int]) -> str:
    """Return the text of values that differ between ranks."""
    return ", ".join(f"{each} on rank {rank}" for each, rank in zip(values, ranks, strict=True))


@context_manager
def raising_together(function: str, group: Group, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Raise on every rank if one rank has bad arguments or fails in the block; every rank must enter it.

    The ranks exchange their states once, after the block.

    Args:
        function: name that begins the messages.
        group: the ranks.
        settings: values that must be the same on all ranks, by name.

    Raises:
        TypeError, ValueError, RuntimeError, OSError: the error of this rank's block.
        RuntimeError: other ranks raised.
        ValueError: on every rank, if the settings differ, or some ranks lack one.
    """
    error: Exception | None = None
    try:
        yield
    except (TypeError, ValueError, RuntimeError, OSError) as caught:
        error = caught
    own = error is not None, dict(settings or {})
    of_ranks: list[tuple[bool, dict[str, Any]]] = []
    if group.nranks == 1:
        of_ranks.append(own)
    else:
        paddle.distributed.all_gather_object(of_ranks, own, group=group)
    if error is not None:
        raise error
    raise_for_others(function, group.ranks, [rank for rank, (bad, _) in zip(group.ranks, of_ranks, strict=True) if bad])
    for name in dict.fromkeys(name for _, each in of_ranks for name in each):
        values = [each.get(name) for _, each in of_ranks]
        if any(other != values[0] for other in values):
            given = values_of_ranks(map(repr, values), group.ranks)
            _checks.bad_value(function, name, "the same on all ranks of the group", given)


def raise_for_others(function: str, ranks: Sequence[int], raised: Sequence[int]) -> None:
    """Raise a RuntimeError on a rank whose own arguments are good, if other ranks raised."""
    if raised:
        raise RuntimeError(f"{function}: ranks {raised} of {ranks} raised an error in this call, which says more")


class Mode(enum.IntFlag):
    """Facts about the call of a rank that may differ between ranks."""

    NONE = 0
    DISPATCH_BACKWARD = 1  # it runs the backward pass of dispatch
    COMBINE_BACKWARD = 2  # it runs the backward pass of combine; in dispatch: it may run it
    RAISED = 4  # its arguments are bad


class Kind(enum.IntEnum):
    """A pass of a call.

    Attributes:
        text: the name in messages.
        gradient: of a backward pass, the flag in the forward pass of a rank that runs it.
    """

    text: str
    gradient: Mode

    DISPATCH = 0, "dispatch", Mode.NONE
    COMBINE = 1, "combine", Mode.NONE
    COMBINE_BACKWARD = 2, "the backward pass of combine", Mode.COMBINE_BACKWARD
    DISPATCH_BACKWARD = 3, "the backward pass of dispatch", Mode.DISPATCH_BACKWARD

    def __new__(cls, value: int, text: str = "", gradient: Mode = Mode.NONE) -> Kind:
        """Return the member of a number."""
        made = int.__new__(cls, value)
        made._value_, made.text, made.gradient = value, text, gradient
        return made


_RAISED = int(Mode.RAISED)


class LayerNumber:
    """The number of a layer within its group, and of the copy if it is one.

    Attributes:
        layer: counted from 0.
        copy: counted from 1; 0: the layer itself.
    """

    def __init__(self, layer: int, copies: list[int], group_experts: list[int]) -> None:
        self.layer, self.copy = layer, copies[0]
        self._copies, self._group_experts = copies, group_experts

    @property
    def most_experts(self) -> int:
        """The maximum of experts per rank over the layers of the group."""
        return max(self._group_experts)

    def __str__(self) -> str:
        return _number_text(self.layer, self.copy)

    def needs_room(self, experts: int) -> None:
        """Raise the maximum to a number of experts per rank; all ranks do it together."""
        self._group_experts[self.layer] = max(self._group_experts[self.layer], experts)

    def of_copy(self) -> LayerNumber:
        """Return the number of a new copy of the layer."""
        self._copies[0] += 1
        return LayerNumber(self.layer, self._copies, self._group_experts)


def _number_text(layer: int, copy: int) -> str:
    return f"{layer}, copy {copy}" if copy else str(layer)


_experts_of_layers: dict[tuple[int, ...], list[int]] = {}  # of a rank, by group


def number_of_layer(group: Group, num_local_experts: int) -> LayerNumber:
    """Number a new layer of a group. All ranks create their layers in the same order."""
    layers = _experts_of_layers.setdefault((group.id, *group.ranks), [])
    layers.append(num_local_experts)
    return LayerNumber(len(layers) - 1, [0], layers)


class LayerCall(NamedTuple):
    """A call of a layer, from dispatch to the backward passes.

    Attributes:
        ranks: of the group.
        layer: the number of the layer.
        number: of the call, counted from 0.
        width: d.
        topk: K.
        dtype: of tokens, as an index into `_checks.SUM_DTYPES`.
        copies: the argument ``copy``: whether tokens are copied out of symmetric memory.
        modes: of all ranks in a pass, if the host knows them.
        unread: passes that the device has compared, with the codes of all ranks; None: nothing reads them.
    """

    ranks: list[int]
    layer: LayerNumber
    number: int
    width: int
    topk: int
    dtype: int
    copies: bool
    modes: dict[Kind, list[int]]
    unread: list[tuple[Step, Tensor]] | None


class Step:
    """A pass of a call on this rank.

    Attributes:
        call: the call.
        kind: the pass.
        mode: this rank's `Mode` in it.
        is_checked: whether the host has compared it with the steps of the other ranks.
        codes: of all ranks, on the device; None if they were not exchanged.
    """

    def __init__(self, call: LayerCall, kind: Kind, mode: Mode = Mode.NONE) -> None:
        self.call, self.kind, self.mode = call, kind, mode
        self.is_checked = False
        self.codes: Tensor | None = None

    def words(self, exchange: int = 0) -> list[int]:
        """The step in `CALL_WORDS` numbers; all but the last must be the same on all ranks.

        Args:
            exchange: number of the group's exchange, for alternating buffers.
        """
        call, layer = self.call, (self.call.layer.layer, self.call.layer.copy)
        form = (call.topk * len(_checks.SUM_DTYPES) + call.dtype) * 2 + call.copies
        return [int(self.kind), *layer, call.number, exchange, call.width, form, int(self.mode)]

    def code(self) -> int:
        """The step in one number, without d, K, the dtype and the mode."""
        call = self.call
        made = (call.layer.layer * _COPIES + call.layer.copy % _COPIES) * _CALLS + call.number % _CALLS
        return made * len(Kind) + self.kind

    def check(self, told: Sequence[Sequence[int]]) -> None:
        """Compare the words of all ranks, and store their modes.

        Raises:
            ValueError: d, K or the dtype differ.
            RuntimeError: ranks are in different calls, or others raised.
        """
        modes = []
        for words in told:
            if words[:-1] != told[0][:-1] or words[-1] & _RAISED:
                check_calls(told, self.call.ranks)
            modes.append(words[-1])
        self.call.modes[self.kind] = modes
        self.is_checked = True

    def check_codes(self, told: Sequence[int]) -> None:
        """Compare the codes of all ranks.

        Raises:
            RuntimeError: ranks were in different calls.
        """
        if any(code != self.code() for code in told):
            places = []
            for code in told:
                rest, kind = divmod(code, len(Kind))
                rest, number = divmod(rest, _CALLS)
                places.append((kind, *divmod(rest, _COPIES), number))
            _raise_for_places(places, self.call.ranks)


def backward_step(call: LayerCall, kind: Kind) -> Step:
    """Return the step of a backward pass.

    Raises:
        RuntimeError: some ranks do not run it, as far as the host knows.
    """
    step = Step(call, kind)
    is_combine = kind == Kind.COMBINE_BACKWARD
    forward = Kind.COMBINE if is_combine and Kind.COMBINE in call.modes else Kind.DISPATCH
    modes, runs = call.modes.get(forward, ()), int(kind.gradient)
    for mode in modes:
        if not mode & runs:
            raise_for_modes(kind, modes, step.words(), call.ranks)
    return step


def combine_step(call: LayerCall, out: Tensor) -> Step:
    """Return the step of a combine of expert outputs."""
    call = call._replace(width=out.shape[1], dtype=_checks.SUM_DTYPES.index(out.dtype))
    return Step(call, Kind.COMBINE, Mode.COMBINE_BACKWARD if wants_gradient(out) else Mode.NONE)


def check_calls(told: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Compare the words of all ranks.

    Raises:
        ValueError: d, K or the dtype differ.
        RuntimeError: ranks are in different calls, or others raised.
    """
    raised = [rank for rank, words in zip(ranks, told, strict=True) if words[-1] & Mode.RAISED]
    raise_for_others(_DISPATCH, ranks, raised)
    if len({tuple(words[:4]) for words in told}) > 1:
        _raise_for_places([words[:4] for words in told], ranks)
    dtypes = [_checks.dtype_name(each) for each in _checks.SUM_DTYPES]
    forms = [divmod(words[6] // 2, len(dtypes)) for words in told]
    names = ("combine", "out") if told[0][0] in (Kind.COMBINE, Kind.COMBINE_BACKWARD) else ("dispatch", "x")
    _check_same(*names, "as wide on all ranks", [words[5] for words in told], ranks)
    _check_same("dispatch", "ids", "of as many slots a token on all ranks", [topk for topk, _ in forms], ranks)
    _check_same(*names, "of one dtype", [dtypes[dtype] for _, dtype in forms], ranks)
    _check_same("dispatch", "copy", "the same on all ranks", [bool(words[6] % 2) for words in told], ranks)
    if len({words[4] for words in told}) > 1:
        _raise_for_places([words[:5] for words in told], ranks)


def _check_same(function: str, argument: str, expected: str, values: Sequence[Any], ranks: Sequence[int]) -> None:
    if len(set(values)) > 1:
        _checks.bad_value(f"{_NAME}.{function}", argument, expected, values_of_ranks(values, ranks))


def _raise_for_places(places: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raise an error that names each rank's (kind, layer, copy, call[, exchange])."""
    texts = [", exchange ".join([_place(*each[:4]), *map(str, each[4:])]) for each in places]
    given = ", ".join(f"rank {rank} is in {text}" for rank, text in zip(ranks, texts, strict=True))
    raise RuntimeError(f"{_NAME}: all ranks must make the same calls in the same order, but {given}")


def _place(kind: int, layer: int, copy: int, number: int) -> str:
    return f"{Kind(kind).text} of layer {_number_text(layer, copy)}, call {number}"


def raise_for_modes(kind: Kind, modes: Sequence[int], words: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise an error that names the ranks that do not run a backward pass.

    Args:
        kind: the backward pass.
        modes: of all ranks in the forward pass.
        words: of a rank in this call.
        ranks: of the group.
    """
    runs = [rank for rank, mode in zip(ranks, modes, strict=True) if mode & kind.gradient]
    others = [rank for rank in ranks if rank not in runs]
    raise RuntimeError(
        f"{_NAME}: {_place(kind, *words[1:4])}, needs all ranks, but only ranks {runs} of {list(ranks)} run it: the "
        f"forward pass of ranks {others} was under no_grad, or nothing that wants a gradient was in it"
    )
