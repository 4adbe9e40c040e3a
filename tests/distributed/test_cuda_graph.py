# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of exchanges with ``transport="peer"``: captured once, they follow other tokens and experts.

A stream that is captured refuses to be waited for. So a capture that succeeds has shown that neither pass waits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import moe_mlp, permute, unpermute
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel import ExpertParallel, Received
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.captured import Graph

from .problems import bits
from .processes import run

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 48, 128, 64, 8, 2
ROOM = 40  # few tokens, less than there are
ROUTINGS = "uniform", "one expert", "none", "half none", "uniform"


def load(tensor: paddle.Tensor, array: NDArray) -> None:
    """Write an array to a tensor, which takes no memory that a graph may use."""
    address, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(array.nbytes)
    status = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoD_v2(address, array.ctypes.data_as(ctypes.c_void_p), size)
    assert status == 0, f"cuMemcpyHtoD_v2 answered {status}"


def batch(rank: int, number: int) -> dict[str, NDArray]:
    """One of several batches of a rank."""
    rng, routing = np.random.default_rng([rank, number]), ROUTINGS[number]
    ids = np.argpartition(rng.random((TOKENS, EXPERTS)), TOPK, 1)[:, :TOPK].astype(np.int32)
    if routing == "one expert":
        ids[:] = EXPERTS - 1, -1
    ids[rng.random(ids.shape) < {"none": 1.0, "half none": 0.5}.get(routing, 0.0)] = -1
    x, d_out = (rng.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16) for _ in range(2))
    return {"x": x, "ids": ids, "probs": rng.random(ids.shape, np.float32), "d_out": d_out}


class Program:
    """A dispatch, experts and a combine of tensors that stay where they are; with gradients, or in place without."""

    def __init__(self, experts: str, payload: str | None, trains: bool, combine: str, room: int) -> None:
        self.rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
        options = {"combine": combine, "tokens_per_rank": room, "transport": "peer", "payload": payload}
        self.ep = ExpertParallel(EXPERTS, group, **options)
        self.tensors = {name: to_tensor(each) for name, each in batch(self.rank, 0).items()}
        trained = {"x": self.tensors["x"], "probs": self.tensors["probs"]}
        if experts == "moe_mlp":
            rng, local = np.random.default_rng(self.rank), self.ep.num_local_experts
            for name, shape in (("gate_up", (local, HIDDEN, 2 * INNER)), ("down", (local, INNER, HIDDEN))):
                trained[name] = to_tensor((rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16))
        for each in trained.values():
            each.stop_gradient = not trains
        self.trained, self.trains = trained, trains

    def experts(self, received: Received) -> paddle.Tensor:
        """Expert outputs: GEMMs, or the tokens' rows themselves."""
        if received.rows is not None:
            return received.rows
        if "down" in self.trained:
            matrices = self.trained["gate_up"], self.trained["down"]
            return moe_mlp(received.tokens, received.plan, received.probs, *matrices)
        return unpermute(permute(received.tokens, received.plan)[0], received.plan, received.probs)

    def load(self, number: int) -> None:
        """Take the tokens and experts of a batch."""
        for name, array in batch(self.rank, number).items():
            load(self.tensors[name], array)

    def __call__(self) -> dict[str, paddle.Tensor]:
        received = self.ep.dispatch(*(self.tensors[name] for name in ("x", "ids", "probs")), copy=self.trains)
        y = self.ep.combine(self.experts(received), received)
        if not self.trains:
            return {"y": y, "dropped": received.dropped_slots}
        gradients = paddle.grad([y], list(self.trained.values()), [self.tensors["d_out"]])
        named = {f"d_{name}": each for name, each in zip(self.trained, gradients, strict=True)}
        return {"y": y.detach(), "dropped": received.dropped_slots, **named}


def eager_and_replayed(
    experts: str, payload: str | None, trains: bool, combine: str = "reduced", room: int = ROOM
) -> Any:
    """Results of each batch from calls of the host, from replays of a graph, and from calls of the host afterwards."""
    from paddle_moe_ops.triton.launch.paddle_device import device_of

    program = Program(experts, payload, trains, combine, room)

    def eager() -> list[dict[str, NDArray]]:
        found = []
        for number in range(len(ROUTINGS)):
            program.load(number)
            found.append({name: bits(each) for name, each in program().items()})
        return found

    before = eager()  # which compiles, and makes the windows
    eager()
    graph, replayed = Graph(device_of(program.tensors["x"]).stream(), program), []
    for number in range(len(ROUTINGS)):
        program.load(number)
        graph.launch()
        replayed.append({name: bits(each) for name, each in graph.made.items()})
    return graph.nodes, before, replayed, eager()


@pytest.mark.gpu_only
@pytest.mark.two_gpus
@pytest.mark.parametrize("trains", [True, False], ids=["both passes", "forward"])
@pytest.mark.parametrize("payload", [None, "fp8_1x128"], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("experts", ["rows", "moe_mlp"])
def test_a_captured_layer_follows_the_tokens_and_experts_of_the_moment(experts, payload, trains, num_processes):
    assert_replayed(run(eager_and_replayed, num_processes, experts=experts, payload=payload, trains=trains))


@pytest.mark.gpu_only
@pytest.mark.two_gpus
@pytest.mark.parametrize("room", [TOKENS, 300])
@pytest.mark.parametrize("trains", [True, False], ids=["both passes", "forward"])
def test_captured_layers_have_room_for_few_and_for_many_tokens(trains, room, num_processes):
    options = {"experts": "moe_mlp", "payload": None, "trains": trains, "room": room}
    assert_replayed(run(eager_and_replayed, num_processes, **options), room)


@pytest.mark.gpu_only
@pytest.mark.two_gpus
@pytest.mark.parametrize("trains", [True, False], ids=["both passes", "forward"])
@pytest.mark.parametrize("payload", [None, "fp8_1x128"], ids=["bfloat16", "float8"])
def test_captured_rows_that_travel_one_by_one_follow_them_too(payload, trains, num_processes):
    options = {"experts": "rows", "payload": payload, "trains": trains, "combine": "exact"}
    assert_replayed(run(eager_and_replayed, num_processes, **options))


def assert_replayed(ranks: list[Any], room: int = ROOM) -> None:
    """The graph gave what the host's calls gave, before and afterwards."""
    for rank, (nodes, before, replayed, afterwards) in enumerate(ranks):
        assert nodes > 5
        for number, expected in enumerate(before):
            for got, when in ((replayed[number], "replayed"), (afterwards[number], "afterwards")):
                for name, value in expected.items():
                    assert_bits_equal(got[name], value, what=f"{name} {when}, {ROUTINGS[number]}, rank {rank}")
    dropped = np.array([[each["dropped"].item() for each in replayed] for _, _, replayed, _ in ranks])
    assert (dropped[:, 1] == max(0, TOKENS - room)).all()
    assert (dropped[:, [2]] == 0).all()
