# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The grouped product by Paddle's matmul, group by group, everywhere and in graphs; differentiable itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import paddle
from paddle import Tensor

from .._graphs import filled, float32, is_graph_value, is_on_gpu, ready_for_matmul, to_dtype, without_autocast
from . import compiled
from .base import GemmSpec
from .host_checks import host_segments


class MatmulBackend:
    """Splits the rows by group. Sizes and offsets that are tensors are brought to the host, but in a graph."""

    name = "paddle"
    gathers_rows = False
    takes_lists = True
    runs_moe_mlp = False
    operators = frozenset({"grouped_gemm"})
    dtypes: ClassVar[dict[str, Any]] = {}

    def unavailable(self) -> str | None:
        return None

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        return None

    def grouped_gemm(
        self,
        x: Tensor,
        w: Tensor | Sequence[Tensor],
        weights: Tensor | None,
        bias: Tensor | None,
        spec: GemmSpec,
    ) -> Tensor:
        groups = _Groups(x, spec)
        if is_on_gpu(x):
            return _multiply(x, w, weights, bias, groups.segments(), spec.transpose)
        # On the CPU Paddle has no matmul of narrow types, nor the gradients of what goes with it.
        with without_autocast():
            rows, bias = float32(x), float32(bias)
            matrices = [float32(each) for each in w] if isinstance(w, Sequence) else float32(w)
            if not isinstance(matrices, Sequence) and _has_operator(x):
                rows, matrices = compiled.grouped_product(rows, matrices, groups.borders(), spec.transpose), None
                if weights is None and bias is None:
                    return to_dtype(rows, x.dtype)
            return to_dtype(_multiply(rows, matrices, weights, bias, groups.segments(), spec.transpose), x.dtype)


class _Groups:
    """Where the groups of a product are, in two forms; in a graph whose sizes are tensors, as tensors of it."""

    def __init__(self, x: Tensor, spec: GemmSpec) -> None:
        sizes, offsets = spec.m_sizes, spec.expert_offsets
        self._x = x
        known = x.shape[0] >= 0 and all(each is None or isinstance(each, (list, Tensor)) for each in (sizes, offsets))
        self._segments = host_segments(x.shape[0], sizes, offsets) if known else None
        self._borders = None if known else _borders_in_graph(x, sizes, offsets)

    def segments(self) -> Sequence[int | Tensor]:
        """The rows from the start of x: of no group, of group 0, of none, of group 1, ... of none."""
        if self._segments is not None:
            return self._segments
        num_rows = paddle.shape(self._x)[:1].astype("int64")
        lengths = paddle.diff(self._borders, prepend=paddle.zeros_like(num_rows), append=num_rows)
        return [lengths[i] for i in range(lengths.shape[0])]

    def borders(self) -> Tensor:
        """int64 [E, 2], the first row of each group and the one after its last."""
        borders: Any = self._borders
        if self._segments is not None:
            borders = paddle.to_tensor(list(itertools.accumulate(self._segments[:-1])), "int64", paddle.CPUPlace())
        return borders.reshape([-1, 2])


def _borders_in_graph(X: Tensor, sizes: list[int] | Tensor, offsets: list[int] | Tensor | None) -> Tensor:
    """Begin and end of each group. Groups that overlap or end after X are cut, so that the rows are those of X."""
    num_rows = paddle.shape(X)[:1].astype("int64")
    sizes = paddle.to_tensor(sizes) if isinstance(sizes, list) else sizes
    sizes = sizes.astype("int64").clip(min=0)
    if offsets is None:
        starts = paddle.cumsum(sizes) - sizes
    else:
        starts = (paddle.to_tensor(offsets) if isinstance(offsets, list) else offsets).astype("int64")[:-1]
    borders = paddle.stack([starts, starts + sizes], axis=1).reshape([-1])
    return paddle.minimum(paddle.cummax(borders.clip(min=0), axis=0)[0], num_rows)


def _has_operator(x: Tensor) -> bool:
    """Whether the compiled library multiplies rows, those in host memory, by one tensor that has all matrices.

    It writes the gradient of each matrix where it belongs. Paddle's own graph would join E of them to one.
    """
    in_host_memory = paddle.device.get_device() == "cpu" if is_graph_value(x) else x.place.is_cpu_place()
    return in_host_memory and compiled.backend.unavailable() is None


def _multiply(
    x: Tensor,
    w: Tensor | Sequence[Tensor] | None,
    weights: Tensor | None,
    bias: Tensor | None,
    segments: Sequence[int | Tensor],
    transpose: bool,
) -> Tensor:
    """The products of every other segment, zeros for those between; without ``w``, ``x`` holds the products.

    With unbind and split, backward is one stack and one concat; indexing expert by expert would add up E tensors of
    the size of all weights.
    """
    # Segments that are known to be empty are left out, but for products that are needed for their gradients: of one
    # tensor any will do, of a list those of all matrices that want one.
    matrices = w if w is None or isinstance(w, Sequence) else paddle.unbind(w)
    needed = set()
    if isinstance(w, Sequence) and paddle.is_grad_enabled():
        needed = {2 * expert + 1 for expert, matrix in enumerate(w) if not matrix.stop_gradient}
    kept = [i for i, rows in enumerate(segments) if i in needed or not (isinstance(rows, int) and rows == 0)]
    if not any(i % 2 for i in kept):
        kept = sorted([1, *kept])
    lengths = [segments[i] for i in kept]
    parts = dict(zip(kept, _split(x, lengths), strict=True))
    factors = {} if weights is None else dict(zip(kept, _split(weights, lengths), strict=True))
    results = {}
    for i, part in parts.items():
        if i % 2:
            results[i] = part if matrices is None else _product(part, matrices[i // 2], transpose)
    product = next(iter(results.values()))  # which has the dtype that mixed precision gives
    if weights is not None or bias is not None:
        addends = None if bias is None else paddle.unbind(float32(bias))
        for i, result in results.items():
            wide = float32(result)
            wide = wide if addends is None else wide + addends[i // 2]
            wide = wide if weights is None else wide * factors[i].unsqueeze(-1)
            results[i] = to_dtype(wide, product.dtype)
    for i in set(kept) - set(results):
        if w is None:
            results[i] = parts[i]
            continue
        rows = parts[i].shape[0] if parts[i].shape[0] >= 0 else paddle.shape(parts[i])[0]
        results[i] = filled([rows, product.shape[1]], 0, product.dtype, like=product)
    return paddle.concat([results[i] for i in kept], axis=0) if len(kept) > 1 else results[kept[0]]


def _product(rows: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
    return paddle.matmul(ready_for_matmul(rows, matrix), matrix, transpose_y=transpose)


def _split(x: Tensor, lengths: Sequence[int | Tensor]) -> Sequence[Tensor]:
    """Parts of these lengths along the first axis."""
    if not is_graph_value(x):
        return paddle.split(x, lengths, axis=0)
    if 0 <= x.shape[0] < len(lengths):
        # In a graph Paddle refuses more parts than rows, though parts may be empty, unless it does not know the rows.
        x = x.reshape([paddle.shape(x)[0], *x.shape[1:]])
    parts = paddle.split(x, lengths, axis=0)
    # There split forgets the columns.
    return [part.reshape([paddle.shape(part)[0], *x.shape[1:]]) if -1 in part.shape[1:] else part for part in parts]


backend = MatmulBackend()
