# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Errors on ranks whose arguments do not match, and on the others if one fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.base import core

from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    ExpertParallel,
    average_gradients,
    distributed_optimizer,
    gather_state_dict,
    shard_state_dict,
    symmetric_memory,
)
from paddle_moe_ops.nn import MoELayer

from .processes import run

pytestmark = pytest.mark.long

X, IDS, PROBS = [[1.0, 2.0], [3.0, 4.0]], [[0, 1], [3, -1]], [[0.5, 0.5], [1.0, 0.0]]


def caught(call: Callable[[], Any]) -> str:
    """The type and the text of a call's error."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError, OSError) as error:  # OSError: what Paddle makes of a hook's error
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def inputs(rank: int) -> tuple[paddle.Tensor, ...]:
    x, ids, probs = paddle.to_tensor(X), paddle.to_tensor(IDS), paddle.to_tensor(PROBS)
    x.stop_gradient = False
    return x, ids, probs


UNLIKE: dict[str, tuple[Any, Any]] = {
    "scoring": ("softmax", "sigmoid"),
    "correction_bias": (True, False),
    "norm_topk_prob": (True, False),
    "scaling_factor": (1.0, 2.5),
    "capacity_factor": (None, 1.25),
    "activation": ("swiglu", "geglu"),
    "expert_bias": (False, True),
    "accumulate": (False, True),
    "compute": (None, "fp8_1x128"),
    "payload": (None, "fp8_1x128"),
}


def different_arguments() -> list[str]:
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    return [
        caught(lambda: ExpertParallel(4 + 2 * rank)),
        caught(lambda: ExpertParallel(4, combine=("exact", "reduced")[rank])),
        caught(lambda: ExpertParallel((4, "four")[rank])),
        caught(lambda: MoELayer(2, 3, 4, 1 + rank, group=group)),
        caught(lambda: MoELayer(2, 3, 4, 1, group=group, transport=("auto", "gloo")[rank])),
        caught(lambda: MoELayer(2, 3, 4, 1, group=group, combine=("exact", "sum")[rank])),
        caught(lambda: MoELayer(2, 3, 4, 1, group=group, combine="sum")),
        *(
            caught(lambda name=name, values=values: MoELayer(2, 3, 4, 1, group=group, **{name: values[rank]}))
            for name, values in UNLIKE.items()
        ),
    ]


def test_different_arguments_raise_on_every_rank():
    same = "the same on all ranks of the group, but got"
    expected = [
        f"ValueError: ExpertParallel: num_experts must be {same} 4 on rank 0, 6 on rank 1",
        f"ValueError: ExpertParallel: combine must be {same} 'exact' on rank 0, 'reduced' on rank 1",
        f"ValueError: ExpertParallel: num_experts must be {same} 4 on rank 0, 'four' on rank 1",
        f"ValueError: MoELayer: topk must be {same} 1 on rank 0, 2 on rank 1",
        f"ValueError: MoELayer: transport must be {same} 'auto' on rank 0, 'gloo' on rank 1",
        f"ValueError: MoELayer: combine must be {same} 'exact' on rank 0, 'sum' on rank 1",
        "ValueError: MoELayer: combine must be one of 'exact', 'reduced', but got 'sum'",
        *(
            f"ValueError: MoELayer: {name} must be {same} {a!r} on rank 0, {b!r} on rank 1"
            for name, (a, b) in UNLIKE.items()
        ),
    ]
    assert run(different_arguments, 2) == [expected, expected]


def bad_arguments() -> list[str]:
    ep = ExpertParallel(4)
    x, ids, probs = inputs(0)
    received = ep.dispatch(x, ids, probs)
    layer = MoELayer(2, 3, 4, 1, group=paddle.distributed.get_group(0))
    return [
        caught(lambda: ExpertParallel(3, placement=[0, 1])),
        caught(lambda: ExpertParallel(3, placement=[0, 1, 2])),
        caught(lambda: ExpertParallel(3, placement="010")),
        caught(lambda: MoELayer(2, 3, 4, 1, placement=[0] * 4)),
        caught(lambda: MoELayer(2, 3, 4, 1, group=ep.group, placement=[0, 1, 0.5, 1])),
        caught(lambda: ExpertParallel(2**16 + 2)),
        caught(lambda: ExpertParallel(4, combine="sum")),
        caught(lambda: ExpertParallel(4, transport="mpi")),
        caught(lambda: ExpertParallel(4, combine="reduced", transport="peer")),
        caught(lambda: ExpertParallel(4, tokens_per_rank=8)),
        caught(lambda: ExpertParallel(4, combine="reduced", tokens_per_rank=0)),
        caught(lambda: ExpertParallel(4, payload="fp8")),
        caught(lambda: ExpertParallel(4, group=[0, 1])),
        caught(lambda: ep.dispatch(x.flatten(), ids, probs)),
        caught(lambda: ep.dispatch(x[:, :0], ids, probs)),
        caught(lambda: ep.dispatch(x, ids[:1], probs)),
        caught(lambda: ep.dispatch(x, ids, probs.astype("float64"))),
        caught(lambda: ep.combine(received.rows, None)),
        caught(lambda: ep.combine(received.rows[1:], received)),
        caught(lambda: ep.combine(received.rows[:, :0], received)),
        caught(lambda: MoELayer(2, 3, 4, 1, group=paddle.distributed.get_group(0), compute="fp8_1x128")),
        caught(lambda: layer.quantize_experts("fp8_128x128")),
        caught(
            lambda: shard_state_dict(
                {"experts.gate_up": paddle.zeros([4, 2, 6]), "experts.down": paddle.zeros([3, 3, 2])}, layer
            )
        ),
    ]


def test_bad_arguments_raise_what_is_wrong():
    (texts, others) = run(bad_arguments, 2)
    assert texts == [
        "ValueError: ExpertParallel: placement must be 3 ranks, one for each expert, but got 2",
        "ValueError: ExpertParallel: placement[2] must be from 0 to 1, but got 2",
        "TypeError: ExpertParallel: placement must be a list of the rank of each expert, or None, but got str",
        "ValueError: MoELayer: placement must be None without a group, but got one",
        "TypeError: MoELayer: placement[2] must be an int, but got float",
        "ValueError: ExpertParallel: num_experts must be from 1 to 65536, but got 65538",
        "ValueError: ExpertParallel: combine must be one of 'exact', 'reduced', but got 'sum'",
        "ValueError: ExpertParallel: transport must be one of 'auto', 'alltoall', 'gloo', 'peer', 'deepep', "
        "but got 'mpi'",
        'ValueError: ExpertParallel: tokens_per_rank must be given with transport="peer", but got None',
        'ValueError: ExpertParallel: tokens_per_rank must be given with combine="reduced" or transport="peer" only, '
        "not with 'exact' and 'auto', but got 8",
        "ValueError: ExpertParallel: tokens_per_rank must be from 1 to 2147483647, but got 0",
        "ValueError: ExpertParallel: payload must be one of None, 'fp8_1x128', 'fp8_1x128_ue8m0', but got 'fp8'",
        "TypeError: ExpertParallel: group must be a group of paddle.distributed, or None, but got list",
        "ValueError: ExpertParallel.dispatch: x must be of shape [num_tokens, hidden], but got [4]",
        "ValueError: ExpertParallel.dispatch: x must be of shape [num_tokens, hidden] with hidden >= 1, but got [2, 0]",
        "ValueError: ExpertParallel.dispatch: ids must be of shape [2, topk], but got [1, 2]",
        "TypeError: ExpertParallel.dispatch: probs must be of dtype float32, but got float64",
        "TypeError: ExpertParallel.combine: received must be what dispatch returned, but got NoneType",
        "ValueError: ExpertParallel.combine: out must be of shape [4, hidden], the rows of received, but got [3, 2]",
        "ValueError: ExpertParallel.combine: out must be of shape [4, hidden] with hidden >= 1, but got [4, 0]",
        "ValueError: MoELayer: compute must be None with combine=\"exact\" between ranks, but got 'fp8_1x128'",
        'ValueError: MoELayer: format must be one of integer codes with combine="exact" between ranks, '
        "but got 'fp8_128x128'",
        "ValueError: shard_state_dict: state['experts.down'] must be of shape [4, 3, 2], the experts of 2 ranks, "
        "but got [3, 3, 2]",
    ]
    assert len(others) == len(texts)


def bad_outputs(combine: str, **options: Any) -> str:
    """The end of the error of a combine of outputs without a row."""
    ep = ExpertParallel(4, combine=combine, **options)
    received = ep.dispatch(paddle.ones([2, 64]), *inputs(0)[1:])
    out = received.rows if combine == "exact" else received.tokens
    return caught(lambda: ep.combine(out[1:], received)).partition(", hidden], ")[2].partition(",")[0]


@pytest.mark.parametrize("options", [{}, {"transport": "peer", "tokens_per_rank": 2}], ids=["exchanged", "peer"])
@pytest.mark.parametrize(
    ("combine", "what"), [("exact", "the rows of received"), ("reduced", "the tokens of received")]
)
def test_errors_of_combine_say_whether_it_takes_rows_or_tokens(combine, what, options):
    assert run(bad_outputs, 2, combine=combine, **options) == [what, what]


def bad_ids(**options: Any) -> list[str]:
    """The errors of tokens without a slot, whose data are not checked, and of an id of no expert."""
    ep, x = ExpertParallel(4, combine="reduced", **options), paddle.ones([2, 64])
    none, bad = paddle.zeros([2, 0], "int32"), paddle.full([2, 1], 9, "int32")
    return [
        caught(lambda: ep.dispatch(x, none, none.astype("float32"), validate=False)),
        caught(lambda: ep.dispatch(x, bad, bad.astype("float32"), validate=True)),
    ]


@pytest.mark.parametrize("options", [{}, {"transport": "peer", "tokens_per_rank": 2}], ids=["exchanged", "peer"])
def test_tokens_without_a_slot_and_ids_of_no_expert_are_refused(options):
    texts = [
        "ValueError: ExpertParallel.dispatch: ids must be of shape [num_tokens, topk] with topk >= 1, but got [2, 0]",
        "ValueError: ExpertParallel.dispatch: ids must hold expert ids in [-1, 4), but token 0, slot 0 holds 9",
    ]
    assert run(bad_ids, 2, **options) == [texts, texts]


def test_calls_without_a_group_name_bad_arguments():
    layer = MoELayer(2, 3, 4, 1)
    optimizer = paddle.optimizer.SGD(parameters=layer.parameters())
    texts = [
        caught(lambda: MoELayer(2, 3, 4, 1, timeout="a")),
        caught(lambda: MoELayer(2, 3, 4, 1, timeout=-1)),
        caught(lambda: MoELayer(2, 3, 4, 1, tokens_per_rank=-4)),
        caught(lambda: MoELayer(2, 3, 4, 1, tokens_per_rank=4)),
        caught(lambda: MoELayer(2, 3, 4, 1, transport="peer")),
        caught(lambda: MoELayer(2, 3, 4, 1, transport="deepep")),
        caught(lambda: ClipGradByGlobalNorm(-1)),
        caught(lambda: ClipGradByGlobalNorm(None)),
        caught(lambda: shard_state_dict(MoELayer(2, 3, 8, 1).state_dict(), layer)),
        caught(lambda: gather_state_dict(optimizer)),
        caught(lambda: shard_state_dict(layer.state_dict(), None)),
        caught(lambda: shard_state_dict(layer, layer)),
        caught(lambda: distributed_optimizer(optimizer)),
    ]
    assert texts == [
        "TypeError: MoELayer: timeout must be a number, but got str",
        "ValueError: MoELayer: timeout must be a number of seconds from 0.001 to 1e+06, but got -1",
        "ValueError: MoELayer: tokens_per_rank must be from 1 to 2147483647, but got -4",
        'ValueError: MoELayer: tokens_per_rank must be given with combine="reduced" or transport="peer" only, '
        "not with 'exact' and 'auto', "
        "but got 4",
        'ValueError: MoELayer: group must be given with transport="peer", but got None',
        "ValueError: MoELayer: combine must be 'reduced' with transport=\"deepep\", but got 'exact'",
        "ValueError: ClipGradByGlobalNorm: clip_norm must be 0 or more, but got -1",
        "TypeError: ClipGradByGlobalNorm: clip_norm must be a number, but got NoneType",
        "ValueError: shard_state_dict: state['experts.down'] must be of shape [4, 3, 2], but got [8, 3, 2]",
        "TypeError: gather_state_dict: layer must be a Layer, but got SGD",
        "TypeError: shard_state_dict: layer must be a Layer, but got NoneType",
        "TypeError: shard_state_dict: state must be a dict of tensors, as gather_state_dict gives it, but got MoELayer",
        "ValueError: distributed_optimizer: Fleet must be started by fleet.init, but got none",
    ]


def bad_layer_on_one_rank() -> str:
    return caught(lambda: gather_state_dict(None if paddle.distributed.get_rank() else MoELayer(2, 3, 4, 1)))


def test_a_rank_without_a_layer_is_told_to_the_others():
    told = "RuntimeError: gather_state_dict: ranks [1] of [0, 1] raised an error in this call, which says more"
    raised = "TypeError: gather_state_dict: layer must be a Layer, but got NoneType"
    assert run(bad_layer_on_one_rank, 2) == [told, raised]


def tokens_that_are_not_finite() -> str:
    rank = paddle.distributed.get_rank()
    ep, (x, ids, probs) = ExpertParallel(4), inputs(rank)
    bad = x.detach().clone()
    if rank == 1:
        bad[1, 0] = float("inf")
    return caught(lambda: ep.dispatch(bad, ids, probs, validate=True))


def test_tokens_that_are_not_finite_are_told_to_all():
    expected = (
        "ValueError: ExpertParallel.dispatch: x must be finite on all ranks, but got NaN or infinity on ranks [1]"
    )
    assert run(tokens_that_are_not_finite, 2) == [expected, expected]


def bad_data_on_one_rank() -> list[str]:
    rank, ep, (x, ids, probs) = paddle.distributed.get_rank(), ExpertParallel(4), inputs(0)
    bad = [ids + 4 * rank, ids.flatten() if rank == 1 else ids]
    texts = [caught(lambda each=each: ep.dispatch(x, each, probs, validate=True)) for each in bad]
    return [*texts, caught(lambda: ep.dispatch(x, ids, probs, copy="no" if rank == 1 else False))]


def test_the_others_are_told_of_a_rank_that_raises():
    told, raised = run(bad_data_on_one_rank, 2)
    assert (
        told
        == ["RuntimeError: ExpertParallel.dispatch: ranks [1] of [0, 1] raised an error in this call, which says more"]
        * 3
    )
    assert raised[0].startswith("ValueError: ExpertParallel.dispatch: ids ")
    assert raised[1] == "ValueError: ExpertParallel.dispatch: ids must be of shape [2, topk], but got [4]"
    assert raised[2] == "TypeError: ExpertParallel.dispatch: copy must be a bool, but got 'no' of type str"


def end_rank_1() -> None:
    """End rank 1 after rank 0 arrives; earlier, rank 0 would see the lost connection in the call before."""
    store = core.create_or_get_global_tcp_store()
    if paddle.distributed.get_rank() == 0:
        store.add("tests/rank 0 is here", 1)
        return
    while store.add("tests/rank 0 is here", 0) < 1:
        time.sleep(0.01)
    os._exit(3)


def end_of_a_rank() -> str:
    ep, (x, ids, probs) = ExpertParallel(4), inputs(0)
    ep.dispatch(x, ids, probs)
    end_rank_1()
    raise AssertionError(caught(lambda: ep.dispatch(x, ids, probs)))


def test_the_others_are_told_of_a_rank_that_ended():
    with pytest.raises(RuntimeError) as failed:
        run(end_of_a_rank, 2)
    text = str(failed.value)
    assert "rank 1 died: exit code 3" in text
    expected = "rank 0 could not exchange data with ranks [1] of [0, 1], which ended or do something else: "
    assert f"RuntimeError: ExpertParallel.dispatch: {expected}" in text


def end_of_a_rank_that_others_write_to() -> str:
    ep = ExpertParallel(4, combine="reduced", tokens_per_rank=2, transport="peer", timeout=1)
    x, ids, probs = inputs(0)
    ep.dispatch(x, ids, probs)
    if paddle.distributed.get_rank() == 1:
        os._exit(3)
    raise AssertionError(caught(lambda: ep.dispatch(x, ids, probs)))


def test_a_rank_that_ended_keeps_none_waiting_for_its_memory():
    with pytest.raises(RuntimeError) as failed:
        run(end_of_a_rank_that_others_write_to, 2)
    assert "RuntimeError: ExpertParallel: rank 1 of the group did not answer" in str(failed.value)


def no_whole_rows() -> list[str]:
    ep, (_, ids, probs) = ExpertParallel(4, combine="reduced", tokens_per_rank=2, transport="peer"), inputs(0)
    wide = paddle.zeros([2, 4099])
    return [caught(lambda: ep.dispatch(wide, ids, probs))]


def test_a_width_that_fills_no_pages_is_refused():
    for (text,) in run(no_whole_rows, 2):
        assert text.startswith("ValueError: ExpertParallel.dispatch: x must be a width in which 256 pages of ")
        assert text.endswith("for transport='peer', but got 16396 bytes a row")


def graphs() -> list[str]:
    layer = MoELayer(2, 3, 4, 1, group=paddle.distributed.get_group(0))
    x = paddle.to_tensor(X)
    out = layer(x).sum()
    out.backward(retain_graph=True)
    return [
        caught(lambda: out.backward()),
        caught(lambda: paddle.jit.to_static(layer, full_graph=True)(x)),
    ]


def test_a_second_backward_pass_and_a_static_graph_are_refused():
    for again, traced in run(graphs, 2):
        assert "backward() has used this graph" in again
        assert "exchanges run in dygraph only" in traced


def test_alone_a_process_needs_no_group():
    ep, (x, ids, probs) = ExpertParallel(4), inputs(0)
    received = ep.dispatch(x, ids, probs)
    assert received.tokens_per_expert == [1, 1, 0, 1]
    assert ep.combine(received.rows, received).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    average_gradients([])


def bad_options_on_one_rank() -> list[str]:
    """Errors of both ranks if rank 1 has a bad option, another default dtype, or its memory cannot be shared."""
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)

    def of_dtype() -> MoELayer:
        paddle.set_default_dtype("float64" if rank else "float32")
        try:
            return MoELayer(2, 3, 4, 2, group=group)
        finally:
            paddle.set_default_dtype("float32")

    def without(step: str) -> None:
        ep = ExpertParallel(4, group, combine="reduced", transport="peer", tokens_per_rank=16)
        with pytest.MonkeyPatch.context() as patch:
            for memory in (symmetric_memory._HostMemory, symmetric_memory._DeviceMemory) if rank else ():
                patch.setattr(memory, step, lambda *_: os.open(f"/no such {step}", os.O_RDONLY))
            ep.dispatch(*inputs(0))

    return [
        caught(lambda: MoELayer(2, 3, 4, 2, group=group, keep="zzz" if rank else "h")),
        caught(lambda: MoELayer(2, 3, 4, 2, group=group, workspace_mb=-5 if rank else 1024)),
        caught(lambda: MoELayer(2, 3, 4, 2, group=group, workspace_mb=1000 + rank)),
        caught(of_dtype),
        caught(lambda: without("make")),
        caught(lambda: without("take")),
        caught(lambda: without("map")),
    ]


def test_options_and_failures_of_one_rank_are_errors_on_all():
    other = "ranks [1] of [0, 1] raised an error in this call, which says more"
    same = "must be the same on all ranks of the group, but got"
    of_both = [
        f"ValueError: MoELayer: workspace_mb {same} 1000 on rank 0, 1001 on rank 1",
        f"ValueError: MoELayer: the default dtype {same} 'float32' on rank 0, 'float64' on rank 1",
    ]
    assert run(bad_options_on_one_rank, 2) == [
        [f"RuntimeError: MoELayer: {other}"] * 2 + of_both + [f"RuntimeError: ExpertParallel: {other}"] * 3,
        [
            "ValueError: MoELayer: keep must be one of 'h', 'x', 'h_fp8', but got 'zzz'",
            "ValueError: MoELayer: workspace_mb must be from 1 to 2147483647, but got -5",
            *of_both,
            *(
                f"FileNotFoundError: [Errno 2] No such file or directory: '/no such {step}'"
                for step in ("make", "take", "map")
            ),
        ],
    ]
