# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share is freed with the layers that use it, and with their group."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

from . import fake_deep_ep, processes
from .processes import run
from .test_expert_parallel_errors import caught

pytestmark = pytest.mark.long

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 9, 64, 24, 4, 2
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": TOKENS}
CLOSED = "RuntimeError: ExpertParallel: close() was called, so this layer exchanges no more tokens; make a new one"
ROUTES = [
    pytest.param({"combine": "exact"}, id="exact"),
    pytest.param({"combine": "reduced"}, id="reduced"),
    pytest.param({"combine": "reduced", "payload": "fp8_1x128"}, id="float8"),
]


@pytest.fixture(scope="module", autouse=True)
def new_processes() -> None:
    """Processes of other tests may still have layers that share buffers of a group."""
    processes.stop()


def shared_bytes() -> int:
    """Bytes of memory that ranks share and this process maps; 0 on a GPU, whose memory the system does not show."""
    gc.collect()
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "paddle_moe_ops window" in line:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            found += end - begin
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def layer_of(group: Any, hidden: int = HIDDEN, **options: Any) -> MoELayer:
    paddle.seed(hidden)
    return MoELayer(hidden, INNER, EXPERTS, TOPK, group=group, **{**PEER, **options})


def tokens_of(hidden: int = HIDDEN, tokens: int = TOKENS) -> paddle.Tensor:
    rng = np.random.default_rng([hidden, paddle.distributed.get_rank()])
    x = paddle.to_tensor(rng.standard_normal([tokens, hidden]).astype(np.float32))
    x.stop_gradient = False
    return x


def gradient_of(out: paddle.Tensor, x: paddle.Tensor) -> NDArray:
    out.square().mean().backward()
    return x.grad.numpy()


def trained(layer: MoELayer) -> tuple[NDArray, NDArray]:
    """The result of a forward pass, and the gradient of the tokens."""
    x = tokens_of(layer.hidden_size)
    out = layer(x)
    return out.numpy(), gradient_of(out, x)


def memory_around_layers(options: dict[str, Any], closes: bool) -> list[tuple[int, int]]:
    """Shared bytes and open files before layers of two sizes, with them and after them."""
    found = [(shared_bytes(), open_files())]
    layers = [layer_of(paddle.distributed.get_group(0), hidden, **options) for hidden in (HIDDEN, 2 * HIDDEN)]
    for layer in layers:
        trained(layer)
        found.append((shared_bytes(), open_files()))
    if closes:
        for layer in layers:
            layer.close()
    else:
        del layer, layers
    return [*found, (shared_bytes(), open_files())]


@pytest.mark.cpu_only
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "deleted"])
@pytest.mark.parametrize("options", ROUTES)
def test_layers_leave_no_memory_and_no_files(options, closes):
    for before, one, both, after in run(memory_around_layers, 2, options=options, closes=closes):
        assert before[0] < one[0] < both[0]
        assert before[1] == one[1] == both[1]
        assert after == before


def memory_around_layers_in_turn(layers: int) -> list[tuple[int, int]]:
    """Shared bytes and open files before all layers and after each third one."""
    found = [(shared_bytes(), open_files())]
    for number in range(layers):
        layer = layer_of(paddle.distributed.get_group(0))
        trained(layer)
        layer.close()
        if number % 3 == 2:
            found.append((shared_bytes(), open_files()))
    return found


@pytest.mark.cpu_only
@pytest.mark.parametrize("layers", [9, pytest.param(51, marks=pytest.mark.slow)])
def test_layers_one_after_another_leave_nothing(layers):
    for found in run(memory_around_layers_in_turn, 2, layers=layers):
        assert found == found[:1] * (1 + layers // 3)


def layer_beside_a_closed_one(kind: str) -> list[tuple[NDArray, NDArray]]:
    group = paddle.distributed.get_group(0)
    layer = layer_of(group)
    other = copy.deepcopy(layer) if kind == "copy" else layer_of(group)
    results = [trained(layer), trained(other)]
    layer.close()
    for _ in range(3):
        other.clear_gradients()
        results.append(trained(other))
    other.close()
    return results


@pytest.mark.parametrize("kind", ["layer", "copy"])
def test_other_layers_of_the_group_go_on(kind):
    for first, *others in run(layer_beside_a_closed_one, 2, kind=kind):
        for each in others:
            for got, expected in zip(each, first, strict=True):
                assert_bits_equal(got, expected)


def calls_after_close(options: dict[str, Any]) -> list[str]:
    group = paddle.distributed.get_group(0)
    layer, parallel = layer_of(group, **options), ExpertParallel(EXPERTS, group, **{**PEER, **options})
    x = tokens_of()
    ids, probs = paddle.zeros([TOKENS, 1], "int32"), paddle.ones([TOKENS, 1])
    layer(x)
    texts = []
    for _ in range(2):
        layer.close()
        parallel.close()
        texts += [caught(lambda: layer(x)), caught(lambda: parallel.dispatch(x, ids, probs))]
        texts += [caught(lambda: layer(None))]  # of which other ranks are not told
    return texts


@pytest.mark.parametrize("transport", ["peer", "auto"])
def test_calls_after_close_raise(transport):
    options = {"combine": "reduced", "transport": transport}
    assert run(calls_after_close, 2, options=options) == [[CLOSED] * 6] * 2


def test_without_a_group_close_does_nothing():
    layer = MoELayer(HIDDEN, INNER, EXPERTS, TOPK)
    x = paddle.ones([TOKENS, HIDDEN])
    before = layer(x)
    layer.close()
    assert_bits_equal(layer(x), before)


def view_read_after_close() -> tuple[NDArray, NDArray, int]:
    before, group = shared_bytes(), paddle.distributed.get_group(0)
    parallel = ExpertParallel(EXPERTS, group, combine="reduced", transport="peer", tokens_per_rank=300)
    ids, probs = paddle.zeros([TOKENS, 1], "int32"), paddle.ones([TOKENS, 1])
    with paddle.no_grad():
        view = parallel.dispatch(tokens_of(), ids, probs, copy=False).tokens
    first = view.numpy().copy()
    parallel.close()
    del parallel
    gc.collect()
    again = view[1:].numpy().copy()
    del view
    return first, again, shared_bytes() - before


def test_a_view_of_shared_memory_is_there_as_long_as_it_is_used():
    for first, again, left in run(view_read_after_close, 2):
        assert_bits_equal(again, first[1:])
        assert left == 0


def closed_between_passes(options: dict[str, Any], closes: bool) -> tuple[NDArray, int]:
    before = shared_bytes()
    layer, x = layer_of(paddle.distributed.get_group(0), **options), tokens_of()
    out = layer(x)
    if closes:
        layer.close()
    found = gradient_of(out, x)
    del layer, out
    return found, shared_bytes() - before


@pytest.mark.parametrize("options", ROUTES)
def test_a_backward_pass_works_after_close(options):
    runs = [run(closed_between_passes, 2, options=options, closes=closes) for closes in (True, False)]
    for (got, left), (expected, _) in zip(*runs, strict=True):
        assert_bits_equal(got, expected)
        assert left == 0


def layers_that_ranks_collect_at_different_times() -> list[tuple[NDArray, NDArray]]:
    group, rank = paddle.distributed.get_group(0), paddle.distributed.get_rank()
    layer, kept = layer_of(group), []
    results = [trained(layer)]
    for _ in range(3):
        if rank == 1:  # which keeps what rank 0 has forgotten
            kept.append(layer)
        layer = None
        gc.collect()
        layer = layer_of(group)
        results.append(trained(layer))
    return results


def test_a_rank_may_collect_a_layer_before_others_do():
    for first, *others in run(layers_that_ranks_collect_at_different_times, 2):
        for each in others:
            for got, expected in zip(each, first, strict=True):
                assert_bits_equal(got, expected)


def groups_one_after_another(same_number: bool) -> tuple[list[tuple[NDArray, NDArray]], list[int], str]:
    """Results and shared bytes of layers of groups of the same ranks, and the error of a layer whose group is gone."""
    before, results, found, layers = shared_bytes(), [], [], []
    number = None
    for _ in range(3):
        group = paddle.distributed.new_group([0, 1])
        paddle.distributed.barrier()
        if same_number:  # as of groups that programs number themselves
            number = number or group.id
            groups = paddle.distributed.communication.group._GroupManager.group_map_by_id
            groups[number] = groups.pop(group.id)
            group._id = number
        layers.append(layer_of(group))
        results.append(trained(layers[-1]))
        found.append(shared_bytes() - before)
        paddle.distributed.destroy_process_group(group)
    error = caught(lambda: layers[0](tokens_of()))
    return results, found, error


@pytest.mark.parametrize("same_number", [False, True], ids=["new numbers", "one number"])
def test_memory_goes_with_the_group(same_number):
    for results, found, error in run(groups_one_after_another, 2, same_number=same_number):
        for each in results[1:]:
            for got, expected in zip(each, results[0], strict=True):
                assert_bits_equal(got, expected)
        assert found == found[:1] * 3
        assert error == (
            "RuntimeError: ExpertParallel: the group of ranks [0, 1] was destroyed by destroy_process_group, so its "
            "layers exchange no more tokens"
        )


def buffers_of_deep_ep() -> list[int]:
    """Numbers of living DeepEP buffers, with a layer and after it."""
    fake_deep_ep.install()

    def living() -> int:
        gc.collect()
        return sum(isinstance(each, fake_deep_ep.Buffer) for each in gc.get_objects())

    before = living()
    layer = layer_of(paddle.distributed.get_group(0), combine="reduced", transport="deepep", tokens_per_rank=None)
    layer.to(dtype="bfloat16")
    layer(tokens_of().astype("bfloat16"))
    found = [living() - before]
    layer.close()
    return [*found, living() - before]


@pytest.mark.cpu_only
def test_buffers_of_deep_ep_go_with_the_layer():
    assert run(buffers_of_deep_ep, 2) == [[1, 0]] * 2
