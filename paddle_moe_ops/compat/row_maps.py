# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Maps of other packages, built from a plan, and the maps that permute rows, built from those.

Maps that are read have one slot per expert: slot e of a token is its expert e.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value
from ..backends import RowMaps, RowmapSpec, Validation, resolve
from ..routing import Plan

__all__ = [
    "as_int32",
    "check_row_id_map",
    "kept",
    "known_slots",
    "num_rows_of",
    "of_experts",
    "padding_offsets",
    "plan_to_row_id_map",
    "read_chunk_map",
    "read_index_map",
    "read_row_id_map",
    "read_rowmap",
]

_OPERATOR = "row_id_map"
_NO_ROW = 2**31 - 1


def padding_offsets(plan: Plan) -> Tensor:
    """int32 [E]: the padding rows before each expert's segment. No host synchronisation."""
    routed_before = paddle.cumsum(plan.routed_per_expert, dtype="int32") - plan.routed_per_expert
    offsets = plan.expert_offsets[:-1] - routed_before
    offsets.stop_gradient = True
    return offsets


def plan_to_row_id_map(plan: Plan, pad_offsets: Tensor | None = None) -> Tensor:
    """TransformerEngine's row_id_map int32 [T, 2E + 1] of a plan. No host synchronisation.

    Args:
        plan: the plan; of a token with more than E rows (duplicates="each") the first E are in the map.
        pad_offsets: int32 [E] to subtract, for a map that does not count padding rows.
    """
    backend = resolve(_OPERATOR, plan.token_rows)
    return backend.make_row_id_map(plan.token_rows, plan.row_to_expert, pad_offsets, plan.num_experts)


def check_row_id_map(function: str, row_id_map: Any, pad_offsets: Any, **others: Tensor | None) -> None:
    """Check a row_id_map [T, 2E + 1], the offsets [E] to it, and that all lie where the other tensors do."""
    shape = ["num_tokens", "2 * num_experts + 1"]
    _checks.tensor(function, "row_id_map", row_id_map, (paddle.int32,), shape)
    columns = row_id_map.shape[1]
    if columns % 2 == 0 or columns < 3:
        _checks.bad_value(function, "row_id_map", f"of shape [{', '.join(shape)}]", list(row_id_map.shape))
    if pad_offsets is not None:
        _checks.tensor(function, "pad_offsets", pad_offsets, _checks.ID_DTYPES, [columns // 2])
    _checks.same_place(function, **others, row_id_map=row_id_map, pad_offsets=pad_offsets)


def read_row_id_map(
    function: str,
    row_id_map: Tensor,
    num_rows: int | Tensor,
    pad_offsets: Tensor | None,
    validation: Validation,
    *,
    check_range: bool,
) -> RowMaps:
    """The maps that a row_id_map stands for, whose arguments are checked already.

    Args:
        function: name that begins an error text.
        row_id_map: int32 [T, 2E + 1].
        num_rows: N; a tensor only in a graph.
        pad_offsets: int32 or int64 [E], or None.
        validation: whether bad entries raise.
        check_range: whether rows outside [-1, N) are bad; otherwise they are dropped.
    """
    pad_offsets = None if pad_offsets is None else as_int32(pad_offsets)
    if validation > Validation.OFF:
        _check_last_column(function, row_id_map)
    checks = check_range and validation > Validation.OFF, validation > Validation.OFF
    return _read(function, row_id_map, pad_offsets, num_rows, True, *checks)


def _check_last_column(function: str, row_id_map: Tensor) -> None:
    """Check that a map counts each token's experts last, unlike a row map of `moe_permute` with as many columns."""
    if is_graph_value(row_id_map):
        return
    counts, experts = row_id_map[:, -1], row_id_map.shape[1] // 2
    is_wrong = (counts < 0) | (counts > experts)
    if bool(is_wrong.any()):
        token = int(is_wrong.astype("int32").argmax())
        expected = (
            f"a map of make_row_id_map, which counts the experts of each token in its last column, at most {experts}"
        )
        _checks.bad_value(function, "row_id_map", expected, f"{int(counts[token])} for token {token}")


def num_rows_of(tensor: Tensor) -> int | Tensor:
    """The rows of a tensor, as a tensor where a graph does not know them."""
    return tensor.shape[0] if tensor.shape[0] >= 0 else paddle.shape(tensor)[0]


def known_slots(ids: Tensor) -> int:
    """T*K of ids [T, K], which saves routing a synchronisation, or -1 if a graph does not know it."""
    return ids.shape[0] * ids.shape[1] if ids.shape[0] >= 0 else -1


def of_experts(values: Tensor, ids: Tensor) -> Tensor:
    """The value of each slot's expert [T, K], from one for each expert or more; that of expert 0 if there is none."""
    return paddle.gather(values, ids.clip(min=0).flatten()).reshape(ids.shape)


def as_int32(numbers: Tensor) -> Tensor:
    """Ids, rows or offsets as int32; those that do not fit stay out of the range of any."""
    return numbers if numbers.dtype == paddle.int32 else numbers.clip(-(2**31), 2**31 - 1).astype("int32")


def kept(is_kept: Tensor, numbers: Tensor) -> Tensor:
    """The numbers, -1 in slots that are not kept."""
    return paddle.where(is_kept, numbers, paddle.full_like(numbers, -1))


def read_index_map(
    function: str, slot_to_row: Tensor, num_rows: int | Tensor, validation: Validation, *, check_repeats: bool = True
) -> RowMaps:
    """The maps of the rows of slots, int32 [T, K]; token_rows are ascending whatever the order of the slots.

    If slots share a row and no check raises, the first of them owns the row.
    """
    checks = validation > Validation.OFF
    try:
        maps = _read(function, slot_to_row, None, num_rows, False, checks, checks and check_repeats)
    except ValueError as error:
        raise ValueError(str(error).replace(", expert ", ", slot ")) from None
    rows = paddle.where(maps.slot_to_row < 0, paddle.full_like(maps.slot_to_row, _NO_ROW), maps.slot_to_row).sort(-1)
    return maps._replace(token_rows=paddle.where(rows == _NO_ROW, paddle.full_like(rows, -1), rows))


def read_rowmap(function: str, rowmap: Tensor, num_rows: int, validation: Validation) -> RowMaps:
    """The maps of a row map of `moe_permute`, int32 [T, E], or of a column of one."""
    checks = validation > Validation.OFF
    with _checks.renaming(function, function, row_id_map="zipped_expertwise_rowmap"):
        return _read(function, rowmap, None, num_rows, False, checks, checks)


def read_chunk_map(function: str, chunk_map: Tensor, is_forward: bool, validation: Validation) -> RowMaps:
    """The maps that move row r to ``chunk_map[r]``, or, not ``is_forward``, row ``chunk_map[r]`` to r."""
    checks = validation > Validation.OFF
    try:
        forward = _read(function, chunk_map.unsqueeze(-1), None, num_rows_of(chunk_map), False, checks, checks)
    except ValueError:
        if isinstance(chunk_map, Tensor):  # the operator's message speaks of tokens and experts
            _checks.permutation(function, "chunk_map", chunk_map.numpy())
        raise
    if is_forward:
        return forward
    # With one slot per token, slots and tokens have the same numbers, and the inverse changes them for rows.
    slots, rows = forward.row_to_token.unsqueeze(-1), forward.slot_to_row.squeeze(-1)
    return forward._replace(slot_to_row=slots, token_rows=slots, row_to_token=rows, row_to_slot=rows)


def _read(
    function: str,
    rowmap: Tensor,
    pad_offsets: Tensor | None,
    num_rows: int | Tensor,
    is_row_id_map: bool,
    check_range: bool,
    check_repeats: bool,
) -> RowMaps:
    known = isinstance(num_rows, int)
    spec = RowmapSpec(is_row_id_map, num_rows if known else -1, check_range, check_repeats)
    backend = resolve(_OPERATOR, rowmap)
    with _checks.renaming("read_rowmap", function):
        return backend.read_rowmap(rowmap, pad_offsets, None if known else num_rows, spec)
