# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`sort_chunks`: chunks of rows change their places."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import DTYPES, IDS_KINDS, Bytes, Check, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, TOO_WIDE, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small


class SortChunksParams(Params):
    """pmo_sort_chunks_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_chunks hidden"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Bytes, "split_sizes order"),
        (Floats, "probs"),
        (Bytes, "out"),
        (Floats, "probs_out"),
        (Int32s, "source_to_dest"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
        (Int, "dtype split_sizes_kind order_kind inverse checks num_threads"),
    )
    needs_cuda_workspace = True

    def before_cuda(self, core: Core, operator: str) -> None:
        if self.checks:
            report = core.function("pmo_sort_chunks_report", ctypes.c_int, ctypes.c_void_p)
            core.check(report(ctypes.byref(self)))


def sort_chunks_params(
    x: NDArray,
    split_sizes: NDArray,
    order: NDArray,
    out: NDArray | None,
    probs: NDArray | None = None,
    probs_out: NDArray | None = None,
    source_to_dest: NDArray | None = None,
    **fields: Any,
) -> SortChunksParams:
    """Params of "sort_chunks". Rows of ``x`` may lie apart; outputs that are None are not wanted."""
    num_rows, hidden = x.shape
    return SortChunksParams(
        num_rows=num_rows,
        num_chunks=len(split_sizes),
        hidden=hidden,
        x=x,
        split_sizes=split_sizes,
        order=order,
        probs=probs,
        out=out,
        probs_out=probs_out,
        source_to_dest=source_to_dest,
        dtype=DTYPES[x.dtype],
        split_sizes_kind=IDS_KINDS[split_sizes.dtype],
        order_kind=IDS_KINDS[order.dtype],
        **fields,
    )


def sort_chunks(
    core: Core,
    x: NDArray,
    split_sizes: NDArray,
    order: NDArray,
    probs: NDArray | None = None,
    *,
    odd_outputs: bool = False,
    **fields: Any,
) -> tuple[NDArray, NDArray | None, NDArray]:
    with guarded_outputs() as output:
        out = output(x.shape, x.dtype, int(odd_outputs))
        probs_out = None if probs is None else output(probs.shape, np.float32)
        source_to_dest = output(len(x), np.int32)
        params = sort_chunks_params(x, split_sizes, order, out, probs, probs_out, source_to_dest, **fields)
        core.run("sort_chunks", params)
    return out, probs_out, source_to_dest


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    return sort_chunks_params(
        s.floats,
        np.array([1, 0, 3], np.int64),
        np.array([2, 0, 1], np.int64),
        output(s.floats.shape, np.float32),
        np.ones(len(s.floats), np.float32),
        output(len(s.floats), np.float32),
        output(len(s.floats), np.int32),
        checks=Check.ALL,
    )


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    chunks = s.below(12)
    # mostly sizes that fit; the kinds are drawn apart, so the arrays are as wide as either needs
    return SortChunksParams(
        num_rows=s.N,
        num_chunks=chunks,
        hidden=s.H,
        x=s.data(s.N, s.H),
        x_row_stride=s.H,
        split_sizes=s.ints((chunks,), 2 + s.N // (chunks + 1), np.int64),
        order=s.ints((chunks,), chunks, np.int64),
        probs=s.data(1, s.N)[0],
        out=output((s.N, s.H), np.float32),
        probs_out=output(s.N, np.float32),
        source_to_dest=output(s.N, np.int32),
        **s.choices(dtype=6, split_sizes_kind=2, order_kind=2, inverse=2),
        checks=s.checks(4),
        num_threads=s.below(4),
    )


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    rows, weights = large.rows, large.weights
    sizes = np.random.default_rng(7).multinomial(len(rows) - 5, np.full(64, 1 / 64))
    order = np.random.default_rng(8).permutation(64)
    out, probs_out, source_to_dest = sort_chunks(core, rows, sizes, order, weights, num_threads=num_threads)
    assert probs_out is not None
    return out, probs_out, source_to_dest


OPERATORS = (
    Operator(
        name="sort_chunks",
        valid=_valid,
        bad_fields={
            "num_rows": (-1, TOO_MANY),
            "num_chunks": (-1, (1 << 20) + 1),
            "hidden": (-1, TOO_WIDE),
            "dtype": (-1, 6),
            "split_sizes_kind": (-1, 2),
            "order_kind": (-1, 2),
        },
        required=("x", "split_sizes", "order", "probs"),
        aligned=("split_sizes", "order", "probs", "probs_out", "source_to_dest"),
        fuzzed=_fuzzed,
        work=_work,
    ),
)
