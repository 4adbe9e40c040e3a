# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A rank waits for numbers on the host once in a dispatch, and never if all sizes are known."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import profiler
from paddle.distributed.communication.group import Group

from paddle_moe_ops import permute, unpermute
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel, Received

from .processes import run

TOKENS, HIDDEN, EXPERTS, TOPK = 13, 64, 8, 3
READS = ("numpy", "tolist", "item", "cpu", "__array__", "__int__", "__float__", "__bool__", "__index__")
STATIC = [
    {"combine": "reduced"},
    {"combine": "reduced", "payload": "fp8_1x128"},
    {"combine": "reduced", "transport": "peer"},
    {"combine": "reduced", "transport": "peer", "payload": "fp8_1x128"},
    {"combine": "exact", "transport": "peer"},
]


class Reads:
    """Counts host reads of tensors, without those of a transport over gloo."""

    def __init__(self) -> None:
        self.count, self._depth = 0, 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                patch.setattr(paddle.Tensor, name, self._counting(getattr(paddle.Tensor, name)))
            yield

    def _counting(self, read: Any) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.count += self._depth == 0
            with self.apart():
                return read(*arguments, **options)

        return counting

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude nested reads from the count."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class Apart:
    """A transport whose own reads do not count."""

    def __init__(self, transport: Any, reads: Reads) -> None:
        self._transport, self._reads = transport, reads

    def exchange(self, *arguments: Any, **options: Any) -> paddle.Tensor:
        with self._reads.apart():
            return self._transport.exchange(*arguments, **options)

    def exchange_numbers(self, *arguments: Any) -> paddle.Tensor:
        with self._reads.apart():
            return self._transport.exchange_numbers(*arguments)


class Layer:
    """A dispatch, experts and a combine on this rank."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        rng = np.random.default_rng(paddle.distributed.get_rank())
        self.ep = ExpertParallel(EXPERTS, group or paddle.distributed.get_group(0), **options)
        ids = np.argpartition(rng.random((TOKENS, EXPERTS)), TOPK, 1)[:, :TOPK]
        self.ids = to_tensor(ids.astype(np.int32))
        shapes = {"x": (TOKENS, HIDDEN), "probs": (TOKENS, TOPK)}
        self.trained = {name: to_tensor(rng.random(shape, np.float32)) for name, shape in shapes.items()}
        for each in self.trained.values():
            each.stop_gradient = False

    def dispatched(self) -> Received:
        return self.ep.dispatch(self.trained["x"], self.ids, self.trained["probs"])

    def experts(self, received: Received) -> paddle.Tensor:
        """The rows themselves."""
        if received.rows is not None:
            return received.rows
        return unpermute(permute(received.tokens, received.plan)[0], received.plan, received.probs)


def reads_of_each_step(**options: Any) -> list[int]:
    """Reads of dispatch, experts, combine and backward pass in the second turn; the first one allocates the windows."""
    layer, reads = Layer(**options), Reads()
    layer.ep._transport = Apart(layer.ep._transport, reads)
    for _ in range(2):
        found = []
        with reads.counted():
            received = layer.dispatched()
            found.append(reads.count)
            out = layer.experts(received)
            found.append(reads.count)
            y = layer.ep.combine(out, received)
            found.append(reads.count)
            y.sum().backward()
            found.append(reads.count)
        reads.count = 0
    return np.diff(found, prepend=0).tolist()


@pytest.mark.cpu_only  # a GPU's own suite captures them: test_cuda_graph
@pytest.mark.parametrize("options", [{"combine": "exact"}, {"combine": "reduced"}], ids=["exact", "reduced"])
def test_a_dispatch_reads_the_counts_once_and_nothing_else_reads(options):
    assert run(reads_of_each_step, 2, **options) == [[1, 0, 0, 0]] * 2


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", STATIC, ids=lambda options: " ".join(options.values()))
def test_parts_of_one_size_read_nothing(options):
    assert run(reads_of_each_step, 2, tokens_per_rank=TOKENS, **options) == [[0, 0, 0, 0]] * 2


def read_on_purpose() -> int:
    reads = Reads()
    with reads.counted():
        tensor = paddle.to_tensor([3, 4])
        tensor.tolist()
        int(tensor[0])
        bool(tensor[0] > 2)
    return reads.count


def test_reads_are_counted():
    assert read_on_purpose() == 3


def kernels_of_paddle(**options: Any) -> list[str]:
    """Those that run in both passes of a layer, by Paddle's profiler."""
    layer = Layer(**options)
    d_out = paddle.ones([TOKENS, HIDDEN])

    def call() -> None:
        received = layer.dispatched()
        y = layer.ep.combine(layer.experts(received), received)
        paddle.grad([y], list(layer.trained.values()), [d_out])

    call()
    return sorted(set(kernels_in(call)))


def kernels_in(call: Callable[[], Any]) -> list[str]:
    """Paddle's kernels that a call runs, with repetitions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        targets = [profiler.ProfilerTarget.CPU]
        with profiler.Profiler(targets=targets, on_trace_ready=lambda made: made.export(str(file), "json")):
            call()
        events = json.loads(file.read_text())["traceEvents"]
    names = (re.match(r"(\w+) kernel launch", each["name"]) for each in events if each.get("ph") == "X")
    return [found[1] for found in names if found is not None]


@pytest.mark.cpu_only
@pytest.mark.parametrize("payload", [None, "fp8_1x128"], ids=["float32", "float8"])
@pytest.mark.parametrize(("combine", "views"), [("reduced", set()), ("exact", {"reshape"})], ids=["reduced", "exact"])
def test_between_peers_paddle_does_nothing_but_allocate(combine, views, payload):
    """So a CUDA graph can hold both passes: all that runs are this package's kernels."""
    options = {"combine": combine, "transport": "peer", "tokens_per_rank": TOKENS, "payload": payload}
    for kernels in run(kernels_of_paddle, 2, **options):
        assert "empty" in kernels
        assert set(kernels) <= {"empty"} | views


@pytest.mark.cpu_only
@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_maps_of_a_dispatch_take_few_operators(combine):
    """Each is a launch on a GPU. The exchange itself is left out: this is one rank alone."""
    layer = Layer(Group(0, -1, [0], name="alone"), combine=combine)
    layer.dispatched()
    kernels = [name for name in kernels_in(layer.dispatched) if name != "empty"]
    assert 10 < len(kernels) <= 32, kernels


@pytest.mark.cpu_only
def test_maps_of_equal_parts_take_fewer():
    layer = Layer(Group(0, -1, [0], name="alone"), combine="reduced", tokens_per_rank=TOKENS)
    layer.dispatched()
    kernels = [name for name in kernels_in(layer.dispatched) if name != "empty"]
    assert 5 < len(kernels) <= 16, kernels
