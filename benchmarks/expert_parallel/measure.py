# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What is timed on each rank."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle

from paddle_moe_ops import moe_mlp, permute, route, sort_chunks
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.expert_parallel.windows import granularity, share

__all__ = ["SHAPES", "TOKENS", "Shape", "measure"]

TOKENS = 8192
_BLOCK = 1 << 20  # random numbers, again and again in large tensors, which is random enough for a GPU's power
_DELAY_BYTES = 1 << 30
_US_OF_DELAY = 200.0  # that filling so much takes at least


class Shape(NamedTuple):
    """d columns, E experts of inner size n, K experts a token."""

    hidden: int
    inner: int
    experts: int
    topk: int

    def flops(self, tokens: int) -> int:
        """Of the matrix products of a forward pass."""
        return 6 * tokens * self.topk * self.hidden * self.inner


SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
    "ernie-300b": Shape(8192, 3584, 64, 8),
    "dsv3": Shape(7168, 2048, 256, 8),
}


class _Gpu:
    """The stream of Paddle's kernels, through the driver."""

    def __init__(self, place: Any) -> None:
        core, self._driver = paddle.base.core, ctypes.CDLL("libcuda.so.1")
        if place.is_gpu_place():
            stream = core._get_current_stream(place.gpu_device_id()).cuda_stream
        else:
            kind = place.custom_device_type()
            stream = core._get_current_custom_device_stream(kind, place.custom_device_id()).raw_stream
        self._stream = ctypes.c_void_p(stream)
        self._events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for each in self._events:
            self._call("cuEventCreate", ctypes.byref(each), 0)
        self._delay = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(self._delay), ctypes.c_size_t(_DELAY_BYTES))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answered {status}")

    def copy(self, target: int, source: int, size: int) -> None:
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            self._stream,
        )

    def delay(self, microseconds: float) -> None:
        """Keep the GPU busy, so that what follows is queued before it begins."""
        for _ in range(int(microseconds / _US_OF_DELAY) + 1):
            self._call("cuMemsetD8Async", self._delay, 0, ctypes.c_size_t(_DELAY_BYTES), self._stream)

    def mark(self, which: int) -> None:
        self._call("cuEventRecord", self._events[which], self._stream)

    def microseconds(self) -> float:
        """Between the marks 0 and 1."""
        found = ctypes.c_float()
        self._call("cuEventSynchronize", self._events[1])
        self._call("cuEventElapsedTime", ctypes.byref(found), *self._events)
        return found.value * 1000


class _Rank:
    """What one rank times."""

    def __init__(self, name: str, tokens: int, samples: int) -> None:
        self.shape, self.tokens, self.samples = SHAPES[name], tokens, samples
        self.group = paddle.distributed.get_group(0)
        rank, ranks, shape = self.group.rank, self.group.nranks, self.shape
        rng = np.random.default_rng(rank)
        scores = rng.random((tokens, shape.experts), np.float32)
        self.host_ids = np.argpartition(scores, shape.topk, 1)[:, : shape.topk].astype(np.int32)
        self.ids = to_tensor(self.host_ids)
        self.probs = to_tensor(np.full((tokens, shape.topk), 1 / shape.topk, np.float32))
        self.gpu = _Gpu(self.ids.place)
        self.x = self.random([tokens, shape.hidden], 1.0)
        self.sent = [int((self.host_ids // self.experts == other).any(1).sum()) for other in range(ranks)]
        self.crossing = self._bytes(self.sent)
        self.found: list[dict[str, Any]] = []
        self.one = paddle.ones([1])

    @property
    def experts(self) -> int:
        return self.shape.experts // self.group.nranks

    def _bytes(self, rows: list[int]) -> int:
        """Of rows that cross to other ranks."""
        return sum(count for other, count in enumerate(rows) if other != self.group.rank) * 2 * self.shape.hidden

    def random(self, shape: list[int], scale: float) -> Any:
        """bfloat16 numbers."""
        block = np.random.default_rng(self.group.rank).standard_normal(_BLOCK) * scale
        source, out = to_tensor(block.astype(ml_dtypes.bfloat16)), paddle.empty(shape, "bfloat16")
        total, at = 2 * out.size, 0
        while at < total:
            part = min(total - at, 2 * _BLOCK if at == 0 else at)
            self.gpu.copy(out.data_ptr() + at, source.data_ptr() if at == 0 else out.data_ptr(), part)
            at += part
        paddle.device.synchronize()
        return out

    def timed(self, what: str, call: Callable[[], Any], crossing: int, times: int = 10, **more: Any) -> dict[str, Any]:
        """Time calls that follow each other: on the GPU, with all of them queued, and as the host makes them."""
        for _ in range(3):
            call()
        gpu, host = [], []
        for _ in range(self.samples):
            paddle.device.synchronize()
            paddle.distributed.all_reduce(self.one)
            paddle.device.synchronize()
            begin = time.perf_counter()
            for _ in range(times):
                call()
            queued = time.perf_counter() - begin
            paddle.device.synchronize()
            host.append((time.perf_counter() - begin) / times * 1e6)
            self.gpu.delay(1.5e6 * queued + 2000)
            paddle.distributed.all_reduce(self.one)  # the ranks begin together
            self.gpu.mark(0)
            for _ in range(times):
                call()
            self.gpu.mark(1)
            gpu.append(self.gpu.microseconds() / times)
        made = {"what": what, "us": statistics.median(gpu), "min_us": min(gpu), "eager_us": statistics.median(host)}
        self.found.append({**made, "bytes": crossing, **more})
        return self.found[-1]

    def copies(self) -> None:
        """The driver's own copy of as many bytes to the next rank."""
        page, group = granularity(self.ids.place), self.group
        region = -(-self.crossing // page) * page
        views = share(group, self.ids.place, region)
        target = views.peers + (group.rank + 1) % group.nranks * region
        whole = 2 * self.x.size

        def copy() -> None:
            for at in range(0, self.crossing, whole):
                self.gpu.copy(target + at, self.x.data_ptr(), min(whole, self.crossing - at))

        self.timed("p2p_copy", copy, self.crossing)

    def exchanges(self, ep: ExpertParallel) -> None:
        """Dispatch and combine without gradients."""
        how = {"transport": "peer", "combine": "reduced"}
        self.timed("dispatch", lambda: ep.dispatch(self.x, self.ids, self.probs), self.crossing, **how)
        lent = lambda: ep.dispatch(self.x, self.ids, self.probs, copy=False)  # noqa: E731
        self.timed("dispatch_without_copy", lent, self.crossing, **how)
        received = ep.dispatch(self.x, self.ids, self.probs)
        out = received.tokens
        self.timed("combine", lambda: ep.combine(out, received), self.crossing, **how)
        options = {**how, "payload": "fp8_1x128", "tokens_per_rank": ep.tokens_per_rank}
        in_float8 = ExpertParallel(ep.num_experts, ep.group, **options)
        scales = -(-self.shape.hidden // 128) * 4
        crossing = self.crossing // (2 * self.shape.hidden) * (self.shape.hidden + scales)
        self.timed("dispatch_float8", lambda: in_float8.dispatch(self.x, self.ids, self.probs), crossing, **how)

    def collectives(self) -> None:
        """What users write by hand, and the collective alone on the bytes of dispatch."""
        group, ranks, hidden = self.group, self.group.nranks, self.shape.hidden
        plan = route(self.ids, num_experts=self.shape.experts)
        told: list[Any] = []
        paddle.distributed.all_gather_object(told, (plan.tokens_per_expert.numpy(), self.sent), group=group)
        splits = told[group.rank][0].reshape(ranks, self.experts).sum(1).tolist()
        arriving = np.stack([counts.reshape(ranks, self.experts)[group.rank] for counts, _ in told])
        sizes = to_tensor(arriving.reshape(-1).astype(np.int32))
        numbers = np.arange(ranks * self.experts, dtype=np.int32)
        order = to_tensor(np.ascontiguousarray(numbers.reshape(ranks, self.experts).T).reshape(-1))
        buffer = paddle.empty([int(arriving.sum()), hidden], "bfloat16")
        from_ranks = arriving.sum(1).tolist()

        def exchange(out: Any, rows: Any, sent: list[int], received: list[int]) -> None:
            paddle.distributed.alltoall_single(out, rows, in_split_sizes=sent, out_split_sizes=received, group=group)

        def by_hand() -> None:
            exchange(buffer, permute(self.x, plan)[0], splits, from_ranks)
            sort_chunks(buffer, sizes, order)

        self.timed("rows_alltoall", by_hand, self._bytes(splits), transport="alltoall")
        received = [sent[group.rank] for _, sent in told]
        there, here = (paddle.empty([sum(counts), hidden], "bfloat16") for counts in (self.sent, received))
        exchange_tokens = lambda: exchange(here, there, self.sent, received)  # noqa: E731
        self.timed("alltoall_single", exchange_tokens, self.crossing, transport="alltoall")

    def layer(self, ep: ExpertParallel) -> None:
        """Dispatch, experts and combine, with the gradients of all that is trained."""
        shape, how = self.shape, {"transport": "peer", "combine": "reduced"}
        gate_up = self.random([self.experts, shape.hidden, 2 * shape.inner], shape.hidden**-0.5)
        down = self.random([self.experts, shape.inner, shape.hidden], shape.inner**-0.5)
        d_out = self.random([self.tokens, shape.hidden], 1.0)
        trained = [self.x, self.probs, gate_up, down]
        for each in trained:
            each.stop_gradient = False

        def forward() -> Any:
            got = ep.dispatch(self.x, self.ids, self.probs)
            return ep.combine(moe_mlp(got.tokens, got.plan, got.probs, gate_up, down, workspace_mb=1024), got)

        def both() -> None:
            paddle.grad([forward()], trained, [d_out])

        flops = shape.flops(self.tokens)
        there = self.timed("layer_forward", forward, 2 * self.crossing, 3, **how)
        there["tflops"] = flops / there["us"] / 1e6
        whole = self.timed("layer", both, 4 * self.crossing, 3, **how)
        microseconds = whole["us"] - there["us"]
        tflops = 2 * flops / microseconds / 1e6
        self.found.append(
            {"what": "layer_backward", "us": microseconds, "bytes": 2 * self.crossing, **how, "tflops": tflops}
        )


def measure(name: str, tokens: int, samples: int, layers: bool) -> list[dict[str, Any]]:
    """On one rank: all that is timed."""
    rank = _Rank(name, tokens, samples)
    ep = ExpertParallel(rank.shape.experts, rank.group, combine="reduced", tokens_per_rank=tokens, transport="peer")
    rank.copies()
    with paddle.no_grad():
        rank.exchanges(ep)
        rank.collectives()
    if layers:
        rank.layer(ep)
    return rank.found
