# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Places of ranks in their programs, groups and time limits, in one process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle.distributed.communication.group import Group

from paddle_moe_ops.expert_parallel import transports
from paddle_moe_ops.expert_parallel.agreement import (
    Kind,
    LayerNumber,
    Mode,
    Step,
    check_calls,
    group_of,
    number_of_layer,
)
from paddle_moe_ops.expert_parallel.transports import Rendezvous, checked_timeout

from .problems import step_of
from .test_expert_parallel_errors import caught

IN_ORDER = "RuntimeError: ExpertParallel: all ranks must make the same calls in the same order, but "


def step_at(kind: Kind, layer: int, copy: int, number: int) -> Step:
    call = step_of(Group(0, -1, [2, 5])).call
    return Step(call._replace(layer=LayerNumber(layer, [copy], [1]), number=number), kind)


def text_of(kind: Kind, layer: int, copy: int, number: int) -> str:
    return (
        f"{kind.text} of layer {layer}, copy {copy}, call {number}"
        if copy
        else f"{kind.text} of layer {layer}, call {number}"
    )


def test_codes_name_the_places_of_ranks():
    places = list(itertools.product(Kind, [0, 1, 6], [0, 1, 3], [0, 1, 5, 1000]))
    steps = [step_at(*place) for place in places]
    assert len({step.code() for step in steps}) == len(steps)
    for place, step, other, step_there in zip(places, steps, places[1:], steps[1:], strict=False):
        told = [step.code(), step_there.code()]
        step.check_codes(told[:1] * 2)
        text = caught(lambda step=step, told=told: step.check_codes(told))
        assert text == f"{IN_ORDER}rank 2 is in {text_of(*place)}, rank 5 is in {text_of(*other)}"


def test_words_that_differ_name_what_differs():
    step = step_at(Kind.DISPATCH, 3, 0, 7)
    step.mode = Mode.COMBINE_BACKWARD
    words = step.words(exchange=9)
    check_calls([words, [*words[:-1], int(Mode.NONE)]], [2, 5])
    for changed, (here, there) in {
        0: ("dispatch of layer 3, call 7", "combine of layer 3, call 7"),
        1: ("dispatch of layer 3, call 7", "dispatch of layer 4, call 7"),
        2: ("dispatch of layer 3, call 7", "dispatch of layer 3, copy 1, call 7"),
        3: ("dispatch of layer 3, call 7", "dispatch of layer 3, call 8"),
        4: ("dispatch of layer 3, call 7, exchange 9", "dispatch of layer 3, call 7, exchange 10"),
    }.items():
        other = [word + (number == changed) for number, word in enumerate(words)]
        text = caught(lambda other=other: check_calls([words, other], [2, 5]))
        assert text == f"{IN_ORDER}rank 2 is in {here}, rank 5 is in {there}"
    raised = [*words[:-1], int(Mode.RAISED | Mode.COMBINE_BACKWARD)]
    told = "ranks [5] of [2, 5] raised an error in this call, which says more"
    assert caught(lambda: check_calls([words, raised], [2, 5])) == f"RuntimeError: ExpertParallel.dispatch: {told}"


def test_layers_of_a_group_know_the_most_experts_of_any():
    group = Group(0, 77, [0, 3])
    first, second, third = (number_of_layer(group, experts) for experts in (4, 9, 2))
    assert [each.most_experts for each in (first, second, third)] == [9, 9, 9]
    assert [str(each) for each in (first, second, third, third.of_copy(), third.of_copy())] == [
        "0",
        "1",
        "2",
        "2, copy 1",
        "2, copy 2",
    ]


def test_a_group_of_others_is_refused():
    expected = "ValueError: f: group must be a group that this rank belongs to, but got one of ranks [4, 5]"
    assert caught(lambda: group_of("f", Group(-1, 9, [4, 5]))) == expected


@pytest.mark.parametrize("seconds", [0.001, 1e6])
def test_the_shortest_and_the_longest_timeout_are_accepted(seconds):
    assert checked_timeout("f", seconds) == seconds


class Store:
    """Stands in for the store of `paddle.distributed`, in which rank 1 has announced some rendezvous."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, announced: int) -> None:
        self.announced = {"0": 0, "1": announced}
        monkeypatch.setattr(transports.core, "create_or_get_global_tcp_store", lambda: self)

    def add(self, key: str, number: int) -> int:
        rank = key.rpartition("/")[2]
        self.announced[rank] += number
        return self.announced[rank]


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("no route\nreset by peer\n")


@pytest.mark.parametrize(
    ("announced", "others"),
    [
        (2, "the other ranks of [0, 1], one of which may have ended or failed"),
        (1, "ranks [1] of [0, 1], which ended or do something else"),
    ],
)
def test_ranks_whose_reduction_fails_announce_it_and_name_those_that_do_not(announced, others, monkeypatch):
    store = Store(monkeypatch, announced)
    monkeypatch.setattr(paddle.distributed, "all_reduce", failing)
    naps: list[float] = []
    monkeypatch.setattr(transports, "_nap", lambda seconds: naps.append(seconds) or True)
    group = Group(0, 100 + announced, [0, 1], SimpleNamespace(name=lambda: "NCCL"))
    meeting = Rendezvous(group, 0.04)
    for count in (1, 2):
        text = caught(lambda: meeting.largest("f", paddle.zeros([1])))
        assert store.announced["0"] == count
    assert text == f"RuntimeError: f: rank 0 could not exchange data with {others}: reset by peer"
    assert set(naps) <= {0.01 / 4}  # none if the store took longer


@pytest.mark.parametrize(("limit", "quiet"), [(0.04, 0.01), (600.0, 1.0)])
def test_a_rank_announces_that_it_waits_after_a_quarter_of_its_time_or_a_second(limit, quiet):
    seen: list[float] = []
    group = Group(0, 112, [0, 1], SimpleNamespace(name=lambda: "NCCL"))
    Rendezvous(group, limit)._wait("f", lambda seconds: seen.append(seconds) or True)
    assert seen == [quiet]


def test_a_reduction_that_does_not_block_is_awaited_up_to_the_time_limit(monkeypatch):
    Store(monkeypatch, 0)
    seen, task = [], SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(paddle.distributed, "all_reduce", lambda *_, **how: seen.append(how) or task)
    group = Group(0, 110, [0, 1], SimpleNamespace(name=lambda: "NCCL"))
    text = caught(lambda: Rendezvous(group, 0.04).largest("f", paddle.zeros([1])))
    assert text.startswith("RuntimeError: f: rank 0 waited 0.04 s for ranks [1] of [0, 1], which did not come")
    assert seen == [{"op": paddle.distributed.ReduceOp.MAX, "group": group, "sync_op": False}]


def test_a_store_that_failed_is_asked_no_more(monkeypatch):
    asked: list[str] = []

    def add(key: str, number: int) -> int:
        asked.append(key)
        raise RuntimeError("closed")

    monkeypatch.setattr(transports.core, "create_or_get_global_tcp_store", lambda: SimpleNamespace(add=add))
    monkeypatch.setattr(paddle.distributed, "all_reduce", failing)
    meeting = Rendezvous(Group(0, 111, [0, 1], SimpleNamespace(name=lambda: "NCCL")), 0.04)
    for _ in range(2):
        text = caught(lambda: meeting.largest("f", paddle.zeros([1])))
        assert "with the other ranks of [0, 1], one of which may have ended or failed" in text
    assert len(asked) == 1
