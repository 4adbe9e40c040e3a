# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`rank_send` and `rank_receive`: rows to where other ranks get them, and from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, Bytes, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Small

PERIOD = 8  # PMO_FETCHED_PERIOD
RANKS = 2


class RankSendParams(Params):
    """pmo_rank_send_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens max_rows_per_token num_ranks rank rows_per_rank fetched hidden"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Int32s, "token_rows"),
        (Bytes, "arrived peers own"),
        (Size, "own_rows_per_rank"),
        (Int, "dtype num_threads leaves_room"),
    )


class RankReceiveParams(Params):
    """pmo_rank_receive_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens max_rows_per_token num_ranks rank rows_per_rank fetched hidden"),
        (Int32s, "token_rows"),
        (Bytes, "arrived peers own"),
        (Size, "own_row_stride own_rows_per_rank"),
        (Int32s, "mark"),
        (Bytes, "out"),
        (Int, "dtype num_threads"),
    )


def _sizes(token_rows: NDArray, arrived: NDArray, num_ranks: int) -> dict[str, Any]:
    num_tokens, columns = token_rows.shape
    sizes = {"num_tokens": num_tokens, "max_rows_per_token": columns, "num_ranks": num_ranks}
    rows = len(arrived) // num_ranks
    return {**sizes, "rows_per_rank": rows, "own_rows_per_rank": rows, "hidden": arrived.shape[1]}


def send_params(
    x: NDArray, token_rows: NDArray, arrived: NDArray, peers: NDArray, own: NDArray | None, num_ranks: int, **more: Any
) -> RankSendParams:
    """Params of "rank_send". Rows of ``x`` [T, H] may lie apart."""
    arrays = {"x": x, "token_rows": token_rows, "arrived": arrived, "peers": peers, "own": own}
    return RankSendParams(**{**_sizes(token_rows, arrived, num_ranks), **arrays, "dtype": DTYPES[x.dtype], **more})


def receive_params(
    token_rows: NDArray,
    arrived: NDArray,
    peers: NDArray,
    own: NDArray | None,
    out: NDArray,
    num_ranks: int,
    **more: Any,
) -> RankReceiveParams:
    """Params of "rank_receive". Rows of ``own`` [P * S, H] may lie apart."""
    arrays = {"token_rows": token_rows, "arrived": arrived, "peers": peers, "own": own, "out": out}
    return RankReceiveParams(**{**_sizes(token_rows, arrived, num_ranks), **arrays, "dtype": DTYPES[out.dtype], **more})


def rank_send(
    core: Core, x: NDArray, token_rows: NDArray, num_ranks: int, rows_per_rank: int, *, has_own: bool, **more: Any
) -> tuple[NDArray, NDArray, NDArray]:
    """arrived, peers, own, which nothing else has written to."""
    shape = (num_ranks * rows_per_rank, x.shape[1])
    with guarded_outputs() as output:
        arrived, peers, own = (output(shape, x.dtype) for _ in range(3))
        params = send_params(x, token_rows, arrived, peers, own if has_own else None, num_ranks, **more)
        core.run("rank_send", params)
    return arrived, peers, own


def rank_receive(
    core: Core, token_rows: NDArray, arrived: NDArray, peers: NDArray, own: NDArray, num_ranks: int, **more: Any
) -> NDArray:
    """The sums [T, H]."""
    with guarded_outputs() as output:
        out = output((len(token_rows), arrived.shape[1]), arrived.dtype)
        core.run("rank_receive", receive_params(token_rows, arrived, peers, own, out, num_ranks, **more))
    return out


def _valid_send(core: Core, output: MakeOutput, s: Small) -> Params:
    arrived, peers, own = (output((RANKS * s.T, s.H), np.float32) for _ in range(3))
    token_rows = np.arange(s.T * RANKS, dtype=np.int32).reshape(s.T, RANKS)  # some of every kind
    return send_params(s.x, token_rows, arrived, peers, own, RANKS, fetched=3)


def _valid_receive(core: Core, output: MakeOutput, s: Small) -> Params:
    arrived, peers, own = (np.zeros((RANKS * s.T, s.H), np.float32) for _ in range(3))
    token_rows = np.full((s.T, RANKS), -1, np.int32)
    return receive_params(token_rows, arrived, peers, own, output((s.T, s.H), np.float32), RANKS, fetched=3)


def _drawn(d: Draw) -> tuple[int, int, NDArray, dict[str, int]]:
    """Ranks, rows of all of them, the rows of tokens, and more fields."""
    num_ranks = d.between(1, 5)
    num_rows = num_ranks * d.below(7)
    more = {"rank": d.below(num_ranks), "fetched": d.below(PERIOD + 1)}
    return num_ranks, num_rows, d.ints((d.T, d.K), num_rows), more


def _fuzzed_send(core: Core, output: MakeOutput, d: Draw) -> Params:
    num_ranks, num_rows, token_rows, more = _drawn(d)
    arrived, peers, own = (output((num_rows, d.H), np.float32) for _ in range(3))
    return send_params(d.data(d.T, d.H), token_rows, arrived, peers, own, num_ranks, **more)


def _fuzzed_receive(core: Core, output: MakeOutput, d: Draw) -> Params:
    num_ranks, num_rows, token_rows, more = _drawn(d)
    arrived, peers, own = (d.data(num_rows, d.H) for _ in range(3))
    return receive_params(token_rows, arrived, peers, own, output((d.T, d.H), np.float32), num_ranks, **more)


_BAD_FIELDS = {
    "num_tokens": (-1, TOO_MANY),
    "max_rows_per_token": (-1, TOO_MANY),
    "num_ranks": (0, 1025),
    "rank": (-1, RANKS),
    "rows_per_rank": (-1, TOO_MANY),
    "fetched": (-1, PERIOD + 1),
    "hidden": (-1, TOO_WIDE),
    "dtype": (-1, 3, 64),
}
OPERATORS = (
    Operator(
        name="rank_send",
        valid=_valid_send,
        bad_fields=_BAD_FIELDS,
        required=("x", "token_rows", "arrived", "peers"),
        aligned=("token_rows",),
        fuzzed=_fuzzed_send,
    ),
    Operator(
        name="rank_receive",
        valid=_valid_receive,
        bad_fields=_BAD_FIELDS,
        required=("token_rows", "arrived", "peers", "own", "out"),
        aligned=("token_rows",),
        fuzzed=_fuzzed_receive,
    ),
)
