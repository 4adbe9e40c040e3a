# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs with exchanges in flight, beside the same programs without: equal bits."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import discard_dw, flush_dw, moe_mlp
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.expert_parallel import ExchangeHandle, ExpertParallel
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

from .own_transports import OverAllGather, OverObjects
from .problems import on_this_device
from .processes import run

pytestmark = pytest.mark.cpu_only

TOKENS, HIDDEN, INNER, EXPERTS, TOPK, ROOM = 13, 64, 24, 5, 3, 16
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": 257}  # up to 256 are few
# Transports, and the backend of the processes, by which they are sorted, since a start takes seconds.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "gloo exact": ({"combine": "exact"}, "gloo"),
    "gloo reduced float8": ({"combine": "reduced", "payload": "fp8_1x128"}, "gloo"),
    "peer exact": ({"combine": "exact", **PEER}, "gloo"),
    "peer reduced": ({"combine": "reduced", **PEER}, "gloo"),
    "peer reduced few": ({"combine": "reduced", **PEER, "tokens_per_rank": ROOM}, "gloo"),
    "peer reduced float8": ({"combine": "reduced", "payload": "fp8_1x128", **PEER}, "gloo"),
    "own lines": ({"combine": "exact", "transport": OverAllGather()}, "gloo"),
    "own tokens": ({"combine": "reduced", "transport": OverObjects()}, "gloo"),
    "alltoall exact float8": ({"combine": "exact", "payload": "fp8_1x128"}, "stub"),
    "alltoall reduced": ({"combine": "reduced"}, "stub"),
    "alltoall parts of one size": ({"combine": "reduced", "tokens_per_rank": ROOM}, "stub"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
Program = Callable[["Layer"], dict[str, paddle.Tensor]]


class Layer:
    """Experts over two ranks, whose calls are in flight or not.

    Args:
        options: of `ExpertParallel`.
        async_op: whether exchanges are in flight.
        tokens: of this rank in a batch.
    """

    def __init__(self, options: dict[str, Any], async_op: bool, tokens: int) -> None:
        self.parallel, self.async_op, self.tokens = ExpertParallel(EXPERTS, **options), async_op, tokens
        rng, count = np.random.default_rng([7, paddle.distributed.get_rank()]), self.parallel.num_local_experts
        self.gate_up, self.down = (
            paddle.create_parameter(
                shape, "float32", default_initializer=paddle.nn.initializer.Assign(rng.random(shape, np.float32) / 8)
            )
            for shape in ([count, HIDDEN, 2 * INNER], [count, INNER, HIDDEN])
        )

    def batch(self, number: int) -> list[paddle.Tensor]:
        """Tokens, experts and probabilities."""
        rng = np.random.default_rng([number, paddle.distributed.get_rank()])
        ids = np.argsort(rng.random((self.tokens, EXPERTS)))[:, :TOPK].astype(np.int32)
        x, probs = (rng.standard_normal((self.tokens, n)).astype(np.float32) for n in (HIDDEN, TOPK))
        given = [paddle.to_tensor(each) for each in (x, ids, probs)]
        given[0].stop_gradient = given[2].stop_gradient = False
        return given

    def dispatch(self, *given: paddle.Tensor) -> Callable[[], Any]:
        """Begin a dispatch; the result ends it."""
        if self.async_op:
            handle = self.parallel.dispatch(*given, async_op=True)
            assert isinstance(handle, ExchangeHandle)
            return handle.wait
        received = self.parallel.dispatch(*given)
        return lambda: received

    def combine(self, out: paddle.Tensor, received: Any) -> Callable[[], paddle.Tensor]:
        """Begin a combine; the result ends it."""
        if self.async_op:
            return self.parallel.combine(out, received, async_op=True).wait
        y = self.parallel.combine(out, received)
        return lambda: y

    def experts(self, received: Any, **options: Any) -> paddle.Tensor:
        """Expert outputs."""
        if received.rows is None:
            given = received.tokens, received.plan, received.probs
            return moe_mlp(*given, self.gate_up, self.down, **options)
        rows = grouped_gemm(received.rows, self.down, received.tokens_per_expert)
        return grouped_gemm(rows, self.down, received.tokens_per_expert, transpose=False)

    def __call__(self, *given: paddle.Tensor) -> paddle.Tensor:
        received = self.dispatch(*given)()
        return self.combine(self.experts(received), received)()


def results(layer: Layer, found: dict[str, paddle.Tensor]) -> dict[str, NDArray]:
    """Arrays of the tensors that a program found, and of the gradients of the matrices, which are cleared."""
    for name in ("gate_up", "down"):
        parameter = getattr(layer, name)
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
            parameter.clear_gradient(False)
    return {name: to_numpy(each.detach()) for name, each in found.items()}


def of_rank(program: Program, options: dict[str, Any], tokens: tuple[int, int]) -> list[dict[str, NDArray]]:
    """Results of a program without and with exchanges in flight."""
    with on_this_device():
        found = []
        for async_op in (False, True):
            layer = Layer(options, async_op, tokens[paddle.distributed.get_rank()])
            found.append(results(layer, program(layer)))
        return found


def check(way: str, program: Program, tokens: tuple[int, int] = (TOKENS, TOKENS - 4)) -> None:
    """A program finds the same bits with exchanges in flight as without."""
    options, backend = WAYS[way]
    ranks = run(of_rank, 2, backend, program=program, options=options, tokens=tokens)
    for rank, (expected, found) in enumerate(ranks):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_bits_equal(found[name], value, what=f"{name}, rank {rank}")
    assert any(value.any() for expected, _ in ranks for name, value in expected.items() if "gradient" in name)


def loss_of(*outs: paddle.Tensor) -> paddle.Tensor:
    return paddle.add_n([out.square().sum() * (number + 1) for number, out in enumerate(outs)])


def named(**tensors: list[paddle.Tensor] | paddle.Tensor) -> dict[str, paddle.Tensor]:
    """Tensors, and the gradients of those that are inputs, which come as lists."""
    found = {}
    for name, given in tensors.items():
        if isinstance(given, list):
            found |= {f"gradient of {name}, {number}": given[number].grad for number in (0, 2)}
        else:
            found[name] = given
    return {name: each for name, each in found.items() if each is not None}


def one_layer(layer: Layer) -> dict[str, paddle.Tensor]:
    given = layer.batch(0)
    out = layer(*given)
    loss_of(out).backward()
    return named(given=given, out=out)


@EVERY_WAY
def test_a_layer_has_the_bits_of_calls_that_wait(way):
    check(way, one_layer)


def two_micro_batches(layer: Layer) -> dict[str, paddle.Tensor]:
    """Both dispatches begin before the first is waited for, and combines end in the other order."""
    first, second = layer.batch(0), layer.batch(1)
    ends = [layer.dispatch(*each) for each in (first, second)]
    received = [end() for end in ends]
    ends = [layer.combine(layer.experts(each), each) for each in received]
    outs = [end() for end in reversed(ends)]
    loss_of(*outs).backward()
    return named(first=first, second=second, out=outs[0], other=outs[1])


@EVERY_WAY
def test_two_micro_batches_are_in_flight_at_once(way):
    check(way, two_micro_batches)


def with_a_shared_expert(layer: Layer) -> dict[str, paddle.Tensor]:
    """A shared expert runs while rows of experts travel, in both passes."""
    given, shared = layer.batch(0), paddle.nn.Linear(HIDDEN, HIDDEN, bias_attr=False)
    shared.weight.set_value(paddle.eye(HIDDEN) * 2)
    x = given[0] * 1
    received = layer.dispatch(x, *given[1:])()
    out = layer.experts(received)
    if layer.async_op:
        handle = layer.parallel.combine(out, received, async_op=True)
        assert handle.overlapped(x.detach()).stop_gradient
        beside = shared(handle.overlapped(x))
        y = handle.wait() + beside
    else:
        y = layer.parallel.combine(out, received) + shared(x)
    loss_of(y).backward()
    return named(given=given, out=y, shared=shared.weight.grad)


@pytest.mark.parametrize("way", ["gloo exact", "gloo reduced float8", "peer reduced", "alltoall reduced"])
def test_a_shared_expert_overlaps_combine(way):
    check(way, with_a_shared_expert)


@pytest.mark.parametrize("program", [two_micro_batches, with_a_shared_expert], ids=["two batches", "shared expert"])
@pytest.mark.parametrize("way", ["gloo exact", "peer reduced", "alltoall reduced"])
def test_a_rank_may_have_no_tokens(way, program):
    check(way, program, (0, TOKENS))


def with_deferred_gradients(layer: Layer) -> dict[str, paddle.Tensor]:
    """Gradients of matrices are computed while those of tokens travel."""
    given = layer.batch(0)
    if layer.async_op:
        handle = layer.parallel.dispatch(*given, async_op=True)
        handle.overlap_backward(flush_dw)
        received = handle.wait()
    else:
        received = layer.parallel.dispatch(*given)
    out = layer.combine(layer.experts(received, defer_dw=layer.async_op), received)()
    loss_of(out).backward()
    assert discard_dw() == 0
    return named(given=given, out=out)


@pytest.mark.parametrize("way", ["gloo reduced float8", "peer reduced", "own tokens", "alltoall reduced"])
def test_deferred_gradients_overlap_the_exchange_of_gradients(way):
    check(way, with_deferred_gradients)


def recomputed(layer: Layer, use_reentrant: bool) -> dict[str, paddle.Tensor]:
    first, second = layer.batch(0), layer.batch(1)
    outs = [recompute(layer, *each, use_reentrant=use_reentrant) for each in (first, second)]
    loss_of(*outs).backward()
    return named(first=first, second=second, out=outs[0], other=outs[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["gloo exact", "peer reduced", "alltoall reduced"])
def test_a_recomputed_layer(way, use_reentrant):
    check(way, functools.partial(recomputed, use_reentrant=use_reentrant))


def of_a_dropped_handle(layer: Layer) -> dict[str, paddle.Tensor]:
    """Rank 1 drops a handle under no_grad, and so does rank 0 with gradients; an error comes between."""
    given = layer.batch(0)
    if layer.async_op:
        with paddle.no_grad() if paddle.distributed.get_rank() else contextlib.nullcontext():
            layer.parallel.dispatch(*given, async_op=True)
        with contextlib.suppress(ZeroDivisionError):
            handle = layer.parallel.dispatch(*given, async_op=True)
            del handle
            raise ZeroDivisionError
        gc.collect()
    return one_layer(layer)


@EVERY_WAY
def test_handles_that_are_dropped_leave_later_calls_right(way):
    check(way, of_a_dropped_handle)


def of_a_closed_layer(layer: Layer) -> dict[str, paddle.Tensor]:
    given = layer.batch(0)
    end = layer.dispatch(*given)
    layer.parallel.close()
    received = end()
    out = layer.combine(layer.experts(received), received)()
    loss_of(out).backward()
    return named(given=given, out=out)


@EVERY_WAY
def test_an_exchange_in_flight_ends_after_its_layer_was_closed(way):
    check(way, of_a_closed_layer)


def second_order(layer: Layer) -> dict[str, paddle.Tensor]:
    """A gradient by the gradient of the result."""
    x, ids, probs = layer.batch(0)
    probs.stop_gradient, d_out = True, paddle.ones_like(x) * 3
    d_out.stop_gradient = False
    received = layer.dispatch(x, ids, probs)()
    rows = received.rows if received.tokens is None else received.tokens
    (d_x,) = paddle.grad([layer.combine(rows * 2, received)()], [x], [d_out], create_graph=True)
    (found,) = paddle.grad([d_x], [d_out], [x.detach()])
    return {"gradient": d_x, "gradient of the gradient": found}


@pytest.mark.parametrize("way", ["gloo exact", "alltoall reduced"])
def test_gradients_of_second_order(way):
    check(way, second_order)


class Log(OverAllGather):
    """A transport in flight that logs when exchanges begin and end."""

    def connect(self, group: Any, num_experts: int) -> Log:
        super().connect(group, num_experts)
        self.log: list[str] = []
        return self

    def start_exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> Any:
        name = step.kind.name.lower()
        self.log.append(f"begin {name}")
        made = self.exchange(lines, sent, received, step)

        def end() -> paddle.Tensor:
            self.log.append(f"end {name}")
            return made

        return end


class Logged(paddle.autograd.PyLayer):
    """The identity, which logs both passes."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, name: str, log: list[str]) -> paddle.Tensor:
        ctx.entry = name, log
        log.append(name)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        name, log = ctx.entry
        log.append(f"{name}, backward")
        return gradient * 1


def order_of_work() -> list[str]:
    transport = Log()
    layer = Layer({"combine": "exact", "transport": transport}, True, TOKENS)
    given, log = layer.batch(0), transport.log
    x = given[0] * 1
    handle = layer.parallel.dispatch(x, *given[1:], async_op=True)
    handle.overlap_backward(lambda: log.append("wgrad"))
    beside = Logged.apply(x, "plan", log)
    received = handle.wait()
    out = Logged.apply(layer.experts(received), "experts", log)
    handle = layer.parallel.combine(out, received, async_op=True)
    shared = handle.overlapped(x)
    for number in range(5):
        shared = Logged.apply(shared, f"shared {number}", log)
    loss_of(handle.wait() + shared, beside.detach()).backward()
    return log


def test_work_between_begin_and_end_runs_there_in_both_passes():
    forward = [
        *("begin dispatch", "plan", "end dispatch", "experts"),
        *("begin combine", *(f"shared {number}" for number in range(5)), "end combine"),
    ]
    # Paddle's engine runs nodes of equal depth in turn: the sum of rows, one of the shared expert, the exchange.
    backward = [
        *("shared 4, backward", "begin combine_backward", *(f"shared {number}, backward" for number in (3, 2, 1, 0))),
        *("end combine_backward", "experts, backward"),
        *("begin dispatch_backward", "wgrad", "end dispatch_backward"),
    ]
    for found in run(order_of_work, 2):
        assert found[: len(forward)] == forward
        assert found[len(forward) :] == backward


def with_shared_experts(options: dict[str, Any], overlaps: bool) -> list[NDArray]:
    """Outputs and gradients of a `MoELayer` with a residual, whose shared experts may overlap combine."""
    with on_this_device(), contextlib.ExitStack() as patches:
        paddle.seed(5)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 2, group=paddle.distributed.get_group(0), **options)
        x = paddle.to_tensor(np.random.default_rng(paddle.distributed.get_rank()).random((TOKENS, HIDDEN), np.float32))
        x.stop_gradient = False
        assert layer.parallel._overlaps(x)
        if not overlaps:
            patches.enter_context(mock.patch.object(ExpertParallel, "_overlaps", return_value=False))
        hidden = x * 1.5
        out = hidden + layer(hidden)
        out.square().sum().backward()
        return [to_numpy(each.detach()) for each in (out, x.grad, *(each.grad for each in layer.parameters()))]


@pytest.mark.parametrize("options", [{"tokens_per_rank": ROOM}, {}], ids=["parts of one size", "alltoall"])
def test_shared_experts_of_a_layer_overlap_combine_with_the_same_bits(options):
    options = {"combine": "reduced", **options}
    ways = [run(with_shared_experts, 2, "stub", options=options, overlaps=overlaps) for overlaps in (False, True)]
    for expected, found in zip(*ways, strict=True):
        for number, (value, due) in enumerate(zip(found, expected, strict=True)):
            assert_bits_equal(value, due, what=str(number))


def order_of_a_layer(**options: Any) -> list[str]:
    transport = Log()
    group, travels = paddle.distributed.get_group(0), {"transport": transport, **options}
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 1, group=group, **travels)
    layer.shared.register_forward_post_hook(lambda *_: transport.log.append("shared"))
    layer(paddle.randn([TOKENS, HIDDEN])).sum().backward()
    return [each for each in transport.log if "dispatch" not in each][:3]


def test_shared_experts_run_while_sums_travel_but_not_while_rows_do():
    for found in run(order_of_a_layer, 2, combine="reduced"):
        assert found == ["begin combine", "shared", "end combine"]
    for found in run(order_of_a_layer, 2, combine="exact"):
        assert found == ["shared"]
