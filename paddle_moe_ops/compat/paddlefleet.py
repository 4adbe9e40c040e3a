# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of PaddleFleet's expert layers that follow the row map of `moe_permute`, on every device.

Names, arguments and results are those of ``paddlefleet.extensions.ops``. T tokens, H hidden size, E experts, K slots of
a token, N rows of the permuted buffer. All take tensors of dygraph, are deterministic, and raise TypeError or
ValueError for arguments of the wrong type, dtype, value or shape. None is differentiable, as there: the layers' nodes
compute the gradients. Entries of row maps and ids that are out of range raise ValueError on a CPU and, under
PADDLE_MOE_OPS_VALIDATE=1, on a GPU; otherwise they count as -1.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import filled, is_graph_value, public, to_dtype
from ..backends import MoeUnpermuteSpec, Validation, direct, resolve
from ..functional import movable_scale
from .row_maps import read_rowmap

__all__ = [
    "merge_subbatch_cast",
    "tokens_unzip_gather",
    "tokens_unzip_slice",
    "tokens_zip_prob",
    "tokens_zip_prob_seq_subbatch",
    "tokens_zip_unique_add",
    "tokens_zip_unique_add_subbatch",
]

_SCALE_DTYPES = (paddle.float32, paddle.int32)
_VALUE_DTYPES = (paddle.float32, paddle.bfloat16)
_GROUP = 128  # columns of a scale


@public()
def tokens_unzip_gather(
    x: Tensor,
    x_scale: Tensor | None,
    zipped_expertwise_rowmap: Tensor,
    expert_id: int,
    tokens_per_expert: Any,
    padding_multiplex: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy tokens to the rows of one expert, those of `moe_permute` with ``do_gather=False``.

    Bit-exact copies. Host synchronisation: on a GPU to read ``tokens_per_expert`` if it is a tensor or has tensors, and
    to check the map under validation.

    Args:
        x: [T, H] bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; any H >= 1.
        x_scale: float32 or int32 [T, S], or None.
        zipped_expertwise_rowmap: int32 [T, E], the row of each pair, -1 for none.
        expert_id: the expert e.
        tokens_per_expert: rows n of each of the E experts; a list of ints, of int tensors with one element, or a 1-D
            int array or tensor. A count may include the padding.
        padding_multiplex: the padding alignment of the map in rows.

    Returns:
        rows [P, H] of the expert with P = n rounded up to ``padding_multiplex``; their scales [P, S], or float32
        [0, ceil(H / 128)] without ``x_scale``; int64 [n], the token of each row. Rows and scales of padding are 0. A
        row that no token has, as in a static buffer that was too small, is padding with token -1.
    """
    name = "tokens_unzip_gather"
    _dygraph(name, x=x, zipped_expertwise_rowmap=zipped_expertwise_rowmap)
    _checks.rows(name, "x", x, _checks.ROW_DTYPES, "num_tokens")
    num_tokens, hidden = x.shape
    if x_scale is not None:
        _checks.tensor(name, "x_scale", x_scale, _SCALE_DTYPES, [num_tokens, "num_scales"])
    num_experts = _rowmap(name, zipped_expertwise_rowmap, num_tokens)
    _checks.same_place(name, x=x, x_scale=x_scale, zipped_expertwise_rowmap=zipped_expertwise_rowmap)
    expert = _checks.integer(name, "expert_id", expert_id, 0, num_experts - 1)
    alignment = _checks.integer(name, "padding_multiplex", padding_multiplex, 1)
    counts = _counts(name, tokens_per_expert, num_experts)
    padded = [-(-count // alignment) * alignment for count in counts]
    start, count = sum(padded[:expert]), counts[expert]
    validation = _checks.validation(name, None, x)
    column = zipped_expertwise_rowmap[:, expert : expert + 1]
    places = paddle.where(column < 0, column, column - start)
    if validation > Validation.OFF:
        _check_places(name, zipped_expertwise_rowmap, (column >= 0) & ((places < 0) | (places >= count)), counts)
    places = paddle.where(places < count, places, paddle.full_like(places, -1))
    maps = read_rowmap(name, places, padded[expert], validation)
    rows, scales = resolve("permute", x).permute(x, movable_scale(x_scale), maps, "all")
    if x_scale is None:
        scales = filled([0, -(-hidden // _GROUP)], 0.0, "float32", x)
    return rows, scales, maps.row_to_token[:count].astype("int64")


@public()
def tokens_unzip_slice(
    x: Tensor,
    zipped_expertwise_rowmap: Tensor,
    num_experts: int,
    total_unzipped_rows: int,
    start_idx: int,
    end_idx: int,
) -> Tensor:
    """List the tokens of the rows [start_idx, end_idx).

    No host synchronisation, except under validation on a GPU.

    Args:
        x: [T, H] of any dtype, of which only T is used.
        zipped_expertwise_rowmap: int32 [T, E], the row of each pair, -1 for none.
        num_experts: E.
        total_unzipped_rows: N.
        start_idx: the first row.
        end_idx: the end of the rows; it may be beyond N.

    Returns:
        int64 [N]: first the token of each row of the range, -1 for padding; then -1 in all that is left.
    """
    name = "tokens_unzip_slice"
    _dygraph(name, x=x, zipped_expertwise_rowmap=zipped_expertwise_rowmap)
    _checks.tensor(name, "x", x, (*_checks.ROW_DTYPES, *_checks.ID_DTYPES), ["num_tokens", "hidden"])
    num_experts = _checks.integer(name, "num_experts", num_experts, 1, _checks.MAX_EXPERTS)
    _checks.tensor(
        name, "zipped_expertwise_rowmap", zipped_expertwise_rowmap, (paddle.int32,), [x.shape[0], num_experts]
    )
    _checks.same_place(name, x=x, zipped_expertwise_rowmap=zipped_expertwise_rowmap)
    num_rows = _checks.integer(name, "total_unzipped_rows", total_unzipped_rows, 0)
    start = _checks.integer(name, "start_idx", start_idx, 0)
    end = _checks.integer(name, "end_idx", end_idx, 0)
    maps = read_rowmap(name, zipped_expertwise_rowmap, num_rows, _checks.validation(name, None, x))
    tokens = maps.row_to_token[min(start, num_rows) : max(min(end, num_rows), min(start, num_rows))]
    rest = filled([num_rows - tokens.shape[0]], -1, "int32", tokens)
    return paddle.concat([tokens, rest]).astype("int64")


@public()
def tokens_zip_unique_add(x_zipped: Tensor, x_unzipped: Tensor, idx_unzipped: Tensor, zipped_rows: int) -> Tensor:
    """Add rows to their tokens, in place: ``x_zipped[idx_unzipped[i]] += x_unzipped[i]``.

    In the dtype of ``x_zipped``, to which the rows are cast first; one rounding for each addition. Rows are added in
    ascending order if tokens repeat: the same bits on every device. No host synchronisation, except under validation on
    a GPU.

    Args:
        x_zipped: [T, H] float32 or bfloat16, written in place; [0, H] stands for zeros.
        x_unzipped: [N, H] of the dtype of ``x_zipped``, or bfloat16.
        idx_unzipped: int64 or int32 [n], n <= N, the token of each row, negative for none. Rows from n on are padding.
        zipped_rows: T. If it is not positive, ``x_zipped`` is returned as it is.

    Returns:
        ``x_zipped``, or new sums [T, H] if it has no rows. Without a gradient.
    """
    name = "tokens_zip_unique_add"
    _dygraph(name, x_zipped=x_zipped, x_unzipped=x_unzipped, idx_unzipped=idx_unzipped)
    rows = _checks.integer(name, "zipped_rows", zipped_rows, -(2**31))
    _checks.rows(name, "x_zipped", x_zipped, _VALUE_DTYPES, "num_tokens")
    _check_addends(name, x_zipped, "x_zipped", x_unzipped, idx_unzipped, rows)
    if rows <= 0:
        return x_zipped
    if x_zipped.shape[0] == 0:
        x_zipped = filled([rows, x_zipped.shape[1]], 0.0, x_zipped.dtype, x_zipped)
    elif x_zipped.shape[0] != rows:
        _checks.bad_value(name, "x_zipped", f"of {rows} rows, as zipped_rows says, or of none", list(x_zipped.shape))
    _add([x_zipped], rows, x_unzipped, idx_unzipped)
    return x_zipped


@public()
def tokens_zip_unique_add_subbatch(
    x_zipped: list[Tensor], x_unzipped: Tensor, idx_unzipped: Tensor, zipped_rows: int, subbatch_rows: int
) -> list[Tensor]:
    """Add rows to their tokens as `tokens_zip_unique_add` does, where the tokens are in several tensors.

    Args:
        x_zipped: tensors of ``subbatch_rows`` tokens each, the last with the rest, written in place; or one [0, H].
        x_unzipped: as in `tokens_zip_unique_add`.
        idx_unzipped: as in `tokens_zip_unique_add`.
        zipped_rows: T, the tokens of all tensors. If it is not positive, ``x_zipped`` is returned as it is.
        subbatch_rows: tokens of a tensor; all of them if it is not positive.

    Returns:
        the tensors of ``x_zipped``, or new ones for one without rows. Without a gradient.
    """
    name = "tokens_zip_unique_add_subbatch"
    pieces = list(_tensors(name, "x_zipped", x_zipped))
    _dygraph(name, x_unzipped=x_unzipped, idx_unzipped=idx_unzipped)
    rows = _checks.integer(name, "zipped_rows", zipped_rows, -(2**31))
    size = _checks.integer(name, "subbatch_rows", subbatch_rows, -(2**31))
    first = _checks.rows(name, "x_zipped[0]", pieces[0], _VALUE_DTYPES, "num_tokens")
    _check_addends(name, first, "x_zipped[0]", x_unzipped, idx_unzipped, rows)
    if rows <= 0:
        return pieces
    size = min(size, rows) if size > 0 else rows
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    if len(pieces) == 1 and first.shape[0] == 0:
        pieces = [filled([count, first.shape[1]], 0.0, first.dtype, first) for count in sizes]
    if len(pieces) != len(sizes):
        expected = f"a list of {len(sizes)} tensors, {rows} tokens in parts of {size}"
        _checks.bad_value(name, "x_zipped", expected, f"{len(pieces)} tensors")
    for number, (piece, count) in enumerate(zip(pieces, sizes, strict=True)):
        argument = f"x_zipped[{number}]"
        _checks.tensor(name, argument, piece, (first.dtype,), [count, first.shape[1]])
        _checks.same_place(name, x_unzipped=x_unzipped, **{argument: piece})
    _add(pieces, size, x_unzipped, idx_unzipped)
    return pieces


@public("x")
def merge_subbatch_cast(x: Tensor | list[Tensor], dtype: Any) -> Tensor:
    """Join the rows of several tensors, and cast them.

    A single tensor, in a list or not, is only cast, and that is differentiable. No host synchronisation.

    Args:
        x: tensors [..., H] float32 or bfloat16, all but the last with equally many rows and the last with at most as
            many; or one tensor.
        dtype: float32 or bfloat16, as a paddle dtype or its name.

    Returns:
        the rows of all tensors in that dtype; one tensor of that dtype is returned as it is.
    """
    name = "merge_subbatch_cast"
    dtype = _checks.dtype_of_result(name, "dtype", dtype, _VALUE_DTYPES)
    is_one = isinstance(x, Tensor) or is_graph_value(x)
    pieces: list[Tensor] = [x] if is_one else list(_tensors(name, "x", x))
    for number, piece in enumerate(pieces):
        _dygraph(name, x=piece)
        argument = "x" if len(pieces) == 1 else f"x[{number}]"
        rows = "rows" if number == 0 or number == len(pieces) - 1 else pieces[0].shape[0]
        dtypes = _VALUE_DTYPES if number == 0 else (pieces[0].dtype,)
        _checks.tensor(name, argument, piece, dtypes, [rows, *pieces[0].shape[1:]])
        _checks.same_place(name, **{"x[0]": pieces[0], argument: piece})
    if len(pieces) == 1:
        return to_dtype(pieces[0], dtype)
    if pieces[-1].shape[0] > pieces[0].shape[0]:
        expected = f"of at most {pieces[0].shape[0]} rows, as x[0]"
        _checks.bad_value(name, f"x[{len(pieces) - 1}]", expected, list(pieces[-1].shape))
    return to_dtype(paddle.concat([piece.detach() for piece in pieces]), dtype)


@public()
def tokens_zip_prob(
    unzipped_prob: list[Tensor], zipped_expertwise_rowmap: Tensor, dispatched_indices: Tensor
) -> Tensor:
    """Gather the values of each slot from those of the experts' rows, the gradients of probabilities for instance.

    No host synchronisation, except under validation on a GPU.

    Args:
        unzipped_prob: for each of the E experts the values of its rows, padding included, float32 or bfloat16 [n_e] or
            [n_e, 1].
        zipped_expertwise_rowmap: int32 [T, E], the row of each pair, -1 for none.
        dispatched_indices: int32 or int64 [T, K] experts of the slots, -1 for none.

    Returns:
        [T, K] in the dtype of the values; 0 for slots without a row.
    """
    name = "tokens_zip_prob"
    values = _tensors(name, "unzipped_prob", unzipped_prob)
    num_experts = _rowmap(name, zipped_expertwise_rowmap, "num_tokens")
    if len(values) != num_experts:
        expected = f"a list of {num_experts} tensors, one for each expert of zipped_expertwise_rowmap"
        _checks.bad_value(name, "unzipped_prob", expected, f"{len(values)} tensors")
    return _slot_values(name, values, zipped_expertwise_rowmap, dispatched_indices)


@public()
def tokens_zip_prob_seq_subbatch(
    unzipped_prob: list[Tensor], zipped_expertwise_rowmap: Tensor, dispatched_indices: Tensor, subbatch_rows: int
) -> Tensor:
    """Gather the values of each slot as `tokens_zip_prob` does, from parts of equally many rows.

    Args:
        unzipped_prob: the values of all rows in parts of ``subbatch_rows``, the last with the rest.
        zipped_expertwise_rowmap: as in `tokens_zip_prob`.
        dispatched_indices: as in `tokens_zip_prob`.
        subbatch_rows: rows of a part.

    Returns:
        [T, K] as in `tokens_zip_prob`.
    """
    name = "tokens_zip_prob_seq_subbatch"
    values = _tensors(name, "unzipped_prob", unzipped_prob)
    size = _checks.integer(name, "subbatch_rows", subbatch_rows, 1)
    _rowmap(name, zipped_expertwise_rowmap, "num_tokens")
    for number, part in enumerate(values):
        is_last = number == len(values) - 1
        given = part.shape[0] if part.ndim else 0
        if given > size or (given < size and not is_last):
            expected = f"of {'at most ' if is_last else ''}{size} values, as subbatch_rows says"
            _checks.bad_value(name, f"unzipped_prob[{number}]", expected, list(part.shape))
    return _slot_values(name, values, zipped_expertwise_rowmap, dispatched_indices)


def _dygraph(function: str, **tensors: Any) -> None:
    """Refuse values of a static graph."""
    for argument, value in tensors.items():
        if is_graph_value(value):
            _checks.bad_type(function, argument, "a tensor of dygraph", "a value of a static graph")


def _tensors(function: str, argument: str, value: Any) -> list[Tensor] | tuple[Tensor, ...]:
    """Check a list of tensors of dygraph with at least one."""
    tensors = _checks.listed(function, argument, value, "a list of tensors")
    if not tensors:
        _checks.bad_value(function, argument, "a list with at least one tensor", tensors)
    for number, each in enumerate(tensors):
        _dygraph(function, **{f"{argument}[{number}]": each})
        _checks.instance(function, f"{argument}[{number}]", each, Tensor, "a paddle.Tensor")
    return tensors


def _rowmap(function: str, value: Any, num_tokens: int | str) -> int:
    """Check a row map; E."""
    _dygraph(function, zipped_expertwise_rowmap=value)
    _checks.tensor(function, "zipped_expertwise_rowmap", value, (paddle.int32,), [num_tokens, "num_experts"])
    if value.shape[1] == 0:
        expected = f"of shape [{num_tokens}, num_experts] with num_experts >= 1"
        _checks.bad_value(function, "zipped_expertwise_rowmap", expected, list(value.shape))
    return value.shape[1]


def _counts(function: str, value: Any, num_experts: int) -> list[int]:
    """Check the rows of each expert; integers of the host."""
    if value is None:
        _checks.bad_type(function, "tokens_per_expert", "a list of ints", "NoneType")
    given, tensor = _checks.counts(function, value, num_experts, has_static_buffer=False)
    numbers = given if tensor is None else tensor.tolist()
    return [_checks.integer(function, f"tokens_per_expert[{i}]", number, 0) for i, number in enumerate(numbers or ())]


def _check_places(function: str, rowmap: Tensor, is_outside: Tensor, counts: list[int]) -> None:
    """Raise if a row map has rows outside of the segment that the counts give its expert."""
    if bool(is_outside.any()):
        true_counts = (rowmap >= 0).astype("int32").sum(0).tolist()
        expected = f"the rows of each expert in zipped_expertwise_rowmap, {true_counts}"
        _checks.bad_value(function, "tokens_per_expert", expected, f"{counts}, or padding_multiplex is not the map's")


def _check_addends(function: str, zipped: Tensor, argument: str, rows: Tensor, index: Tensor, num_tokens: int) -> None:
    """Check rows that are to be added, and their tokens."""
    dtypes = (paddle.bfloat16,) if zipped.dtype == paddle.bfloat16 else _VALUE_DTYPES
    _checks.tensor(function, "x_unzipped", rows, dtypes, ["num_rows", zipped.shape[1]])
    _checks.tensor(function, "idx_unzipped", index, _checks.ID_DTYPES, ["n"])
    _checks.same_place(function, **{argument: zipped}, x_unzipped=rows, idx_unzipped=index)
    if index.shape[0] > rows.shape[0]:
        expected = f"of at most {rows.shape[0]} tokens, the rows of x_unzipped"
        _checks.bad_value(function, "idx_unzipped", expected, index.shape[0])
    if num_tokens > 0 and _checks.validation(function, None, index) > Validation.OFF:
        largest = index.numpy().max(initial=-1)
        if largest >= num_tokens:
            expected = f"of tokens below {num_tokens}, as zipped_rows says"
            _checks.bad_value(function, "idx_unzipped", expected, int(largest))


def _add(pieces: list[Tensor], size: int, rows: Tensor, index: Tensor) -> None:
    """Add rows to tokens that are in pieces of a size, in place."""
    targets = [piece if piece.is_contiguous() else piece.clone() for piece in pieces]
    direct("index_add", targets, rows, index, size)
    for piece, target in zip(pieces, targets, strict=True):
        if target is piece:
            piece._bump_inplace_version()
        else:
            paddle.assign(target, piece)


def _slot_values(function: str, parts: Any, rowmap: Tensor, ids: Tensor) -> Tensor:
    """The values of the rows of slots; all but the parts and ids are checked."""
    dtype = parts[0].dtype if parts[0].dtype in _VALUE_DTYPES else paddle.float32
    for number, part in enumerate(parts):
        argument = f"unzipped_prob[{number}]"
        shape: list[int | str] = ["n", 1] if part.ndim == 2 else ["n"]
        _checks.tensor(function, argument, part, _VALUE_DTYPES if number == 0 else (dtype,), shape, "[n] or [n, 1]")
        _checks.same_place(function, zipped_expertwise_rowmap=rowmap, **{argument: part})
    _dygraph(function, dispatched_indices=ids)
    _checks.tensor(function, "dispatched_indices", ids, _checks.ID_DTYPES, [rowmap.shape[0], "topk"])
    _checks.same_place(function, zipped_expertwise_rowmap=rowmap, dispatched_indices=ids)
    values = paddle.concat([part.flatten() for part in parts])
    if dtype == paddle.bfloat16:  # moved as integers: a cast of NaN may change its bits
        values = values.view("int16")
    rows = values.astype("float32")
    spec = MoeUnpermuteSpec(rowmap.shape[1], False, True, _checks.validation(function, None, rowmap))
    backend = resolve("moe_unpermute", rows)
    with _checks.renaming("moe_unpermute", function, expert_routemap_topk="dispatched_indices"):
        _, found = backend.moe_unpermute(rows.unsqueeze(-1), rowmap, ids, rows, spec)
    return found if dtype == paddle.float32 else found.astype("int16").view(dtype)
