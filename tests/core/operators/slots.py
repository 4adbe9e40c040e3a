# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`gather_slots` and `scatter_slots`: values of slots from values of rows, and back, with one struct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class SlotsParams(Params):
    """pmo_slots_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts num_rows"),
        (Int32s, "slot_to_row row_to_expert"),
        (Floats, "row_values slot_values"),
        (Int, "accumulate num_threads"),
    )


def slots_params(
    slot_to_row: NDArray, row_values: NDArray, slot_values: NDArray, row_to_expert: NDArray | None = None, **fields: Any
) -> SlotsParams:
    """Params of "gather_slots" and "scatter_slots"; slot_values is [T, E] when row_to_expert is given."""
    num_tokens, topk = slot_to_row.shape
    return SlotsParams(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=0 if row_to_expert is None else slot_values.shape[1],
        num_rows=len(row_values),
        slot_to_row=slot_to_row,
        row_to_expert=row_to_expert,
        row_values=row_values,
        slot_values=slot_values,
        **fields,
    )


def gather_slots(
    core: Core,
    slot_to_row: NDArray,
    row_values: NDArray,
    row_to_expert: NDArray | None = None,
    num_experts: int = 0,
    num_threads: int = 0,
) -> NDArray:
    num_tokens, topk = slot_to_row.shape
    with guarded_outputs() as output:
        slot_values = output((num_tokens, topk if row_to_expert is None else num_experts), np.float32)
        params = slots_params(slot_to_row, row_values, slot_values, row_to_expert, num_threads=num_threads)
        core.run("gather_slots", params)
    return slot_values


def scatter_slots(
    core: Core,
    slot_to_row: NDArray,
    slot_values: NDArray,
    num_rows: int,
    row_to_expert: NDArray | None = None,
    initial: NDArray | None = None,
    num_threads: int = 0,
) -> NDArray:
    """Adds to `initial` where it is given."""
    with guarded_outputs() as output:
        row_values = output(num_rows, np.float32)
        if initial is not None:
            row_values[:] = initial
        options = {"accumulate": initial is not None, "num_threads": num_threads}
        core.run("scatter_slots", slots_params(slot_to_row, row_values, slot_values, row_to_expert, **options))
    return row_values


def _valid_gather(core: Core, output: MakeOutput, s: Small) -> Params:
    slot_values = output((s.T, s.E), np.float32)
    return slots_params(s.plan.slot_to_row, np.ones(s.N, np.float32), slot_values, s.plan.row_to_expert)


def _valid_scatter(core: Core, output: MakeOutput, s: Small) -> Params:
    slot_values = np.ones((s.T, s.E), np.float32)
    return slots_params(s.plan.slot_to_row, output(s.N, np.float32), slot_values, s.plan.row_to_expert)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    return SlotsParams(
        **s.sizes("num_tokens topk"),
        num_experts=s.E if s.rng.random() < 0.5 else 0,
        num_rows=s.N,
        slot_to_row=s.ints((s.T, s.K), s.N),
        row_to_expert=s.ints((s.N,), s.E),
        row_values=output(s.N, np.float32),
        slot_values=output((s.T, max(s.K, s.E)), np.float32),
        accumulate=s.below(2),
    )


def _gather(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    plan = large.routed.plan
    values = large.probs((plan.num_rows,), 7)
    by_slot = gather_slots(core, plan.slot_to_row, values, num_threads=num_threads)
    return by_slot, gather_slots(core, plan.slot_to_row, values, plan.row_to_expert, plan.num_experts, num_threads)


def _scatter(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    plan = large.routed.plan
    values = large.probs(plan.slot_to_row.shape, 8)
    return (scatter_slots(core, plan.slot_to_row, values, plan.num_rows, num_threads=num_threads),)


_BAD_FIELDS = {
    "num_tokens": (-1,),
    "topk": (-1, TOO_MANY),
    "num_experts": (-1, TOO_MANY_EXPERTS),
    "num_rows": (-1, TOO_MANY),
}
_ARRAYS = ("slot_to_row", "row_to_expert", "row_values", "slot_values")

OPERATORS = tuple(
    Operator(
        name=name,
        valid=valid,
        bad_fields=_BAD_FIELDS,
        required=_ARRAYS,
        aligned=_ARRAYS,
        fuzzed=_fuzzed,
        work=work,
    )
    for name, valid, work in (
        ("gather_slots", _valid_gather, _gather),
        ("scatter_slots", _valid_scatter, _scatter),
    )
)
