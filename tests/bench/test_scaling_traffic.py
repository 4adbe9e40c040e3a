# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The traffic that the model of many GPUs counts equals the package's own numbers and expected values."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from benchmarks.scaling import traces
from benchmarks.scaling.traces import Trace, drawn
from benchmarks.scaling.traffic import Layout, count, steps
from paddle_moe_ops import route
from paddle_moe_ops.expert_parallel.alltoall import plan_of_ranks

EXPERTS, TOPK = 24, 5


def with_holes(kind, sources, tokens=61):
    """A trace in which some slots have no expert, and some tokens none at all."""
    trace = drawn(kind, EXPERTS, TOPK, sources, tokens)
    ids = np.where(np.random.default_rng(1).random(trace.ids.shape) < 0.2, -1, trace.ids)
    ids[0, 7] = -1
    return trace._replace(ids=ids)


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
@pytest.mark.parametrize("ranks", [1, 2, 8, 24])
def test_tokens_and_rows_are_those_of_the_packages_plans(kind, ranks):
    trace = with_holes(kind, ranks)
    traffic = count(trace, Layout.of(ranks, 4))
    for source, ids in enumerate(trace.ids):
        ids = paddle.to_tensor(ids)
        to_ranks = plan_of_ranks(ids, ranks, EXPERTS // ranks, None)
        assert traffic.tokens[source].tolist() == to_ranks.tokens_per_expert.tolist()
        rows = np.array(route(ids, num_experts=EXPERTS).tokens_per_expert.tolist())
        assert traffic.rows[source].tolist() == rows.reshape(ranks, -1).sum(1).tolist()


def test_domains_count_a_token_once():
    trace = with_holes("uniform", 12)
    traffic = count(trace, Layout.of(12, 4))
    assert traffic.layout == Layout(12, 4)
    for source, ids in enumerate(trace.ids):
        found = plan_of_ranks(paddle.to_tensor(ids), 3, EXPERTS // 3, None).tokens_per_expert
        assert traffic.of_domains[source].tolist() == found.tolist()


def test_fewer_sources_than_ranks_repeat():
    trace = with_holes("uniform", 2)
    traffic = count(trace, Layout.of(6, 6))
    assert (traffic.tokens[4] == traffic.tokens[0]).all()
    assert traffic.rows.sum() == 3 * (trace.ids >= 0).sum()


@pytest.mark.parametrize(
    ("ranks", "domain", "expected"), [(2, 8, 2), (16, 8, 8), (64, 72, 64), (128, 72, 64), (96, 72, 48)]
)
def test_domains_take_equal_parts_of_a_group(ranks, domain, expected):
    assert Layout.of(ranks, domain).domain == expected


@pytest.mark.parametrize(("experts", "topk", "ranks"), [(128, 8, 2), (64, 8, 8), (8, 2, 2), (256, 8, 16)])
def test_a_uniform_routing_sends_what_is_expected(experts, topk, ranks):
    tokens, hidden = 4001, 32
    traffic = count(drawn("uniform", experts, topk, ranks, tokens), Layout.of(ranks, ranks))
    sent = steps(traffic, hidden, combine="reduced")[0]
    crossing = sent._replace(line_bytes=sent.row_bytes).bytes_sent().mean()
    without = math.comb(experts - experts // ranks, topk) / math.comb(experts, topk)  # no expert on a certain rank
    assert crossing == pytest.approx(tokens * (1 - without) * 2 * hidden * (ranks - 1), rel=0.01)
    closed_form = tokens * 2 * hidden * (1 - (1 - 1 / ranks) ** topk) * (ranks - 1)
    assert crossing == pytest.approx(closed_form, rel=0.06)  # with repeats, which routers do not draw


def test_bytes_of_each_scheme():
    # token 0: experts 0 and 1 of rank 0; token 1: 1 and 3; token 2: 3 and none. Rank 1 has no such tokens.
    ids = np.array([[[0, 1], [1, 3], [3, -1]], [[-1, -1]] * 3], np.int32)
    traffic = count(Trace("made up", 4, ids), Layout.of(2, 2))
    assert traffic.tokens.tolist() == [[2, 2], [0, 0]]
    assert traffic.rows.tolist() == [[3, 2], [0, 0]]
    hidden = 128

    def sent(**how):
        return [step.bytes_sent().tolist() for step in steps(traffic, hidden, **how)]

    assert sent(combine="exact") == [[2 * (256 + 8), 0], [0, 2 * 256], [2 * 256, 0], [0, 2 * 256]]
    assert sent(combine="reduced") == [[2 * (256 + 16), 0], [0, 2 * 256], [2 * 256, 0], [0, 2 * (256 + 8)]]
    assert sent(combine="reduced", payload="fp8")[0] == [2 * (128 + 4 + 16), 0]
    assert sent(combine="exact", dedup=False) == [[512, 0], [0, 512], [512, 0], [0, 512]]


def test_rows_cost_more_than_tokens():
    traffic = count(drawn("uniform", 64, 8, 4, 500), Layout.of(4, 4))
    rows, tokens = (steps(traffic, 2048, combine="reduced", dedup=dedup)[0] for dedup in (False, True))
    assert rows.bytes_sent().sum() > 1.8 * tokens.bytes_sent().sum()


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_tokens_have_distinct_experts(kind):
    trace = drawn(kind, 16, 3, 2, 101)
    assert trace.ids.shape == (2, 101, 3)
    assert all(len(set(token)) == 3 for token in trace.ids.reshape(-1, 3).tolist())
    assert trace.ids.min() >= 0
    assert trace.ids.max() < 16


def test_skewed_routings_are_skewed():
    layout = Layout.of(8, 8)
    even, skewed = (count(drawn(kind, 64, 4, 8, 1000), layout).imbalance for kind in ("uniform", "zipf"))
    assert even < 1.1
    assert skewed > 1.3


def test_ranks_must_divide_the_experts():
    with pytest.raises(ValueError, match=r"layout.ranks must divide 24 experts, but got 5"):
        count(drawn("uniform", EXPERTS, TOPK, 1, 3), Layout.of(5, 5))


def test_traces_survive_a_file(tmp_path):
    made = [with_holes("zipf", 1, 33), drawn("uniform", 7, 2, 1, 10)]
    traces.write(tmp_path / "traces.jsonl", {"commit": "abc"}, made)
    for before, after in zip(made, traces.load(tmp_path / "traces.jsonl"), strict=True):
        assert (after.name, after.experts) == (before.name, before.experts)
        assert (after.ids == np.sort(before.ids, 2)).all()


def test_a_trace_with_a_wrong_expert_is_refused(tmp_path):
    traces.write(tmp_path / "traces.jsonl", {}, [Trace("bad", 3, np.full((1, 2, 2), 3, np.int32))])
    with pytest.raises(ValueError, match=r"experts of bad must be -1 to 2, but got 3"):
        traces.load(tmp_path / "traces.jsonl")


def test_a_trace_is_split_in_the_order_of_its_tokens():
    trace = Trace("made up", 9, np.arange(14, dtype=np.int32).reshape(1, 7, 2) % 9)
    assert trace.split(3).ids[:, :, 0].tolist() == [[0, 2], [4, 6], [8, 1]]
    with pytest.raises(ValueError, match=r"sources must be at most 7, the tokens, but got 8"):
        trace.split(8)
