# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over several processes, beside one process that has all tokens and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import permute, unpermute
from paddle_moe_ops.expert_parallel import ExpertParallel, Received
from paddle_moe_ops.testing.equality import assert_bits_equal

from . import processes
from .problems import Problem, alone, kept_ids, on_this_device, results, scaled
from .processes import run

pytestmark = pytest.mark.long

TWO = [
    Problem((5, 16), 4, 2, 7),
    Problem((63, 1), 8, 3, 72, dtype="bfloat16"),
    Problem((0, 7), 4, 2, 1),
    Problem((9, 4), 6, 4, 33, "one expert", "float16"),
    Problem((12, 13), 8, 8, 16, "half none", "bfloat16"),
    Problem((3, 2), 2, 1, 7, "none"),
    Problem((0, 0), 2, 2, 7),
    Problem((30, 11), 4, 3, 200, dtype="bfloat16", float8="fp8_1x128"),
    Problem((0, 3), 4, 3, 72, float8="fp8_1x128_ue8m0"),
]
FOUR = [
    Problem((1, 0, 63, 9), 8, 3, 72, dtype="bfloat16"),
    Problem((2, 3, 4, 5), 4, 4, 7, "half none"),
    Problem((7, 0, 0, 0), 12, 5, 16, "one expert"),
]
EIGHT = [
    Problem((1, 0, 9, 3, 0, 0, 14, 2), 16, 4, 24, dtype="bfloat16"),
    Problem((2, 3, 4, 5, 1, 2, 3, 4), 8, 8, 7, "half none"),
    Problem((0, 0, 0, 0, 0, 11, 0, 0), 24, 5, 16, "one expert", "float16"),
    Problem((0, 2, 0, 0, 1, 0, 0, 4), 8, 1, 7, "none"),
    Problem((5, 1, 0, 2, 3, 0, 7, 1), 16, 6, 200, float8="fp8_1x128"),
]


def made(problem: Problem, combine: str) -> ExpertParallel:
    options = {"payload": problem.float8, "tokens_per_rank": problem.tokens_per_rank, "transport": problem.transport}
    return ExpertParallel(problem.experts, combine=combine, **options)


def check_counts(problem: Problem, rank: int, received: Received) -> None:
    mine = problem.of_rank(rank)
    ids = problem.arrays()["ids"][mine]
    assert received.dropped_slots.item() == (ids != kept_ids(problem)[mine]).sum()
    routed = [int((ids == expert).any(1).sum()) for expert in range(problem.experts)]
    assert received.routed_per_expert.tolist() == routed


def exact(problem: Problem, rank: int) -> dict[str, Any]:
    t = problem.tensors(problem.of_rank(rank))
    ep = made(problem, "exact")
    received = ep.dispatch(t["x"], t["ids"], t["probs"])
    check_counts(problem, rank, received)
    if problem.tokens_per_rank is None:
        assert sum(received.tokens_per_expert) == received.rows.shape[0]
    return results(ep.combine(scaled(received.rows, received.plan.row_to_expert + ep.first_expert), received), t)


def reduced(problem: Problem, rank: int) -> dict[str, Any]:
    t = problem.tensors(problem.of_rank(rank))
    ep = made(problem, "reduced")
    received = ep.dispatch(t["x"], t["ids"], t["probs"])
    check_counts(problem, rank, received)
    if problem.tokens_per_rank is not None and problem.transport != "peer":
        assert received.tokens.shape[0] == problem.tokens_per_rank * len(problem.tokens)
    rows = scaled(permute(received.tokens, received.plan)[0], received.plan.row_to_expert + ep.first_expert)
    return results(ep.combine(unpermute(rows, received.plan, received.probs), received), t)


# Module scope groups the tests by number of processes: starting processes takes seconds.
MANY = pytest.param(EIGHT, marks=pytest.mark.slow, id="eight")
OF_RANKS = pytest.mark.parametrize(
    "problems",
    [pytest.param(TWO, id="two"), pytest.param(FOUR, marks=pytest.mark.slow, id="four"), MANY],
    scope="module",
)
PROGRAMS = {"exact": exact, "reduced": reduced}


def of_rank(program: str, problems: list[Problem]) -> list[dict[str, Any]]:
    rank = paddle.distributed.get_rank()
    with on_this_device():
        return [PROGRAMS[program](problem, rank) for problem in problems]


def joined(program: str, problems: list[Problem], backend: str | None) -> list[dict[str, Any]]:
    """Results of all ranks, concatenated in rank order."""
    ranks = run(of_rank, len(problems[0].tokens), backend, program=program, problems=problems)
    return [
        {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]


def check(program: str, problems: list[Problem], backend: str | None = None) -> None:
    for problem, got in zip(problems, joined(program, problems, backend), strict=True):
        for name, expected in alone(problem).items():
            if name == "d_probs" and (backend or processes.default_backend) != "gloo" and not problem.integers:
                continue  # dot products have the bits of a backend
            assert_bits_equal(got[name], expected, what=f"{name} of {problem}")


@OF_RANKS
def test_exact_has_the_bits_of_one_process(problems):
    check("exact", problems)


@OF_RANKS
def test_reduced_has_them_where_nothing_is_rounded(problems):
    check("reduced", [problem._replace(integers=True) for problem in problems])


@OF_RANKS
@pytest.mark.parametrize("room", [2, 200])
def test_equal_parts_drop_what_has_no_room_and_nothing_else(problems, room):
    check("reduced", [problem._replace(integers=True, tokens_per_rank=room) for problem in problems])


def dropped_for_two_reasons(combine: str, transport: str) -> Any:
    """Counts if expert 0 has room for two of three tokens, and rank 0 for three of the four that are left."""
    ep = ExpertParallel(4, combine=combine, transport=transport, tokens_per_rank=3)
    ids = paddle.to_tensor([[0], [0], [0], [1], [1], [2], [-1]], "int32")
    received = ep.dispatch(paddle.ones([7, 64]), ids, paddle.ones([7, 1]), capacity=2)
    return received.dropped_slots.item(), received.tokens_per_expert.tolist(), received.routed_per_expert.tolist()


@pytest.mark.parametrize(("combine", "transport"), [("reduced", "auto"), ("reduced", "peer"), ("exact", "peer")])
def test_slots_without_room_at_their_expert_and_at_its_rank_are_counted(combine, transport):
    first, second = run(dropped_for_two_reasons, 2, combine=combine, transport=transport)
    assert first == (2, [4, 2], [3, 2, 1, 0])
    assert second == (2, [2, 0], [3, 2, 1, 0])


@OF_RANKS
def test_so_it_is_on_a_custom_device(problems, custom_backend):
    check("exact", problems, custom_backend)
    check("exact", [problem._replace(integers=True) for problem in problems], custom_backend)
    check("reduced", [problem._replace(integers=True) for problem in problems], custom_backend)
    check("reduced", [problem._replace(integers=True, tokens_per_rank=3) for problem in problems], custom_backend)


def for_windows(problems: list[Problem]) -> list[Problem]:
    """Problems of other widths on GPUs: a page has 2 MiB there, which takes a million rows of some widths to fill."""
    if processes.default_backend == "gloo":
        return problems
    odd = 72, None  # which stays
    return [
        each if (each.hidden, each.float8) == odd else each._replace(hidden=-(-each.hidden // 64) * 64)
        for each in problems
    ]


def peers_of(problems: list[Problem], room: int, integers: bool = True) -> list[Problem]:
    """Problems for windows; of integers sums are exact, so that parts may be rounded."""
    of_peers = {"tokens_per_rank": room, "transport": "peer", "integers": integers}
    return [problem._replace(**of_peers) for problem in for_windows(problems)]


# Few tokens are exchanged in one launch each way, many in several.
FEW_AND_MANY = pytest.mark.parametrize("room", [80, 300])


@OF_RANKS
@pytest.mark.parametrize("room", [2, pytest.param(200, marks=pytest.mark.slow), 300])
def test_peers_drop_what_has_no_room_and_nothing_else(problems, room):
    check("reduced", peers_of(problems, room))
    check("exact", peers_of(problems, room))


@OF_RANKS
@FEW_AND_MANY
def test_parts_through_memory_of_peers_have_the_bits_of_those_that_are_exchanged(problems, room):
    problems = for_windows(problems)
    exchanged, through_peers = (joined("reduced", each, None) for each in (problems, peers_of(problems, room, False)))
    for problem, got, expected in zip(problems, through_peers, exchanged, strict=True):
        for name in expected:
            assert_bits_equal(got[name], expected[name], what=f"{name} of {problem}")


def test_more_slots_or_experts_than_one_launch_takes_have_the_bits_of_one_process():
    check("reduced", peers_of([Problem((3, 2), 40, 33, 8), Problem((4, 1), 4098, 2, 8)], 16))


@OF_RANKS
def test_rows_through_memory_of_peers_have_the_bits_of_one_process(problems):
    check("exact", peers_of(problems, 80, integers=False))


@pytest.mark.parametrize("float8", ["fp8_1x128", "fp8_1x128_ue8m0"])
def test_scales_of_many_tokens_fill_several_pages_of_peers(float8):
    check("reduced", peers_of([Problem((1100, 3), 4, 2, 64, float8=float8)], 1100))


@OF_RANKS
def test_windows_that_are_used_again_hold_nothing_of_the_last_time(problems):
    first = peers_of(problems[:1], 80)[0]
    for program in PROGRAMS:
        check(program, [first, first._replace(routing="half none"), first._replace(routing="none"), first] * 2)


def with_a_trained_router(combine: str, **options: Any) -> NDArray:
    """The gradient of a router whose ids and probabilities come from `paddle.topk`."""
    rank = paddle.distributed.get_rank()
    rng = np.random.default_rng(11)
    x, router = (rng.standard_normal(shape).astype(np.float32) for shape in ([20, 8], [8, 4]))
    mine = paddle.to_tensor(x[rank * 12 : 12 + rank * 8])
    weight = paddle.to_tensor(router, stop_gradient=False)
    mine.stop_gradient = False
    probs, ids = paddle.topk(paddle.nn.functional.softmax(paddle.matmul(mine, weight)), 2)
    ep = ExpertParallel(4, combine=combine, **options)
    received = ep.dispatch(mine, ids, probs)
    if combine == "exact":
        out = scaled(received.rows, received.plan.row_to_expert + ep.first_expert)
    else:
        rows = scaled(permute(received.tokens, received.plan)[0], received.plan.row_to_expert + ep.first_expert)
        out = unpermute(rows, received.plan, received.probs)
    ep.combine(out, received).square().sum().backward()
    return weight.grad.numpy()


@pytest.mark.parametrize("options", [{}, {"transport": "peer", "tokens_per_rank": 12}], ids=["exchanged", "peers"])
@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_a_router_from_topk_is_trained(combine, options):
    rng = np.random.default_rng(11)
    x, weight = (paddle.to_tensor(rng.standard_normal(shape).astype(np.float32)) for shape in ([20, 8], [8, 4]))
    weight.stop_gradient = False
    scores = paddle.nn.functional.softmax(paddle.matmul(x, weight))
    probs, ids = paddle.topk(scores, 2)
    dense = paddle.zeros_like(scores).put_along_axis(ids, probs, 1)  # the dense formulation: every expert is a factor
    factors = paddle.arange(4, dtype="float32") / 4 + 1
    (x * paddle.matmul(dense, factors.unsqueeze(-1))).square().sum().backward()
    got = sum(run(with_a_trained_router, 2, combine=combine, **options))
    np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(got).max() > 0.1


def second_order(combine: str, **options: Any) -> list[NDArray]:
    """A gradient by the gradient of the result, and the result of these values: dispatch to combine is linear in x.

    Gradients travel in their own dtype, so the latter is that of tokens without a payload.
    """
    rank = paddle.distributed.get_rank()
    rng, count = np.random.default_rng(rank), (5, 0, 3)[rank]
    x, d_out, values = (paddle.to_tensor(rng.standard_normal([count, 8]).astype(np.float32)) for _ in range(3))
    x.stop_gradient = d_out.stop_gradient = False
    ids = paddle.to_tensor(np.array([rng.permutation(6)[:2] for _ in range(count)], np.int32).reshape([count, 2]))
    eps = [ExpertParallel(6, combine=combine, **each) for each in (options, {**options, "payload": None})]

    def called(x: paddle.Tensor, ep: ExpertParallel) -> paddle.Tensor:
        received = ep.dispatch(x, ids, paddle.ones([count, 2]))
        if combine == "exact":
            return ep.combine(received.rows * 3, received)
        rows = permute(received.tokens, received.plan)[0] * 3
        return ep.combine(unpermute(rows, received.plan), received)

    (d_x,) = paddle.grad([called(x, eps[0])], [x], [d_out], create_graph=True)
    (found,) = paddle.grad([d_x], [d_out], [values])
    return [found.numpy(), called(values, eps[1]).numpy()]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "options",
    [
        {"combine": "exact"},
        {"combine": "exact", "payload": "fp8_1x128"},
        {"combine": "exact", "transport": "peer", "tokens_per_rank": 5, "payload": "fp8_1x128"},
        {"combine": "reduced", "payload": "fp8_1x128"},
        {"combine": "reduced", "tokens_per_rank": 5},
    ],
    ids=["exact", "exact, float8", "exact, float8, peers", "reduced, float8", "parts of one size"],
)
def test_gradients_of_second_order_go_the_way_of_the_tokens(options):
    for rank, (found, expected) in enumerate(run(second_order, 3, **options)):
        assert_bits_equal(found, expected)
        assert found.any() or rank == 1
