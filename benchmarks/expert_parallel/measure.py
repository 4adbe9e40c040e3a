# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The calls that each rank times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import paddle

from benchmarks.spread import difference_fields, time_fields
from paddle_moe_ops import Float8Matrices, moe_mlp, permute, route, sort_chunks
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel, channels, symmetric_buffers
from paddle_moe_ops.expert_parallel.symmetric_memory import BufferShape, allocate, granularity

from .shapes import SHAPES
from .streams import stream_of

__all__ = ["FEW_TOKENS", "Rank", "measure", "measure_few", "measure_shares"]

FEW_TOKENS = 1, 16, 64, 256
_BLOCK = 1 << 20  # random numbers, again and again in large tensors, which is random enough for a GPU's power


class Rank:
    """The inputs and the timed calls of one rank."""

    def __init__(self, name: str, tokens: int, samples: int) -> None:
        self.shape, self.tokens, self.samples = SHAPES[name], tokens, samples
        self.group = paddle.distributed.get_group(0)
        rank, ranks, shape = self.group.rank, self.group.nranks, self.shape
        rng = np.random.default_rng(rank)
        scores = rng.random((tokens, shape.experts), np.float32)
        self.host_ids = np.argpartition(scores, shape.topk, 1)[:, : shape.topk].astype(np.int32)
        self.ids = to_tensor(self.host_ids)
        self.probs = to_tensor(np.full((tokens, shape.topk), 1 / shape.topk, np.float32))
        self.stream = stream_of(self.ids.place)
        self.x = self.random([tokens, shape.hidden], 1.0)
        self.sent = [int((self.host_ids // self.experts == other).any(1).sum()) for other in range(ranks)]
        self.crossing = self._bytes(self.sent)
        self.found: list[dict[str, Any]] = []
        self.one = paddle.ones([1])

    @property
    def experts(self) -> int:
        return self.shape.experts // self.group.nranks

    def _bytes(self, rows: list[int]) -> int:
        """Bytes of the rows that cross to other ranks."""
        return sum(count for other, count in enumerate(rows) if other != self.group.rank) * 2 * self.shape.hidden

    def random(self, shape: list[int], scale: float) -> Any:
        """bfloat16 numbers."""
        block = np.random.default_rng(self.group.rank).standard_normal(_BLOCK) * scale
        source, out = to_tensor(block.astype(ml_dtypes.bfloat16)), paddle.empty(shape, "bfloat16")
        total, at = 2 * out.size, 0
        while at < total:
            part = min(total - at, 2 * _BLOCK if at == 0 else at)
            self.stream.copy(out.data_ptr() + at, source.data_ptr() if at == 0 else out.data_ptr(), part)
            at += part
        self.stream.finish()
        return out

    def timed(self, what: str, call: Callable[[], Any], crossing: int, times: int = 10, **more: Any) -> dict[str, Any]:
        """Time calls that follow each other: on the GPU, with all of them queued, and as the host makes them."""
        for _ in range(3):
            call()
        gpu, host = [], []
        for _ in range(self.samples):
            self.stream.finish()
            paddle.distributed.all_reduce(self.one)
            self.stream.finish()
            begin = time.perf_counter()
            for _ in range(times):
                call()
            queued = time.perf_counter() - begin
            self.stream.finish()
            host.append((time.perf_counter() - begin) / times * 1e6)
            self.start_together(queued)
            begin_mark = self.stream.mark()
            for _ in range(times):
                call()
            (between,) = self.stream.microseconds(begin_mark, [self.stream.mark()])
            gpu.append(between / times)
        times = time_fields(gpu) | time_fields(host, "eager_")
        self.found.append({"what": what, **times, "bytes": crossing, **more})
        return self.found[-1]

    def copies(self) -> None:
        """The driver's own copy of as many bytes to the next rank."""
        page, group = granularity(self.ids.place), self.group
        most = self._bytes([self.tokens] * group.nranks)  # own bytes differ between ranks, buffers do not
        region = -(-most // page) * page
        views = allocate(group, self.ids, BufferShape(region, group.nranks, region, paddle.uint8))
        target = views.peers.data_ptr() + (group.rank + 1) % group.nranks * region
        whole = 2 * self.x.size

        def copy() -> None:
            for at in range(0, self.crossing, whole):
                self.stream.copy(target + at, self.x.data_ptr(), min(whole, self.crossing - at))

        self.timed("p2p_copy", copy, self.crossing)

    def exchanges(self, ep: ExpertParallel, **how: Any) -> None:
        """Dispatch and combine without gradients."""
        how |= {"transport": "peer", "combine": "reduced"}
        self.timed("dispatch", lambda: ep.dispatch(self.x, self.ids, self.probs), self.crossing, **how)
        lent = lambda: ep.dispatch(self.x, self.ids, self.probs, copy=False)  # noqa: E731
        self.timed("dispatch_without_copy", lent, self.crossing, **how)
        received = ep.dispatch(self.x, self.ids, self.probs)
        out = received.tokens
        self.timed("combine", lambda: ep.combine(out, received), self.crossing, **how)

    def float8(self, in_float8: ExpertParallel) -> None:
        """Dispatch of tokens that are float8 on the way."""
        how = {"transport": "peer", "combine": "reduced"}
        scales = -(-self.shape.hidden // 128) * 4
        crossing = self.crossing // (2 * self.shape.hidden) * (self.shape.hidden + scales)
        self.timed("dispatch_float8", lambda: in_float8.dispatch(self.x, self.ids, self.probs), crossing, **how)

    def collectives(self) -> None:
        """Time the hand-written way, and the collective alone on the bytes of dispatch."""
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

    def matrices(self) -> tuple[Any, Any]:
        """The matrices of this rank's experts."""
        shape = self.shape
        gate_up = self.random([self.experts, shape.hidden, 2 * shape.inner], shape.hidden**-0.5)
        return gate_up, self.random([self.experts, shape.inner, shape.hidden], shape.inner**-0.5)

    def trained(self) -> list[Any]:
        """x, probs, and the matrices of this rank's experts, all of which require gradients."""
        trained = [self.x, self.probs, *self.matrices()]
        for each in trained:
            each.stop_gradient = False
        return trained

    def start_together(self, queued: float) -> None:
        """Start the ranks' next work at the same time, and after the host has queued it, which takes seconds."""
        self.stream.delay(1.5e6 * queued + 2000)
        paddle.distributed.all_reduce(self.one)

    def few(self, eps: dict[str, ExpertParallel]) -> None:
        """Exchanges and layers without gradients, each by all layers in turns."""
        gate_up, down = self.matrices()
        for launches, ep in eps.items():
            how = {"transport": "peer", "combine": "reduced", "launches": launches, "decode": True}
            got = ep.dispatch(self.x, self.ids, self.probs)
            dispatch = lambda ep=ep: ep.dispatch(self.x, self.ids, self.probs)  # noqa: E731
            combine = lambda ep=ep, got=got: ep.combine(got.tokens, got)  # noqa: E731

            def layer(ep: ExpertParallel = ep) -> Any:
                got = ep.dispatch(self.x, self.ids, self.probs)
                return ep.combine(moe_mlp(got.tokens, got.plan, got.probs, gate_up, down), got)

            for what, call in (("dispatch", dispatch), ("combine", combine), ("layer_forward", layer)):
                self.timed(what, call, self.crossing, **how)

    def layer(self, ep: ExpertParallel, kind: str = "", **options: Any) -> None:
        """Dispatch, experts and combine, with the gradients of all that is trained.

        Args:
            ep: the exchanges.
            kind: the end of the results' names.
            options: of `moe_mlp`.
        """
        how = {"transport": "peer", "combine": "reduced"}
        trained = self.trained()
        gate_up, down = trained[2:]
        d_out = self.random([self.tokens, self.shape.hidden], 1.0)

        def forward() -> Any:
            got = ep.dispatch(self.x, self.ids, self.probs)
            out = moe_mlp(got.tokens, got.plan, got.probs, gate_up, down, workspace_mb=1024, **options)
            return ep.combine(out, got)

        def both() -> None:
            paddle.grad([forward()], trained, [d_out])

        flops = self.shape.flops(self.tokens)
        there = self.timed(f"layer_forward{kind}", forward, 2 * self.crossing, 3, **how)
        there["tflops"] = flops / there["us"] / 1e6
        whole = self.timed(f"layer{kind}", both, 4 * self.crossing, 3, **how)
        times = difference_fields(whole, there)
        tflops = 2 * flops / times["us"] / 1e6
        fields = {**times, "bytes": 2 * self.crossing, **how, "tflops": tflops}
        self.found.append({"what": f"layer_backward{kind}", **fields})


def measure(name: str, tokens: int, samples: int, layers: bool) -> list[dict[str, Any]]:
    """On one rank: all that is timed."""
    rank = Rank(name, tokens, samples)
    options = {"combine": "reduced", "tokens_per_rank": tokens, "transport": "peer"}
    ep = ExpertParallel(rank.shape.experts, rank.group, **options)
    in_float8 = ExpertParallel(rank.shape.experts, rank.group, payload="fp8_1x128", **options)
    rank.copies()
    with paddle.no_grad():
        rank.exchanges(ep)
        rank.float8(in_float8)
        rank.collectives()
    if layers:
        rank.layer(ep)
        for kind, exchanges in (("_float8", ep), ("_float8_payload", in_float8)):
            rank.layer(exchanges, kind, compute="fp8_1x128", float8_matrices=Float8Matrices())
    return rank.found


def measure_shares(name: str, tokens: int, samples: int, fetched: list[int]) -> list[dict[str, Any]]:
    """On one rank: a copy, and dispatch and combine with shares of rows, of every 8, that their receiver fetches."""
    rank = Rank(name, tokens, samples)
    ep = ExpertParallel(rank.shape.experts, rank.group, combine="reduced", tokens_per_rank=tokens, transport="peer")
    rank.copies()
    for rows in fetched:
        with paddle.no_grad(), mock.patch.multiple(symmetric_buffers, FETCHED_COPIES=rows, FETCHED_SUMS=rows):
            rank.exchanges(ep, fetched=rows)
    return rank.found


def measure_few(name: str, tokens: int, samples: int) -> list[dict[str, Any]]:
    """On one rank: layers for few tokens, by exchanges of one launch and of several."""
    rank = Rank(name, tokens, samples)
    options = {"combine": "reduced", "tokens_per_rank": tokens, "transport": "peer"}
    with paddle.no_grad():
        eps = {"one": ExpertParallel(rank.shape.experts, rank.group, **options)}
        with mock.patch.object(channels, "_FEW_TOKENS", -1):
            # another timeout has buffers of its own
            eps["several"] = ExpertParallel(rank.shape.experts, rank.group, timeout=299, **options)
            eps["several"].dispatch(rank.x, rank.ids, rank.probs)
        rank.few(eps)
    return rank.found
