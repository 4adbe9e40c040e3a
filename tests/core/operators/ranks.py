# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`rank_plan`, `rank_records`, `rank_put`, `rank_take`, `rank_get`, `rank_rows`: what travels between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import IDS_KINDS, Bytes, Floats, Int, Int32s, Int64s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Small

HEADER = 64
RANKS = 2


class RankPlanParams(Params):
    """pmo_rank_plan_params"""

    needs_cuda_workspace = True

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_ranks experts_per_rank rows_per_rank capacity"),
        (Bytes, "ids"),
        (Floats, "probs"),
        (Bytes, "records"),
        (Size, "region_bytes"),
        (Int32s, "token_rows row_to_token dropped routed"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
        (Int, "ids_kind num_threads"),
    )


class BarrierParams(Params):
    """pmo_rank_barrier_params"""

    _fields_ = fields(
        (Size, "struct_size num_ranks region_bytes timeout_ms"),
        (Bytes, "arrived peers"),
        (Int32s, "state call calls report forward_calls"),
        (Int, "gradient"),
    )


class RankRecordsParams(Params):
    """pmo_rank_records_params"""

    _fields_ = fields(
        (Size, "struct_size num_ranks rows_per_rank topk first_expert num_experts"),
        (Bytes, "records"),
        (Size, "region_bytes"),
        (Int32s, "mark ids"),
        (Floats, "probs"),
        (Int32s, "rows"),
        (Int, "num_threads"),
    )


class RankValuesParams(Params):
    """pmo_rank_values_params"""

    _fields_ = fields(
        (Size, "struct_size num_ranks rows_per_rank topk num_tokens experts_per_rank region_bytes"),
        (Bytes, "row_values ids"),
        (Int32s, "token_rows"),
        (Bytes, "window slot_values"),
        (Int32s, "mark"),
        (Int, "ids_kind num_threads"),
    )


class RankRowsParams(Params):
    """pmo_rank_rows_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_ranks experts_per_rank rows_per_rank num_rows"),
        (Bytes, "ids"),
        (Int32s, "token_rows row_to_slot places"),
        (Int, "ids_kind num_threads"),
    )


class RankSpoilParams(Params):
    """pmo_rank_spoil_params"""

    _fields_ = fields((Size, "struct_size num_ranks data_bytes code"), (Int64s, "codes"), (Bytes, "data"))


def region_bytes(rows: int, topk: int, odd: int = 0) -> int:
    """Bytes of a region of records."""
    return HEADER + 8 * rows * topk + 4 * odd


def rank_plan_params(
    ids: NDArray, probs: NDArray, records: NDArray, outputs: tuple[NDArray, ...], **fields: Any
) -> RankPlanParams:
    """Params of "rank_plan"; records is uint8 [P, region_bytes], outputs are those of `reference.ranks.RankPlan`."""
    token_rows, row_to_token, dropped, routed = outputs
    num_tokens, topk = ids.shape
    sizes = {"num_tokens": num_tokens, "topk": topk, "num_ranks": len(records), "region_bytes": records.shape[1]}
    sizes["rows_per_rank"] = len(row_to_token) // len(records)
    maps = {"token_rows": token_rows, "row_to_token": row_to_token, "dropped": dropped, "routed": routed}
    return RankPlanParams(
        **sizes, ids=ids, probs=probs, records=records, ids_kind=IDS_KINDS[ids.dtype], **maps, **fields
    )


def rank_plan(
    core: Core,
    ids: NDArray,
    probs: NDArray,
    num_ranks: int,
    experts_per_rank: int,
    rows: int,
    capacity: int,
    odd: int = 0,
) -> tuple[NDArray, ...]:
    """token_rows, row_to_token, dropped, routed, records."""
    num_tokens, topk = ids.shape
    records = np.full((num_ranks, region_bytes(rows, topk, odd)), 0xA5, np.uint8)
    with guarded_outputs() as output:
        shapes = (num_tokens, min(num_ranks, topk)), (num_ranks * rows,), (1,), (num_ranks * experts_per_rank,)
        outputs = tuple(output(shape, np.int32) for shape in shapes)
        params = rank_plan_params(
            ids, probs, records, outputs, experts_per_rank=experts_per_rank, capacity=capacity, num_threads=0
        )
        core.run("rank_plan", params)
    return *outputs, records


def rank_records(
    core: Core, records: NDArray, rows: int, topk: int, first_expert: int, num_experts: int, mark: NDArray | None = None
) -> tuple[NDArray, ...]:
    """ids, probabilities, rows."""
    num_ranks = len(records)
    with guarded_outputs() as output:
        ids = output((num_ranks * rows, topk), np.int32)
        probs, own = output((num_ranks * rows, topk), np.float32), output((num_ranks * rows, 1), np.int32)
        sizes = {"num_ranks": num_ranks, "rows_per_rank": rows, "topk": topk, "region_bytes": records.shape[1]}
        experts = {"first_expert": first_expert, "num_experts": num_experts, "mark": mark}
        core.run("rank_records", RankRecordsParams(**sizes, **experts, records=records, ids=ids, probs=probs, rows=own))
    return ids, probs, own


def rank_put(core: Core, values: NDArray, window: NDArray) -> None:
    """Put values [P, S, K] into a window uint8 [P, region_bytes]."""
    num_ranks, rows, topk = values.shape
    sizes = {"num_ranks": num_ranks, "rows_per_rank": rows, "topk": topk, "region_bytes": window.shape[1]}
    core.run("rank_put", RankValuesParams(**sizes, row_values=values, window=window))


def rank_take(core: Core, window: NDArray, rows: int, columns: int) -> NDArray:
    """The values [P * S, K] in a window uint8 [P, region_bytes]."""
    with guarded_outputs() as output:
        values = output((len(window) * rows, columns), np.float32)
        sizes = {"num_ranks": len(window), "rows_per_rank": rows, "topk": columns, "region_bytes": window.shape[1]}
        core.run("rank_take", RankValuesParams(**sizes, window=window, slot_values=values))
    return values


def rank_get(
    core: Core,
    window: NDArray,
    ids: NDArray,
    token_rows: NDArray,
    rows: int,
    experts_per_rank: int,
    mark: NDArray | None = None,
) -> NDArray:
    """The values of slots [T, K]."""
    num_tokens, topk = ids.shape
    sizes = {"num_ranks": len(window), "rows_per_rank": rows, "topk": topk, "region_bytes": window.shape[1]}
    with guarded_outputs() as output:
        values = output((num_tokens, topk), np.float32)
        params = RankValuesParams(
            **sizes,
            num_tokens=num_tokens,
            experts_per_rank=experts_per_rank,
            ids=ids,
            ids_kind=IDS_KINDS[ids.dtype],
            token_rows=token_rows,
            window=window,
            slot_values=values,
            mark=mark,
        )
        core.run("rank_get", params)
    return values


def rank_rows(
    core: Core,
    ids: NDArray,
    token_rows: NDArray,
    row_to_slot: NDArray,
    num_ranks: int,
    experts_per_rank: int,
    rows: int,
) -> NDArray:
    """The places of rows."""
    num_tokens, topk = ids.shape
    sizes = {"num_tokens": num_tokens, "topk": topk, "num_ranks": num_ranks, "rows_per_rank": rows}
    sizes |= {"num_rows": len(row_to_slot), "experts_per_rank": experts_per_rank, "ids_kind": IDS_KINDS[ids.dtype]}
    with guarded_outputs() as output:
        places = output((len(row_to_slot), 1), np.int32)
        maps = {"token_rows": token_rows, "row_to_slot": row_to_slot, "places": places}
        core.run("rank_rows", RankRowsParams(**sizes, ids=ids, **maps))
    return places


def _valid_plan(core: Core, output: MakeOutput, s: Small) -> Params:
    ids, probs = np.zeros((s.T, s.K), np.int32), np.zeros((s.T, s.K), np.float32)
    shapes = (s.T, min(RANKS, s.K)), (RANKS * s.T,), (1,), (RANKS * s.E,)
    outputs = tuple(output(shape, np.int32) for shape in shapes)
    records = output((RANKS, region_bytes(s.T, s.K)), np.uint8)
    return rank_plan_params(ids, probs, records, outputs, experts_per_rank=s.E, capacity=s.T)


def _valid_records(core: Core, output: MakeOutput, s: Small) -> Params:
    return RankRecordsParams(
        num_ranks=RANKS,
        rows_per_rank=s.T,
        topk=s.K,
        num_experts=s.E,
        region_bytes=region_bytes(s.T, s.K),
        records=np.zeros((RANKS, region_bytes(s.T, s.K)), np.uint8),
        ids=output((RANKS * s.T, s.K), np.int32),
        probs=output((RANKS * s.T, s.K), np.float32),
        rows=output((RANKS * s.T, 1), np.int32),
    )


def _valid_put(core: Core, output: MakeOutput, s: Small) -> Params:
    return RankValuesParams(
        num_ranks=RANKS,
        rows_per_rank=s.T,
        topk=s.K,
        region_bytes=4 * s.T * s.K,
        row_values=np.zeros((RANKS * s.T, s.K), np.float32),
        window=output((RANKS, 4 * s.T * s.K), np.uint8),
    )


def _valid_take(core: Core, output: MakeOutput, s: Small) -> Params:
    return RankValuesParams(
        num_ranks=RANKS,
        rows_per_rank=s.T,
        topk=s.K,
        region_bytes=4 * s.T * s.K,
        window=np.zeros((RANKS, 4 * s.T * s.K), np.uint8),
        slot_values=output((RANKS * s.T, s.K), np.float32),
    )


def _valid_get(core: Core, output: MakeOutput, s: Small) -> Params:
    return RankValuesParams(
        num_ranks=RANKS,
        rows_per_rank=s.T,
        topk=s.K,
        num_tokens=s.T,
        experts_per_rank=s.E,
        region_bytes=4 * s.T * s.K,
        ids=np.zeros((s.T, s.K), np.int32),
        token_rows=np.full((s.T, min(RANKS, s.K)), -1, np.int32),
        window=np.zeros((RANKS, 4 * s.T * s.K), np.uint8),
        slot_values=output((s.T, s.K), np.float32),
    )


def _valid_rows(core: Core, output: MakeOutput, s: Small) -> Params:
    maps = {"token_rows": (s.T, min(RANKS, s.K)), "row_to_slot": (s.T * s.K,)}
    return RankRowsParams(
        num_tokens=s.T,
        topk=s.K,
        num_ranks=RANKS,
        experts_per_rank=s.E,
        rows_per_rank=s.T,
        num_rows=s.T * s.K,
        ids=np.zeros((s.T, s.K), np.int32),
        **{name: np.full(shape, -1, np.int32) for name, shape in maps.items()},
        places=output((s.T * s.K, 1), np.int32),
    )


def _valid_spoil(core: Core, output: MakeOutput, s: Small) -> Params:
    data, codes = output((s.T, s.H), np.int32), np.arange(RANKS)  # whose bytes are other ones before
    return RankSpoilParams(num_ranks=RANKS, data_bytes=data.nbytes, codes=codes, data=data)


_BAD_REGIONS = {
    "num_ranks": (0, 1025),
    "rows_per_rank": (-1, TOO_MANY),
    "topk": (-1, TOO_MANY),
    "region_bytes": (-4, 8, 1001),
}
OPERATORS = (
    Operator(
        name="rank_plan",
        valid=_valid_plan,
        bad_fields={
            **_BAD_REGIONS,
            "num_tokens": (-1, TOO_MANY),
            "experts_per_rank": (0, TOO_MANY_EXPERTS),
            "capacity": (-1, TOO_MANY),
            "ids_kind": (-1, 2),
        },
        required=("ids", "probs", "records", "token_rows", "dropped", "routed"),
        aligned=("ids", "probs", "records", "token_rows", "row_to_token", "dropped", "routed"),
    ),
    Operator(
        name="rank_records",
        valid=_valid_records,
        bad_fields={**_BAD_REGIONS, "first_expert": (-1, TOO_MANY), "num_experts": (0, TOO_MANY_EXPERTS)},
        required=("records", "ids", "probs", "rows"),
        aligned=("records", "ids", "probs", "rows"),
    ),
    Operator(
        name="rank_put",
        valid=_valid_put,
        bad_fields=_BAD_REGIONS,
        required=("row_values", "window"),
        aligned=("row_values", "window"),
    ),
    Operator(
        name="rank_take",
        valid=_valid_take,
        bad_fields=_BAD_REGIONS,
        required=("window", "slot_values"),
        aligned=("window", "slot_values"),
    ),
    Operator(
        name="rank_get",
        valid=_valid_get,
        bad_fields={
            **_BAD_REGIONS,
            "num_tokens": (-1, TOO_MANY),
            "experts_per_rank": (0, TOO_MANY_EXPERTS),
            "ids_kind": (-1, 2),
        },
        required=("ids", "token_rows", "window", "slot_values"),
        aligned=("ids", "token_rows", "window", "slot_values"),
    ),
    Operator(
        name="rank_rows",
        valid=_valid_rows,
        bad_fields={
            **{name: values for name, values in _BAD_REGIONS.items() if name != "region_bytes"},
            "num_tokens": (-1, TOO_MANY),
            "num_rows": (-1, TOO_MANY),
            "experts_per_rank": (0, TOO_MANY_EXPERTS),
            "ids_kind": (-1, 2),
        },
        required=("ids", "token_rows", "row_to_slot", "places"),
        aligned=("ids", "token_rows", "row_to_slot", "places"),
    ),
    Operator(
        name="rank_spoil",
        valid=_valid_spoil,
        bad_fields={"num_ranks": (0, 1025), "data_bytes": (-1,)},
        required=("codes", "data"),
        aligned=("codes",),
    ),
)
