# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`rank_dispatch` and `rank_combine`: few tokens to the ranks of their experts and back, in one step each."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, IDS_KINDS, Bytes, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, TOO_WIDE, Operator
from .ranks import BarrierParams, RankPlanParams, region_bytes

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Small

FLAG_BYTES, CALL_WORDS = 128, 8
RANKS, RANK = 2, 1  # of valid params, whose tokens go to the other rank


def _inner(prefix: str, struct: type[Params]) -> list[tuple[str, Any]]:
    """Fields of a struct inside another one."""
    return [(f"{prefix}_{name}", kind) for name, kind, *_ in struct._fields_]


class RankDispatchParams(Params):
    """pmo_rank_dispatch_params"""

    needs_cuda_workspace = True

    _fields_ = (
        *fields((Size, "struct_size")),
        *_inner("plan", RankPlanParams),
        *_inner("barrier", BarrierParams),
        *fields(
            (Size, "rank hidden"),
            (Bytes, "x"),
            (Size, "x_row_stride"),
            (Bytes, "arrived peers arrived_records tokens"),
            (Int32s, "ids"),
            (Floats, "probs"),
            (Int32s, "rows"),
            (Bytes, "workspace"),
            (Size, "workspace_bytes"),
            (Int32s, "counter"),
            (Int, "dtype num_threads"),
        ),
    )

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.barrier_struct_size = ctypes.sizeof(BarrierParams)
        self.plan_struct_size = ctypes.sizeof(RankPlanParams)


class RankCombineParams(Params):
    """pmo_rank_combine_params"""

    _fields_ = (
        *fields((Size, "struct_size")),
        *_inner("barrier", BarrierParams),
        *fields(
            (Size, "num_tokens max_rows_per_token rank rows_per_rank lines_per_rank hidden"),
            (Bytes, "lines"),
            (Size, "line_stride"),
            (Int32s, "rows token_rows"),
            (Bytes, "arrived peers out"),
            (Int32s, "counter"),
            (Int, "dtype num_threads"),
        ),
    )

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.barrier_struct_size = ctypes.sizeof(BarrierParams)


def barrier_fields(calls: NDArray, rank: int, turn: int, mark: int = 0) -> dict[str, Any]:
    """Fields of the barrier of a rank, to which the other ranks and itself have come already."""
    num_ranks, coming = len(calls), turn + 1
    arrived = np.zeros((num_ranks, FLAG_BYTES // 4), np.int32)
    arrived[:, 0] = coming
    first = 16 + coming % 2 * CALL_WORDS
    arrived[:, first : first + CALL_WORDS] = calls
    made = {
        "num_ranks": num_ranks,
        "region_bytes": FLAG_BYTES,
        "timeout_ms": 60_000,
        "arrived": arrived,
        "peers": np.zeros_like(arrived),
        "state": np.array([turn, mark], np.int32),
        "call": np.ascontiguousarray(calls[rank]),
        "calls": np.zeros_like(calls),
        "report": np.zeros(1 + calls.size, np.int32),
    }
    return {f"barrier_{name}": value for name, value in made.items()}


def dispatch_params(
    x: NDArray,
    ids: NDArray,
    probs: NDArray,
    outputs: dict[str, NDArray],
    arrived: NDArray,
    records: NDArray,
    barrier: dict[str, Any],
    *,
    rank: int,
    experts_per_rank: int,
    capacity: int,
) -> RankDispatchParams:
    """Params of "rank_dispatch". ``outputs`` has peers, records, token_rows, dropped, routed, and received lines."""
    num_ranks, topk = len(records), ids.shape[1]
    plan = {"num_tokens": len(ids), "topk": topk, "num_ranks": num_ranks, "experts_per_rank": experts_per_rank}
    plan |= {"rows_per_rank": len(arrived) // num_ranks, "capacity": capacity, "ids": ids, "probs": probs}
    plan |= {name: outputs[name] for name in ("records", "token_rows", "dropped", "routed")}
    plan |= {"region_bytes": records.shape[1], "ids_kind": IDS_KINDS[ids.dtype]}
    return RankDispatchParams(
        **{f"plan_{name}": value for name, value in plan.items()},
        **barrier,
        rank=rank,
        hidden=x.shape[1],
        x=x,
        arrived=arrived,
        peers=outputs["peers"],
        arrived_records=records,
        **{name: outputs[name] for name in ("tokens", "ids", "probs", "rows")},
        counter=np.zeros(1, np.int32),
        dtype=DTYPES[x.dtype],
    )


def dispatch_outputs(
    output: MakeOutput, x: NDArray, ids: NDArray, arrived: NDArray, records: NDArray, **sizes: int
) -> Any:
    """Outputs of "rank_dispatch" by name."""
    num_ranks, topk = len(records), ids.shape[1]
    lines = num_ranks * sizes["capacity"]
    return {
        "peers": output(arrived.shape, x.dtype),
        "records": output(records.shape, np.uint8),
        "token_rows": output((len(ids), min(num_ranks, topk)), np.int32),
        "dropped": output((1,), np.int32),
        "routed": output((num_ranks * sizes["experts_per_rank"],), np.int32),
        "tokens": output((lines, x.shape[1]), x.dtype),
        "ids": output((lines, topk), np.int32),
        "probs": output((lines, topk), np.float32),
        "rows": output((lines, 1), np.int32),
    }


def rank_dispatch(
    core: Core, x: NDArray, ids: NDArray, probs: NDArray, arrived: NDArray, records: NDArray, barrier: Any, **sizes: int
) -> dict[str, NDArray]:
    """The outputs of a rank, after the rows and records of the others have arrived."""
    with guarded_outputs() as output:
        outputs = dispatch_outputs(
            output, x, ids, arrived, records, **{key: sizes[key] for key in ("capacity", "experts_per_rank")}
        )
        params = dispatch_params(x, ids, probs, outputs, arrived, records, barrier, **sizes)
        core.run("rank_dispatch", params)
        assert not params.arrays["counter"].any()
    return outputs


def combine_params(
    lines: NDArray,
    rows: NDArray,
    token_rows: NDArray,
    views: tuple[NDArray, NDArray],
    out: NDArray,
    barrier: Any,
    rank: int,
) -> RankCombineParams:
    """Params of "rank_combine"."""
    num_ranks = barrier["barrier_num_ranks"]
    return RankCombineParams(
        **barrier,
        num_tokens=len(token_rows),
        max_rows_per_token=token_rows.shape[1],
        rank=rank,
        rows_per_rank=len(views[0]) // num_ranks,
        lines_per_rank=len(rows) // num_ranks,
        hidden=lines.shape[1],
        lines=lines,
        line_stride=lines.shape[1],
        rows=rows,
        token_rows=token_rows,
        arrived=views[0],
        peers=views[1],
        out=out,
        counter=np.zeros(1, np.int32),
        dtype=DTYPES[lines.dtype],
    )


def rank_combine(
    core: Core, lines: NDArray, rows: NDArray, token_rows: NDArray, arrived: NDArray, barrier: Any, rank: int
) -> tuple[NDArray, NDArray]:
    """Rows that a rank sends, and their sums."""
    with guarded_outputs() as output:
        peers, out = output(arrived.shape, lines.dtype), output((len(token_rows), lines.shape[1]), lines.dtype)
        params = combine_params(lines, rows, token_rows, (arrived, peers), out, barrier, rank)
        core.run("rank_combine", params)
        assert not params.arrays["counter"].any()
    return peers, out


def _valid_barrier() -> dict[str, Any]:
    return barrier_fields(np.zeros((RANKS, CALL_WORDS), np.int32), RANK, 0)


def _valid_dispatch(core: Core, output: MakeOutput, s: Small) -> Params:
    sizes = {"experts_per_rank": s.E, "capacity": s.T}
    x, ids, probs = s.x, np.zeros((s.T, s.K), np.int32), np.zeros((s.T, s.K), np.float32)
    arrived = np.zeros((RANKS * s.T, s.H), np.float32)
    records = np.zeros((RANKS, region_bytes(s.T, s.K)), np.uint8)
    outputs = dispatch_outputs(output, x, ids, arrived, records, **sizes)
    return dispatch_params(x, ids, probs, outputs, arrived, records, _valid_barrier(), rank=RANK, **sizes)


def _valid_combine(core: Core, output: MakeOutput, s: Small) -> Params:
    lines, rows = np.zeros((RANKS * s.T, s.H), np.float32), np.arange(RANKS * s.T, dtype=np.int32)[:, None]
    token_rows, views = np.full((s.T, RANKS), -1, np.int32), (np.zeros_like(lines), output(lines.shape, np.float32))
    return combine_params(lines, rows, token_rows, views, output((s.T, s.H), np.float32), _valid_barrier(), RANK)


OPERATORS = (
    Operator(
        name="rank_dispatch",
        valid=_valid_dispatch,
        bad_fields={
            "plan_struct_size": (0, 8),
            "plan_num_tokens": (-1, TOO_MANY),
            "plan_topk": (-1, 33),
            "plan_num_ranks": (0, 3),
            "plan_experts_per_rank": (0, 4097, TOO_MANY_EXPERTS),
            "plan_rows_per_rank": (-1, TOO_MANY),
            "plan_capacity": (-1, 257, TOO_MANY),
            "plan_region_bytes": (-4, 8, 1001),
            "plan_ids_kind": (-1, 2),
            "barrier_struct_size": (0, 8),
            "barrier_num_ranks": (0, 33),
            "barrier_region_bytes": (-4, 64),
            "barrier_timeout_ms": (-1,),
            "rank": (-1, RANKS),
            "hidden": (-1, TOO_WIDE),
            "dtype": (-1, 3, 64),
        },
        required=(
            *("plan_ids", "plan_probs", "plan_records", "plan_token_rows", "plan_dropped", "plan_routed"),
            *("x", "arrived", "peers", "arrived_records", "tokens", "ids", "probs", "rows"),
        ),
        aligned=("plan_records", "plan_token_rows", "plan_dropped", "plan_routed", "ids", "probs", "rows"),
    ),
    Operator(
        name="rank_combine",
        valid=_valid_combine,
        bad_fields={
            "barrier_struct_size": (0, 8),
            "barrier_num_ranks": (0, 33),
            "num_tokens": (-1, TOO_MANY),
            "max_rows_per_token": (-1, 33),
            "rank": (-1, RANKS),
            "rows_per_rank": (-1,),
            "lines_per_rank": (-1, 257),
            "hidden": (-1, TOO_WIDE),
            "dtype": (-1, 3, 64),
        },
        required=("lines", "rows", "token_rows", "arrived", "peers", "out"),
        aligned=("rows", "token_rows"),
    ),
)
