# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times of layers whose exchanges overlap other work, beside the same layers without, and when each step runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle

from benchmarks.spread import time_fields
from paddle_moe_ops import flush_dw, moe_mlp, route
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.expert_parallel.symmetric_buffers import Barrier

from .measure import Rank

__all__ = ["CASES", "TRANSPORTS", "overlaps"]

TRANSPORTS = "peer", "alltoall"
_WARM_CALLS = 3
_OPTIONS: dict[str, Any] = {"workspace_mb": 1024, "accumulate": True}  # of `moe_mlp`
_Call = tuple[list[dict[str, Any]], float]  # its steps, and its microseconds


class _Steps:
    """Records the begin and the end of steps on two streams: "compute", and "side" for exchanges in flight."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._marks: list[Any] = []
        self._steps: list[dict[str, Any]] = []
        self.passing = "forward"

    def begin(self, step: str, stream: str = "compute") -> Callable[[], None]:
        """Begin a step; the result ends it."""
        marks = [self._mark(stream)]
        self._steps.append({"pass": self.passing, "stream": stream, "step": step, "marks": marks})
        return lambda: marks.append(self._mark(stream))

    def backward_of(self, step: str, first: Any, last: Any) -> None:
        """Record a step in the backward pass.

        Args:
            step: the step.
            first: the tensor whose gradient begins it. The engine calls its hook before the node that produced it.
            last: the tensor whose gradient ends it.
        """
        ends: list[Callable[[], None]] = []
        first.register_hook(lambda _: ends.append(self.begin(step)))
        last.register_hook(lambda _: ends.pop()())

    def _mark(self, stream: str) -> int:
        self._marks.append(self._stream.mark(on_current=stream == "side"))
        return len(self._marks) - 1

    @contextlib.contextmanager
    def exchanges(self) -> Iterator[None]:
        """Have exchanges in flight of the transport "peer" marked."""
        begin = Barrier.begin

        def watched(barrier: Barrier, work: Callable[[list[Any]], Any], *memory: Any) -> Any:
            def marked(used: list[Any]) -> Any:
                end = self.begin("exchange", "side")
                made = work(used)
                end()
                return made

            return begin(barrier, marked, *memory)

        with mock.patch.object(Barrier, "begin", watched):
            yield

    def taken(self, first: Any, last: Any) -> tuple[list[dict[str, Any]], float]:
        """All steps in microseconds from a mark, in the order of their begins, and the time of the last mark."""
        *found, whole = self._stream.microseconds(first, [*self._marks, last])
        steps = []
        for each in self._steps:
            begin, end = (found[mark] for mark in each.pop("marks"))
            steps.append({**each, "begin_us": begin, "end_us": end})
        self._marks, self._steps, self.passing = [], [], "forward"
        return sorted(steps, key=lambda each: each["begin_us"]), whole


class _Layer:
    """A layer of one rank, whose exchanges may be in flight.

    Args:
        rank: the rank.
        transport: of `ExpertParallel`.
        steps: the recorder.
    """

    def __init__(self, rank: Rank, transport: str, steps: _Steps) -> None:
        options = {"transport": transport, "tokens_per_rank": rank.tokens, "combine": "reduced"}
        self.ep, self.rank, self.steps = ExpertParallel(rank.shape.experts, rank.group, **options), rank, steps
        self.matrices = rank.trained()[2:]
        shape = rank.shape
        self.shared = [
            rank.random([1, shape.hidden, 2 * shape.inner], shape.hidden**-0.5),
            rank.random([1, shape.inner, shape.hidden], shape.inner**-0.5),
        ]
        for each in self.shared:
            each.stop_gradient = False
        for each in (*self.matrices, *self.shared):
            each.main_grad = None  # to which kernels add; Paddle's own sum would copy it to the host under the plug-in
        self.d_out = rank.random([rank.tokens, shape.hidden], 1.0)
        self.plan_of_shared = route(to_tensor(np.zeros((rank.tokens, 1), np.int32)), num_experts=1)

    def batch(self, part: slice) -> list[Any]:
        """Leaves of a micro-batch: tokens, experts, probabilities."""
        rank = self.rank
        given = [rank.x.detach()[part], rank.ids[part], rank.probs.detach()[part]]
        given[0].stop_gradient = given[2].stop_gradient = False
        return given

    def experts(self, received: Any, **options: Any) -> Any:
        """Expert outputs; both passes are steps."""
        end = self.steps.begin("experts")
        out = moe_mlp(received.tokens, received.plan, received.probs, *self.matrices, **_OPTIONS, **options)
        end()
        self.steps.backward_of("experts", out, received.tokens)
        return out

    def shared_expert(self, x: Any, ends: Any) -> Any:
        """Outputs of an expert for all tokens; both passes are steps.

        Args:
            x: the tokens.
            ends: the tensor whose gradient comes after the step.
        """
        end = self.steps.begin("shared")
        out = moe_mlp(x, self.plan_of_shared, None, *self.shared, **_OPTIONS)
        end()
        self.steps.backward_of("shared", out, ends)
        return out

    def backward(self, outs: list[Any]) -> None:
        self.steps.passing = "backward"
        paddle.autograd.backward(outs, [self.d_out[: len(out)] for out in outs])


def _with_shared_expert(layer: _Layer, in_flight: bool) -> None:
    """A shared expert, beside combine and its gradient."""
    given, tokens = layer.batch(slice(None)), layer.batch(slice(None))[0]
    received = layer.ep.dispatch(*given)
    out = layer.experts(received)
    if in_flight:
        handle = layer.ep.combine(out, received, async_op=True)
        shared = layer.shared_expert(handle.overlapped(tokens), tokens)
        y = handle.wait()
    else:
        y = layer.ep.combine(out, received)
        shared = layer.shared_expert(tokens, tokens)
    layer.backward([y, shared])


def _two_micro_batches(layer: _Layer, in_flight: bool) -> None:
    """Two halves of the tokens; experts of one run beside exchanges of the other."""
    half = layer.rank.tokens // 2
    batches = [layer.batch(slice(half)), layer.batch(slice(half, 2 * half))]
    if in_flight:
        handles = [layer.ep.dispatch(*each, async_op=True) for each in batches]
        ends = []
        for each in handles:
            received = each.wait()
            ends.append(layer.ep.combine(layer.experts(received), received, async_op=True))
        outs = [each.wait() for each in ends]
        outs[1] = outs[1] * 1.0  # a node more, so nodes of the backward passes take turns
    else:
        outs = []
        for each in batches:
            received = layer.ep.dispatch(*each)
            outs.append(layer.ep.combine(layer.experts(received), received))
    layer.backward(outs)


def _deferred_wgrad(layer: _Layer, in_flight: bool) -> None:
    """Gradients of matrices after the backward pass, or beside the exchange of gradients of tokens."""

    def flush() -> None:
        end = layer.steps.begin("wgrad")
        flush_dw()
        end()

    given = layer.batch(slice(None))
    if in_flight:
        handle = layer.ep.dispatch(*given, async_op=True)
        handle.overlap_backward(flush)
        received = handle.wait()
    else:
        received = layer.ep.dispatch(*given)
    layer.backward([layer.ep.combine(layer.experts(received, defer_dw=True), received)])
    if not in_flight:
        flush()


CASES: dict[str, Callable[[_Layer, bool], None]] = {
    "shared expert": _with_shared_expert,
    "two micro-batches": _two_micro_batches,
    "deferred wgrad": _deferred_wgrad,
}


def overlaps(name: str, tokens: int, samples: int, transports: list[str]) -> list[dict[str, Any]]:
    """On one rank: the times of each case over each transport, without and with exchanges in flight.

    Args:
        name: of a shape.
        tokens: of a rank.
        samples: calls.
        transports: names.
    """
    rank = Rank(name, tokens, samples)
    steps = _Steps(rank.stream)
    found = []
    for transport in transports:
        layer = _Layer(rank, transport, steps)
        for case, call in CASES.items():
            for in_flight in (False, True):
                calls = _timed(layer, call, in_flight)
                calls.sort(key=lambda each: each[1])
                times = time_fields([whole for _, whole in calls])
                how = {"what": "overlap", "case": case, "transport": transport, "in_flight": in_flight}
                found.append({**how, "rank": rank.group.rank, **times, "steps": calls[len(calls) // 2][0]})
        layer.ep.close()
    return found


def _timed(
    layer: _Layer, call: Callable[[_Layer, bool], None], in_flight: bool
) -> list[tuple[list[dict[str, Any]], float]]:
    """The steps and the time of each call, without the first ones."""
    rank, found, queued = layer.rank, [], 0.0
    with layer.steps.exchanges():
        for number in range(_WARM_CALLS + rank.samples):
            timed = number >= _WARM_CALLS
            rank.stream.finish()
            if timed:
                rank.start_together(queued)
            first, begin = rank.stream.mark(), time.perf_counter()
            call(layer, in_flight)
            if not timed:  # a call that waits for the GPU would wait for the delay, too
                queued = time.perf_counter() - begin
            taken = layer.steps.taken(first, rank.stream.mark())
            if timed:
                found.append(taken)
    return found
