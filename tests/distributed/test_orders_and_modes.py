# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Orders of passes, frozen parts, modes and views of buffers over two ranks, beside a dense layer in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.expert_parallel import Received, shard_state_dict
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.dense import Options, assert_close, dense_layer

from . import fake_deep_ep
from .own_transports import MultiHot, OverAllGather, OverObjects
from .problems import on_this_device, rounded_to_float8
from .processes import run
from .test_arguments_stay import state
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import arrays

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]

RANKS, HIDDEN, INNER, EXPERTS, TOPK, MOST_TOKENS = 2, 64, 12, 6, 3, 11
BFLOAT16_ERROR = 0.02  # relative to the norm
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": MOST_TOKENS}
MANY: dict[str, Any] = {"transport": "peer", "tokens_per_rank": 300}  # exchanges of several launches
EQUAL_PARTS: dict[str, Any] = {"combine": "reduced", "tokens_per_rank": MOST_TOKENS}
FORMS = "columns", "rows", "transposed"  # of views of a buffer
IN_ORDER = (0, 0, 0, 1, 1, 1)  # the placement of experts by default
PARTS = {"router": ["router.weight"], "experts": ["experts.gate_up", "experts.down"]}


class Way(NamedTuple):
    """A transport, a combine and a payload.

    Attributes:
        options: of the layer.
        backend: of `processes.run`.
        by_hand: whether programs call `ExpertParallel` themselves, with copy=False.
    """

    options: dict[str, Any]
    backend: str = "gloo"
    by_hand: bool = False


# Sorted by backend, since a start of processes takes seconds.
WAYS = {
    "gloo exact": Way({"combine": "exact"}),
    "gloo exact placed": Way({"combine": "exact", "placement": (1, 0, 1, 1, 1, 0)}),
    "gloo reduced": Way({"combine": "reduced"}),
    "gloo parts of one size": Way(EQUAL_PARTS),
    "gloo float8": Way({"combine": "exact", "payload": "fp8_1x128"}),
    "gloo reduced float8": Way({"combine": "reduced", "payload": "fp8_1x128"}),
    "peer exact": Way({"combine": "exact", **PEER}),
    "peer reduced": Way({"combine": "reduced", **PEER}),
    "peer reduced, many tokens": Way({"combine": "reduced", **MANY}),
    "peer reduced without copies": Way({"combine": "reduced", **MANY}, by_hand=True),
    "peer reduced placed on one rank": Way({"combine": "reduced", "placement": (0,) * 6, **PEER}),
    "peer exact float8": Way({"combine": "exact", "payload": "fp8_1x128", **PEER}),
    "peer reduced float8": Way({"combine": "reduced", "payload": "fp8_1x128", **PEER}),
    "deepep placed": Way({"combine": "reduced", "transport": "deepep", "placement": (1, 0, 1, 1, 1, 1)}),
    "deepep": Way({"combine": "reduced", "transport": "deepep"}),
    "own lines": Way({"combine": "exact", "transport": OverAllGather()}),
    "own tokens": Way({"combine": "reduced", "transport": OverObjects()}),
    "own multi-hot tokens placed": Way(
        {"combine": "reduced", "transport": MultiHot(), "placement": (1, 0, 1, 1, 1, 1)}
    ),
    "alltoall exact": Way({"combine": "exact"}, "stub"),
    "alltoall exact placed": Way({"combine": "exact", "placement": (1, 1, 0, 1, 1, 1)}, "stub"),
    "alltoall reduced": Way({"combine": "reduced"}, "stub"),
    "alltoall reduced placed": Way({"combine": "reduced", "placement": (1, 0, 1, 0, 1, 0)}, "stub"),
    "alltoall parts of one size": Way(EQUAL_PARTS, "stub"),
    "alltoall parts of one size float8": Way({**EQUAL_PARTS, "payload": "fp8_1x128_ue8m0"}, "stub"),
}
# Payloads in float8 travel as others do, so CI has them with one combine of each transport.
SLOW = (
    *("gloo float8", "peer exact float8", "alltoall parts of one size"),
    *(name for name in WAYS if "placed" in name or "own" in name),
)
FAST = [name for name in WAYS if name not in SLOW]


def some_ways(first: int) -> pytest.MarkDecorator:
    """Every second way from a number on, in the order of `FAST`; the others are slow tests."""
    chosen = FAST[first::2]
    return pytest.mark.parametrize(
        "way",
        [pytest.param(way, id=name, marks=[pytest.mark.slow] * (name not in chosen)) for name, way in WAYS.items()],
        scope="module",
    )


# Each way with every second program, in turn; the others are slow tests.
EVERY_WAY_IN_TURN = pytest.mark.parametrize(
    ("way", "turn"),
    [
        pytest.param(way, (number + other) % 2, id=f"{name}{label}", marks=marks + [pytest.mark.slow] * (name in SLOW))
        for number, (name, way) in enumerate(WAYS.items())
        for other, (label, marks) in enumerate({"": [], " with the others": [pytest.mark.slow]}.items())
    ],
    scope="module",
)


class Program(NamedTuple):
    """Passes of one layer on two ranks.

    Attributes:
        events: forward passes by number, and backward passes as tuples of those whose losses they add up.
        tokens: of each forward pass, by rank.
        frozen: by rank, what wants no gradient: "x", "router" or "experts".
        modes: of each forward pass, by rank: "trains", "no_grad" or "eval".
        form: of x: "own", or one of `FORMS`.
        reentrant: of `recompute`; None: without it.
    """

    events: tuple[Any, ...] = (0, 1, (0, 1))
    tokens: tuple[tuple[int, int], ...] = ((9, 5), (7, 11), (8, 6))
    frozen: tuple[tuple[str, ...], ...] = ((), ())
    modes: tuple[tuple[str, str], ...] = (("trains", "trains"),) * 3
    form: str = "own"
    reentrant: bool | None = None

    def values(self, number: int, rank: int) -> NDArray:
        """The tokens of a forward pass, which bfloat16 has as well."""
        x = np.random.default_rng([number, rank]).standard_normal([self.tokens[number][rank], HIDDEN])
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Buffer:
    """Memory that each forward pass finds other tokens in."""

    def __init__(self, form: str, dtype: Any) -> None:
        self.form, rows, columns = form, MOST_TOKENS + 2, HIDDEN + 3
        self.memory = paddle.zeros([columns, rows] if form == "transposed" else [rows, columns], dtype)
        if form == "rows":
            self.memory = self.memory[:, :HIDDEN].clone()

    def holding(self, values: NDArray) -> paddle.Tensor:
        """A view of the buffer after values were written there."""
        part = slice(2, 2 + len(values))
        new = paddle.to_tensor(values).astype(self.memory.dtype)
        if self.form == "own":
            return new
        if self.form == "transposed":
            self.memory[:HIDDEN, part] = new.t()
            return self.memory[:HIDDEN, part].t()
        self.memory[part, :HIDDEN] = new
        return self.memory[part] if self.form == "rows" else self.memory[part, :HIDDEN]


@contextlib.contextmanager
def in_mode(layer: Any, mode: str) -> Iterator[None]:
    if mode == "eval":
        layer.eval()
    with paddle.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        yield
    layer.train()


def passes(
    program: Program, rank: int, call: Callable[[paddle.Tensor], Any], dtype: Any, layer: Any = None
) -> dict[str, Any]:
    """Outputs of a program's forward passes and gradients of their tokens."""
    buffer, xs, outs, found = Buffer(program.form if layer else "own", dtype), {}, {}, {}
    for event in program.events:
        if isinstance(event, tuple):
            losses = [outs[number].astype("float32").square().sum() * (number + 1) for number in event]
            paddle.add_n(losses).backward()
            continue
        x = xs[event] = buffer.holding(program.values(event, rank))
        x.stop_gradient = layer is not None and "x" in program.frozen[rank]
        before = state([x])
        with in_mode(layer, program.modes[event][rank]) if layer else contextlib.nullcontext():
            outs[event] = call(x)
        assert state([x]) == before, f"x of pass {event} is not what it was"
        found[f"out of pass {event}"] = outs[event]
    return found | {f"gradient of x of pass {number}": x.grad for number, x in xs.items()}


def by_hand(layer: MoELayer, x: paddle.Tensor) -> paddle.Tensor:
    """The layer as a program of `ExpertParallel`, whose tokens may stay in memory that ranks share."""
    ids, probs, _, _ = layer.router(x)
    return combined(layer, layer.parallel.dispatch(x, ids, probs, copy=False))


def combined(layer: MoELayer, received: Received) -> paddle.Tensor:
    """Expert outputs of a product that keeps the tokens that arrived for its backward pass."""
    arrived = received.tokens if received.rows is None else received.rows
    factor = paddle.ones([HIDDEN], arrived.dtype)
    factor.stop_gradient = False
    if received.rows is None:
        out = layer.experts(arrived * factor, plan=received.plan, probs=received.probs, combine=True)
    else:
        out = layer.experts(arrived * factor, received.tokens_per_expert)
    return layer.parallel.combine(out, received)


def made_layer(options: dict[str, Any], whole: dict[str, NDArray]) -> MoELayer:
    """This rank's part of a whole layer."""
    fake_deep_ep.install()
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 0, group=paddle.distributed.get_group(0), **options)
    tensors = {name: paddle.to_tensor(value) for name, value in whole.items()}
    layer.set_state_dict(shard_state_dict(tensors, layer, layer.parallel.group))
    if options.get("transport") == "deepep":
        layer.to(dtype="bfloat16")
    return layer


def of_rank(way: Way, whole: dict[str, NDArray], programs: dict[str, Program]) -> dict[str, dict[str, Any]]:
    """Outputs and gradients by program."""
    with on_this_device():
        layer, rank, found = made_layer(way.options, whole), paddle.distributed.get_rank(), {}
        call = (lambda x: by_hand(layer, x)) if way.by_hand else layer
        for name, program in programs.items():
            for part, parameters in PARTS.items():
                for each in map(layer.get_parameter, parameters):
                    each.clear_gradient(False)
                    each.stop_gradient = part in program.frozen[rank]
            again = program.reentrant
            run_once = call if again is None else lambda x, again=again: recompute(call, x, use_reentrant=again)
            made = passes(program, rank, run_once, layer.router.weight.dtype, layer)
            made |= {each: layer.get_parameter(each).grad for names in PARTS.values() for each in names}
            for each in PARTS["experts"]:  # Paddle keeps a gradient without elements
                made[each] = made[each] if layer.get_parameter(each).size else None
            found[name] = {name: None if each is None else to_numpy(each.detach()) for name, each in made.items()}
        return found


@functools.cache
def alone(program: Program, payload: str | None, placement: tuple[int, ...]) -> list[dict[str, Any]]:
    """The same of a dense layer with all experts, by rank; of experts those of the rank."""
    parameters = {name: paddle.to_tensor(value, stop_gradient=False) for name, value in whole_layer().items()}
    seen = [] if payload is None else [lambda tokens: rounded_to_float8(tokens, payload)]
    found: list[dict[str, Any]] = []
    for rank in range(RANKS):
        parameters["router.weight"].clear_gradient(False)
        made = passes(program, rank, lambda x: dense_layer(parameters, x, Options(TOPK), *seen).out, "float32")
        made["router.weight"] = parameters["router.weight"].grad
        found.append({name: None if each is None else each.numpy() for name, each in made.items()})
    for rank, of_this_rank in enumerate(found):
        for name in PARTS["experts"]:
            gradient = parameters[name].grad.numpy()[np.equal(placement, rank)]
            of_this_rank[name] = gradient if gradient.size else None
        for part in program.frozen[rank]:
            frozen = PARTS.get(part) or [name for name in of_this_rank if name.startswith("gradient of x")]
            of_this_rank |= dict.fromkeys(frozen)
    return found


@functools.cache
def whole_layer() -> dict[str, NDArray]:
    """The state of a layer with all experts, of values that bfloat16 has."""
    paddle.seed(11)
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 0)
    layer.to(dtype="bfloat16")
    return arrays(layer.to(dtype="float32").state_dict())


def check(way: Way, programs: dict[str, Program], turn: int | None = None) -> None:
    """Outputs and gradients of programs are those of the dense layer, and what is frozen has none.

    With a turn of 0 or 1, every second program counts from that one on.
    """
    if turn is not None:
        programs = dict([*programs.items()][turn::2])
    ranks = run(of_rank, RANKS, way.backend, way=way, whole=whole_layer(), programs=programs)
    for name, program in programs.items():
        given = way.options.get("payload"), way.options.get("placement", IN_ORDER)
        for rank, expected in enumerate(alone(program, *given)):
            compare(ranks[rank][name], expected, way, f"{name}, rank {rank}")


def compare(found: dict[str, Any], expected: dict[str, Any], way: Way, what: str) -> None:
    assert {name for name, each in found.items() if each is None} == {
        name for name, each in expected.items() if each is None
    }, what
    got, due = ({name: each for name, each in made.items() if each is not None} for made in (found, expected))
    if way.options.get("transport") != "deepep":
        assert_close(got, due, what)
        return
    assert got.keys() == due.keys(), what
    for name, wanted in due.items():
        error = np.linalg.norm(got[name].astype(np.float32) - wanted)
        assert error <= BFLOAT16_ERROR * np.linalg.norm(wanted), f"{name} of {what}"


@pytest.mark.sampled(2)
@EVERY_WAY_IN_TURN
def test_two_forward_passes_come_before_backward_passes_in_each_order(way, turn):
    orders = {
        "one backward pass": Program(),
        "reverse order": Program((0, 1, (1,), (0,))),
        "same order": Program((0, 1, (0,), (1,))),
        "three forward passes": Program((0, 1, 2, (1,), (2, 0))),
    }
    check(way, orders, turn)


def frozen(*parts: str) -> tuple[tuple[str, ...], ...]:
    return (parts, parts)


@pytest.mark.sampled(2)
@EVERY_WAY_IN_TURN
def test_a_frozen_part_has_no_gradient_and_the_others_have_theirs(way, turn):
    programs = {
        "router": Program(frozen=frozen("router")),
        "experts": Program(frozen=frozen("experts")),
        "x": Program(frozen=frozen("x")),
        "all but the experts": Program(frozen=frozen("x", "router")),
        "all but x": Program(frozen=frozen("router", "experts")),
        "the router of one rank": Program(frozen=(("router",), ())),
        "the experts of one rank": Program((0, 1, (1,), (0,)), frozen=((), ("experts",))),
    }
    if way.options["combine"] == "reduced":  # otherwise a rank whose tokens want no gradient runs other backward passes
        programs["x of one rank"] = Program(frozen=((), ("x",)))
    check(way, programs, turn)


TRAINS = ("trains", "trains")


@pytest.mark.sampled(2, 1)
@EVERY_WAY_IN_TURN
def test_modes_of_one_rank_leave_values_and_later_backward_passes_right(way, turn):
    programs = {
        "no_grad between a forward pass and its backward pass": Program(
            (0, 1, (0,)), modes=(TRAINS, ("trains", "no_grad"))
        ),
        "no_grad on both ranks in between": Program((0, 1, (0,)), modes=(TRAINS, ("no_grad", "no_grad"))),
        "no_grad before": Program((0, 1, 2, (2,)), modes=(("no_grad", "trains"), ("trains", "no_grad"), TRAINS)),
        "eval": Program(modes=(("trains", "eval"), ("eval", "trains"))),
        "eval and no_grad": Program((0, 1, 2, (2, 0)), modes=(("eval", "trains"), ("no_grad", "eval"), TRAINS)),
    }
    check(way, programs, turn)


@pytest.mark.sampled(2, 1)
@some_ways(0)
def test_views_of_buffers_are_read_anew_and_stay_what_they_are(way):
    same = ((9, 5), (9, 5))  # so that the second view has the address and shape of the first
    check(way, {form: Program((0, (0,), 1, (1,)), same, form=form) for form in FORMS})


@pytest.mark.sampled(2)
@EVERY_WAY_IN_TURN
def test_recomputed_passes_have_the_gradients_of_passes_that_are_not(way, turn):
    programs = {}
    for reentrant in (True, False):
        programs[f"one backward pass, {reentrant}"] = Program(reentrant=reentrant)
        programs[f"reverse order, {reentrant}"] = Program((0, 1, (1,), (0,)), reentrant=reentrant)
        programs[f"same order, {reentrant}"] = Program((0, 1, (0,), (1,)), reentrant=reentrant)
    check(way, programs, turn)


@pytest.mark.sampled(2, 1)
@EVERY_WAY_IN_TURN
def test_a_rank_may_have_no_tokens_in_a_pass(way, turn):
    programs = {
        "in the first": Program(tokens=((9, 0), (7, 11))),
        "in the second, reverse order": Program((0, 1, (1,), (0,)), tokens=((9, 5), (0, 11))),
        "in one each": Program(tokens=((0, 5), (7, 0))),
        "both in one": Program(tokens=((0, 0), (7, 3))),
        "recomputed": Program(tokens=((9, 0), (0, 11)), reentrant=True),
        "recomputed by hooks": Program(tokens=((9, 0), (0, 11)), reentrant=False),
        "frozen router": Program(tokens=((9, 0), (0, 11)), frozen=frozen("router")),
        "frozen experts": Program(tokens=((9, 0), (0, 11)), frozen=frozen("experts")),
    }
    check(way, programs, turn)


@pytest.mark.sampled(2)
@some_ways(1)
def test_gradients_of_micro_batches_of_other_sizes_add_up(way):
    check(way, {"micro-batches": Program((0, (0,), 1, (1,), 2, (2,)), tokens=((9, 5), (1, 11), (4, 4)))})


class Halves:
    """Calls of `ExpertParallel` whose dispatch and combine are events of their own.

    Args:
        way: how tokens travel.
        layer: whose router, experts and exchanges they are.
        buffers: whether x, ids and probs are views of buffers, which each dispatch finds other values in.
    """

    def __init__(self, way: Way, layer: MoELayer, buffers: bool) -> None:
        self.layer, self.buffers = layer, buffers
        self.x = Buffer("columns" if buffers else "own", layer.router.weight.dtype)
        self.slots = [paddle.zeros([MOST_TOKENS, 2 * TOPK], dtype) for dtype in ("float32", "int32")]
        if way.options["combine"] == "reduced" and "transport" in way.options:
            self.slots.pop()  # a backward pass refuses ids that were changed in place
        self.wanting: dict[int, list[paddle.Tensor]] = {}
        self.received: dict[int, Any] = {}
        self.outs: dict[int, paddle.Tensor] = {}

    def dispatch(self, number: int) -> None:
        x = self.x.holding(Program().values(number, paddle.distributed.get_rank()))
        with paddle.no_grad():
            ids, probs, _, _ = self.layer.router(x.clone())
        given = [probs, ids]
        for place, buffer in enumerate(self.slots if self.buffers else []):
            buffer[: len(ids), 1 : 1 + TOPK] = given[place]
            given[place] = buffer[: len(ids), 1 : 1 + TOPK]
        probs, ids = given
        x.stop_gradient = probs.stop_gradient = False
        self.wanting[number] = [x, probs]
        self.received[number] = self.layer.parallel.dispatch(x, ids, probs)

    def combine(self, number: int) -> None:
        self.outs[number] = combined(self.layer, self.received[number])

    def backward(self, number: int) -> None:
        (self.outs[number].astype("float32").square().sum() * (number + 1)).backward()

    def results(self) -> dict[str, NDArray]:
        made = {name: self.layer.get_parameter(name).grad for name in PARTS["experts"]}
        for number, wanting in self.wanting.items():
            made[f"out of {number}"] = self.outs[number]
            made |= {f"gradient of {what} of {number}": t.grad for what, t in zip(["x", "probs"], wanting, strict=True)}
        for each in map(self.layer.get_parameter, PARTS["experts"]):
            each.clear_gradient(False)
        return {name: to_numpy(each.detach()) for name, each in made.items()}


PLAIN, ORDERS = "d0 c0 b0 d1 c1 b1", ("d0 d1 c0 c1 b0 b1", "d0 d1 c1 c0 b1 b0", "d0 c0 d1 b0 c1 b1")


def in_halves(way: Way, whole: dict[str, NDArray]) -> dict[tuple[str, bool], dict[str, NDArray]]:
    """Results of orders of dispatches, combines and backward passes, with buffers and without."""
    found = {}
    with on_this_device():
        layer = made_layer(way.options, whole)
        for order, buffers in [(PLAIN, False), *itertools.product(ORDERS, (False, True))]:
            program = Halves(way, layer, buffers)
            halves = {"d": program.dispatch, "c": program.combine, "b": program.backward}
            for kind, number in order.split():
                halves[kind](int(number))
            found[order, buffers] = program.results()
    return found


@pytest.mark.sampled(2, 1)
@some_ways(0)
def test_dispatches_before_the_combines_of_others_change_no_result(way):
    for found in run(in_halves, RANKS, way.backend, way=way, whole=whole_layer()):
        for (order, buffers), results in found.items():
            for name, each in results.items():
                what = f"{name} in {order}" + " with buffers" * buffers
                assert_bits_equal(each, found[PLAIN, False][name], what=what)


ANEW = {form: Program(form=form) for form in FORMS}


@pytest.mark.sampled(2, 1)
@some_ways(1)
def test_tokens_that_only_experts_need_may_be_written_anew_before_the_backward_pass(way):
    check(way, {form: each._replace(frozen=frozen("x", "router")) for form, each in ANEW.items()})


def refused(way: Way, whole: dict[str, NDArray]) -> list[str]:
    return [caught(lambda each=each: of_rank(way, whole, {"": each})) for each in ANEW.values()]


@pytest.mark.sampled(2)
@some_ways(0)
def test_tokens_that_the_router_needs_are_refused_where_they_were_written_anew(way):
    if way.options.get("transport") == "deepep":  # whose router keeps tokens in float32
        check(way, ANEW)
        return
    for texts in run(refused, RANKS, way.backend, way=way, whole=whole_layer()):
        assert ["inplace operator" in text for text in texts] == [True] * len(FORMS), texts
