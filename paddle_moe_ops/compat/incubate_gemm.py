# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operator of ``paddle.incubate.nn.functional.batched_gemm``, on `grouped_gemm`."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import in_float32, public, ready_for_matmul
from ..gemm import grouped_gemm

__all__ = ["batched_gemm"]


@public("lhs", "rhs")
def batched_gemm(
    lhs: Tensor, rhs: Tensor, batch_sizes: Any, trans_lhs: bool = False, trans_rhs: bool = False
) -> Tensor:
    """Multiply each group of rows with its own matrix, or two groups of rows with each other.

    Differentiable in ``lhs`` and ``rhs``. Deterministic. No host synchronisation. Raises TypeError or ValueError for
    arguments of the wrong type, dtype, value or shape.

    Args:
        lhs: [M, D] bfloat16, float16 or float32, rows by group.
        rhs: [E, D, N]; [E, N, D] with ``trans_rhs``; [M, N], rows by group, with ``trans_lhs``. Dtype of ``lhs``.
        batch_sizes: list of the rows of each of the E groups. Rows after the last group give 0.
        trans_lhs: whether each group of ``lhs`` is transposed, as for the gradient of matrices. Not with ``trans_rhs``.
        trans_rhs: whether the matrices are stored transposed.

    Returns:
        [M, N], or [E, D, N] with ``trans_lhs``; dtype of ``lhs``.
    """
    name = "batched_gemm"
    _checks.flag(name, "trans_lhs", trans_lhs)
    _checks.flag(name, "trans_rhs", trans_rhs)
    given = _checks.listed(name, "batch_sizes", batch_sizes, "a list of ints or a 1-D int array")
    sizes = [_checks.integer(name, f"batch_sizes[{i}]", size, 0) for i, size in enumerate(given)]
    if not trans_lhs:
        with _checks.renaming("grouped_gemm", name, X="lhs", W="rhs", m_sizes="batch_sizes"):
            return grouped_gemm(lhs, rhs, sizes, transpose=trans_rhs)
    if trans_rhs:
        _checks.bad_value(name, "trans_rhs", "False with trans_lhs", True)
    _checks.tensor(name, "lhs", lhs, _checks.SUM_DTYPES, ["M", "D"])
    _checks.tensor(name, "rhs", rhs, (lhs.dtype,), [lhs.shape[0], "N"])
    _checks.same_place(name, lhs=lhs, rhs=rhs)
    if not sizes or sum(sizes) > lhs.shape[0] >= 0:
        _checks.bad_value(name, "batch_sizes", f"at least one size, adding up to at most {lhs.shape[0]} rows", sizes)

    def products(left: Tensor, right: Tensor) -> Tensor:
        found, start = [], 0
        for size in sizes:
            own, others = left[start : start + size], right[start : start + size]
            found.append(paddle.matmul(ready_for_matmul(own, others), others, transpose_x=True))
            start += size
        return paddle.stack(found)

    return in_float32(products, lhs, rhs)
