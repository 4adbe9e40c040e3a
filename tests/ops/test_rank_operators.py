# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of transport="peer", called directly: one rank that sends to itself, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import quantize_1x128, reference
from paddle_moe_ops.backends import direct, register_operators
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.expert_parallel.symmetric_buffers import OwnRows
from paddle_moe_ops.expert_parallel.symmetric_memory import BufferShape, granularity, mapped, memory_of
from paddle_moe_ops.reference.ranks import is_fetched
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor
from tests.ops.test_operator_arguments import OF_RANKS, requirements
from tests.reference.cases import assert_same_bits

pytestmark = pytest.mark.compiled_only

T, K, H, S, E = 3, 2, 5, 4, 3  # S rows of the only region
REGION = 64 + 8 * S * K
IDS = np.array([[0, 2], [-1, -1], [1, 0]], np.int32)
PROBS = np.array([[0.5, 0.25], [1, 2], [3, 4]], np.float32)
TOKEN_ROWS = np.array([[0], [-1], [1]], np.int32)
BY_ROW = "row_to_token", "row_to_slot", "row_to_expert"
ROW_TO_SLOT = np.array([0, 5, 4, 1, -1], np.int32)
STAY, TO_BUFFER, TO_NEW_MEMORY = OwnRows
X = np.arange(T * H, dtype=np.float32).reshape(T, H)
WORDS = 8  # of a call
CALL = [*range(WORDS)]
REPORT = np.zeros([1, 1 + WORDS], np.int32)
STATE = np.zeros([2], np.int32)
NEXT_TURN = np.ones([1, 128], np.uint8)  # flags of a rank that is ahead
PLACES = [NEXT_TURN, NEXT_TURN, STATE, REPORT]
CALLS = np.ones([1, WORDS], np.int32)
COUNTER = np.zeros([1], np.int32)
TOKEN_LINES = np.array([[0], [1], [-1], [-1]], np.int32)


def good_calls() -> dict[str, list[Any]]:
    """Arguments of each operator, arrays for tensors."""
    region = np.zeros([1, REGION], np.uint8)
    rows, row_to_token = np.zeros([S, H], np.float32), np.array([0, 2, -1, -1], np.int32)
    codes = np.zeros([S, H], ml_dtypes.float8_e4m3fn)
    return {
        "rank_plan": [IDS, PROBS, region, E, S, S, True],
        "rank_records": [region, K, S, 0, E],
        "rank_arrivals": [region, *PLACES, CALL, 1000, K, S, 0, E],
        "rank_join": [STATE, True],
        "rank_send": [X, TOKEN_ROWS, rows, rows.copy(), 1, 0, 3, TO_BUFFER, False, -1],
        "rank_receive": [TOKEN_ROWS, rows, rows.copy(), rows.copy(), None, STATE, 1, 0, 3, -1],
        "rank_dispatch": [
            *(X, IDS, PROBS, rows, rows.copy(), region, region.copy(), COUNTER),
            *(*PLACES, CALL, 1000, 0, E, S),
        ],
        "rank_combine": [rows, TOKEN_LINES, TOKEN_ROWS, rows.copy(), rows.copy(), COUNTER, *PLACES, CALL, 1000, 0],
        "rank_quantize": [X, TOKEN_ROWS, row_to_token, codes, False, 1e-4],
        "rank_put": [np.zeros([S, K], np.float32), region, S],
        "rank_take": [region, S, 1, True],
        "rank_get": [region, IDS, TOKEN_ROWS, STATE, E, S],
        "rank_rows": [IDS, TOKEN_ROWS, ROW_TO_SLOT, 1, E, S],
        "rank_spoil": [rows, np.zeros([2], np.int64), 0],
        "rank_barrier": [*PLACES, CALL, CALLS, 1, 1000],
    }


def run(place: Any, operator: str, arguments: list[Any]) -> tuple[Any, ...]:
    register_operators()
    made = [tensor(each, place) if isinstance(each, np.ndarray) else each for each in arguments]
    return direct(operator, *made)


def test_a_rank_that_sends_to_itself_gets_back_what_it_sent(place):
    register_operators()
    region = tensor(np.full([1, REGION], 7, np.uint8), place)
    views = [tensor(np.full([S, H], 7, np.float32), place) for _ in range(2)]
    x, ids, probs = (tensor(each, place) for each in (X, IDS, PROBS))
    token_rows, dropped, routed, row_to_token = direct("rank_plan", ids, probs, region, E, S, S, True)
    assert to_numpy(row_to_token).tolist() == [0, 2, -1, -1]
    assert to_numpy(routed).tolist() == [2, 1, 1]
    assert len(direct("rank_plan", ids, probs, region, E, S, S, False)) == 3
    assert to_numpy(token_rows).tolist() == TOKEN_ROWS.tolist()
    assert to_numpy(dropped).tolist() == 0
    (rows,) = direct("rank_send", x, token_rows, *views, 1, 0, 3, TO_NEW_MEMORY, True, -1)
    assert all((to_numpy(each) == 7).all() for each in views)
    got_ids, got_probs, own = direct("rank_records", region, K, S, 0, E)
    assert to_numpy(got_ids).tolist() == [[0, 2], [1, 0], [-1, -1], [-1, -1]]
    assert to_numpy(got_probs).tolist() == [[0.5, 0.25], [3, 4], [0, 0], [0, 0]]
    flags, state, report = (tensor(np.zeros_like(each), place) for each in (NEXT_TURN, STATE, REPORT))
    calls, *made = direct("rank_arrivals", region, flags, flags, state, report, CALL, 1000, K, S, 0, E)
    for waits_for_routing in (False, True):
        direct("rank_join", state, waits_for_routing)
    due = reference.route(to_numpy(got_ids), num_experts=E)
    names = (
        "slot_to_row",
        "token_rows",
        *BY_ROW,
        "row_probs",
        "tokens_per_expert",
        "expert_offsets",
        "routed_per_expert",
    )
    for each, expected in zip(made, (got_ids, got_probs, own), strict=False):
        assert_bits_equal(each, expected)
    for name, each in zip(names, made[3:], strict=False):
        if name in BY_ROW:  # a GPU makes room for all slots
            assert not (to_numpy(each)[due.num_rows :] + 1).any()
            each = each[: due.num_rows]
        if name != "row_probs":
            assert_bits_equal(each, getattr(due, name), what=name)
    assert to_numpy(state).tolist() == [1, 0]
    assert to_numpy(flags)[0, :1].tolist() == [1]
    assert to_numpy(calls).tolist() == [CALL]
    assert not to_numpy(report).any()
    (out,) = direct("rank_receive", own, *views, None, rows, state, 1, 0, 3, -1)
    assert to_numpy(out).tolist() == to_numpy(rows).tolist() == [*X[[0, 2]].tolist(), *np.zeros([2, H]).tolist()]
    (sums,) = direct("rank_receive", token_rows, *views, rows, None, state, 1, 0, 3, -1)
    assert to_numpy(sums).tolist() == [X[0].tolist(), [0.0] * H, X[2].tolist()]
    values = tensor(np.arange(S * K, dtype=np.float32).reshape(S, K), place)
    direct("rank_put", values, region, S)
    (taken,) = direct("rank_take", region, S, K, False)
    assert_bits_equal(taken, values)
    (got,) = direct("rank_get", region, ids, token_rows, state, E, S)
    assert to_numpy(got).tolist() == [[0, 1], [0, 0], [2, 3]]
    (places,) = direct("rank_rows", ids, token_rows, tensor(ROW_TO_SLOT, place), 1, E, S)
    assert to_numpy(places).tolist() == [[0], [3], [2], [1], [-1]]


@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_travel_in_float8_and_their_scales_beside_them(place, ue8m0):
    register_operators()
    x = np.random.default_rng(3).standard_normal([T, 200]).astype(np.float32)
    codes, scales = quantize_1x128(tensor(x, place), ue8m0=ue8m0)
    window = tensor(np.zeros([S, 200], ml_dtypes.float8_e4m3fn), place)
    beside = tensor(np.full([1, S * 8], 7, np.uint8), place)
    token_rows, row_to_token = tensor(TOKEN_ROWS, place), tensor(np.array([0, 2, -1, -1], np.int32), place)
    (of_rows,) = direct("rank_quantize", tensor(x, place), token_rows, row_to_token, window, ue8m0, 1e-4)
    direct("rank_put", of_rows, beside, S)
    (arrived,) = direct("rank_take", beside, S, scales.shape[1], ue8m0)
    for got, sent in ((window, codes), (arrived, scales)):
        assert_same_bits(to_numpy(got)[:2], to_numpy(sent)[[0, 2]])
    assert not to_numpy(window)[2:].astype(np.float32).any()


@pytest.mark.parametrize("fetched", [0, 3, 8])
def test_rows_for_another_rank_are_written_there_or_lie_where_it_fetches_them(place, fetched):
    register_operators()
    x = np.arange(1, 2 * S * H + 1, dtype=np.float32).reshape(2 * S, H)
    lines = tensor(np.arange(2 * S, dtype=np.int32)[:, None], place)
    arrived, peers = (tensor(np.zeros([2 * S, H], np.float32), place) for _ in range(2))
    options = 2, 0, fetched  # this is rank 0 of 2
    direct("rank_send", tensor(x, place), lines, arrived, peers, *options, STAY, False, -1)
    stays = is_fetched(np.arange(S), fetched)[:, None]
    assert_same_bits(to_numpy(arrived)[S:], np.where(stays, x[S:], 0))
    assert_same_bits(to_numpy(peers)[S:], np.where(stays, 0, x[S:]))
    assert not to_numpy(arrived)[:S].any()
    assert not to_numpy(peers)[:S].any()
    # as if rank 1 had done the same
    both = tensor(np.array([[0, S + 1], [2, -1]], np.int32), place)
    theirs = [tensor(x + offset, place) for offset in (100, 200)]
    given = both, *theirs, tensor(x, place), None
    (sums,) = direct("rank_receive", *given, tensor(STATE, place), *options, -1)
    other = x[S + 1] + (200 if is_fetched(np.array(1), fetched) else 100)
    assert_same_bits(to_numpy(sums), np.stack([x[0] + other, x[2]]))


def test_a_marked_state_makes_what_arrives_nan(place):
    register_operators()
    state = tensor(np.array([3, 1], np.int32), place)
    lines, rows = tensor(np.arange(S, dtype=np.int32)[:, None], place), np.zeros([S, H], np.float32)
    views = [tensor(rows, place) for _ in range(2)]
    given = tensor(rows, place), None, state, 1, 0, 3, -1
    assert np.isnan(to_numpy(direct("rank_receive", lines, *views, *given)[0])).all()
    region, ids, token_rows = (
        tensor(np.zeros([1, REGION], np.uint8), place),
        tensor(IDS, place),
        tensor(TOKEN_ROWS, place),
    )
    assert np.isnan(to_numpy(direct("rank_get", region, ids, token_rows, state, E, S)[0])).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_what_ranks_in_other_calls_exchanged_becomes_nan(place, dtype):
    register_operators()
    codes = tensor(np.array([5, 5, 6], np.int64), place)
    rows = tensor(np.ones([3, 7], np.float32).astype(dtype), place)
    direct("rank_spoil", rows, codes[:2], 5)
    assert (to_numpy(rows).astype(np.float32) == 1).all()
    direct("rank_spoil", rows, codes, 5)
    assert np.isnan(to_numpy(rows).astype(np.float32)).all()


def test_ranks_in_other_calls_mark_the_state_and_probabilities_are_nan(place):
    register_operators()
    peers = tensor(np.zeros([2, 128], np.uint8), place)
    ahead = np.zeros([2, 128], np.uint8)
    ahead[:, 0] = 1
    arrived = tensor(ahead, place)
    state, report = tensor(STATE, place), tensor(np.zeros([1, 1 + 2 * WORDS], np.int32), place)
    region = tensor(np.zeros([2, REGION], np.uint8), place)
    calls, _, probs, *_ = direct("rank_arrivals", region, arrived, peers, state, report, CALL, 1000, K, S, 0, E)
    direct("rank_join", state, True)
    assert to_numpy(state).tolist() == [1, 1]
    assert to_numpy(report).tolist() == [[1, *to_numpy(calls).reshape(-1).tolist()]]
    assert to_numpy(calls).tolist() == [[0] * WORDS] * 2
    assert np.isnan(to_numpy(probs)).all()


def is_shared(address: int) -> bool:
    """Return whether the address is in shared memory of the host; for memory of a GPU it is not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            return "paddle_moe_ops window" in line
    return False


def test_a_window_is_unmapped_with_the_last_tensor_over_it(place):
    register_operators()
    size, files = granularity(place), len(os.listdir("/proc/self/fd"))
    memory, like = memory_of(place, size), tensor(np.zeros([1], np.float32), place)
    region = memory.make()
    window = mapped(memory, [region, region], like, BufferShape(size, 2, size // 4, paddle.float32))
    memory.forget(region)
    assert len(os.listdir("/proc/self/fd")) == files
    assert window.place == like.place
    second, address = window[1], window.data_ptr()
    assert not to_numpy(second).any()
    direct("rank_spoil", window[0], tensor(np.array([1], np.int64), place), 0)
    assert np.isnan(to_numpy(second)).all()
    assert is_shared(address) or not place.is_cpu_place()
    was_shared = is_shared(address)
    del window
    gc.collect()
    assert np.isnan(to_numpy(second)).all()
    assert is_shared(address) == was_shared
    del second
    gc.collect()
    assert not is_shared(address)


def test_words_that_the_host_reads_are_zeros_at_first(place):
    register_operators()
    (words,) = direct("host_words", tensor(np.zeros([1], np.float32), place), 5)
    memory = (ctypes.c_int32 * 5).from_address(words.data_ptr())
    assert list(memory) == [0] * 5
    direct("rank_spoil", words, tensor(np.array([1], np.int64), place), 0)
    assert to_numpy(words).tolist() == [list(memory)] == [[-1] * 5]


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("window", [X, 0, 1, 1, 5], "the window must be memory that ranks share"),
        ("host_words", [X, 0], "the number of words must be positive"),
    ],
)
def test_no_memory_is_no_tensor(operator, arguments, message, place):
    with pytest.raises(ValueError, match=f"^ExpertParallel: {message}$"):
        run(place, operator, arguments)


HERE = "the window must be memory that ranks share"
EITHER = "either rows of this rank or memory that has them must be given"
WIDE = np.zeros([2, REGION], np.uint8)
FLOAT8 = np.zeros([S, H + 1], ml_dtypes.float8_e4m3fn)
BAD_CALLS = [
    ("rank_plan", 0, IDS[0], "ids must be of shape [any, any], but got [2]"),
    ("rank_plan", 0, IDS.astype(np.float32), "ids must be int32 or int64, but got float32"),
    ("rank_plan", 1, PROBS[:2], "probs must be of shape [3, 2], but got [2, 2]"),
    ("rank_plan", 1, PROBS.astype(np.int32), "probs must be float32, but got int32"),
    ("rank_plan", 2, WIDE[0], "the window must be of shape [any, any], but got [128]"),
    ("rank_plan", 2, WIDE.astype(np.int32), "the window must be uint8, but got int32"),
    ("rank_plan", 2, WIDE[:1, :100], "region must be a multiple of 4 that holds a region"),
    ("rank_plan", 5, S + 1, "capacity must be from 0 to rows_per_rank"),
    ("rank_records", 4, 0, "num_experts must be in [1, 2^16]"),
    ("rank_arrivals", 1, WIDE, HERE),
    ("rank_arrivals", 3, np.zeros([1], np.int32), "the state must be of shape [2], but got [1]"),
    ("rank_arrivals", 10, 0, "num_experts must be in [1, 2^16]"),
    ("rank_send", 0, X[0], "x must be of shape [any, any], but got [5]"),
    ("rank_send", 0, X[:2], "x must be of shape [3, 5], but got [2, 5]"),
    ("rank_send", 1, TOKEN_ROWS[0], "the map must be of shape [any, any], but got [1]"),
    ("rank_send", 1, TOKEN_ROWS.astype(np.int64), "the map must be int32, but got int64"),
    ("rank_send", 2, X[0], "the window must be of shape [any, any], but got [5]"),
    ("rank_send", 2, np.zeros([S, H], np.int32), "the window must be float32, but got int32"),
    ("rank_send", 3, np.zeros([S, H], np.int32), "the window must be float32, but got int32"),
    ("rank_send", 3, np.zeros([S, H + 1], np.float32), "the window must be of shape [4, 5], but got [4, 6]"),
    ("rank_send", 4, 3, HERE),
    ("rank_send", 5, 1, "rank must be one of num_ranks"),
    ("rank_send", 6, 9, "fetched must be from 0 to PMO_FETCHED_PERIOD"),
    ("rank_receive", 3, None, EITHER),
    ("rank_receive", 3, X, "the rows must be of shape [4, 5], but got [3, 5]"),
    ("rank_receive", 4, np.zeros([T, H], np.float32), EITHER),
    ("rank_quantize", 0, X[0], "x must be of shape [any, any], but got [5]"),
    ("rank_quantize", 2, np.array(0, np.int32), "the map must have a line for each row"),
    ("rank_quantize", 3, np.zeros([S, H], np.float32), "the window must be float8_e4m3fn, but got float32"),
    ("rank_quantize", 3, FLOAT8, "the window must be of shape [4, 5], but got [4, 6]"),
    ("rank_take", 1, S * REGION, "region must be a multiple of 4 that holds a region"),
    ("rank_put", 0, np.zeros([S], np.float32), "the values must be of shape [any, any], but got [4]"),
    ("rank_put", 0, np.zeros([S + 1, K], np.float32), "the values must be of shape [4, 2], but got [5, 2]"),
    ("rank_put", 0, np.zeros([S, K], np.int64), "the values must be float32, but got int64"),
    ("rank_get", 2, TOKEN_ROWS[:2], "token_rows must be of shape [3, 1], but got [2, 1]"),
    ("rank_get", 2, TOKEN_ROWS.astype(np.int64), "token_rows must be int32, but got int64"),
    ("rank_rows", 0, IDS[0], "ids must be of shape [any, any], but got [2]"),
    ("rank_rows", 1, TOKEN_ROWS[:2], "token_rows must be of shape [3, 1], but got [2, 1]"),
    ("rank_rows", 2, ROW_TO_SLOT.astype(np.int64), "a map must be int32, but got int64"),
    ("rank_rows", 2, np.array(0, np.int32), "row_to_slot must be of shape [any], but got []"),
    ("rank_rows", 5, -1, "rows_per_rank must be in [0, 2^31)"),
    ("rank_receive", 5, np.zeros([2], np.float32), "the state must be int32, but got float32"),
    ("rank_dispatch", 0, X[:2], "x must be of shape [3, 5], but got [2, 5]"),
    ("rank_dispatch", 0, X.astype(np.float16), "x must be float32, but got float16"),
    ("rank_dispatch", 1, IDS[0], "ids must be of shape [any, any], but got [2]"),
    ("rank_dispatch", 2, PROBS[:1], "probs must be of shape [3, 2], but got [1, 2]"),
    ("rank_dispatch", 3, X[0], "the window must be of shape [any, any], but got [5]"),
    ("rank_dispatch", 4, np.zeros([S, H + 1], np.float32), "the window must be of shape [4, 5], but got [4, 6]"),
    ("rank_dispatch", 4, np.zeros([S, H], np.int32), "the window must be float32, but got int32"),
    ("rank_dispatch", 5, np.zeros([1, REGION + 4], np.uint8), HERE),
    ("rank_dispatch", 7, np.zeros([2], np.int32), "the counter must be of shape [1], but got [2]"),
    ("rank_dispatch", 7, np.zeros([1], np.float32), "the counter must be int32, but got float32"),
    ("rank_dispatch", 16, S + 1, "capacity must be from 0 to rows_per_rank"),
    ("rank_combine", 0, X, "the rows must be of shape [4, 5], but got [3, 5]"),
    ("rank_combine", 0, np.zeros([S, H], np.float16), "the rows must be float32, but got float16"),
    ("rank_combine", 1, TOKEN_LINES[:, 0], "the map must be of shape [any, any], but got [4]"),
    ("rank_combine", 1, np.zeros([S, 2], np.int32), "the map must be of shape [4, 1], but got [4, 2]"),
    ("rank_combine", 2, TOKEN_ROWS.astype(np.int64), "the map must be int32, but got int64"),
    ("rank_combine", 12, 1, "rank must be one of num_ranks"),
    ("rank_get", 3, np.zeros([3], np.int32), "the state must be of shape [2], but got [3]"),
    ("rank_spoil", 1, np.zeros([2], np.int32), "the codes must be int64, but got int32"),
    ("rank_spoil", 1, np.array(0, np.int64), "the codes must be of shape [any], but got []"),
    ("rank_spoil", 1, np.zeros([0], np.int64), "num_ranks must be in [1, 1024]"),
    ("rank_barrier", 0, np.zeros([1, 64], np.uint8), HERE),
    ("rank_barrier", 1, np.zeros([1, 60], np.uint8), HERE),
    ("rank_barrier", 2, np.zeros([1], np.int32), "the state must be of shape [2], but got [1]"),
    ("rank_barrier", 2, np.zeros([2], np.float32), "the state must be int32, but got float32"),
    ("rank_barrier", 3, np.zeros([1, 8], np.int32), "the report must have a word and a call for each rank"),
    ("rank_barrier", 3, np.zeros([1, 9], np.float32), "the report must be int32, but got float32"),
    ("rank_barrier", 4, CALL[1:], "a call must have 8 words"),
    ("rank_barrier", 5, np.zeros([2, 8], np.int32), "the calls must be of shape [1, 8], but got [2, 8]"),
    ("rank_barrier", 5, np.zeros([1, 8], np.float32), "the calls must be int32, but got float32"),
]


@pytest.mark.parametrize(("operator", "position", "value", "message"), BAD_CALLS)
def test_what_does_not_fit_raises(operator, position, value, message, place):
    arguments = good_calls()[operator]
    arguments[position] = value
    with pytest.raises(ValueError, match=r"\w") as caught:
        run(place, operator, arguments)
    assert str(caught.value) == f"ExpertParallel: {message}"


@pytest.mark.parametrize("operator", list(good_calls()))
def test_calls_that_are_spoilt_here_are_good(operator, place):
    assert run(place, operator, good_calls()[operator])


def test_every_requirement_is_broken():
    messages = [message for *_, message in BAD_CALLS]
    says = {key: each for name in OF_RANKS for key, each in requirements(name).items()}
    assert len(says) >= 9
    assert not {each: line for each, line in says.items() if not any(each in message for message in messages)}
