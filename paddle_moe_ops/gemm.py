# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products of experts: each multiplies its own rows with its own matrix.

M rows in all, K the inner and N the outer size of a matrix, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from . import _checks
from ._graphs import traceable

__all__ = ["grouped_gemm"]


@traceable
def grouped_gemm(
    X: Tensor,
    W: Tensor,
    m_sizes: Sequence[int] | Tensor,
    transpose: bool = True,
    *,
    expert_offsets: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows with the matrix of its expert: ``Y_g = X_g W_g^T``, or ``X_g W_g``.

    Rows that belong to no group (padding, and rows behind the last group) are not read and give 0. With a plan's
    buffer: ``grouped_gemm(rows, W, plan.tokens_per_expert, expert_offsets=plan.expert_offsets)``.

    Differentiable in ``X`` and ``W``: rows of no group and experts without rows get a gradient of 0. Runs on Paddle's
    matmul, group by group, with accumulation in float32; the order of additions is the matmul's. Off an NVIDIA GPU
    bfloat16 and float16 operands are widened to float32 and the product is rounded once; on one, mixed precision
    applies as to any matmul. Host synchronisation: one on a GPU for sizes or offsets that are tensors there.

    Args:
        X: [M, K] bfloat16, float16 or float32, rows in expert order.
        W: [E, N, K], or [E, K, N] without ``transpose``; dtype of ``X``.
        m_sizes: rows of each group, E ints >= 0 or an int tensor [E]. A list is part of a static graph's program;
            with a tensor one program serves all sizes.
        transpose: whether the matrices are stored transposed, as the weight of a torch Linear is.
        expert_offsets: first row of each group and the end of the last, ascending, E + 1 ints or an int tensor
            [E + 1], as `Plan.expert_offsets`. None: the groups follow each other from row 0.

    Returns:
        [M, N], dtype of ``X``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; groups that overlap or end behind row M.
    """
    name = "grouped_gemm"
    _checks.tensor(name, "X", X, _checks.SUM_DTYPES, ["M", "K"])
    _checks.flag(name, "transpose", transpose)
    # Mixed precision gives both operands one dtype.
    dtypes = _checks.SUM_DTYPES if paddle.amp.is_autocast_enabled() else (X.dtype,)
    inner = X.shape[1]
    _checks.tensor(name, "W", W, dtypes, ["E", "N", inner] if transpose else ["E", inner, "N"])
    if 0 in W.shape:
        shape = "[E, N, K]" if transpose else "[E, K, N]"
        _checks.bad_value(name, "W", f"of shape {shape} with E, K and N >= 1", list(W.shape))
    num_experts = W.shape[0]
    sizes = _row_counts(name, "m_sizes", m_sizes, num_experts)
    offsets = None if expert_offsets is None else _row_counts(name, "expert_offsets", expert_offsets, num_experts + 1)
    _checks.same_place(name, X=X, W=W)
    if isinstance(sizes, list) and (offsets is None or isinstance(offsets, list)) and X.shape[0] >= 0:
        segments = _segments(name, X.shape[0], sizes, offsets)
    else:
        segments = _segments_in_graph(X, sizes, offsets)
    on_gpu = X.place.is_gpu_place() if isinstance(X, Tensor) else paddle.device.get_device().startswith("gpu")
    if on_gpu:
        return _multiply(X, W, segments, transpose)
    # On the CPU Paddle has no matmul of narrow types, nor the gradients of what goes with it.
    with paddle.amp.auto_cast(enable=False):
        return _multiply(X.astype("float32"), W.astype("float32"), segments, transpose).astype(X.dtype)


def _row_counts(function: str, argument: str, value: Any, length: int) -> list[int] | Tensor:
    """A list of ints >= 0, or the tensor of a graph."""
    if isinstance(value, Tensor) or _checks.is_graph_value(value):
        _checks.tensor(function, argument, value, _checks.ID_DTYPES, [length])
        if _checks.is_graph_value(value):
            return value
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        _checks.bad_type(function, argument, "a list of ints or a 1-D int tensor", type(value).__name__)
    if len(value) != length:
        _checks.bad_value(function, argument, f"of length {length}", f"length {len(value)}")
    return [_checks.integer(function, f"{argument}[{i}]", item, 0) for i, item in enumerate(value)]


def _segments(function: str, num_rows: int, sizes: list[int], offsets: list[int] | None) -> list[int]:
    """The rows of X from its start: how many belong to no group, to group 0, to none, to group 1, ... to none."""
    if offsets is None:
        offsets = list(itertools.accumulate(sizes, initial=0))
        if offsets[-1] > num_rows:
            _checks.bad_value(function, "m_sizes", f"sizes of {num_rows} rows at most, those of X", sizes)
    elif offsets[-1] > num_rows:
        _checks.bad_value(function, f"expert_offsets[{len(sizes)}]", f"at most {num_rows}, the rows of X", offsets[-1])
    segments, end = [], 0
    for expert, (first, size, next_first) in enumerate(zip(offsets[:-1], sizes, offsets[1:], strict=True)):
        segments += [first - end, size]
        end = first + size
        if end > next_first:
            expected = f"at least {end}, the end of group {expert}"
            _checks.bad_value(function, f"expert_offsets[{expert + 1}]", expected, next_first)
    return [*segments, num_rows - end]


def _segments_in_graph(X: Tensor, sizes: list[int] | Tensor, offsets: list[int] | Tensor | None) -> list[Tensor]:
    """As `_segments`, as 0-D tensors. Groups that overlap or end behind X are cut, so that the rows are those of X."""
    num_rows = paddle.shape(X)[:1].astype("int64")
    sizes = paddle.to_tensor(sizes) if isinstance(sizes, list) else sizes
    sizes = sizes.astype("int64").clip(min=0)
    if offsets is None:
        starts = paddle.cumsum(sizes) - sizes
    else:
        starts = (paddle.to_tensor(offsets) if isinstance(offsets, list) else offsets).astype("int64")[:-1]
    borders = paddle.stack([starts, starts + sizes], axis=1).reshape([-1])
    borders = paddle.minimum(paddle.cummax(borders.clip(min=0), axis=0)[0], num_rows)
    segments = paddle.diff(borders, prepend=paddle.zeros([1], "int64"), append=num_rows)
    return [segments[i] for i in range(segments.shape[0])]


def _multiply(X: Tensor, W: Tensor, segments: Sequence[int | Tensor], transpose: bool) -> Tensor:
    """The products of every other segment, zeros for those between.

    With unbind and split, backward is one stack and one concat; indexing expert by expert would add up E tensors of
    the size of all weights.
    """
    # Segments that are known to be empty are left out, but for a product that is needed for its gradients.
    kept = [i for i, rows in enumerate(segments) if not (isinstance(rows, int) and rows == 0)]
    if not any(i % 2 for i in kept):
        kept = sorted([1, *kept])
    parts = dict(zip(kept, paddle.split(X, [segments[i] for i in kept], axis=0), strict=True))
    matrices = paddle.unbind(W)
    results = {i: paddle.matmul(part, matrices[i // 2], transpose_y=transpose) for i, part in parts.items() if i % 2}
    product = next(iter(results.values()))  # which has the dtype that mixed precision gives
    for i in set(kept) - set(results):
        rows = parts[i].shape[0] if parts[i].shape[0] >= 0 else paddle.shape(parts[i])[0]
        results[i] = paddle.zeros([rows, product.shape[1]], product.dtype)
    return paddle.concat([results[i] for i in kept], axis=0) if len(kept) > 1 else product
