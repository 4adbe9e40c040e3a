# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Handles of exchanges in flight: errors of misuse, side streams, and transports that begin exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import paddle
import pytest

from paddle_moe_ops import flush_dw, moe_mlp
from paddle_moe_ops.expert_parallel import ExpertParallel, LineTransport, exchanges, streams
from paddle_moe_ops.expert_parallel.streams import InFlight, SideStream
from paddle_moe_ops.expert_parallel.symmetric_buffers import Barrier

from .own_transports import OverAllGather
from .problems import on_this_device
from .processes import run
from .test_exchanges_in_flight import PEER, TOKENS, WAYS, Layer
from .test_expert_parallel_errors import caught

pytestmark = pytest.mark.cpu_only


def overlapped_without_some_gradients() -> list[bool]:
    """Flags of tensors without a gradient: x of a handle with gradients; x, and the result, of a handle without any."""
    layer = Layer({"combine": "exact"}, True, TOKENS)
    x, ids, probs = layer.batch(0)
    handle = layer.parallel.dispatch(x, ids, probs.detach(), async_op=True)
    found = [handle.overlapped(x.detach())]
    received = handle.wait()
    handle = layer.parallel.combine(layer.experts(received).detach(), received, async_op=True)
    found += [handle.overlapped(x), handle.wait()]
    return [each.stop_gradient for each in found]


def test_overlapped_changes_no_tensor_that_wants_a_gradient():
    assert run(overlapped_without_some_gradients, 2) == [[True, False, True]] * 2


def misused(options: dict[str, Any]) -> dict[str, str]:
    with on_this_device():
        layer = Layer(options, True, TOKENS)
        given = layer.batch(0)
        parallel, found = layer.parallel, {}
        handle = parallel.dispatch(*given, async_op=True)
        received = handle.wait()
        found["dispatch, twice"] = caught(handle.wait)
        found["overlapped"] = caught(lambda: handle.overlapped(given[0]))
        found["overlap_backward"] = caught(lambda: handle.overlap_backward(flush_dw))
        out = layer.experts(received)
        handle = parallel.combine(out, received, async_op=True)
        handle.wait()
        found["combine, twice"] = caught(handle.wait)
        buffer = given[0].detach().clone()
        handle = parallel.dispatch(buffer, *given[1:], async_op=True)
        buffer.zero_()
        found["changed"] = caught(handle.wait)
        found["no copy"] = caught(lambda: parallel.dispatch(*given, async_op=True, copy=False))
        found["no flag"] = caught(lambda: parallel.combine(out, received, async_op=1))
        layer(*given)
        return found


TWICE = "after wait(), which returns the result once"
ERRORS = {
    "dispatch, twice": f"RuntimeError: ExpertParallel.dispatch: wait() {TWICE}",
    "overlapped": f"RuntimeError: ExpertParallel.dispatch: overlapped() {TWICE}",
    "overlap_backward": f"RuntimeError: ExpertParallel.dispatch: overlap_backward() {TWICE}",
    "combine, twice": f"RuntimeError: ExpertParallel.combine: wait() {TWICE}",
    "changed": "RuntimeError: ExpertParallel.dispatch: the sent tensor was changed in place before wait(); change it "
    "later, or send a copy",
    "no copy": "ValueError: ExpertParallel.dispatch: copy must be True with async_op=True, since later exchanges "
    "overwrite memory that ranks share, but got False",
    "no flag": "TypeError: ExpertParallel.combine: async_op must be a bool, but got 1 of type int",
}


@pytest.mark.parametrize("way", ["peer reduced", "alltoall reduced"])
def test_misuse_raises(way):
    options, backend = WAYS[way]
    for found in run(misused, 2, backend, options=options):
        assert found == ERRORS


def on_a_side_stream() -> list[Any]:
    """Results of work on a side stream of the tests' device, one of which is dropped."""
    with on_this_device():
        x, kept = paddle.ones([3]), [paddle.ones([2])]
        side = SideStream(x.place)
        current = lambda: paddle.device.current_stream(paddle.device.get_device()).stream_base.raw_stream  # noqa: E731
        before, during = current(), []
        ends = [
            side.begin(lambda used: (used.append(kept), during.append(current()), x * 2)[2:], x),
            side.begin(lambda _: (x * 3,)),
        ]
        side.join()
        del ends[1]
        (made,) = ends[0]()
        side.join()
        with contextlib.suppress(ZeroDivisionError):
            side.begin(lambda _: (x / (1 // 0),))
        with mock.patch.object(side, "_current") as stream:
            side.join()
        waits = stream.return_value.wait_event.call_count
        return [made.tolist(), ends[0]._memory, current() == before, during[0] == before, waits]


EXCHANGES = [f"{passing} {what}" for what in ("combine", "dispatch") for passing in ("begin", "end")]
LOCKSTEP = [(step, batch) for step in [*EXCHANGES[:2], "experts", *EXCHANGES[2:]] for batch in (0, 1)]
IN_TURNS = [
    *(("begin combine", 0), ("end combine", 0), ("begin combine", 1), ("experts", 0), ("end combine", 1)),
    *(("begin dispatch", 0), ("experts", 1), ("end dispatch", 0), ("begin dispatch", 1), ("end dispatch", 1)),
]


@pytest.mark.parametrize(("later", "expected"), [(False, LOCKSTEP), (True, IN_TURNS)], ids=["alike", "one node more"])
def test_backward_passes_of_micro_batches_take_turns_if_one_loss_has_a_node_more(later, expected):
    """So the experts of one run while gradients of the other travel (docs/expert_overlap.md)."""
    parallel, log, outs = ExpertParallel(4, combine="reduced"), [], []
    matrices = [paddle.create_parameter(shape, "float32") for shape in ([4, 8, 12], [4, 6, 8])]
    begin, end = exchanges._Sending.returns, exchanges._Sending.differentiate
    numbers: dict[int, int] = {}

    def step(name: str, sending: Any) -> None:
        log.append((f"{name} {sending.function.partition('.')[2]}", numbers[id(sending)]))

    handles = []
    for batch in range(2):
        probs, ids = paddle.topk(paddle.rand([5, 4]), 2)
        x = paddle.randn([5, 8])
        x.stop_gradient = False
        handles.append(parallel.dispatch(x, ids, probs, async_op=True))
        numbers[id(handles[-1]._flight._call)] = batch
    for batch, handle in enumerate(handles):
        received = handle.wait()
        out = moe_mlp(received.tokens, received.plan, received.probs, *matrices)
        out.register_hook(lambda _, batch=batch: log.append(("experts", batch)))
        outs.append(parallel.combine(out, received, async_op=True))
        numbers[id(outs[-1]._flight._call)] = batch
    losses = [each.wait().square().mean() for each in outs]
    with (
        mock.patch.object(exchanges._Sending, "returns", lambda *given: step("begin", given[0]) or begin(*given)),
        mock.patch.object(exchanges._Sending, "differentiate", lambda *given: step("end", given[0]) or end(*given)),
    ):
        paddle.add_n([losses[0], losses[1] * 1.0 if later else losses[1]]).backward()
    assert log == expected


class FakeStream:
    """A stream whose events know what was recorded on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.done = name, log, 0

    def record_event(self) -> Any:
        event = mock.Mock()
        event.record = lambda stream: setattr(event, "time", f"{stream.name} {stream.done}")
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.time}")


def test_a_side_stream_records_an_event_again_only_after_a_stream_has_waited_for_it():
    """On a custom device the host would wait for each event that is destroyed."""
    log: list[str] = []
    current, stream = FakeStream("current", log), FakeStream("side", log)
    with mock.patch.object(streams, "_device_of"):
        side = SideStream(None)
    side._stream = mock.Mock(stream_base=stream)

    def work(used: list[Any]) -> tuple[()]:
        stream.done += 1
        return ()

    with mock.patch.object(side, "_current", return_value=current), mock.patch.object(paddle.device, "stream_guard"):
        first, second = side.begin(work), side.begin(work)
        current.done = 1
        second()
        third = side.begin(work)
        side.join()
        first()
        del third
        first, second = side.begin(work), side.begin(work)
        assert log == [
            *("side waits for current 0", "side waits for current 0"),
            *("current waits for side 2", "side waits for current 1"),
            *("current waits for side 3", "current waits for side 1", "current waits for side 3"),
            *("side waits for current 1", "side waits for current 1"),
        ]
        assert not side._free
        del first, second
        assert len(set(map(id, side._free))) == 2


def test_a_side_stream_ends_work_and_restores_the_current_stream():
    """Work that raises has an end to wait for, too."""
    assert run(on_a_side_stream, 2, "stub") == [[[2.0] * 3, (), True, False, 1]] * 2


class FakeSide:
    """A side stream that logs its calls, and runs work at once."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def join(self) -> None:
        self.log.append("join")

    def begin(self, work: Callable[[list[Any]], Any], *memory: Any) -> InFlight:
        self.log.append("begin")
        made = work([])
        return InFlight(lambda: self.log.append("wait"), lambda: made, memory)


def order_of_peers() -> list[str]:
    layer = Layer({"combine": "reduced", **PEER}, True, TOKENS)
    given, parallel = layer.batch(0), layer.parallel
    layer(*given)
    side = FakeSide()
    parallel._peers._buffers.find((Barrier, str(given[0].place)))._side = side
    received = parallel.dispatch(*given, async_op=True).wait()
    out = layer.experts(received)
    parallel.combine(out, received)
    parallel.combine(out, received, async_op=True)  # and drop the handle
    parallel.combine(out, received, async_op=True).wait().sum().backward()
    return side.log


def test_each_exchange_of_peers_follows_those_in_flight():
    a_flight = ["begin", "join", "wait"]  # the join is that of the side stream itself
    expected = ["join", "begin", "wait", "join", *a_flight * 4]
    for found in run(order_of_peers, 2):
        assert found == expected


class WithoutAnEnd(OverAllGather):
    def start_exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> Any:
        return self.exchange(lines, sent, received, step)


class WithAShortEnd(OverAllGather):
    def start_exchange(self, lines: paddle.Tensor, sent: Any, received: Any, step: Any) -> Any:
        made = self.exchange(lines, sent, received, step)
        return lambda: made[1:]


def with_a_bad_transport(transport: LineTransport) -> str:
    layer = Layer({"combine": "exact", "transport": transport}, True, TOKENS)
    return caught(lambda: layer.dispatch(*layer.batch(0))())


def test_a_transport_whose_start_exchange_returns_something_else_is_named():
    for found in run(with_a_bad_transport, 2, transport=WithoutAnEnd()):
        expected = (
            "TypeError: ExpertParallel: the result of transport.start_exchange must be a function, but got Tensor"
        )
        assert found == expected
    for found in run(with_a_bad_transport, 2, transport=WithAShortEnd()):
        assert found.startswith(
            "ValueError: ExpertParallel: the result of the function of transport.start_exchange must be"
        )
