# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""When each step of one call of a layer begins and ends on each rank, forward and backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import paddle

from paddle_moe_ops import moe_mlp
from paddle_moe_ops.expert_parallel import ExpertParallel, peer, symmetric_buffers

from .measure import Rank

__all__ = ["timelines"]

_ROUTE = "route"  # the step in which all waits until the tokens that arrive are routed
_WAIT = "wait"  # for other ranks
# The step of each operator of the transport "peer" within its stage.
_STEPS = {
    "rank_plan": "plan",
    "rank_rows": "plan",
    "rank_send": "send",
    "rank_put": "write",
    "rank_barrier": _WAIT,
    "rank_join": _ROUTE,
    "rank_get": "read",
    "rank_receive": "receive",
}
_WARM_CALLS = 3


class _Recorder:
    """Marks the begin and the end of each step on a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._marks: list[Any] = []
        self._steps: list[dict[str, Any]] = []
        self._passing, self._stage = "", ""

    def enter(self, passing: str, stage: str) -> None:
        """Set the pass and the stage of the following steps."""
        self._passing, self._stage = passing, stage

    def begin(self, stage: str | None, step: str) -> None:
        self._marks.append(self._stream.mark())
        self._steps.append({"pass": self._passing, "stage": stage or self._stage, "step": step})

    def end(self) -> None:
        self._marks.append(self._stream.mark())

    def watching(self, direct: Callable[..., Any]) -> Any:
        """The function that calls operators; those that are steps are marked as such."""

        def watched(name: str, *arguments: Any) -> Any:
            step = _STEPS.get(name)
            if step == _ROUTE and arguments[-1] is False:
                step = _WAIT
            if step is None:
                return direct(name, *arguments)
            self.begin("routing" if step == _ROUTE else None, step)
            made = direct(name, *arguments)
            self.end()
            return made

        return watched

    def taken(self, first: Any) -> list[dict[str, Any]]:
        """All steps since a mark, in microseconds from there."""
        found = iter(self._stream.microseconds(first, self._marks))
        steps = [{**each, "begin_us": next(found), "end_us": next(found)} for each in self._steps]
        self._marks, self._steps = [], []
        return steps


@contextlib.contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    """Have a recorder mark the steps of exchanges, and their waits for routing."""
    with contextlib.ExitStack() as patches:
        for module in (peer, symmetric_buffers):
            patches.enter_context(mock.patch.object(module, "direct", recorder.watching(module.direct)))
        yield


def timelines(name: str, tokens: int, samples: int) -> list[list[dict[str, Any]]]:
    """On one rank: the steps of several calls of a layer.

    Args:
        name: of a shape.
        tokens: of a rank.
        samples: calls.

    Returns:
        for each call its steps, in their order.
    """
    rank = Rank(name, tokens, samples)
    ep = ExpertParallel(rank.shape.experts, rank.group, combine="reduced", tokens_per_rank=tokens, transport="peer")
    trained = rank.trained()
    d_out = rank.random([tokens, rank.shape.hidden], 1.0)
    recorder = _Recorder(rank.stream)

    def call() -> None:
        recorder.enter("forward", "dispatch")
        got = ep.dispatch(rank.x, rank.ids, rank.probs)
        recorder.begin("products", "products")
        out = moe_mlp(got.tokens, got.plan, got.probs, *trained[2:], workspace_mb=1024)
        recorder.end()
        recorder.enter("forward", "combine")
        y = ep.combine(out, got)
        recorder.enter("backward", "combine")
        # The engine calls a tensor's hook before it runs the node that produced the tensor.
        out.register_hook(lambda _: recorder.begin("products", "products"))
        got.tokens.register_hook(lambda _: (recorder.end(), recorder.enter("backward", "dispatch"))[0])
        paddle.grad([y], trained, [d_out])

    found, queued = [], 0.0
    with _watched(recorder):
        for number in range(_WARM_CALLS + samples):
            rank.stream.finish()
            rank.start_together(queued)
            first, begin = rank.stream.mark(), time.perf_counter()
            call()
            queued = time.perf_counter() - begin
            steps = recorder.taken(first)
            if number >= _WARM_CALLS:
                found.append(steps)
    return found
