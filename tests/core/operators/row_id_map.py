# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`make_row_id_map` and `read_row_id_map`: TransformerEngine's map of a plan, and back, with one struct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..guards import MakeOutput, guarded_outputs
from ..structs import Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Small


class RowIdMapParams(Params):
    """pmo_row_id_map_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts num_rows"),
        (Int32s, "token_rows row_to_expert pad_offsets row_id_map rowmap"),
        (Int, "num_threads"),
    )


def make_row_id_map_params(
    token_rows: NDArray, row_to_expert: NDArray, row_id_map: NDArray, pad_offsets: NDArray | None = None, **fields: Any
) -> RowIdMapParams:
    """Params of "make_row_id_map", which writes row_id_map [T, 2E + 1]."""
    num_tokens, topk = token_rows.shape
    return RowIdMapParams(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=row_id_map.shape[1] // 2,
        num_rows=len(row_to_expert),
        token_rows=token_rows,
        row_to_expert=row_to_expert,
        pad_offsets=pad_offsets,
        row_id_map=row_id_map,
        **fields,
    )


def read_row_id_map_params(
    row_id_map: NDArray, rowmap: NDArray, pad_offsets: NDArray | None = None, **fields: Any
) -> RowIdMapParams:
    """Params of "read_row_id_map", which writes rowmap [T, E]."""
    sizes = {"num_tokens": len(rowmap), "num_experts": rowmap.shape[1]}
    return RowIdMapParams(**sizes, pad_offsets=pad_offsets, row_id_map=row_id_map, rowmap=rowmap, **fields)


def make_row_id_map(core: Core, plan: reference.Plan, pad_offsets: NDArray | None = None) -> NDArray:
    with guarded_outputs() as output:
        row_id_map = output((plan.num_tokens, 2 * plan.num_experts + 1), np.int32)
        params = make_row_id_map_params(plan.token_rows, plan.row_to_expert, row_id_map, pad_offsets)
        core.run("make_row_id_map", params)
    return row_id_map


def read_row_id_map(core: Core, row_id_map: NDArray, pad_offsets: NDArray | None = None) -> NDArray:
    with guarded_outputs() as output:
        rowmap = output((len(row_id_map), row_id_map.shape[1] // 2), np.int32)
        core.run("read_row_id_map", read_row_id_map_params(row_id_map, rowmap, pad_offsets))
    return rowmap


def _valid_make(core: Core, output: MakeOutput, s: Small) -> Params:
    row_id_map, pad_offsets = output((s.T, 2 * s.E + 1), np.int32), np.zeros(s.E, np.int32)
    return make_row_id_map_params(s.plan.token_rows, s.plan.row_to_expert, row_id_map, pad_offsets)


def _valid_read(core: Core, output: MakeOutput, s: Small) -> Params:
    row_id_map = reference.make_row_id_map(s.plan.token_rows, s.plan.row_to_expert, s.E)
    return read_row_id_map_params(row_id_map, output((s.T, s.E), np.int32), np.zeros(s.E, np.int32))


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    """Params of either direction, whose outputs are the other's inputs."""
    return RowIdMapParams(
        **s.sizes("num_tokens topk num_experts num_rows"),
        token_rows=s.ints((s.T, s.K), s.N),
        row_to_expert=s.ints((s.N,), s.E),
        pad_offsets=s.rng.choice([0, 3, -3, *s.ODD_INTS], s.E).astype(np.int32),
        row_id_map=s.ints((s.T, 2 * s.E + 1), max(s.N, s.E)),
        rowmap=output((s.T, s.E), np.int32),
        num_threads=s.below(4),
    )


OPERATORS = (
    Operator(
        name="make_row_id_map",
        valid=_valid_make,
        bad_fields={
            "num_tokens": (-1, TOO_MANY),
            "topk": (-1, TOO_MANY // 5 + 1),
            "num_experts": (0, TOO_MANY_EXPERTS),
            "num_rows": (-1, TOO_MANY),
        },
        required=("token_rows", "row_to_expert", "row_id_map"),
        aligned=("token_rows", "row_to_expert", "pad_offsets", "row_id_map"),
        fuzzed=_fuzzed,
    ),
    Operator(
        name="read_row_id_map",
        valid=_valid_read,
        bad_fields={"num_tokens": (-1,), "num_experts": (0, TOO_MANY_EXPERTS)},
        required=("row_id_map", "rowmap"),
        aligned=("pad_offsets", "row_id_map", "rowmap"),
        fuzzed=_fuzzed,
    ),
)
