# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Transports that users write against the protocols have the bits of the built-in ones."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.expert_parallel import (
    DeepEP,
    ExpertParallel,
    LineTransport,
    TokenTransport,
    Transport,
    gather_state_dict,
    move_experts,
)
from paddle_moe_ops.expert_parallel.transports import AllToAll, Alone, Scatters
from paddle_moe_ops.nn import MoEConfig, MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

from .own_transports import MultiHot, OverAllGather, OverObjects
from .problems import Problem
from .processes import run
from .test_expert_parallel import exact, reduced
from .test_expert_parallel_errors import caught
from .test_placement import exchanged

pytestmark = pytest.mark.cpu_only


PROBLEMS = [
    Problem((5, 16), 4, 2, 7),
    Problem((0, 7), 6, 3, 72, "half none", "bfloat16"),
    Problem((9, 4), 4, 2, 16, "one expert", "float16"),
]
LINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact": (exact, {}),
    "reduced": (reduced, {}),
    "parts of one size": (reduced, {"tokens_per_rank": 16}),
    "float8": (exact, {"float8": "fp8_1x128_ue8m0"}),
}


def of_lines(way: str) -> list[tuple[dict[str, NDArray], dict[str, NDArray]]]:
    """Results over the user's transport and over the built-in one."""
    program, options = LINES[way]
    rank, own = dist.get_rank(), OverAllGather()
    problems = [problem._replace(**options) for problem in PROBLEMS]
    found = [(program(problem._replace(transport=own), rank), program(problem, rank)) for problem in problems]
    assert own.words
    return found


@pytest.mark.parametrize("way", LINES)
def test_lines_over_a_users_transport_have_the_bits_of_the_built_in_one(way):
    for of_rank in run(of_lines, 2, way=way):
        for got, expected in of_rank:
            for name, value in expected.items():
                assert_bits_equal(got[name], value, what=name)


PLACEMENTS = {"even": None, "uneven": [1, 0, 1, 1]}


KINDS = {"tokens": OverObjects, "multi-hot": MultiHot}


def of_tokens(placement: Any, kind: Any) -> list[tuple[dict[str, NDArray], dict[str, NDArray]]]:
    found = []
    for problem in PROBLEMS:
        problem = problem._replace(integers=True, experts=4)
        given = problem, placement
        ways = [{"combine": "reduced", "transport": transport} for transport in (kind(), "auto")]
        found.append(tuple(exchanged(*given, way, dist.get_rank()) for way in ways))
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_tokens_over_a_users_transport_have_the_bits_of_the_built_in_one(placement, kind):
    for of_rank in run(of_tokens, 2, placement=placement, kind=kind):
        for got, expected in of_rank:
            for name, value in expected.items():
                assert_bits_equal(got[name], value, what=name)


TRANSPORTS = {"lines": OverAllGather, "tokens": OverObjects, "multi-hot": MultiHot, "built-in": lambda: "auto"}
OWN = pytest.mark.parametrize("kind", ["lines", "tokens", "multi-hot"])


def layer_over(kind: str) -> MoELayer:
    transport = TRANSPORTS[kind]()
    config = MoEConfig(8, 12, 4, 2, combine="reduced", transport=transport)
    assert copy.deepcopy(config).transport is transport
    paddle.seed(2)
    return MoELayer(config, group=dist.get_group(0))


def batch(number: int, tokens: int) -> paddle.Tensor:
    values = np.random.default_rng([number, dist.get_rank()]).standard_normal([tokens, 8])
    return paddle.to_tensor(values.astype(np.float32), stop_gradient=False)


def trained(kind: str, moves: bool) -> list[NDArray]:
    """Outputs, gradients and states of a layer and of its copy."""
    layer, found = layer_over(kind), []
    for each in (layer, copy.deepcopy(layer)):
        if moves:
            move_experts(each, [1, 0, 1, 1])
        x = batch(0, 5)
        out = each(x)
        out.square().sum().backward()
        found += [out, x.grad, each.router.weight.grad, each.experts.down.grad, *gather_state_dict(each).values()]
    return [value.numpy() for value in found]


def assert_like_the_built_in_one(program: Any, kind: str, **options: Any) -> None:
    for got, expected in zip(*(run(program, 2, kind=each, **options) for each in (kind, "built-in")), strict=True):
        for value, due in zip(got, expected, strict=True):
            np.testing.assert_array_equal(value, due)


@pytest.mark.parametrize("moves", [False, True], ids=["", "after a move"])
@OWN
def test_a_layer_trains_over_a_users_transport(kind, moves):
    assert_like_the_built_in_one(trained, kind, moves=moves)


def several_passes(kind: str) -> list[NDArray]:
    """Passes of a layer: rank 1 has no tokens in the first one, and runs the one in between without gradients."""
    layer, rank = layer_over(kind), dist.get_rank()
    xs = [batch(0, 5 - 5 * rank), batch(1, 4 + rank), batch(2, 3)]
    first = layer(xs[0])
    with paddle.no_grad() if rank == 1 else contextlib.nullcontext():
        between = layer(xs[1])
    last = layer(xs[2])
    (first.square().sum() + 2 * last.square().sum()).backward()
    found = [first, between, last, xs[0].grad, xs[2].grad, *(each.grad for each in layer.parameters())]
    assert xs[1].grad is None
    return [value.detach().numpy() for value in found if value is not None]


@OWN
def test_two_forward_passes_and_one_without_gradients_come_before_a_backward_pass(kind):
    assert_like_the_built_in_one(several_passes, kind)


class Kinds(OverAllGather):
    """A transport that notes the passes of the exchanges."""

    def exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> paddle.Tensor:
        self.kinds = [*getattr(self, "kinds", ()), step.kind.text]
        return super().exchange(lines, sent, received, step)


def passes_of_second_order(combine: str) -> list[str]:
    """The passes that differentiate the gradient of tokens."""
    transport = Kinds()
    parallel = ExpertParallel(4, combine=combine, transport=transport)
    x, ids = paddle.ones([3, 8]), paddle.to_tensor([[0, 3], [2, 1], [1, 3]])
    d_out = paddle.ones([3, 8])
    x.stop_gradient = d_out.stop_gradient = False
    received = parallel.dispatch(x, ids, paddle.ones([3, 2]))
    rows = received.rows if combine == "exact" else received.tokens
    (d_x,) = paddle.grad([parallel.combine(rows * 2, received)], [x], [d_out], create_graph=True)
    transport.kinds = []
    paddle.grad([d_x], [d_out])
    return transport.kinds


@pytest.mark.parametrize(("combine", "lines"), [("exact", 1), ("reduced", 2)])
def test_passes_of_second_order_have_the_names_of_those_forward(combine, lines):
    """With combine="reduced" probabilities travel with the tokens."""
    assert run(passes_of_second_order, 2, combine=combine) == [["dispatch"] * lines + ["combine"]] * 2


def second_order(options: dict[str, Any]) -> str:
    x, probs, ep = paddle.ones([2, 4]), paddle.ones([2, 1]), ExpertParallel(4, combine="reduced", **options)
    x.stop_gradient = probs.stop_gradient = False
    received = ep.dispatch(x, paddle.to_tensor([[0], [3]]), probs)
    out = ep.combine(received.tokens.square() * received.probs, received)
    gradient, _ = paddle.grad([out.sum()], [x, probs], create_graph=True)
    return caught(gradient.sum().backward)


@pytest.mark.parametrize("options", [{"transport": OverObjects()}, {"transport": "peer", "tokens_per_rank": 4}])
def test_gradients_of_second_order_raise_where_receivers_route_tokens(options):
    for text in run(second_order, 2, options=options):
        assert "ExpertParallel.dispatch: second-order gradients are not supported here, only first-order ones" in text


def gradient_by_the_gradient_of_sums() -> list[bool]:
    """Flags of gradients of rows, and of sums by these, that have the values of a dispatch and of a combine."""
    ep, (x, ids, probs) = ExpertParallel(4, combine="reduced", transport=OverObjects()), given_tokens()
    received = ep.dispatch(x, ids, probs)
    rows, direction = received.tokens.detach(), received.tokens.detach() + 1
    rows.stop_gradient = x.stop_gradient = False
    (d_rows,) = paddle.grad([ep.combine(rows, received)], [rows], [x], create_graph=True)
    (found,) = paddle.grad([d_rows], [x], [direction])
    return [np.array_equal(d_rows, received.tokens), np.array_equal(found, ep.combine(direction, received))]


def given_tokens() -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    ids = paddle.to_tensor([[0, 3], [2, 1], [1, 3]])
    return paddle.arange(24, dtype="float32").reshape([3, 8]), ids, paddle.ones([3, 2])


def test_gradients_of_second_order_of_combine_travel_over_a_transport_of_tokens():
    assert run(gradient_by_the_gradient_of_sums, 2) == [[True, True]] * 2


def backward_of_one_rank() -> str:
    layer, rank = layer_over("lines"), dist.get_rank()
    with paddle.no_grad() if rank == 1 else contextlib.nullcontext():
        out = layer(batch(0, 3))
    return caught(out.sum().backward) if rank == 0 else ""


def test_a_backward_pass_that_a_rank_does_not_run_raises():
    text, _ = run(backward_of_one_rank, 2)
    assert "needs all ranks, but only ranks [0] of [0, 1] run it" in text


class Faulty(OverAllGather):
    """A transport that loses a line of every tensor of numbers of another kind than int32."""

    def exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> paddle.Tensor:
        made = super().exchange(lines, sent, received, step)
        return made[1:] if lines.dtype == paddle.float32 else made


class FaultyNumbers(OverAllGather):
    """A transport whose numbers are of another dtype."""

    def exchange_numbers(self, numbers: paddle.Tensor, step: Any) -> paddle.Tensor:
        return super().exchange_numbers(numbers, step).astype("int64")


class FaultyTokens(OverObjects):
    """A transport of tokens that refuses odd widths and more than four experts, with a wrong result.

    Attributes:
        wrong: the method with the wrong result.
    """

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def connect(self, group: Any, num_experts: int) -> Any:
        if num_experts > 4:
            raise ValueError("FaultyTokens: at most 4 experts")
        self.group, self.experts_of_rank = group, num_experts // group.nranks
        return OverAllGather() if self.wrong == "connect" else self

    def check(self, function: str, argument: str, rows: paddle.Tensor) -> None:
        if rows.shape[1] % 2:
            raise TypeError(f"{function}: {argument} must be even")

    def dispatch(self, *given: paddle.Tensor) -> Any:
        made = super().dispatch(*given)
        wrong = {
            "dispatch": tuple(made),
            "tokens": made._replace(tokens=made.tokens.astype("float64")),
            "ids": made._replace(ids=made.ids.astype("float32")),
            "probs": made._replace(probs=made.probs[:, :0]),
        }
        return wrong.get(self.wrong, made)

    def dispatch_again(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        made = super().dispatch_again(rows, handle)
        return made[1:] if self.wrong == "dispatch_again" and rows.sum() == 1024 else made

    def combine(self, rows: paddle.Tensor, handle: Any) -> paddle.Tensor:
        made = super().combine(rows, handle)
        return made[:, :-1] if self.wrong == "combine" else made

    def combine_with_probs(self, rows: paddle.Tensor, probs: paddle.Tensor, handle: Any) -> Any:
        sums, of_probs = super().combine_with_probs(rows, probs, handle)
        wrong = {
            "combine_with_probs": sums,
            "three": (sums, of_probs, of_probs),
            "sums": (sums.astype("float64"), of_probs),
            "of_probs": (sums, sums),
        }
        return wrong.get(self.wrong, (sums, of_probs))


WRONG = {
    "connect": "TypeError: ExpertParallel: the result of transport.connect must be a TokenTransport, but got "
    "OverAllGather",
    "dispatch": "TypeError: ExpertParallel: the result of transport.dispatch must be DispatchedTokens, but got tuple",
    "tokens": "TypeError: ExpertParallel: tokens of the result of transport.dispatch must be of dtype float32",
    "ids": "TypeError: ExpertParallel: ids of the result of transport.dispatch must be of dtype int32 or int64",
    "probs": "ValueError: ExpertParallel: probs of the result of transport.dispatch must be of shape [2, 1]",
    "combine": "ValueError: ExpertParallel: the result of transport.combine must be of shape [2, 4], but got [2, 3]",
    "dispatch_again": "ExpertParallel: the result of transport.dispatch_again must be of shape [2, 4], but got [1, 4]",
    "combine_with_probs": "ExpertParallel: the result of transport.combine_with_probs must be two tensors, but got",
    "three": "ExpertParallel: the result of transport.combine_with_probs must be two tensors, but got tuple",
    "sums": "ExpertParallel: the result of transport.combine_with_probs, [0], must be of dtype float32",
    "of_probs": "ExpertParallel: the result of transport.combine_with_probs, [1], must be of shape [2, 1]",
}


def round_trip(transport: Any, combine: str = "reduced", width: int = 4, returned: int | None = None) -> None:
    """A dispatch of two tokens, one for each rank, its combine, and a backward pass of gradients of 128.

    Args:
        transport: of `ExpertParallel`.
        combine: of `ExpertParallel`.
        width: columns of the tokens.
        returned: columns of the expert outputs; None: all.
    """
    x, probs = paddle.ones([2, width]), paddle.ones([2, 1])
    x.stop_gradient = probs.stop_gradient = False
    ep = ExpertParallel(4, combine=combine, transport=transport)
    received = ep.dispatch(x, paddle.to_tensor([[0], [3]]), probs)
    rows = received.tokens if combine == "reduced" else received.rows
    out = ep.combine(rows[:, :returned], received)
    (out.sum() * 128).backward()


def wrong_results() -> list[str]:
    return [caught(lambda each=each: round_trip(FaultyTokens(each))) for each in WRONG]


def test_wrong_results_of_a_transport_are_refused_by_the_name_of_its_method():
    for texts in run(wrong_results, 2):
        for text, expected in zip(texts, WRONG.values(), strict=True):
            assert expected in text


def errors() -> list[str]:
    ways = [3, None, Transport(), OverObjects]
    reduced_by = {"combine": "reduced", "transport": OverObjects()}
    return [
        *(caught(lambda each=each: ExpertParallel(4, transport=each)) for each in ways),
        caught(lambda: ExpertParallel(4, transport=OverObjects())),
        caught(lambda: ExpertParallel(4, **reduced_by, payload="fp8_1x128")),
        caught(lambda: ExpertParallel(4, **reduced_by, tokens_per_rank=8)),
        caught(lambda: ExpertParallel(4, transport=(Faulty(), OverAllGather())[dist.get_rank()])),
        caught(lambda: ExpertParallel(6, combine="reduced", transport=FaultyTokens())),
        caught(lambda: round_trip(FaultyTokens(), width=3)),
        caught(lambda: round_trip(FaultyTokens(), returned=3)),
        caught(lambda: round_trip(Faulty(), "exact")),
        caught(lambda: round_trip(FaultyNumbers(), "exact")),
        caught(lambda: DeepEP(3)),
        caught(lambda: MoELayer(8, 12, 4, 2, transport=3)),
    ]


def test_errors_of_transports_name_the_argument():
    one, other = run(errors, 2)
    assert one == other
    kinds = "transport must be a name, a LineTransport or a TokenTransport, but got"
    given = ("int", "NoneType", "Transport", "the class OverObjects, not an instance")
    assert one[:4] == [f"TypeError: ExpertParallel: {kinds} {each}" for each in given]
    module = "tests.distributed"
    assert one[4:] == [
        "ValueError: ExpertParallel: combine must be 'reduced' with a TokenTransport, but got 'exact'",
        "ValueError: ExpertParallel: payload must be None with a TokenTransport, but got 'fp8_1x128'",
        "ValueError: ExpertParallel: tokens_per_rank must be None with a TokenTransport, but got 8",
        "ValueError: ExpertParallel: transport must be the same on all ranks of the group, but got "
        f"'{module}.test_own_transports.Faulty' on rank 0, '{module}.own_transports.OverAllGather' on rank 1",
        "ValueError: FaultyTokens: at most 4 experts",
        "TypeError: ExpertParallel.dispatch: x must be even",
        "TypeError: ExpertParallel.combine: out must be even",
        "ValueError: ExpertParallel: the result of transport.exchange must be of shape [2, 4], but got [1, 4]",
        "TypeError: ExpertParallel: the result of transport.exchange_numbers must be of dtype int32, but got int64",
        "TypeError: DeepEP: module must be a module with a class Buffer, or None, but got int",
        f"TypeError: MoELayer: {kinds} int",
    ]


def test_the_transport_is_in_the_text_of_a_layer():
    assert all("OverAllGather, layer" in each for each in run(text_of_layer, 2))


def text_of_layer() -> str:
    return repr(ExpertParallel(4, transport=OverAllGather()))


def test_built_in_transports_are_instances_of_the_protocols():
    assert all(issubclass(each, LineTransport) for each in (AllToAll, Alone, Scatters))
    assert issubclass(DeepEP, TokenTransport)
    assert type(ExpertParallel(2, transport=OverObjects(), combine="reduced")._transport) is Alone
