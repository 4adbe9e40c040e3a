# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens in memory that ranks share: later exchanges overwrite it, and no backward pass reads it after that."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import moe_mlp
from paddle_moe_ops.expert_parallel import ExpertParallel, Received, channels
from paddle_moe_ops.expert_parallel.symmetric_memory import BufferShape, allocate, memory_of
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

from .processes import run
from .test_expert_parallel_errors import caught

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 21, 64, 40, 4, 2
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": TOKENS}
MANY: dict[str, Any] = {"transport": "peer", "tokens_per_rank": 300}  # which may stay in memory that ranks share


def drawn(seed: int, *shape: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def routing(seed: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    ids = np.random.default_rng(seed).permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1)), axis=1)
    return paddle.to_tensor(np.ascontiguousarray(ids[:, :TOPK])), paddle.ones([TOKENS, TOPK])


def gradient_of_a_factor(options: dict[str, Any]) -> NDArray:
    """The gradient of the experts' only parameter, whose backward pass reads the tokens as they arrived."""
    rank = paddle.distributed.get_rank()
    ep, factor = ExpertParallel(EXPERTS, combine="reduced", **options), drawn(1, HIDDEN)
    factor.stop_gradient = False
    sums = []
    for step in range(3):
        received = ep.dispatch(drawn(10 * rank + step, TOKENS, HIDDEN), *routing(rank + step), copy=False)
        weights = (received.plan.token_rows >= 0).astype("float32").sum(axis=1, keepdim=True)
        sums.append(ep.combine(received.tokens * factor * weights, received).square().sum())
    paddle.add_n(sums).backward()
    return factor.grad.numpy()


def test_experts_of_tokens_without_gradient_are_trained_after_several_forward_passes():
    exchanged, *of_peers = (run(gradient_of_a_factor, 2, options=each) for each in ({}, PEER, MANY))
    for shared in of_peers:
        for got, expected in zip(shared, exchanged, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def gradients_behind_a_frozen_router(options: dict[str, Any]) -> list[NDArray]:
    paddle.seed(4)
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 0, group=group, combine="reduced", compute="fp8_1x128", **options)
    for parameter in layer.router.parameters():
        parameter.stop_gradient = True
    paddle.add_n([layer(drawn(10 * rank + step, TOKENS, HIDDEN)).square().sum() for step in range(2)]).backward()
    return [each.grad.numpy() for each in layer.experts.parameters()]


def test_experts_behind_a_frozen_router_have_the_gradients_of_tokens_that_are_exchanged():
    exchanged, shared = (run(gradients_behind_a_frozen_router, 2, options=each) for each in ({}, PEER))
    for ours, theirs in zip(shared, exchanged, strict=True):
        for got, expected in zip(ours, theirs, strict=True):
            assert_bits_equal(got, expected)


def views_read_after_later_exchanges(experts: str) -> list[str]:
    """The error of a backward pass that reads a view right away, and after an exchange of this and another layer.

    After one exchange a rank that is ahead may write to the buffer of the one before.
    """
    rank = paddle.distributed.get_rank()
    ep, other = (ExpertParallel(EXPERTS, combine="reduced", **MANY) for _ in range(2))
    x, (ids, probs) = drawn(rank, TOKENS, HIDDEN), routing(rank)
    weights = drawn(2, EXPERTS // 2, HIDDEN, 2 * INNER), drawn(3, EXPERTS // 2, INNER, HIDDEN)
    for each in weights:
        each.stop_gradient = False

    def result(received: Received) -> paddle.Tensor:
        if experts == "moe_mlp":
            return moe_mlp(received.tokens, received.plan, received.probs, *weights, compute="fp8_1x128")
        return received.tokens * weights[0][0, :, 0]

    texts = []
    for later, columns in ((None, 0), (ep, HIDDEN), (other, 2 * HIDDEN)):
        with paddle.no_grad():
            received = ep.dispatch(x, ids, probs, copy=False)
        out = result(received).sum()
        if later is not None:
            later.dispatch(drawn(rank, TOKENS, columns), ids, probs)
        texts.append(caught(out.backward))
    return texts


@pytest.mark.cpu_only
@pytest.mark.parametrize("experts", ["moe_mlp", "operators of Paddle"])
def test_a_backward_pass_refuses_tokens_that_a_later_exchange_may_have_overwritten(experts):
    for first, *late in run(views_read_after_later_exchanges, 2, experts=experts):
        assert first == "nothing was raised"
        assert len(late) == 2
        assert all("changed in place" in text or "inplace operator" in text for text in late), late


def ids_changed_after_the_forward_pass() -> str:
    rank = paddle.distributed.get_rank()
    ep, (ids, probs) = ExpertParallel(EXPERTS, combine="reduced", **PEER), routing(rank)
    probs.stop_gradient = False
    received = ep.dispatch(drawn(rank, TOKENS, HIDDEN), ids, probs)
    out = ep.combine(received.tokens * received.probs.sum(axis=1, keepdim=True), received)
    ids.zero_()
    return caught(out.sum().backward)


def test_a_backward_pass_refuses_ids_that_were_changed_in_place():
    for text in run(ids_changed_after_the_forward_pass, 2):
        assert "ExpertParallel.dispatch: a tensor that the backward pass needs was changed in place" in text


def open_files_of_memory() -> list[str]:
    """Descriptors of memory while a layer exchanges tokens."""
    rank, found = paddle.distributed.get_rank(), []
    ep = ExpertParallel(EXPERTS, combine="reduced", **PEER)
    received = ep.dispatch(drawn(rank, TOKENS, HIDDEN), *routing(rank))
    ep.combine(received.tokens, received)
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the list itself
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [name for name in found if "paddle_moe_ops" in name]


@pytest.mark.cpu_only
def test_shared_memory_keeps_no_file_open():
    """Layers of a long program would use up the descriptors of its processes."""
    assert run(open_files_of_memory, 2) == [[], []]


def test_regions_without_room_in_the_address_space_are_an_error():
    memory = memory_of(paddle.CPUPlace(), 1 << 60)
    text = caught(lambda: memory.map([0, 0]))
    assert text == "RuntimeError: ExpertParallel: no memory to share: Cannot allocate memory"


def bytes_of_regions() -> list[int]:
    """Bytes of a region of tokens, records, codes and scales."""
    found: list[int] = []

    def recorded(group: Any, like: paddle.Tensor, shape: BufferShape) -> Any:
        found.append(shape.region_bytes)
        return allocate(group, like, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "allocate", recorded)
        ep = ExpertParallel(8, combine="reduced", transport="peer", tokens_per_rank=1024, payload="fp8_1x128")
        ep.dispatch(paddle.ones([1, 512]), paddle.to_tensor([[0, 2, 4, 6]]), paddle.ones([1, 4]))
    return found[:4]


@pytest.mark.cpu_only
def test_regions_have_no_page_that_nothing_needs():
    """Records have 64 bytes and 8 for each of 4 slots of a token; each of 4 groups of 128 has a scale of 4 bytes."""
    pages = 1024 * 512 * 4, 9 * 4096, 1024 * 512, 1024 * 4 * 4
    assert run(bytes_of_regions, 2) == [[*pages]] * 2
