# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs in static graphs and on devices without Triton: by the library's operators or Paddle's matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import paddle
from paddle import Tensor

from .._graphs import (
    beside,
    filled,
    float32,
    is_graph_value,
    is_on_gpu,
    ready_for_matmul,
    to_dtype,
    without_autocast,
)
from . import compiled
from .autograd import Call, Gradients, connect
from .base import GemmSpec, Validation
from .deferred import Deferral, finished, owned
from .groups import host_segments
from .layers import LayerOperators

_MOST_EXPERTS = 2**16  # limit of the operator


class MatmulBackend(LayerOperators):
    """The backend that runs a grouped GEMM on stacked matrices as one operator, which selects kernels or a matmul.

    For a list of matrices, it splits the rows by group in Python. In dygraph it then copies sizes and offsets to the
    host.
    """

    name = "paddle"
    gathers_rows = False
    takes_lists = True
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
        if not isinstance(w, Sequence) and w.shape[0] <= _MOST_EXPERTS and compiled.has_operators(x):
            with without_autocast():
                return _by_operator(x, w, weights, bias, spec)
        segments = _segments(x, len(w) if isinstance(w, Sequence) else w.shape[0], spec)
        if spec.deferral is not None:
            with without_autocast():
                return _deferred_list(x, w, weights, bias, segments, spec)
        if is_on_gpu(x):
            return _multiply(x, w, weights, bias, segments, spec.transpose)
        # Paddle has no matmul of 16-bit types on the CPU, and lacks gradients of the operators around it.
        with without_autocast():
            matrices = [float32(each) for each in w] if isinstance(w, Sequence) else float32(w)
            made = _multiply(float32(x), matrices, weights, float32(bias), segments, spec.transpose)
            return to_dtype(made, x.dtype)


def _by_operator(x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
    """Grouped GEMM with stacked matrices by the operator; bias and weights are applied group by group."""
    if not spec.is_checked:
        _check_groups(x, spec)
    sizes = _on_device(spec.m_sizes, x)
    offsets = None if spec.expert_offsets is None else _on_device(spec.expert_offsets, x)
    operands = (x, w) if x.dtype == w.dtype else (float32(x), float32(w))
    is_whole = weights is None and bias is None
    if spec.deferral is None:
        rows = compiled.grouped_product(*operands, sizes, offsets, spec.transpose, wide=not is_whole)
    else:
        rows = _connected(_DeferredProduct(*operands, sizes, offsets, spec, not is_whole), spec.deferral)
    if not is_whole:
        rows = _multiply(rows, None, weights, float32(bias), _segments(x, w.shape[0], spec), spec.transpose)
    return to_dtype(rows, x.dtype)


class _Deferred(Call):
    """A grouped GEMM whose wgrad is deferred. Its inputs are rows and the parameters."""

    function = "grouped_gemm"

    def __init__(self, x: Tensor, spec: GemmSpec) -> None:
        super().__init__(None, x, *spec.deferral.leaves)
        self.x, self.transpose, self.deferral = x, spec.transpose, spec.deferral
        self.watch(*spec.deferral.leaves)
        self.watch(*(each for each in (spec.m_sizes, spec.expert_offsets) if isinstance(each, Tensor)))


def _connected(call: _Deferred, deferral: Deferral) -> Tensor:
    return connect(call, call.x, *deferral.leaves)[0]


class _DeferredProduct(_Deferred):
    """`compiled.grouped_product`."""

    def __init__(self, x: Tensor, w: Tensor, sizes: Tensor, offsets: Tensor | None, spec: GemmSpec, wide: bool) -> None:
        super().__init__(x, spec)
        self.w, self.wide = w, wide
        self.groups = sizes, sizes if offsets is None else offsets, spec.transpose, offsets is None

    def run(self) -> tuple[Tensor, ...]:
        x, w = self.x.detach(), self.w
        del self.x, self.w
        self.save(x, w)
        return compiled.direct("grouped_product", x, w, *self.groups, self.wide, False, False)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        (x, w), d_out, groups = self.saved, owned(*gradients), self.groups
        d_x = compiled.direct("grouped_dgrad", d_out, w, *groups)[0] if self.wanted[0] else None

        def compute(_: Any) -> tuple[Tensor, ...]:
            return compiled.direct("grouped_wgrad", x, d_out, *groups)

        return finished(self, self.deferral, (d_x,), (True,), compute, (x, *groups[:2]))


class _DeferredList(_Deferred):
    """GEMMs with the matrices of a list, one by one. Rows of no group are 0. The gradients have the given dtype."""

    def __init__(self, x: Tensor, w: Sequence[Tensor], dtype: Any, segments: list[int], spec: GemmSpec) -> None:
        super().__init__(x, spec)
        self.w, self.dtype, self.segments = w, dtype, segments

    def run(self) -> tuple[Tensor, ...]:
        x, w = self.x.detach(), self.w
        del self.x, self.w
        self.save(x, *w)
        return (_multiply(x, w, None, None, self.segments, self.transpose),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        x, *w = self.saved
        d_out, segments, transpose = owned(*gradients), self.segments, self.transpose
        d_x = _multiply(d_out, w, None, None, segments, not transpose) if self.wanted[0] else None
        shapes, dtype = [each.shape for each in w], self.dtype

        def compute(_: Any) -> tuple[list[Tensor]]:
            parts = zip(_split(x, segments)[1::2], _split(d_out, segments)[1::2], shapes, strict=True)
            return ([_wgrad(rows, d_rows, transpose, shape, dtype) for rows, d_rows, shape in parts],)

        return finished(self, self.deferral, (d_x,), (True,), compute, (x,))


def _wgrad(x: Tensor, d_out: Tensor, transpose: bool, shape: list[int], dtype: Any) -> Tensor:
    """The gradient of one matrix."""
    if x.shape[0] == 0:
        return filled(shape, 0, dtype, like=x)
    first, second = (d_out, x) if transpose else (x, d_out)
    return to_dtype(paddle.matmul(first, second, transpose_x=True), dtype)


def _deferred_list(
    x: Tensor, w: Any, weights: Tensor | None, bias: Tensor | None, segments: Any, spec: GemmSpec
) -> Tensor:
    """`_multiply` with deferred gradients of the matrices."""
    matrices = w if isinstance(w, Sequence) else paddle.unbind(w)
    rows, dtype = x, matrices[0].dtype
    if not is_on_gpu(x):
        matrices, rows = [float32(each) for each in matrices], float32(x)
    made = _connected(_DeferredList(rows, matrices, dtype, segments, spec), spec.deferral)
    if weights is not None or bias is not None:
        made = _multiply(made, None, weights, float32(bias), segments, spec.transpose)
    return to_dtype(made, x.dtype)


def _knows_groups(x: Tensor, spec: GemmSpec) -> bool:
    readable = (list,) if is_graph_value(x) else (list, Tensor)  # while a graph is built, no tensor can be read
    numbers = spec.m_sizes, spec.expert_offsets
    return x.shape[0] >= 0 and all(each is None or isinstance(each, readable) for each in numbers)


def _check_groups(x: Tensor, spec: GemmSpec) -> None:
    """Raise for groups that overlap or end after the last row, if reading the sizes does not wait or is asked for."""
    waits = any(
        isinstance(each, Tensor) and not each.place.is_cpu_place() for each in (spec.m_sizes, spec.expert_offsets)
    )
    if _knows_groups(x, spec) and (not waits or spec.validation != Validation.OFF):
        host_segments(x.shape[0], spec.m_sizes, spec.expert_offsets)


def _on_device(numbers: list[int] | Tensor, x: Tensor) -> Tensor:
    if not isinstance(numbers, list):
        return beside(numbers, x) if isinstance(numbers, Tensor) else numbers
    return paddle.to_tensor(numbers, "int64", None if is_graph_value(x) else x.place)


def _segments(x: Tensor, num_experts: int, spec: GemmSpec) -> Sequence[int | Tensor]:
    """Split the rows of x: numbers of rows of no group, group 0, no group, group 1, ... no group.

    If the sizes are values of a graph, so are these numbers. The graph may not know how many sizes there are: if a
    function is traced again by bytecode, dimensions that differ between the calls are unknown, except of parameters.
    """
    if _knows_groups(x, spec):
        return host_segments(x.shape[0], spec.m_sizes, spec.expert_offsets)
    num_rows = paddle.shape(x)[:1].astype("int64")
    borders = _borders_in_graph(x, spec.m_sizes, spec.expert_offsets)
    lengths = paddle.diff(borders, prepend=paddle.zeros_like(num_rows), append=num_rows)
    return [lengths[i] for i in range(lengths.shape[0] if lengths.shape[0] >= 0 else 2 * num_experts + 1)]


def _borders_in_graph(X: Tensor, sizes: list[int] | Tensor, offsets: list[int] | Tensor | None) -> Tensor:
    """Begin and end of each group. Groups that overlap or end after X are truncated, so that they cover rows of X."""
    num_rows = paddle.shape(X)[:1].astype("int64")
    sizes = paddle.to_tensor(sizes) if isinstance(sizes, list) else sizes
    sizes = sizes.astype("int64").clip(min=0)
    if offsets is None:
        starts = paddle.cumsum(sizes) - sizes
    else:
        starts = (paddle.to_tensor(offsets) if isinstance(offsets, list) else offsets).astype("int64")[:-1].clip(min=0)
    borders = paddle.stack([starts, starts + sizes], axis=1).reshape([-1])
    return paddle.minimum(paddle.cummax(borders.clip(min=0), axis=0)[0], num_rows)


def _multiply(
    x: Tensor,
    w: Tensor | Sequence[Tensor] | None,
    weights: Tensor | None,
    bias: Tensor | None,
    segments: Sequence[int | Tensor],
    transpose: bool,
) -> Tensor:
    """Multiply the segments of groups, with zeros between them; without ``w``, ``x`` already contains the products.

    With unbind and split, the backward pass is one stack and one concat. Indexing expert by expert would add up E
    tensors of the size of all weights.
    """
    # Skip empty segments, except GEMMs that the gradients need: any one for stacked matrices, and for a list those of
    # all matrices that require a gradient.
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
    product = next(iter(results.values()))  # its dtype is that of mixed precision
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
    """Split a tensor along the first axis into parts of these lengths."""
    if not is_graph_value(x):
        return paddle.split(x, lengths, axis=0)
    if 0 <= x.shape[0] < len(lengths):
        # In a graph, Paddle rejects more parts than rows, though parts may be empty. The reshape hides the rows.
        x = x.reshape([paddle.shape(x)[0], *x.shape[1:]])
    parts = paddle.split(x, lengths, axis=0)
    # In a graph, split loses the number of columns.
    return [part.reshape([paddle.shape(part)[0], *x.shape[1:]]) if -1 in part.shape[1:] else part for part in parts]


backend = MatmulBackend()
